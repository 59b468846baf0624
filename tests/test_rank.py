"""Rank analysis: the papers' integer tables, and the nullity against a dense numerical rank."""

import pytest
import torch
from networks import KNOWN_RANKS, dense_equations
from torch import nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from gradinv import layers, rank, victims
from gradinv.rank import numerical


def rows(model, shape):
    return [
        (layer.x, layer.weights, layer.z, layer.ra, layer.ra_virtual)
        for layer in rank.analyse(model, shape).layers
        if layer.weights
    ]


# x, weights, z, RA and RA with virtual constraints of each layer
CNN6 = [
    (3072, 576, 3468, -972, -972),
    (3468, 3888, 2916, -3336, -3732),
    (2916, 11664, 2916, -11664, -12060),
    (2916, 11664, 2916, -11664, -12060),
    (2916, 20736, 1600, -19420, -19816),
    (1600, 73728, 3200, -75328, -75724),
    (3200, 3200, 1, -1, -1997),
]
CNN6D_CHANGED = [(3468, 2160, 1620, -312, -708), (1620, 6480, 2916, -7776)]
LENET = [
    (784, 300, 2352, -1868, -1868),
    (2352, 3600, 588, -1836, -3404),
    (588, 3600, 588, -3600, -5168),
    (588, 588, 1, -1, -1569),
]


def test_cnn6():
    assert rows(victims.cnn6(), (3, 32, 32)) == CNN6
    assert rank.analyse(victims.cnn6(), (3, 32, 32)).index == -1


def test_cnn6d():
    found = rows(victims.cnn6d(), (3, 32, 32))
    assert found[0] == CNN6[0] and found[1] == CNN6D_CHANGED[0] and found[2][:4] == CNN6D_CHANGED[1]
    assert [row[:4] for row in found[3:]] == [row[:4] for row in CNN6[3:]]


@pytest.mark.parametrize("activation", ["sigmoid", "leaky_relu"])
def test_lenet_of_rgap(activation):
    layers = [nn.Conv2d(inputs, 12, 5, stride, 2, bias=False) for inputs, stride in ((1, 2), (12, 2), (12, 1))]
    joined = [module for layer in layers for module in (layer, victims._activation(activation))]
    model = nn.Sequential(*joined, nn.Flatten(), nn.Linear(588, 1, bias=False))
    assert rows(model, (1, 28, 28)) == LENET
    assert rows(victims.lenet(1, 1, 28, activation), (1, 28, 28)) == LENET  # biases are not counted


def test_fcn3():
    assert [row[3] for row in rows(victims.fcn3(), (1, 28, 28))] == [-784_216, -99_100, -1]


# x, last weights, shortcut, f, RA with skip, RA without; CIFAR stem, width 64
BLOCKS = {
    "layer1.0": (65536, 36864, 0, 65536, -36864, -36864),
    "layer1.1": (65536, 36864, 0, 65536, -36864, -36864),
    "layer2.0": (65536, 147456, 8192, 32768, -122880, -40960),
    "layer2.1": (32768, 147456, 0, 32768, -147456, -147456),
    "layer3.0": (32768, 589824, 32768, 16384, -606208, -278528),
    "layer3.1": (16384, 589824, 0, 16384, -589824, -589824),
    "layer4.0": (16384, 2359296, 131072, 8192, -2482176, -1171456),
    "layer4.1": (8192, 2359296, 0, 8192, -2359296, -2359296),
}


@pytest.fixture(scope="module")
def resnet18():
    return rank.analyse(victims.resnet(18), (3, 32, 32))


def test_resnet18_blocks(resnet18):
    found = {
        block.name: (block.x, block.weights, block.shortcut, block.f, block.with_skip, block.without_skip)
        for block in resnet18.blocks
    }
    assert found == BLOCKS
    assert {block.kind for block in resnet18.blocks} == {"sum"}
    assert resnet18.blocks[2].layers == ("layer2.0.conv1", "layer2.0.conv2", "layer2.0.downsample.0")


def test_resnet18_outside_of_blocks(resnet18):
    layers = {layer.name: layer for layer in resnet18.layers}
    assert (layers["conv1"].x, layers["conv1"].weights, layers["conv1"].z) == (3072, 1728, 65536)
    assert layers["conv1"].ra == -64192 and layers["fc"].ra == -4618
    assert layers["layer1.0.conv1"].virtual == layers["layer1.0.conv1"].budget == 62464
    assert resnet18.index == -4618  # the last layer's


