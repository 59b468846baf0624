"""A network read as its layers, once: what the analytic attacks and the rank analysis stand on."""

import copy
import math
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradinv.victims import Normalize, NoSkip


@dataclass(frozen=True)
class Layer:
    """One leaf module as it ran.

    name and module as in the model; input_shape and output_shape of one picture, without the batch axis;
    follows says whether its input is the previous layer's output, unchanged or reshaped (for the first layer:
    the picture); takes and gives are marks of its input and output, the same for one value wherever it goes.
    """

    name: str
    module: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    follows: bool
    takes: tuple = ()
    gives: tuple = ()


@torch.no_grad()
def read(model: nn.Module, input_shape: tuple[int, ...]) -> list[Layer]:
    """The leaf modules in the order in which they run on one picture of shape (c, h, w) or (features,).

    Raises ValueError when the model does not accept a picture of that shape.
    """
    if len(input_shape) not in (1, 3):
        raise ValueError(f"input_shape must be (channels, height, width) or (features,), got {tuple(input_shape)}")
    # the copy, which gets the hooks, shares the weights: nothing here writes to them
    tensors, own = (*model.parameters(), *model.buffers()), dict(model.named_modules())
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
    reference = next(model.parameters(), torch.empty(0))
    picture = torch.zeros(1, *input_shape, dtype=reference.dtype, device=reference.device)
    layers: list[Layer] = []
    arrived: dict[str, tuple] = {}
    # Keeping every output alive keeps its address from being given to another tensor.
    left, kept = [_identity(picture)], [picture]

    def before(name):
        # read before the layer runs, since an in-place activation changes its own input
        return lambda module, inputs, named: arrived.update({name: _identity(_first(inputs, named))})

    def after(name):
        def hook(module, inputs, named, output):
            taken, given = _first(inputs, named), _first((output,), {})
            shapes, takes, gives = (tuple(taken.shape[1:]), tuple(given.shape[1:])), arrived[name], _identity(given)
            layers.append(Layer(name, own[name], *shapes, takes == left[-1], takes, gives))
            left.append(gives)
            kept.append(given)

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_pre_hook(before(name), with_kwargs=True)
            module.register_forward_hook(after(name), with_kwargs=True)
    try:
        model(picture)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        raise ValueError(f"input_shape {tuple(input_shape)} does not fit the model: {error}") from error
    return layers


def _first(inputs: tuple, named: dict) -> Tensor:
    """The first tensor among a layer's arguments or outputs; a recurrent layer gives several, nested."""
    for value in (*inputs, *named.values()):
        found = value if isinstance(value, Tensor) else _first(tuple(value), {}) if isinstance(value, tuple) else None
        if found is not None:
            return found
    return torch.empty(1, 0)


def _identity(tensor: Tensor) -> tuple:
    """The same for a tensor and its reshapes; another one after any change in place, such as a skip's addition."""
    storage = tensor.untyped_storage()._cdata  # tensors without data, those of the meta device, have one too
    return storage, tensor.storage_offset(), tensor.numel(), tensor.is_contiguous(), tensor._version


