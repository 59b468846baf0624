"""What a device does to its gradient before it sends it: `Update` in, `Update` out.

Clipping, noise, pruning and quantisation by themselves promise nothing. `private_gradient` is the release of DP-SGD
(Abadi et al. 2016), computed by Opacus: each picture's gradient is clipped, then noise is added, and the two together
bound what any attacker can learn (`gradinv.privacy`).
"""

import copy
import math
import warnings
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from gradinv.attacks.reconstruction import norm
from gradinv.client import (
    Update,
    expect_batch,
    expect_positive,
    expect_update,
    expect_whole,
    gradient,
    loss_between,
    outputs_of,
)


def clip_norm(update: Update, bound: float) -> Update:
    """The gradient shortened to norm `bound` over all parameters together, where it is longer. Its direction stays."""
    expect_update(update)
    expect_positive("bound", bound)
    size = norm(update.gradient.values())
    return update if size <= bound else _each(update, lambda value: value * (bound / size))


def add_noise(update: Update, std: float, *, seed: int = 0) -> Update:
    """Independent Gaussian noise of standard deviation `std` on every entry.

    No guarantee: a gradient that is not clipped first can be of any size. `private_gradient` does both.
    """
    expect_update(update)
    if not 0 <= std < math.inf:
        raise ValueError(f"std must be a finite number of at least 0, got {std}")
    generators = {value.device: _generator(value.device, seed) for value in update.gradient.values()}

    def noisy(value: Tensor) -> Tensor:
        return value + std * torch.randn(
            value.shape, dtype=value.dtype, device=value.device, generator=generators[value.device]
        )

    return _each(update, noisy)


def prune(update: Update, share: float) -> Update:
    """A `share` of all entries set to zero, the smallest in absolute value over all parameters together.

    The server sees which ones, so the result is marked as `pruned` and a match leaves them out.
    """
    expect_update(update)
    if not 0 <= share < 1:
        raise ValueError(f"share must be at least 0 and below 1, got {share}: with all pruned nothing is sent")
    sizes = torch.cat([value.abs().flatten() for value in update.gradient.values()])
    kept = torch.ones_like(sizes, dtype=torch.bool)
    kept[sizes.argsort(stable=True)[: round(share * len(sizes))]] = False
    masks = iter(kept.split([value.numel() for value in update.gradient.values()]))
    return replace(_each(update, lambda value: value * next(masks).view_as(value)), pruned=True)


def quantise(update: Update, bits: int) -> Update:
    """Each tensor rounded to the nearest of 2^bits levels, evenly spaced from its smallest entry to its largest."""
    expect_update(update)
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 16:
        raise ValueError(f"bits must be a whole number from 1 to 16, got {bits!r}")

    def rounded(value: Tensor) -> Tensor:
        wide = value.double()  # in single precision the step between tiny entries would be zero
        low, high = wide.aminmax()
        step = (high - low) / (2**bits - 1)
        return value if step == 0 else (low + step * ((wide - low) / step).round()).to(value.dtype)

    return _each(update, rounded)


def private_gradient(
    model: nn.Module,
    pixels: Float[Tensor, "n ..."],
    labels: Int64[Tensor, " n"],
    *,
    clip: float,
    noise_multiplier: float,
    expected_batch: float | int | None = None,
    loss: str = "cross_entropy",
    reveal_labels: bool = False,
    seed: int | None = None,
) -> Update:
    """One release of DP-SGD: the clipped gradients of the pictures, summed, with noise, over the expected batch size.

    The noise on the averaged gradient has standard deviation noise_multiplier * clip / expected_batch. Computed by
    Opacus (Yousefpour et al. 2021); what it guarantees follows from `privacy.gaussian_epsilon`,
    `privacy.sampled_epsilon` and `privacy.reconstruction_bound`. The update says the expected batch size and not how
    many were drawn, since that would tell who was.

    Args:
        model: as in `client.gradient`, in eval mode, with no layer that mixes the pictures of a batch.
        pixels: (n, c, h, w) or (n, features); n may be 0, as Poisson sampling can draw nobody: then only noise is sent.
        labels: (n,).
        clip: largest norm of one picture's gradient. Infinite is allowed where there is no noise.
        noise_multiplier: standard deviation of the noise, as a multiple of `clip`.
        expected_batch: what the sum is divided by; with Poisson sampling the sample rate times the number of pictures,
            which does not depend on who was drawn. By default n.
        reveal_labels: whether the labels go with it, which no noise protects; only where as many pictures were drawn
            as expected.
        seed: of the noise; by default it is drawn in secret, as a client must. Whoever knows a seed, or sees two
            releases with the same one, can take the noise away.

    Raises:
        ValueError: noise without a finite clip, a layer that Opacus cannot take apart, a model in which the pictures of
            a batch meet (batch norm), or what `client.gradient` refuses.
    """
    from opacus.optimizers import DPOptimizer  # slow to import

    expect_positive("clip", clip, finite=False)
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be a finite number of at least 0, got {noise_multiplier}")
    if noise_multiplier > 0 and clip == math.inf:
        raise ValueError(
            "clip must be finite where noise_multiplier is above 0, got inf: a gradient of any size has no "
            "sensitivity to scale the noise by, so the noise would guarantee nothing"
        )
    if expected_batch is None and not len(pixels):
        raise ValueError("expected_batch must be given where nobody was drawn: the sum is divided by it")
    expected_batch = len(pixels) if expected_batch is None else expected_batch
    expect_positive("expected_batch", expected_batch)
    net = _per_picture(model, pixels, labels, loss)
    parameters = {name: value for name, value in net._module.named_parameters() if value.requires_grad}
    optimizer = DPOptimizer(
        torch.optim.SGD(parameters.values()),
        noise_multiplier=noise_multiplier,
        max_grad_norm=min(clip, torch.finfo(torch.float32).max),  # Opacus multiplies it by 0 where there is no noise
        expected_batch_size=expected_batch,
        generator=_generator(next(net.parameters()).device, seed),
    )
    optimizer.pre_step()
    batch = max(1, round(expected_batch))
    return Update(
        model,
        {name: value.grad for name, value in parameters.items()},
        tuple(pixels.shape[1:]),
        batch,
        labels.clone() if reveal_labels and len(pixels) == batch else None,
        loss,
    )


