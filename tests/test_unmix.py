"""Unmixing a minibatch: every picture exactly, and what cannot be unmixed."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from gradinv import client, victims
from gradinv.attacks.unmix import unmix


def batch(n, seed=0):
    return torch.rand(n, 1, 5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normed(*sizes, dtype=torch.float64, activation=nn.ReLU):
    """A fully connected network that makes its pixels lie around zero."""
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(victims.Normalize((0.5,), (0.3,)), nn.Flatten(), *layers[:-1]).to(dtype).eval()


def error(found, truth):
    """The largest error of any picture against the nearest one found."""
    return max((found - one).abs().flatten(1).max(1).values.min().item() for one in truth)


def sent(model, pixels, **options):
    return client.gradient(model, pixels, torch.arange(len(pixels)) % 4, **options)


@pytest.mark.parametrize("n", [1, 2, 6, 10])
def test_a_batch_is_exact(n):
    pixels = batch(n)
    result = unmix(sent(normed(40, 200, 50, 4), pixels))
    assert result.status == "recovered" and len(result.pixels) == n
    assert error(result.pixels, pixels) < 1e-10
    assert result.history[-1]["certain"] == n


def test_duplicates_are_found_once():
    pixels = batch(4)[[0, 1, 2, 1]]
    update = client.gradient(normed(40, 200, 4), pixels, torch.tensor([0, 1, 2, 1]))
    result = unmix(update)
    assert result.status == "recovered" and len(result.pixels) == 3 and "holds no more" in result.why
    assert error(result.pixels, pixels) < 1e-10


def test_the_sum_of_the_losses_changes_nothing():
    pixels = batch(5)
    result = unmix(sent(normed(40, 200, 4), pixels, scale=5.0))
    assert result.status == "recovered" and error(result.pixels, pixels) < 1e-10


def test_a_deeper_layer_is_walked_back():
    pixels = batch(4)
    model = normed(40, 60, 200, 4)
    update = sent(model, pixels)
    gradient = {name: value for name, value in update.gradient.items() if name != "2.bias"}
    result = unmix(dataclasses.replace(update, gradient=gradient))
    assert error(result.pixels, pixels) < 1e-6


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh])
def test_without_a_relu_nothing_is_sparse(activation):
    result = unmix(sent(normed(40, 60, 4, activation=activation), batch(3)))
    assert result.status == "not applicable" and "ReLU" in result.why


def test_more_pictures_than_can_be_told_apart_are_said_so():
    result = unmix(sent(normed(40, 16, 4), batch(12)), rounds=2)
    assert result.status == "approximate"
