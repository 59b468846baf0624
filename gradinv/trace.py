"""What a network does to one picture, call by call: which functions run, on what, and what they make.

Every PyTorch function that runs is seen, whether a module called it or the code of `forward`, so that sums,
concatenations and weights that are used directly are there too. Nothing is computed where that can be helped: the
weights are replaced by shapes.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Call:
    """One function that took a value made from the picture.

    name: of the innermost module that ran it; kind: that module's class where the module holds no others, else the
    function's name; function: its name; takes: the calls (numbers in the list, -1 for the picture) that made its
    inputs; parameters: names of the parameters it used; weight: of a convolution or a linear map, the parameter's
    name, else None; options: of a convolution or a padding, how it runs; input_shape: of the first input that was made
    from the picture, with the batch axis; size: entries of all that it gives.
    """

    name: str
    kind: str
    function: str
    takes: tuple[int, ...]
    parameters: tuple[str, ...]
    weight: str | None
    weight_shape: tuple[int, ...]
    options: dict
    input_shape: tuple[int, ...]
    size: int


# What depends on the shape of a value only
CONSTANT = ("new_", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "size", "dim")


def trace(model: nn.Module, input_shape: tuple[int, ...]) -> list[Call]:
    """The calls of a forward pass in eval mode, in running order.

    Raises ValueError where the model does not accept a picture of that shape (channels, height, width) or (features,).
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    try:  # shapes alone, unless the model looks at values
        return _run(model, input_shape, "meta")
    except Exception:
        pass
    try:
        return _run(model, input_shape, None)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"input_shape {tuple(input_shape)} does not fit the model: {error}") from error


@torch.no_grad()
def _run(model: nn.Module, input_shape: tuple[int, ...], device: str | None) -> list[Call]:
    def stand_in(value: Tensor) -> Tensor:
        other = value.to(device or value.device)
        return nn.Parameter(other, requires_grad=False) if isinstance(value, nn.Parameter) else other

    tensors = {id(value): stand_in(value) for value in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, tensors).eval()
    reference = next(model.parameters(), torch.empty(0, device=device))
    picture = torch.zeros(1, *input_shape, dtype=reference.dtype, device=reference.device)
    recorder = _Recorder(model, picture)
    inside = [""]
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True)
    recorder.inside, recorder.modules = inside, dict(model.named_modules())
    with recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(picture)
    return recorder.calls


class _Recorder(TorchFunctionMode):
    """Notes every function that takes a value made from the picture."""

    def __init__(self, model: nn.Module, picture: Tensor):
        super().__init__()
        self.calls: list[Call] = []
        self.names = {id(value): name for name, value in model.named_parameters(remove_duplicate=False)}
        # kept alive, so that no address is given to another tensor
        self.made, self.kept = {id(picture): -1}, [picture]
        self.inside: list[str] = [""]
        self.modules: dict[str, nn.Module] = {}

    def __torch_function__(self, function: Callable, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        takes = tuple(dict.fromkeys(self.made[id(value)] for value in given if id(value) in self.made))
        shapes = [tuple(value.shape) for value in given if id(value) in self.made]
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        outputs = list(_tensors(result))
        if not takes or not outputs or name.startswith(CONSTANT):
            return result
        parameters = tuple(self.names[id(value)] for value in given if id(value) in self.names)
        self.calls.append(self._call(name, takes, parameters, given, (args, kwargs), shapes[0], outputs))
        for value in outputs:
            self.made[id(value)] = len(self.calls) - 1
            self.kept.append(value)
        return result

    def _call(self, function, takes, parameters, given, arguments, shape, outputs) -> Call:
        module = self.modules[self.inside[-1]]
        kind = function if list(module.children()) else type(module).__name__
        weight, options = None, {}
        if function in ("conv2d", "linear") and len(given) > 1 and id(given[1]) in self.names:
            weight = self.names[id(given[1])]
        if function in OPTIONS:
            options = OPTIONS[function](*arguments[0], **arguments[1])
        return Call(
            self.inside[-1],
            kind,
            function,
            takes,
            parameters,
            weight,
            tuple(given[1].shape) if weight else (),
            options,
            shape,
            sum(value.numel() for value in outputs),
        )


def _conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> dict:
    return {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def _pad(input, pad, mode="constant", value=None) -> dict:
    return {"pad": tuple(pad), "mode": mode}


OPTIONS = {"conv2d": _conv2d, "pad": _pad}


def _tensors(value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
