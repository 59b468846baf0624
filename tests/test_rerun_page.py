"""Every command of the page about rerunning is run, as it stands or in a short form that takes the same path."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "book/rerun.md").read_text()
PROGRAMS = "python|pip|make|git|jupyter|papermill"
BLOCKS = re.findall(r"^ *```bash\n(.*?)^ *```", re.sub(r" \\\n *", " ", TEXT), re.S | re.M)
INLINE = re.findall(rf"`((?:{PROGRAMS}) [^`]+)`", re.sub(r"^ *```.*?^ *```", "", TEXT, flags=re.S | re.M))
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines()] + INLINE
# What is long, needs a network or changes the checkout is made short. FOLDER is a temporary one.
SHORT = [
    (r"^python -m venv \.venv$", "python -m venv --without-pip FOLDER/.venv"),
    (r"^source \.venv/bin/activate$", "python -m venv --without-pip FOLDER/.venv && source FOLDER/.venv/bin/activate"),
    (r"^pip install -e", "pip install --dry-run --no-deps --no-build-isolation -e"),
    (r"^pip install$", "pip install --help"),  # named in a sentence
    (r"^make ", "make -n "),
    (r"--scale laptop", "--scale smoke"),
    (r"-p scale laptop", "-p scale smoke"),
    (r"(gradinv run .*)", r"\1 --out FOLDER"),
    (r"(gradinv run twin_data) --out", r"\1 --scale smoke --out"),
    (r" _build/twin_data", " FOLDER/twin_data"),
    (r"mkdir -p _build", "mkdir -p FOLDER/_build"),
    (r"jupyter lab .*", "jupyter lab --version"),
    (r"gradinv (fetch|train).*", r"gradinv \1 --help"),
    (r"http\.server .*", "http.server --help"),
    (r"--sys-prefix", "--prefix FOLDER"),
    (r"git checkout (\S+)", r"git ls-files --error-unmatch \1"),
    (r"model\.py:", "FOLDER/model.py:"),
]


def short(command):
    for pattern, instead in SHORT:
        command = re.sub(pattern, instead, command)
    return command


def test_commands_are_found():
    assert len(BLOCKS) >= 5 and len(INLINE) >= 10
    assert BLOCKS[0].splitlines()[-1].startswith("python -m gradinv run twin_data")
    assert len(BLOCKS[0].splitlines()) == 4


@pytest.mark.parametrize("command", dict.fromkeys(map(short, COMMANDS)))
def test_command(command, tmp_path):
    if command.startswith("jupyter lab") and not importlib.util.find_spec("jupyterlab"):
        pytest.skip("JupyterLab is not installed")
    if command.startswith("git") and not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("this is no checkout of git")
    (tmp_path / "model.py").write_text("from gradinv import victims\n\n\ndef build():\n    return victims.lenet()\n")
    programs = str(pathlib.Path(sys.executable).parent)  # those of this environment, as in an activated one
    done = subprocess.run(
        ["bash", "-ec", command.replace("FOLDER", str(tmp_path))],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if "--device cuda" in command and not torch.cuda.is_available():
        assert done.returncode == 2 and "finds no CUDA device" in done.stderr
        return
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    if "gradinv run" in command:
        assert (tmp_path / "notebooks/twin_data.ipynb").exists() and "reproduced" in done.stdout
    if command.startswith("papermill"):
        assert "reproduced" in (tmp_path / "twin_data.ipynb").read_text()
