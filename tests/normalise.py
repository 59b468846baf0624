"""Bring notebooks into the form in which the runner stores them: `python tests/normalise.py FILE ...`.

Exits with 1 where it had to change one, as a hook before a commit should.
"""

import functools
import pathlib
import sys

import nbformat

from gradinv.chapters import normalise
from gradinv.files import write_atomically


def bring_into_form(path: pathlib.Path) -> bool:
    """Rewrites the file where it is not in the normal form, and returns whether it was so."""
    notebook = nbformat.read(path, 4)
    before = nbformat.writes(notebook)
    if nbformat.writes(normalise(notebook)) == before:
        return False
    write_atomically(path, functools.partial(nbformat.write, notebook))
    return True


if __name__ == "__main__":
    changed = [name for name in sys.argv[1:] if bring_into_form(pathlib.Path(name))]
    for name in changed:
        print(f"brought into the normal form: {name}")
    sys.exit(bool(changed))