@pytest.mark.parametrize(
    ("options", "size", "without"),
    [
        ({}, 32, -40960),
        ({"stem": "imagenet"}, 32, -71680),
        ({"width": 16}, 32, 3584),
        ({"stem": "imagenet"}, 224, 26624),
    ],
)
def test_cutting_layer2_0(options, size, without):
    report = rank.analyse(victims.resnet(18, cut=("layer2.0",), **options), (3, size, size))
    assert "layer2.0" not in [block.name for block in report.blocks]  # its layers count by themselves now
    assert max(layer.ra for layer in report.layers if layer.name.startswith("layer2.0.")) == without
    assert report.index == max(without, report.layers[-1].ra)
    uncut = rank.analyse(victims.resnet(18, **options), (3, size, size))
    assert next(block for block in uncut.blocks if block.name == "layer2.0").without_skip == without


def test_virtual_constraints_before_the_cut():
    layers = {layer.name: layer for layer in rank.analyse(victims.resnet(18, width=16), (3, 32, 32)).layers}
    first = layers["layer1.0.conv1"]
    assert first.virtual == first.budget == 13312
    assert layers["layer2.0.conv1"].ra == 3584 and layers["layer2.0.conv1"].ra_virtual == -9728


def test_pooling_uses_the_budget_up_and_leaves_the_sum():
    report = rank.analyse(victims.resnet(18, stem="imagenet"), (3, 224, 224))
    layers = {layer.name: layer for layer in report.layers}
    pool, after = layers["maxpool"], layers["layer1.0.conv1"]
    assert pool.weights == 0 and pool.virtual == 652288
    assert after.virtual == 652288 and after.budget == 50176


def test_tables_hold_every_row(resnet18):
    table = resnet18.table()
    assert list(table["name"]) == [layer.name for layer in resnet18.layers]
    assert list(table["ra"]) == [layer.ra for layer in resnet18.layers]
    blocks = resnet18.block_table().set_index("name")
    assert blocks.loc["layer2.0", "without_skip"] == -40960 and blocks.loc["layer2.0", "with_skip"] == -122880


def test_the_plot_has_a_bar_a_layer(resnet18):
    figure = resnet18.plot()
    assert len(figure.axes[0].patches) == sum(layer.weights > 0 for layer in resnet18.layers)
    assert {patch.get_width() for patch in figure.axes[0].patches} == {
        float(row.ra) for row in resnet18.layers if row.weights
    }


def test_activations_and_batch_norm_are_no_rows():
    kinds = {layer.kind for layer in rank.analyse(victims.convnet(4), (3, 32, 32)).layers}
    assert kinds == {"Conv2d", "MaxPool2d", "Linear"}


# --- what cannot be counted ---


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.layer(self.layer(x)))


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (victims.lenet(), (3, 40, 40), r"input_shape \(3, 40, 40\) does not fit the model"),
        (victims.lenet(), (32, 32), r"input_shape must be \(channels, height, width\)"),
        (
            nn.Sequential(nn.Flatten(), nn.ReLU()),
            (3, 4, 4),
            "model must have a convolution or a linear layer to count, got Sequential",
        ),
        (nn.Flatten(), (3, 4, 4), "model must have a convolution or a linear layer to count, got Flatten"),
        (
            nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.Flatten()),
            (1, 4, 4),
            r"got Sequential; not counted: 0 \(ConvTranspose2d\): it has weights",
        ),
        (victims.lenet(), (3, 0, 4), "input_shape must be"),
    ],
    ids=["shape", "two axes", "no weights", "no parameters", "transposed", "empty"],
)
def test_what_cannot_be_counted_is_named(model, shape, message):
    with pytest.raises(ValueError, match=message):
        rank.analyse(model, shape)


# --- the exact nullity ---


def dense_nullity(conv, shape, seed=0):
    """By the numerical rank of all equations stacked, built one pixel at a time."""
    generator = torch.Generator().manual_seed(seed)
    weight = conv.weight.detach().double()
    geometry = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    size = torch.Size(shape).numel()
    pixels = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    outputs = functional.conv2d(pixels, weight, **geometry)
    sensitivity = torch.randn(1, *outputs.shape[1:], generator=generator, dtype=torch.float64)
    gradients = [conv2d_weight(pixel[None], weight.shape, sensitivity, **geometry).flatten() for pixel in pixels]
    equations = torch.cat([outputs.flatten(1), torch.stack(gradients)], 1)
    return size - int(torch.linalg.matrix_rank(equations, rtol=1e-10))


