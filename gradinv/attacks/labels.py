"""What the last layer says before any search: the labels, and the factor between the gradient and that of the loss.

Of z = W h + b and cross-entropy, picture i adds p_i - onehot(label_i) to dL/db and (p_i - onehot) h_i^T to dL/dW, with
p the softmax of z. So the one negative entry of dL/db is the label of a single picture (Zhao et al. 2020, iDLG). Over a
batch the mean of p less dL/db is the share of each class: the labels can be counted as far as the mean of p is known.
An untrained network says nearly the same p of every picture, so any picture tells it, and h read off the gradient
too (Ma et al. 2023, iLRG, read it class by class); a trained one is asked with pictures that are like the client's.
"""

import math

import numpy as np
import torch
from jaxtyping import Float, Int64
from scipy.optimize import nnls
from torch import Tensor, nn

from gradinv.client import Update, expect_batch, expect_update, mean_gradient, outputs_of, working_copy
from gradinv.layers import Layer, read

CLOSE = 1e-3  # relative; a last layer whose gradient is less exactly dL/db h^T was changed on its way
STAND_INS = 256  # random pictures that stand in for real ones where there are none
SLACK = 1e-4  # pictures; a share that is off by less than this is rounding
FULLY_CONNECTED = (
    "cross-entropy and a fully connected last layer whose outputs are the network's, which runs once and whose "
    "gradient was sent"
)
WHOLE_BATCH = 100  # how much more than an entry of dL/db the size of the batch counts


def restore_labels(update: Update, *, public: Float[Tensor, "m ..."] | None = None) -> Int64[Tensor, " n"]:
    """The labels of a batch, in ascending order and as often as each was counted, read off the last layer.

    The order of the pictures is not in a gradient. For one picture with a biased last layer the label is certain, and
    so are labels that `least_counts` proves. All others are counts to the nearest picture: nearly all right before
    training, and the less so the surer the network is, or where the gradient is not `Update.scale` times that of the
    mean loss, as after clipping.

    Args:
        update: a gradient, or a change of weights, which is read as the mean of its steps (`client.mean_gradient`).
        public: pictures (m, ...) in [0, 1] like the client's, without labels, that the server has. Their
            probabilities stand for those of the batch, class by class. They help where the network is well trained and
            they are really like the client's, and can hurt elsewhere. Without them p comes from the features that the
            gradient shows; and where the last layer has no bias, from uniform noise.

    Raises ValueError for another loss than cross-entropy, a network that does not end in a fully connected layer
    whose gradient was sent, a gradient that is not finite, or one picture whose gradient was rounded to nothing.
    """
    expect_update(update)
    original, update = update, mean_gradient(update)
    layer = _expect_last_layer(update)
    n, (weight, bias) = update.batch_size, _sent(update, layer)
    if n == 1 and bias is not None:
        if not bias.min() < 0:
            raise ValueError("the label cannot be told: no entry of the last bias's gradient is below zero")
        return bias.argmin()[None]
    features = probabilities = None
    if public is not None or bias is None or weight is None:
        features, probabilities = _seen(update, layer, public)
    if bias is not None:
        by_class, least = bias / update.scale, _least(original, layer) * _proves(original)
    else:
        # with <a, h> near 1 for every picture, dL/dW a is what dL/db would be
        middle = features.mean(0)
        by_class = weight @ middle / middle.square().sum() / update.scale
        if n == 1:
            return _only_one(weight, by_class).argmin()[None]
        least = (by_class < 0).long()
    if probabilities is None:
        h = (by_class @ weight / update.scale / by_class.square().sum()).nan_to_num()
        probabilities = _probabilities(layer, h[None])
    shares = _shares(by_class.cpu().numpy(), probabilities.cpu().numpy())
    counts = torch.from_numpy(_rounded(n * shares, n, least.cpu().numpy())).to(by_class.device)
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def least_counts(update: Update) -> Int64[Tensor, " classes"]:
    """How often each class is in the batch at least; a proof, without any assumption on the pictures.

    Every p is positive, so a class is there more than -n dL/db times. Where these add up to the size of the batch, the
    labels are certain. Rounding is allowed for. It holds for what the update says it is: not for a gradient that was
    noised, quantised or clipped, or a scale that is not declared. All zero where no bias of the last layer was sent.

    Raises ValueError as `restore_labels` does, for a change of weights whose steps do not count every picture alike,
    and where the counts are more than the batch, so that the update is not what it says.
    """
    expect_update(update)
    if not _proves(update):
        raise ValueError(
            "least_counts needs steps that count every picture alike, got a smaller last batch, several batches with "
            "momentum, or several steps with weight decay"
        )
    least = _least(update, _expect_last_layer(mean_gradient(update)))
    if least.sum() > update.batch_size:
        raise ValueError(
            f"the gradient shows at least {int(least.sum())} pictures, but batch_size is {update.batch_size}: "
            "batch_size or scale is not what the client used, or the gradient was changed on its way"
        )
    return least


