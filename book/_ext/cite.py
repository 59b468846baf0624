"""How to cite the book and its chapters: `{cite-chapter} NAME`, or without a name the book.

`CITATION.cff` is the source. What it says becomes one CSL-JSON item, and every other format is made from that item.
The page shows them in tabs, and the built site has them as files in `_static/cite/`.
"""

import json
import re
import string
from pathlib import Path

import yaml
from ledger import Ledger, commit

from gradinv import chapters, claims

TEX = {
    **{character: f"\\{character}" for character in "{}&%$#_"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
}


def item(root: Path, address: str, name: str | None = None) -> dict:
    """The book, or a chapter of it, as a CSL-JSON item.

    root is the folder of `CITATION.cff`, and address that of the site, which may be empty. The note of a chapter
    says which run made the outputs that its page shows.
    """
    book = yaml.safe_load((root / "CITATION.cff").read_text())
    address = address and f"{address.rstrip('/')}/{f'notebooks/{name}.html' if name else ''}"
    runs = [run for run in claims.results(root / "book/results") if run["chapter"] == name]
    facts = {
        "id": f"gradinv:{name}" if name else "gradinv",
        "type": "chapter" if name else "book",
        "title": chapters.title(name) if name else book["title"],
        "container-title": book["title"] if name else None,
        "author": [
            {"literal": author["name"]}
            if "name" in author
            else {"family": author["family-names"], "given": author["given-names"]}
            for author in book["authors"]
        ],
        "issued": {"date-parts": [[int(part) for part in str(book["date-released"]).split("-")]]},
        "version": str(book["version"]),
        "note": f"Outputs of {runs[-1]['date']}, {commit(runs[-1])}, {runs[-1]['scale']} scale" if runs else None,
        "URL": address,
    }
    return {field: value for field, value in facts.items() if value}


def csl_json(work: dict) -> str:
    """A list of one item, a field a line."""
    fields = (f"    {json.dumps(field)}: {json.dumps(value, ensure_ascii=False)}" for field, value in work.items())
    return "[\n  {\n" + ",\n".join(fields) + "\n  }\n]"


def bibtex(work: dict) -> str:
    """A BibTeX entry. Titles and names of groups stand in braces of their own, so that no style changes them."""
    authors = (
        f"{{{tex(author['literal'])}}}" if "literal" in author else tex(f"{author['family']}, {author['given']}")
        for author in work["author"]
    )
    fields = {
        "author": " and ".join(authors),
        "title": f"{{{tex(work['title'])}}}",
        "booktitle": f"{{{tex(work['container-title'])}}}" if "container-title" in work else None,
        "year": str(year(work)),
        "note": tex(". ".join(filter(None, (f"Version {work['version']}", work.get("note"))))),
        "url": work.get("URL"),
    }
    kind = "incollection" if work["type"] == "chapter" else "book"
    inside = "".join(f"  {field:9} = {{{value}}},\n" for field, value in fields.items() if value)
    return f"@{kind}{{{work['id']},\n{inside}}}"


def ris(work: dict) -> str:
    """A record in RIS: two letters or digits, two spaces, a hyphen, a space and the value, one a line."""
    fields = [
        ("TY", "CHAP" if work["type"] == "chapter" else "BOOK"),
        ("ID", work["id"]),
        *(("AU", author.get("literal") or f"{author['family']}, {author['given']}") for author in work["author"]),
        ("TI", work["title"]),
        ("T2", work.get("container-title")),
        ("PY", year(work)),
        ("DA", "{}/{:02}/{:02}".format(*work["issued"]["date-parts"][0])),
        ("ET", work["version"]),
        ("N1", work.get("note")),
        ("UR", work.get("URL")),
    ]
    lines = [f"{tag}  - {' '.join(str(value).split())}" for tag, value in fields if value]
    return "\n".join([*lines, "ER  - "])


FORMATS = {"bib": ("BibTeX", bibtex, "bibtex"), "ris": ("RIS", ris, "text"), "json": ("CSL-JSON", csl_json, "json")}


def in_words(work: dict) -> str:
    """The citation as a line of plain text."""
    authors = ", ".join(author.get("literal") or f"{author['given']} {author['family']}" for author in work["author"])
    title = work["title"] if work["title"].endswith(("?", "!", ".")) else f"{work['title']}."
    inside = f"In: {work['container-title']}, version" if "container-title" in work else "Version"
    rest = [f"{inside} {work['version']}.", f"{work['note']}." if "note" in work else "", work.get("URL", "")]
    return " ".join(filter(None, [f"{authors} ({year(work)}).", title, *rest]))


def year(work: dict) -> int:
    return work["issued"]["date-parts"][0][0]


def tex(text: str) -> str:
    return "".join(TEX.get(character, character) for character in text)


def file_name(work: dict) -> str:
    """A chapter's name, or the book's."""
    return work["id"].rpartition(":")[2]


class CiteChapter(Ledger):
    def write(self):
        work = item(self.root, self.config.html_baseurl, self.arguments[0] if self.arguments else None)
        folder = "../" * self.env.docname.count("/") + "_static/cite"
        yield re.sub(f"([{re.escape(string.punctuation)}])", r"\\\1", in_words(work))
        yield from ("", "`````{tab-set}", ":sync-group: cite", "")
        for ending, (label, write, lexer) in FORMATS.items():
            file = f"{file_name(work)}.{ending}"
            yield from (f"````{{tab-item}} {label}", f":sync: {ending}", "", f"```{lexer}", write(work), "```")
            yield f'<a class="reference" href="{folder}/{file}" download>Download {file}</a>'
            yield "````"
        yield "`````"


def write_files(app, error):
    """Every format of the book and of each chapter, as files of the built site."""
    if error or app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_static/cite"
    folder.mkdir(parents=True, exist_ok=True)
    for name in (None, *chapters.names()):
        work = item(Path(app.srcdir), app.config.html_baseurl, name)
        for ending, (_, write, _) in FORMATS.items():
            (folder / f"{file_name(work)}.{ending}").write_text(write(work) + "\n", encoding="utf-8")


def prefer_references(app, env):
    """A page without a bibliography of its own cites the references page, not some chapter: the last one counts."""
    env.get_domain("cite").citations.sort(key=lambda found: found.bibliography_key.docname == "book/references")


def setup(app):
    app.add_directive("cite-chapter", CiteChapter)
    app.connect("build-finished", write_files)
    app.connect("env-check-consistency", prefer_references)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
