"""The generic rank of a convolution by counting, against the numerical rank of all its equations."""

import numpy as np
import pytest
import torch
from networks import KNOWN_RANKS, dense_equations
from torch import nn

from gradinv import layers, rank, victims
from gradinv.rank import generic
from gradinv.rank.generic import Convolution, generic_nullity


def dense_rank(conv, shape, seed=0):
    """Of all equations stacked, for the layer's own weights and random sensitivities."""
    operator = layers.Operator(layers.read(conv.double(), shape)[0])
    k = torch.randn(1, *operator.output_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return int(torch.linalg.matrix_rank(dense_equations(operator, k), rtol=1e-9))


def bound(conv, shape):
    """The counted bound on the rank, also where the layer is so small that it would be drawn."""
    group = Convolution.of(conv)
    met = group.places(shape[1:])
    return group.groups * generic.rank_bound(conv.in_channels // group.groups, conv.out_channels // group.groups, met)


def random_layer(rng, odd):
    """A layer of at most 300 unknowns; odd ones have dilation, groups, other paddings, and sides that differ."""
    while True:
        channels, filters, height, width = (int(rng.integers(*span)) for span in ((1, 7), (1, 9), (3, 11), (3, 11)))
        kernel, stride = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        options = {"padding": int(rng.integers(0, kernel))}
        if odd:
            kernel, stride = (tuple(int(value) for value in rng.integers(1, high, 2)) for high in (4, 3))
            groups = int(rng.choice([1, channels]))
            options = {
                "padding": tuple(int(rng.integers(0, side)) for side in kernel),
                "dilation": tuple(int(value) for value in rng.integers(1, 3, 2)),
                "groups": groups,
                "padding_mode": str(rng.choice(["zeros", "circular", "reflect", "replicate"])),
            }
            filters = groups * int(rng.integers(1, 4))
        conv = nn.Conv2d(channels, filters, kernel, stride, **options)
        if channels * height * width > 300:
            continue
        try:
            conv(torch.zeros(1, channels, height, width))
        except RuntimeError:  # the kernel is larger than the picture, or the padding is
            continue
        return conv, (channels, height, width)


@pytest.fixture(scope="module")
def layers_300():
    """Random layers with the numerical rank and the counted bound of each."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(300):
        conv, shape = random_layer(rng, odd=False)
        found.append((conv, shape, dense_rank(conv, shape), bound(conv, shape)))
    return found


def test_300_random_layers(layers_300):
    wrong = [
        (str(conv), shape)
        for conv, shape, measured, _ in layers_300
        if generic_nullity(Convolution.of(conv), shape[1:]) != torch.Size(shape).numel() - measured
    ]
    assert not wrong
    deficient = sum(measured < torch.Size(shape).numel() for _, shape, measured, _ in layers_300)
    assert 100 < deficient < 200


def test_the_bound_is_one_and_seldom_above_the_rank(layers_300):
    assert all(counted >= measured for *_, measured, counted in layers_300)
    assert sum(counted > measured for *_, measured, counted in layers_300) < 10


def test_odd_layers():
    rng = np.random.default_rng(1)
    equal = 0
    for _ in range(100):
        conv, shape = random_layer(rng, odd=True)
        measured, counted = dense_rank(conv, shape), bound(conv, shape)
        assert counted >= measured, (conv, shape)
        assert generic_nullity(Convolution.of(conv), shape[1:]) == torch.Size(shape).numel() - measured, (conv, shape)
        equal += counted == measured
    assert equal > 90


@pytest.mark.parametrize("case", KNOWN_RANKS, ids=str)
def test_known_ranks(case):
    channels, filters, kernel, stride, padding, height, width, expected = case
    conv = nn.Conv2d(channels, filters, kernel, stride, padding)
    assert bound(conv, (channels, height, width)) == expected == dense_rank(conv, (channels, height, width))


@pytest.mark.parametrize(("filters", "lost"), [(19, 382), (20, 280), (21, 180), (22, 82), (23, 0)])
def test_conv2_of_cnn6d(filters, lost):
    conv = nn.Conv2d(12, filters, 3, 2, 1, bias=False)
    assert generic_nullity(Convolution.of(conv), (17, 17)) == lost


@pytest.mark.parametrize(("width", "lost"), [(8, 3_200), (16, 4_608), (64, 0)])
def test_layer2_of_a_residual_network(width, lost):
    conv = victims.resnet(18, width).layer2[0].conv1
    assert generic_nullity(Convolution.of(conv), (32, 32)) == lost
    if width == 8:  # small enough to be measured in a moment
        assert rank.nullity(conv, (8, 32, 32)) == lost


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (nn.Conv2d(6, 8, 3, 2, 1), (16, 15)),
        (nn.Conv2d(4, 12, 3, 2, 2, dilation=2), (14, 14)),
        (nn.Conv2d(12, 12, 5, 2, 2, groups=12), (12, 11)),
        (nn.Conv2d(8, 4, 1), (11, 9)),
        (nn.Conv2d(16, 24, 2, 2, groups=4), (10, 12)),
        (nn.Conv2d(3, 5, 4, 4), (16, 20)),
        (nn.Conv2d(5, 7, (3, 1), (2, 1), (1, 0)), (12, 10)),
        (nn.Conv2d(5, 7, 3, padding="same", padding_mode="circular"), (12, 10)),
        (nn.Conv2d(3, 2, 5, 1, 4), (14, 14)),
    ],
    ids=str,
)
def test_layers_that_are_counted_agree_with_the_measured_nullity(conv, size, monkeypatch):
    monkeypatch.setattr(generic, "SMALL", 0)
    generic_nullity.cache_clear()
    counted = generic_nullity(Convolution.of(conv), size)
    generic_nullity.cache_clear()
    assert counted == rank.nullity(conv, (conv.in_channels, *size))


def test_a_large_layer():
    # the first layer of a ResNet has equations to spare; its third stage at 224 pixels has not
    assert generic_nullity(Convolution(3, 64, (7, 7), (2, 2), (3,) * 4), (224, 224)) == 0
    assert generic_nullity(Convolution(64, 128, (3, 3), (2, 2), (1,) * 4), (56, 56)) == 43_008


def test_a_layer_is_not_its_geometry():
    with pytest.raises(Exception, match="Convolution"):
        generic_nullity(nn.Conv2d(3, 4, 3), (8, 8))