@pytest.mark.parametrize("case", KNOWN_RANKS, ids=str)
def test_known_ranks(case):
    channels, filters, kernel, stride, padding, height, width, expected = case
    conv = nn.Conv2d(channels, filters, kernel, stride, padding)
    lost = rank.nullity(conv, (channels, height, width))
    assert channels * height * width - lost == expected
    assert dense_nullity(conv, (channels, height, width)) == lost


@pytest.mark.parametrize(("filters", "lost"), [(20, 280), (21, 180), (22, 82), (23, 0)])
def test_cnn6d_loses_280_dimensions(filters, lost):
    assert rank.nullity(nn.Conv2d(12, filters, 3, 2, 1, bias=False), (12, 17, 17)) == lost


def test_cnn6d_as_it_is_built():
    assert rank.nullity(victims.cnn6d()[2], (12, 17, 17)) == 280
    assert rank.nullity(victims.cnn6()[2], (12, 17, 17)) == 0


def random_layer(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    channels, height, width = draw(1, 3), draw(4, 8), draw(4, 8)
    kernel, stride = (draw(1, 3), draw(1, 3)), (draw(1, 3), draw(1, 3))
    padding = (draw(0, kernel[0] - 1), draw(0, kernel[1] - 1))
    return nn.Conv2d(channels, draw(1, 6), kernel, stride, padding), (channels, height, width)


LAYERS = [random_layer(seed) for seed in range(40)]


@pytest.mark.parametrize(("conv", "shape"), LAYERS, ids=range(len(LAYERS)))
def test_nullity_is_the_dense_one(conv, shape):
    assert rank.nullity(conv, shape, seed=1) == dense_nullity(conv, shape, seed=2)


def test_the_random_layers_are_of_both_kinds():
    lost = [dense_nullity(*layer) for layer in LAYERS]
    assert 8 < sum(count > 0 for count in lost) < 32


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 7, 5)),
        (nn.Conv2d(2, 3, 2, dilation=2), (2, 6, 7)),
        (nn.Conv2d(1, 1, 1), (1, 3, 3)),
        (nn.Conv2d(3, 2, (4, 1)), (3, 4, 5)),
        (nn.Conv2d(2, 2, 1, stride=3), (2, 5, 5)),
    ],
    ids=["stride, padding and kernel differ", "dilation", "one number", "as high as the picture", "pixels not seen"],
)
def test_nullity_of_odd_layers(conv, shape):
    assert rank.nullity(conv, shape) == dense_nullity(conv, shape)


def test_nullity_of_weights_that_are_zero():
    conv = nn.Conv2d(3, 1, 2, stride=2, bias=False)
    nn.init.zeros_(conv.weight)
    assert rank.nullity(conv, (3, 4, 4)) == dense_nullity(conv, (3, 4, 4)) == 3 * (16 - 4)


def test_nullity_of_a_large_layer_is_none_and_quick():
    assert rank.nullity(nn.Conv2d(3, 64, 7, 2, 3), (3, 224, 224)) is None


def test_nullity_names_a_shape_that_does_not_fit():
    with pytest.raises(ValueError, match=r"input_shape must be \(3, height, width\), got \(4, 8, 8\)"):
        rank.nullity(nn.Conv2d(3, 4, 3), (4, 8, 8))


# --- with the sensitivities of a real gradient, groups, pooling and outputs that are not known ---


# modules that make up one layer, and the shape of its input
CASES = {
    "one convolution": ([nn.Conv2d(2, 3, 2, 2)], (2, 6, 7)),
    "many filters": ([nn.Conv2d(2, 9, 3, padding=1)], (2, 5, 6)),
    "groups": ([nn.Conv2d(4, 4, 3, 2, 1, groups=2)], (4, 6, 5)),
    "a filter a channel": ([nn.Conv2d(3, 3, 3, 2, 1, groups=3)], (3, 6, 7)),
    "two filters a channel": ([nn.Conv2d(3, 6, 2, groups=3)], (3, 5, 5)),
    "pooling": ([nn.Conv2d(2, 6, 3, padding=1), nn.AvgPool2d(2)], (2, 6, 6)),
    "overlapping pooling": ([nn.Conv2d(2, 6, 3), nn.AvgPool2d(2, 1, 1)], (2, 6, 5)),
    "adaptive pooling": ([nn.Conv2d(1, 12, 3, padding=1), nn.AdaptiveAvgPool2d((3, 2))], (1, 6, 5)),
    "groups and pooling": ([nn.Conv2d(4, 8, 2, groups=2), nn.AvgPool2d(2)], (4, 5, 5)),
    "pooling alone": ([nn.AvgPool2d(2)], (2, 4, 6)),
    "overlapping pooling alone": ([nn.AvgPool2d(2, 1, 1)], (2, 4, 4)),
    "circular padding": ([nn.Conv2d(2, 3, 3, 2, 1, padding_mode="circular")], (2, 6, 5)),
    "the same size": ([nn.Conv2d(2, 2, (3, 5), padding="same")], (2, 5, 5)),
    "dilation": ([nn.Conv2d(2, 3, 2, dilation=2)], (2, 6, 6)),
    "fully connected": ([nn.Linear(9, 5)], (9,)),
}


