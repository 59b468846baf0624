"""Virtual constraints: what the layers below can give, where a layer's own equations leave its input open.

R-GAP names them and leaves them aside, because they are not linear (Zhu & Blaschko 2021, appendix C). Say the
equations of a layer fix its input up to a null space, x + N t. The layer below maps a smaller input to more outputs
z = W x', so z lies in the range of W, and activation^-1(x + N t) has to lie there too: an equation for t for each
output more than inputs. They are solved from t = 0, the input of least norm, by Gauss-Newton steps in a trust region.
Layers further below add theirs. Where that stalls, the equations of these layers' own gradients are added.
"""

from collections.abc import Mapping

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor, nn

from gradinv.layers import Operator, Stage, balance

LARGEST = 5_000  # unknowns of a layer whose matrices are built
SOLVED = 1e-4  # relative; equations met this closely are met


def virtual_constraints(
    below: list[Stage], x: Tensor, basis: Tensor, k: Tensor, gradient: Mapping[str, Tensor], tolerance: float
) -> tuple[Tensor, dict]:
    """The input of a layer that its own equations leave open, by what the layers below it can give.

    Args:
        below: the stages below that layer, in running order.
        x: any input that solves its equations, (1, *shape); basis: orthonormal directions (unknowns, lost) that do
            not change them.
        k: dL/dx there; gradient: by parameter name.

    Returns:
        the input, and for the history: how many constraints there are, how many equations of gradients were used,
        how often all were evaluated, and how far they are from holding (relative).
    """
    levels = _levels(below)
    constraints = sum(level.spare for level in levels)
    facts = {"virtual constraints": constraints, "virtual gradient rows": 0, "evaluations": 0}
    if not constraints:
        return x, facts
    flat = x.flatten() - basis @ (basis.T @ x.flatten())
    best = torch.zeros(basis.shape[1], dtype=torch.float64)
    for use in ({}, gradient):
        rows = sum(use[level.operator.weight_name].numel() for level in levels if level.operator.weight_name in use)
        problem = _Problem(levels, flat.view_as(x), basis, k, use, tolerance)
        found = least_squares(problem.value, best.numpy(), problem.slope, x_scale=1.0, max_nfev=EVALUATIONS, **CLOSE)
        best = torch.from_numpy(found.x)
        off = float((2 * found.cost) ** 0.5)
        facts |= {
            "virtual gradient rows": rows,
            "evaluations": facts["evaluations"] + found.nfev,
            "virtual residual": off,
        }
        if off < SOLVED and constraints + rows >= len(best):  # with fewer equations, many inputs solve them
            break
    return (flat + basis @ best).view_as(x), facts


EVALUATIONS = 40  # at most, with and without the gradients each
CLOSE = {"ftol": 1e-6, "xtol": 1e-15, "gtol": 1e-15}


class _Level:
    """A stage below, with the factor of W^T W that projects on the range of W."""

    def __init__(self, stage: Stage, factor: Tensor):
        self.stage, self.operator, self.factor = stage, stage.operator, factor
        self.spare = int(np.prod(self.operator.output_shape)) - len(factor)

    def input(self, z: Tensor) -> Tensor:
        """The input whose outputs come closest to z (n, *output_shape)."""
        x = self.operator.adjoint(z)
        return torch.cholesky_solve(x.flatten(1).T, self.factor).T.reshape(x.shape)


def _levels(below: list[Stage]) -> list[_Level]:
    """From the layer right below on, as long as each can be undone."""
    levels = []
    for stage in reversed(below):
        operator = stage.operator
        n = int(np.prod(operator.input_shape))
        if n > min(LARGEST, np.prod(operator.output_shape)) or any(isinstance(a.module, nn.ReLU) for a in stage.after):
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
    """All equations as a function of t, relative to the size of the outputs below, and their derivative."""

    def __init__(self, levels, x, basis, k, gradient, tolerance):
        self.levels, self.x, self.basis, self.k = levels, x, basis, k
        self.gradient, self.tolerance = gradient, tolerance
        self.sizes: dict[str, float] = {}  # what each kind of equation is divided by, set where they first appear

    def value(self, t: np.ndarray) -> np.ndarray:
        return torch.cat([value.flatten() for value, _ in self._equations(t, False)]).numpy()

    def slope(self, t: np.ndarray) -> np.ndarray:
        return torch.cat([slope.flatten(1).T for _, slope in self._equations(t, True)]).numpy()

    def _equations(self, t, with_slope: bool):
        """For each level the part of z that W cannot give, and K x - dL/dW where that gradient is used."""
        x = self.x + (self.basis @ torch.from_numpy(t)).view_as(self.x)
        dx = self.basis.T.reshape(-1, *x.shape[1:]) if with_slope else x.new_zeros(0, *x.shape[1:])
        a, da = self.k, torch.zeros_like(dx)
        found = []
        for level in self.levels:
            operator = level.operator
            z, rise, dz, drise = _undo(level.stage, x, self.tolerance)
            dx = dx.reshape(-1, *z.shape[1:]) * dz
            y, dy = level.input(z), level.input(dx)
            size = self.sizes.setdefault(operator.name, float(z.norm()))
            found.append(((z - operator.apply(y)) / size, (dx - operator.apply(dy)) / size))
            k, dk = a.view_as(z) * rise, da.view_as(dx) * rise + a.view_as(z) * drise * dx
            if operator.weight_name in self.gradient:
                g = self.gradient[operator.weight_name]
                size = self.sizes.setdefault(operator.weight_name, size / balance(operator, k))
                found.append(
                    ((operator.weight_gradient(y, k) - g) / size, _gradient_slopes(operator, y, dy, k, dk) / size)
                )
            x, dx, a, da = y, dy, operator.adjoint(k), operator.adjoint(dk)
        return found


@torch.enable_grad()
def _undo(stage: Stage, x: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z from what the activation made of it, its slope there, and how both change with z: dz/dx and dslope/dz."""
    x = x.detach().requires_grad_()
    z, rise, _ = stage.undo(x, torch.ones_like(x), tolerance)
    (dz,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
    drise = torch.zeros_like(dz)
    if rise.requires_grad:
        (drise,) = torch.autograd.grad(rise.sum(), x)
    dz, drise = dz.view_as(z), drise.view_as(z)
    return z.detach(), rise.detach(), dz, drise / dz


def _gradient_slopes(operator: Operator, y: Tensor, dy: Tensor, k: Tensor, dk: Tensor) -> Tensor:
    """How K(k) y changes with each direction of y and k."""
    moves = torch.func.vmap(lambda direction: operator.weight_gradient(direction[None], k))(dy)
    if dk.any():
        moves = moves + torch.func.vmap(lambda direction: operator.weight_gradient(y, direction[None]))(dk)
    return moves
