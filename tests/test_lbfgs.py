"""L-BFGS by asking: known minima, numbers that are not finite, and ends."""

import math

import pytest
import torch
from scipy.optimize import minimize

from gradinv.attacks import lbfgs


def run(function, x, iterations):
    """The points a search asked for and what they were worth."""
    search, points, values = lbfgs.minimise(x, iterations), [], []
    point = next(search)
    while True:
        leaf = point.clone().requires_grad_(True)
        value = function(leaf)
        (slope,) = torch.autograd.grad(value, leaf)
        points.append(point)
        values.append(float(value.detach()))
        try:
            point = search.send((values[-1], slope))
        except StopIteration:
            return points, values


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def quadratic(x):
    return (torch.logspace(0, 4, len(x), dtype=x.dtype) * (x - 2) ** 2).sum()


@pytest.mark.parametrize(("function", "minimum"), [(rosenbrock, 1.0), (quadratic, 2.0)])
@pytest.mark.parametrize("size", [2, 30])
def test_it_finds_a_known_minimum(function, minimum, size):
    points, values = run(function, torch.zeros(size, dtype=torch.float64) - 0.5, 300)
    best = points[values.index(min(values))]
    torch.testing.assert_close(best, torch.full_like(best, minimum), rtol=1e-7, atol=1e-7)


def test_it_needs_about_as_many_evaluations_as_scipy():
    start = torch.zeros(30, dtype=torch.float64) - 0.5
    _, values = run(rosenbrock, start, 2000)
    theirs = minimize(
        lambda x: rosenbrock(torch.from_numpy(x)).item(),
        start.numpy(),
        jac=lambda x: torch.func.grad(rosenbrock)(torch.from_numpy(x)).numpy(),
        method="L-BFGS-B",
        options={"maxcor": lbfgs.MEMORY, "ftol": 0, "gtol": 1e-9},
    )
    reached = next(i for i, value in enumerate(values) if value < 1e-15)
    assert reached < 1.5 * theirs.nfev


def test_the_direction_is_that_of_the_two_loops():
    torch.manual_seed(0)
    memory = lbfgs._Memory(torch.zeros(6, dtype=torch.float64))
    root = torch.randn(6, 6, dtype=torch.float64)
    hessian = root @ root.T + torch.eye(6)
    pairs = []
    for _ in range(lbfgs.MEMORY + 7):  # more than it holds
        step = torch.randn(6, dtype=torch.float64)
        pairs.append((step, hessian @ step + 1e-3 * torch.randn(6, dtype=torch.float64)))
        memory.add(*pairs[-1])
    slope = torch.randn(6, dtype=torch.float64)
    q, alphas, kept = slope.clone(), [], pairs[-lbfgs.MEMORY :]
    for step, change in reversed(kept):
        alphas.append((step @ q) / (step @ change))
        q -= alphas[-1] * change
    r = q * (kept[-1][0] @ kept[-1][1]) / (kept[-1][1] @ kept[-1][1])
    for (step, change), alpha in zip(kept, reversed(alphas), strict=True):
        r += step * (alpha - (change @ r) / (step @ change))
    torch.testing.assert_close(memory.direction(slope), -r, rtol=1e-9, atol=1e-9)


def test_a_pair_without_curvature_is_left_out():
    memory = lbfgs._Memory(torch.zeros(3))
    memory.add(torch.ones(3), -torch.ones(3))
    assert memory.count == 0
    assert torch.equal(memory.direction(torch.ones(3)), -torch.ones(3))


@pytest.mark.parametrize("factor", [1e25, 1e-25])
def test_a_pair_that_leaves_single_precision_is_left_out(factor):
    memory = lbfgs._Memory(torch.zeros(3))
    memory.add(torch.ones(3), factor * torch.ones(3))
    assert memory.count == 0


def test_accepted_points_meet_the_strong_wolfe_conditions():
    x = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    function = torch.func.grad_and_value(rosenbrock)
    slope, value = function(x)
    search = lbfgs._line_search(x, float(value), slope, -slope, 1e-6)
    point = next(search)
    with pytest.raises(StopIteration) as end:
        for _ in range(30):
            there, value_there = function(point)
            point = search.send((float(value_there), there))
    found = end.value.value
    assert found.value <= float(value) - lbfgs.DECREASE * found.step * float(slope @ slope)
    assert abs(found.derivative) <= lbfgs.CURVATURE * float(slope @ slope)


def test_it_goes_around_numbers_that_are_not_finite():
    def walled(x):  # not finite left of -1, with the minimum beside the wall
        return torch.where(x > -1, (x + 0.99) ** 2, float("nan")).sum()

    points, values = run(walled, torch.tensor([5.0], dtype=torch.float64), 200)
    assert any(math.isnan(value) for value in values) or min(values) < 1e-12
    assert min(value for value in values if math.isfinite(value)) < 1e-12
    assert abs(points[values.index(min(v for v in values if math.isfinite(v)))].item() + 0.99) < 1e-6


@pytest.mark.parametrize("start", [float("nan"), 0.0])
def test_it_ends_where_there_is_nowhere_to_go(start):
    _, values = run(lambda x: (x**2).sum(), torch.tensor([start]), 50)
    assert len(values) == 1  # not finite, or at the minimum


def test_it_ends_when_the_gradient_lies():
    search = lbfgs.minimise(torch.zeros(2), 1000)
    next(search)
    asked = 1
    with pytest.raises(StopIteration):
        while asked < 1000:
            search.send((float(asked), torch.ones(2)))  # every point is worse than the one before
            asked += 1
    assert asked < 2 * lbfgs.EVALUATIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-4, 1e-8, 1e-12])
def test_pairs_of_tiny_steps_are_kept(size, dtype):
    """Near an exact match the product of step and change is tiny, and still says what the curvature is."""
    memory = lbfgs._Memory(torch.zeros(3, dtype=dtype))
    curvature = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    for step in size * torch.eye(3, dtype=dtype):
        memory.add(step, curvature * step)
    assert memory.count == 3
    slope = torch.tensor([1.0, -4.0, 6.0], dtype=dtype)
    torch.testing.assert_close(memory.direction(slope), -slope / curvature)
    memory.add(size * torch.tensor([1.0, -1.0, 0.0], dtype=dtype), size * torch.tensor([1.0, 1.0, 1e-9], dtype=dtype))
    assert memory.count == 3  # at a right angle there is nothing but rounding
