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
    inputs; shapes: of these inputs, with the batch axis; constants: how many more tensors it took that are neither
    made from the picture nor from parameters; parameters: names of those it used, directly or in what was computed
    from them; weight: of a convolution or a linear map, the parameter's name where it is one, else None; options: of a
    convolution, a padding or a batch norm, how it runs; size: entries of all the numbers that it gives, without masks
    and places.
    """

    name: str
    kind: str
    function: str
    takes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    constants: int
    parameters: tuple[str, ...]
    weight: str | None
    weight_shape: tuple[int, ...]
    options: dict
    size: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shapes[0]


# What depends on the shape of a value only, and what takes a second tensor for its shape, type or device only
CONSTANT = ("new_", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
LIKE = ("to", "type_as", "expand_as", "view_as", "reshape_as")
# What gives a number to Python, or as many as the values want: the rest of the run can depend on it
LOOKS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__", "nonzero", "unique")


def trace(model: nn.Module, input_shape: tuple[int, ...]) -> list[Call]:
    """The calls of a forward pass in eval mode, in running order.

    A model that looks at values runs on a grey picture.

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
    except Exception as error:
        raise ValueError(f"input_shape {tuple(input_shape)} does not fit the model: {error}") from error


@torch.inference_mode(False)
@torch.no_grad()
def _run(model: nn.Module, input_shape: tuple[int, ...], device: str | None) -> list[Call]:
    def stand_in(value: Tensor) -> Tensor:
        other = value.to(device) if device else value.detach().clone()
        return nn.Parameter(other, requires_grad=False) if isinstance(value, nn.Parameter) else other

    tensors = {id(value): value for module in model.modules() for value in _tensors(vars(module))}
    tensors |= {id(value): value for value in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, {key: stand_in(value) for key, value in tensors.items()}).eval()
    reference = next(model.parameters(), torch.empty(0, device=device))
    picture = torch.full((1, *input_shape), 0.5, dtype=reference.dtype, device=reference.device)
    recorder = _Recorder(model, picture)
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks, and its functions are not seen
            module.register_forward_pre_hook(lambda *_, name=name: recorder.inside.append(name))
            module.register_forward_hook(lambda *_: recorder.inside.__delitem__(-1), always_call=True)
    quiet = warnings.catch_warnings(action="ignore")
    with quiet, torch.random.fork_rng(devices=[]), torch.device(device or reference.device), recorder:
        model(picture)
    return recorder.calls


class _Recorder(TorchFunctionMode):
    """Notes every function that takes a value made from the picture."""

    def __init__(self, model: nn.Module, picture: Tensor):
        super().__init__()
        self.calls: list[Call] = []
        self.inside = [""]
        self.modules = dict(model.named_modules())
        # the call that made each tensor, the last one that changed each memory, and the parameters behind a tensor
        self.made, self.changed = {id(picture): -1}, {}
        self.behind = {id(value): (name,) for name, value in model.named_parameters()}
        self.own = dict(model.named_parameters())
        # all tensors seen, kept alive so that no address is given to another one
        self.kept = {id(picture): picture}

    def __torch_function__(self, function: Callable, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        given = list(_tensors((args, kwargs)))
        makers = [self._maker(value) for value in given]
        versions = [value._version for value in given]
        result = function(*args, **kwargs)
        changed = [value for value, version in zip(given, versions, strict=True) if value._version != version]
        outputs = list({id(value): value for value in (*_tensors(result), *changed)}.values())
        self.kept.update((id(value), value) for value in (*given, *outputs))
        if name.startswith(CONSTANT):
            return result
        if name in LIKE:
            given, makers = given[:1], makers[:1]
        names = tuple(dict.fromkeys(part for value in given for part in self.behind.get(id(value), ())))
        taken = {number: maker for number, maker in enumerate(makers) if maker is not None}
        if not taken:
            self.behind.update((id(value), names) for value in outputs if names and id(value) not in self.behind)
        elif outputs or name in LOOKS:
            shapes = tuple(tuple(given[number].shape) for number in taken)
            constants = sum(
                maker is None and not self.behind.get(id(v)) for v, maker in zip(given, makers, strict=True)
            )
            options = OPTIONS[name](*args, **kwargs) if name in OPTIONS else {}
            self._note(name, tuple(taken.values()), shapes, constants, names, options, outputs)
            self.changed.update((_memory(value), len(self.calls) - 1) for value in changed)
        return result

    def _maker(self, value: Tensor) -> int | None:
        found = [self.made.get(id(value)), self.changed.get(_memory(value))]
        return max((maker for maker in found if maker is not None), default=None)

    def _note(self, function, takes, shapes, constants, parameters, options, outputs) -> None:
        module, weight, shape = self.modules[self.inside[-1]], None, ()
        kind = function if list(module.children()) else type(module).__name__
        used = options.pop("weight", None)
        if self._maker(options.pop("input", torch.empty(0))) is not None and len(self.behind.get(id(used), ())) == 1:
            name = self.behind[id(used)][0]
            if used is self.own[name] and used.ndim == (4 if function == "conv2d" else 2):
                weight, shape = name, tuple(used.shape)
        size = sum(value.numel() for value in outputs if value.is_floating_point() or value.is_complex())
        self.calls.append(
            Call(self.inside[-1], kind, function, takes, shapes, constants, parameters, weight, shape, options, size)
        )
        self.made.update((id(value), len(self.calls) - 1) for value in outputs)


def _memory(value: Tensor) -> int:
    """The same for a tensor and its views."""
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)


def _conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> dict:
    own = {"stride": _pair(stride), "padding": _pair(padding), "dilation": _pair(dilation), "groups": groups}
    return {"input": input, "weight": weight} | own


def _linear(input, weight, bias=None) -> dict:
    return {"input": input, "weight": weight}


def _pad(input, pad, mode="constant", value=None) -> dict:
    return {"pad": tuple(pad), "mode": mode}


def _batch_norm(input, second=None, third=None, fourth=None, fifth=None, training=False, *_, **__) -> dict:
    return {"training": training}


def _pair(value):
    """A number, a sequence of one or of two as two numbers; a word stays."""
    return value if isinstance(value, str) else (value, value) if isinstance(value, int) else (value[0], value[-1])


OPTIONS = {"conv2d": _conv2d, "linear": _linear, "pad": _pad, "batch_norm": _batch_norm}


def _tensors(value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
