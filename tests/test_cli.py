"""The runner and the command line, on a small book of their own."""

import json

import nbformat
import papermill
import pytest

from gradinv import chapters, claims
from gradinv.__main__ import main

PARAMETERS = 'scale = "laptop"\ndevice = "auto"\nseed = 0'
RECORD = 'from gradinv import claims\nclaims.record("claim.{name}", seed, scale=scale, data="made up")'


def write_notebook(path, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata.tags = ["parameters"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(chapters.normalise(notebook), path)


@pytest.fixture
def book(tmp_path, monkeypatch):
    """Two chapters, `one` and `two`, with a claim each that holds for seed 0."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book/results").mkdir(parents=True)
    (tmp_path / "_toc.yml").write_text(
        "parts:\n- chapters:\n  - file: notebooks/one\n  - file: notebooks/two\n  - file: book/prose\n"
    )
    rows = ""
    for name in ("one", "two"):
        write_notebook(tmp_path / f"notebooks/{name}.ipynb", PARAMETERS, RECORD.format(name=name), "print(seed)")
        rows += (
            f"- {{id: claim.{name}, paper: p, where: w, says: s, reported: null, unit: u, chapter: {name}, "
            "read_in: r, passes_when: {smoke: value == 0, laptop: value == 0, full: null}}\n"
        )
    (tmp_path / "book/claims.yml").write_text(rows)
    # the kernel imports the package afresh, so it is told by the environment where the ledger is
    monkeypatch.setenv("GRADINV_BOOK", str(tmp_path / "book"))
    monkeypatch.setattr(claims, "BOOK", tmp_path / "book")
    monkeypatch.setattr(claims, "RESULTS", tmp_path / "book/results")
    monkeypatch.setattr(chapters, "ROOT", tmp_path)
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setenv("PYTHONPATH", str(chapters.PACKAGE.parent))
    claims.ledger.cache_clear()
    yield tmp_path
    claims.ledger.cache_clear()


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_run_writes_notebook_and_record(book, tmp_path, capsys):
    before = snapshot(book / "notebooks")
    assert main(["run", "one", "--scale", "smoke", "--out", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out/results/one.smoke.json").read_text())
    assert record["claims"][0]["verdict"] == "reproduced"
    assert record["data"] == ["made up"]
    assert record["fingerprint"] == chapters.fingerprint("one")
    assert "claim.one: reproduced" in capsys.readouterr().out
    assert snapshot(book / "notebooks") == before


def test_rerun_is_byte_identical(book, tmp_path):
    for out in ("a", "b"):
        chapters.run(["one"], scale="smoke", out=tmp_path / out)
    first, second = ((tmp_path / out / "notebooks/one.ipynb").read_bytes() for out in ("a", "b"))
    assert first == second


def test_write_puts_outputs_into_the_book_but_never_over_a_larger_scale(book, tmp_path):
    chapters.run(["one"], scale="laptop", out=tmp_path / "out", write=True)
    shown = (book / "notebooks/one.ipynb").read_bytes()
    assert b'"execution_count": 3' in shown
    chapters.run(["one"], scale="smoke", seed=5, out=tmp_path / "out", write=True)
    assert (book / "notebooks/one.ipynb").read_bytes() == shown
    smoke = json.loads((book / "book/results/one.smoke.json").read_text())
    assert smoke["claims"][0]["verdict"] == "not reproduced"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "nosuch"], "chapter must be one of one, two, got 'nosuch'"),
        (["run", "--scale", "huge"], "scale must be one of smoke, laptop, full, got 'huge'"),
        (["run", "--device", "tpu"], "device must be one of auto, cpu, cuda, got 'tpu'"),
        (["train", "nosuch"], "name must be one of"),
        (["fetch", "imagenet"], "name must be one of cifar10"),
    ],
)
def test_wrong_words_are_named(book, capsys, arguments, words):
    assert main(arguments) != 0
    assert words in capsys.readouterr().err


def test_a_notebook_without_a_parameter_is_refused(book, tmp_path, capsys):
    write_notebook(book / "notebooks/one.ipynb", 'scale = "laptop"', "print(1)")
    assert main(["run", "one", "--out", str(tmp_path / "out")]) == 1
    assert "one.ipynb has no parameter device, seed" in capsys.readouterr().err


def test_a_failing_cell_fails_the_run_and_writes_nothing(book, tmp_path, capsys):
    write_notebook(book / "notebooks/two.ipynb", PARAMETERS, "print(1)", "1 / 0")
    before = snapshot(book)
    assert main(["run", "--scale", "laptop", "--out", str(tmp_path / "out"), "--write"]) == 1
    error = capsys.readouterr().err
    assert "two failed in cell" in error and "ZeroDivisionError" in error
    after = snapshot(book)
    assert after[book / "notebooks/two.ipynb"] == before[book / "notebooks/two.ipynb"]
    assert book / "book/results/one.laptop.json" in after  # the finished chapter is kept
    assert book / "book/results/two.laptop.json" not in after
    assert not (tmp_path / "out/notebooks/two.ipynb").exists()


def test_a_chapter_that_forgets_a_claim_is_refused(book, tmp_path, capsys):
    write_notebook(book / "notebooks/one.ipynb", PARAMETERS, "print(1)")
    assert main(["run", "one", "--out", str(tmp_path / "out")]) == 1
    assert "must record each of its claims once" in capsys.readouterr().err


def test_ctrl_c_keeps_finished_chapters(book, tmp_path, monkeypatch):
    before, really = snapshot(book / "notebooks"), papermill.execute_notebook

    def interrupted(source, *words, **options):
        if source.stem == "two":
            raise KeyboardInterrupt
        return really(source, *words, **options)

    monkeypatch.setattr(papermill, "execute_notebook", interrupted)
    assert main(["run", "--scale", "smoke", "--out", str(tmp_path / "out")]) == 130
    assert snapshot(book / "notebooks") == before
    assert [path.name for path in (tmp_path / "out/notebooks").iterdir()] == ["one.ipynb"]


def test_budget_takes_the_neediest_first_and_stops(book, tmp_path, capsys):
    chapters.run(["one"], scale="smoke", out=tmp_path / "out", write=True)
    finished = chapters.run(scale="smoke", out=tmp_path / "out", budget=120.0)
    assert [record["chapter"] for record in finished] == ["two", "one"]
    assert chapters.run(["one"], scale="smoke", out=tmp_path / "out", budget=0.01) == []
    assert "left out" in capsys.readouterr().out


def test_a_cell_is_stopped_at_the_end_of_the_budget(book, tmp_path, capsys):
    write_notebook(book / "notebooks/one.ipynb", PARAMETERS, "import time; time.sleep(60)")
    assert chapters.run(["one"], scale="smoke", out=tmp_path / "out", budget=6.0) == []
    assert "stopped at the end of the budget" in capsys.readouterr().out
    assert not (tmp_path / "out/notebooks").exists()


def test_a_chapter_of_many_short_cells_is_stopped_too(book, tmp_path, capsys):
    write_notebook(book / "notebooks/one.ipynb", PARAMETERS, *["import time; time.sleep(5)"] * 6)
    assert chapters.run(["one"], scale="smoke", out=tmp_path / "out", budget=14.0) == []
    assert "stopped at the end of the budget" in capsys.readouterr().out


@pytest.fixture
def fingerprint_of(book, monkeypatch, tmp_path):
    """The fingerprint of a chapter of one cell beside a package of the given files."""
    monkeypatch.setattr(chapters, "PACKAGE", tmp_path / "package")
    (tmp_path / "package").mkdir()

    def fingerprint(cell, **files):
        write_notebook(book / "notebooks/one.ipynb", PARAMETERS, cell)
        for name, text in files.items():
            (tmp_path / f"package/{name}.py").write_text(text)
        return chapters.fingerprint("one")

    return fingerprint


def test_fingerprint_sees_code_and_not_comments(fingerprint_of):
    first = fingerprint_of("WEIGHT", module='"""Words."""\nWEIGHT = 1  # a reason\n')
    assert fingerprint_of("WEIGHT", module='"""Other words."""\nWEIGHT = 1\n') == first
    assert fingerprint_of("WEIGHT", module='"""Words."""\nWEIGHT = 2\n') != first


REACHED = {
    "called": ("f()", "def f(): return {}\n"),
    "called by what is called": ("f()", "def f(): return g()\ndef g(): return {}\n"),
    "private": ("f()", "def f(): return _g()\ndef _g(): return {}\n"),
    "a method": ("x.f()", "def f(): return C()\nclass C:\n    def g(self): return {}\n"),
    "a renamed one": ("h()", "from package.module import f as h\ndef f(): return {}\n"),
    "one of a pair": ("A", "A, B = 0, {}\n"),
    "run on import": ("0", "import torch\ntorch.set_num_threads({})\n"),
}


@pytest.mark.parametrize("name", REACHED)
def test_fingerprint_sees_what_a_cell_reaches(fingerprint_of, name):
    cell, code = REACHED[name]
    assert fingerprint_of(cell, module=code.format(1)) != fingerprint_of(cell, module=code.format(2))


def test_fingerprint_leaves_out_what_no_cell_reaches(fingerprint_of):
    first = fingerprint_of("f()", module="def f(): return _h()\ndef _h(): return 0\n", other="")
    assert fingerprint_of("f()", other="def g(): return 1\ndef _h(): return 2\n") == first


def test_claims_and_chapters_print(book, tmp_path, capsys):
    chapters.run(["one"], scale="smoke", out=tmp_path / "out")
    assert main(["claims", "--results", str(tmp_path / "out/results")]) == 0
    table = capsys.readouterr().out
    assert "claim.one" in table and "reproduced" in table and "claim.two" in table
    assert main(["chapters"]) == 0
    assert "not run yet" in capsys.readouterr().out


@pytest.mark.parametrize("words, message", [
    (["--seed", "-1"], "seed must not be negative"),
    (["--budget", "-5"], "budget must be above 0"),
    (["--out", "/dev/null/nowhere"], "nowhere"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_the_run(book, capsys, words, message):
    assert main(["run", "one", *words]) == 2
    assert message in capsys.readouterr().err
