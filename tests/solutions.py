"""The exercises of a chapter, and its solutions as cells that can be run."""

import re

import nbformat

BLOCK = r"^(`{3,})\{%s\}([^\n]*)\n(.*?)^\1$"
CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def _blocks(notebook, kind):
    """The title and the body of each block of a kind, in order."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return [(title.strip(), body) for _, title, body in re.findall(BLOCK % kind, text, re.M | re.S)]


def exercises(notebook: nbformat.NotebookNode) -> list[str]:
    """The label of each exercise."""
    return [re.search(r"^:label: (\S+)$", body, re.M)[1] for _, body in _blocks(notebook, "exercise")]


def solutions(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """The code of each solution by the label of its exercise; empty for a solution in words only."""
    return {label: "\n".join(CODE.findall(body)) for label, body in _blocks(notebook, "solution")}


def add_solutions(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The chapter with its solutions as last cells, each of which opens with a comment that names its exercise."""
    for label, code in solutions(notebook).items():
        notebook.cells.append(nbformat.v4.new_code_cell(f"# solution of {label}\n{code}"))
    return notebook
