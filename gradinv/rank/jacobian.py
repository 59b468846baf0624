"""What the whole gradient determines of the picture: the rank of its Jacobian, over all layers at once.

Where a layer lacks equations, the layers below may make up for it, as virtual constraints do. The Jacobian counts all
of that: a direction of the picture in which no entry of the gradient changes is lost to every attack, at first order.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradinv.client import Update, expect_update, loss_between, working_copy

# Up to this many unknowns all directions are tried, above it as many as PROBES
FULL, PROBES = 4_096, 64
# Singular values below this share of the largest are rounding
TOLERANCE = 1e-11
# A parameter's gradient below this share of the largest one is scaled as if it were that: it may be rounding alone, as
# that of a bias before batch norm in train mode, or zero where the picture is black
FLOOR = 1e-3
CHUNK = 16  # directions in one pass


@dataclass(frozen=True)
class Identifiability:
    """The rank of a gradient's Jacobian with respect to the pictures.

    unknowns: pixel values of all pictures together; rank: how many independent directions were seen to change the
    gradient; exact: whether all were tried, so that unknowns - rank are lost; else rank is a lower bound.
    values: singular values, largest first, of the gradient's change, with each parameter's gradient scaled to length
    one (those below a thousandth of the largest less, since they may be rounding); lost: an orthonormal basis of the
    lost directions as pictures, empty where rank is a bound.
    """

    unknowns: int
    rank: int
    exact: bool
    values: Float[Tensor, " tried"] = field(repr=False)
    lost: Float[Tensor, "lost n *shape"] = field(repr=False)

    @property
    def nullity(self) -> int:
        """The lost directions; an upper bound on their number unless `exact`."""
        return self.unknowns - self.rank


def identifiable(
    update: Update, at: Tensor | None = None, *, probes: int | None = None, seed: int = 0
) -> Identifiability:
    """How many directions of the pictures a gradient determines, at first order and in double precision.

    Args:
        update: says which parameters' gradients are sent, the batch size, the labels (the first class where they are
            hidden) and the mode of batch norm. Its numbers are not used; nor are local steps, so that a change of
            weights counts as the gradient at the server's weights.
        at: the pictures at which to look, (n, c, h, w) or (n, features); random ones where None, which gives the rank
            that almost all pictures around them have.
        probes: how many random directions to try; None for all where there are at most 4,096, else 64. The time grows
            with the square of their number where all are tried: seconds for a thousand, a minute for three.

    Raises ValueError for pictures that are not finite floating numbers or have another shape than the update's, for
    probes below 1, and for a network whose gradient has no forward derivative in double precision.
    """
    expect_update(update)
    shape = (update.batch_size, *update.input_shape)
    unknowns = torch.Size(shape).numel()
    if probes is not None and probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    generator = torch.Generator().manual_seed(seed)
    if at is None:
        at = torch.rand(shape, generator=generator, dtype=torch.float64)
    if not at.is_floating_point() or not at.isfinite().all():
        raise ValueError(f"at must hold finite floating numbers, got {at.dtype}: pictures have values in [0, 1]")
    if tuple(at.shape) != shape:
        raise ValueError(f"at must have the update's shape {shape}, got {tuple(at.shape)}")
    device = next(update.model.parameters()).device
    at = at.detach().to(device, torch.float64)
    tried = min(probes or (unknowns if unknowns <= FULL else PROBES), unknowns)
    if tried == unknowns:
        directions = torch.eye(unknowns, dtype=torch.float64)
    else:
        directions = torch.linalg.qr(torch.randn(unknowns, tried, generator=generator, dtype=torch.float64))[0].T
    try:
        changes = _changes(update, at, directions.to(device), generator)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(f"the gradient of this network cannot be differentiated here: {error}") from error
    # the triangle of the rows has the same singular values, and is smaller
    triangle = torch.linalg.qr(changes, mode="r")[1] if len(changes) > tried else changes
    _, values, right = torch.linalg.svd(triangle, full_matrices=True)
    values = torch.cat([values, values.new_zeros(tried - len(values))])
    rank = int((values > TOLERANCE * values[0]).sum())
    exact = tried == unknowns
    lost = right[rank:] if exact else right.new_zeros(0, unknowns)
    return Identifiability(unknowns, rank, exact, values, lost.reshape(-1, *shape))


def _changes(update: Update, at: Tensor, directions: Tensor, generator: torch.Generator) -> Tensor:
    """The gradient's change along each direction as a column: J v, with rows mixed where they are many.

    Adding rows with random signs keeps the rank, and the singular values up to a factor near one.
    """
    model = working_copy(update.model, update.mode).double()
    for module in model.modules():
        if update.mode == "train" and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    weights = {name: value.detach() for name, value in model.named_parameters()}
    sent = {name: weights.pop(name) for name in update.gradient}
    labels = update.labels
    if labels is None:
        labels = torch.full((len(at),), int(update.loss == "logistic"), device=at.device)

    def gradient(pixels: Tensor) -> dict[str, Tensor]:
        def loss(parameters):
            outputs = functional_call(model, {**weights, **parameters}, (pixels,))
            return loss_between(outputs, labels, update.loss)

        return grad(loss)(sent)

    sizes = {name: value.norm() for name, value in gradient(at).items()}
    floor = FLOOR * max(sizes.values()).clamp(min=1e-300)
    count = sum(value.numel() for value in sent.values())
    rows = 4 * len(directions)
    mixer = None if count <= rows else _mixer(count, rows, generator, at.device)

    def change(direction: Tensor) -> Tensor:
        changed = jvp(gradient, (at,), (direction,))[1]
        return torch.cat([(value / sizes[name].clamp(min=floor)).flatten() for name, value in changed.items()])

    columns = []
    # the fast kernels of attention have no forward derivative
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's forward mode warns about its own inside
        for chunk in directions.view(-1, *at.shape).split(CHUNK):
            column = vmap(change)(chunk)
            columns.append(column if mixer is None else mixer(column))
    return torch.cat(columns).T


def _mixer(count: int, rows: int, generator: torch.Generator, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Each of `count` entries is added to four of `rows` sums, with random signs."""
    places = [torch.randint(0, rows, (count,), generator=generator).to(device) for _ in range(4)]
    signs = [(torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1).to(device, torch.float64) for _ in places]

    def mixed(columns: Tensor) -> Tensor:
        total = columns.new_zeros(len(columns), rows)
        for place, sign in zip(places, signs, strict=True):
            total.index_add_(1, place, columns * sign)
        return total

    return mixed
