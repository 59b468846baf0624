"""The walk back through fully connected layers (Geiping et al. 2020, Proposition 3.1), with no optimiser.

A layer z = W x + b gives dL/dW = dz x^T and dL/db = dz, with dz = dL/dz. So a biased layer hands over dz, any
row of dL/dW divided by its entry of dz is the layer's input x, the slope of the activation before it can be
read off x, and (W^T dz) * slope is dz of the layer before. Repeated, this ends at the picture.
"""

import time
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradinv.attacks.reconstruction import Reconstruction, one_gradient
from gradinv.client import Update, expect_one_of, expect_update
from gradinv.layers import ACTIVATIONS, Layer, read, slope
from gradinv.victims import Normalize

ROWS = ("best", "least_squares", "mean")


def walk_back(update: Update, *, row: str = "best") -> Reconstruction:
    """The input of a fully connected network, from its gradient, in closed form.

    Args:
        update: of a network that ends in fully connected layers, at least one of them biased. If something else
            comes before them, the walk ends there and `features` holds the input of the block. A network whose first
            layer is fully connected and biased is read there, whatever follows.
        row: how a layer's input is read off dL/dW. "best" divides the row with the largest |dz|,
            "least_squares" takes all rows weighted by dz, "mean" averages the divided rows.

    Returns:
        status "recovered"; "blocked" where every entry of a layer's dz is zero; "ambiguous" for a batch, whose
        mixture is returned; "approximate" where the first layer's gradient is not dz x^T, as with noise;
        "weak gradient" for a zero gradient; "not applicable" where no picture can come out.
        history: a dict a layer from the last to the first, with its name, rows and live rows (dz not zero).
    """
    expect_one_of("row", row, ROWS)
    expect_update(update)
    started = time.perf_counter()
    update, several = one_gradient(update)
    layers = read(update.model, update.input_shape)
    block, before, front = dense_block(layers, update.gradient, update.mode)
    history: list[dict] = []

    def answer(status, why, pixels=None, **more):
        taken = time.perf_counter() - started
        found = {"labels": update.labels, "loss": 0.0, **more}
        return Reconstruction(pixels, status=status, why=why, history=history, seconds=taken, **found)

    if several:
        return answer("not applicable", several)
    sent = [all(f"{layer.name}.{part}" in update.gradient for part in ("weight", "bias")) for layer, _ in block]
    if not any(sent):
        unknowns = torch.Size(update.input_shape).numel()
        numbers = sum(value.numel() for value in update.gradient.values())
        why = "no fully connected layer with the gradients of both its weight and its bias is in this update"
        reason = f": {before}" if before and not block else ""
        return answer("not applicable", f"{why} ({numbers} numbers for {unknowns} unknown pixels){reason}")
    largest = torch.stack([torch.linalg.vector_norm(value, float("inf")) for value in update.gradient.values()])
    if not largest.any():
        return answer("weak gradient", "every entry of the gradient is zero")
    if not largest.isfinite().all():
        return answer("not applicable", "the gradient is not finite")

    walk = _walk(update, block[: len(sent) - sent[::-1].index(True)], row, history)
    labels = update.labels
    outputs_read = not front and sent[-1] and block[-1][1] is None
    if outputs_read and update.loss == "cross_entropy" and update.batch_size == 1:
        bias = update.gradient[f"{block[-1][0].name}.bias"]
        labels = bias.argmin()[None] if bias.min() < 0 else labels
    if walk.stopped:
        status = "blocked" if walk.blocked else "not applicable"
        return answer(status, walk.stopped, features=walk.x, labels=labels)
    residual = _residual(update.gradient[f"{block[0][0].name}.weight"], walk.sensitivity, walk.x[0])
    if before:
        mixture = f"; and a mixture over {update.batch_size} pictures" if update.batch_size > 1 else ""
        why = f"the walk ends at {block[0][0].name}: its {walk.x.shape[1]} inputs are in .features; they are features, "
        why += f"not pixels, since {before}{mixture}"
        return answer("not applicable", why, features=walk.x, loss=residual, labels=labels)
    pixels = to_pixels(walk.x, layers[0].module, update.input_shape)
    if update.batch_size > 1:
        why = f"the gradient averages {update.batch_size} pictures, so this is a mixture of them"
        return answer("ambiguous", why, pixels, loss=residual)
    if not residual < torch.finfo(pixels.dtype).eps ** 0.5:
        why = f"the first layer's gradient is not of rank one (relative residual {residual:.1e})"
        return answer("approximate", why, pixels, loss=residual, labels=labels)
    return answer("recovered", "every layer had a row to read", pixels, loss=residual, labels=labels)


@dataclass
class _Walk:
    """Where the walk stands: the input and the sensitivity of the layer it reached, and why it stopped early."""

    x: Tensor | None = None
    sensitivity: Tensor | None = None
    stopped: str = ""
    blocked: bool = False


