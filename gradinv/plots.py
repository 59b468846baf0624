"""The few figures that chapters share: one style, pictures upscaled with nearest neighbour, truth on the left."""

import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
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


def error_maps(reconstruction: Tensor, truth: Tensor, *, limit: float = 0.3) -> Tensor:
    """How far each pixel is off, as colour pictures (n, 3, h, w): black at no error, pale yellow at `limit` and beyond.

    The scale, matplotlib's inferno, is even to the eye and rises in brightness alone, so that it can be read without
    seeing colours. `error_bar` draws it.

    Args:
        reconstruction, truth: (n, c, h, w), compared as they are shown, cut to [0, 1].
        limit: the mean |difference| over the channels at which the scale ends, above 0.
    """
    if reconstruction.shape != truth.shape or truth.ndim != 4:
        shapes = [tuple(pixels.shape) for pixels in (reconstruction, truth)]
        raise ValueError(f"both must be pictures (n, c, h, w) of one shape, got {shapes}")
    if not limit > 0:
        raise ValueError(f"limit must be above 0, got {limit}")
    shown, meant = (pixels.detach().float().cpu().clamp(0, 1) for pixels in (reconstruction, truth))
    colours = mpl.colormaps["inferno"](((shown - meant).abs().mean(1) / limit).clamp(0, 1).numpy())
    return torch.from_numpy(colours[..., :3]).permute(0, 3, 1, 2).float()


def error_bar(figure: Figure, rows: int, *, limit: float = 0.3) -> None:
    """Put the scale of `error_maps` to the right of the last rows of a figure that `pictures` has drawn."""
    share = rows / figure.axes[0].get_subplotspec().get_gridspec().nrows
    scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, limit), "inferno")
    bar = figure.colorbar(
        scale, ax=figure.axes, extend="max", shrink=0.9 * share, anchor=(0, 0), aspect=36 * share, pad=0.02
    )
    bar.set_label("error of a pixel", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    figure.set_figwidth(figure.get_figwidth() + 0.6)


def film(frames: Tensor, labels: Sequence[str], *, columns: int = 5, zoom: int = 3) -> tuple[bytes, list[list[int]]]:
    """A film strip: frames in reading order, each pixel a square of zoom by zoom, with a line of text below each frame.

    Args:
        frames: (n, c, h, w) with 1 or 3 channels; values are clamped to [0, 1].
        labels: one a frame.
        columns: frames in a row.
        zoom: at least 1.

    Returns:
        The strip as a PNG file, and where the frames are in it: left, top, width and height of each.
    """
    if frames.ndim != 4 or frames.shape[1] not in (1, 3) or len(frames) != len(labels):
        raise ValueError(f"frames must be (n, 1 or 3, h, w) with n labels, got {tuple(frames.shape)}, {len(labels)}")
    gap, line = 8, 20
    height, width = (zoom * side for side in frames.shape[2:])
    places = [
        [gap + i % columns * (width + gap), gap + i // columns * (height + line), width, height]
        for i in range(len(frames))
    ]
    size = (gap + min(columns, len(frames)) * (width + gap), places[-1][1] + height + line)
    strip, font = Image.new("RGB", size, "white"), ImageFont.truetype(findfont("DejaVu Sans"), 13)
    for frame, label, (left, top, _, _) in zip(frames, labels, places, strict=True):
        pixels = frame.detach().float().cpu().clamp(0, 1).mul(255).round().byte().expand(3, -1, -1)
        picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        strip.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top))
        at = (left + width / 2, top + height + line / 2 - 2)
        ImageDraw.Draw(strip).text(at, label, "black", font, anchor="mm")
    file = io.BytesIO()
    strip.save(file, "PNG", optimize=True)
    return file.getvalue(), places
