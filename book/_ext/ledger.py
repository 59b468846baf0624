"""Directives that print the ledger and the run records, so that no page repeats them by hand.

`{chapters-table}`      a row a chapter: its main claim, as lines `CHAPTER: CLAIM` choose it, and its verdict
`{status-table}`        every run: verdicts, minutes, device, versions, date, commit, data
`{times-table}`         how long every chapter takes at every scale
`{chapter-run} NAME`    one chapter's runs, and which of them made the page
`{weights-table}`       every trained network that ships with the package
`{race-tables}`         the race of gradient matching against public code

Each writes Markdown, which the page's own parser turns into nodes. `claims_table.py` and `cite.py` hold two more.
"""

import json
import re
from collections import Counter
from pathlib import Path

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from gradinv import chapters, claims

MARKS = {
    "reproduced": "✓",
    "partly": "◐",
    "not reproduced": "✗",
    "out of reach at this scale": "○",
    "no figure to compare with": "–",
}
NOT_YET = "not run yet"
OURS = "this-book"
CODES = {"ours": "ours", "public": "theirs"}
SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet": "ImageNet", "mnist": "MNIST"}
SCHEDULES = {"step": "the paper's, in steps", "linear": "linear decay"}


def asker(claim) -> str:
    """The paper that makes the claim, or `OURS` for a question that this book adds."""
    return OURS if claim.where == "not in the paper" else claim.paper


def badge(verdict: str, words: str | None = None) -> str:
    return f"[{MARKS[verdict]} {words or verdict}]{{.verdict .{nodes.make_id(verdict)}}}"


def duration(seconds: float) -> str:
    """Seconds up to two minutes, minutes from there on."""
    return f"{seconds:.0f}\u00a0s" if seconds < 120 else f"{seconds / 60:.0f}\u00a0min"


def versions(run: dict) -> str:
    return ", ".join(f"{package} {version}" for package, version in run["versions"].items())


def commit(run: dict) -> str:
    return f"commit {run['commit']}" if run["commit"] else "no commit"


def data(run: dict) -> str:
    used = "; ".join(run.get("data") or ["none"])
    return re.sub(rf"\b(?:{'|'.join(SETS)})\b", lambda name: SETS[name[0]], used)


def stale_note(run: dict) -> list[str]:
    """A warning in plain words where the code has changed since the run."""
    if run["fingerprint"] == chapters.fingerprint(run["chapter"]):
        return []
    return ["**Older than the code:** the chapter or the package has changed since this run."]


def table(header: list[str], rows: list[list[list[str]]], widths: str, kind: str) -> list[str]:
    """A `list-table`: each cell is a list of paragraphs."""
    lines = ["```{list-table}", ":header-rows: 1", f":widths: {widths}", f":class: {kind}", ""]
    for row in [[[cell] for cell in header], *rows]:
        for column, cell in enumerate(row):
            first, *rest = "\n\n".join(cell).splitlines()
            lines.append(("* - " if column == 0 else "  - ") + first)
            lines += [f"    {line}".rstrip() for line in rest]
    return [*lines, "```", ""]


class Ledger(SphinxDirective):
    """A directive that prints the Markdown lines its `write` gives."""

    optional_arguments = 1

    def run(self):
        self.env.note_reread()  # results may have appeared since the last build
        self.root = Path(self.env.srcdir)
        self.runs = claims.results()
        holder = nodes.Element()
        lines = "\n".join(self.write()).splitlines()
        self.state.nested_parse(StringList(lines, self.get_source_info()[0]), 0, holder)
        return holder.children

    def link(self, name: str) -> str:
        return f"[{chapters.title(name)}](/notebooks/{name}.ipynb)"

    def runs_of(self, name: str) -> list[dict]:
        """From the smallest scale to the largest, whose outputs are the ones in the notebook."""
        return [run for run in self.runs if run["chapter"] == name]


class ChaptersTable(Ledger):
    has_content = True

    def write(self):
        rows = [self.row(name) for name in chapters.names()]
        return table(["Chapter", "Its main claim", "Verdict"], rows, "28 50 22", "chapters")

    def row(self, name):
        claim, verdict = self.claim(name), [NOT_YET]
        for run in self.runs_of(name):
            for result in run["claims"]:
                if claim and result["id"] == claim.id:
                    glued = f"{{glue:text}}`../notebooks/{name}.ipynb::{claim.id}:s`"
                    verdict = [badge(result["verdict"], glued), f"{run['scale']} scale"]
        says = claim.says if claim else NOT_YET
        if claim and asker(claim) != OURS:
            says += f" {{cite:p}}`{claim.paper}`"
        return [[self.link(name)], [says], verdict]

    def claim(self, name):
        """The claim that the directive's content names for the chapter, else the chapter's first one."""
        chosen = (yaml.safe_load("\n".join(self.content)) or {}).get(name)
        of_chapter = {claim.id: claim for claim in claims.ledger().values() if claim.chapter == name}
        return of_chapter.get(chosen) or next(iter(of_chapter.values()), None)


