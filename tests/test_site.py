"""The built site as its readers meet it: built with warnings as errors, then opened in a real browser.

The build runs once. The checks in a browser are skipped where no Chromium is installed.
"""

import functools
import http.server
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup
from docutils.nodes import make_id
from fontTools.ttLib import TTFont
from PIL import Image

from gradinv import claims

ROOT = pathlib.Path(__file__).parent.parent
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
PAGES = [TOC["root"]] + [chapter["file"] for part in TOC["parts"] for chapter in part["chapters"]]
CHAPTERS = [page for page in PAGES if page.startswith("notebooks/")]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH")

PHONE, DESKTOP = 375, 1280
VISITS = [("light", DESKTOP), ("dark", PHONE)]
GENERATED = ["404", "search", "genindex"]
LARGEST = 2_500_000  # bytes that a page loads, unpacked
STANDARDS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
QUICK = {"preload": False, "resultTypes": ["violations"]}
STRUCTURE = {**QUICK, "runOnly": STANDARDS, "rules": {"color-contrast": {"enabled": False}}}
CONTRAST = {**QUICK, "runOnly": ["color-contrast"]}
# Contrast takes most of the time. Texts of the same size and colour on the same grounds have the same, so of each
# kind two are enough.
MARK_SAMPLES = """() => {
    const seen = {};
    const look = (box) => {
        const style = getComputedStyle(box);
        return [style.backgroundColor, style.backgroundImage, style.opacity].join();
    };
    const grounds = new Map();
    const ground = (box) => {
        if (!box) return "";
        if (!grounds.has(box)) grounds.set(box, `${look(box)} ${ground(box.parentElement)}`);
        return grounds.get(box);
    };
    for (const box of document.querySelectorAll("body *")) {
        if (![...box.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim())) continue;
        const style = getComputedStyle(box);
        const kind = [style.color, style.fontSize, style.fontWeight, style.visibility, ground(box)].join();
        seen[kind] = (seen[kind] ?? 0) + 1;
        box.toggleAttribute("data-sample", seen[kind] <= 2);
    }
}"""


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built pages."""
    out = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [
            sys.executable,
            "-c",
            "from jupyter_book.cli.main import main; main()",
            "build",
            str(ROOT),
            "--path-output",
            str(out),
            "-W",
            "-n",
            "--keep-going",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert build.returncode == 0, (build.stdout + build.stderr)[-8000:]
    return out / "_build" / "html"


@pytest.fixture(scope="session")
def soups(site):
    """Every built page, parsed, by its path in the site."""
    return {
        path.relative_to(site).as_posix(): BeautifulSoup(path.read_text(), "html.parser")
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts
    }


def test_every_page_is_built(soups):
    assert {f"{page}.html" for page in [*PAGES, *GENERATED, "index"]} == set(soups)


def test_front_door_leads_to_the_first_page(soups):
    assert f"{TOC['root']}.html" in str(soups["index.html"])


def test_no_page_loads_anything_from_outside(soups):
    """Links that a reader follows may lead outside; what a page loads by itself may not."""
    outside = [
        (name, str(tag)[:200])
        for name, soup in soups.items()
        for tag in soup.find_all(True)
        for attribute in ("src", "href", "data", "poster", "srcset")
        if tag.name != "a"
        and "canonical" not in tag.get("rel", [])
        and re.match(r"(https?:)?//", tag.get(attribute, "").strip())
    ]
    inline = [
        (name, found)
        for name, soup in soups.items()
        for script in soup.find_all("script")
        for found in re.findall(r"(?:unpkg|jsdelivr|cdnjs|googleapis)[^\"' ]*", script.text)
    ]
    assert outside + inline == []


def test_links_and_anchors_resolve(site, soups):
    anchors = {
        name: {tag[key] for tag in soup.find_all(True) for key in ("id", "name") if tag.get(key)}
        for name, soup in soups.items()
    }
    broken = []
    for name, soup in soups.items():
        for link in soup.find_all(["a", "link", "script", "img"]):
            url = link.get("href") or link.get("src") or ""
            if urlsplit(url).scheme or url.startswith("//") or not url:
                continue
            target = urlsplit(urljoin(name, url))
            path, anchor = unquote(target.path).removeprefix("/"), unquote(target.fragment)
            if not (site / path).is_file():
                broken.append((name, url, "no such file"))
            elif anchor and path in anchors and anchor not in anchors[path] and link.get("href") != "#":
                broken.append((name, url, "no such anchor"))
    assert broken == []


def test_a_wrong_address_leads_back(soups):
    """Any folder may have been asked for, so that what the page for wrong addresses names starts at the root."""
    page = soups["404.html"]
    named = [tag.get("href") or tag["src"] for tag in page.select("article a[href], link[href], script[src]")]
    assert "Page not found" in page.select_one("article h1").text and "/index.html" in named
    assert all(url.startswith(("/", "#")) for url in named)


def test_pages_have_an_icon_and_a_card(site, soups):
    for page in PAGES:
        icon = soups[f"{page}.html"].find("link", rel="icon")
        card = soups[f"{page}.html"].find("meta", property="og:image")
        assert (site / urljoin(f"{page}.html", icon["href"])).is_file()
        assert card["content"].endswith("_static/card.png")
        assert len(soups[f"{page}.html"].find("meta", property="og:description")["content"]) > 40
    picture = site / "_static/card.png"
    assert picture.stat().st_size < 200_000 and Image.open(picture).size == (1200, 630)


@pytest.mark.parametrize("page", PAGES)
def test_pictures_say_what_they_show(soups, page):
    for picture in soups[f"{page}.html"].select("article img"):
        alt = picture.get("alt", "")
        caption = picture.find_parent("figure") and picture.find_parent("figure").find("figcaption")
        assert len(alt) > 20, f"{picture.get('src')} has the alt text {alt!r}"
        assert not caption or alt not in caption.get_text(), f"the alt text repeats the caption: {alt!r}"


def test_headings_and_the_tab_key_follow_the_text(soups):
    """No heading jumps a level, and nothing that takes the focus is taken out of its place."""
    for name, soup in soups.items():
        levels = [int(heading.name[1]) for heading in soup.select("article :is(h1, h2, h3, h4, h5, h6)")]
        if name != "index.html":  # which only leads on
            assert (levels[:1] == [1] and levels.count(1) == 1) or name == "search.html", name  # there by a script
            assert soup.select_one("body a[href], body button").get("href") == "#main-content", name
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), (name, levels)
        assert [str(tag)[:150] for tag in soup.select("[tabindex]") if int(tag["tabindex"]) > 0] == [], name


def test_icons_have_a_shape(site, soups):
    """The build leaves out the icons that no page uses."""
    used = {icon for soup in soups.values() for tag in soup.select("[class*=fa-]") for icon in tag["class"]}
    used = {icon for icon in used if icon.startswith("fa-")} - {"fa-solid", "fa-lg"}
    style = (site / "_static/styles/pydata-sphinx-theme.css").read_text(encoding="utf-8")
    shapes = TTFont(site / "_static/vendor/fontawesome/webfonts/fa-solid-900.woff").getBestCmap()
    for icon in used:
        code = re.search(rf'\.{icon}:before[^{{}}]*\{{content:"\\?([^"]+)"', style)[1]
        assert (ord(code) if len(code) == 1 else int(code, 16)) in shapes, icon


@pytest.mark.parametrize("page", CHAPTERS)
def test_chapter_can_be_downloaded(site, soups, page):
    links = [
        link["href"] for link in soups[f"{page}.html"].find_all("a", href=True, class_="btn-download-source-button")
    ]
    assert links and all((site / urljoin(f"{page}.html", link)).is_file() for link in links)


@pytest.mark.parametrize("page", [*CHAPTERS, "book/how_to_cite"])
def test_entries_can_be_copied_and_downloaded(site, soups, page):
    """Three formats at the foot of a chapter, and each file says what the page shows."""
    tabs = soups[f"{page}.html"].select(".sd-tab-content")
    assert len(tabs) == 3 * (1 if page in CHAPTERS else len(CHAPTERS) + 1)
    for tab in tabs:
        file = site / urljoin(f"{page}.html", tab.select_one("a[download]")["href"])
        assert file.read_text(encoding="utf-8").strip() == tab.find("pre").get_text().strip()
        assert page not in CHAPTERS or file.stem == pathlib.Path(page).name


@pytest.mark.parametrize("claim", claims.ledger().values(), ids=lambda claim: claim.id)
def test_claim_leads_to_the_cell_that_measured_it(soups, claim):
    anchor = make_id(f"measured-{claim.id}")
    row = soups["book/claims.html"].find(id=make_id(f"claim-{claim.id}")).find_parent("tr")
    assert row.select(f"a[href='../notebooks/{claim.chapter}.html#{anchor}']")
    target = soups[f"notebooks/{claim.chapter}.html"].find(id=anchor)
    assert "cell" in target.get("class", []) or target.find_parent(class_="cell")


@pytest.mark.parametrize("page", ["book/rerun", "book/teaching"])
def test_times_are_those_of_the_records(soups, page):
    first = soups[f"{page}.html"].select("table.runs")[0]
    rows = {link["href"].split("/")[-1]: row for row in first("tr") for link in row("a")}
    for name in map(pathlib.PurePath, CHAPTERS):
        record = ROOT / f"book/results/{name.name}.smoke.json"
        if record.exists():
            seconds = json.loads(record.read_text())["seconds"]
            took = f"{seconds:.0f}\u00a0s" if seconds < 120 else f"{seconds / 60:.0f}\u00a0min"
            assert took in rows[f"{name.name}.html"].get_text()


SETTLED = "() => Promise.resolve(window.MathJax?.startup?.promise).then(() => document.fonts.ready).then(() => true)"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="session")
def address(site):
    """The site on the loopback interface."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture(scope="module")  # a second playwright cannot start beside it
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Open a page and note everything that goes wrong on it, in `tab.faults`."""
    contexts = []

    def visit(path, theme="light", width=DESKTOP, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.faults = []
        tab.on("console", lambda message: message.type in ("error", "warning") and tab.faults.append(message.text))
        tab.on("pageerror", lambda error: tab.faults.append(str(error)))
        tab.on("requestfailed", lambda request: tab.faults.append(f"failed {request.url}"))
        tab.on("response", lambda response: response.ok or tab.faults.append(f"{response.status} {response.url}"))
        tab.on(
            "request",
            lambda request: (
                request.url.startswith((address, "data:", "blob:")) or tab.faults.append(f"outside {request.url}")
            ),
        )
        tab.goto(address + path, wait_until="load")
        tab.evaluate(SETTLED)
        tab.wait_for_timeout(100)
        return tab

    yield visit
    for context in contexts:
        context.close()


def violations(tab):
    """What axe finds: everything of the structure, and the contrast of each kind of text."""
    from axe_playwright_python.sync_playwright import Axe

    tab.evaluate(MARK_SAMPLES)
    runs = [
        Axe().run(tab, options=STRUCTURE),
        Axe().run(tab, context={"include": [["[data-sample]"]]}, options=CONTRAST),
    ]
    found = [violation for run in runs for violation in run.response["violations"]]
    return [(violation["id"], [node["html"][:200] for node in violation["nodes"]]) for violation in found]


LOADED = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .reduce((sum, entry) => sum + entry.decodedBodySize, 0)"""
FOCUSED = """() => {
    const box = document.activeElement, style = getComputedStyle(box), before = window.lastFocused;
    window.lastFocused = box;
    return {
        where: box.outerHTML.slice(0, 150),
        seen: (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== "none",
        later: !before || !!(before.compareDocumentPosition(box) & Node.DOCUMENT_POSITION_FOLLOWING),
    };
}"""


