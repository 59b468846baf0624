"""The figures that chapters share."""

import io

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image

from gradinv import plots


@pytest.fixture(autouse=True)
def close():
    with mpl.rc_context():
        yield
    plt.close("all")


def test_a_grid_of_pictures():
    rows = {"truth": torch.rand(3, 3, 8, 6), "found": torch.rand(2, 1, 8, 6)}
    figure = plots.pictures(rows, titles=["a", "b", "c"], notes={"found": ["1 dB", "2 dB"]})
    grid = [figure.axes[:3], figure.axes[3:]]
    assert [[len(axis.images) for axis in line] for line in grid] == [[1, 1, 1], [1, 1, 0]]
    assert [line[0].get_ylabel() for line in grid] == ["truth", "found"]
    assert [axis.get_title() for axis in grid[0]] == ["a", "b", "c"]
    assert [axis.get_xlabel() for axis in grid[1]] == ["1 dB", "2 dB", ""]
    assert grid[0][0].images[0].get_array().shape == (8, 6, 3)
    assert grid[1][0].images[0].get_array().shape == (8, 6)


def test_pictures_are_clamped_and_share_one_scale():
    figure = plots.pictures({"one": torch.tensor([-5.0, 0.25, 9.0, 0.5]).reshape(1, 1, 2, 2).requires_grad_(True)})
    (image,) = figure.axes[0].images
    assert image.get_array().tolist() == [[0, 0.25], [1, 0.5]]
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)


def test_decibels():
    assert plots.decibels(torch.tensor([3.14159, float("inf")])) == ["3.1 dB", "inf dB"]


def test_errors_share_one_scale_of_rising_brightness():
    truth = torch.zeros(1, 3, 1, 5)
    found = torch.tensor([0, 0.075, 0.15, 0.3, 7]).expand(1, 3, 1, 5)
    maps = plots.error_maps(found, truth, limit=0.3)
    assert maps.shape == (1, 3, 1, 5) and maps.min() >= 0 and maps.max() <= 1
    bright = (torch.tensor([0.2126, 0.7152, 0.0722]).view(3, 1, 1) * maps[0]).sum(0)[0]
    assert bright[0] < 0.01 and (bright[:4].diff() > 0.05).all() and bright[3] == bright[4] > 0.9
    assert torch.equal(maps, plots.error_maps(truth, found))  # |difference|, and 0.3 is the default
    one_channel = torch.zeros(1, 3, 1, 5)
    one_channel[:, 0] = 0.45
    mean = plots.error_maps(one_channel, truth)[0, :, 0, 0]
    assert torch.allclose(mean, maps[0, :, 0, 2], atol=0.02)  # over channels; a rounding may reach the next colour


@pytest.mark.parametrize("found, limit", [(torch.rand(2, 3, 4, 4), 0.3), (torch.rand(1, 3, 4, 4), 0.0)])
def test_errors_need_pictures_of_one_shape_and_a_limit(found, limit):
    with pytest.raises(ValueError, match="must be"):
        plots.error_maps(found, torch.rand(1, 3, 4, 4), limit=limit)


def test_the_scale_of_errors_is_drawn():
    figure = plots.pictures({"truth": torch.rand(2, 3, 4, 4), "error": torch.rand(2, 3, 4, 4)})
    plots.error_bar(figure, rows=1, limit=0.25)
    assert len(figure.axes) == 5 and figure.axes[-1].get_ylim() == (0, 0.25)


def test_a_film_keeps_every_pixel():
    frames = torch.linspace(0, 1, 4 * 3 * 2 * 5).view(4, 3, 2, 5)
    file, places = plots.film(frames, ["private", *"123"], columns=3, zoom=30)
    strip = Image.open(io.BytesIO(file))
    assert strip.format == "PNG" and [place[2:] for place in places] == [[150, 60]] * 4
    lefts, tops = torch.tensor(places).T[:2].tolist()
    assert lefts[0] < lefts[1] < lefts[2] and lefts[3] == lefts[0] and tops[0] == tops[1] == tops[2] < tops[3]
    for frame, (left, top, width, height) in zip(frames, places, strict=True):
        small = strip.crop((left, top, left + width, top + height)).resize((5, 2), Image.Resampling.NEAREST)
        seen = torch.tensor(list(small.tobytes())).view(2, 5, 3).permute(2, 0, 1)
        assert torch.equal(seen, frame.mul(255).round().long())
        under = strip.crop((left, top + height, left + width, top + height + 20)).convert("L")
        assert under.getextrema()[0] < 100, "no label below the frame"
    with pytest.raises(ValueError, match="labels"):
        plots.film(frames, ["one"])


def test_the_style_has_a_marker_for_each_colour():
    plots.use_style()
    cycle = list(mpl.rcParams["axes.prop_cycle"])
    assert len({entry["color"] for entry in cycle}) == len({entry["marker"] for entry in cycle}) == len(cycle)
    assert mpl.rcParams["savefig.facecolor"] == "white" and mpl.rcParams["image.interpolation"] == "nearest"
