"""What code cells print, set as a reader of a book expects it: data frames, glued numbers, formulas in a line.

A data frame loses the numbers of its rows where they only count, and the second line of its head where that only
names the index. Its numbers are set flush right; a column that pandas prints with its six decimals has four digits,
counts have no decimals, and yes and no are words. The table that `claims.table` makes reads as on the claims page, but
has only those of the measured values that the rules use. `1e-16` becomes 10⁻¹⁶ everywhere.
"""

import re
from copy import copy

import rules
from bs4 import BeautifulSoup
from docutils import nodes
from ledger import MARKS
from sphinx.transforms.post_transforms import SphinxPostTransform

from gradinv import claims

NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(?:e[+-]\d+)?\s?%?|[+-]?inf|NaN|")
WORDS = {"NaN": "–", "True": "yes", "False": "no"}
VERDICTS = ["claim", "paper", "here", "passes when", "verdict"]
FEW = 6  # values shown where no rule chooses them
POWER = re.compile(r"([+-]?[\d.]+)e([+-]\d+)")


def data_frame(html: str) -> str:
    """The HTML of a data frame, tidied. Any other HTML comes back as it is."""
    soup = BeautifulSoup(html, "html.parser")
    table = soup.find("table", class_="dataframe")
    if table is None or table.thead is None:
        return html
    for style in soup("style"):
        style.decompose()
    table.attrs.pop("border", None)
    for row in table("tr"):
        row.attrs.pop("style", None)
    repeat_names(table)
    merge_head(table)
    drop_row_numbers(table)
    if [cell.get_text() for cell in table.thead("th")] == VERDICTS:
        set_verdicts(soup, table)
    else:
        align(table)
    return str(soup)


def repeat_names(table):
    """Give every row all of its names, so that it can be read by itself."""
    rows = table.tbody("tr")
    for number, row in enumerate(rows):
        for place, cell in enumerate(row("th")):
            for below in rows[number + 1 : number + int(cell.attrs.pop("rowspan", 1))]:
                below.insert(place, copy(cell))


def merge_head(table):
    """Put the names of the index into the line above them, where that is free."""
    *above, last = table.thead("tr")
    names = last("th")
    index = sum(bool(cell.get_text()) for cell in names)
    upper = above[-1]("th") if len(above) == 1 else []
    if not index or len(upper) != len(names) or any(cell.get_text() for cell in [*names[index:], *upper[: index - 1]]):
        return
    of_columns = upper[index - 1].get_text()
    for cell in upper[index:] if of_columns else []:
        if NUMBER.fullmatch(cell.get_text()):  # a number means nothing without the name of the columns
            cell.string = f"{of_columns} {number(cell.get_text())}"
    for cell, name in zip(upper, names[:index], strict=False):
        cell.string = name.get_text()
    last.decompose()


def drop_row_numbers(table):
    heads = [row("th") for row in table.tbody("tr")]
    counts = [[str(number)] for number in range(len(heads))]
    if len(table.thead("tr")) > 1 or table.thead.th.get_text():
        return
    if [[cell.get_text() for cell in cells] for cells in heads] == counts:
        for row in table("tr"):
            row.th.decompose()


def align(table):
    """Mark the columns of numbers and set them, and print a value that is missing as a dash."""
    heads, rows = table.thead("tr"), [row("td") for row in table.tbody("tr")]
    for cell in (cell for row in rows for cell in row if cell.get_text() in WORDS):
        cell.string = WORDS[cell.get_text()]
    for cell in table.tbody("th"):  # an index of numbers has as many decimals as its smallest
        name = cell.get_text()
        cell.string = number(f"{float(name):g}" if re.fullmatch(r"-?\d+\.\d+", name) else name)
    for place in range(1, 1 + max(map(len, rows), default=0)):
        column = [row[-place] for row in rows]
        numeric = all(NUMBER.fullmatch(cell.get_text()) or cell.get_text() == "–" for cell in column)
        labels = [row("th")[-place] for row in heads if not row.find(colspan=True)]
        for cell in [*column, *labels] if numeric else []:
            cell["class"] = "number"
        for cell, written in zip(column, set_numbers([cell.get_text() for cell in column]), strict=True):
            cell.string = written if numeric else cell.get_text()


