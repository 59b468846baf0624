"""The exercises of a chapter, and its solutions as cells that can be run."""

import re

import nbformat
from teaching import EXERCISE

SOLUTION = re.compile(r"^(`{3,})\{solution\}([^\n]*)\n(.*?)^\1$", re.M | re.S)
CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def _text(notebook: nbformat.NotebookNode) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def exercises(notebook: nbformat.NotebookNode) -> list[str]:
    """The label of each exercise."""
    return [label for _, label, _ in EXERCISE.findall(_text(notebook))]


def solutions(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """The code of each solution by the label of its exercise; empty for a solution in words only."""
    return {label.strip(): "\n".join(CODE.findall(body)) for _, label, body in SOLUTION.findall(_text(notebook))}


def add_solutions(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The chapter with its solutions as last cells, each of which opens with a comment that names its exercise."""
    for label, code in solutions(notebook).items():
        notebook.cells.append(nbformat.v4.new_code_cell(f"# solution of {label}\n{code}"))
    return notebook