def stops(tab, most):
    """The next elements that the Tab key reaches, not further than the end of the article."""
    found = []
    for _ in range(most):
        tab.keyboard.press("Tab")
        if found and not tab.evaluate("() => document.activeElement.closest('body > *')"):
            break
        found.append(tab.evaluate(FOCUSED))
    return found


@needs_browser
@pytest.mark.parametrize("page", [*PAGES, *GENERATED])
def test_page_in_a_browser(visit, page):
    """One load: of every second page in the dark. Colours do not depend on the width, nor the structure on the theme,
    so two of the four pairs are enough."""
    visits = VISITS if len(page) % 2 else VISITS[::-1]
    tab = visit(f"{page}.html", *visits[0])
    raw = "() => [...document.querySelectorAll('article .math:not(:has(mjx-container))')].length"
    assert tab.evaluate(raw) == 0, "math that was not typeset"
    empty = "() => [...document.images].filter(picture => !picture.naturalWidth).map(picture => picture.src)"
    assert tab.evaluate(empty) == []
    assert tab.evaluate(LOADED) < LARGEST
    for theme, width in visits:
        tab.emulate_media(color_scheme=theme)
        tab.set_viewport_size({"width": width, "height": 900})
        tab.wait_for_timeout(200)
        assert tab.locator("html").get_attribute("data-theme") == theme
        assert violations(tab) == []
        filters = "() => [...document.querySelectorAll('article img')].map(image => getComputedStyle(image).filter)"
        assert set(tab.evaluate(filters)) <= {"none"}, "a filter changes the pictures"
    for width in (PHONE, DESKTOP):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.wait_for_timeout(100)
        needed = tab.evaluate("() => document.documentElement.scrollWidth")
        assert needed <= width, f"the page needs {needed} px on a screen of {width} px"
    first, *others = stops(tab, 6)
    assert "main-content" in first["where"], "the first stop of the Tab key does not skip to the text"
    tab.evaluate("() => { window.lastFocused = null; document.querySelector('#main-content').focus(); }")
    reached = [first, *others, *stops(tab, 12)]
    assert [stop["where"] for stop in reached if not stop["seen"]] == [], "the focus cannot be seen"
    assert [stop["where"] for stop in reached if not stop["later"]] == [], "the focus goes back"
    assert tab.faults == []