def _walk(update: Update, block: list[tuple[Layer, nn.Module | None]], row: str, history: list[dict]) -> _Walk:
    """Walk from the last layer of the block to its first."""
    walk = _Walk()
    for i in range(len(block) - 1, -1, -1):
        layer, activation = block[i]
        weight, bias = (update.gradient.get(f"{layer.name}.{part}") for part in ("weight", "bias"))
        if weight is None:
            walk.stopped = f"the gradient of {layer.name}.weight is not in this update"
            return walk
        if bias is not None:
            walk.sensitivity = bias
        elif not is_readable(activation):
            walk.stopped = (
                f"{layer.name} has no bias, and the slope of {type(activation).__name__} after it cannot be read off"
            )
            return walk
        else:
            above = block[i + 1][0].module.weight.detach()
            walk.sensitivity = (above.T @ walk.sensitivity) * slope(activation or nn.Identity(), walk.x[0])
        live = walk.sensitivity != 0
        history.append({"layer": layer.name, "rows": live.numel(), "live rows": int(live.sum())})
        if not live.any():
            # a zero sensitivity stays zero on its way down
            history += [
                {"layer": lower.name, "rows": lower.module.out_features, "live rows": 0}
                for lower, _ in reversed(block[:i])
            ]
            walk.stopped = f"dL/dz of {layer.name} is zero in every row, so its weights carry nothing"
            walk.blocked = True
            return walk
        walk.x = _layer_input(weight, walk.sensitivity, row)[None]
    return walk


def _residual(weight: Tensor, sensitivity: Tensor, x: Tensor) -> float:
    """The part of dL/dW that dz x^T does not explain, relative to dL/dW."""
    scale = torch.linalg.vector_norm(weight, float("inf"))  # squares of small entries leave single precision
    scaled = weight / scale
    return float(torch.addr(scaled, sensitivity / scale, x, alpha=-1).norm() / scaled.norm())


def _layer_input(weight: Tensor, sensitivity: Tensor, row: str) -> Tensor:
    if row == "best":
        best = sensitivity.abs().argmax()
        return weight[best] / sensitivity[best]
    if row == "least_squares":
        return sensitivity @ weight / sensitivity.square().sum()
    live = sensitivity != 0
    return (weight[live] / sensitivity[live, None]).mean(0)


def is_readable(activation: nn.Module | None) -> bool:
    """Whether the slope of what follows a layer can be read off its output, so that the walk needs no bias there."""
    return activation is None or isinstance(activation, ACTIVATIONS)


def dense_block(
    layers: list[Layer], sent: Container[str], mode: str
) -> tuple[list[tuple[Layer, nn.Module | None]], str, bool]:
    """What the walk can go through, if the gradients of the parameters named in `sent` were sent.

    layers: as `gradinv.layers.read` gives them.

    Returns:
        the fully connected layers, each with the activation after it; what stands between them and the picture, empty
        when nothing does; and whether they are not the last ones, but one that sees the picture itself.
    """
    block, before = _dense_block(layers, mode)
    front = _front(layers, sent, mode) if before else None
    return (block, before, False) if front is None else ([(front, None)], "", True)


def _dense_block(layers: list[Layer], mode: str) -> tuple[list[tuple[Layer, nn.Module | None]], str]:
    """The fully connected layers that end the network, each with the activation after it.

    The second value says what stands between them and the picture; it is empty when nothing does.
    """
    block: list[tuple[Layer, nn.Module | None]] = []
    activation = None
    runs = Counter(id(layer.module.weight) for layer in layers if isinstance(layer.module, nn.Linear))
    for layer in reversed(layers):
        if isinstance(layer.module, nn.Linear):
            if runs[id(layer.module.weight)] > 1:
                return block, f"{layer.name}, whose weights run more than once, comes before them"
            if len(layer.input_shape) != 1:
                return (
                    block,
                    f"{layer.name}, which runs on many vectors of a {layer.input_shape} input, comes before them",
                )
            block.insert(0, (layer, activation))
            activation = None
        elif isinstance(layer.module, Normalize) and layer is layers[0]:
            pass
        elif isinstance(layer.module, nn.Dropout) and mode == "train":
            return block, f"{layer.name} (Dropout in train mode) comes before them"
        elif isinstance(layer.module, nn.Flatten | nn.Dropout | nn.Identity):
            pass
        elif activation is None and layer.input_shape == layer.output_shape and not list(layer.module.parameters()):
            activation = layer.module
        else:
            return block, f"{layer.name} ({type(layer.module).__name__}) comes before them"
        if not layer.follows:
            return block, f"before {layer.name} the model does something that is not a layer"
    if activation is not None:
        return block, f"an activation ({type(activation).__name__}) comes before them"
    return block, ""


def _front(layers: list[Layer], sent: Container[str], mode: str) -> Layer | None:
    """The layer that sees the picture itself, where it is fully connected and its bias was sent.

    Its gradient is dz x^T and dz whatever follows it, so it can be read by itself.
    """
    for layer in layers:
        if not layer.follows or (isinstance(layer.module, nn.Dropout) and mode == "train"):
            return None
        if isinstance(layer.module, nn.Linear):
            alone = sum(getattr(other.module, "weight", None) is layer.module.weight for other in layers) == 1
            both = all(f"{layer.name}.{part}" in sent for part in ("weight", "bias"))
            return layer if alone and both and len(layer.input_shape) == 1 else None
        if not isinstance(layer.module, nn.Flatten | nn.Dropout | nn.Identity) and not (
            isinstance(layer.module, Normalize) and layer is layers[0]
        ):
            return None
    return None


def to_pixels(x: Tensor, first: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Rows (n, features) that reach the first fully connected layer as the pictures (n, ...) that they came from.

    first: the network's first layer, whose normalising is taken back.
    """
    pixels = x.reshape(len(x), *input_shape)
    return pixels * first.std + first.mean if isinstance(first, Normalize) else pixels
