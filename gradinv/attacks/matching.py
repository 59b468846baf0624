"""Gradient matching: look for pictures whose gradient is like the one that was sent.

The cosine attack (Geiping et al. 2020, eq. (4)) and DLG (Zhu et al. 2019; eq. (3) there) are this one loop with
different settings. The work is the gradient, with respect to the pictures, of the match between two gradients.
It needs no graph over the match: with v = d match / d g held fixed, it is the gradient of <v, g(x)>.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradinv.attacks.reconstruction import WEAK, Reconstruction, norm
from gradinv.client import Update, expect_update, loss_of, outputs_of, working_copy

OBJECTIVES = ("cosine", "euclidean")
OPTIMIZERS = ("signed-adam", "adam", "lbfgs")
SCHEDULES = ("step", "linear", "constant")
INITS = ("normal", "uniform", "grey")
NOTHING_LEFT = 1e-12  # an objective below this is rounding, so a start at the answer has not diverged
LBFGS_EVALUATIONS = 20  # per step, PyTorch's default, as DLG's code uses it


def inverting_gradients(update: Update, **options) -> Reconstruction:
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


def dlg(update: Update, **options) -> Reconstruction:
    """DLG as Zhu et al. 2019 set it: squared Euclidean distance, 300 L-BFGS steps, no prior, no box.

    Unlike theirs, the line search is strong Wolfe, without which most starts end in NaN. `options` are those of
    `match_gradients`.
    """
    return match_gradients(
        update,
        **{
            "objective": "euclidean",
            "optimizer": "lbfgs",
            "steps": 300,
            "lr": 1.0,
            "schedule": "constant",
            "box": False,
            **options,
        },
    )


@torch.enable_grad()
def match_gradients(
    update: Update,
    *,
    objective: str = "cosine",
    optimizer: str = "signed-adam",
    tv: float = 0.0,
    steps: int = 1000,
    lr: float = 0.025,
    schedule: str = "step",
    restarts: int = 1,
    init: str | Tensor = "normal",
    box: bool = True,
    seed: int = 0,
) -> Reconstruction:
    """Pictures whose gradient matches the update's.

    Args:
        update: what the server received. Without labels, DLG's soft labels are optimised jointly.
        objective: "cosine" is 1 - the cosine over all parameters together, "euclidean" the squared distance.
        optimizer: "signed-adam" feeds Adam the sign of the gradient, "adam" the gradient; "lbfgs" takes up to 20
            evaluations a step.
        tv: weight of the total variation mean |dx| + mean |dy| on pixels (pictures only).
        steps: optimiser steps of each restart.
        lr: first step size, in pixels.
        schedule: "step" divides it by 10 at 3/8, 5/8 and 7/8 of the steps, "linear" lowers it to 0.
        restarts: independent starts; the one with the smallest data term (TV left out) wins.
        init: "normal" (mean 0.5, deviation 0.25: the paper's normal start in normalised space), "uniform", "grey",
            or pictures (n, c, h, w) to start from.
        box: keep pixels in [0, 1] (Adam only).
        seed: of the first restart; the others count on.

    Returns:
        status "approximate", "weak gradient" or "diverged", or "not applicable" for a gradient that is not finite;
        loss is the data term of the winner, history the objective with TV at every step of the winner,
        alternatives the pictures of the other restarts.
    """
    expect_update(update)
    _check(objective, optimizer, schedule, init, steps, restarts, tv, update)
    started = time.perf_counter()
    target = list(update.gradient.values())
    size = norm(target)
    if not 0 < size < float("inf"):
        status, why = "weak gradient", "every entry of the gradient is zero"
        if size != 0:
            status, why = "not applicable", "the gradient is not finite"
        return Reconstruction(None, update.labels, status, why, float("nan"), [], (), 0.0)

    match = _Match(update, objective, tv)
    trials = []
    for restart in range(restarts):
        pixels, soft = _start(update, match, init, seed + restart)
        run = _lbfgs if optimizer == "lbfgs" else _adam
        # dropout in train mode draws from the global generator; fused attention has no second derivative
        with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH):
            torch.manual_seed(seed + restart)
            trials.append(run(match, pixels, soft, optimizer, steps, lr, schedule, box))
    trials.sort(key=lambda trial: trial.data if trial.data == trial.data else float("inf"))
    best = trials[0]
    labels = update.labels if update.labels is not None else best.labels
    finite = best.data == best.data and best.data < float("inf")
    if not finite or not all(value == value for value in best.history):
        status, why = "diverged", "the objective left the finite numbers"
    elif size < WEAK:
        status, why = "weak gradient", f"the gradient's norm is {size:.1e}"
    elif len(best.history) > 2 and min(best.history[1:]) >= best.history[0] > NOTHING_LEFT:
        status, why = "diverged", "no step improved on the start; try another one or a smaller lr"
    else:
        of = f" of {restarts} starts" if restarts > 1 else ""
        status, why = "approximate", f"the best match{of} after {steps} steps"
    return Reconstruction(
        best.pixels if finite else None,
        labels,
        status,
        why,
        best.data,
        best.history,
        [trial.pixels for trial in trials[1:]],
        time.perf_counter() - started,
    )


def total_variation(pixels: Tensor) -> Tensor:
    """Mean |difference| along rows plus along columns, over all pictures; 0 along an axis of one pixel."""
    differences = (pixels.diff(dim=-1), pixels.diff(dim=-2))
    return sum((difference.abs().mean() for difference in differences if difference.numel()), start=0 * pixels.sum())


class _Match:
    """The objective and its gradient with respect to the pictures (and soft labels)."""

    def __init__(self, update: Update, objective: str, tv: float):
        self.update, self.objective, self.tv = update, objective, tv
        self.model = working_copy(update.model, update.mode)
        parameters = dict(self.model.named_parameters())
        self.parameters = [parameters[name] for name in update.gradient]
        self.target = [value.detach() for value in update.gradient.values()]
        if objective == "cosine":  # of unit norm, so that a gradient of any size stays within its dtype's range
            size = norm(self.target)
            self.target = [(value.double() / size).to(value) for value in self.target]
        self.evaluations = 0

    def __call__(self, pixels: Tensor, soft: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The data term, the objective with TV, and the objective's gradient by unknown."""
        self.evaluations += 1
        unknowns = [pixels] if soft is None else [pixels, soft]
        labels = self.update.labels if soft is None else soft.softmax(1)
        loss = loss_of(self.model, pixels, labels, self.update.loss)
        gradient = torch.autograd.grad(
            loss, self.parameters, create_graph=True, allow_unused=True, materialize_grads=True
        )
        data, direction = self._match([value.detach() for value in gradient])
        slopes = torch.autograd.grad(gradient, unknowns, grad_outputs=direction)
        prior = torch.zeros_like(data)
        if self.tv:
            prior = self.tv * total_variation(pixels)
            slopes = (slopes[0] + torch.autograd.grad(prior, pixels)[0], *slopes[1:])
        return data, data + prior.detach(), list(slopes)

    def _match(self, gradient: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """The data term and v, its derivative with respect to each entry of the gradient."""
        if self.objective == "euclidean":
            difference = torch._foreach_sub(gradient, self.target)
            return _dot(difference, difference), torch._foreach_mul(difference, 2.0)
        inner, square = _dot(gradient, self.target), _dot(gradient, gradient)
        inverse = torch.where(square > 0, square.rsqrt(), 0)  # a zero gradient has cosine 0 with everything
        cosine = inner * inverse
        direction = torch._foreach_mul(gradient, (cosine * inverse).to(gradient[0]))
        torch._foreach_sub_(direction, self.target)
        torch._foreach_mul_(direction, inverse.to(gradient[0]))
        return 1 - cosine, direction


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    # summed in double precision: the cosine's distance from 1 is often below a thousandth
    return torch.stack([torch.dot(a.flatten(), b.flatten()).double() for a, b in zip(left, right, strict=True)]).sum()


class _Best:
    """The best finite iterate of one restart, kept without waiting for the device."""

    def __init__(self, pixels: Tensor, soft: Tensor | None):
        self.state = [tensor.detach().clone() for tensor in (pixels, soft) if tensor is not None]
        self.objective = self.data_term = torch.tensor(float("inf"), dtype=torch.float64, device=pixels.device)
        self.costs: list[Tensor] = []

    def see(self, unknowns: list[Tensor], data: Tensor, objective: Tensor) -> None:
        better = objective < self.objective  # never true for NaN
        self.state = [torch.where(better, new.detach(), old) for new, old in zip(unknowns, self.state, strict=True)]
        self.objective = torch.where(better, objective, self.objective)
        self.data_term = torch.where(better, data, self.data_term)
        self.costs.append(objective)

    @property
    def pixels(self) -> Tensor:
        return self.state[0]

    @property
    def labels(self) -> Tensor | None:
        return self.state[1].argmax(1) if len(self.state) > 1 else None

    @property
    def data(self) -> float:
        return float(self.data_term)

    @property
    def history(self) -> list[float]:
        return torch.stack(self.costs).tolist()


def _adam(
    match: _Match, pixels: Tensor, soft: Tensor | None, optimizer: str, steps: int, lr: float, schedule: str, box: bool
) -> _Best:
    unknowns = [tensor for tensor in (pixels, soft) if tensor is not None]
    adam = torch.optim.Adam(unknowns, lr)
    decay = torch.optim.lr_scheduler.LambdaLR(adam, _decay(schedule, steps))
    best = _Best(pixels, soft)
    for _ in range(steps):
        data, objective, slopes = match(pixels, soft)
        best.see(unknowns, data, objective)
        for unknown, gradient in zip(unknowns, slopes, strict=True):
            unknown.grad = gradient.sign() if optimizer == "signed-adam" else gradient
        adam.step()
        decay.step()
        if box:
            with torch.no_grad():
                pixels.clamp_(0, 1)
    data, objective, _ = match(pixels, soft)
    best.see(unknowns, data, objective)
    return best


def _lbfgs(
    match: _Match, pixels: Tensor, soft: Tensor | None, optimizer: str, steps: int, lr: float, schedule: str, box: bool
) -> _Best:
    unknowns = [tensor for tensor in (pixels, soft) if tensor is not None]
    lbfgs = torch.optim.LBFGS(
        unknowns,
        lr,
        max_iter=LBFGS_EVALUATIONS,
        history_size=100,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    decay = torch.optim.lr_scheduler.LambdaLR(lbfgs, _decay(schedule, steps))
    best = _Best(pixels, soft)

    def closure():
        data, objective, slopes = match(pixels, soft)
        best.see(unknowns, data, objective)
        for unknown, gradient in zip(unknowns, slopes, strict=True):
            unknown.grad = gradient
        return objective

    for _ in range(steps):
        before = float(best.objective)
        lbfgs.step(closure)
        decay.step()
        after = float(best.objective)
        if not torch.isfinite(pixels).all() or after == before:
            break  # NaN, or nothing gained by a whole step: more of them change nothing
    return best


def _decay(schedule: str, steps: int) -> Callable[[int], float]:
    if schedule == "linear":
        return lambda step: 1 - step / steps
    if schedule == "constant":
        return lambda step: 1.0
    return lambda step: 0.1 ** sum(step >= steps * eighths // 8 for eighths in (3, 5, 7))


def _start(update: Update, match: _Match, init: str | Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
    like = match.parameters[0]
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device starts alike
    shape = (update.batch_size, *update.input_shape)
    if isinstance(init, Tensor):
        pixels = init.detach().clone()
    elif init == "grey":
        pixels = torch.full(shape, 0.5)
    elif init == "uniform":
        pixels = torch.rand(shape, generator=generator)
    else:
        pixels = 0.5 + 0.25 * torch.randn(shape, generator=generator)
    with torch.no_grad():
        classes = outputs_of(match.model.eval(), torch.zeros(shape, dtype=like.dtype, device=like.device)).shape[1]
    match.model.train(update.mode == "train")
    soft = None
    if update.labels is not None and update.loss == "cross_entropy" and update.labels.max() >= classes:
        raise ValueError(f"labels must lie in 0 to {classes - 1} for this model, got {update.labels.max().item()}")
    if update.labels is None:
        soft = torch.randn(update.batch_size, classes, generator=generator).to(like).requires_grad_(True)
    return pixels.to(like).requires_grad_(True), soft


def _check(objective, optimizer, schedule, init, steps, restarts, tv, update) -> None:
    for argument, value, allowed in (
        ("objective", objective, OBJECTIVES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("schedule", schedule, SCHEDULES),
    ):
        if value not in allowed:
            raise ValueError(f"{argument} must be one of {', '.join(allowed)}, got {value!r}")
    if not isinstance(init, Tensor) and (not isinstance(init, str) or init not in INITS):
        got = repr(init) if isinstance(init, str) else type(init).__name__
        raise ValueError(f"init must be one of {', '.join(INITS)} or a tensor of pictures, got {got}")
    shape = (update.batch_size, *update.input_shape)
    if isinstance(init, Tensor) and tuple(init.shape) != shape:
        raise ValueError(f"init must have shape {shape}, got {tuple(init.shape)}")
    if steps < 1 or restarts < 1:
        raise ValueError(f"steps and restarts must be at least 1, got {steps} and {restarts}")
    if tv < 0 or (tv and len(update.input_shape) != 3):
        raise ValueError(f"tv must be at least 0, and 0 for inputs that are no pictures, got {tv}")
    if update.labels is None and update.loss == "logistic":
        raise ValueError("labels must be known with loss='logistic', got None: reveal them in the update")
