"""H-GAP: of the pictures that R-GAP and DLG find, the smoother one (Zhu & Blaschko 2021, section 5)."""

import time
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from gradinv.attacks.matching import dlg
from gradinv.attacks.reconstruction import Reconstruction
from gradinv.attacks.recursive import r_gap
from gradinv.client import Update, expect_update


def h_gap(update: Update, **options) -> Reconstruction:
    """The smoother of the pictures of `r_gap` and `dlg`, by `roughness`.

    Args:
        update: of one picture (c, h, w). For a batch, or a network that `r_gap` does not cover, it is `dlg` alone.
        options: of `dlg`. A label that `r_gap` finds is handed to it.

    Returns:
        what the chosen attack gave, with `why` naming it, the other picture first among the alternatives, and the
        seconds of both.

    Raises ValueError for an input that is not a picture.
    """
    expect_update(update)
    if len(update.input_shape) != 3:
        raise ValueError(f"h_gap needs pictures (channels, height, width), got input_shape={update.input_shape}")
    started = time.perf_counter()
    recursive = r_gap(update)
    if recursive.labels is not None and update.labels is None and update.batch_size == 1:
        update = replace(update, labels=recursive.labels)
    searched = dlg(update, **options)
    seconds = time.perf_counter() - started
    if recursive.pixels is None or update.batch_size > 1:
        why = f"DLG alone, since R-GAP has no picture of its own ({recursive.why}): {searched.why}"
        return replace(searched, why=why, seconds=seconds)
    if searched.pixels is None:
        return replace(recursive, why=f"R-GAP alone, since DLG has no picture: {recursive.why}", seconds=seconds)
    smooth, rough = recursive, searched
    if roughness(searched.pixels).item() < roughness(recursive.pixels).item():
        smooth, rough = searched, recursive
    why = f"{'DLG' if smooth is searched else 'R-GAP'} is the smoother: {smooth.why}"
    return replace(smooth, why=why, seconds=seconds, alternatives=(rough.pixels, *smooth.alternatives))


def roughness(pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, " n"]:
    """How far each picture is from its own 3 x 3 mean, as a Euclidean norm. Border means leave out what is outside."""
    mean = functional.avg_pool2d(pixels, 3, stride=1, padding=1, count_include_pad=False)
    return (pixels - mean).flatten(1).norm(dim=1)
