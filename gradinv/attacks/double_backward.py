"""A copy of a network for gradient matching: a gradient for each run, and no work whose result nobody reads.

Matching needs grad_x <v, g(x)>, where g is the gradient with respect to the weights. Plain autograd gives one g for
the whole batch, and on the way back through g it computes weight gradients that are thrown away: 9 times the
work of a forward pass, where 7 suffice. Here every parameter becomes a stack of equal weights, one a run, so that
each run has its own g; and the convolution's backward of the backward leaves the weights out. Batch norm
with frozen statistics and fully connected layers need only the stack.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from gradinv.client import working_copy

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
# Convolutions with at most this many weights go through one grouped call for all runs; larger ones are faster in turn.
GROUPED = 2**17
# Where a convolution has at most this many output pixels, its weight gradient is one matrix product over patches.
FEW_PIXELS = 128


@dataclass
class Stacked:
    """A network that takes the pictures of several runs, (runs * n, ...), in the order of the runs.

    weights: (runs, ...) leaves by parameter name, with respect to which a loss has a gradient for each run; a
        parameter of a layer that is not covered, possible with one run only, is there itself, unstacked.
    reads_weights: whether a backward pass is after the weights' gradient. Set it to False for the pass that
        is after the pictures alone.
    """

    model: nn.Module
    runs: int
    weights: dict[str, Tensor]
    reads_weights: bool = True


def stack(model: nn.Module, mode: str, names: Collection[str], runs: int, *, fast: bool = True) -> Stacked:
    """A copy of the model for several runs, with weights to take the gradient by for the given parameter names.

    fast=False leaves every layer to autograd. Raises ValueError where several runs cannot share a pass, since a layer
    with parameters is not a convolution, a fully connected layer or a batch norm with frozen statistics.
    """
    copy = working_copy(model, mode)
    named = dict(copy.named_parameters())
    stacked = Stacked(copy, runs, {})
    covered: dict[Tensor, Tensor] = {}
    for module in copy.modules():
        cover = _cover(module) if fast else None
        if cover is not None:
            for parameter in module.parameters(recurse=False):
                if parameter not in covered:
                    covered[parameter] = parameter.detach().expand(runs, *parameter.shape)
            pair = [covered.get(module._parameters[part]) for part in ("weight", "bias")]
            module.forward = cover(module, stacked, *pair)  # on the copy only; hooks and sharing stay as they are
    copy.requires_grad_(False)
    for name in names:
        if named[name] not in covered and runs > 1:
            raise ValueError(f"{name} has no gradient for each of {runs} runs: its layer is not covered")
        stacked.weights[name] = covered.get(named[name], named[name]).requires_grad_(True)
    return stacked


def _cover(module: nn.Module) -> Callable | None:
    """What takes the place of a layer's forward, where there is something; subclasses may do anything, so they stay."""
    if module._parameters.get("weight") is None:  # none of its own: frozen away, or made by a parametrisation
        return None
    if type(module) is nn.Conv2d:
        return _convolution
    if type(module) is nn.Linear:
        return _linear
    if type(module) in NORMS and not module.training and module.running_mean is not None:
        return _frozen_norm
    return None


