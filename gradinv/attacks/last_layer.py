"""R-GAP's first step: what the last layer's gradient says of its input and output (Zhu & Blaschko 2021).

With one logit mu = y z and the loss log(1 + exp(-mu)), the last layer's weights w and their gradient satisfy
<w, dL/dw> = -mu / (1 + e^mu). The left side is public. Where mu > 0 two logits give the same value, and in a
network without biases whose activations are positively homogeneous the two belong to two inputs with the same
gradient: the picture and its twin (appendix B there).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit, lambertw, softmax
from torch import Tensor, nn

from gradinv.attacks.reconstruction import one_gradient
from gradinv.client import Update, expect_update
from gradinv.layers import NotCovered, Stage, read

# The largest mu with a twin of equal loss: where both roots meet, 1 + W(1/e); the value there is -W(1/e).
FOLD = 1 + float(lambertw(math.exp(-1)).real)
LOWEST = 1 - FOLD


def mu_roots(value: float) -> tuple[float, ...]:
    """Every mu with -mu / (1 + e^mu) = value, largest first; empty below the fold at -0.278465.

    Closed form: mu = -value - W(value e^(-value)), with W a real branch of Lambert's function (Corless et al. 1996).
    W_0 gives the smaller root; W_-1 gives the larger one, which only a negative value has.
    """
    if not value >= LOWEST:  # NaN has no root either
        return ()
    return tuple(_root(value, branch) for branch in ((0,) if value >= 0 else (-1, 0)))


def logits(update: Update) -> tuple[float, ...]:
    """The values of mu = y z that an update with the logistic loss allows: one, or two where there is a twin.

    Raises ValueError unless the loss is logistic, the batch is one picture and the last layer is linear without bias.
    """
    expect_update(update)
    update, several = one_gradient(update)
    if several:
        raise ValueError(f"logits needs one gradient, but {several}")
    last = read(update.model, update.input_shape)[-1]
    if update.loss != "logistic" or update.batch_size != 1:
        raise ValueError(
            "logits needs an update of one picture with loss='logistic', got "
            f"loss={update.loss!r}, batch_size={update.batch_size}"
        )
    if not isinstance(last.module, nn.Linear) or last.module.bias is not None:
        raise ValueError(f"logits needs a last layer that is linear without bias, got {last.module}")
    if f"{last.name}.weight" not in update.gradient:
        raise ValueError(f"logits needs the gradient of {last.name}.weight, got {', '.join(update.gradient)}")
    weight = last.module.weight.detach()
    return mu_roots(float((weight * update.gradient[f"{last.name}.weight"]).sum()))


def twin_ratio(mu: float) -> float | None:
    """By how much the twin of a picture with logit mu is the picture scaled: mu' / mu, or None where it has no twin.

    Below 1 only for mu above `FOLD` = 1.278465.
    """
    if mu <= 0:
        return None
    return _root(-mu * float(expit(-mu)), 0 if mu > FOLD else -1) / mu


def _root(value: float, branch: int) -> float:
    argument = value * math.exp(-value)
    p = math.sqrt(max(0.0, 2 + 2 * math.e * argument))
    if branch == -1:
        p = -p
    if abs(p) < 1e-3:
        # where the branches meet SciPy is right to four digits only, so take the series around -1/e (Corless et al.)
        return 1 - value - p + p**2 / 3 - 11 * p**3 / 72
    return float(-value - lambertw(argument, branch).real)


@dataclass(frozen=True)
class Start:
    """One way to read the last layer: its input x (1, features), k = dL/dz (1, outputs), and the label it goes with.

    mu: the margin y z where the logistic loss was read through it, else None.
    """

    x: Tensor
    k: Tensor
    label: int | None
    mu: float | None = None


def starts(update: Update, last: Stage, gradient: Mapping[str, Tensor]) -> list[Start]:
    """Every way to read the last layer of a chain that its gradient allows.

    A bias hands over k = dL/db, so there is one way. Without it, the logistic loss leaves every root of the equation
    for the logit, with both labels where the label is hidden; and cross-entropy leaves every size of k at which the
    softmax of W x agrees with it.

    Raises NotCovered where the last layer is not fully connected, its gradient was not sent, or something stands
    behind it that the loss cannot be read through.
    """
    name = last.operator.name
    weight, bias = (gradient.get(f"{name}.{part}" if name else part) for part in ("weight", "bias"))
    if not isinstance(last.operator.module, nn.Linear):
        raise NotCovered(f"{name} ({type(last.operator.module).__name__}) comes last, which must be fully connected")
    if weight is None:
        raise NotCovered(f"the gradient of {name}.weight is not in this update")
    if update.loss == "logistic" and len(weight) > 1:
        raise NotCovered(f"{name} has {len(weight)} outputs, and the logistic loss takes one")
    known = int(update.labels[0]) if update.labels is not None and update.batch_size == 1 else None
    if bias is not None:
        return [_by_bias(update, weight, bias, known)]
    if last.operator.bias.any():
        raise NotCovered(f"{name} has a bias whose gradient is not in this update")
    for layer in last.after:
        through = isinstance(layer.module, HOMOGENEOUS) and update.loss == "logistic"
        if not through and not isinstance(layer.module, nn.Identity | nn.Dropout | nn.Flatten):
            raise NotCovered(f"{layer.name} ({type(layer.module).__name__}) stands between {name} and the loss")
    if update.loss == "logistic":
        labels = [known] if known is not None else _mean_label(update)
        return _by_margin(last, weight, labels)
    return _by_softmax(last.operator.weight, weight, known)


# Positively homogeneous: f(s x) = s f(x) for s > 0, so that slope times input is output.
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)


def _by_bias(update: Update, weight: Tensor, bias: Tensor, label: int | None) -> Start:
    if label is None and update.batch_size == 1:
        label = int(bias.argmin()) if update.loss == "cross_entropy" else int(-bias.sign())
    unit = bias / bias.abs().max() if bias.any() else bias  # squares of small entries leave even double precision
    x = unit @ weight / unit.square().sum() / bias.abs().max()
    return Start(x[None], bias[None], label)


def _mean_label(update: Update) -> list[int]:
    """Both labels, or of a batch whose labels are known the one that most pictures have."""
    if update.labels is None:
        return [1, -1]
    return [1 if update.labels.sum() >= 0 else -1]


def _by_margin(last: Stage, gradient: Tensor, labels: list[int]) -> list[Start]:
    found = []
    for mu in mu_roots(float((last.operator.weight * gradient).sum())):
        for label in labels:
            output = torch.full((1, 1), label * mu, dtype=torch.float64)
            k = last.undo(output, torch.full_like(output, -label * float(expit(-mu))))[1]
            if k.any():
                found.append(Start(gradient / k, k, label, mu))
    return found


def _by_softmax(weight: Tensor, gradient: Tensor, label: int | None) -> list[Start]:
    """dL/dW = k x^T gives k up to its size, and k = softmax(W x) - onehot(label) gives the size.

    With h = k^T dL/dW for the direction k of unit size, x = s h, and s (1 - softmax(s W h)) = -k in the label's row,
    the only negative one. Where the network is sure, that row is a small difference of large numbers, so it is taken
    as minus the sum of the others.
    """
    found = []
    for row in range(len(gradient)) if label is None else (label,):
        whole = gradient.clone()
        whole[row] = 0
        whole[row] = -whole.sum(0)
        direction = torch.linalg.svd(whole, full_matrices=False)[0][:, 0]
        direction = -direction * direction[row].sign()
        if direction[row] == 0 or (label is None and direction.sort().values[1] < -ROUNDING):
            continue
        h = direction @ whole
        logits = (weight @ h).numpy()

        def excess(log_size, row=row, logits=logits, direction=direction):
            size = np.exp(log_size)
            return -size * _sensitivity(size * logits, row)[row] + float(direction[row])

        grid = np.linspace(-1, 60, 611)  # |k| is at most sqrt(2)
        values = [excess(point) for point in grid]
        for low, high, at_low, at_high in zip(grid, grid[1:], values, values[1:], strict=False):
            if at_low * at_high > 0:
                continue
            size = np.exp(brentq(excess, low, high, xtol=1e-15, rtol=1e-15))
            k = torch.from_numpy(_sensitivity(size * logits, row))
            if (k * size - direction).norm() < 1e-3:
                found.append(Start(size * h[None], k[None], row))
    return found


ROUNDING = 1e-6  # of an entry that should be positive, in single precision


def _sensitivity(logits: np.ndarray, row: int) -> np.ndarray:
    """softmax - onehot, with the row of the label as minus the sum of the others, which keeps its digits."""
    k = softmax(logits)
    k[row] = 0
    k[row] = -k.sum()
    return k
