"""Directives of the page for lecturers, which count in the notebooks and read the run records.

`{lectures-table}`   a row a chapter: the lecture and what it needs, as the content says, and the minutes
`{exercises-table}`  every exercise of the book by its grade, with which its text begins
"""

import math
import re

import nbformat
import yaml
from ledger import NOT_YET, Ledger, duration, table

from gradinv import chapters

WORDS, LINES = 150, 10  # read in a minute: words of text, lines of shown code
UNSEEN = {"hide-input", "remove-cell"}
GRADES = ("easy", "medium", "hard")
EXERCISE = re.compile(r"^(`{3,})\{exercise\}[^\n]*\n:label: (\S+)\n(.*?)^\1$", re.M | re.S)
GRADE = re.compile(rf"\*\*({'|'.join(GRADES)})\.\*\*\s*", re.I)


def cells(name: str, kind: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(chapters.NOTEBOOKS / f"{name}.ipynb", 4).cells if cell.cell_type == kind]


def reading_minutes(name: str) -> int:
    """For a chapter without its exercises, in steps of five."""
    text = "\n".join(cell.source for cell in cells(name, "markdown")).split("\n## Exercises")[0]
    shown = [cell for cell in cells(name, "code") if not UNSEEN & set(cell.metadata.get("tags", ()))]
    lines = sum(len(cell.source.splitlines()) for cell in shown)
    return 5 * math.ceil((len(text.split()) / WORDS + lines / LINES) / 5)


def exercises() -> list[dict]:
    """In the book's order: label, chapter, what it asks, and the grade with which its text begins, or None."""
    found = []
    for name in chapters.names():
        for cell in cells(name, "markdown"):
            for _, label, question in EXERCISE.findall(cell.source):
                grade = GRADE.match(question)
                asks = " ".join(GRADE.sub("", question).split())
                found.append({"label": label, "chapter": name, "asks": asks, "grade": grade and grade[1].lower()})
    return found


def graded() -> list[dict]:
    """Every exercise, from the easiest to the hardest. Raises ValueError where one does not begin with its grade."""
    rows = exercises()
    if without := [row["label"] for row in rows if not row["grade"]]:
        raise ValueError(f"an exercise begins with its grade, such as **Easy.**; see {', '.join(without)}")
    return sorted(rows, key=lambda row: GRADES.index(row["grade"]))


class LecturesTable(Ledger):
    has_content = True

    def write(self):
        chosen = yaml.safe_load("\n".join(self.content))
        if list(chosen) != chapters.names():
            raise self.error(f"lectures-table needs the chapters in the book's order: {', '.join(chapters.names())}")
        rows = [self.row(name, **facts) for name, facts in chosen.items()]
        header = ["Lecture", "Chapter", "Before it", "To read", "To rerun"]
        return [
            *table(header, rows, "20 27 23 12 18", "runs"),
            f"Reading is counted at {WORDS} words of text and {LINES} lines of shown code a minute, without exercises. "
            f"Times of reruns come from the [records](status.md), which name the devices.",
        ]

    def row(self, name, lecture, needs):
        runs = [f"{run['scale']}: {duration(run['seconds'])}" for run in self.runs_of(name)]
        return [[lecture], [self.link(name)], [needs], [f"{reading_minutes(name)}\u00a0min"], runs or [NOT_YET]]


class ExercisesTable(Ledger):
    def write(self):
        try:
            found = graded()
        except ValueError as error:
            raise self.error(str(error)) from error
        rows = [
            [[row["grade"]], [f"{{numref}}`{row['label']}`"], [row["asks"]], [self.link(row["chapter"])]]
            for row in found
        ]
        return table(["Grade", "Exercise", "What it asks", "Chapter"], rows, "12 18 40 30", "runs")


def setup(app):
    app.add_directive("lectures-table", LecturesTable)
    app.add_directive("exercises-table", ExercisesTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
