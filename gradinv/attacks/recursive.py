"""R-GAP, the recursive attack (Zhu & Blaschko 2021): each layer's input solved from its gradient, last layer first.

A layer z = W x with k = dL/dz gives two sets of linear equations for its input: dL/dW = K x, with k in place of W, and
z itself, read through the activation off the input of the layer above (eqs. 13 and 14 there). Where together they
have full rank, x is known; then W^T k times the slope of the activation is k of the layer below (eqs. 11 and 12).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lsmr
from torch import Tensor, nn

from gradinv import rank
from gradinv.attacks.last_layer import HOMOGENEOUS, Start, starts
from gradinv.attacks.reconstruction import Reconstruction
from gradinv.attacks.virtual import virtual_constraints
from gradinv.client import Update, expect_update, loss_of, working_copy
from gradinv.layers import Layer, NotCovered, Operator, Stage, balance, chain, undo

DIRECT = 400  # up to this many unknowns a layer is solved by its singular values
BOX = 1e-3  # pixels may leave [0, 1] by this much and still count as inside
CONTRADICTION = 0.1  # equations of a layer with full rank that are off by this much rule out how the walk began


def r_gap(update: Update, *, virtual: bool = True) -> Reconstruction:
    """The input of a chain of layers, from its gradient, one layer after the other.

    Args:
        update: of a chain of convolutions, fully connected layers, average pooling, flattening and frozen batch norm,
            with any of identity, ReLU, LeakyReLU, sigmoid, tanh, ELU and softplus between. With a bias in its last
            layer there is one way to begin. Without, the logistic loss leaves every root of the equation for the
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
            large layers), residual (relative), and where virtual constraints were used their number and the evaluations.
        alternatives: the other candidates that give the same gradient, inside of [0, 1] or not.
    """
    expect_update(update)
    started = time.perf_counter()

    def answer(status, why, walk=None, others=()):
        pixels, labels, like = None, update.labels, next(iter(update.gradient.values()))
        if walk is not None and walk.pixels is not None:
            pixels = walk.pixels.to(like)
        if labels is None and walk is not None and walk.label is not None:
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

    try:
        front, stages = chain(update.model, update.input_shape, update.mode)
        largest = torch.stack([value.abs().max() for value in update.gradient.values()])
        if not largest.any():
            return answer("weak gradient", "every entry of the gradient is zero")
        if not largest.isfinite().all():
            return answer("not applicable", "the gradient is not finite")
        gradient = {name: value.double().cpu() / update.scale for name, value in update.gradient.items()}
        begin = starts(update, stages[-1], gradient)
    except NotCovered as error:
        return answer("not applicable", str(error))
    if not begin:
        return answer("not applicable", f"no output of the model explains the gradient of {stages[-1].operator.name}")

    walks = _walks(update, front, stages, gradient, begin, virtual)
    exact = [walk for walk in walks if walk.mismatch < _precision(update) ** 0.5]
    inside = [walk for walk in exact if -BOX <= walk.pixels.min() and walk.pixels.max() <= 1 + BOX]
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
    why = "every layer had as many equations as unknowns" if not best.deficient else "virtual constraints filled the gap"
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
    scales = not any(stage.operator.bias.any() for stage in stages) and all(
        isinstance(layer.module, HOMOGENEOUS) for after in (front, *(stage.after for stage in stages)) for layer in after
    )
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


def _walk(update, front, stages: list[Stage], gradient, start: Start, virtual: bool, patient: bool) -> _Walk:
    walk, x, k = _Walk(start.label, start.mu), start.x, start.k
    tolerance = _precision(update) ** (2 / 3)
    for i in range(len(stages) - 1, -1, -1):
        operator = stages[i].operator
        if i == len(stages) - 1:
            z, known = operator.apply(x), torch.ones(1, *operator.output_shape, dtype=torch.bool)
        else:
            z, k, known = stages[i].undo(x, stages[i + 1].operator.adjoint(k), tolerance)
        if not k.any():
            walk.blocked = f"dL/dz of {operator.name} is zero in every entry, so its weights carry nothing"
            return walk
        found = solve(operator, k, gradient.get(operator.weight_name), z, known)
        row = {"layer": operator.name, **found.facts}
        x = found.x
        if found.facts["nullity"]:
            walk.deficient.append(row)
            if virtual and i:
                sensitivity = k if found.facts["gradient rows"] else None
                basis = rank.lost_directions(operator, sensitivity, known).T
                x, facts = virtual_constraints(stages[:i], x, basis, operator.adjoint(k), gradient, tolerance)
                row |= facts
        walk.history.append(row)
        if not patient and not walk.deficient and row["residual"] > CONTRADICTION:
            walk.contradiction = True
            return walk
    walk.pixels = undo(front, x, x)[0].reshape(1, *update.input_shape)
    walk.mismatch = _mismatch(update, gradient, walk, f"{stages[-1].operator.name}.bias" in gradient)
    return walk


@dataclass(frozen=True)
class Solution:
    """The input of one layer (1, *input_shape), least squares of least norm, and what is known of its equations."""

    x: Tensor
    facts: dict


def solve(operator: Operator, k: Tensor, gradient: Tensor | None, z: Tensor, known: Tensor) -> Solution:
    """Least squares over both sets of equations of a layer.

    Args:
        k: dL/dz, (1, *output_shape). gradient: dL/dW, or None where it is missing or there are no weights.
        z: outputs without bias, (1, *output_shape), of which `known` says which count.
    """
    n, rows = int(np.prod(operator.input_shape)), 0 if gradient is None else gradient.numel()
    facts = {"unknowns": n, "gradient rows": rows, "weight rows": int(known.sum())}
    if gradient is not None:
        factor = balance(operator, k)
        gradient, k = gradient * factor, k * factor
    if isinstance(operator.module, nn.Linear) and gradient is not None:
        x = (k @ gradient) / k.square().sum()
        return Solution(x, {**facts, "rank": n, "nullity": 0, "condition": 1.0, "residual": _off(operator, x, k, gradient, z, known)})
    if n <= DIRECT:
        x, found, condition = _direct(operator, k, gradient, z, known)
        lost = n - found
    else:
        x, condition = _matrix_free(operator, k, gradient, z, known)
        lost = rank.lost(operator, None if gradient is None else k, known)
    residual = _off(operator, x, k, gradient, z, known)
    facts |= {"rank": None if lost is None else n - lost, "nullity": lost, "condition": condition, "residual": residual}
    return Solution(x, facts)


def _off(operator: Operator, x, k, gradient, z, known) -> float:
    """How far the equations of a layer are from holding, relative to their right side."""
    off, size = ((operator.apply(x) - z) * known).norm(), (z * known).norm()
    if gradient is not None:
        off = torch.hypot(off, (operator.weight_gradient(x, k) - gradient).norm())
        size = torch.hypot(size, gradient.norm())
    return float(off / size)


def _direct(operator: Operator, k, gradient, z, known) -> tuple[Tensor, int, float]:
    """Solution, rank and condition number by singular values."""
    n = int(np.prod(operator.input_shape))
    unit = torch.eye(n, dtype=torch.float64).view(n, *operator.input_shape)
    matrix, right = [operator.apply(unit).flatten(1).T[known.flatten()]], [z[known]]
    if gradient is not None:
        matrix.append(torch.stack([operator.weight_gradient(one[None], k).flatten() for one in unit], 1))
        right.append(gradient.flatten())
    left, values, back = torch.linalg.svd(torch.cat(matrix), full_matrices=False)
    rank_ = int((values > values[0] * 1e-9).sum())
    x = back[:rank_].T @ ((left[:, :rank_].T @ torch.cat(right)) / values[:rank_])
    return x.view(1, *operator.input_shape), rank_, float(values[0] / values[rank_ - 1])


def _matrix_free(operator: Operator, k, gradient, z, known) -> tuple[Tensor, float]:
    """Solution and an estimate of the condition number by LSMR, which never builds a matrix."""
    split = 0 if gradient is None else gradient.numel()

    def forward(vector):
        x = torch.from_numpy(vector).view(1, *operator.input_shape)
        rows = [] if gradient is None else [operator.weight_gradient(x, k).flatten()]
        return torch.cat([*rows, (operator.apply(x) * known).flatten()]).numpy()

    def backward(vector):
        vector = torch.from_numpy(vector)
        x = operator.adjoint(vector[split:].view(z.shape) * known)
        if gradient is not None:
            x = x + operator.adjoint(k, vector[:split].view(gradient.shape))
        return x.flatten().numpy()

    right = torch.cat([*([] if gradient is None else [gradient.flatten()]), (z * known).flatten()])
    n = int(np.prod(operator.input_shape))
    system = LinearOperator((len(right), n), matvec=forward, rmatvec=backward, dtype=np.float64)
    x, _, _, _, _, _, condition, _ = lsmr(system, right.numpy(), atol=1e-13, btol=1e-13, conlim=0, maxiter=MOST)
    return torch.from_numpy(x).view(1, *operator.input_shape), float(condition)


MOST = 4000


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
    if any_size:
        ours = ours * (ours @ theirs / ours.square().sum())
    return float((ours - theirs).norm() / theirs.norm())


def _shortcoming(walk: _Walk) -> tuple[bool, float, float]:
    """What makes a walk that does not reproduce the gradient worse than another: of twins, the one out of the box."""
    outside = 0.0 if walk.pixels is None else float((walk.pixels - walk.pixels.clamp(0, 1)).square().sum())
    return bool(walk.blocked), walk.mismatch, outside


def _shortfall(walk: _Walk) -> str:
    if walk.deficient:
        row = walk.deficient[0]
        return f"the equations of {row['layer']} leave {row['nullity']} of its {row['unknowns']} inputs open"
    return f"the picture does not reproduce the gradient (relative difference {walk.mismatch:.1e})"
