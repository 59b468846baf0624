"""Run the book's chapters with papermill, and keep a record of every run.

A chapter is executed into a temporary folder and moved into place only when it is complete, so an interrupted
run leaves finished chapters, committed notebooks and earlier results as they were.
"""

import ast
import contextlib
import datetime
import functools
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata

import nbformat
import papermill
import torch
import yaml
from papermill.exceptions import PapermillExecutionError

from gradinv import claims, data
from gradinv.files import write_atomically

PACKAGE = pathlib.Path(__file__).parent
ROOT = PACKAGE.parent
NOTEBOOKS = ROOT / "notebooks"
RUNS = ROOT / "_build/runs"
RUNNER = {"chapters.py", "__main__.py", "audit"}
KEPT_METADATA = ("tags", "mystnb")
RECORDED_VERSIONS = ("torch", "torchvision", "numpy", "scipy", "matplotlib")


class ChapterError(Exception):
    """A chapter cannot be run as asked, or failed; the message says which and why."""


def names() -> list[str]:
    """Every chapter in the book's order, read from `_toc.yml`."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    return [pathlib.Path(file).name for file in files if file.startswith("notebooks/")]


def title(chapter: str) -> str:
    """The chapter's heading, or its name while it has none."""
    notebook = nbformat.read(NOTEBOOKS / f"{chapter}.ipynb", 4)
    lines = [line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), chapter)


def run(
    chosen: Sequence[str] = (),
    *,
    scale: str = "laptop",
    device: str = "auto",
    seed: int = 0,
    out: pathlib.Path = RUNS,
    budget: float | None = None,
    write: bool = False,
) -> list[dict]:
    """Execute chapters one after the other.

    Args:
        chosen: chapter names; empty for all.
        scale: "smoke", "laptop" or "full".
        device: "auto" uses CUDA when it is there.
        seed: of every random choice in the chapters.
        out: `out/notebooks` gets the executed notebooks, `out/results` the run records.
        budget: seconds for all of them together. Chapters that need a run most come first, and none is started or
            continued past the budget.
        write: also put outputs into `notebooks/` and `book/results/`. A notebook that shows a larger scale keeps it.

    Returns:
        The record of every finished chapter.

    Raises:
        ValueError: an unknown name, scale or device, a negative seed, or a budget that is not above 0.
        ChapterError: a chapter that failed, or that lacks a parameter or a claim.
    """
    chosen = _checked(chosen, scale, device, seed, budget)
    out.mkdir(parents=True, exist_ok=True)  # before hours are spent, not after
    deadline = None if budget is None else time.monotonic() + budget
    if budget is not None:
        chosen = sorted(chosen, key=lambda chapter: _need(chapter, scale))  # stable: the book's order within a need
    finished = []
    for position, chapter in enumerate(chosen, 1):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left < _expected(chapter, scale):
            print(f"{chapter}: left out, it needs more than the {max(left, 0):.0f} s that remain of the budget")
            continue
        print(f"[{position}/{len(chosen)}] {chapter} at {scale} scale", flush=True)
        try:
            notebook, record = _execute(chapter, scale, device, seed, left)
        except TimeoutError:
            print(f"{chapter}: stopped at the end of the budget")
            continue
        places = [(out / "notebooks", out / "results")] + ([(NOTEBOOKS, claims.RESULTS)] if write else [])
        for notebooks, results in places:
            if notebooks != NOTEBOOKS or not _shows_larger_scale(chapter, scale):
                write_atomically(notebooks / f"{chapter}.ipynb", functools.partial(nbformat.write, notebook))
            _write_json(results / f"{chapter}.{scale}.json", record)
        for claim in record["claims"]:
            print(f"    {claim['id']}: {claim['verdict']}")
        print(f"    {out / 'notebooks' / chapter}.ipynb, {out / 'results' / chapter}.{scale}.json", flush=True)
        finished.append(record)
    return finished