@needs_browser
def test_faint_text_and_missing_names_are_found(visit):
    tab = visit("book/references.html")
    tab.add_style_tag(content=".citation:nth-child(5) { color: #aaa; } .bd-article { background: white; }")
    tab.evaluate("() => document.querySelector('article').insertAdjacentHTML('beforeend', '<button></button>')")
    assert {rule for rule, _ in violations(tab)} >= {"button-name", "color-contrast"}


@needs_browser
@pytest.mark.parametrize("page", [*PAGES[:: len(PAGES) // 4], "book/claims", "book/status"])  # each kind of page
def test_nothing_is_cut_off_on_paper(site, browser, page, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book"))
    import pdf

    tab = browser.new_page()
    pdf.prepare(tab, site / f"{page}.html", site)
    wide = """() => [...document.querySelectorAll('article *')].filter(box => !box.closest('mjx-container, .math')
        && box.getBoundingClientRect().right > innerWidth + 1).map(box => box.outerHTML.slice(0, 150))"""
    folded = """() => [...document.querySelectorAll('article :is(details:not(.audit *), .toggle-hidden)')]
        .filter(box => !box.open).map(box => box.outerHTML.slice(0, 150))"""
    assert tab.evaluate(wide) == []
    assert tab.evaluate(folded) == []
    tab.close()


@needs_browser
def test_page_for_wrong_addresses(visit):
    tab = visit("404.html")
    assert tab.locator("article h1").text_content().startswith("Page not found")
    assert tab.faults == []


@needs_browser
def test_search_finds_pages(visit):
    tab = visit("search.html?q=gradient")
    tab.wait_for_selector("#search-results li")
    assert tab.locator("#search-results li").count() >= 3
    assert tab.faults == []


@needs_browser
def test_phone_menu_opens(visit):
    tab = visit(f"{CHAPTERS[0]}.html", width=PHONE)
    link = tab.locator(f"a[href$='{pathlib.Path(CHAPTERS[-1]).name}.html']:visible")
    assert link.count() == 0
    tab.locator("button.primary-toggle:visible").click()
    link.first.wait_for(timeout=3000)
    link.first.click()
    tab.wait_for_url(f"**/{CHAPTERS[-1]}.html")
    assert tab.faults == []


@needs_browser
def test_reader_can_change_the_theme(visit):
    tab = visit(f"{PAGES[0]}.html")
    seen = set()
    for _ in range(3):
        tab.locator(".theme-switch-button:visible").first.click()
        seen.add(tab.locator("html").get_attribute("data-theme"))
    assert seen == {"light", "dark"}


@needs_browser
def test_wide_boxes_can_be_scrolled_with_the_keyboard(visit):
    tab = visit(f"{CHAPTERS[0]}.html", width=PHONE)
    stuck = """() => [...document.querySelectorAll('article *')].filter(box =>
        box.scrollWidth > box.clientWidth + 1 && ['auto', 'scroll'].includes(getComputedStyle(box).overflowX)
        && box.tabIndex < 0 && !box.querySelector('a, button, input, [tabindex="0"]')
        && !box.closest('[tabindex="0"]')).map(box => box.outerHTML.slice(0, 150))"""
    assert tab.evaluate(stuck) == []


FILM = "notebooks/cosine_attack.html"


def shown(tab):
    """What the player of the film shows: the frame's pixels, the text, and where the mark on the curve is."""
    mark = tab.locator(".watch .mark")
    return (
        tab.locator(".watch canvas").last.evaluate("canvas => canvas.toDataURL()"),
        tab.locator(".watch output").inner_text(),
        (mark.get_attribute("cx"), mark.get_attribute("cy")),
    )


def test_film_strip_is_small(site, soups):
    strip = soups[FILM].select_one("#fig-cosine-film img")
    frames = len(soups[FILM].select("details.film tbody tr"))
    assert (site / urljoin(FILM, strip["src"])).stat().st_size < 300_000 and 24 <= frames <= 32


@needs_browser
def test_film_can_be_watched_with_the_keyboard(visit):
    tab = visit(FILM)
    slider, strip = tab.get_by_role("slider"), tab.locator("#fig-cosine-film img")
    assert not strip.is_visible() and slider.evaluate("input => input.labels[0].innerText.trim()") == "Frame"
    truth = tab.locator(".watch canvas").first
    assert truth.bounding_box()["x"] < tab.locator(".watch canvas").last.bounding_box()["x"]
    slider.focus()
    seen = []
    for key in ("End", "ArrowLeft", "PageDown", "Home"):
        tab.keyboard.press(key)
        seen.append(shown(tab))
        assert slider.get_attribute("aria-valuetext") == seen[-1][1]
    assert [len(set(parts)) for parts in zip(*seen, strict=True)] == [4, 4, 4]
    assert seen[-1][1].startswith("step 0 of ") and slider.input_value() == "0"
    assert slider.evaluate("input => getComputedStyle(input).outlineStyle") == "solid"
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Enter")  # Play
    tab.wait_for_function("() => document.querySelector('.watch input').value > 1")
    tab.keyboard.press("Enter")  # Pause
    stopped = shown(tab)
    tab.wait_for_timeout(500)
    assert shown(tab) == stopped and tab.faults == []


@needs_browser
def test_film_can_be_watched_by_touch_and_never_starts_by_itself(visit):
    tab = visit(FILM, width=PHONE, has_touch=True, reduced_motion="reduce")
    first = shown(tab)
    assert not tab.locator(".watch button").is_visible()
    box = tab.get_by_role("slider").bounding_box()
    assert box["height"] >= 24 and box["x"] + box["width"] <= PHONE
    tab.get_by_role("slider").tap(position={"x": box["width"] * 0.2, "y": box["height"] / 2})
    second = shown(tab)
    assert all(before != after for before, after in zip(first, second, strict=True))
    tab.wait_for_timeout(500)
    assert shown(tab) == second and tab.faults == []


@needs_browser
def test_film_strip_stays_without_script_and_on_paper(visit):
    tab = visit(FILM, java_script_enabled=False)
    assert tab.locator("#fig-cosine-film img").is_visible() and tab.locator(".watch").count() == 0
    tab.locator("details.film summary").click()
    assert tab.locator("details.film tbody tr").first.is_visible()
    tab = visit(FILM)
    tab.emulate_media(media="print")
    assert tab.locator("#fig-cosine-film img").is_visible() and not tab.locator(".watch").is_visible()


CLAIMS = "table.claims tbody tr"


@needs_browser
def test_claims_can_be_filtered_with_the_keyboard(visit):
    tab = visit("book/claims.html")
    total = len(claims.ledger())
    status, shown = tab.get_by_role("status"), tab.locator(f"{CLAIMS}:visible")
    assert shown.count() == total and status.inner_text() == f"{total} of {total} claims shown"
    tab.get_by_label("Paper").focus()
    for key in ("Z", "Tab", "Tab", "n", "Tab"):  # Zhu and Blaschko; not reproduced
        tab.keyboard.press(key)
    assert tab.evaluate("document.activeElement.name") == "text"
    few = shown.count()
    assert 0 < few < total and status.inner_text() == f"{few} of {total} claims shown"
    assert all("Zhu and Blaschko" in row and "not reproduced" in row for row in shown.all_inner_texts())
    tab.keyboard.type("DLG batch")
    assert 0 < shown.count() < few
    assert tab.url.endswith("?paper=zhu2021&verdict=not-reproduced&text=DLG+batch")
    for key in ("Enter", "Tab", "Enter"):  # the first has no effect, the last presses "Show all"
        tab.keyboard.press(key)
    tab.wait_for_function(f"() => document.querySelectorAll({CLAIMS + ':not([hidden])'!r}).length === {total}")
    assert tab.url.endswith("book/claims.html") and tab.faults == []


@needs_browser
def test_filtered_claims_can_be_linked(visit):
    claim = next(claim for claim in reversed(claims.ledger().values()) if claim.chapter == "twin_data")
    query = f"?chapter=twin_data&verdict=no-such#{make_id(f'claim-{claim.id}')}"
    tab = visit(f"book/claims.html{query}", width=PHONE, has_touch=True)
    shown = tab.locator(f"{CLAIMS}:visible")
    assert shown.count() == sum(claim.chapter == "twin_data" for claim in claims.ledger().values())
    assert tab.get_by_label("Chapter").input_value() == "twin_data"
    assert 0 <= shown.last.bounding_box()["y"] < 900, "the linked claim is not in sight"
    shown.last.get_by_text("In detail").tap()
    assert shown.last.locator("details code").first.is_visible()
    tab.get_by_role("button", name="Show all").tap()
    assert tab.evaluate("() => document.documentElement.scrollWidth") <= PHONE
    assert tab.faults == []


@needs_browser
def test_claims_and_entries_need_no_script(visit):
    tab = visit("book/claims.html", java_script_enabled=False)
    assert tab.locator(f"{CLAIMS}:visible").count() == len(claims.ledger())
    assert not tab.locator(".claims-filter").is_visible()
    tab = visit("book/how_to_cite.html", java_script_enabled=False)
    entry = tab.locator(".sd-tab-set").first
    entry.get_by_text("RIS", exact=True).click()
    assert entry.get_by_text("TY - BOOK").is_visible() and entry.get_by_text("gradinv.ris").is_visible()


@needs_browser
def test_print_shows_every_format_and_no_filter(visit):
    tab = visit("book/how_to_cite.html")
    tab.emulate_media(media="print")
    tabs = tab.locator(".sd-tab-content")
    assert tabs.count() == tab.locator(".sd-tab-content:visible").count() > 3
    label, content = tab.locator(".sd-tab-set > label").nth(1).bounding_box(), tabs.nth(1).bounding_box()
    assert tabs.first.bounding_box()["y"] < label["y"] < content["y"], "a label does not stand above its format"
    tab = visit("book/claims.html")
    tab.emulate_media(media="print")
    assert not tab.locator(".claims-filter").is_visible()
