"""What all tests share: one thread, the bundled pictures, and GPU tests skipped where there is no GPU."""

import os

import matplotlib
import pytest
import torch

os.environ.pop("GRADINV_DATA", None)
os.environ.pop("GRADINV_RECORD", None)
matplotlib.use("agg")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed():
    """Every test draws the same numbers, whichever tests run before it."""
    torch.manual_seed(0)
