"""Tables that a phone can show: each cell carries the head of its column, so that `book.css` can set rows as cards.

It concerns every table of three columns or more with one line of head, but those that set their own cards.
"""

import re

from bs4 import BeautifulSoup

TABLE = re.compile(r"<table\b.*?</table>", re.S)
NUMBER = re.compile(r"[\d.,]+|10⁻?[⁰¹²³⁴-⁹]+")
OWN = {"claims", "chapters", "status", "verdicts"}


def card(html: str) -> str:
    """The HTML of a table, with `data-label` on its cells and the class `cards`; any other table as it is."""
    table = BeautifulSoup(html, "html.parser").table
    heads = table.thead("tr") if table.thead else []
    labels = [" ".join(cell.get_text().split()) for cell in heads[0](["th", "td"])] if len(heads) == 1 else []
    kinds = table.get("class", [])
    merged = table.select_one("[colspan], [rowspan]")
    if len(labels) < 3 or not kinds or OWN & set(kinds) or merged:
        return html
    table["class"] = [*kinds, "cards"]
    for row in table.tbody("tr"):
        for cell, label in zip(row(["th", "td"], recursive=False), labels, strict=True):
            title = cell.name == "th" and not NUMBER.fullmatch(cell.get_text())  # the name of a row, if it says enough
            cell["data-label"] = "" if title else label
    return str(table)


def label_cells(app, pagename, templatename, context, doctree):
    if "body" in context:
        context["body"] = TABLE.sub(lambda table: card(table[0]), context["body"])


def setup(app):
    app.connect("html-page-context", label_cells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
