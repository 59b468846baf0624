"""What every attack gives back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gradinv.client import Update, mean_gradient

STATUSES = {
    "recovered": "solved in closed form, and the result reproduces the gradient",
    "approximate": "the best match found; an optimiser cannot certify more",
    "ambiguous": "several inputs give this gradient (a twin, a mixture, a permutation)",
    "blocked": "the information is not in the gradient: a layer lets nothing through",
    "weak gradient": "the gradient is (nearly) zero, so a poor picture says nothing about a defence",
    "diverged": "the optimiser left the finite numbers; the best finite picture is given",
    "not applicable": "this attack does not cover this network or update",
}

# A gradient of norm below this drowns in the rounding of a float32 forward pass of order one.
WEAK = 1e-6


@dataclass(frozen=True)
class Reconstruction:
    """The answer of an attack.

    pixels: (n, c, h, w) or (n, features), or None where there is no picture to show. Not clamped. A closed form
        that can only give a mixture of the batch gives one picture, and `unmix` only those that are certain.
    labels: (batch,) int64 where known or found, else None.
    status: one of `STATUSES`; why: the reason in words.
    loss: what the attack minimised, at the end (0 for a closed form).
    history: one entry a step or a layer.
    alternatives: other inputs that give the same gradient.
    seconds: time of the attack.
    features: where the walk ends inside the network, the input of the layer it ended at.
    """

    pixels: Float[Tensor, "n ..."] | None
    labels: Int64[Tensor, " batch"] | None
    status: str
    why: str
    loss: float
    history: Sequence
    alternatives: Sequence[Tensor] = ()
    seconds: float = 0.0
    features: Float[Tensor, "rows features"] | None = None

    def __post_init__(self):
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")

    def __repr__(self) -> str:
        shape = None if self.pixels is None else tuple(self.pixels.shape)
        return f"Reconstruction({self.status}: {self.why}; pixels {shape}, loss {self.loss:.3g}, {self.seconds:.2g} s)"


def one_gradient(update: Update) -> tuple[Update, str]:
    """The update as one gradient, which a change of weights after a single step is; or why it is none."""
    steps = 1 if update.local is None else len(update.local.batches(update.batch_size))
    if steps == 1:
        return mean_gradient(update), ""
    return update, (
        f"the weights moved between {steps} local steps, so no one gradient was sent: match_gradients goes through "
        "them, and client.mean_gradient gives the mean of their gradients, to try where the weights moved little"
    )


def norm(tensors) -> float:
    """The Euclidean norm of all entries of some tensors together."""
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())
