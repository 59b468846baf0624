"""What all tests share: one thread, the bundled pictures, and GPU tests skipped where there is no GPU."""

import os

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import settings

os.environ.pop("GRADINV_DATA", None)
os.environ.pop("GRADINV_RECORD", None)
matplotlib.use("agg")
torch.set_num_threads(1)
settings.register_profile("same", derandomize=True)  # --hypothesis-profile=default draws others
settings.load_profile("same")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collectstart(collector):
    """Layers that a module draws where it is imported are the same, whatever was imported before it."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seed():
    """Every test draws the same numbers, whichever tests run before it."""
    torch.manual_seed(0)


@pytest.fixture
def trained_on_brightness(tmp_path, monkeypatch):
    """Call it with a number of levels: 160 pictures whose label is their brightness, and a folder for what comes of
    training on them."""
    from gradinv import data, train, victims  # not before pytest has set up the check of shapes

    def make(levels):
        brightness = np.random.default_rng(0).integers(0, levels, 160)
        images = np.full((160, 32, 32, 3), (255 // levels * brightness)[:, None, None, None], np.uint8)
        monkeypatch.setenv("GRADINV_DATA", str(tmp_path / "data"))
        data.write_npz(tmp_path / "data/cifar10/train.npz", images, brightness, data.CIFAR10_CLASSES, "made here")
        monkeypatch.setattr(victims, "WEIGHTS", tmp_path / "weights")
        monkeypatch.setattr(train, "TRAINED_ON", 128)
        monkeypatch.setattr(train, "HELD_OUT", 32)
        return tmp_path / "weights"

    return make
