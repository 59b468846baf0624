"""What a device computes on its private pictures, and what it sends: an `Update`.

The type is the threat model. It holds the global model as the server has it, the gradient by parameter
name, and what the protocol makes public. The private pictures are not in it.
"""

import copy
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

LOSSES = ("cross_entropy", "logistic")
MODES = ("eval", "train")


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains before it sends its change of weights: plain SGD, as the protocol fixes it.

    epochs: passes over the client's pictures.
    batch_size: pictures a step; None takes all at once. A last batch that is smaller is kept.
    lr, momentum, weight_decay: as in `torch.optim.SGD`.
    shuffle: the seed of a new order in each epoch; None keeps the order; "hidden" where the server does not know it.

    Raises ValueError for a number out of its range.
    """

    epochs: int = 1
    batch_size: int | None = None
    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0
    shuffle: int | str | None = None

    def __post_init__(self):
        for argument, least in (("epochs", 1), ("batch_size", 1), ("shuffle", 0)):
            value = getattr(self, argument)
            if argument == "epochs" or not (value is None or (argument == "shuffle" and isinstance(value, str))):
                object.__setattr__(self, argument, expect_whole(argument, value, least))
        if isinstance(self.shuffle, str):
            expect_one_of("shuffle", self.shuffle, ("hidden",))
        expect_positive("lr", self.lr)
        for argument, value, most in (
            ("momentum", self.momentum, 1),
            ("weight_decay", self.weight_decay, float("inf")),
        ):
            if not isinstance(value, numbers.Real) or not 0 <= value < most:
                raise ValueError(f"{argument} must be a number of at least 0 and below {most}, got {value!r}")

    def batches(self, count: int) -> list[Tensor]:
        """Which of `count` pictures each step takes, one int64 tensor a step; a hidden order is taken as the given."""
        drawn = self.shuffle not in (None, "hidden")
        generator = torch.Generator().manual_seed(self.shuffle) if drawn else None
        steps: list[Tensor] = []
        for _ in range(self.epochs):
            order = torch.randperm(count, generator=generator) if drawn else torch.arange(count)
            steps += order.split(self.batch_size or count)
        return steps

    def pushes(self, count: int) -> list[float]:
        """How far each step's gradient moves the weights in all, in units of lr: 1 but for momentum."""
        steps = len(self.batches(count))
        return [*accumulate(self.momentum**later for later in range(steps))][::-1]


