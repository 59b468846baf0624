"""What an install needs: the environment file, the package's extras, and one version everywhere."""

import ast
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

import gradinv

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# names under which a package is imported, where they differ from the name it is installed by
INSTALLED_AS = {"PIL": "pillow", "yaml": "pyyaml", "skimage": "scikit-image", "sklearn": "scikit-learn"}


def names(requirements):
    return {re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower() for requirement in requirements}


def imports(path, *, at_the_top):
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_the_top else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return {INSTALLED_AS.get(name, name) for name in found - sys.stdlib_module_names - {"gradinv"}}


def test_the_environment_holds_python_pip_and_the_package():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == "gradinv" and environment["channels"]
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = (entry for entry in environment["dependencies"] if not isinstance(entry, str))
    assert names(plain) == {"python", "pip"}
    assert pip == {"pip": ["-e .[book,test]"]}


def test_the_environments_python_is_allowed():
    environment = (ROOT / "environment.yml").read_text()
    version = tuple(map(int, re.search(r"python=(\d+)\.(\d+)", environment).groups()))
    least = tuple(map(int, re.search(r">=(\d+)\.(\d+)", PROJECT["project"]["requires-python"]).groups()))
    assert version >= least and sys.version_info >= least


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["project"]["version"] == gradinv.__version__ == str(citation["version"])


def test_extras():
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"book", "test"} <= set(extras)
    assert "pytest" in names(extras["test"]) and "beartype" in names(extras["test"])
    assert "jupyter-book" in names(extras["book"])


@pytest.mark.parametrize("path", sorted((ROOT / "gradinv").rglob("*.py")), ids=lambda path: path.name)
def test_every_import_is_declared(path):
    project = PROJECT["project"]
    extras = set().union(*map(names, project["optional-dependencies"].values()))
    needed = imports(path, at_the_top=True)
    if path.name in ("chapters.py", "__main__.py"):  # which run the book, and so need its extra
        assert needed <= names(project["dependencies"]) | extras
    else:
        assert needed <= names(project["dependencies"])


def test_every_package_and_its_weights_are_installed():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in (ROOT / "gradinv").rglob("__init__.py")
    }
    assert PROJECT["tool"]["setuptools"]["package-data"]["gradinv"] == ["weights/*"]


def test_importing_the_package_needs_no_book():
    others = ("papermill", "jupyter_book", "pytest", "foolbox", "IPython")
    code = f"import sys, gradinv; print([name for name in {others} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
