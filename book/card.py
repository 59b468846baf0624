"""Draw `book/static/card.png`, which social media show beside a link to the book: `python book/card.py`.

The pictures are those of the front page, from the outputs of its chapter.
"""

import io
import pathlib
import sys

import matplotlib
import matplotlib.pyplot as plt
from PIL import Image

BOOK = pathlib.Path(__file__).parent
sys.path.insert(0, str(BOOK / "_ext"))

from notebook_figure import glued_png  # noqa: E402

SIZE = (1200, 630)  # pixels
WORDS = "What does a gradient give away\nabout the picture\nit was computed from?"
COLOURS = 128  # a palette keeps the file small, and pictures of 32 x 32 pixels lose nothing one would see


def draw(target: pathlib.Path = BOOK / "static/card.png") -> None:
    matplotlib.use("agg")
    picture = plt.imread(io.BytesIO(glued_png(BOOK.parent / "notebooks/proposition_3_1.ipynb", "front_figure")))
    figure = plt.figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, facecolor="white")
    figure.text(0.05, 0.68, "Gradient Inversion,\nReproduced", fontsize=34, weight="bold", va="center", linespacing=1.3)
    figure.text(0.05, 0.36, WORDS, fontsize=23, va="center", linespacing=1.4)
    axes = figure.add_axes((0.52, 0.04, 0.46, 0.92))
    axes.imshow(picture, interpolation="lanczos")
    axes.axis("off")
    drawn = io.BytesIO()
    figure.savefig(drawn)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)


if __name__ == "__main__":
    draw()
