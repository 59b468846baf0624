"""Rank analysis (Zhu & Blaschko 2021, section 4): how many equations a gradient gives for each layer's input.

A layer's input has |x| unknowns. Its weights' gradient gives |W| equations, its output |z| more, and an
over-determined layer before it |V| virtual ones. RA-i = |x| - |W| - |z| - |V|: above zero the input cannot be
recovered in full. The converse fails, since equations can repeat each other; `nullity` counts what is really lost.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy.linalg.lapack import dpstrf
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from gradinv import layers as layers_
from gradinv.victims import NoSkip

# Above this many rows the Gram matrix of `nullity` takes more than a gigabyte.
LARGEST = 9_500

# Layers that hold weights which the counts leave out; passing over them would call a network safe that is not.
UNCOUNTED = (
    *(nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.RNNBase, nn.MultiheadAttention, nn.Bilinear),
)


@dataclass(frozen=True)
class LayerCount:
    """The equations for one layer's input.

    x, weights, z: |x|, |W| and |z|; virtual: |V| as the sum of surpluses of earlier layers; budget: |V| as what is
    left of them after earlier deficits; ra: |x| - |W| - |z|; ra_virtual: ra - virtual.
    """

    name: str
    kind: str
    x: int
    weights: int
    z: int
    virtual: int
    budget: int

    @property
    def ra(self) -> int:
        return self.x - self.weights - self.z

    @property
    def ra_virtual(self) -> int:
        return self.ra - self.virtual


@dataclass(frozen=True)
class BlockCount:
    """The equations for a residual block of two convolutions (appendix D of the paper).

    x, middle, f: entries of the block's input, of what lies between its convolutions, and of its output.
    with_skip: |x| - |W2| - |Ws| - |f|, with Ws the shortcut's weights; without_skip: the larger index of its two
    convolutions; has_skip: which of the two applies.
    """

    name: str
    x: int
    weights1: int
    middle: int
    weights2: int
    weights_shortcut: int
    f: int
    has_skip: bool

    @property
    def with_skip(self) -> int:
        return self.x - self.weights2 - self.weights_shortcut - self.f

    @property
    def without_skip(self) -> int:
        return max(self.x - self.weights1 - self.middle, self.middle - self.weights2 - self.f)

    @property
    def ra(self) -> int:
        return self.with_skip if self.has_skip else self.without_skip


@dataclass(frozen=True)
class RankReport:
    """The counts of a whole network."""

    layers: Sequence[LayerCount]
    blocks: Sequence[BlockCount]

    @property
    def index(self) -> int:
        """The largest RA-i, without virtual constraints: over blocks, and over the layers outside of blocks."""
        inside = tuple(f"{block.name}." for block in self.blocks)
        outside = [layer.ra for layer in self.layers if layer.weights and not layer.name.startswith(inside)]
        return max(outside + [block.ra for block in self.blocks])

    def table(self) -> pd.DataFrame:
        """A row a layer, in the order in which they run."""
        return pd.DataFrame(
            [{**asdict(layer), "ra": layer.ra, "ra_virtual": layer.ra_virtual} for layer in self.layers]
        )

    def block_table(self) -> pd.DataFrame:
        """A row a residual block, with its index as it stands, with and without its skip."""
        return pd.DataFrame(
            [
                {**asdict(block), "ra": block.ra, "with_skip": block.with_skip, "without_skip": block.without_skip}
                for block in self.blocks
            ]
        )

    def plot(self) -> Figure:
        """RA-i of each layer as bars: negative ones have equations to spare."""
        import matplotlib.pyplot as plt

        rows = [layer for layer in self.layers if layer.weights]
        figure, axis = plt.subplots(figsize=(6.4, 0.25 * len(rows) + 1))
        axis.barh([row.name for row in rows], [row.ra for row in rows])
        axis.axvline(0, color="black", linewidth=1)
        axis.set_xscale("symlog")
        axis.invert_yaxis()
        axis.set_xlabel("RA-i = |x| - |W| - |z|")
        return figure


def analyse(model: nn.Module, input_shape: tuple[int, ...]) -> RankReport:
    """Count the equations of every layer.

    Args:
        model: any module whose linear maps are `nn.Conv2d` and `nn.Linear`. Pooling counts as a layer without weights.
        input_shape: (channels, height, width) of one picture.

    Raises:
        ValueError: the model does not accept that shape, has no convolution or linear layer, or has linear maps of
            another kind or weights that run more than once, which the counts do not cover.
    """
    if not isinstance(input_shape, tuple | list) or not all(isinstance(size, int) for size in input_shape):
        raise ValueError(f"input_shape must be (channels, height, width), got {type(input_shape).__name__}")
    rows, virtual, budget = [], 0, 0
    ran = layers_.read(model, input_shape)
    for name, module in model.named_modules():
        if isinstance(module, UNCOUNTED):
            raise ValueError(f"model must have its weights in Conv2d and Linear, got {type(module).__name__} in {name}")
    runs = Counter(id(layer.module.weight) for layer in ran if isinstance(layer.module, nn.Conv2d | nn.Linear))
    if runs and max(runs.values()) > 1:
        raise ValueError("model must run each weight once, got one that runs more often: its gradient is a sum")
    for layer in ran:
        if not isinstance(layer.module, nn.Conv2d | nn.Linear) and layer.input_shape == layer.output_shape:
            continue  # batch norm and activations keep their input's size and are invertible or elementwise
        x, z = torch.Size(layer.input_shape).numel(), torch.Size(layer.output_shape).numel()
        weights = layer.module.weight.numel() if isinstance(layer.module, nn.Conv2d | nn.Linear) else 0
        if not weights and x == z:
            continue
        row = LayerCount(layer.name, type(layer.module).__name__, x, weights, z, virtual, budget)
        rows.append(row)
        surplus = max(z - x, 0)
        virtual += surplus
        budget = max(budget + surplus - max(row.ra, 0), 0)
    if not any(row.weights for row in rows):
        raise ValueError(f"model must have a convolution or a linear layer, got {type(model).__name__}")
    shapes = {layer.name: layer for layer in ran}
    blocks = [_block(name, module, shapes) for name, module in model.named_modules() if isinstance(module, BasicBlock)]
    return RankReport(rows, blocks)


def nullity(conv: nn.Conv2d, input_shape: tuple[int, int, int], *, seed: int = 0) -> int | None:
    """How many dimensions of a convolution's input neither its weight gradient nor its output determine.

    Numerical rank in float64 of the layer's equations for its own weights and random sensitivities, which is the
    generic rank. The gradient's equations act on each input channel alike, so their null space is found once, and
    the output's equations are restricted to it.

    Args:
        conv: any convolution with groups=1 and zero padding.
        input_shape: (channels, height, width) of its input.

    Returns:
        The number of lost dimensions, or None where the matrices would be larger than `LARGEST`.
    """
    if not isinstance(conv, nn.Conv2d):
        raise ValueError(f"conv must be an nn.Conv2d, got {type(conv).__name__}")
    if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        raise ValueError(f"conv must have groups=1 and zero padding given in pixels, got {conv}")
    if len(input_shape) != 3 or input_shape[0] != conv.in_channels:
        raise ValueError(f"input_shape must be ({conv.in_channels}, height, width), got {tuple(input_shape)}")
    operator = layers_.Operator(layers_.read(conv, tuple(input_shape))[0])
    generator = torch.Generator().manual_seed(seed)
    sensitivity = torch.randn(1, *operator.output_shape, generator=generator, dtype=torch.float64)
    return lost(operator, sensitivity)


def lost(operator: layers_.Operator, sensitivity: Tensor | None, known: Tensor | None = None) -> int | None:
    """How many dimensions of a linear layer's input neither its weight gradient nor its output determine.

    The gradient's equations act on each input channel alike, so their null space is found once, and the output's
    equations are restricted to it.

    Args:
        sensitivity: dL/dz (1, *output_shape); None where the gradient of the layer's weights is not there.
        known: which outputs are known, as a mask of that shape; None for all of them.

    Returns:
        The number, or None where the matrices would be larger than `LARGEST`.
    """
    if math.prod(operator.input_shape[1:]) > LARGEST:
        return None
    parts = _parts(operator, sensitivity, known)
    if any(min(part.unknowns, part.outputs) > LARGEST for part in parts):
        return None
    return sum(part.unknowns - part.rank() for part in parts)


def lost_directions(
    operator: layers_.Operator, sensitivity: Tensor | None, known: Tensor | None = None
) -> Float[Tensor, "lost unknowns"]:
    """An orthonormal basis of the dimensions that `lost` counts."""
    found = []
    for part in _parts(operator, sensitivity, known):
        _, vectors = torch.linalg.eigh(part.gram_of_inputs())
        count = part.unknowns - part.rank()
        null = vectors[:, :count].T.reshape(count, part.channels, len(part.free))
        whole = torch.zeros(len(null), *operator.input_shape, dtype=torch.float64)
        whole = whole.view(count, operator.input_shape[0], *part.size)
        whole[:, part.first : part.first + part.channels] = (null @ part.free).view(count, part.channels, *part.size)
        found.append(whole.flatten(1))
    return torch.cat(found)


@dataclass(frozen=True)
class _Part:
    """The input channels that one set of filters sees, and what the gradient's equations leave free in each.

    free: (directions, pixels of a channel); image: from some of these channels and pictures of them to the known
    outputs, and back: its transpose; outputs: how many are known.
    """

    first: int
    channels: int
    size: tuple[int, int]
    free: Tensor
    image: Callable[[slice, Tensor], Tensor]
    back: Callable[[slice, Tensor], Tensor]
    outputs: int
    scale: float

    @property
    def unknowns(self) -> int:
        return len(self.free) * self.channels

    def rank(self) -> int:
        if not self.unknowns or not self.outputs:
            return 0
        gram = self.gram_of_inputs if self.unknowns <= self.outputs else self._gram_of_outputs
        return _rank(gram(), self.scale)

    def gram_of_inputs(self) -> Tensor:
        """The lower half of F^T A^T A F, with A the layer and F the free directions of all channels."""
        count = len(self.free)
        gram = torch.zeros(self.unknowns, self.unknowns, dtype=torch.float64)
        for channel in range(self.channels):
            images = self.image(slice(channel, channel + 1), self.free.view(-1, 1, *self.size))
            back = self.back(slice(channel + 1), images).flatten(2) @ self.free.T
            gram[channel * count : (channel + 1) * count, : (channel + 1) * count] = back.flatten(1)
        return gram

    def _gram_of_outputs(self) -> Tensor:
        """A F F^T A^T, by passing the projector on the free directions through the layer from both sides."""
        projector = (self.free.T @ self.free).view(-1, 1, *self.size)
        total = torch.zeros((), dtype=torch.float64)
        for channel in range(self.channels):
            only = slice(channel, channel + 1)
            half = self.image(only, projector).flatten(1)
            total = total + self.image(only, half.T.reshape(-1, 1, *self.size)).flatten(1)
        return total


def _parts(operator: layers_.Operator, sensitivity: Tensor | None, known: Tensor | None) -> list[_Part]:
    channels, *size = (*operator.input_shape, 1, 1)[:3]  # a fully connected layer sees channels of one pixel
    weight, groups = operator.weight, operator.groups
    if weight is None:  # a pooling treats every channel by itself
        weight, groups = torch.ones(channels, 1, 1, 1, dtype=torch.float64), channels
    weight = weight.view(*weight.shape, *[1] * (4 - weight.ndim))
    if known is None:
        known = torch.ones(1, *operator.output_shape, dtype=torch.bool)
    known = known.view(1, len(weight), *known.shape[2:] or (1, 1))
    rows = None if sensitivity is None else operator.gradient_rows(sensitivity)
    parts = []
    for group in range(groups):
        filters = slice(group * len(weight) // groups, (group + 1) * len(weight) // groups)
        if rows is None:
            free = torch.eye(math.prod(size), dtype=torch.float64)
        else:
            free = _null_space(rows[filters].flatten(0, 1))
        seen = (operator, weight[filters], known[:, filters])
        scale, outputs = weight[filters].square().sum().item(), int(known[:, filters].sum())
        image, back = partial(_image, *seen), partial(_back, *seen)
        inputs = weight.shape[1]
        parts.append(_Part(group * inputs, inputs, tuple(size), free, image, back, outputs, scale))
    return parts


def _null_space(rows: Tensor) -> Tensor:
    _, values, right = torch.linalg.svd(rows, full_matrices=True)
    return right[int((values > values[0] * 1e-10).sum()) :]


def _image(operator: layers_.Operator, weight: Tensor, known: Tensor, only: slice, pictures: Tensor) -> Tensor:
    """What the known outputs are for pictures of some of the channels; zero elsewhere."""
    return operator.convolve(pictures, weight[:, only]) * known


def _back(operator: layers_.Operator, weight: Tensor, known: Tensor, only: slice, outputs: Tensor) -> Tensor:
    return operator.convolve_back(outputs * known, weight[:, only])


def _rank(gram: Tensor, size: float) -> int:
    """Numerical rank of a positive semidefinite matrix, by Cholesky with pivots.

    size: the squared norm of the weights. Rounding is measured against it, since where the gradient's equations leave
    nothing to the output's, the whole matrix is rounding.
    """
    # squaring halves the digits: a relative singular value of 1e-5 is 1e-10 here, well above rounding
    tolerance = 1e-10 * size
    if gram.diagonal().max() <= tolerance:  # LAPACK takes the first pivot without comparing it
        return 0
    return int(dpstrf(gram.numpy(), tol=tolerance, lower=1)[2])


def _block(name: str, block: BasicBlock, shapes: dict[str, layers_.Layer]) -> BlockCount:
    first, second = shapes[f"{name}.conv1"], shapes[f"{name}.conv2"]
    shortcut = block.downsample
    return BlockCount(
        name,
        torch.Size(first.input_shape).numel(),
        block.conv1.weight.numel(),
        torch.Size(first.output_shape).numel(),
        block.conv2.weight.numel(),
        sum(
            module.weight.numel()
            for module in (shortcut.modules() if shortcut else ())
            if isinstance(module, nn.Conv2d)
        ),
        torch.Size(second.output_shape).numel(),
        not isinstance(shortcut, NoSkip),
    )
