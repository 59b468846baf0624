"""Gradient matching: look for pictures whose gradient is like the one that was sent.

The cosine attack (Geiping et al. 2020, eq. (4)) and DLG (Zhu et al. 2019; eq. (3) there) are this one loop with
different settings. The work is the gradient, with respect to the pictures, of the match between two gradients.
It needs no graph over the match: with v = d match / d g held fixed, it is the gradient of <v, g(x)>.

A run is one start for one update. Runs of one network go through the loop together, as many as memory allows.
"""

import contextlib
import dataclasses
import numbers
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from gradinv.attacks import lbfgs
from gradinv.attacks.double_backward import stack
from gradinv.attacks.labels import certain, found_scale, last_layer, restore_labels
from gradinv.attacks.reconstruction import WEAK, Reconstruction, norm, one_gradient
from gradinv.client import (
    Update,
    expect_one_of,
    expect_update,
    expect_whole,
    loss_of,
    mean_gradient,
    outputs_of,
    working_copy,
)

OBJECTIVES = ("cosine", "euclidean")
OPTIMIZERS = ("signed-adam", "adam", "lbfgs")
SCHEDULES = ("step", "linear", "constant")
LABELS = ("restored", "joint")
INITS = ("normal", "uniform", "grey")
NOTHING_LEFT = 1e-12  # an objective below this is rounding, so a start at the answer has not diverged
EAGER_STEPS = 3  # before a step is captured: what is made on first use must be there
CPU_ROOM = 2**30  # bytes for the runs that go through the network together
WORTH_IT = 50_000  # weights a parameter; below, one run alone loses more to calls of Python than fast layers save
LBFGS_ITERATIONS = 20  # per step, PyTorch's default, as DLG's code uses it


def inverting_gradients(update: Update | Sequence[Update], **options) -> Reconstruction | list[Reconstruction]:
    """The cosine attack as Geiping et al. 2020 set it: 4,800 signed Adam steps, TV, box.

    The paper works on normalised pictures with step 0.1 and TV weight 1e-4; on pixels, where CIFAR-10's standard
    deviation is about 0.25, the same steps are 0.025 and 4e-4. `options` are those of `match_gradients`.
    """
    return match_gradients(
        update,
        **{
            "objective": "cosine",
            "optimizer": "signed-adam",
            "tv": 4e-4,
            "steps": 4800,
            "lr": 0.025,
            "schedule": "step",
            **options,
        },
    )


def dlg(update: Update | Sequence[Update], **options) -> Reconstruction | list[Reconstruction]:
    """DLG as Zhu et al. 2019 set it: squared Euclidean distance, 300 L-BFGS steps, no prior, no box.

    Unlike theirs, the line search is strong Wolfe, without which most starts end in NaN. `options` are those of
    `match_gradients`.
    """
    return match_gradients(
        update,
        **{
            "objective": "euclidean",
            "optimizer": "lbfgs",
            "labels": "joint",
            "steps": 300,
            "lr": 1.0,
            "schedule": "constant",
            "box": False,
            **options,
        },
    )


