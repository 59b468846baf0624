"""Print the built site as PDF with Chromium: `python book/pdf.py` after `make site` and a `singlehtml` build.

Writes `gradient-inversion.pdf` and one file a chapter. What is folded away on a page is shown, but for an audit's long
lists of layers. Links lead to the site's address where `_config.yml` has one; other links between pages are left out,
as they would lead to the folder of whoever printed it.
"""

import argparse
import pathlib
import shutil
import sys

import yaml
from playwright.sync_api import Page, sync_playwright

ROOT = pathlib.Path(__file__).parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome")
SCALE = 0.85  # text of the site as one is used to it on paper
WIDTH = round(703 / SCALE)  # pixels between the margins of A4, for what measures itself before it is printed
PAPER = {"format": "A4", "scale": SCALE, "margin": {"top": "15mm", "bottom": "16mm", "left": "12mm", "right": "12mm"}}
FOOTER = (
    "<div style='font-size: 8px; width: 100%; text-align: center'>"
    "<span class='pageNumber'></span> / <span class='totalPages'></span></div>"
)
STILL = "*, ::before, ::after { animation: none !important; transition: none !important; }"
SHOW_ALL = """() => {
    document.documentElement.dataset.theme = "light";
    document.querySelectorAll("details:not(.audit *)").forEach((box) => { box.open = true; }); // long lists of layers
    document.querySelectorAll(".toggle-hidden").forEach((box) => box.classList.remove("toggle-hidden"));
    document.querySelectorAll("img[loading]").forEach((picture) => picture.removeAttribute("loading"));
    const contents = document.querySelector("#jb-print-toc"); // of the whole book, behind its first page
    const whole = contents && document.querySelector(".toctree-wrapper section");
    if (whole) document.querySelector("article section section").before(contents);
}"""
# in the whole book an id that chapters share, such as that of a citation, leads to the first chapter only
LEAD_LINKS = """([folder, address]) => {
    const page = location.href.split("#")[0];
    for (const link of [...document.links]) {
        if (link.protocol !== "file:") continue;
        if (link.href.split("#")[0] === page) {
            const id = CSS.escape(decodeURIComponent(link.hash.slice(1)));
            if (!id || document.querySelectorAll(`[id="${id}"]`).length !== 1) link.removeAttribute("href");
        } else if (address && link.href.startsWith(folder)) {
            link.href = address + link.href.slice(folder.length);
        } else {
            link.removeAttribute("href");
        }
    }
}"""
TYPESET = "() => Promise.resolve(window.MathJax?.startup?.promise).then(() => document.fonts.ready).then(() => true)"


def find_chromium(playwright) -> str | None:
    """The browser of the system, else the one that playwright has installed, else None."""
    installed = playwright.chromium.executable_path
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (installed if pathlib.Path(installed).exists() else None)


def prepare(page: Page, source: pathlib.Path, folder: pathlib.Path, address: str = "") -> None:
    """Open a page of the site in `folder` as it is to be printed."""
    page.set_viewport_size({"width": WIDTH, "height": 1000})
    page.emulate_media(media="print", color_scheme="light", reduced_motion="reduce")
    page.goto(source.resolve().as_uri(), wait_until="load")
    page.add_style_tag(content=STILL)
    page.evaluate(SHOW_ALL)
    page.evaluate(TYPESET)
    page.evaluate(LEAD_LINKS, [f"{folder.resolve().as_uri()}/", address])
    page.wait_for_timeout(600)  # icons are drawn after the page has loaded


def print_pages(jobs: dict[pathlib.Path, pathlib.Path], folder: pathlib.Path, address: str = "") -> None:
    """Print each page of the site in `folder`, as source and target say. Raises OSError where no browser is found."""
    with sync_playwright() as playwright:
        chromium = find_chromium(playwright)
        if chromium is None:
            raise OSError(f"printing needs Chromium: install one, so that {' or '.join(NAMES)} is on your PATH")
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        for source, target in jobs.items():
            page = browser.new_page()
            page.set_default_timeout(600_000)  # the whole book has thousands of formulas
            prepare(page, source, folder, address)
            target.parent.mkdir(parents=True, exist_ok=True)
            page.pdf(
                path=target,
                tagged=True,
                outline=True,
                print_background=True,
                display_header_footer=True,
                header_template="<span></span>",
                footer_template=FOOTER,
                **PAPER,
            )
            page.close()
        browser.close()


def whole_book(folder: pathlib.Path, root: str) -> pathlib.Path:
    """The one page of a `singlehtml` build, at the top of the folder, where its paths to pictures and styles fit."""
    page = folder / "book-in-one.html"
    page.write_text((folder / f"{root}.html").read_text().replace(f'href="{root}.html#', 'href="#'))
    return page


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print the built book, and each chapter, as PDF.")
    parser.add_argument(
        "--built", type=pathlib.Path, default=ROOT / "_build", help="has the folders html and singlehtml"
    )
    parser.add_argument("--out", type=pathlib.Path, help="where the PDF files go (default: the folder pdf beside them)")
    options = parser.parse_args(arguments)
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    address = yaml.safe_load((ROOT / "_config.yml").read_text())["html"].get("baseurl", "")
    files = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    out, site, one = options.out or options.built / "pdf", options.built / "html", options.built / "singlehtml"
    try:
        print_pages({whole_book(one, toc["root"]): out / "gradient-inversion.pdf"}, one, address)
        print_pages(
            {
                site / f"{file}.html": out / f"{pathlib.Path(file).name}.pdf"
                for file in files
                if file.startswith("notebooks/")
            },
            site,
            address,
        )
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"The PDF files are in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