def layer_of(name):
    modules, shape = CASES[name]
    return layers.Operator(*layers.read(nn.Sequential(*modules), shape))


def real_sensitivity(operator, kind):
    """What a convolution sees in a network: with dead units, or one pattern for each filter."""
    shape = (1, *operator.output_shape)
    k = torch.randn(shape, dtype=torch.float64)
    if kind == "dead units":
        return k * (torch.rand(shape) < 0.5)
    if kind == "dead filters":
        return k * (torch.arange(shape[1]) > 0).view(-1, *[1] * (len(shape) - 2))
    if kind == "tiny":
        return 1e-14 * k
    if kind == "equal":  # behind a global mean: K has the rank of one filter's
        return torch.ones_like(k) * torch.randn(1, shape[1], *[1] * (len(shape) - 2), dtype=torch.float64)
    return k


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
@pytest.mark.parametrize("kind", ["plain", "dead units", "dead filters", "tiny", "equal", "missing"])
@pytest.mark.parametrize("name", CASES)
def test_lost_dimensions_are_those_of_the_dense_matrix(name, kind, share):
    operator = layer_of(name)
    if kind != "missing" and operator.weight is None:
        pytest.skip("a pooling has no weights")
    sensitivity = None if kind == "missing" else real_sensitivity(operator, kind)
    known = torch.rand(1, *operator.output_shape) < share
    matrix = dense_equations(operator, sensitivity, known)
    unknowns = matrix.shape[1]
    expected = unknowns - int(torch.linalg.matrix_rank(matrix, rtol=1e-9))
    assert rank.lost(operator, sensitivity, known) == expected
    basis = rank.lost_directions(operator, sensitivity, known)
    assert basis.shape == (expected, unknowns)
    torch.testing.assert_close(basis @ basis.T, torch.eye(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    if expected:
        assert (matrix @ basis.T).norm() < 1e-4 * matrix.norm()


def test_the_cases_lose_something_and_nothing():
    lost = [rank.lost(layer_of(name), None) for name in CASES]
    assert 3 < sum(count == 0 for count in lost) < len(lost) - 3


def test_all_outputs_are_known_by_default():
    operator = layer_of("groups")
    k = real_sensitivity(operator, "plain")
    known = torch.ones(1, *operator.output_shape, dtype=torch.bool)
    assert rank.lost(operator, k) == rank.lost(operator, k, known)
    assert torch.equal(rank.lost_directions(operator, k), rank.lost_directions(operator, k, known))


def test_lost_directions_of_cnn6d_change_nothing():
    conv = victims.cnn6d()[2]
    operator = layers.Operator(layers.read(conv, (12, 17, 17))[0])
    k = torch.randn(1, *operator.output_shape, dtype=torch.float64)
    basis = rank.lost_directions(operator, k)
    assert basis.shape == (280, 3468)
    directions = basis.view(280, 12, 17, 17)
    assert operator.apply(directions).norm() < 1e-6 * operator.weight.norm()
    # the sum over all directions, weighted at random, is as good as each
    mixed = (torch.randn(280, dtype=torch.float64) @ basis).view(1, 12, 17, 17)
    assert operator.weight_gradient(mixed, k).norm() < 1e-6 * k.norm() * mixed.norm()


def test_a_layer_that_is_too_large_has_no_count(monkeypatch):
    operator = layer_of("many filters")
    assert rank.lost(operator, None) == 0
    monkeypatch.setattr(numerical, "LARGEST", 29)
    assert rank.lost(operator, None) is None