def certain(update: Update) -> bool:
    """Whether labels that were read off an update are proved."""
    if update.batch_size == 1:
        return True
    try:
        return int(least_counts(update).sum()) == update.batch_size
    except ValueError:  # nothing can be proved of it
        return False


def found_scale(update: Update, layer: Layer | None) -> float | None:
    """How many times the gradient of the loss the sent one is, by the last layer; None where it cannot tell."""
    if layer is None or update.batch_size > 1:
        return None
    by_weight, by_bias = _sent(update, layer)
    if by_weight is None or by_bias is None:
        return None
    h = by_bias @ by_weight / by_bias.square().sum()
    if not (torch.outer(by_bias, h) - by_weight).norm() <= CLOSE * by_weight.norm():
        return None
    expected = _probabilities(layer, h[None])[0]
    expected[by_bias.argmin()] -= 1
    if not expected.norm() > CLOSE:  # a confident network: p - onehot drowns in rounding
        return None
    return float(by_bias @ expected / expected.square().sum())


def last_layer(update: Update) -> Layer | None:
    """The layer that tells labels: fully connected, with the network's outputs, run once, and its gradient sent."""
    layers = read(update.model, update.input_shape)
    if update.loss != "cross_entropy" or not layers:
        return None
    last: Layer = layers[-1]
    weight, bias = _names(last)
    if not isinstance(last.module, nn.Linear) or len(last.input_shape) != 1 or last.module.out_features < 2:
        return None
    if not {weight, bias} & set(update.gradient) or (last.module.bias is None and weight not in update.gradient):
        return None
    named = update.model.named_parameters(remove_duplicate=False)
    if sum(parameter is own for _, parameter in named for own in last.module.parameters()) > len(
        list(last.module.parameters())
    ):  # its gradient is not its own
        return None
    model = working_copy(update.model, update.mode)
    given: list[Tensor] = []
    model.get_submodule(last.name).register_forward_hook(lambda module, inputs, output: given.append(output.clone()))
    like = next(iter(update.gradient.values()))
    with torch.no_grad(), torch.random.fork_rng():
        outputs = outputs_of(model, like.new_full((2, *update.input_shape), 0.5))
    return last if len(given) == 1 and torch.equal(outputs, given[0]) else None


def _expect_last_layer(update: Update) -> Layer:
    if not all(value.isfinite().all() for value in update.gradient.values()):
        raise ValueError("update must be finite for labels to be read off, got NaN or infinity")
    layer = last_layer(update)
    if layer is None:
        raise ValueError(f"labels can be restored from {FULLY_CONNECTED}, which this update has not")
    return layer


def _names(layer: Layer) -> tuple[str, str]:
    return tuple(f"{layer.name}.{part}" if layer.name else part for part in ("weight", "bias"))


def _sent(update: Update, layer: Layer) -> list[Tensor | None]:
    """The gradients of the layer's weight and bias in double precision, None where one was not sent."""
    sent = [update.gradient.get(name) for name in _names(layer)]
    return [None if value is None else value.double() for value in sent]


def _probabilities(layer: Layer, features: Tensor) -> Tensor:
    weight, bias = layer.module.weight.detach().double(), layer.module.bias
    outputs = features @ weight.T
    return (outputs if bias is None else outputs + bias.detach().double()).softmax(1)