class Operator:
    """A linear layer as the map z = W x and all that an attack asks of it, in double precision on the CPU.

    Of a layer with weights W and sensitivities k = dL/dz, the gradient is dL/dW = K x, where K holds k in place of W
    (Zhu & Blaschko 2021, eqs. 13 and 14). Nothing here builds a matrix.

    layer: a convolution, a fully connected layer or an average pooling; pool: an average pooling right after it,
        which counts as a part of it.
    input_shape, output_shape: of one picture; bias: what it gives for a zero input.
    """

    def __init__(self, layer: Layer, pool: Layer | None = None):
        module = layer.module
        self.name, self.input_shape, self.output_shape = layer.name, layer.input_shape, (pool or layer).output_shape
        self.pools = [part.module for part in (layer, pool) if part and not hasattr(part.module, "weight")]
        self.module = module
        self.weight = module.weight.detach().double().cpu() if hasattr(module, "weight") else None
        self.weight_name = f"{layer.name}.weight" if layer.name else "weight"
        self.groups = getattr(module, "groups", 1)
        self._sensitivity_shape = layer.output_shape if self.weight is not None else layer.input_shape
        self._pads, self._mode, self._geometry = None, "constant", {}
        if isinstance(module, nn.Conv2d):
            self._geometry = {"stride": module.stride, "dilation": module.dilation}
            if module.padding_mode == "zeros" and not isinstance(module.padding, str):
                self._geometry["padding"] = module.padding
            else:
                self._pads = pads_of(module.padding, module.kernel_size, module.dilation)
                self._mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self.bias = torch.zeros(1, *self.output_shape, dtype=torch.float64)
        if getattr(module, "bias", None) is not None:
            bias = module.bias.detach().double().cpu().view(1, -1, *[1] * (len(layer.output_shape) - 1))
            self.bias = self._pool(bias.expand(1, *layer.output_shape))

    def apply(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """W x for inputs (n, *input_shape), without the bias; `weight` may stand for W."""
        weight = self.weight if weight is None else weight
        if isinstance(self.module, nn.Linear):
            return functional.linear(x, weight)
        return self.convolve(x, weight, self.groups)

    def adjoint(self, z: Tensor, weight: Tensor | None = None) -> Tensor:
        """W^T z for outputs (n, *output_shape). With a gradient as `weight` and k as z it is K^T of that gradient."""
        weight = self.weight if weight is None else weight
        return z @ weight if isinstance(self.module, nn.Linear) else self.convolve_back(z, weight, self.groups)

    def sensitivity(self, k: Tensor) -> Tensor:
        """dL/dz of the layer itself from that behind its pooling; the same where nothing is pooled."""
        shape = (k.shape[1], *self._sensitivity_shape[1:])
        return transposed(self._pool, k, shape) if self.pools else k

    def weight_gradient(self, x: Tensor, k: Tensor) -> Tensor:
        """K x = dL/dW for one input and one sensitivity."""
        k = self.sensitivity(k)
        if isinstance(self.module, nn.Conv2d):
            return nn.grad.conv2d_weight(self._pad(x), self.weight.shape, k, **self._geometry, groups=self.groups)
        return k.T @ x

    def convolve(self, x: Tensor, weight: Tensor | None, groups: int = 1) -> Tensor:
        """The layer on any channels of its input: `weight` (filters, channels, ...) says which filters see them."""
        if isinstance(self.module, nn.Conv2d):
            x = functional.conv2d(self._pad(x), weight, **self._geometry, groups=groups)
        elif isinstance(self.module, nn.Linear):
            x = functional.conv2d(x, weight)
        return self._pool(x)

    def convolve_back(self, z: Tensor, weight: Tensor | None, groups: int = 1) -> Tensor:
        """The transpose of `convolve`."""
        z = self.sensitivity(z)
        if isinstance(self.module, nn.Linear):
            return nn.grad.conv2d_input((len(z), weight.shape[1], 1, 1), weight, z)
        if not isinstance(self.module, nn.Conv2d):
            return z
        shape = (weight.shape[1] * groups, *self.input_shape[1:])
        padded = self._pad(z.new_zeros(1, *shape)).shape[1:]
        z = nn.grad.conv2d_input((len(z), *padded), weight, z, **self._geometry, groups=groups)
        return z if self._pads is None else transposed(self._pad, z, shape)

    def gradient_rows(self, k: Tensor) -> Tensor:
        """K for one plane of the input, (filters, height * width of the kernel, pixels).

        A weight meets one input channel only, so K holds this block once for each of them (K = I x K0). A fully
        connected layer sees planes of one pixel.
        """
        if isinstance(self.module, nn.Linear):
            return k.view(-1, 1, 1)
        height, width = self.input_shape[1:]
        pixels = torch.eye(height * width, dtype=torch.float64).view(-1, 1, height, width)
        patches = functional.unfold(self._pad(pixels), self.module.kernel_size, **self._geometry)
        return torch.einsum("pol,fl->fop", patches, self.sensitivity(k)[0].flatten(1))

    def _pad(self, x: Tensor) -> Tensor:
        return x if self._pads is None else functional.pad(x, self._pads, self._mode)

    def _pool(self, z: Tensor) -> Tensor:
        for pool in self.pools:
            z = pool(z)
        return z


def balance(operator: Operator, k: Tensor) -> float:
    """What to multiply the gradient's equations K x = dL/dW by, beside z = W x, before least squares.

    k is small, so unscaled they would drown in the error that z carries from the layer above. This makes a column of
    them ten times as long as one of W.
    """
    return 10 * float(operator.weight.norm() / operator.weight.shape[1] ** 0.5 / operator.sensitivity(k).norm())


@dataclass(frozen=True)
class Stage:
    """A linear layer of a chain, and the elementwise layers after it, up to the next linear one."""

    operator: Operator
    after: tuple[Layer, ...]

    @property
    def name(self) -> str:
        return self.operator.name

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Every linear layer in it."""
        return (self.operator,)

    @property
    def elementwise(self) -> tuple[Layer, ...]:
        """Every elementwise layer in it."""
        return self.after

    def forward(self, x: Tensor) -> Tensor:
        """What the stage gives for inputs (n, *input_shape), in any shape."""
        return through(self.after, self.operator.apply(x.reshape(-1, *self.operator.input_shape)) + self.operator.bias)

    def undo(self, x: Tensor, k: Tensor, tolerance: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """From outputs of the stage and dL/dx there: outputs of the operator without bias, dL/dz, and which are known.

        See `undo`.
        """
        x, k, known = undo(self.after, x, k, tolerance)
        x, k, known = (value.reshape(len(x), *self.operator.output_shape) for value in (x, k, known))
        return x - self.operator.bias, k, known


class Block:
    """A residual block of two linear layers as a stage of a chain (Zhu & Blaschko 2021, appendix D).

    Its output, before the elementwise layers after it, is f = W2 x2 + S x + a constant, where x2 = a(W1 x). The
    scales of a frozen batch norm count as a part of W2 and S.

    first: W1 and a; second: W2; shortcut: S, or None where it is the identity.
    """

    def __init__(self, first: Stage, second: Stage, shortcut: Stage | None, after: tuple[Layer, ...], name: str):
        self.first, self.second, self.shortcut, self.after, self.name = first, second, shortcut, after, name
        self.shapes = second.operator.input_shape, first.operator.input_shape  # of x2 and of x
        self.scale, self.constant = _scale_and_shift(second)
        self.shortcut_scale = torch.ones_like(self.scale)
        if shortcut:
            self.shortcut_scale, constant = _scale_and_shift(shortcut)
            self.constant = self.constant + constant

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(part.operator for part in (self.first, self.second, self.shortcut) if part)

    @property
    def elementwise(self) -> tuple[Layer, ...]:
        return (
            *self.after,
            *(layer for part in (self.first, self.second, self.shortcut) if part for layer in part.after),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, *self.shapes[1])
        return through(self.after, self.main(self.first.forward(x)) + self.side(x) + self.constant)

    def undo(self, x: Tensor, k: Tensor, tolerance: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """From outputs of the block and dL/dx there: W2 x2 + S x, dL/df, and which entries are known."""
        x, k, known = (value.reshape(self.scale.shape) for value in undo(self.after, x, k, tolerance))
        return x - self.constant, k, known

    def main(self, middle: Tensor) -> Tensor:
        """W2 x2."""
        return self.scale * self.second.operator.apply(middle.reshape(-1, *self.shapes[0]))

    def main_back(self, f: Tensor) -> Tensor:
        return self.second.operator.adjoint(self.scale * f)

    def side(self, x: Tensor) -> Tensor:
        """S x."""
        return self.shortcut_scale * self.shortcut.operator.apply(x) if self.shortcut else x

    def side_back(self, f: Tensor) -> Tensor:
        return self.shortcut.operator.adjoint(self.shortcut_scale * f) if self.shortcut else f


def _scale_and_shift(stage: Stage) -> tuple[Tensor, Tensor]:
    """s and c of a stage s W x + c, whose elementwise layers only scale and shift."""
    zero = torch.zeros(1, *stage.operator.output_shape, dtype=torch.float64)
    z, scale, _ = stage.undo(zero, torch.ones_like(zero))
    return scale, -scale * z


def through(after: tuple[Layer, ...], x: Tensor) -> Tensor:
    """A few elementwise layers, one after the other."""
    for layer in after:
        x = layer.module(x.reshape(len(x), *layer.input_shape))
    return x


def undo(after: tuple[Layer, ...], x: Tensor, k: Tensor, tolerance: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """What went into a few elementwise layers, from what came out and its sensitivity; and which entries are known.

    Behind a ReLU, an output that was cut off is not known; one below `tolerance` times the largest counts as cut off.
    For the margin of an `inverse`, see there.
    """
    known = torch.ones_like(x, dtype=torch.bool)
    for layer in reversed(after):
        x, k, known = (value.reshape(len(x), *layer.output_shape) for value in (x, k, known))
        if isinstance(layer.module, nn.ReLU):
            x = x.where(x > tolerance * x.abs().max(), 0.0)
        if not isinstance(layer.module, nn.Flatten | nn.Unflatten):
            rise = slope(layer.module, x)
            k, known, x = k * rise, known & (rise != 0), inverse(layer.module, x, max(tolerance, 1e-12))
        x, k, known = (value.reshape(len(x), *layer.input_shape) for value in (x, k, known))
    return x, k, known


class NotCovered(ValueError):
    """A network or an update that the recursion does not cover; the message names the layer."""


POOLS = (nn.AvgPool2d, nn.AdaptiveAvgPool2d)
NEITHER = " is neither linear nor elementwise with an inverse"


def obstacle(layers: list[Layer]) -> str:
    """The first layer, among those of `read`, of a kind that no `chain` can hold; empty where there is none.

    It looks at no values, so it is quick for any network; the layers may still not form a chain.
    """
    kinds = (nn.Conv2d, nn.Linear, *POOLS, *ELEMENTWISE, NoSkip, nn.Sequential)
    return next((_what(layer) + NEITHER for layer in layers if not isinstance(layer.module, kinds)), "")


def chain(
    model: nn.Module, input_shape: tuple[int, ...], mode: str = "eval"
) -> tuple[tuple[Layer, ...], list[Stage | Block]]:
    """A network as a chain: the elementwise layers before its first linear layer, and its stages in running order.

    The layers are those of a copy in double precision on the CPU. A residual block is found by what its layers take:
    where a layer takes the output of none, it should be the sum of two branches. What they give is checked in the end.

    Raises NotCovered where it is none, and ValueError where the model does not accept that shape.
    """
    model = copy.deepcopy(model).eval().double().cpu().requires_grad_(False)
    ran = [layer for layer in read(model, input_shape) if not isinstance(layer.module, nn.Sequential)]  # an empty one
    runs = Counter(id(layer.module.weight) for layer in ran if _is_weighted(layer))
    for layer in ran:
        if _is_weighted(layer) and runs[id(layer.module.weight)] > 1:
            raise NotCovered(f"{_what(layer)} has weights that run more than once")
    if ran and not ran[0].follows:
        raise NotCovered(f"before {_what(ran[0])} the model does something that is not a layer")
    plain, *rest = _blocks(ran)
    front, stages = _stages(plain, mode)
    for branches, plain in zip(rest[::2], rest[1::2], strict=True):
        after, more = _stages(plain, mode)
        stages += [_block(*branches, after, mode), *more]
    if not any(operator.weight is not None for stage in stages for operator in stage.operators):
        raise NotCovered("the model has no convolution and no fully connected layer")
    _expect_same_outputs(model, input_shape, front, stages)
    return front, stages


def _what(layer: Layer) -> str:
    return f"{layer.name} ({type(layer.module).__name__})"


def _is_weighted(layer: Layer) -> bool:
    return isinstance(layer.module, nn.Conv2d | nn.Linear)


def _blocks(ran: list[Layer]) -> list:
    """Plain layers, the two branches of a block and the layer behind it, plain layers, and so on in turn."""
    lines: list[list[Layer]] = [[]]
    for layer in ran:
        if lines[-1] and layer.takes != lines[-1][-1].gives:
            lines.append([])
        lines[-1].append(layer)
    line, *lines = lines
    found: list = []
    while lines:
        behind, branch = lines.pop(0), []
        start = max((i for i, layer in enumerate(line) if layer.takes == behind[0].takes), default=None)
        if start is not None and lines:
            behind, branch = lines.pop(0), behind
        elif start is None:
            start = ([0, 0] + [i for i, layer in enumerate(line) if _is_weighted(layer)])[-2]
        if [type(layer.module) for layer in branch] == [NoSkip]:
            line = line + behind
        else:
            found += [line[:start], (line[start:], branch, behind[0])]
            line = behind
    return [*found, line]


def _stages(layers: list[Layer], mode: str) -> tuple[tuple[Layer, ...], list[Stage]]:
    """Layers of which each takes what the one before gives: the elementwise ones that come first, and the stages."""
    front: list[Layer] = []
    parts: list[tuple[list[Layer], list[Layer]]] = []
    for layer in layers:
        if _is_weighted(layer):
            if isinstance(layer.module, nn.Linear) and len(layer.input_shape) != 1:
                raise NotCovered(f"{_what(layer)} runs on many vectors of a {layer.input_shape} input")
            parts.append(([layer], []))
        elif isinstance(layer.module, POOLS):
            if parts and not parts[-1][1] and len(parts[-1][0]) == 1 and _is_weighted(parts[-1][0][0]):
                parts[-1][0].append(layer)
            else:
                parts.append(([layer], []))
        else:
            _expect_elementwise(layer.module, _what(layer), mode)
            (parts[-1][1] if parts else front).append(layer)
    return tuple(front), [Stage(Operator(*linear), tuple(after)) for linear, after in parts]


def _block(branch: list[Layer], other: list[Layer], behind: Layer, after: tuple[Layer, ...], mode: str) -> Block:
    """The block of two branches, of which the sum goes to the layer behind."""
    main, side = sorted((branch, other), key=lambda layers: -sum(map(_is_weighted, layers)))
    ahead, stages = _stages(main, mode)
    ahead_of_side, shortcut = _stages(side, mode)
    counts = len(stages), len(shortcut)
    if counts not in ((2, 0), (2, 1)) or any(stage.operator.weight is None for stage in stages):
        raise NotCovered(
            f"before {_what(behind)} the model does something that is not a layer; a sum is covered where it ends a "
            "residual block of two linear layers, beside the identity or one more, "
            f"but here the branches have {counts[0]} and {counts[1]}"
        )
    name = _common_name([*main, *side])
    for layer in (*ahead, *ahead_of_side):
        if not isinstance(layer.module, nn.Identity | nn.Dropout):
            raise NotCovered(f"{_what(layer)} comes before the linear layers of a branch of {name}")
    for layer in (*stages[1].after, *(layer for stage in shortcut for layer in stage.after)):
        if not isinstance(layer.module, nn.Identity | nn.Dropout | nn.BatchNorm1d | nn.BatchNorm2d):
            raise NotCovered(f"{_what(layer)} comes between a linear layer of {name} and the sum of its branches")
    shape = shortcut[0].operator.output_shape if shortcut else stages[0].operator.input_shape
    sizes = {stages[1].operator.output_shape, shape}
    if len(sizes) > 1 or math.prod(shape) != math.prod(behind.input_shape):
        raise NotCovered(
            f"before {_what(behind)} the model does something that is neither a layer nor the sum of branches of {name}"
        )
    return Block(*stages, shortcut[0] if shortcut else None, after, name)


def _common_name(layers: list[Layer]) -> str:
    """The name of the module that holds these layers, or of the first and last of them."""
    parts = zip(*(layer.name.split(".") for layer in layers), strict=False)
    common = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, parts)]
    return ".".join(common) or f"{layers[0].name} to {layers[-1].name}"


def _expect_elementwise(module: nn.Module, what: str, mode: str) -> None:
    """Raise NotCovered unless the module can be undone entry by entry."""
    if not isinstance(module, ELEMENTWISE):
        raise NotCovered(f"{what}{NEITHER}")
    if isinstance(module, nn.LeakyReLU) and not module.negative_slope > 0:
        raise NotCovered(f"{what} has the slope {module.negative_slope}, so it has no inverse")
    if mode == "train" and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.Dropout):
        raise NotCovered(f"{what} is in train mode")
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        if module.running_mean is None:
            raise NotCovered(f"{what} keeps no running statistics")
        if module.weight is not None and not module.weight.all():
            raise NotCovered(f"{what} multiplies a channel by zero")


@torch.no_grad()
def _expect_same_outputs(model, input_shape, front: tuple[Layer, ...], stages: list[Stage | Block]) -> None:
    """Raise NotCovered unless the stages, one after the other, give what the model gives on the way and at the end."""
    picture = torch.linspace(0.1, 0.9, math.prod(input_shape), dtype=torch.float64).view(1, *input_shape)
    took: dict[str, Tensor] = {}

    def note(name):
        return lambda module, inputs, named: took.update({name: _first(inputs, named).clone()})

    hooks = [
        stage.operators[0].module.register_forward_pre_hook(note(stage.name), with_kwargs=True) for stage in stages
    ]
    outputs = model(picture.clone())
    for hook in hooks:
        hook.remove()
    x, before = through(front, picture.clone()), None
    for stage in stages:
        if stage.operators[0].weight is not None and not _same(took[stage.name], x):
            where = f"in {before.name}, or between it and {stage.name}," if before else f"before {stage.name}"
            raise NotCovered(
                f"{where} the model does something that is neither a layer nor the sum of a residual block"
            )
        x, before = stage.forward(x), stage
    if not isinstance(outputs, Tensor) or outputs.shape != x.shape or not _same(outputs, x):
        raise NotCovered("after its last layer, or beside its layers, the model does something that is not a layer")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.allclose(one, other.reshape(one.shape), 1e-6, 1e-9)


def pads_of(padding, kernel, dilation) -> tuple[int, int, int, int]:
    """A convolution's padding, which may be a word, as `functional.pad` takes it: left, right, top, bottom."""
    pads: list[int] = []
    for axis in (1, 0):
        if padding == "same":
            both = dilation[axis] * (kernel[axis] - 1)
            pads += [both // 2, both - both // 2]
        else:
            pads += [0 if padding == "valid" else padding[axis]] * 2
    return tuple(pads)


@torch.enable_grad()
def transposed(linear, z: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The transpose of a linear function of one picture's shape, for outputs z."""
    x = z.new_zeros(len(z), *shape, requires_grad=True)
    return torch.autograd.grad(linear(x), x, z)[0]


def slope(activation: nn.Module, output: Tensor) -> Tensor:
    """The derivative of an activation or of another elementwise layer in eval mode, read off its output.

    Raises TypeError for a module whose slope cannot be read off its output.
    """
    match activation:
        case nn.ReLU():
            return (output > 0).to(output)
        case nn.LeakyReLU():
            return torch.ones_like(output).where(output > 0, activation.negative_slope)
        case nn.Sigmoid():
            return output * (1 - output)
        case nn.Tanh():
            return 1 - output**2
        case nn.ELU():
            return torch.ones_like(output).where(output > 0, output + activation.alpha)
        case nn.Softplus():
            bent = -torch.expm1(-activation.beta * output)
            return bent.where(output * activation.beta <= activation.threshold, 1.0)
        case nn.Identity() | nn.Dropout():
            return torch.ones_like(output)
        case nn.BatchNorm1d() | nn.BatchNorm2d() | Normalize():
            return torch.ones_like(output) * _affine(activation, output)[0]
    raise TypeError(f"the slope of {type(activation).__name__} cannot be read off its output")


def inverse(activation: nn.Module, output: Tensor, margin: float = 1e-12) -> Tensor:
    """The input of an activation or of another elementwise layer in eval mode, from its output.

    An output outside the range, or closer than `margin` times its width to a border, is taken along the tangent at
    that distance, so that the inverse is defined everywhere and has one derivative. A ReLU gives its output back:
    where that is zero, any input below zero was possible.

    Raises TypeError for a module without an inverse.
    """
    match activation:
        case nn.ReLU() | nn.Identity() | nn.Dropout():
            return output
        case nn.LeakyReLU():
            return output.where(output > 0, output / activation.negative_slope)
        case nn.Sigmoid():
            return _tangent(torch.logit, output, margin, 1 - margin)
        case nn.Tanh():
            return _tangent(torch.atanh, output, 2 * margin - 1, 1 - 2 * margin)
        case nn.ELU():
            low = activation.alpha * (margin - 1)
            return output.where(output > 0, _tangent(lambda y: torch.log1p(y / activation.alpha), output, low, 0.0))
        case nn.Softplus():
            beta, linear = activation.beta, output * activation.beta > activation.threshold
            low = _tangent(lambda y: y + torch.log(-torch.expm1(-beta * y)) / beta, output, margin, math.inf)
            return output.where(linear, low)
        case nn.BatchNorm1d() | nn.BatchNorm2d() | Normalize():
            factor, shift = _affine(activation, output)
            return (output - shift) / factor
    raise TypeError(f"{type(activation).__name__} has no inverse")


def _tangent(function, y: Tensor, low: float, high: float) -> Tensor:
    """A monotone function between two borders, and its tangents beyond them."""
    inside = y.clamp(low, high)
    with torch.enable_grad():
        at = inside.detach().requires_grad_()
        (rise,) = torch.autograd.grad(function(at).sum(), at)
    return function(inside) + rise * (y - inside)


def _affine(module: nn.Module, output: Tensor) -> tuple[Tensor, Tensor]:
    """Factor and shift of a layer that scales each channel, for outputs (n, channels, ...)."""
    if isinstance(module, Normalize):
        factor, shift = 1 / module.std, -module.mean / module.std
    else:
        factor = (module.running_var + module.eps).rsqrt()
        factor = factor if module.weight is None else factor * module.weight.detach()
        shift = -module.running_mean * factor
        shift = shift if module.bias is None else shift + module.bias.detach()
    view = (-1, *[1] * (output.ndim - 2))
    return factor.to(output).view(view), shift.to(output).view(view)


ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.Softplus, nn.Identity, nn.Dropout)
ELEMENTWISE = (*ACTIVATIONS, nn.BatchNorm1d, nn.BatchNorm2d, Normalize, nn.Flatten, nn.Unflatten)
