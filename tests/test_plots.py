"""The figures that chapters share."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch

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


def test_the_style_has_a_marker_for_each_colour():
    plots.use_style()
    cycle = list(mpl.rcParams["axes.prop_cycle"])
    assert len({entry["color"] for entry in cycle}) == len({entry["marker"] for entry in cycle}) == len(cycle)
    assert mpl.rcParams["savefig.facecolor"] == "white" and mpl.rcParams["image.interpolation"] == "nearest"
