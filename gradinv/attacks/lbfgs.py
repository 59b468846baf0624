"""L-BFGS that asks: a search that yields each point it wants evaluated, so that many searches share one evaluation.

Nocedal & Wright, Numerical Optimization (2006): algorithm 7.4 for the direction, 3.5 and 3.6 for the line search.
The two loops of 7.4 are written as two triangular solves: a few matrix products in place of two vector
operations for each pair in memory.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import solve_triangular
from torch import Tensor

DECREASE, CURVATURE = 1e-4, 0.9  # the strong Wolfe conditions
EVALUATIONS = 25  # at most, in one line search
MEMORY = 100  # pairs of steps and gradient changes

Search = Generator[Tensor, tuple[float, Tensor], None]


def minimise(x: Tensor, iterations: int) -> Search:
    """Search from a vector x; yields points and is sent the value and the gradient (a vector) of each.

    Ends after the given iterations, or when a step along the gradient itself gains nothing. Where a line search
    fails, or meets numbers that are not finite, the memory is dropped and the search goes on from its last good point.
    """
    value, slope = yield x
    memory = _Memory(x)
    for _ in range(iterations):
        if not math.isfinite(value) or not slope.any():
            return
        direction = memory.direction(slope)
        fresh = memory.count == 0
        first = min(1.0, 1 / float(slope.abs().sum())) if fresh else 1.0
        found = yield from _line_search(x, value, slope, direction, first)
        if found is not None:
            step = found.step * direction
            memory.add(step, found.slope - slope)
            x, value, slope = x + step, found.value, found.slope
        elif fresh:
            return
        else:
            memory = _Memory(x)


class _Memory:
    """The last steps s and gradient changes y, in the rows of two rings, and their inner products."""

    def __init__(self, like: Tensor):
        self.count = 0
        self.s, self.y = like.new_zeros(MEMORY, like.numel()), like.new_zeros(MEMORY, like.numel())
        self.sy, self.yy = np.zeros((MEMORY, MEMORY)), np.zeros((MEMORY, MEMORY))

    def add(self, step: Tensor, change: Tensor) -> None:
        """Keep a pair, unless the curvature along it is not positive or a product leaves the numbers of its type.

        Positive means above rounding: near an exact match both the step and the change are tiny.
        """
        along, size = float(step @ change), float(step.norm() * change.norm())
        if not torch.finfo(step.dtype).eps * size < along < math.inf or not 0 < float(change @ change) < math.inf:
            return
        i = self.count % MEMORY
        self.count += 1
        self.s[i], self.y[i] = step, change
        self.sy[i, :], self.sy[:, i] = _small(self.y @ step), _small(self.s @ change)
        self.yy[i, :] = self.yy[:, i] = _small(self.y @ change)

    def direction(self, slope: Tensor) -> Tensor:
        """Minus the gradient, seen through the estimate of the inverse Hessian."""
        if self.count == 0:
            return -slope
        order = np.arange(max(0, self.count - MEMORY), self.count) % MEMORY  # the oldest first
        sy, yy = self.sy[np.ix_(order, order)], self.yy[np.ix_(order, order)]
        scale = sy[-1, -1] / yy[-1, -1]
        upper = np.triu(sy)
        alpha = _solve(upper, _small(self.s @ slope)[order])  # the first loop, newest to oldest
        rest = sy.diagonal() * alpha - scale * (_small(self.y @ slope)[order] - yy @ alpha)
        delta = _solve(upper.T, rest, lower=True)  # the second, oldest to newest: alpha - beta
        by_y, by_s = (torch.zeros(MEMORY, dtype=slope.dtype, device=slope.device) for _ in range(2))
        by_y[order], by_s[order] = (torch.from_numpy(each).to(slope) for each in (alpha, delta))
        return scale * (by_y @ self.y - slope) - by_s @ self.s


def _small(vector: Tensor) -> np.ndarray:
    return vector.double().cpu().numpy()


def _solve(triangle: np.ndarray, right: np.ndarray, lower: bool = False) -> np.ndarray:
    return solve_triangular(triangle, right, lower=lower, check_finite=False)  # the line search refuses what is not


@dataclass(frozen=True)
class _Point:
    """Along a direction: the step, the value, the gradient, and the derivative by the step."""

    step: float
    value: float
    slope: Tensor
    derivative: float


def _line_search(
    x: Tensor, value: float, slope: Tensor, direction: Tensor, step: float
) -> Generator[Tensor, tuple[float, Tensor], _Point | None]:
    """A point that meets the strong Wolfe conditions; else the best that decreases enough; None where none does."""
    start = low = _Point(0.0, value, slope, float(slope @ direction))
    high = None  # with low, brackets such a point
    if not start.derivative < 0:
        return None
    for _ in range(EVALUATIONS):
        there, gradient = yield x + step * direction
        point = _Point(step, there, gradient, float(gradient @ direction))
        enough = there <= value + DECREASE * step * start.derivative  # never for NaN
        if not enough or (low is not start and there >= low.value):
            high = point
        elif abs(point.derivative) <= -CURVATURE * start.derivative:
            return point
        else:
            if point.derivative * ((high.step if high else math.inf) - low.step) >= 0:
                high = low
            low, before = point, low
        if high is None:
            step = _between(before, low, low.step + 0.01 * (low.step - before.step), 10 * low.step)
        else:
            left, right = sorted((low.step, high.step))
            if right - left < 1e-9 * max(1.0, right):
                break
            step = _between(low, high, left + 0.1 * (right - left), right - 0.1 * (right - left))
    return None if low is start else low


def _between(a: _Point, b: _Point, least: float, most: float) -> float:
    """The minimum of the cubic through two points, held between two bounds; their middle where there is none."""
    slope = a.derivative + b.derivative - 3 * (a.value - b.value) / (a.step - b.step)
    square = slope**2 - a.derivative * b.derivative
    if not 0 <= square < math.inf:
        return (least + most) / 2
    root = math.copysign(math.sqrt(square), b.step - a.step)
    bottom = b.derivative - a.derivative + 2 * root
    if bottom == 0:
        return (least + most) / 2
    return min(max(b.step - (b.step - a.step) * (b.derivative + root - slope) / bottom, least), most)
