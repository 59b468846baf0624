"""Every committed chapter and the template: skeleton, order of execution, described pictures, nothing private."""

import ast
import json
import re

import nbformat
import pytest
from solutions import exercises, solutions

from gradinv import chapters, claims

SKELETON = [
    "Claim",
    "Assumptions",
    "At a glance",
    "Parameters",
    "Set-up",
    "Method",
    "Results of the paper",
    "Results beyond the paper",
    "Verdict",
    "What differed from the paper",
    "Exercises",
    "Cite this chapter",
    "References",
]
TAGS = {"parameters", "hide-input", "remove-cell", "remove-output", "nbval-check-output", "nbval-ignore-output"}
LARGEST = 2_000_000
DATA = re.compile(r"cifar-?10\b|imagenet", re.I)  # what a result at laptop scale may rest on
TEMPLATE = chapters.ROOT / "book/template/my_chapter.ipynb"
PATHS = [*(chapters.NOTEBOOKS / f"{chapter}.ipynb" for chapter in chapters.names()), TEMPLATE]


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, 4)


@pytest.fixture(params=chapters.names())
def chapter(request):
    """Of those in the book only, which have records."""
    return request.param


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def test_skeleton(notebook):
    assert re.findall(r"^## (.+)$", prose(notebook), re.M) == SKELETON


def test_opens_in_plain_words(notebook):
    title, opening = notebook.cells[0].source.split("\n\n")[:2]
    assert title.startswith("# ")
    assert len(opening.split()) > 8
    assert "$" not in opening and "`" not in opening


def test_parameters_come_first(notebook):
    first = code(notebook)[0]
    assert first.metadata.tags == ["parameters"]
    assert first.source == 'scale = "laptop"\ndevice = "auto"\nseed = 0'


def test_executed_in_order_without_errors(notebook):
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


def test_is_normalised(path):
    text = path.read_text()
    again = chapters.normalise(nbformat.reads(text, 4))
    assert nbformat.writes(again).strip() == text.strip()


def test_every_figure_is_numbered_and_described(notebook):
    for cell in code(notebook):
        shown = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        if not shown or "remove-cell" in cell.metadata.get("tags", ()):
            continue
        figure, image = cell.metadata.mystnb.figure, cell.metadata.mystnb.image
        assert figure.name.startswith("fig-") and len(figure.caption) > 20
        assert len(image.alt) > 20 and image.alt != figure.caption


def test_cells_are_small_and_plain(notebook):
    for cell in code(notebook):
        assert set(cell.metadata.get("tags", ())) <= TAGS
        for line in cell.source.splitlines():
            assert len(line) <= 76, line
            assert not re.match(r"\s*(class |[!%])", line), line
        assert not re.search(r"\b(urllib|requests|ipywidgets|tqdm|subprocess)\b", cell.source)


def test_three_exercises_with_solutions_that_check_themselves(notebook):
    found = solutions(notebook)
    assert len(found) == 3 and list(found) == exercises(notebook)
    for label, code in found.items():
        lines = [line for line in code.splitlines() if line]
        assert 3 <= len(lines) <= 12 and max(map(len, lines)) <= 76, label
        assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code).body[-1])), label


def test_nothing_private_and_not_too_large(path):
    text = path.read_text()
    assert path.stat().st_size < LARGEST
    assert not re.search(r'["\s(](/(home|root|tmp|Users|mnt|srv)/|[A-Z]:\\\\)', text)
    assert "application/vnd.jupyter.widget" not in text


def test_no_number_is_typed_into_the_verdict(notebook):
    verdict = prose(notebook).split("## Verdict")[1].split("\n## ")[0]
    assert "{glue:text}" in verdict


def test_committed_run_judges_every_claim(chapter):
    runs = [record for scale in ("laptop", "full") if (record := chapters.last(chapter, scale))]
    assert runs, f"{chapter} has no run at laptop scale or better"
    expected = {claim.id for claim in claims.ledger().values() if claim.chapter == chapter}
    for record in runs:
        assert {claim["id"] for claim in record["claims"]} == expected
        assert {claim["verdict"] for claim in record["claims"]} <= set(claims.VERDICTS)
        assert record["data"] and all(DATA.search(source) for source in record["data"])


def test_verdicts_follow_from_the_ledger_as_it_is(chapter):
    for scale in claims.SCALES:
        for row in (chapters.last(chapter, scale) or {"claims": []})["claims"]:
            claim = claims.ledger()[row["id"]]
            assert claims.judge(claim, row["values"], scale).verdict == row["verdict"]


def test_shown_verdicts_are_the_recorded_ones(chapter):
    notebook = nbformat.read(chapters.NOTEBOOKS / f"{chapter}.ipynb", 4)
    record = chapters.last(chapter, "full") or chapters.last(chapter, "laptop")
    glued = {}
    for cell in code(notebook):
        for output in cell.outputs:
            name = output.get("metadata", {}).get("scrapbook", {}).get("name")
            if name in claims.ledger():
                glued[name] = json.dumps(output["data"])
    for row in record["claims"]:
        assert row["verdict"] in glued[row["id"]]
