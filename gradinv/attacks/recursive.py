"""R-GAP's first step: from the last layer's gradient to the logit, and the twins this leaves (Zhu & Blaschko 2021).

With one logit mu = y z and the loss log(1 + exp(-mu)), the last layer's weights w and their gradient satisfy
<w, dL/dw> = -mu / (1 + e^mu). The left side is public. Where mu > 0 two logits give the same value, and in a
network without biases whose activations are positively homogeneous the two belong to two inputs with the same
gradient: the picture and its twin (appendix B there).
"""

import math

from scipy.special import expit, lambertw
from torch import nn

from gradinv.client import Update
from gradinv.layers import read

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