@torch.no_grad()
def _seen(update: Update, layer: Layer, public: Tensor | None) -> tuple[Tensor, Tensor]:
    """The features that some pictures have before the last layer, and their probabilities, both (m, ...)."""
    like = next(iter(update.gradient.values()))
    if public is not None and not isinstance(public, Tensor):
        raise ValueError(f"public must be a tensor of pictures (m, ...), got {type(public).__name__}")
    if public is None:
        noise = torch.rand((STAND_INS, *update.input_shape), generator=torch.Generator().manual_seed(0))
        public = noise.to(like)
    expect_batch(update.model, public, torch.ones(len(public), dtype=torch.int64, device=like.device), update.loss)
    if tuple(public.shape[1:]) != update.input_shape:
        raise ValueError(f"public must hold pictures of shape {update.input_shape}, got {tuple(public.shape[1:])}")
    model, features = working_copy(update.model, update.mode), []
    model.get_submodule(layer.name).register_forward_pre_hook(lambda module, inputs: features.append(inputs[0]))
    with torch.random.fork_rng():  # dropout in train mode draws from it
        for some in public.tensor_split(math.ceil(len(public) / STAND_INS)):
            outputs_of(model, some)
    seen = torch.cat(features).double()
    return seen, _probabilities(layer, seen)


def _proves(update: Update) -> bool:
    """Whether the mean of the steps counts every picture alike, so that it bounds the labels."""
    local = update.local
    if local is None:
        return True
    batches = local.batches(update.batch_size)
    alike = len({len(chosen) for chosen in batches}) == 1
    all_at_once = len(batches) == local.epochs
    return len(batches) == 1 or (alike and not local.weight_decay and (all_at_once or not local.momentum))


def _least(update: Update, layer: Layer) -> Tensor:
    """The least counts (classes,), with what rounding may add taken off: of the entries, and of the weights' change."""
    own = layer.module.bias
    bias = _sent(mean_gradient(update), layer)[1]
    if bias is None:
        return torch.zeros(layer.module.out_features, dtype=torch.int64, device=layer.module.weight.device)
    eps = torch.finfo(own.dtype).eps
    slack = SLACK + update.batch_size * eps
    if update.local is not None:
        pushes = update.local.pushes(update.batch_size)
        moved = update.batch_size / (update.local.lr * sum(pushes))
        slack = slack + eps * len(pushes) * own.detach().double().abs() * moved
    return (-update.batch_size / update.scale * bias - slack).ceil().clamp(min=0).long()


def _only_one(weight: Tensor, by_class: Tensor) -> Tensor:
    """p - onehot of one picture but for its size, from dL/dW = (p - onehot) h^T.

    One entry is negative and all others positive, which tells the sign unless there are two classes.
    """
    k = torch.linalg.svd(weight, full_matrices=False)[0][:, 0]
    up, down = (int((sign * k > 1e-6).sum()) for sign in (1, -1))
    turn = by_class @ k < 0 if up == down else up < down
    return -k if turn else k


def _shares(by_class: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """The share of each class in the batch: s = p - dL/db, where p is sum_c s_c times what pictures of class c get.

    probabilities (m, classes) are those of some pictures; each counts for a class as much as the network says.
    """
    confusion = probabilities.T @ probabilities / probabilities.sum(0).clip(1e-300)[:, None]
    classes = len(by_class)
    system = np.vstack([confusion.T - np.eye(classes), np.full(classes, WHOLE_BATCH)])
    try:
        shares = nnls(system, np.append(by_class, WHOLE_BATCH), maxiter=100 * classes)[0]
    except RuntimeError:  # it ran out of steps
        shares = np.zeros(classes)
    return shares / shares.sum() if shares.sum() > 0 else np.full(classes, 1 / classes)


def _rounded(counts: np.ndarray, n: int, least: np.ndarray) -> np.ndarray:
    """Whole counts that add up to n: the largest remainders go up, but no count below what is proved."""
    if least.sum() > n:  # the update says less pictures than it shows, or noise
        least = np.zeros_like(least)
    whole = np.maximum(np.floor(counts + SLACK).astype(np.int64), least)
    while whole.sum() != n:
        step = 1 if whole.sum() < n else -1
        free = whole > least if step < 0 else np.ones(len(whole), dtype=bool)
        whole[np.argmax(np.where(free, step * (counts - whole), -np.inf))] += step
    return whole