@torch.enable_grad()
def match_gradients(
    update: Update | Sequence[Update],
    *,
    objective: str = "cosine",
    optimizer: str = "signed-adam",
    tv: float = 0.0,
    labels: str = "restored",
    steps: int = 1000,
    lr: float = 0.025,
    schedule: str = "step",
    restarts: int = 1,
    init: str | Tensor = "normal",
    box: bool = True,
    seed: int = 0,
    at_once: int | None = None,
    progress: bool | None = None,
) -> Reconstruction | list[Reconstruction]:
    """Pictures whose gradient matches the update's.

    A change of weights is matched by that of the same local training on the pictures looked for, which takes as many
    gradients an evaluation as there are steps. Where the order of its batches is hidden, the given order is taken
    (`why` says so): what the orders differ by, which grows with lr, is then lost.

    Args:
        update: what the server received. Several updates of one model, alike in all but gradient and labels, are
            attacked side by side and give a list of results.
        objective: "cosine" is 1 - the cosine over all parameters together, "euclidean" the squared distance.
        optimizer: "signed-adam" feeds Adam the sign of the gradient, "adam" the gradient; "lbfgs" takes 20
            iterations a step and searches their lengths, so that lr, schedule and box do not apply.
        tv: weight of the total variation mean |dx| + mean |dy| on pixels (pictures only).
        labels: for an update that hides them, "restored" reads them off the last layer first (`restore_labels`) where
            that can be done; "joint" optimises soft labels with the pictures, as DLG does.
        steps: optimiser steps of each restart.
        lr: first step size, in pixels.
        schedule: "step" divides it by 10 at 3/8, 5/8 and 7/8 of the steps, "linear" lowers it to 0.
        restarts: independent starts; the one with the smallest data term (TV left out) wins. From a fixed start
            ("grey", or pictures) with known labels they are all the same run.
        init: "normal" (mean 0.5, deviation 0.25: the paper's normal start in normalised space), "uniform", "grey",
            or pictures (n, c, h, w) to start from.
        box: keep pixels in [0, 1] (Adam only).
        seed: of the first start of the first update; the others count on.
        at_once: most runs to take through the loop together; by default as many as memory allows.
        progress: show a bar; by default only in a terminal.

    Restored labels are taken as known, and `why` says whether they are proved. Dropout in train mode draws new masks at
    each evaluation, so that nothing matches exactly.

    Returns:
        status "approximate", "weak gradient" or "diverged", or "not applicable" for a gradient that is not finite;
        loss is the data term of the winner, history the objective with TV at every evaluation of the winner
        (one a step, with "lbfgs" about 20), alternatives the pictures of the other restarts. Ctrl-C during the
        search ends it and gives the best so far.

    Warns with objective="euclidean" where the last layer shows that the gradient is not `Update.scale` times that of
    the loss, since then no picture matches it; the cosine does not mind.
    """
    updates = [update] if isinstance(update, Update) else update
    _check_updates(updates)
    _check_options(updates[0], objective, optimizer, schedule, labels, init, lr, tv)
    steps, restarts, seed = (
        expect_whole(argument, value, least)
        for argument, value, least in (("steps", steps, 1), ("restarts", restarts, 1), ("seed", seed, 0))
    )
    at_once = None if at_once is None else expect_whole("at_once", at_once, 1)
    classes = _classes(updates)
    sizes = [norm(each.gradient.values()) for each in updates]
    says = [0 < size < float("inf") for size in sizes]
    restored = labels == "restored" and updates[0].labels is None
    if restored:
        try:
            updates = [
                dataclasses.replace(each, labels=restore_labels(each)) if able else each
                for each, able in zip(updates, says, strict=True)
            ]
        except ValueError:  # the last layer does not tell them
            restored = False
    sought = [one_gradient(each)[0] for each in updates]  # a single local step is a gradient, and searched as one
    if objective == "euclidean" and sought[0].local is None:
        _warn_of_scale(sought)
    started = time.perf_counter()
    runs = [
        _Run(i, each, seed + i * restarts + restart)
        for i, each in enumerate(sought)
        for restart in range(restarts)
        if says[i]
    ]
    stopped = False
    # dropout in train mode draws from the global generator; fused attention has no second derivative
    with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH), _single_precision():
        planned = runs[0].update if runs else sought[0]
        together, fast = _plan(planned, len(runs), at_once, classes, memory=optimizer == "lbfgs")
        with tqdm(total=len(runs) * steps, unit="step", disable=None if progress is None else not progress) as bar:
            try:
                for first in range(0, len(runs), together):
                    group = runs[first : first + together]
                    torch.manual_seed(group[0].seed)
                    kind = _Match if sought[0].local is None else _LocalMatch
                    match = kind([run.update for run in group], objective, tv, fast=fast)
                    best = _Best(*_starts(group, init, classes))
                    search = _lbfgs(match, best, steps)
                    if optimizer != "lbfgs":
                        search = _adam(match, best, optimizer, steps, lr, schedule, box)
                    try:
                        for taken in search:
                            bar.update(taken)
                    finally:
                        best.hand_over(group)
            except KeyboardInterrupt:
                stopped = True
    taken = (time.perf_counter() - started) / len(updates)
    results = [
        _result(each, size, [run for run in runs if run.owner == i], steps, stopped, restored, taken)
        for i, (each, size) in enumerate(zip(updates, sizes, strict=True))
    ]
    return results[0] if isinstance(update, Update) else results


