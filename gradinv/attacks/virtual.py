"""Virtual constraints: what the layers below can give, where a layer's own equations leave its input open.

R-GAP names them and leaves them aside, because they are not linear (Zhu & Blaschko 2021, appendix C). Say the
equations of a layer fix its input up to a null space, x + N t. The layer below maps a smaller input to more outputs
z = W x', so z lies in the range of W, and activation^-1(x + N t) has to lie there too: an equation for t for each
output more than inputs. Layers further below add theirs. Where these are as many as the unknowns, they are solved from
t = 0, the input of least norm, by damped Gauss-Newton steps.

Where they are fewer, or that stalls, the equations of the gradients of these layers' own weights are added. Their
coefficients jump where an entry of x + N t behind a LeakyReLU changes its sign, and steps stall at the jumps. So the
kink is first made as smooth as that entry is uncertain, and sharpened step by step. The picture may help by staying
within [0, 1].
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradinv.layers import Operator, Stage, undo

LARGEST = 5_000  # unknowns of a layer whose matrices are built
SOLVED = 1e-4  # relative; equations met this closely are met
EXACT = 1e-13  # relative; closer is not possible
STEPS = 20  # Gauss-Newton steps without smoothing, at most
SMOOTH_STEPS = 6  # and at each width of the kink
BOUNDED = (nn.Sigmoid, nn.Tanh, nn.ELU, nn.Softplus)
WIDE = 0.05  # the margin of their inverse at first: beyond their range its tangent would be next to vertical
WIDTHS = [0.5**i for i in range(8)] + [0.3**i for i in range(5, 12)]  # in units of how uncertain an entry is


def virtual_constraints(
    below: list[Stage],
    x: Tensor,
    basis: Tensor,
    k: Tensor,
    gradient: Mapping[str, Tensor],
    tolerance: float,
    pixels: bool = False,
) -> tuple[Tensor, dict]:
    """The input of a layer that its own equations leave open, by what the layers below it can give.

    Args:
        below: the stages below that layer, in running order.
        x: any input that solves its equations, (1, *shape); basis: orthonormal directions (unknowns, lost) that do
            not change them.
        k: dL/dx there; gradient: by parameter name.
        pixels: whether what enters the first of `below` is the picture itself, which lies in [0, 1].

    Returns:
        the input, and for the history: how many constraints there are, how many equations of gradients were used,
        how often all were evaluated, and how far they are from holding (relative).
    """
    levels = _levels(below)
    constraints = sum(level.spare for level in levels)
    facts = {"virtual constraints": constraints, "virtual gradient rows": 0, "evaluations": 0}
    if not constraints:
        return x, facts
    flat, unknowns = x.flatten() - basis @ (basis.T @ x.flatten()), basis.shape[1]
    names = [level.operator.weight_name for level in levels]
    rows = sum(gradient[name].numel() for name in names if name in gradient)
    modules = [layer.module for level in levels for layer in level.stage.after]
    kinks = any(isinstance(module, nn.LeakyReLU) for module in modules)
    borders = any(isinstance(module, BOUNDED) for module in modules)
    t = torch.zeros(unknowns, dtype=torch.float64)
    for alone in [True] * (constraints >= unknowns or not rows) + [False] * bool(rows):
        boxed = pixels and len(levels) == len(below) and not alone
        problem = _Problem(levels, flat.view_as(x), basis, k, {} if alone else gradient, tolerance, boxed)
        if not alone and kinks:
            t = _sharpened(problem, torch.zeros_like(t))
        for problem.tolerance in (*[WIDE] * borders, tolerance):
            t, off = problem.descend(t, 0.0, STEPS)
        facts["virtual gradient rows"] = 0 if alone else rows
        facts["evaluations"] += problem.evaluations
        facts["virtual residual"] = off
        if off < SOLVED:
            break
    return (flat + basis @ t).view_as(x), facts


def _sharpened(problem: "_Problem", t: Tensor) -> Tensor:
    """Solutions with ever sharper kinks, each from the one before."""
    for width in WIDTHS:
        t, off = problem.descend(t, width, SMOOTH_STEPS)
        if off < SOLVED:
            break
    return t


class _Level:
    """A stage below, with the inverse of W^T W, and an orthonormal basis of the outputs that W cannot give."""

    def __init__(self, stage: Stage, factor: Tensor):
        self.stage, self.operator = stage, stage.operator
        outputs = math.prod(self.operator.output_shape)
        self.spare = outputs - len(factor)
        generator = torch.Generator().manual_seed(0)
        self.inverse = torch.cholesky_inverse(factor)
        z = torch.randn(min(self.spare, LARGEST), *self.operator.output_shape, generator=generator, dtype=torch.float64)
        self.missing = torch.linalg.qr((z - self.operator.apply(self.input(z))).flatten(1).T)[0]

    def input(self, z: Tensor) -> Tensor:
        """The input whose outputs come closest to z (n, *output_shape)."""
        x = self.operator.adjoint(z)
        return (x.flatten(1) @ self.inverse).view(x.shape)


def _levels(below: list[Stage]) -> list[_Level]:
    """From the layer right below on, as long as each can be undone."""
    levels = []
    for stage in reversed(below):
        operator = stage.operator
        n = math.prod(operator.input_shape)
        if n > min(LARGEST, math.prod(operator.output_shape)) or any(
            isinstance(a.module, nn.ReLU) for a in stage.after
        ):
            break
        unit = torch.eye(n, dtype=torch.float64).view(n, *operator.input_shape)
        gram = torch.cat([operator.adjoint(operator.apply(part)).flatten(1) for part in unit.split(256)])
        factor, failed = torch.linalg.cholesky_ex(gram)
        if failed or factor.diagonal().min() < 1e-6 * factor.diagonal().max():
            break
        levels.append(_Level(stage, factor))
    while levels and not levels[-1].spare:
        levels.pop()
    return levels


class _Problem:
    """All equations as a function of t, relative to the size of what they compare, and their solution."""

    def __init__(self, levels, x, basis, k, gradient, tolerance, boxed):
        self.levels, self.x, self.basis, self.k = levels, x, basis, k
        self.gradient, self.tolerance, self.boxed = gradient, tolerance, boxed
        self.sizes: dict[str, float] = {}  # what each kind of equation is divided by, set where it first appears
        self.evaluations = 0

    def descend(self, t: Tensor, width: float, steps: int) -> tuple[Tensor, float]:
        """Levenberg-Marquardt from t: where it ends, and how far the equations are from holding."""
        self.width = width * float(self.x.norm()) / len(t) ** 0.5  # t may be as large as x is
        self.widths = {}
        damping, least = 1e-3, 0.02 if width else 1e-3
        for _ in range(steps):
            value, slope = self._equations(t)
            square, downhill = slope.T @ slope, -(slope.T @ value)[:, None]
            unit = square.diagonal().mean() * torch.eye(len(t), dtype=t.dtype)
            off, after = value.norm(), torch.inf
            while damping < 1e6:
                # where this fails, the step does not descend either
                factor = torch.linalg.cholesky_ex(square + damping * unit)[0]
                step = torch.cholesky_solve(downhill, factor)[:, 0]
                after = self._equations(t + step, with_slope=False)[0].norm()
                if after < off:
                    break
                damping *= 5
            else:
                return t, float(off)
            damping = max(damping / 5, 1e-9)
            t, small = t + step, after > (1 - least) * off
            if small or after < EXACT:
                break
        return t, float(after)

    def _equations(self, t: Tensor, with_slope: bool = True) -> tuple[Tensor, Tensor]:
        """What should be zero, and its derivative: for each level the part of z that W cannot give, and K x - dL/dW."""
        self.evaluations += not with_slope
        x = self.x + (self.basis @ t).view_as(self.x)
        dx = self.basis.T.reshape(-1, *x.shape[1:]) if with_slope else x.new_zeros(0, *x.shape[1:])
        a, da = self.k, torch.zeros_like(dx)
        values, slopes = [], []

        def add(what, size, value, slope):
            size = self.sizes.setdefault(what, float(size) or 1.0)
            values.append(value.flatten() / size)
            slopes.append(slope.reshape(len(dx), value.numel()) / size)

        for level in self.levels:
            operator = level.operator
            if operator.name not in self.widths:  # once for every descent, so that all its steps compare
                self.widths[operator.name] = self.width * dx.norm(dim=0, keepdim=True)
            z, rise, dz, drise = _undo(level.stage, x, self.tolerance, self.widths[operator.name])
            dx = dx.reshape(-1, *z.shape[1:]) * dz
            add(operator.name, z.norm(), z.flatten() @ level.missing, dx.flatten(1) @ level.missing)
            if level is self.levels[-1] and not self.gradient:
                break
            y, dy = level.input(z), level.input(dx)
            k, dk = a.view_as(z) * rise, da.view_as(dx) * rise + a.view_as(z) * drise * dx
            if operator.weight_name in self.gradient:
                g = self.gradient[operator.weight_name]
                slope = _gradient_slopes(operator, y, dy, k, dk) if with_slope else g.new_zeros(0)
                add(operator.weight_name, g.norm(), operator.weight_gradient(y, k) - g, slope)
            x, dx, a, da = y, dy, operator.adjoint(k), operator.adjoint(dk)
        if self.boxed and self.width:
            outside = (x < 0) | (x > 1)
            add("picture", x.numel() ** 0.5 / 2, (x - x.clamp(0, 1))[outside], dx[:, outside[0]])
        return torch.cat(values), torch.cat(slopes, 1).T


@torch.enable_grad()
def _undo(stage: Stage, x: Tensor, tolerance: float, width: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z from what the activation made of it, its slope there, and how both change with z: dz/dx and dslope/dz.

    width: how wide the kink of a LeakyReLU is made, for each entry of x.
    """
    x = x.detach().requires_grad_()
    z, rise = x, torch.ones_like(x)
    for layer in reversed(stage.after):
        if isinstance(layer.module, nn.LeakyReLU) and width.any():
            z, width, rise = (value.reshape(1, *layer.output_shape) for value in (z, width, rise))
            less = 1 / layer.module.negative_slope
            radius = torch.hypot(z, width + 1e-30)
            dz = ((1 + less) + (1 - less) * z / radius) / 2
            z, rise, width = ((1 + less) * z + (1 - less) * radius) / 2, rise / dz, width * dz.detach()
        else:
            wide = undo((layer,), z.detach() + width, rise, tolerance)[0]
            z, rise, _ = undo((layer,), z, rise, tolerance)
            width = (wide - z.detach()).abs()
    z, rise = (value.reshape(1, *stage.operator.output_shape) for value in (z, rise))
    (dz,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
    drise = torch.zeros_like(dz)
    if rise.requires_grad:
        (drise,) = torch.autograd.grad(rise.sum(), x)
    dz, drise = dz.view_as(z), drise.view_as(z)
    return (z - stage.operator.bias).detach(), rise.detach(), dz, drise / dz


def _gradient_slopes(operator: Operator, y: Tensor, dy: Tensor, k: Tensor, dk: Tensor) -> Tensor:
    """How K(k) y changes with each direction of y and k."""
    moves = torch.func.vmap(lambda direction: operator.weight_gradient(direction[None], k))(dy)
    if dk.any():
        moves = moves + torch.func.vmap(lambda direction: operator.weight_gradient(y, direction[None]))(dk)
    return moves
