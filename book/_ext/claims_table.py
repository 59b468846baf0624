"""The claims page, `{claims-table}` and the links to its parts, `{claims-parts}`, and the places that it leads to.

A claim leads to the code cell that hands its values to `claims.record`, or to the shown cell above it where the
page leaves that cell out.
"""

import ast
import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import rules
from docutils import nodes
from ledger import NOT_YET, OURS, Ledger, asker, badge, table
from pybtex.database import parse_file
from sphinx.transforms import SphinxTransform

from gradinv import chapters, claims


@dataclass(frozen=True)
class Place:
    """The shown code cell of a notebook, by its number, and the text of the heading above it."""

    cell: int
    heading: str


def recorded_by(code: str) -> Iterator[tuple[int, re.Pattern]]:
    """What a cell records: patterns of claims' names, each with 0 where the name is written out and 1 otherwise."""
    tree = list(ast.walk(ast.parse(code)))
    for call in tree:
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "claims.record"):
            continue
        match call.args[0]:
            case ast.Constant(value=name):
                yield 0, re.compile(re.escape(name))
            case ast.JoinedStr(values=parts):
                yield (
                    1,
                    re.compile(
                        "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".+" for part in parts)
                    ),
                )
            case _:  # a name from a list in the same cell
                for part in tree:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield 1, re.compile(re.escape(part.value))