def set_numbers(column: list[str]) -> list[str]:
    """A column of numbers as a reader expects them, where pandas or Python set them."""
    for form, digits in ((r"[+-]?\d+\.0", "{:.0f}"), (r"[+-]?\d+\.\d{6}(?:e[+-]\d+)?", "{:.4g}")):
        given = [each for each in column if each not in ("–", "")]
        if given and all(re.fullmatch(form, each) for each in given):
            column = [digits.format(float(each)) if each in given else each for each in column]
    return [number(f"{int(each):,}" if re.fullmatch(r"-?\d{5,}", each) else each) for each in column]


def set_verdicts(soup, table):
    table["class"] = "dataframe verdicts"
    ledger = {claim.says: claim for claim in claims.ledger().values()}
    for row in table.tbody("tr"):
        says, paper, here, rule, verdict = row("td")
        says.name, says["scope"] = "th", "row"
        claim = ledger.get(says.get_text())
        if claim is None:
            raise LookupError(f"no claim of the ledger says {says.get_text()!r}; rerun the chapter that prints it")
        written = rule.get_text()
        judged = rules.judged([written, claim.partly_when if written else None])
        found = rules.values(shown(measured(here.get_text()), judged), claim.id, judged)
        passes = rules.rule(written, claim.id) if written else "no rule at this scale"
        if verdict.get_text() == "partly":
            passes += f"; partly when {rules.rule(claim.partly_when, claim.id)}"
        set_words(says, rules.prose(says.get_text()))
        set_words(paper, rules.prose(paper.get_text()))
        set_words(here, "".join(f"<p>{name}: {text}</p>" for name, text in found.items()))
        set_words(rule, passes)
        word = verdict.get_text()
        badge = soup.new_tag("span", attrs={"class": f"verdict {nodes.make_id(word)}"})
        badge.string = f"{MARKS[word]}\u00a0{word}"
        verdict.clear()
        verdict.append(badge)


def set_words(cell, words: str):
    cell.clear()
    cell.append(BeautifulSoup(rules.emphasis(words), "html.parser"))


def measured(text: str) -> dict:
    """The values in "x = 1.5, count = 3", by name."""
    pairs = [pair.partition(" = ")[::2] for pair in re.split(r", (?=\w+ = )", text)]
    return {name: value(written) for name, written in pairs}


def shown(found: dict, judged: set[str]) -> dict:
    """The values that rules use, else the first few."""
    return {name: found[name] for name in found if name in judged} or dict(list(found.items())[:FEW])


def value(written: str):
    if written in ("True", "False"):
        return written == "True"
    for kind in (int, float):
        try:
            return kind(written)
        except ValueError:
            continue
    return written


def number(text: str) -> str:
    """A number for people: a true minus, and a power of ten in place of the computer's."""
    power = POWER.fullmatch(text)
    if power:
        return rules.power(power[1], int(power[2]))
    return re.sub(r"^-(?=[\d.])", "−", text)


class Tidy(SphinxPostTransform):
    default_priority = 500  # after outputs were chosen and glued values put in
    formats = ("html",)

    def run(self, **options):
        for node in list(self.document.findall(nodes.raw)):
            if 'class="dataframe"' in node.astext():
                node.replace_self(nodes.raw("", data_frame(node.astext()), format="html"))
        for node in self.document.findall(nodes.inline):
            if "pasted-text" in node["classes"]:
                words = node.astext()
                node.children = [nodes.Text(number(words))]
                node["classes"] += ["word"] if words in MARKS else []
        for node in list(self.document.findall(nodes.math)):
            keep_together(node)


def keep_together(formula):
    """A full stop or a bracket does not begin a line on its own."""
    after = formula.next_node(descend=False, siblings=True)
    if isinstance(after, nodes.Text) and re.match(r"[.,;:!?)\]’]", after):
        end = re.match(r"[.,;:!?)\]’]+(?:s\b)?", after)[0]
        # by its place, since docutils would find the first text that is equal, such as the stop of another sentence
        formula.parent[formula.parent.children.index(formula) + 1] = nodes.Text(after[len(end) :])
        box = nodes.inline("", "", classes=["together"])
        formula.replace_self(box)
        box += [formula, nodes.Text(end)]


def setup(app):
    app.add_post_transform(Tidy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
