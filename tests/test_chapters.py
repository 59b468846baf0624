"""Every chapter runs at smoke scale with no network and no data but what packages carry, and judges its claims."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from solutions import add_solutions

from gradinv import chapters, claims

# Chapters whose laptop run takes seconds: their stored outputs are compared with a rerun, cell by cell.
QUICK = [
    chapter for chapter in chapters.names() if (chapters.last(chapter, "laptop") or {"seconds": 1e9})["seconds"] < 60
]


@pytest.mark.parametrize("chapter", chapters.names())
def test_smoke(chapter, tmp_path, monkeypatch):
    """The solutions run after the last cell of a copy, so that a reader's run is spared them."""
    copies = tmp_path / "copies"
    copies.mkdir()
    notebook = nbformat.read(chapters.NOTEBOOKS / f"{chapter}.ipynb", 4)
    nbformat.write(add_solutions(notebook), copies / f"{chapter}.ipynb")
    monkeypatch.setattr(chapters, "NOTEBOOKS", copies)
    try:
        (record,) = chapters.run([chapter], scale="smoke", out=tmp_path)
    except chapters.ChapterError as error:
        if solution := re.match("# (solution of .+)", getattr(error.__cause__, "source", "")):
            pytest.fail(f"{chapter}, {solution[1]}\n{error.__cause__}")
        raise
    expected = [claim.id for claim in claims.ledger().values() if claim.chapter == chapter]
    assert [row["id"] for row in record["claims"]] == expected
    assert {row["verdict"] for row in record["claims"]} <= set(claims.VERDICTS)
    assert all(row["values"] for row in record["claims"])
    assert (tmp_path / f"notebooks/{chapter}.ipynb").exists()
    assert (tmp_path / f"results/{chapter}.smoke.json").exists()


@pytest.mark.parametrize("chapter", QUICK)
def test_stored_outputs(chapter):
    """Cells tagged nbval-check-output print today what they printed when the page was made."""
    notebook = chapters.NOTEBOOKS / f"{chapter}.ipynb"
    assert "nbval-check-output" in notebook.read_text(), "no cell is marked for comparison"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--nbval-lax",
        "--nbval-current-env",
        str(notebook),
    ]
    got = subprocess.run(command, capture_output=True, text=True, cwd=chapters.ROOT, env={**os.environ})
    assert got.returncode == 0, got.stdout[-4000:]
