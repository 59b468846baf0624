"""Errors between reconstruction and truth, one a picture, on pixels in [0, 1] (so the PSNR's peak is 1).

PSNR and SSIM clamp the reconstruction to the box first, as every published figure does; MSE does not.
"""

import torch
from jaxtyping import Float, Int64
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure


def mse(reconstruction: Float[Tensor, "n ..."], truth: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """Mean squared error of each picture, not clamped."""
    _check(reconstruction, truth)
    return (reconstruction - truth).flatten(1).square().mean(1)


def psnr(reconstruction: Float[Tensor, "n ..."], truth: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """10 log10(1 / MSE) in dB of each picture, clamped to [0, 1]; infinite where they are equal."""
    return -10 * mse(reconstruction.clamp(0, 1), truth).log10()


def ssim(reconstruction: Float[Tensor, "n c h w"], truth: Float[Tensor, "n c h w"]) -> Float[Tensor, " n"]:
    """Structural similarity of each picture (Wang et al. 2004), clamped to [0, 1]; 1 where they are equal."""
    _check(reconstruction, truth)
    if truth.ndim != 4:
        raise ValueError(f"truth must be pictures (n, c, h, w), got shape {tuple(truth.shape)}")
    if min(truth.shape[2:]) < 6:
        raise ValueError(f"truth must be at least 6 x 6 for SSIM's 11 x 11 window, got {tuple(truth.shape)}")
    return structural_similarity_index_measure(
        reconstruction.clamp(0, 1).float(), truth.float(), data_range=1.0, reduction="none"
    ).reshape(len(truth))


def grey_baseline(truth: Float[Tensor, "n c h w"]) -> Float[Tensor, " n"]:
    """The PSNR of the picture's own mean colour. A reconstruction below it taught nothing about the picture."""
    return psnr(truth.mean((2, 3), keepdim=True).expand_as(truth), truth)


def pair(reconstruction: Float[Tensor, "n ..."], truth: Float[Tensor, "n ..."]) -> Int64[Tensor, " n"]:
    """The one-to-one pairing with the least total squared error: `reconstruction[pair(...)]` lines up with `truth`."""
    _check(reconstruction, truth)
    if not (reconstruction.isfinite().all() and truth.isfinite().all()):
        raise ValueError("reconstruction and truth must be finite to be paired")
    costs = torch.cdist(truth.flatten(1).double(), reconstruction.flatten(1).double()).square()
    return torch.as_tensor(linear_sum_assignment(costs.cpu().numpy())[1], device=truth.device)


def distractors_nearer(
    reconstruction: Float[Tensor, "n ..."], truth: Float[Tensor, "n ..."], distractors: Float[Tensor, "m ..."]
) -> Int64[Tensor, " n"]:
    """How many other pictures each reconstruction is nearer to than to its own truth; 0 where it is re-identified.

    The others are the distractors and the truths of the other reconstructions. The distance is the squared error, so
    for features, or pictures whose brightness is taken off, hand those in. A picture as near as the truth counts as
    nearer, so that a copy of the truth among the distractors is never told apart. The share of zeros is what Yin et
    al. 2021 call image identifiability precision, there with the features of a network.
    """
    _check(reconstruction, truth)
    if not isinstance(distractors, Tensor) or distractors.shape[1:] != truth.shape[1:]:
        got = tuple(distractors.shape[1:]) if isinstance(distractors, Tensor) else type(distractors).__name__
        raise ValueError(f"distractors must have pictures of shape {tuple(truth.shape[1:])}, got {got}")
    others = torch.cat([truth, distractors]).flatten(1).double()
    if not (reconstruction.isfinite().all() and others.isfinite().all()):
        raise ValueError("reconstruction, truth and distractors must be finite to be compared")
    # not through a matrix product, which would tell a picture from its copy by rounding
    apart = torch.cdist(reconstruction.flatten(1).double(), others, compute_mode="donot_use_mm_for_euclid_dist")
    own = apart.diagonal()[:, None].clone()
    return (apart <= own).sum(1) - 1  # itself


def standardised(pictures: Float[Tensor, "n ..."]) -> Float[Tensor, "n p"]:
    """Each picture as a row of mean zero and length one: without brightness and contrast, for `distractors_nearer`.

    Any finite pixels will do. A picture of one value has nothing left, and becomes a row of zeros.
    """
    if not isinstance(pictures, Tensor) or pictures.ndim < 2:
        got = tuple(pictures.shape) if isinstance(pictures, Tensor) else type(pictures).__name__
        raise ValueError(f"pictures must be a tensor (n, ...), got {got}")
    rows = pictures.flatten(1)
    centred = rows - rows.mean(1, keepdim=True)
    lengths = centred.norm(dim=1, keepdim=True)
    # the mean of equal values is off by rounding, which must not be blown up to length one
    rounding = 8 * torch.finfo(rows.dtype).eps * rows.norm(dim=1, keepdim=True)
    return torch.where(lengths <= rounding, 0, centred / lengths)


def best_shift(reconstruction: Float[Tensor, "n c h w"], truth: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    """Each reconstruction under the cyclic shift that brings it nearest to its truth.

    Its PSNR says how much of the content is there, wherever it is. It is never below the plain one, so compare what
    is gained with what a reconstruction of another picture gains. Mirrored pictures: hand in `pixels.flip(-1)` too.
    """
    _check(reconstruction, truth)
    if truth.ndim != 4:
        raise ValueError(f"truth must be pictures (n, c, h, w), got shape {tuple(truth.shape)}")
    # the squared distance of all shifts is a constant less twice their correlation, which is a product of spectra
    spectra = torch.fft.rfft2(truth.double()) * torch.fft.rfft2(reconstruction.double()).conj()
    places = torch.fft.irfft2(spectra, truth.shape[-2:]).sum(1).flatten(1).argmax(1)
    return torch.stack(
        [
            picture.roll(divmod(place, truth.shape[-1]), (-2, -1))
            for picture, place in zip(reconstruction, places.tolist(), strict=True)
        ]
    )


def _check(reconstruction, truth) -> None:
    for argument, value in (("reconstruction", reconstruction), ("truth", truth)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{argument} must be a tensor of pictures, got {type(value).__name__}")
    if reconstruction.shape != truth.shape:
        raise ValueError(
            f"reconstruction must have the truth's shape {tuple(truth.shape)}, got {tuple(reconstruction.shape)}"
        )