@dataclass(frozen=True)
class Update:
    """One message from a client to the server.

    model: the global model as the server has it. Attacks work on a copy and leave it as it was.
    gradient: mean gradient over the batch by parameter name, in `model.named_parameters()` order; after local
        training the server's weights less the client's. A part of the names is allowed: an attack then says what that
        part still gives away.
    input_shape: (channels, height, width), or (features,), of one picture.
    batch_size: how many pictures the gradient averages, or the client trained on.
    labels: (n,) int64 where the protocol makes them public, else None.
    loss: "cross_entropy" (mean over the batch) or "logistic" (one logit, labels -1 or +1).
    mode: batch norm in "eval" uses the model's running statistics, in "train" those of the batch.
    scale: the gradient is this many times that of the mean loss: `batch_size` for a sum over the batch, 0.5 for
        half the loss. Only what compares sizes needs it, such as the Euclidean distance.
    local: how the client trained, where it sends a change of weights; None for a gradient.
    pruned: an entry that is exactly zero was left out by the client (`defences.prune`) and says nothing.
    """

    model: nn.Module
    gradient: Mapping[str, Tensor]
    input_shape: tuple[int, ...]
    batch_size: int = 1
    labels: Int64[Tensor, " n"] | None = None
    loss: str = "cross_entropy"
    mode: str = "eval"
    scale: float = 1.0
    pruned: bool = False
    local: LocalTraining | None = None

    def __post_init__(self):
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"model must be an nn.Module, got {type(self.model).__name__}")
        if not isinstance(self.gradient, Mapping):
            raise ValueError(
                f"gradient must map parameter names to tensors, got {type(self.gradient).__name__}; "
                "dict(zip(names, gradients)) makes one"
            )
        parameters = dict(self.model.named_parameters())
        for name, value in self.gradient.items():
            if name not in parameters:
                raise ValueError(f"gradient has {name!r}, which is no parameter of the model")
            _like(f"gradient[{name!r}]", value, parameters[name], "its parameter")
            if value.shape != parameters[name].shape:
                raise ValueError(
                    f"gradient[{name!r}] must have shape {tuple(parameters[name].shape)}, got {tuple(value.shape)}"
                )
        if not self.gradient:
            raise ValueError("gradient must not be empty")
        # a difference of weights may still hang on the graph of the weights
        object.__setattr__(self, "gradient", {name: value.detach() for name, value in self.gradient.items()})
        object.__setattr__(self, "input_shape", tuple(self.input_shape))
        if len(self.input_shape) not in (1, 3):
            raise ValueError(f"input_shape must be (channels, height, width) or (features,), got {self.input_shape}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        expect_one_of("loss", self.loss, LOSSES)
        expect_one_of("mode", self.mode, MODES)
        expect_positive("scale", self.scale)
        if self.local is not None and (not isinstance(self.local, LocalTraining) or self.scale != 1):
            raise ValueError(
                "local must be a LocalTraining, on the mean loss (scale=1, else lr holds the factor), got "
                f"{self.local!r} and scale={self.scale}"
            )
        if self.labels is not None:
            device = next(iter(self.gradient.values())).device
            _check_labels(self.labels, self.batch_size, device, self.loss)

    def __repr__(self) -> str:
        numbers = sum(value.numel() for value in self.gradient.values())
        return (
            f"Update({type(self.model).__name__}, {len(self.gradient)} gradients of {numbers} numbers in all, "
            f"input_shape={self.input_shape}, batch_size={self.batch_size}, "
            f"labels={'hidden' if self.labels is None else self.labels.tolist()}, loss={self.loss!r}, "
            f"mode={self.mode!r}{'' if self.local is None else f', local={self.local}'})"
        )


def expect_update(update) -> None:
    """Raise ValueError unless an attack was given an `Update`."""
    if not isinstance(update, Update):
        raise ValueError(f"update must be an Update (client.gradient makes one), got {type(update).__name__}")


def expect_one_of(argument: str, value, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless an option has one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{argument} must be one of {', '.join(allowed)}, got {value!r}")


def expect_positive(argument: str, value: float | int, *, finite: bool = True) -> None:
    """Raise ValueError unless a number is above zero and, if so asked, finite."""
    if not isinstance(value, numbers.Real) or not 0 < value <= float("inf") or (finite and value == float("inf")):
        raise ValueError(f"{argument} must be a {'finite ' if finite else ''}number above 0, got {value!r}")


def expect_whole(argument: str, value, least: int) -> int:
    """The value as an int. Raises ValueError unless it is a whole number of at least `least` that 64 bits can hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= value < 2**63:
        raise ValueError(f"{argument} must be a whole number of at least {least}, got {value!r}")
    return int(value)


@torch.enable_grad()
def gradient(
    model: nn.Module,
    pixels: Float[Tensor, "n ..."],
    labels: Int64[Tensor, " n"],
    *,
    loss: str = "cross_entropy",
    reveal_labels: bool = True,
    mode: str = "eval",
    scale: float = 1.0,
) -> Update:
    """The mean gradient of one batch, as a client sends it.

    Args:
        model: the global model; its mode, buffers and `.grad` are left as they were. A frozen parameter
            (requires_grad False) is not trained, so the client sends no gradient for it.
        pixels: (n, c, h, w) or (n, features), in [0, 1], with the model's dtype and device.
        labels: (n,) class indices, or -1 and +1 with loss="logistic".
        loss: see `Update`.
        reveal_labels: whether the protocol makes the labels public.
        mode: see `Update`.
        scale: what the client multiplies its mean loss by; see `Update`.

    Raises:
        ValueError: an empty batch, pixels outside [0, 1] or not finite, a shape, dtype or label that does not fit
            the model, a model with nothing to train, or batch norm in train mode over a single value.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("model must have a parameter with requires_grad=True, got none: nothing would be sent")
    expect_batch(model, pixels, labels, loss)
    expect_positive("scale", scale)
    working = working_copy(model, mode)
    outputs = outputs_of(working, pixels)
    if loss == "cross_entropy" and labels.max() >= outputs.shape[1]:
        raise ValueError(f"labels must lie in 0 to {outputs.shape[1] - 1} for this model, got {labels.max().item()}")
    value = scale * loss_between(outputs, labels, loss)
    parameters = [working.get_parameter(name) for name in trained]
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    return Update(
        model,
        dict(zip(trained, gradients, strict=True)),
        tuple(pixels.shape[1:]),
        len(pixels),
        labels.clone() if reveal_labels else None,
        loss,
        mode,
        scale,
    )


@torch.enable_grad()
def local_update(
    model: nn.Module,
    pixels: Float[Tensor, "n ..."],
    labels: Int64[Tensor, " n"],
    local: LocalTraining,
    *,
    loss: str = "cross_entropy",
    reveal_labels: bool = True,
    reveal_order: bool = True,
    mode: str = "eval",
) -> Update:
    """What federated averaging sends: the server's weights less those after some local steps (McMahan et al. 2017).

    One step without weight decay is lr times the gradient.

    Args:
        model, pixels, labels, loss, reveal_labels, mode: as in `gradient`. Running statistics of batch norm change
            during local training in train mode, in the client's copy, and are not sent.
        local: how the client trains; public, as the server sets it.
        reveal_order: whether the server knows the seed of the shuffle. If not, `Update.local.shuffle` is "hidden".

    Raises:
        ValueError: as `gradient` does, or where a step leaves the finite numbers.
    """
    if not isinstance(local, LocalTraining):
        raise ValueError(f"local must be a LocalTraining, got {type(local).__name__}")
    if local.shuffle == "hidden":
        raise ValueError("local.shuffle must be a seed or None for the client, got 'hidden': use reveal_order=False")
    gradient(model, pixels, labels, loss=loss, mode=mode if len(pixels) > 1 else "eval")  # the checks of all arguments
    working = working_copy(model, mode)
    trained = {name: working.get_parameter(name) for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
    for step, chosen in enumerate(local.batches(len(pixels)), 1):
        chosen = chosen.to(pixels.device)
        optimizer.zero_grad()
        loss_of(working, pixels[chosen], labels[chosen], loss).backward()
        optimizer.step()
        if not all(parameter.isfinite().all() for parameter in trained.values()):
            raise ValueError(f"lr must be small enough for the training to stay finite; step {step} did not")
    before = dict(model.named_parameters())
    change = {name: before[name].detach() - parameter.detach() for name, parameter in trained.items()}
    shape, shown = tuple(pixels.shape[1:]), labels.clone() if reveal_labels else None
    known = local if reveal_order else replace(local, shuffle="hidden")
    return Update(model, change, shape, len(pixels), shown, loss, mode, local=known)


def mean_gradient(update: Update) -> Update:
    """A change of weights read as one gradient: that of a single step, or the mean over the steps.

    Exact for one step. Of several steps it is the mean of their gradients, each taken where the weights then were, and
    `model` is a copy with the weights (those that were sent) of the mean place on a straight way. So the smaller the
    way, the better: the closed-form attacks may be tried on it, at one's own risk. The decay of the weights is taken
    off, at that place; momentum counts the early steps more. A plain gradient is given back as it is.
    """
    if update.local is None:
        return update
    local = update.local
    pushes = local.pushes(update.batch_size)
    total = sum(pushes)
    # with gradients that are all alike, each step starts after the part of the way that the later pushes leave
    gone = [0.0, *accumulate(reversed(pushes[1:]))]
    place = sum(push * part for push, part in zip(pushes, gone, strict=True)) / total**2
    model = update.model
    if len(pushes) > 1:
        model = copy.deepcopy(model)
        with torch.no_grad():
            for name, change in update.gradient.items():
                model.get_parameter(name).sub_(place * change)
    found = {name: change / (local.lr * total) for name, change in update.gradient.items()}
    if local.weight_decay:
        for name, change in update.gradient.items():
            decay = local.weight_decay * model.get_parameter(name).detach()
            # what was pruned, or has no part in the loss so that SGD leaves it alone, did not decay
            found[name] -= decay * ((change != 0) if update.pruned else change.any())
    return replace(update, model=model, gradient=found, local=None)


def working_copy(model: nn.Module, mode: str) -> nn.Module:
    """A copy of the model in the given mode with gradients on, so that the original is never touched."""
    expect_one_of("mode", mode, MODES)
    return copy.deepcopy(model).train(mode == "train").requires_grad_(True)


def loss_of(model: nn.Module, pixels: Tensor, labels: Tensor, loss: str) -> Tensor:
    """The training loss, a scalar. `labels` may be class indices or, for cross-entropy, probabilities (n, classes)."""
    return loss_between(outputs_of(model, pixels), labels, loss)


def outputs_of(model: nn.Module, pixels: Tensor) -> Tensor:
    """The model's outputs (n, classes). Raises ValueError where pixels and model do not fit together."""
    try:
        outputs = model(pixels)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        if "more than 1 value per channel" in str(error):
            raise ValueError(
                "mode='train' needs more than one value per channel for batch norm: use a larger "
                "batch or picture, or mode='eval'"
            ) from error
        raise ValueError(f"pixels of shape {tuple(pixels.shape)} do not fit the model: {error}") from error
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(pixels):
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"model must give one row of outputs a picture, shape ({len(pixels)}, classes), got {got}")
    return outputs


def loss_between(outputs: Tensor, labels: Tensor, loss: str) -> Tensor:
    """The loss of outputs (n, classes), a scalar; labels as in `loss_of`."""
    if loss == "logistic":
        if outputs.shape[1:] != (1,):
            raise ValueError(f"loss='logistic' needs a model with one output, got {tuple(outputs.shape[1:])}")
        return functional.softplus(-labels.to(outputs) * outputs.squeeze(1)).mean()
    return functional.cross_entropy(outputs, labels)


def expect_batch(model: nn.Module, pixels, labels, loss: str) -> None:
    """Raise ValueError unless pixels, labels, loss and model fit together, as `gradient` says."""
    expect_one_of("loss", loss, LOSSES)
    _like("pixels", pixels, next(model.parameters()), "the model")
    if pixels.ndim not in (2, 4):
        raise ValueError(
            "pixels must have shape (n, channels, height, width) or (n, features), "
            f"got {tuple(pixels.shape)}; a single picture is pixels[None]"
        )
    if len(pixels) == 0:
        raise ValueError("pixels is an empty batch: give at least one picture")
    _check_labels(labels, len(pixels), pixels.device, loss)
    if not torch.isfinite(pixels).all() or pixels.min() < 0 or pixels.max() > 1:
        raise ValueError(
            f"pixels must lie in [0, 1], got {pixels.min():.3g} to {pixels.max():.3g}; "
            "a victim that wants normalised input normalises inside itself"
        )


def _check_labels(labels, count: int, device: torch.device, loss: str) -> None:
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.ndim != 1:
        got = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be an int64 tensor of shape ({count},), got {got}")
    if len(labels) != count:
        raise ValueError(f"labels must hold one label a picture ({count}), got {len(labels)}")
    if labels.device != device:
        raise ValueError(f"labels must be on {device} like the rest, got {labels.device}")
    if loss == "logistic" and not (labels.abs() == 1).all():
        raise ValueError(f"labels must be -1 or +1 with loss='logistic', got {labels.unique().tolist()}")
    if loss == "cross_entropy" and (labels < 0).any():
        raise ValueError(f"labels must be class indices from 0 on, got {labels.min().item()}")


def _like(argument: str, value, reference: Tensor, owner: str) -> None:
    """Raise ValueError unless a tensor has the dtype and the device of another one."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{argument} must be a tensor, got {type(value).__name__}")
    if value.dtype != reference.dtype or value.device != reference.device:
        raise ValueError(
            f"{argument} must be {reference.dtype} on {reference.device} like {owner}, "
            f"got {value.dtype} on {value.device}: use .to(dtype, device)"
        )