def total_variation(pixels: Tensor) -> Tensor:
    """Mean |difference| along rows plus along columns, over (n, c, h, w); 0 along an axis of one pixel.

    An axis before these four stays: one value for each batch.
    """
    differences = [pixels.diff(dim=dim).abs() for dim in (-1, -2) if pixels.shape[dim] > 1]
    return sum((each.mean((-4, -3, -2, -1)) for each in differences), start=0 * pixels.sum((-4, -3, -2, -1)))


@dataclasses.dataclass
class _Run:
    """One start for one update, and the best that came of it."""

    owner: int
    update: Update
    seed: int
    pixels: Tensor | None = None
    labels: Tensor | None = None
    data: float = float("nan")
    history: Sequence[float] = ()


class _Match:
    """The objective of several runs of one network, and its gradient with respect to their pictures."""

    def __init__(
        self, updates: Sequence[Update], objective: str, tv: float, *, fast: bool = True, also: Sequence[str] = ()
    ):
        """also: parameters that count as variables of the network, though their gradient was not sent."""
        first = updates[0]
        self.objective, self.tv, self.loss, self.runs = objective, tv, first.loss, len(updates)
        self.labels = None if first.labels is None else torch.cat([each.labels for each in updates])
        self.stacked = stack(first.model, first.mode, [*first.gradient, *also], self.runs, fast=fast)
        # For the cosine of unit norm, so that a gradient of any size stays within its dtype's range.
        sizes = [norm(each.gradient.values()) if objective == "cosine" else each.scale for each in updates]
        self.minus_target = [
            torch.stack(
                [(each.gradient[name].double() / -size).to(value) for each, size in zip(updates, sizes, strict=True)]
            )
            for name, value in first.gradient.items()
        ]

        self.sent = [value != 0 for value in self.minus_target] if first.pruned else None
        self.apart = [torch.empty_like(value) for value in self.minus_target]  # fresh memory each time would cost more

    def __call__(self, pixels: Tensor, soft: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """For pixels (runs, n, ...) and label logits (runs, n, classes), each run by itself: the data term (runs,),
        the objective with TV (runs,), and the objective's gradient by unknown."""
        data, slopes = self.data_term(pixels, soft)
        if not self.tv:
            return data, data, slopes
        prior = self.tv * total_variation(pixels)
        slopes[0] += torch.autograd.grad(prior.sum(), pixels)[0]
        return data, data + prior.detach(), slopes

    def data_term(self, pixels: Tensor, soft: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """How far each run's gradient is from the one that was sent (runs,), and the slopes by unknown."""
        gradient = self.gradient(pixels, soft)
        data, direction, factor = self._match([value.detach() for value in gradient])
        self.stacked.reads_weights = False
        unknowns = [pixels] if soft is None else [pixels, soft]
        try:
            slopes = torch.autograd.grad(gradient, unknowns, grad_outputs=direction)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                "model must have a second derivative with respect to its pixels, which matching needs; put a smooth "
                f"stand-in for a layer without one, such as relu6(x + 3) / 6 for Hardsigmoid: {error}"
            ) from error
        return data, [slope * _by_run(factor, slope) for slope in slopes]

    def gradient(self, pixels: Tensor, soft: Tensor | None = None, *, create_graph: bool = True) -> list[Tensor]:
        """The gradient of each run's loss, a tensor (runs, ...) a parameter, without what a client pruned."""
        labels = self.labels if soft is None else soft.softmax(2).flatten(0, 1)
        # the mean over all pictures, times the runs, is the sum of each run's mean
        loss = self.runs * loss_of(self.stacked.model, pixels.flatten(0, 1), labels, self.loss)
        self.stacked.reads_weights = True
        weights = list(self.stacked.weights.values())
        found = torch.autograd.grad(loss, weights, create_graph=create_graph, allow_unused=True, materialize_grads=True)
        return self._as_sent(found)

    def _as_sent(self, found: Sequence[Tensor]) -> list[Tensor]:
        """One tensor (runs, ...) a parameter, without what a client pruned."""
        found = [value.view_as(target) for value, target in zip(found, self.minus_target, strict=True)]
        return found if self.sent is None else [value * kept for value, kept in zip(found, self.sent, strict=True)]

    def _match(self, gradient: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
        """The data term, and its derivative with respect to the gradient as directions and one factor a run."""
        together = list(zip(self.minus_target, gradient, self.apart, strict=True))
        if self.objective == "euclidean":
            for target, value, apart in together:
                torch.add(target, value, out=apart)
            data = _size(self.apart).square()
            return data, self.apart, torch.full_like(data, 2.0)
        size = _size(gradient)
        inverse = torch.where(size == 0, 0, 1 / size)
        # 1 - cos(a, b) = |a - b|^2 / 2 for unit vectors, which loses no digit where the two are close
        for target, value, apart in together:
            torch.addcmul(target, value, _by_run(inverse, value), out=apart)
        # a zero gradient has cosine 0 with everything
        data = torch.where(size == 0, 1.0, _size(self.apart).square() / 2)
        for _, value, apart in together:
            apart.addcmul_(value, _by_run(data * inverse, value), value=-1)
        return data, self.apart, inverse


class _LocalMatch(_Match):
    """The same for a change of weights after local steps, one run at a time: the steps are taken again and again.

    The derivative goes back through the steps one by one (the adjoint of SGD), so that memory holds the weights of all
    steps, but the graph of a single one.
    """

    def __init__(self, updates: Sequence[Update], objective: str, tv: float, *, fast: bool = False):
        first = updates[0]
        moved = [name for name, p in first.model.named_parameters() if p.requires_grad]
        super().__init__(
            updates, objective, tv, fast=False, also=[name for name in moved if name not in first.gradient]
        )
        self.local = first.local
        self.steps = [chosen.to(self.minus_target[0].device) for chosen in self.local.batches(first.batch_size)]
        self.start = [weight.detach().clone() for weight in self.stacked.weights.values()]

    def data_term(self, pixels: Tensor, soft: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        local, weights = self.local, list(self.stacked.weights.values())
        path, speed, change = [], *([torch.zeros_like(weight) for weight in weights] for _ in range(2))
        now = self.start
        for chosen in self.steps:
            path.append(now)
            slopes, _ = self._slopes(now, chosen, pixels, soft, create_graph=False)
            # what has no part in the loss stays where it is, without decay, as torch.optim.SGD has it
            speed = [
                v if g is None else local.momentum * v + g + local.weight_decay * w
                for v, g, w in zip(speed, slopes, now, strict=True)
            ]
            # summed by itself, since a difference of weights would hold their rounding
            change = [c + local.lr * v for c, v in zip(change, speed, strict=True)]
            now = [w - c for w, c in zip(self.start, change, strict=True)]
        data, direction, factor = self._match(self._as_sent(change[: len(self.minus_target)]))
        by_weights = [torch.zeros_like(weight) for weight in weights]
        for i, d in enumerate(direction):
            by_weights[i] = -_by_run(factor, d).mul(d).view_as(weights[i])
        by_speed = [torch.zeros_like(weight) for weight in weights]
        by_unknown = [torch.zeros_like(unknown) for unknown in (pixels, soft) if unknown is not None]
        for chosen, now in zip(reversed(self.steps), reversed(path), strict=True):
            slopes, parts = self._slopes(now, chosen, pixels, soft, create_graph=True)
            by_slope = [v - local.lr * w for v, w in zip(by_speed, by_weights, strict=True)]
            outputs, by = zip(*((g, b) for g, b in zip(slopes, by_slope, strict=True) if g is not None), strict=True)
            wanted = parts if now is self.start else [*parts, *weights]  # nothing comes before the start
            back = torch.autograd.grad(outputs, wanted, by, allow_unused=True, materialize_grads=True)
            for total, part in zip(by_unknown, back, strict=False):
                total[:, chosen] += part
            if now is self.start:
                break
            by_weights = [
                w if g is None else w + local.weight_decay * s + b
                for w, g, s, b in zip(by_weights, slopes, by_slope, back[len(parts) :], strict=True)
            ]
            by_speed = [local.momentum * s for s in by_slope]
        return data, by_unknown

    def _slopes(
        self, weights: list[Tensor], chosen: Tensor, pixels: Tensor, soft: Tensor | None, *, create_graph: bool
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """The gradient of one step at some weights, None for what has no part in it, and the unknowns that it takes."""
        for parameter, weight in zip(self.stacked.weights.values(), weights, strict=True):
            parameter.data.copy_(weight)
        parts = [unknown.detach()[:, chosen].requires_grad_(True) for unknown in (pixels, soft) if unknown is not None]
        labels = self.labels[chosen] if soft is None else parts[1].softmax(2).flatten(0, 1)
        loss = loss_of(self.stacked.model, parts[0].flatten(0, 1), labels, self.loss)
        weights = list(self.stacked.weights.values())
        return list(torch.autograd.grad(loss, weights, create_graph=create_graph, allow_unused=True)), parts


def _size(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each run's entries over tensors (runs, ...), in double precision."""
    return torch.stack([torch.linalg.vector_norm(each.flatten(1), dim=1).double() for each in tensors]).norm(dim=0)


def _by_run(values: Tensor, like: Tensor) -> Tensor:
    """One value a run, in the shape and type to multiply a tensor (runs, ...)."""
    return values.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


class _Best:
    """Where each run of a group stands and the best finite point it saw, kept without waiting for the device."""

    def __init__(self, pixels: Tensor, soft: Tensor | None):
        self.pixels, self.soft = pixels, soft
        self.unknowns = [tensor for tensor in (pixels, soft) if tensor is not None]
        self.points = [tensor.detach().clone() for tensor in self.unknowns]
        self.objective = torch.full((len(pixels),), float("inf"), dtype=torch.float64, device=pixels.device)
        self.data = self.objective.clone()
        self.costs: list[Tensor] = []
        self.lengths: list[int] | None = None  # of each run's costs, where it ends before the others

    def see(self, data: Tensor, objective: Tensor) -> None:
        """Take the present point where it is better."""
        better = objective < self.objective  # never true for NaN
        for point, unknown in zip(self.points, self.unknowns, strict=True):
            point.copy_(torch.where(_by_run(better, point).bool(), unknown.detach(), point))
        self.objective.copy_(torch.where(better, objective, self.objective))
        self.data.copy_(torch.where(better, data, self.data))

    def hand_over(self, group: list[_Run]) -> None:
        """Give each run its best point and its history."""
        if not self.costs:
            return
        costs, data = torch.stack(self.costs, 1).tolist(), self.data.tolist()
        for k, run in enumerate(group):
            run.pixels, run.data, run.history = (
                self.points[0][k].clone(),
                data[k],
                costs[k][: self.lengths and self.lengths[k]],
            )
            run.labels = self.points[1][k].argmax(1) if self.soft is not None else None


def _adam(match: _Match, best: _Best, optimizer: str, steps: int, lr: float, schedule: str, box: bool) -> Iterator[int]:
    on_gpu = best.pixels.is_cuda
    rate = torch.tensor(lr, device=best.pixels.device) if on_gpu else lr  # a captured step reads it from the device
    adam = torch.optim.Adam(best.unknowns, rate, capturable=on_gpu)
    decay = torch.optim.lr_scheduler.LambdaLR(adam, _decay(schedule, steps))

    def step() -> Tensor:
        data, objective, slopes = match(best.pixels, best.soft)
        best.see(data, objective)
        for unknown, slope in zip(best.unknowns, slopes, strict=True):
            unknown.grad = slope.sign() if optimizer == "signed-adam" else slope
        adam.step()
        if box:
            with torch.no_grad():
                best.pixels.clamp_(0, 1)
        return objective

    for i in range(steps):
        if on_gpu and i == EAGER_STEPS:
            step = _captured(step)
        best.costs.append(step().clone())
        decay.step()
        yield len(best.pixels)
    data, objective, _ = match(best.pixels, best.soft)
    best.see(data, objective)
    best.costs.append(objective)


def _captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step as one CUDA graph, whose launch costs what one kernel does; itself where a layer forbids it."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            objective = step()
    except (RuntimeError, ValueError):  # the network's own error may have been put in words
        return step

    def replay() -> Tensor:
        graph.replay()
        return objective

    return replay


def _lbfgs(match: _Match, best: _Best, steps: int) -> Iterator[int]:
    """One search a run; the points they ask for go through the network together."""
    per_run = torch.cat([unknown.detach().flatten(1) for unknown in best.unknowns], 1)
    searches = [lbfgs.minimise(x.clone(), LBFGS_ITERATIONS * steps) for x in per_run]
    asked = {k: next(search) for k, search in enumerate(searches)}
    best.lengths = [0] * len(searches)
    while asked:
        per_run[list(asked)] = torch.stack(list(asked.values()))
        parts = per_run.split([unknown[0].numel() for unknown in best.unknowns], 1)
        for unknown, part in zip(best.unknowns, parts, strict=True):
            unknown.detach().copy_(part.view_as(unknown))
        data, objective, slopes = match(best.pixels, best.soft)
        best.see(data, objective)
        best.costs.append(objective)
        values, slope = objective.tolist(), torch.cat([each.flatten(1) for each in slopes], 1)
        for k in list(asked):
            best.lengths[k] += 1
            try:
                asked[k] = searches[k].send((values[k], slope[k]))
            except StopIteration:
                del asked[k]  # its place in the network stays, unread
        yield len(asked)


def _decay(schedule: str, steps: int) -> Callable[[int], float]:
    if schedule == "linear":
        return lambda step: 1 - step / steps
    if schedule == "constant":
        return lambda step: 1.0
    return lambda step: 0.1 ** sum(step >= steps * eighths // 8 for eighths in (3, 5, 7))


def _starts(group: list[_Run], init: str | Tensor, classes: int) -> tuple[Tensor, Tensor | None]:
    """Pixels (runs, n, ...) and, for unknown labels, their logits (runs, n, classes)."""
    update = group[0].update
    like = next(iter(update.gradient.values()))
    pixels, soft = [], []
    for run in group:
        generator = torch.Generator().manual_seed(run.seed)  # on the CPU, so that every device starts alike
        pixels.append(_start(init, (update.batch_size, *update.input_shape), generator))
        soft.append(torch.randn(update.batch_size, classes, generator=generator))
    hidden = torch.stack(soft).to(like).requires_grad_(True) if update.labels is None else None
    return torch.stack(pixels).to(like).requires_grad_(True), hidden


def _start(init: str | Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if isinstance(init, Tensor):
        return init.detach().clone()
    if init == "grey":
        return torch.full(shape, 0.5)
    if init == "uniform":
        return torch.rand(shape, generator=generator)
    return 0.5 + 0.25 * torch.randn(shape, generator=generator)


def _plan(update: Update, runs: int, at_once: int | None, classes: int, *, memory: bool = False) -> tuple[int, bool]:
    """How many runs to take together, and whether through the layers of `double_backward`.

    Those are used only where they give autograd's gradient on two random pictures: a network that mixes its
    batch, or reads a weight outside its layer, is attacked one run at a time or by plain autograd.
    """
    if update.local is not None:
        return 1, False
    pixels, soft = _starts([_Run(0, update, seed) for seed in range(2)], "uniform", classes)

    def gradient(which: slice, fast: bool) -> list[Tensor]:
        match = _Match([update] * len(pixels[which]), "euclidean", 0.0, fast=fast)
        return match.gradient(pixels[which], None if soft is None else soft[which], create_graph=False)

    saved: dict[int, int] = {}

    def weigh(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        first = gradient(slice(0, 1), fast=False)
    second = gradient(slice(1, 2), fast=False)
    truth = [torch.cat(pair) for pair in zip(first, second, strict=True)]

    def agrees(together: int) -> bool:
        try:
            found = gradient(slice(0, together), fast=True)
        except Exception:  # whatever a network does that these layers do not expect, plain autograd can do
            return False
        expected = [value[:together] for value in truth]
        tolerance = torch.finfo(expected[0].dtype).eps ** 0.5
        return bool((_size(torch._foreach_sub(found, expected)) <= tolerance * _size(expected)).all())

    if runs > 1 and at_once != 1 and agrees(2):
        # per run: the gradient, the target, the direction and their like; activations of both passes
        size = 8 * sum(value.nbytes for value in first) + 4 * sum(saved.values())
        size += 2 * lbfgs.MEMORY * pixels[0].nbytes if memory else 0
        return min(runs, at_once or max(1, _room(first[0].device) // size)), True
    return 1, sum(value.numel() for value in first) >= WORTH_IT * len(first) and agrees(1)


def _room(device: torch.device) -> int:
    """Bytes for the runs that go through the network together."""
    return torch.cuda.mem_get_info(device)[0] * 4 // 5 if device.type == "cuda" else CPU_ROOM


@contextlib.contextmanager
def _single_precision() -> Iterator[None]:
    """Convolutions of CUDA without TF32, unless `torch.set_float32_matmul_precision` asks for less than "highest"."""
    cudnn = torch.backends.cudnn
    allowed = torch.get_float32_matmul_precision() != "highest"
    with cudnn.flags(cudnn.enabled, not cudnn.deterministic, cudnn.benchmark_limit, cudnn.deterministic, allowed):
        yield


def _classes(updates: Sequence[Update]) -> int:
    """How many outputs the network has. Raises ValueError where pictures or labels do not fit it."""
    update = updates[0]
    like = next(iter(update.gradient.values()))
    pixels = torch.zeros((update.batch_size, *update.input_shape), dtype=like.dtype, device=like.device)
    with torch.no_grad():
        classes = outputs_of(working_copy(update.model, "eval"), pixels).shape[1]
    for each in updates:
        if each.labels is not None and each.loss == "cross_entropy" and each.labels.max() >= classes:
            raise ValueError(f"labels must lie in 0 to {classes - 1} for this model, got {each.labels.max().item()}")
    return classes


def _result(
    update: Update, size: float, runs: list[_Run], steps: int, stopped: bool, restored: bool, seconds: float
) -> Reconstruction:
    """What the runs of one update found."""
    if not runs:
        status, why = "weak gradient", "every entry of the gradient is zero"
        if size != 0:
            status, why = "not applicable", "the gradient is not finite"
        return Reconstruction(None, update.labels, status, why, float("nan"), [], (), seconds)
    begun = sorted((run for run in runs if run.history), key=lambda run: run.data)  # infinite where never finite
    if not begun:
        return Reconstruction(
            None, update.labels, "not applicable", "stopped before its first step", float("nan"), [], (), seconds
        )
    best = begun[0]
    finite = best.data < float("inf")
    if not finite or not all(value == value for value in best.history):
        status, why = "diverged", "the objective left the finite numbers"
    elif weak := _weak(update):
        status, why = "weak gradient", weak
    elif len(best.history) > 2 and min(best.history[1:]) >= best.history[0] > NOTHING_LEFT and not stopped:
        status, why = "diverged", "no step improved on the start; try another one or a smaller lr"
    else:
        of = f" of {len(begun)} starts" if len(begun) > 1 else ""
        status, why = "approximate", f"the best match{of} after {steps} steps"
        if stopped:
            why = f"the best match{of} until it was stopped, after {len(best.history)} evaluations"
    lost = sum(not run.data < float("inf") for run in begun)
    if finite and lost:
        why += f"; {lost} of {len(begun)} starts never had a finite objective"
    why += _assumed(update, restored and update.labels is not None)
    return Reconstruction(
        best.pixels if finite else None,
        update.labels if update.labels is not None else best.labels,
        status,
        why,
        best.data,
        best.history,
        [run.pixels for run in begun[1:]],
        seconds,
    )


def _weak(update: Update) -> str:
    """Why the gradient says nothing, where it is too small."""
    size = norm(mean_gradient(update).gradient.values())
    if size < WEAK:
        return f"the gradient's norm is {size:.1e}"
    if update.local is None:
        return ""
    moved = norm(update.gradient.values())
    weights = [update.model.get_parameter(name).detach() for name in update.gradient]
    if moved < torch.finfo(weights[0].dtype).eps * norm(weights):
        return f"the weights moved by {moved:.1e}, which is their rounding: more steps or a larger lr would be seen"
    return ""


def _assumed(update: Update, restored: bool) -> str:
    """What the attack took for granted of labels and local training, the end of the sentence that says how it went."""
    said = ""
    if restored:
        said = f"; the labels were read off the last layer and are {'proved' if certain(update) else 'not certain'}"
    if update.local is None:
        return said
    batches, local = update.local.batches(update.batch_size), update.local
    said += f"; through {len(batches)} local step{'s' if len(batches) > 1 else ''}"
    if len(batches) == local.epochs:
        return said
    if local.shuffle == "hidden":
        said += ", whose batches are hidden and were taken in order"
    else:
        said += " with the batches in the order that the update gives"
    return said + (", each label in the batch of its place in ascending order" if restored else "")


def _warn_of_scale(updates: Sequence[Update]) -> None:
    last = last_layer(updates[0])  # a fact of the model, so that of every update
    for each in updates:
        scale = found_scale(each, last)
        if scale is not None and abs(scale / each.scale - 1) > 0.05:
            warnings.warn(
                f"the gradient is {scale:.3g} times that of the loss, but the update says scale={each.scale:g}: the "
                "Euclidean distance compares sizes, so set Update.scale or use objective='cosine'",
                stacklevel=4,
            )


def _check_updates(updates) -> None:
    if not isinstance(updates, Sequence) or not updates:
        raise ValueError(f"update must be an Update or a list of them, got {updates!r}")
    for each in updates:
        expect_update(each)
    first = updates[0]
    for name in ("input_shape", "batch_size", "loss", "mode", "pruned", "local"):
        if any(getattr(each, name) != getattr(first, name) for each in updates):
            raise ValueError(
                f"updates attacked together must share {name}, got {[getattr(each, name) for each in updates]}"
            )
    if any(each.model is not first.model or list(each.gradient) != list(first.gradient) for each in updates):
        raise ValueError(
            "updates attacked together must be of one and the same model, with gradients of the same names; for equal "
            "copies of a model use dataclasses.replace(update, model=...)"
        )
    if next(iter(first.gradient.values())).dtype == torch.float16:
        raise ValueError("update must not be in half precision, where a search underflows: use model.float()")
    if any((each.labels is None) != (first.labels is None) for each in updates):
        raise ValueError("updates attacked together must all have labels or all hide them")


def _check_options(first: Update, objective, optimizer, schedule, labels, init, lr, tv) -> None:
    expect_one_of("objective", objective, OBJECTIVES)
    expect_one_of("optimizer", optimizer, OPTIMIZERS)
    expect_one_of("schedule", schedule, SCHEDULES)
    expect_one_of("labels", labels, LABELS)
    if not isinstance(init, Tensor) and (not isinstance(init, str) or init not in INITS):
        got = repr(init) if isinstance(init, str) else type(init).__name__
        raise ValueError(f"init must be one of {', '.join(INITS)} or a tensor of pictures, got {got}")
    shape = (first.batch_size, *first.input_shape)
    if isinstance(init, Tensor) and tuple(init.shape) != shape:
        raise ValueError(f"init must have shape {shape}, got {tuple(init.shape)}")
    if not isinstance(lr, numbers.Real) or not 0 < lr < float("inf"):
        raise ValueError(f"lr must be a positive number, got {lr!r}")
    if not isinstance(tv, numbers.Real) or not 0 <= tv < float("inf"):
        raise ValueError(f"tv must be a number of at least 0, got {tv!r}")
    if tv and len(first.input_shape) != 3:
        raise ValueError(f"tv must be 0 for inputs that are no pictures, got {tv}")
    if first.labels is None and first.loss == "logistic":
        raise ValueError("labels must be known with loss='logistic', got None: reveal them in the update")
