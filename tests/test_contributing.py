"""The page for contributors keeps its word: its commands exist, the template is a chapter that runs, the hooks work."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import nbformat
import pytest
import yaml
from solutions import add_solutions

from gradinv.__main__ import _parser

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BASH = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.S) for line in block.splitlines()]
TEMPLATE = ROOT / "book/template/my_chapter.ipynb"
HOOKS = [
    hook for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for hook in repo["hooks"]
]
# the tools of this environment come first, as in an activated one
PATH = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
ENVIRONMENT = {**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)}


def run(command, folder=ROOT):
    return subprocess.run(command, shell=True, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.parametrize("command", BASH)
def test_command_exists(command):
    program, *arguments = shlex.split(command)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {re.match(r"[\w-]+", requirement).group() for requirement in extras["dev"]}
    assert program in {"source", *declared} or shutil.which(program, path=PATH)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
    if arguments[:2] == ["-m", "gradinv"]:
        _parser().parse_args(arguments[2:])
    for argument in arguments:
        if argument.startswith(("tests/", "book/")):
            assert (ROOT / argument).exists(), argument


@pytest.mark.parametrize("path", sorted(set(re.findall(r"[\w./-]+/[\w.-]+\.(?:py|yml|bib|md|ipynb)\b", TEXT))))
def test_named_file_exists(path):
    assert (ROOT / path).exists() or pathlib.Path(path).stem == "NAME"


def test_copy_of_the_template_is_a_chapter_that_runs(tmp_path):
    """The page's steps, in a checkout that holds nothing but the package and the new chapter."""
    row = re.search(r"```yaml\n(.*?)```", TEXT, re.S)[1].replace("my_chapter", "new")
    copy = next(line for line in BASH if line.startswith("sed ")).replace("NAME", "new")
    start = next(line for line in BASH if "--scale smoke" in line).replace("NAME", "new")
    (tmp_path / "gradinv").symlink_to(ROOT / "gradinv")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book").mkdir()
    (tmp_path / "book/template").symlink_to(ROOT / "book/template")
    (tmp_path / "book/claims.yml").write_text(row)
    (tmp_path / "_toc.yml").write_text("parts: [{chapters: [{file: notebooks/new}]}]")
    assert run(copy, tmp_path).returncode == 0
    new = tmp_path / "notebooks/new.ipynb"
    nbformat.write(add_solutions(nbformat.read(new, 4)), new)
    done = subprocess.run(
        f"{start} --write",
        shell=True,
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "new.exact: reproduced" in done.stdout
    executed = nbformat.read(new, 4)
    template = add_solutions(nbformat.read(TEMPLATE, 4))
    assert [cell.source.replace("my_chapter", "new") for cell in template.cells] == [c.source for c in executed.cells]


def test_template_is_not_a_page_of_the_book():
    assert "template" not in (ROOT / "_toc.yml").read_text()


# --- the hooks ---


def test_hooks_need_no_network():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {hook["language"] for hook in HOOKS} == {"system"}


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_hook_passes_on_what_is_committed(hook):
    """On the template and a file of the package; ruff as a check only, so that a test never rewrites a file."""
    # the ledger's tests are only collected here, since they are part of this run anyway
    check = {"ruff-format": " --check", "ledger": " --collect-only"}.get(hook["id"], "")
    files = "book/template/my_chapter.ipynb" + (" gradinv/files.py" if hook["id"].startswith("ruff") else "")
    done = run(f"{hook['entry']}{check} {files if hook.get('pass_filenames', True) else ''}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_hooks_watch_files_that_exist():
    tracked = run("git ls-files").stdout.splitlines()
    for hook in HOOKS:
        assert not tracked or "types_or" in hook or any(re.search(hook["files"], path) for path in tracked)


def test_normalise_repairs_once(tmp_path):
    notebook = nbformat.read(TEMPLATE, 4)
    notebook.cells[5].metadata["collapsed"] = True
    notebook.metadata["language_info"]["version"] = "3.99"
    path = tmp_path / "some.ipynb"
    nbformat.write(notebook, path)
    command = f"python {ROOT / 'tests/normalise.py'} {path}"
    assert run(command).returncode == 1
    assert path.read_bytes() == TEMPLATE.read_bytes()
    assert run(command).returncode == 0


def test_readme_leads_to_the_page():
    assert "(CONTRIBUTING.md)" in (ROOT / "README.md").read_text()