class StatusTable(Ledger):
    def write(self):
        rows = [row for name in chapters.names() for row in self.rows(name)]
        return table(["Chapter", "Run", "Verdicts", "Made by"], rows, "23 12 25 40", "status")

    def rows(self, name):
        for run in self.runs_of(name):
            counts = Counter(claim["verdict"] for claim in run["claims"])
            verdicts = [
                badge(verdict, f"{counts[verdict]} {verdict}") for verdict in claims.VERDICTS if counts[verdict]
            ]
            time = [run["scale"], duration(run["seconds"])]
            made = [f"{run['device_name']}, {run['date']}, {commit(run)}", versions(run), f"Data: {data(run)}"]
            yield [[self.link(name)], time, [*verdicts, *stale_note(run)], made]
        if not self.runs_of(name):
            yield [[self.link(name)], ["–"], [NOT_YET], ["–"]]


class TimesTable(Ledger):
    def write(self):
        found = {(run["chapter"], run["scale"]): run for run in self.runs}
        scales = [scale for scale in claims.SCALES if any(run["scale"] == scale for run in self.runs)]
        rows = [
            [[self.link(name)], [f"`{name}`"], *([self.took(found.get((name, scale)))] for scale in scales)]
            for name in chapters.names()
        ]
        devices = sorted({run["device_name"] for run in self.runs})
        lines = table(["Chapter", "Name", *scales], rows, " ".join(["40", "28", *["16"] * len(scales)]), "runs")
        missing = [scale for scale in claims.SCALES if scale not in scales]
        return [
            *lines,
            f"Made on: {'; '.join(devices)}.",
            *(f"No chapter has been run at {scale} scale yet." for scale in missing),
        ]

    def took(self, run):
        return duration(run["seconds"]) if run else NOT_YET


class ChapterRun(Ledger):
    required_arguments = 1

    def write(self):
        name = self.arguments[0]
        runs = {run["scale"]: run for run in self.runs_of(name)}
        rows = [
            [[scale], [duration(runs[scale]["seconds"])], [runs[scale]["device_name"]]]
            if scale in runs
            else [[scale], [NOT_YET], ["–"]]
            for scale in claims.SCALES
        ]
        lines = table(["Scale", "Time", "Device"], rows, "20 25 55", "runs")
        if not runs:
            return lines
        made = self.runs_of(name)[-1]
        facts = [
            f"This page shows the outputs of the **{made['scale']}** run of {made['date']}, {commit(made)}, "
            f"seed {made['seed']}.",
            f"Versions: {versions(made)}.",
            f"Data: {data(made)}.",
        ]
        return [*lines, "\n\n".join(facts + stale_note(made))]


class WeightsTable(Ledger):
    """The weights of `python -m gradinv train NAME`, from the record beside each; DP-SGD's records ship alone."""

    def write(self):
        folder = self.root / "gradinv/weights"
        files = sorted(folder.glob("*.safetensors"))
        self.env.note_dependency(str(folder))
        facts = {file: json.loads(file.with_suffix(".json").read_text()) for file in files}
        rows = [self.row(file.stem, file.stat().st_size, facts[file]) for file in files]
        header = ["Weights", "Trained", "Accuracy", "Size"]
        seen = "; ".join(sorted({each["trained_on"] for each in facts.values()}))
        return [*table(header, rows, "32 32 22 14", "status"), f"All saw the same pictures: {seen}."]

    def row(self, name, size, facts):
        epochs = f"{facts['epoch']} of {facts['epochs']} epochs, seed {facts['seed']}"
        pictures = "shifted and mirrored pictures" if facts["augmented"] else "pictures as they are"
        right = f"{facts['held_out_correct'] / facts['held_out']:.1%} of {facts['held_out']} held-out pictures right"
        return [[f"`{name}`"], [epochs, pictures], [right], [f"{size / 1e6:.2f} MB"]]