def clipped_gradients(
    model: nn.Module,
    pixels: Float[Tensor, "n ..."],
    labels: Int64[Tensor, " n"],
    *,
    clip: float,
    loss: str = "cross_entropy",
) -> Float[Tensor, "n parameters"]:
    """Each picture's gradient by itself, clipped as in `private_gradient`, all parameters in one row."""
    expect_positive("clip", clip, finite=False)
    net = _per_picture(model, pixels, labels, loss)
    rows = torch.cat([value.grad_sample.flatten(1) for value in net.parameters() if value.requires_grad], 1)
    return rows * (clip / (rows.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)  # the 1e-6 is Opacus's


@torch.enable_grad()
def _per_picture(model: nn.Module, pixels: Tensor, labels: Tensor, loss: str) -> nn.Module:
    """A copy of the model, wrapped by Opacus, whose parameters carry each picture's gradient in `grad_sample`."""
    from opacus.grad_sample import GradSampleModule

    if len(pixels):
        expect_batch(model, pixels, labels, loss)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model must have a parameter with requires_grad=True, got none: nothing would be sent")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and (
            isinstance(module, nn.modules.batchnorm._BatchNorm) or module.track_running_stats
        ):
            raise ValueError(
                f"model must not have {type(module).__name__} ({name}): it mixes the pictures of a batch, so that none "
                "has a gradient of its own to clip; use group norm (nn.GroupNorm) in its place"
            )
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        module.training = bool(module._parameters)  # Opacus looks at these only; dropout has none and stays off
        if getattr(module, "inplace", False):  # which its hooks do not allow
            module.inplace = False
    try:
        net = GradSampleModule(copied)
    except NotImplementedError as error:
        raise ValueError(f"model has a layer whose gradient Opacus cannot take apart by picture: {error}") from error
    if len(pixels):
        with warnings.catch_warnings():  # Opacus hooks the output, as it should: no input requires a gradient
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            outputs = outputs_of(net, pixels)
            if loss == "cross_entropy" and labels.max() >= outputs.shape[1]:
                raise ValueError(f"labels must lie in 0 to {outputs.shape[1] - 1} for this model, got {labels.max()}")
            loss_between(outputs, labels, loss).backward()
    for parameter in net.parameters():
        if parameter.requires_grad and getattr(parameter, "grad_sample", None) is None:
            parameter.grad_sample = parameter.new_zeros(len(pixels), *parameter.shape)
    if len(pixels) > 1:
        _expect_apart(model, net, pixels[:1], labels[:1], loss)
    return net


def _expect_apart(model: nn.Module, net: nn.Module, pixels: Tensor, labels: Tensor, loss: str) -> None:
    """Raise ValueError unless the first picture has the gradient in the batch that it has alone, in eval mode."""
    alone = gradient(model, pixels, labels, loss=loss).gradient
    together = {name: value for name, value in net._module.named_parameters() if value.requires_grad}
    apart = norm(together[name].grad_sample[0] - value for name, value in alone.items())
    if not apart <= 0.05 * norm(alone.values()) + 1e-6:
        raise ValueError(
            "model must treat each picture of a batch by itself: the first one's gradient is another in this batch "
            "than alone, so that clipping it bounds nothing"
        )


def _each(update: Update, change) -> Update:
    if not all(value.isfinite().all() for value in update.gradient.values()):
        raise ValueError("update must have a finite gradient, got NaN or infinite entries: nothing bounds those")
    return replace(update, gradient={name: change(value) for name, value in update.gradient.items()})


def _generator(device: torch.device, seed: int | None) -> torch.Generator:
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
        return generator
    return generator.manual_seed(expect_whole("seed", seed, 0))