def normalise(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what differs from run to run, so that a rerun is byte-identical: times, injected cells, widget state.

    Kept are tags, figure metadata, execution counts (renumbered from 1) and the names of glued values.
    """
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", ())]
    count = 0
    for position, cell in enumerate(notebook.cells):
        cell.id = f"cell-{position:02d}"
        cell.metadata = {key: cell.metadata[key] for key in KEPT_METADATA if cell.metadata.get(key)}
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            if "metadata" in output:
                output.metadata = {key: value for key, value in output.metadata.items() if key == "scrapbook"}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def fingerprint(chapter: str) -> str:
    """A hash of the chapter's code cells and of what they reach in the package, without comments and docstrings.

    A definition is reached where its name stands in a cell, or in a definition that is reached; a name with a leading
    underscore counts in its own file only. So an attack that no cell leads to can change, or be new, and the chapter's
    results stay those of the code. The runner, the command line and the audit are left out, since no chapter computes
    anything with them. A run record that carries another hash is older than the code.
    """
    notebook = nbformat.read(NOTEBOOKS / f"{chapter}.ipynb", 4)
    cells = [node for cell in notebook.cells if cell.cell_type == "code" for node in ast.parse(cell.source).body]
    counted = (path for path in sorted(PACKAGE.rglob("*.py")) if not RUNNER & {path.name, path.parent.name})
    waiting = [(path, node, _defines(node)) for path in counted for node in ast.parse(path.read_text()).body]
    names, inside = {name for node in cells for name in _mentions(node)}, set()
    reached: list[tuple[pathlib.Path, ast.stmt]] = []
    while new := [
        (path, node)
        for path, node, defined in waiting
        if defined is None or any(name in names or (path, name) in inside for name in defined)
    ]:
        waiting = [each for each in waiting if each[:2] not in new]
        reached += new
        for path, node in new:
            names |= {name for name in _mentions(node) if not name.startswith("_")}
            inside |= {(path, name) for name in _mentions(node)}
    reached.sort(key=lambda pair: (pair[0], pair[1].lineno))
    return hashlib.sha256("\n".join(map(_meaning, [*cells, *(node for _, node in reached)])).encode()).hexdigest()[:16]


def _defines(node: ast.stmt) -> set[str] | None:
    """The names that a module's statement gives a meaning to; None for one that acts by being run."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname for alias in node.names if alias.asname}
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return set()
    return {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    } or None


def _mentions(node: ast.stmt) -> set[str]:
    words: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            words.add(each.id)
        elif isinstance(each, ast.Attribute):
            words.add(each.attr)
        elif isinstance(each, ast.alias):
            words.add(each.name)
    return words


def _meaning(statement: ast.stmt) -> str:
    for node in ast.walk(statement):
        body = getattr(node, "body", None)
        if (
            isinstance(node, ast.ClassDef | ast.FunctionDef)
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            body.pop(0)
    return ast.dump(statement)


def _execute(chapter: str, scale: str, device: str, seed: int, seconds: float | None):
    source = NOTEBOOKS / f"{chapter}.ipynb"
    parameters = {"scale": scale, "device": device, "seed": seed}
    unknown = set(parameters) - set(papermill.inspect_notebook(source))
    if unknown:
        raise ChapterError(
            f"{source.name} has no parameter {', '.join(sorted(unknown))} in its cell tagged 'parameters'"
        )
    with tempfile.TemporaryDirectory() as folder, _environment(pathlib.Path(folder) / "record.jsonl") as recorded:
        executed = pathlib.Path(folder) / source.name
        started = time.perf_counter()

        def left(cell):
            """Seconds that the cell may take: what the chapter has left."""
            return None if seconds is None else max(1, int(seconds - (time.perf_counter() - started)))

        try:
            papermill.execute_notebook(
                source,
                executed,
                parameters,
                cwd=NOTEBOOKS,
                kernel_name="python3",
                timeout_func=left,
                progress_bar={"desc": f"  {chapter}", "unit": " cells"},
                log_output=False,
                extra_arguments=["--log-level=CRITICAL"],  # the kernel's notes on transport and shutdown worry readers
            )
        except PapermillExecutionError as error:
            raise ChapterError(f"{chapter} failed in cell {error.exec_count}: {error.ename}: {error.evalue}") from error
        taken = time.perf_counter() - started
        notebook = normalise(nbformat.read(executed, 4))
        rows = [json.loads(line) for line in recorded.read_text().splitlines()] if recorded.exists() else []
    return notebook, _record(chapter, scale, device, seed, taken, rows)


def _record(chapter: str, scale: str, device: str, seed: int, seconds: float, rows: list[dict]) -> dict:
    expected = [claim.id for claim in claims.ledger().values() if claim.chapter == chapter]
    found = [row["id"] for row in rows]
    if sorted(found) != sorted(expected):
        raise ChapterError(
            f"{chapter} must record each of its claims once; the ledger has {sorted(expected)}, "
            f"it recorded {sorted(found)}"
        )
    chosen = data.device(device)
    return {
        "chapter": chapter,
        "scale": scale,
        "seed": seed,
        "seconds": round(seconds, 1),
        "device": chosen.type,
        "device_name": torch.cuda.get_device_name()
        if chosen.type == "cuda"
        else f"CPU, {threads()} thread{'s' if threads() > 1 else ''}",
        "threads": threads(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "fingerprint": fingerprint(chapter),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in RECORDED_VERSIONS},
        },
        "data": sorted({row["data"] for row in rows if "data" in row}),
        "claims": sorted(rows, key=lambda row: expected.index(row["id"])),
    }


@contextlib.contextmanager
def _environment(recorded: pathlib.Path):
    """What a chapter's kernel inherits: where verdicts go, and one thread count for everything."""
    changes = {
        "GRADINV_RECORD": str(recorded),
        "OMP_NUM_THREADS": str(threads()),
        "MKL_NUM_THREADS": str(threads()),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield recorded
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key)
            else:
                os.environ[key] = value


def threads() -> int:
    """Threads of a chapter: `$OMP_NUM_THREADS`, else one.

    Its networks are small: a second thread gains little, and where cores are shared the two wait for each other
    (measured: 20 times slower per step).
    """
    return int(os.environ.get("OMP_NUM_THREADS") or 1)


def _checked(chosen: Sequence[str], scale: str, device: str, seed: int, budget: float | None) -> list[str]:
    known = names()
    for chapter in chosen:
        if chapter not in known:
            raise ValueError(f"chapter must be one of {', '.join(known)}, got {chapter!r}")
    if scale not in claims.SCALES:
        raise ValueError(f"scale must be one of {', '.join(claims.SCALES)}, got {scale!r}")
    data.device(device)  # raises for one that is unknown or not here
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    if budget is not None and budget <= 0:
        raise ValueError(f"budget must be above 0 seconds, got {budget}")
    return list(chosen) or known


def last(chapter: str, scale: str) -> dict | None:
    """The committed record of a chapter at a scale, or None."""
    path = claims.RESULTS / f"{chapter}.{scale}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _need(chapter: str, scale: str) -> int:
    """0 for a chapter never run at this scale, 1 for one whose record is older than the code, 2 for the rest."""
    record = last(chapter, scale)
    return 0 if record is None else 1 if record["fingerprint"] != fingerprint(chapter) else 2


def _expected(chapter: str, scale: str) -> float:
    record = last(chapter, scale)
    return record["seconds"] if record else 0.0


def _shows_larger_scale(chapter: str, scale: str) -> bool:
    return any(last(chapter, larger) for larger in claims.SCALES[claims.SCALES.index(scale) + 1 :])


def _write_json(path: pathlib.Path, record: dict) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(record, indent=1) + "\n"))


def _commit() -> str | None:
    """The short commit of the checkout, with a plus where the package differs from it, or None outside git."""

    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "gradinv") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