class RaceTables(Ledger):
    """What `tests/benchmarks/matching.py` measured; "ours" and "theirs" are this package and the public code."""

    def write(self):
        path = self.root / "book/benchmarks/matching.json"
        self.env.note_dependency(str(path))
        if not path.exists():
            return [NOT_YET]
        race = json.loads(path.read_text())
        return [
            *self.facts(race),
            "**One step.** Time of theirs over time of ours for each victim: the middle of several rounds. Our engine "
            "chooses by memory how many victims go together. The PSNR is that after these few steps.\n",
            *self.per_step(race["per_step"]),
            "**Side by side.** Steps of all victims together in a given time, as a multiple of those of one alone.\n",
            *self.side_by_side(race["side_by_side"]),
            "**To the same picture.** One photograph through the ConvNet, one run a row: how many times faster "
            "each is than their code with the paper's schedule. A row with a lower PSNR than the first has not reached "
            "its picture.\n",
            *self.to_psnr(race["to_psnr"]),
            "**Memory.** The most that a process held, most of it libraries, and the part that the attack added; the "
            "ratio is of those parts.\n",
            *self.memory(race["memory"]),
            "**What each part of the engine brings.** Speed of one evaluation of the objective and its gradient for "
            "each victim, by processor time, as a multiple of the first variant's. Their code is the second variant. "
            "For one victim alone of a small network the engine leaves out the fourth, which costs more than it saves "
            "there.\n",
            *self.ingredients(race["ingredients"]),
        ]

    def facts(self, race):
        cost = max(row["cost_difference"] for row in race["agreement"])
        picture = max(row["picture_difference"] for row in race["agreement"])
        yield f"Made by: {race['device_name']}, {versions(race)}, {race['date']}."
        yield f"The ConvNet and the ResNet have width {race['width']}."
        yield f"In double precision, the two objectives at the start differ by at most {cost:.0e} of their size,"
        yield f"and the pictures after one step {f'differ by at most {picture:.0e}' if picture else 'are equal'}.\n"

    def per_step(self, rows):
        cells = {
            "Network": "{network}",
            "Victims": "{together}",
            "Steps": "{steps}",
            "By time (range)": "{time_ratio:.2f} ({lowest:.2f} to {highest:.2f})",
            "By processor time": "{work_ratio:.2f}",
            "PSNR, ours and theirs": "{psnr_ours:.1f} and {psnr_public:.1f} dB",
        }
        return self.formatted(rows, cells, "18 12 10 24 16 20")

    def side_by_side(self, rows):
        cells = {"Network": "{network}", "Device": "{device}", "Victims at once": "{together}", "Speed": "{ratio:.1f}"}
        return self.formatted(rows, cells, "25 25 25 25")

    def to_psnr(self, rows):
        named = [{**row, "code": CODES[row["code"]], "schedule": SCHEDULES[row["schedule"]]} for row in rows]
        cells = {
            "Code": "{code}",
            "Schedule": "{schedule}",
            "Steps": "{steps}",
            "PSNR": "{psnr:.1f} dB",
            "By time": "{time_ratio:.1f}",
            "By processor time": "{work_ratio:.1f}",
        }
        return self.formatted(named, cells, "12 28 12 14 14 20")

    def formatted(self, rows, cells, widths):
        """A table with a format for each column, filled from each row."""
        return table(list(cells), [[[form.format(**row)] for form in cells.values()] for row in rows], widths, "runs")

    def memory(self, rows):
        def cells(row):
            added = {code: row[f"peak_{code}"] - row[f"before_{code}"] for code in CODES}
            sides = [[f"{row[f'peak_{code}']:.0f} MiB", f"of it {added[code]:.0f} MiB"] for code in CODES]
            return [[row["network"]], *sides, [f"{added['public'] / added['ours']:.2f}"]]

        header = ["Network", "Ours", "Theirs", "Theirs over ours"]
        return table(header, [cells(row) for row in rows], "22 26 26 26", "runs")

    def ingredients(self, rows):
        def cell(row):
            several = f" ({row['together']} victims)" if row["together"] > 1 else ""
            return [f"{row['work_ratio']:.2f}{several}"]

        networks, variants = (list(dict.fromkeys(row[key] for row in rows)) for key in ("network", "variant"))
        found = {(row["variant"], row["network"]): row for row in rows}
        lines = [[[variant], *(cell(found[variant, network]) for network in networks)] for variant in variants]
        return table(["Variant", *networks], lines, "40 20 20 20", "runs")


DIRECTIVES = {
    "chapters-table": ChaptersTable,
    "status-table": StatusTable,
    "times-table": TimesTable,
    "chapter-run": ChapterRun,
    "weights-table": WeightsTable,
    "race-tables": RaceTables,
}


def setup(app):
    for name, directive in DIRECTIVES.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