def places(chapter: str) -> dict[str, Place]:
    """Where a chapter measures each of its claims. Raises LookupError where it records one nowhere."""
    heading, shown, found = "", None, []
    for number, cell in enumerate(json.loads((chapters.NOTEBOOKS / f"{chapter}.ipynb").read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.*)", source, re.M) or [heading])[-1]
        elif cell["cell_type"] == "code":
            if "remove-cell" not in cell["metadata"].get("tags", []):
                shown = number
            if "claims.record(" in source:
                found += [(rank, pattern, Place(shown, heading)) for rank, pattern in recorded_by(source)]
    found.sort(key=lambda entry: entry[0])
    return {claim.id: first(claim.id, found) for claim in claims.ledger().values() if claim.chapter == chapter}


def first(claim_id: str, found: list) -> Place:
    for _, pattern, place in found:
        if pattern.fullmatch(claim_id):
            return place
    raise LookupError(f"no cell records {claim_id}")


class MeasuredAnchors(SphinxTransform):
    """Anchors `measured-CLAIM` at the cells of a chapter."""

    default_priority = 200  # docutils moves the names of targets to what follows them at 260

    def apply(self):
        folder, _, chapter = self.env.docname.rpartition("/")
        if folder != "notebooks":
            return
        cells = {node["cell_index"]: node for node in self.document.findall(nodes.container) if "cell_index" in node}
        for claim_id, place in places(chapter).items():
            cell, name = cells[place.cell], nodes.fully_normalize_name(f"measured-{claim_id}")
            target = nodes.target("", "", names=[name])
            self.document.note_explicit_target(target)
            cell.parent.insert(cell.parent.index(cell), target)


class ClaimsTable(Ledger):
    def run(self):
        found = super().run()
        rows = [row for node in found for row in node.findall(nodes.row)][1:]
        for claim, row in zip(claims.ledger().values(), rows, strict=True):
            verdict = nodes.make_id(self.verdict(claim))
            row["classes"] += [f"paper-{asker(claim)}", f"chapter-{claim.chapter}", f"verdict-{verdict}"]
        return found

    def write(self):
        self.found = {(claim["id"], run["scale"]): claim for run in self.runs for claim in run["claims"]}
        self.places = {id: place for name in chapters.names() for id, place in places(name).items()}
        rows = [self.row(claim) for claim in claims.ledger().values()]
        return [*self.counts(), self.filter(), *table(["Claim", "In the paper", "Here"], rows, "32 26 42", "claims")]

    def results(self, claim) -> dict[str, dict]:
        """What was found about a claim, by scale from the smallest to the largest."""
        return {scale: self.found[claim.id, scale] for scale in claims.SCALES if (claim.id, scale) in self.found}

    def verdict(self, claim) -> str:
        """At the largest scale that was run, which is the one that the chapter shows."""
        return [NOT_YET, *(result["verdict"] for result in self.results(claim).values())][-1]

    def counts(self):
        """A line for each scale: how many claims got each verdict."""
        for scale in claims.SCALES:
            counts = Counter(result["verdict"] for (_, ran), result in self.found.items() if ran == scale)
            found = [badge(verdict, f"{counts[verdict]} {verdict}") for verdict in claims.VERDICTS if counts[verdict]]
            missing = len(claims.ledger()) - counts.total()
            yield f"{scale}: {' '.join([*found, *([f'{missing} {NOT_YET}'] if missing else [])])}\n"

    def filter(self):
        """The form that `claims.js` brings to life, hidden until then."""
        ledger = claims.ledger().values()
        works = parse_file(self.root / "book/references.bib").entries
        verdicts = {self.verdict(claim) for claim in ledger}
        choices = {
            "paper": {
                key: "this book" if key == OURS else author_year(works[key])
                for key in dict.fromkeys(map(asker, ledger))
            },
            "chapter": {name: chapters.title(name) for name in chapters.names()},
            "verdict": {nodes.make_id(word): word for word in (*claims.VERDICTS, NOT_YET) if word in verdicts},
        }
        selects = "".join(
            f'<label>{kind.capitalize()}<select name="{kind}"><option value="">all</option>{options(words)}</select>'
            "</label>"
            for kind, words in choices.items()
        )
        return (
            f'<form class="claims-filter" aria-label="Filter the claims" hidden>{selects}'
            '<label>Text<input type="search" name="text" autocomplete="off"></label>'
            '<button type="reset">Show all</button><p role="status"></p></form>\n'
        )

    def row(self, claim):
        return [
            [
                f"(claim-{claim.id})=\n{rules.prose(claim.says)}",
                f"Chapter: {self.link(claim.chapter)}",
                f"[`{claim.id}`](#claim-{claim.id})",
            ],
            [
                f"{'A question of this book; see ' if asker(claim) == OURS else ''}{{cite:t}}`{claim.paper}`"
                + (f", {claim.where}" if asker(claim) != OURS else ""),
                f"Reported: {rules.prose(claim.reported or 'not readable')}",
                *([] if claim.read_in.startswith("derived") else [f"Read in: {claim.read_in}"]),
            ],
            list(self.here(claim)),
        ]

    def here(self, claim):
        results = self.results(claim)
        verdicts = (f"{scale}:\u00a0{badge(result['verdict'])}" for scale, result in results.items())
        yield " ".join(verdicts) or NOT_YET
        judged = rules.judged([*(claim.passes_when or {}).values(), claim.partly_when])
        used = {name for result in results.values() for name in result["values"]}
        listed = judged & used or used
        yield "\n".join(f"- {value}" for value in beside(results, claim.id, listed, judged))
        heading = re.sub(r'[`<>"]', "", self.places[claim.id].heading)
        yield f"Measured in {{ref}}`“{heading}” <measured-{claim.id}>`"
        yield from passes_when(claim)
        yield in_detail(claim, "; ".join(beside(results, claim.id, used - listed, judged)))


class ClaimsParts(Ledger):
    """Links to the first claim of each chapter, in the order of the table."""

    def write(self):
        for chapter, rows in groupby(claims.ledger().values(), key=lambda claim: claim.chapter):
            rows = list(rows)
            yield f"- [{chapters.title(chapter)}](#claim-{rows[0].id}), {len(rows)}\u00a0claims"

    def run(self):
        found = super().run()
        found[0]["classes"] += ["claims-parts"]
        return found


def beside(results, claim_id: str, names: set[str], judged: set[str]) -> Iterator[str]:
    """Measured values of some names: that of each scale, or one where all are the same."""
    found = {
        scale: rules.values({key: value for key, value in result["values"].items() if key in names}, claim_id, judged)
        for scale, result in results.items()
    }
    for name in dict.fromkeys(name for values in found.values() for name in values):
        texts = {scale: values.get(name, "not measured") for scale, values in found.items()}
        same = len(set(texts.values())) == 1
        yield f"{name}: " + ", ".join(
            [*texts.values()][:1] if same else (f"{s}\u00a0{text}" for s, text in texts.items())
        )


def passes_when(claim) -> Iterator[str]:
    """The rules in words, one paragraph for scales of the same rule."""
    for rule, scales in groupby(claims.SCALES, key=lambda scale: (claim.passes_when or {}).get(scale)):
        if rule:
            names = list(scales)
            where = "" if len(names) == len(claims.SCALES) else f" at {' and '.join(names)} scale"
            yield f"Passes{where} when {rules.rule(rule, claim.id)}."
    if claim.partly_when:
        yield f"Partly when {rules.rule(claim.partly_when, claim.id)}."


def in_detail(claim, others: str) -> str:
    """Folded away: the values that no rule uses, the unit, and the rules as they are judged."""
    lines = [f"Also: {others}"] if others else []
    lines.append(f"Unit: {rules.prose(claim.unit)}")
    words = "".join(f"<p>{rules.emphasis(line)}</p>" for line in lines)
    written = [rule for rule, _ in groupby((claim.passes_when or {}).values()) if rule]
    written += [f"partly: {claim.partly_when}"] if claim.partly_when else []
    code = "".join(f"<code>{html.escape(rule)}</code>" for rule in written)
    return f"<details><summary>In detail</summary>{words}{code}</details>"


def options(words: dict[str, str]) -> str:
    return "".join(f'<option value="{value}">{html.escape(word)}</option>' for value, word in words.items())


def author_year(entry) -> str:
    names = [re.sub(r"[{}]", "", " ".join(person.last_names)) for person in entry.persons["author"]]
    several = " et al." if len(names) > 2 else ""
    return f"{' and '.join(names[:1] if several else names)}{several} {entry.fields['year']}"


def setup(app):
    app.add_directive("claims-table", ClaimsTable)
    app.add_directive("claims-parts", ClaimsParts)
    app.add_transform(MeasuredAnchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
