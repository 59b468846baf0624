"""The few figures that chapters share: one style, pictures upscaled with nearest neighbour, truth on the left."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

# Okabe and Ito's colours, which stay apart for colour-blind readers, each with its own marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def use_style() -> None:
    """The book's style: opaque white figures, colours and markers that stay apart, the same fonts everywhere, and
    tables that show their cells in full."""
    pd.set_option("display.max_colwidth", None)
    mpl.rcParams.update(
        {
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "savefig.facecolor": "white",
            "savefig.dpi": 110,
            "figure.dpi": 110,
            "figure.figsize": (6.4, 3.6),
            "font.size": 10,
            "axes.titlesize": 10,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "lines.markersize": 5,
            "axes.prop_cycle": mpl.cycler(color=COLOURS, marker=MARKERS),
            "image.interpolation": "nearest",
            "figure.constrained_layout.use": True,
        }
    )


def pictures(
    rows: Mapping[str, Tensor],
    *,
    titles: Sequence[str] = (),
    notes: Mapping[str, Sequence[str]] | None = None,
    size: float = 1.1,
) -> Figure:
    """A grid of pictures: one labelled row for each entry.

    Args:
        rows: label to pictures (n, c, h, w); values are clamped to [0, 1]; grey pictures may have one channel.
        titles: one title a column.
        notes: for some rows, a line under each picture, such as its PSNR.
        size: of a picture, in inches.
    """
    if not isinstance(rows, Mapping) or not rows:
        raise ValueError(f"rows must map labels to pictures (n, c, h, w), got {type(rows).__name__}")
    for label, images in rows.items():
        shapes = {tuple(image.shape) for image in images} if len(images) else {None}
        if any(shape is None or len(shape) != 3 for shape in shapes):
            raise ValueError(f"rows[{label!r}] must be pictures (n, c, h, w), got {sorted(shapes, key=str)}")
    columns = max(len(images) for images in rows.values())
    notes = notes or {}
    height = size * len(rows) + 0.25 * bool(titles) + 0.2 * len(notes)
    figure, axes = plt.subplots(len(rows), columns, squeeze=False, figsize=(size * columns + 1.2, height))
    for (label, images), line in zip(rows.items(), axes, strict=True):
        for i, axis in enumerate(line):
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            axis.grid(False)
            if i >= len(images):
                continue
            picture = images[i].detach().float().cpu().clamp(0, 1).permute(1, 2, 0).numpy()
            axis.imshow(picture.squeeze(-1) if picture.shape[-1] == 1 else picture, cmap="gray", vmin=0, vmax=1)
            if label in notes:
                axis.set_xlabel(notes[label][i], fontsize=8, labelpad=2)
        line[0].set_ylabel(label, rotation=0, ha="right", va="center")
    for axis, title in zip(axes[0], titles, strict=False):
        axis.set_title(title, fontsize=9)
    return figure


def numbers(matrix: Tensor, side: int = 96) -> Tensor:
    """The first `side` rows and columns of a matrix as a colour picture (3, side, side): red below zero, white at
    zero, blue above. The strongest colours stand for the 99th percentile of the absolute values and beyond."""
    corner = matrix[:side, :side].detach().float().cpu()
    limit = corner.abs().flatten().quantile(0.99).clamp_min(1e-30)
    colours = mpl.colormaps["RdBu"]((0.5 + 0.5 * (corner / limit).clamp(-1, 1)).numpy())
    return torch.from_numpy(colours[..., :3]).permute(2, 0, 1)


def decibels(values: Tensor) -> list[str]:
    """PSNRs as notes under pictures."""
    return [f"{value:.1f} dB" for value in values.tolist()]
