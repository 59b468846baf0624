"""Nothing is lost: a file is written beside its place and then moved into it."""

import os
import pathlib
import tempfile
from collections.abc import Callable


def write_atomically(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Call `write(temporary)` and move what it wrote to `path`; on any error `path` stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = pathlib.Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
