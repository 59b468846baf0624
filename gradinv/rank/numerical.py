"""How many directions of a layer's input are lost, and which, by the numerical rank of all its equations."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from scipy.linalg.lapack import dpstrf
from torch import Tensor, nn

from gradinv import layers as layers_

# Above this many rows a Gram matrix takes more than a gigabyte.
LARGEST = 9_500


def nullity(conv: nn.Conv2d, input_shape: tuple[int, int, int], *, seed: int = 0) -> int | None:
    """How many dimensions of a convolution's input neither its weight gradient nor its output determine.

    Numerical rank in float64 of the layer's equations for its own weights and random sensitivities, which is the
    generic rank. The gradient's equations act on each input channel alike, so their null space is found once, and
    the output's equations are restricted to it.

    Args:
        conv: any convolution.
        input_shape: (channels, height, width) of its input.

    Returns:
        The number of lost dimensions, or None where the matrices would be larger than `LARGEST`; `generic_nullity`
        counts instead.
    """
    if not isinstance(conv, nn.Conv2d):
        raise ValueError(f"conv must be an nn.Conv2d, got {type(conv).__name__}")
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
            free = null_space(rows[filters].flatten(0, 1))
        seen = (operator, weight[filters], known[:, filters])
        scale, outputs = weight[filters].square().sum().item(), int(known[:, filters].sum())
        image, back = partial(_image, *seen), partial(_back, *seen)
        inputs = weight.shape[1]
        parts.append(_Part(group * inputs, inputs, tuple(size), free, image, back, outputs, scale))
    return parts


def null_space(rows: Tensor) -> Tensor:
    """An orthonormal basis, one vector a row, of what the rows (rows, unknowns) leave open."""
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
