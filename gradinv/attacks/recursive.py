"""R-GAP, the recursive attack (Zhu & Blaschko 2021): each layer's input solved from its gradient, last layer first.

A layer z = W x with k = dL/dz gives two sets of linear equations for its input: dL/dW = K x, with k in place of W, and
z itself, read through the activation off the input of the layer above (eqs. 13 and 14 there). Where together they
have full rank, x is known; then W^T k times the slope of the activation is k of the layer below (eqs. 11 and 12).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lsmr
from torch import Tensor, nn

from gradinv import rank
from gradinv.attacks.last_layer import HOMOGENEOUS, Start, starts
from gradinv.attacks.reconstruction import Reconstruction, one_gradient
from gradinv.attacks.virtual import virtual_constraints
from gradinv.client import Update, expect_update, loss_of, working_copy
from gradinv.layers import Block, NotCovered, Operator, Stage, balance, chain, undo

DIRECT = 400  # up to this many unknowns a layer is solved by its singular values,
ENTRIES = 4_000_000  # if its matrix has no more entries than this
MOST = 4000  # steps of LSMR
OUT_OF_STEPS = 7  # how LSMR says so
FACTORED = 4000  # up to this many unknowns an answer that LSMR did not finish is finished by a factorisation
COUNTED = 1500  # up to this many unknowns of a residual block the rank is counted
LOOSE = 1e-3  # relative; from here on the size of an entry behind a ReLU says that it was let through
EVALUATIONS = 100  # of Newton steps in a residual block, at most
BOX = 1e-3  # pixels may leave [0, 1] by this much and still count as inside
DOUBTS = 8  # units next to a kink that are tried on its other side, at most
CONTRADICTION = 0.1  # equations of a layer with full rank that are off by this much rule out how the walk began


def r_gap(update: Update, *, virtual: bool = True) -> Reconstruction:
    """The input of a chain of layers, from its gradient, one layer after the other.

    Args:
        update: of a chain of convolutions, fully connected layers, average pooling, flattening and frozen batch norm,
            with any of identity, ReLU, LeakyReLU, sigmoid, tanh, ELU and softplus between. Two convolutions or fully
            connected layers may be a residual block, whose skip is the identity or a linear layer. With a bias in the
            last layer there is one way to begin. Without, the logistic loss leaves every root of the equation for the
            logit, and both labels where the label is hidden; each is walked.
        virtual: where a layer has fewer equations than unknowns, also use that its input is something that the
            layers below can give (`gradinv.attacks.virtual`), which the paper leaves open.

    Returns:
        status "recovered" where the picture reproduces the gradient and no other candidate in [0, 1] does; "ambiguous"
        where several do, or for a batch, of which a mixture is found; "approximate" where it does not reproduce it,
        and `why` names the layer that leaves something open; "blocked" where a layer's sensitivity is zero;
        "weak gradient" for a zero gradient; "not applicable" for another network, naming the layer.
        loss: the relative difference between the gradient of the picture and that of the update.
        history: a dict a layer from the last to the first: its name, unknowns, gradient rows, weight rows, rank and
            nullity (None where the matrices would be too large), condition (of the balanced system, estimated for
            large layers), residual (relative), and where virtual constraints were used, their number and how often
            they were evaluated. A residual block counts as one layer (`solve_block`).
        alternatives: the other candidates that give the same gradient, inside of [0, 1] or not.
    """
    expect_update(update)
    started = time.perf_counter()
    update, several = one_gradient(update)

    def answer(status, why, walk=None, others=()):
        pixels, labels, like = None, update.labels, next(iter(update.gradient.values()))
        if walk is not None and walk.pixels is not None:
            pixels = walk.pixels.to(like)
        if labels is None and walk is not None and walk.label is not None and update.batch_size == 1:
            labels = torch.tensor([walk.label], device=like.device)
        return Reconstruction(
            pixels,
            labels,
            status,
            why,
            walk.mismatch if walk else 0.0,
            walk.history if walk else [],
            [other.pixels.to(like) for other in others],
            time.perf_counter() - started,
        )

    if several:
        return answer("not applicable", several)
    try:
        front, stages = chain(update.model, update.input_shape, update.mode)
        largest = torch.stack([value.abs().max() for value in update.gradient.values()])
        if not largest.any():
            return answer("weak gradient", "every entry of the gradient is zero")
        if not largest.isfinite().all():
            return answer("not applicable", "the gradient is not finite")
        gradient = {name: value.double().cpu() / update.scale for name, value in update.gradient.items()}
        if isinstance(stages[-1], Block):
            raise NotCovered(f"the residual block {stages[-1].name} comes last, which must be a fully connected layer")
        begin = starts(update, stages[-1], gradient)
    except NotCovered as error:
        return answer("not applicable", str(error))
    if not begin:
        return answer("not applicable", f"no output of the model explains the gradient of {stages[-1].name}")

    walks = _walks(update, front, stages, gradient, begin, virtual)
    exact = [walk for walk in walks if walk.mismatch < _precision(update) ** 0.5]
    inside = [walk for walk in exact if walk.pixels.min() >= -BOX and walk.pixels.max() <= 1 + BOX]
    best = (inside or exact or sorted(walks, key=_shortcoming))[0]
    others = [walk for walk in exact if walk is not best]
    if update.batch_size > 1:
        return answer("ambiguous", f"the gradient averages {update.batch_size} pictures, so this mixes them", best)
    if best.blocked:
        return answer("blocked", best.blocked, best)
    if not exact:
        return answer("approximate", _shortfall(best), best)
    if len(inside) > 1 or (not inside and others):
        return answer("ambiguous", f"{len(exact)} inputs give this gradient", best, others)
    if best.history[-1]["nullity"] and not _fillers([best.history[-1]]):
        return answer("ambiguous", f"{_opening(best.history[-1])}, and this is the least of them", best, others)
    why = "every layer had as many equations as unknowns"
    if any(row["nullity"] is None for row in best.history):
        why = "the picture reproduces the gradient, though the rank of some layers was not counted"
    if best.deficient:
        why = f"{' and '.join(_fillers(best.deficient)) or 'the other layers'} filled the gap"
    return answer("recovered", why + ("; the box ruled out a twin" if others else ""), best, others)


@dataclass
class _Walk:
    """What one walk from the last layer to the picture found.

    mismatch: between the gradient of the pixels and that of the update, relative; deficient: the history rows of
    layers that left something open; contradiction: equations that cannot hold together.
    """

    label: int | None
    mu: float | None
    pixels: Tensor | None = None
    mismatch: float = float("inf")
    history: list[dict] = field(default_factory=list)
    deficient: list[dict] = field(default_factory=list)
    blocked: str = ""
    contradiction: bool = False


def _walks(update, front, stages, gradient, begin: list[Start], virtual: bool) -> list[_Walk]:
    """A walk from every start. Where louder is just louder, one root gives the picture of every other by its size."""
    operators = [operator for stage in stages for operator in stage.operators]
    elementwise = [*front, *(layer for stage in stages for layer in stage.elementwise)]
    scales = not any(operator.bias.any() for operator in operators)
    scales = scales and all(isinstance(layer.module, HOMOGENEOUS) for layer in elementwise)
    walks: list[_Walk] = []
    for start in begin:
        twin = next((walk for walk in walks if scales and start.mu is not None and walk.label == start.label), None)
        if twin is None:
            walk = _walk(update, front, stages, gradient, start, virtual, patient=len(begin) == 1)
        else:
            walk = _Walk(start.label, start.mu, None, twin.mismatch, twin.history, twin.deficient, twin.blocked)
            walk.contradiction = twin.contradiction
            if twin.pixels is not None:
                walk.pixels = twin.pixels * (start.mu / twin.mu)
        walks.append(walk)
    if all(walk.contradiction for walk in walks):  # noise, or a network that leaves much open: then look at each
        return [_walk(update, front, stages, gradient, start, virtual, patient=True) for start in begin]
    return [walk for walk in walks if not walk.contradiction]


def _walk(update, front, stages: list[Stage | Block], gradient, start: Start, virtual: bool, patient: bool) -> _Walk:
    walk, x, k = _Walk(start.label, start.mu), start.x, start.k
    tolerance = _precision(update) ** (2 / 3)
    for i in range(len(stages) - 1, -1, -1):
        stage = stages[i]
        if i == len(stages) - 1:
            z, known = stage.operator.apply(x), torch.ones(1, *stage.operator.output_shape, dtype=torch.bool)
        else:
            given, above = x, k
            z, k, known = stage.undo(given, above, tolerance)
        if not k.any():
            walk.blocked = f"dL/dz of {stage.name} is zero in every entry, so its weights carry nothing"
            return walk
        if not (z.isfinite().all() and k.isfinite().all()):  # no activation gives such outputs
            walk.contradiction = True
            return walk
        if isinstance(stage, Block):
            found, below = solve_block(stage, k, gradient, z, known), []
        else:
            sent = gradient.get(stage.operator.weight_name)
            found = solve(stage.operator, k, sent, z, known)
            doubt = tolerance < found.facts["residual"] < CONTRADICTION
            if doubt and sent is not None and i < len(stages) - 1:
                k, turned = _turned(stage, given, above, k, sent, z, known, found.facts["residual"], tolerance)
                found = solve(stage.operator, k, sent, z, known) if turned else found
            below = list(takewhile(lambda other: isinstance(other, Stage), reversed(stages[:i])))[::-1]
        row = {"layer": stage.name, **found.facts}
        x = found.x
        if found.facts["nullity"]:
            walk.deficient.append(row)
            if virtual and below:
                sensitivity = k if found.facts["gradient rows"] else None
                basis = rank.lost_directions(stage.operator, sensitivity, known).T
                if basis.numel():  # what singular values of noise call open may not be
                    pixels = not front and len(below) == i
                    x, facts = virtual_constraints(below, x, basis, found.k, gradient, tolerance, pixels)
                    row |= facts
        k = found.k
        walk.history.append(row)
        if not patient and not walk.deficient and row["residual"] > CONTRADICTION:
            walk.contradiction = True
            return walk
    walk.pixels = undo(front, x, x)[0].reshape(1, *update.input_shape)
    walk.mismatch = _mismatch(update, gradient, walk, f"{stages[-1].name}.bias" in gradient)
    return walk


def _turned(stage, given, above, k, sent, z, known, off: float, tolerance: float) -> tuple[Tensor, bool]:
    """dL/dz with units taken to the other side of their kink where the equations then hold better, and if any were.

    A unit nearer to its kink than the error that comes from above may have been read on the wrong side. Its slope, and
    so its k, is then wrong by a factor, which spoils a whole filter's equations.

    given, above: outputs of the stage and dL/dx there; k, z, known: as read off them; sent: dL/dW; off: how far the
        equations are from holding.
    """
    near = tolerance * float(given.abs().max())
    doubtful = given.abs() <= near
    sides = [stage.undo(given.where(~doubtful, side * 2 * near), above, tolerance)[1] for side in (1, -1)]
    other = sides[0].where(k == sides[1], sides[1])
    kinks = (sides[0] - sides[1]).abs() > tolerance * k.abs().max()
    turned = False
    for unit in map(tuple, kinks.nonzero()[:DOUBTS]):
        trial = k.clone()
        trial[unit] = other[unit]
        equations = [*_of_gradient(stage.operator, trial, sent), _of_output(stage.operator, z, known)]
        (x,), _, _ = _least_squares(equations, [stage.operator.input_shape])
        better = _off(equations, x)
        if better < off / 2:
            k, off, turned = trial, better, True
    return k, turned


@dataclass(frozen=True)
class Solution:
    """The input x of a stage (1, *shape), least squares of least norm, dL/dx, and what is known of its equations."""

    x: Tensor
    k: Tensor
    facts: dict


def solve(operator: Operator, k: Tensor, gradient: Tensor | None, z: Tensor, known: Tensor) -> Solution:
    """Least squares over both sets of equations of a layer.

    Args:
        k: dL/dz, (1, *output_shape). gradient: dL/dW, or None where it is missing or there are no weights.
        z: outputs without bias, (1, *output_shape), of which `known` says which count.
    """
    n = math.prod(operator.input_shape)
    equations = [*_of_gradient(operator, k, gradient), _of_output(operator, z, known)]
    if isinstance(operator.module, nn.Linear) and gradient is not None:
        factor = balance(operator, k)
        unit = k * factor  # squares of small entries leave even double precision
        x, lost, condition = unit @ gradient * factor / unit.square().sum(), 0, 1.0
    else:
        (x,), lost, condition = _least_squares(equations, [operator.input_shape])
        if lost is None:
            lost = rank.lost(operator, None if gradient is None else k, known)
    facts = {"unknowns": n, "gradient rows": 0 if gradient is None else gradient.numel()}
    facts |= {"weight rows": int(known.sum()), "rank": None if lost is None else n - lost, "nullity": lost}
    return Solution(x, operator.adjoint(k), facts | {"condition": condition, "residual": _off(equations, x)})


def solve_block(block: Block, k: Tensor, gradient: Mapping[str, Tensor], f: Tensor, known: Tensor) -> Solution:
    """The input of a residual block f = W2 x2 + S x, x2 = a(W1 x): x2 and x together, then x again from x2.

    Linear in both are K2 x2 = dL/dW2, f itself, and Ks x = dL/dWs where S has weights. Where S is the identity, the
    first alone says what x2 is, and x = f - W2 x2 (appendix D of the paper). Once x2 is known, so are k and the output
    of W1, and its two sets of equations count for x as well. Where x2 is open, x2 = a(W1 x) is solved with the others,
    by Newton steps.

    Args:
        k: dL/df, (1, *shape); gradient: by parameter name.
        f: what the block gives without its constant, (1, *shape), of which `known` says which entries count.

    Returns:
        the solution; its facts count x2 and x together, "nullity" what the linear equations leave open of x2, and
        then of x.
    """
    first, second, shortcut = block.first.operator, block.second.operator, block.shortcut
    g1, g2 = gradient.get(first.weight_name), gradient.get(second.weight_name)
    gs = gradient.get(shortcut.operator.weight_name) if shortcut else None
    total = Equations(
        lambda middle, x: (block.main(middle) + block.side(x)) * known,
        lambda v: (block.main_back(v * known), block.side_back(v * known)),
        f * known,
    )
    of_side = _of_gradient(shortcut.operator, block.shortcut_scale * k, gs) if shortcut else []
    linear = [_on(0, part) for part in _of_gradient(second, block.scale * k, g2)]
    linear += [total, *(_on(1, part) for part in of_side)]
    (middle, x), _, condition = _least_squares(linear, block.shapes)
    lost_middle, facts = _lost_middle(block, k, g2, linear), {}
    if lost_middle != 0:
        middle, x, facts = _newton(block, linear, middle, x)

    # what x2 is off by must not count as what a ReLU let through
    tolerance = min(10 * condition * _off(linear, middle, x), LOOSE)
    z, k1, known1 = block.first.undo(middle, block.main_back(k), tolerance)
    rest = (f - block.main(middle)) * known
    equations = [*_of_gradient(first, k1, g1), _of_output(first, z, known1), *of_side]
    equations += [Equations(lambda x: block.side(x) * known, lambda v: (block.side_back(v * known),), rest)]
    (x,), _, condition_of_x = _least_squares(equations, block.shapes[1:])
    lost = 0 if shortcut is None and known.all() else _lost(equations, block.shapes[1:])
    lost = None if None in (lost, lost_middle) else lost + lost_middle

    n = sum(map(math.prod, block.shapes))
    facts = {
        "unknowns": n,
        "gradient rows": sum(g.numel() for g in (g1, g2, gs) if g is not None),
        "weight rows": int(known.sum() + known1.sum()),
        "rank": None if lost is None else n - lost,
        "nullity": lost,
        "condition": max(condition, condition_of_x),
        "residual": max(_off(linear, middle, x), _off(equations, x)),
    } | facts
    return Solution(x, first.adjoint(k1) + block.side_back(k), facts)


def _newton(block: Block, linear: list["Equations"], middle: Tensor, x: Tensor) -> tuple[Tensor, Tensor, dict]:
    """x2 and x where the linear equations leave x2 open: from an answer to them on, by damped Newton steps."""
    first = block.first.operator

    def left(middle, x):
        """The equations for what has to be added; the last are linear only near x."""
        given = block.first.forward(x).view_as(middle)
        rise = block.first.undo(given, torch.ones_like(given))[1]
        bend = Equations(
            lambda middle, x: middle - (rise * first.apply(x)).view_as(middle),
            lambda v: (v, -first.adjoint(v.view_as(rise) * rise)),
            given - middle,
        )
        return [*_left(linear, middle, x), bend]

    equations, evaluations, better = left(middle, x), 1, True
    while better and evaluations < EVALUATIONS:
        moves, _, _ = _least_squares(equations, block.shapes, precision=1e-6)
        size, better = _size(equations), False
        for step in (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16):
            tried = [one + step * move for one, move in zip((middle, x), moves, strict=True)]
            equations, evaluations = left(*tried), evaluations + 1
            if _size(equations) < 0.9 * size:
                (middle, x), better = tried, True
                break
    return middle, x, {"nonlinear equations": middle.numel(), "evaluations": evaluations}


@dataclass(frozen=True)
class Equations:
    """Linear equations for one or more unknowns, each (1, *shape): forward(*unknowns) = right.

    backward: its transpose, which gives one part for each unknown.
    """

    forward: Callable[..., Tensor]
    backward: Callable[[Tensor], tuple]
    right: Tensor


def _of_gradient(operator: Operator, k: Tensor, gradient: Tensor | None) -> list[Equations]:
    """K x = dL/dW, balanced; none where that gradient is not there, or k is zero."""
    if gradient is None or not k.any():
        return []
    factor = balance(operator, k)
    k, gradient = k * factor, gradient * factor
    return [Equations(lambda x: operator.weight_gradient(x, k), lambda v: (operator.adjoint(k, v),), gradient)]


def _of_output(operator: Operator, z: Tensor, known: Tensor) -> Equations:
    """W x = z, where z is known."""
    return Equations(lambda x: operator.apply(x) * known, lambda v: (operator.adjoint(v * known),), z * known)


def _on(place: int, equations: Equations) -> Equations:
    """Equations of one unknown as equations of two, of which it is the first or the second."""
    return Equations(
        lambda *unknowns: equations.forward(unknowns[place]),
        lambda v: (*equations.backward(v), 0)[:: 1 - 2 * place],
        equations.right,
    )


class _System:
    """Equations stacked, for a vector that holds the unknowns one after the other."""

    def __init__(self, equations: Sequence[Equations], shapes: Sequence[tuple[int, ...]]):
        self.equations, self.shapes = equations, shapes
        self.sizes = [math.prod(shape) for shape in shapes]
        self.right = torch.cat([part.right.flatten() for part in equations])

    def split(self, vector: Tensor) -> list[Tensor]:
        return [part.view(1, *shape) for part, shape in zip(vector.split(self.sizes), self.shapes, strict=True)]

    def forward(self, vector: Tensor) -> Tensor:
        unknowns = self.split(vector)
        return torch.cat([part.forward(*unknowns).flatten() for part in self.equations])

    def backward(self, vector: Tensor) -> Tensor:
        found = torch.zeros(sum(self.sizes), dtype=torch.float64)
        rows = vector.split([part.right.numel() for part in self.equations])
        for part, row in zip(self.equations, rows, strict=True):
            for total, one in zip(self.split(found), part.backward(row.view_as(part.right)), strict=True):
                total += one
        return found

    def matrix(self) -> Tensor:
        return torch.stack([self.forward(unit) for unit in torch.eye(sum(self.sizes), dtype=torch.float64)], 1)


def _size(equations: Sequence[Equations]) -> float:
    """The norm of all right sides together."""
    return float(torch.stack([part.right.norm() for part in equations]).norm())


def _left(equations: Sequence[Equations], *unknowns: Tensor) -> list[Equations]:
    """The equations for what has to be added to the unknowns."""
    return [replace(part, right=part.right - part.forward(*unknowns)) for part in equations]


def _off(equations: Sequence[Equations], *unknowns: Tensor) -> float:
    """How far equations are from holding, relative to their right side."""
    size = _size(equations)
    return _size(_left(equations, *unknowns)) / size if size else 0.0


def _least_squares(
    equations: Sequence[Equations], shapes, precision: float = 1e-13
) -> tuple[list[Tensor], int | None, float]:
    """The solution of least norm, how many dimensions are open (None where it is large) and the condition number.

    By singular values, or for many unknowns by LSMR, which never builds a matrix and estimates the condition.
    """
    system = _System(equations, shapes)
    n = sum(system.sizes)
    if n <= DIRECT and n * len(system.right) <= ENTRIES:
        left, values, back = torch.linalg.svd(system.matrix(), full_matrices=False)
        rank_ = int((values > values[0] * 1e-9).sum())
        x = back[:rank_].T @ ((left[:, :rank_].T @ system.right) / values[:rank_])
        return system.split(x), n - rank_, float(values[0] / values[rank_ - 1])
    linear = LinearOperator(
        (len(system.right), n),
        matvec=lambda vector: system.forward(torch.from_numpy(vector)).numpy(),
        rmatvec=lambda vector: system.backward(torch.from_numpy(vector)).numpy(),
        dtype=np.float64,
    )
    x, stopped, *_, condition, _ = lsmr(
        linear, system.right.numpy(), atol=precision, btol=precision, conlim=0, maxiter=MOST
    )
    x = torch.from_numpy(x)
    if stopped == OUT_OF_STEPS and n <= FACTORED:
        x = _by_factor(system, x)
    return system.split(x), None, float(condition)


def _by_factor(system: "_System", x: Tensor) -> Tensor:
    """From an answer that LSMR did not finish, by the Cholesky factor of A^T A and steps of refinement."""
    matrix = system.matrix()
    gram = matrix.T @ matrix
    gram.diagonal().add_(1e-12 * gram.diagonal().max())  # what is open gets no step, what is nearly open small ones
    factor = torch.linalg.cholesky(gram)
    for _ in range(20):
        back = matrix.T @ (system.right - matrix @ x)
        x = x + torch.cholesky_solve(back[:, None], factor)[:, 0]
    return x


def _lost(equations: Sequence[Equations], shapes) -> int | None:
    """How many dimensions equations leave open, or None where there are too many to count."""
    n = sum(map(math.prod, shapes))
    if n > COUNTED:
        return None
    matrix = _System(equations, shapes).matrix()
    values = torch.linalg.eigvalsh(matrix.T @ matrix)
    return int((values <= values[-1] * 1e-12).sum())


def _lost_middle(block: Block, k: Tensor, g2: Tensor | None, linear: Sequence[Equations]) -> int | None:
    """How many dimensions of x2 the linear equations for x2 and x leave open; None where there are too many to count.

    Those that they leave open of both, but not of x alone. K2 x2 = dL/dW2 alone counts where S is the identity.
    """
    k2 = None if g2 is None else block.scale * k
    alone = rank.lost(block.second.operator, k2, torch.zeros_like(k, dtype=torch.bool))
    if not alone or block.shortcut is None:
        return alone
    lost = _lost(linear, block.shapes)
    if not lost:
        return lost
    middle = torch.zeros(1, *block.shapes[0], dtype=torch.float64)
    of_x = [
        Equations(lambda x, part=part: part.forward(middle, x), lambda v, part=part: part.backward(v)[1:], part.right)
        for part in linear
    ]
    return lost - _lost(of_x, block.shapes[1:])


def _precision(update: Update) -> float:
    return torch.finfo(next(iter(update.gradient.values())).dtype).eps


def _mismatch(update: Update, gradient: Mapping[str, Tensor], walk: _Walk, any_size: bool) -> float:
    """The relative difference between the gradient of the pixels found and that sent; up to its size, or not."""
    if update.batch_size > 1 or walk.label is None:
        return float("inf")
    model = working_copy(update.model, "eval").double().cpu()
    with torch.enable_grad():
        loss = loss_of(model, walk.pixels, torch.tensor([walk.label]), update.loss)
        parameters = [model.get_parameter(name) for name in gradient]
        ours = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    ours, theirs = (torch.cat([value.flatten() for value in values]) for values in (ours, gradient.values()))
    if any_size and ours.any():
        ours = ours * (ours @ theirs / ours.square().sum())
    return float((ours - theirs).norm() / theirs.norm())


def _shortcoming(walk: _Walk) -> tuple[bool, float, float]:
    """What makes a walk that does not reproduce the gradient worse than another: of twins, the one out of the box."""
    outside = 0.0 if walk.pixels is None else float((walk.pixels - walk.pixels.clamp(0, 1)).square().sum())
    return bool(walk.blocked), walk.mismatch, outside


def _shortfall(walk: _Walk) -> str:
    if walk.deficient:
        return _opening(walk.deficient[0])
    return f"the picture does not reproduce the gradient (relative difference {walk.mismatch:.1e})"


def _opening(row: dict) -> str:
    return f"the equations of {row['layer']} leave {row['nullity']} of its {row['unknowns']} inputs open"


def _fillers(rows: list[dict]) -> list[str]:
    """What these layers used where their linear equations did not suffice."""
    return [name for name in ("virtual constraints", "nonlinear equations") if any(row.get(name) for row in rows)]