def _linear(layer: nn.Linear, stacked: Stacked, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(stacked.runs, -1, layer.in_features)
        if bias is None:
            z = torch.bmm(rows, weight.transpose(1, 2))
        else:
            z = torch.baddbmm(bias[:, None], rows, weight.transpose(1, 2))
        return z.reshape(*x.shape[:-1], layer.out_features)

    return forward


def _frozen_norm(
    layer: nn.BatchNorm1d | nn.BatchNorm2d, stacked: Stacked, weight: Tensor, bias: Tensor
) -> Callable[[Tensor], Tensor]:
    inverse = (layer.running_var + layer.eps).rsqrt()

    def forward(x: Tensor) -> Tensor:
        by_run = x.unflatten(0, (stacked.runs, -1))
        shape = (stacked.runs, 1, -1, *[1] * (x.ndim - 2))
        scale = weight * inverse
        shift = bias - layer.running_mean * scale
        return torch.addcmul(shift.view(shape), by_run, scale.view(shape)).flatten(0, 1)

    return forward


def _convolution(layer: nn.Conv2d, stacked: Stacked, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    pads = layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    geometry = (layer.stride, (0, 0) if pads else layer.padding, layer.dilation, layer.groups)

    def forward(x: Tensor) -> Tensor:
        if pads:
            x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        return _Convolution.apply(x, weight, bias, stacked, geometry)

    return forward


class _Convolution(torch.autograd.Function):
    """A convolution by weights that all runs share, whose weight gradient is one a run."""

    @staticmethod
    def forward(ctx, x, weight, bias, stacked, geometry):
        ctx.save_for_backward(x, weight)
        ctx.stacked, ctx.geometry = stacked, geometry
        return torch.conv2d(x, weight[0], None if bias is None else bias[0], *geometry)

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        wanted = [need and (i == 0 or ctx.stacked.reads_weights) for i, need in enumerate(ctx.needs_input_grad[:3])]
        return *_ConvolutionBackward.apply(slope, x, weight, ctx.stacked.runs, ctx.geometry, wanted), None, None


class _ConvolutionBackward(torch.autograd.Function):
    """The gradient of a convolution, whose own gradient is with respect to slope and input, never the weights."""

    @staticmethod
    def forward(ctx, slope, x, weight, runs, geometry, wanted):
        ctx.save_for_backward(slope, x, weight)
        ctx.runs, ctx.geometry = runs, geometry
        ctx.set_materialize_grads(False)
        return (
            conv2d_input(x.shape, weight[0], slope, *geometry) if wanted[0] else None,
            _weight_gradient(slope, x, weight, geometry) if wanted[1] else None,
            slope.unflatten(0, (runs, -1)).sum((1, 3, 4)) if wanted[2] else None,
        )

    @staticmethod
    def backward(ctx, by_input, by_weight, by_bias):
        slope, x, weight = ctx.saved_tensors
        to_slope = to_x = None
        if by_weight is not None:
            to_slope = _convolve(x, by_weight, ctx.geometry)
            if ctx.needs_input_grad[1]:
                to_x = _input_gradient(x, by_weight, slope, ctx.geometry)
        if by_input is not None:
            more = torch.conv2d(by_input, weight[0], None, *ctx.geometry)
            to_slope = more if to_slope is None else to_slope.add_(more)
        if by_bias is not None:
            spread = by_bias[:, None, :, None, None].expand_as(slope.unflatten(0, (ctx.runs, -1))).flatten(0, 1)
            to_slope = spread.contiguous() if to_slope is None else to_slope.add_(spread)
        return to_slope, to_x, None, None, None, None


# Three maps between the pictures of several runs and weights that differ from run to run, (runs, o, c, kh, kw).


def _convolve(x: Tensor, weight: Tensor, geometry: tuple) -> Tensor:
    runs = len(weight)
    if _grouped(weight):
        return _split(torch.conv2d(_merge(x, runs), weight.flatten(0, 1), None, *_groups(geometry, runs)), runs)
    parts = zip(x.chunk(runs), weight, strict=True)
    return _join([torch.conv2d(part, w, None, *geometry) for part, w in parts])


def _input_gradient(x: Tensor, weight: Tensor, slope: Tensor, geometry: tuple) -> Tensor:
    runs = len(weight)
    if _grouped(weight):
        merged, weight = _merge(slope, runs), weight.flatten(0, 1)
        return _split(conv2d_input(_merge(x, runs).shape, weight, merged, *_groups(geometry, runs)), runs)
    parts = zip(x.chunk(runs), weight, slope.chunk(runs), strict=True)
    return _join([conv2d_input(part.shape, w, s, *geometry) for part, w, s in parts])


def _weight_gradient(slope: Tensor, x: Tensor, weight: Tensor, geometry: tuple) -> Tensor:
    runs = len(weight)
    if _grouped(weight):
        shape, geometry = weight.flatten(0, 1).shape, _groups(geometry, runs)
        return conv2d_weight(_merge(x, runs), shape, _merge(slope, runs), *geometry).view(weight.shape)
    stride, padding, dilation, groups = geometry
    if groups == 1 and slope[0, 0].numel() <= FEW_PIXELS:
        patches = functional.unfold(x, weight.shape[-2:], dilation, padding, stride)
        by_run = [each.unflatten(0, (runs, -1)).transpose(1, 2).flatten(2) for each in (slope.flatten(2), patches)]
        return torch.bmm(by_run[0], by_run[1].transpose(1, 2)).view(weight.shape)
    parts = zip(x.chunk(runs), slope.chunk(runs), strict=True)
    return _join([conv2d_weight(part, weight.shape[1:], s, *geometry)[None] for part, s in parts])


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _groups(geometry: tuple, runs: int) -> tuple:
    *rest, groups = geometry
    return *rest, runs * groups


def _grouped(weight: Tensor) -> bool:
    return len(weight) > 1 and weight[0].numel() <= GROUPED


def _merge(x: Tensor, runs: int) -> Tensor:
    """(runs * n, c, h, w) to (n, runs * c, h, w): the runs as groups of channels."""
    return x.unflatten(0, (runs, -1)).transpose(0, 1).flatten(1, 2)


def _split(x: Tensor, runs: int) -> Tensor:
    """The way back from `_merge`."""
    return x.unflatten(1, (runs, -1)).transpose(0, 1).flatten(0, 1)
