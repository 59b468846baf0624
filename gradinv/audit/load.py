"""A network by the name of what makes it, as the command line takes it."""

import difflib
import importlib
import importlib.util
import pathlib
import sys

from torch import nn

from gradinv.layers import NotCovered


def input_shape(text: str) -> tuple[int, ...]:
    """The shape that "3x32x32" or "784" stands for. Raises ValueError for another text."""
    sizes = text.lower().split("x")
    if len(sizes) not in (1, 3) or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"input must be CHANNELSxHEIGHTxWIDTH or FEATURES, such as 3x32x32 or 784, got {text!r}")
    return tuple(int(size) for size in sizes)


def load(place: str) -> nn.Module:
    """The network at MODULE:FACTORY.

    MODULE is importable, from the current folder too, or the path of a .py file. FACTORY is a module, or gives one
    when called without arguments.

    Raises ValueError with one line that says what went wrong.
    """
    where, colon, name = place.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(f"the model must be MODULE:FACTORY, such as torchvision.models:resnet18, got {place!r}")
    path = pathlib.Path(where)
    sys.path.insert(0, str(path.resolve().parent if path.suffix == ".py" else pathlib.Path.cwd()))
    try:
        return _made(_imported(where), where, name)
    finally:
        sys.path.pop(0)


def _made(module, where: str, name: str) -> nn.Module:
    place = f"{where}:{name}"
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("_")], 3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise ValueError(f"{where} has no {name}{hint}")
    made = getattr(module, name)
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise ValueError(f"{place} must be a network or give one when called, got {type(made).__name__}")
        try:
            made = made()
        except (Exception, SystemExit) as error:
            raise ValueError(f"{place} failed when called without arguments: {in_one_line(error)}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"{place} must give an nn.Module, got {type(made).__name__}")
    return made


def _imported(where: str):
    path = pathlib.Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise ValueError(f"there is no file {where}")
    try:
        if path.suffix != ".py":
            return importlib.import_module(where)
        name = f"audited_{path.stem}"  # which hides no other module
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise ValueError(f"{where} could not be imported: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """An error in one line, with its kind where that is not this package's own."""
    words = " ".join(str(error).split())
    return words if isinstance(error, NotCovered) else f"{type(error).__name__}: {words}".rstrip(": ")
