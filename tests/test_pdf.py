"""A page printed by `book/pdf.py`: nothing folded away, tagged, with an outline, and no path of this machine."""

import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("playwright")
from playwright.sync_api import sync_playwright

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "book"))

import pdf  # noqa: E402

PAGE = f"""<!doctype html><html lang="en"><head><title>A short page</title>
<link rel="stylesheet" href="{(ROOT / "book/static/book.css").as_uri()}"></head><body><article class="bd-article">
<h1>A short page</h1><p>The gradient gives the picture away.</p>
<h2 id="folded">Folded</h2><details><summary>Look</summary><p>What was folded is printed.</p></details>
<div class="admonition toggle-hidden"><p>A solution is printed.</p></div>
<h2>Code</h2><pre>{"word " * 60}end of the long line</pre>
<p><a href="#folded">up</a> <a href="other.html">on</a> <a href="https://example.org/">out</a></p>
</article></body></html>"""


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        return pdf.find_chromium(playwright) or pytest.skip(f"no {', '.join(pdf.NAMES)} on PATH")


@pytest.fixture(scope="module")
def printed(tmp_path_factory, chromium):
    folder = tmp_path_factory.mktemp("site")
    (folder / "page.html").write_text(PAGE)
    pdf.print_pages({folder / "page.html": folder / "pdf/plain.pdf"}, folder)
    pdf.print_pages({folder / "page.html": folder / "pdf/linked.pdf"}, folder, "https://book.example/")
    return folder / "pdf"


def test_is_a_tagged_document_with_pages_and_an_outline(printed):
    document = (printed / "plain.pdf").read_bytes()
    assert document.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", document)) == 1
    assert b"/Marked true" in document and b"/StructTreeRoot" in document
    assert b"/Outlines" in document and document.count(b"/Title (") >= 4  # of the document and of three headings


def test_links_lead_to_the_page_to_the_address_or_nowhere(printed):
    plain, linked = ((printed / f"{name}.pdf").read_bytes() for name in ("plain", "linked"))
    assert re.findall(rb"/URI \((.*?)\)", plain) == [b"https://example.org/"]
    assert re.findall(rb"/URI \((.*?)\)", linked) == [b"https://book.example/other.html", b"https://example.org/"]
    assert all(b"file:" not in document and b"/Dest" in document for document in (plain, linked))


def test_text_can_be_read(printed):
    pypdf = pytest.importorskip("pypdf")
    reader = pypdf.PdfReader(printed / "plain.pdf")
    text = " ".join(" ".join(page.extract_text() for page in reader.pages).split())
    for sentence in (
        "The gradient gives the picture away.",
        "What was folded is printed.",
        "A solution is printed.",
        "end of the long line",
    ):
        assert sentence in text
    assert "Code" in str(reader.outline)


def test_the_whole_book_stands_at_the_top_of_its_folder(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "book/index.html").write_text('<a href="book/index.html#there">there</a> <a href="#here">here</a>')
    page = pdf.whole_book(tmp_path, "book/index")
    assert page.parent == tmp_path
    assert page.read_text() == '<a href="#there">there</a> <a href="#here">here</a>'


def test_the_contents_follow_the_first_page_of_the_whole_book(tmp_path, chromium):
    contents = '<div id="jb-print-toc">Contents</div>'
    chapter = '<div class="toctree-wrapper"><section>One</section></div>'
    book = f"{contents}<article><section><h1>Book</h1><section>Opening</section>{chapter}</section></article>"
    (tmp_path / "book.html").write_text(f"<!doctype html><body>{book}</body>")
    (tmp_path / "page.html").write_text(f"<!doctype html><body>{book.replace(chapter, '')}</body>")
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
        for name, words in (("book", "Book Contents Opening One"), ("page", "Contents Book Opening")):
            pdf.prepare(page, tmp_path / f"{name}.html", tmp_path)
            assert page.inner_text("body").split() == words.split()


def test_a_missing_browser_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pdf, "find_chromium", lambda playwright: None)
    with pytest.raises(OSError, match="chromium or chromium-browser"):
        pdf.print_pages({}, tmp_path)


def test_a_missing_build_is_named(tmp_path, capsys):
    assert pdf.main(["--built", str(tmp_path)]) == 1
    assert "singlehtml" in capsys.readouterr().err


def test_the_card_is_drawn_by_its_script(tmp_path):
    """Text may be drawn a little differently elsewhere, the size and the kind may not."""
    code = "import pathlib, sys; sys.path.insert(0, 'book'); import card; card.draw(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, tmp_path / "c.png"], cwd=ROOT, check=True)
    head = [path.read_bytes()[:26] for path in (tmp_path / "c.png", ROOT / "book/static/card.png")]
    assert head[0] == head[1]
    assert (ROOT / "book/static/card.png").stat().st_size < 200_000
