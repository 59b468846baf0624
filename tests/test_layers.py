"""A network read as its layers: what ran, on which shapes, and whether it took the layer before's output."""

import pytest
import torch
from networks import Recurrent
from torch import nn
from torch.nn import functional

from gradinv import layers, victims


class Block(nn.Module):
    """Two layers and an activation, joined as `join(self, x)` says."""

    def __init__(self, join, inplace=False):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace=inplace)
        self.join = join

    def forward(self, x):
        return self.join(self, x)


def in_place(m, x):
    y = m.a(x)
    y += x
    return m.b(y)


def in_place_zero(m, x):
    y = m.a(x)
    y.add_(0)
    return m.b(y)


# what happens between the layers, and whether the second one still follows the first
JOINS = {
    "directly": (lambda m, x: m.b(m.a(x)), True),
    "view": (lambda m, x: m.b(m.a(x).view(1, 2, 3).view(1, 6)), True),
    "flatten": (lambda m, x: m.b(m.a(x).reshape(1, 3, 2).flatten(1)), True),
    "functional relu": (lambda m, x: m.b(functional.relu(m.a(x))), False),
    "functional relu in place": (lambda m, x: m.b(functional.relu(m.a(x), inplace=True)), False),
    "residual": (lambda m, x: m.b(m.a(x) + x), False),
    "residual in place": (in_place, False),
    "any change in place": (in_place_zero, False),
    "scale": (lambda m, x: m.b(m.a(x) * 1.0), False),
    "flip": (lambda m, x: m.b(m.a(x).flip(1)), False),
    "transpose": (lambda m, x: m.b(m.a(x).view(1, 2, 3).transpose(1, 2).reshape(1, 6)), False),
    "roll": (lambda m, x: m.b(m.a(x).roll(1, 1)), False),
    "second branch": (lambda m, x: m.a(x) + m.b(x), False),
    "concatenation": (lambda m, x: m.b(torch.cat([m.a(x)[:, :3], x[:, 3:]], 1)), False),
}


@pytest.mark.parametrize("name", JOINS)
def test_follows(name):
    join, follows = JOINS[name]
    first, second = layers.read(Block(join), (6,))
    assert (first.name, second.name) == ("a", "b")
    assert first.follows
    assert second.follows == follows


@pytest.mark.parametrize("inplace", [True, False])
def test_an_activation_layer_may_work_in_place(inplace):
    read = layers.read(Block(lambda m, x: m.b(m.act(m.a(x))), inplace), (6,))
    assert [layer.name for layer in read] == ["a", "act", "b"]
    assert all(layer.follows for layer in read)


@pytest.mark.parametrize("change", [lambda x: 2 * x, lambda x: x.flip(1), lambda x: x.clone()])
def test_the_first_layer_must_take_the_picture(change):
    first, *_ = layers.read(Block(lambda m, x: m.b(m.a(change(x)))), (6,))
    assert not first.follows


def test_residual_blocks_do_not_follow():
    read = {layer.name: layer for layer in layers.read(victims.resnet(18, width=2), (3, 32, 32))}
    assert read["layer1.0.bn1"].follows and read["layer1.0.conv2"].follows
    assert not read["layer2.0.downsample.0"].follows  # it takes the block's input
    # torchvision adds the skip in place, so only the tensor's version tells that bn2's output changed
    second_use = [
        layer for layer in layers.read(victims.resnet(18, width=2), (3, 32, 32)) if layer.name == "layer1.0.relu"
    ]
    assert [layer.follows for layer in second_use] == [True, False]


def test_shapes_are_of_one_picture():
    read = layers.read(victims.lenet(1, size=28), (1, 28, 28))
    assert [
        (layer.name, layer.input_shape, layer.output_shape) for layer in read if not layer.name.endswith("tivation")
    ] == [
        *(("0", (1, 28, 28), (12, 14, 14)), ("1", (12, 14, 14), (12, 14, 14))),
        *(("2", (12, 14, 14), (12, 7, 7)), ("3", (12, 7, 7), (12, 7, 7))),
        *(("4", (12, 7, 7), (12, 7, 7)), ("5", (12, 7, 7), (12, 7, 7))),
        *(("6", (12, 7, 7), (588,)), ("7", (588,), (10,))),
    ]


def test_a_layer_that_runs_twice_is_listed_twice():
    read = layers.read(Block(lambda m, x: m.a(m.a(x))), (6,))
    assert [layer.name for layer in read] == ["a", "a"] and all(layer.follows for layer in read)


def test_a_layer_called_by_keyword():
    (layer,) = layers.read(Block(lambda m, x: m.a(input=x)), (6,))
    assert layer.input_shape == layer.output_shape == (6,) and layer.follows


def test_a_recurrent_layer_gives_its_first_output():
    cell, head = layers.read(Recurrent(), (1, 3, 4))
    assert cell.output_shape == (3, 5) and head.input_shape == (5,) and not head.follows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reading_leaves_the_model_alone(dtype):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(8, 3)).to(dtype)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    layers.read(model, (1, 4, 4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())


def test_no_layers_and_no_parameters():
    (layer,) = layers.read(nn.Flatten(), (2, 3, 4))
    assert layer.output_shape == (24,)


@pytest.mark.parametrize("shape", [(32, 32), (), (1, 3, 32, 32)])
def test_a_shape_of_another_length_is_named(shape):
    with pytest.raises(ValueError, match=r"input_shape must be \(channels, height, width\) or \(features,\), got"):
        layers.read(victims.lenet(), shape)


@pytest.mark.parametrize("shape", [(3, 40, 40), (1, 32, 32), (3072,)])
def test_a_shape_that_does_not_fit_is_named(shape):
    with pytest.raises(ValueError, match=r"input_shape .* does not fit the model"):
        layers.read(victims.lenet(), shape)


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky": nn.LeakyReLU(0.2),
    "steep leaky": nn.LeakyReLU(1.5),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "identity": nn.Identity(),
    "dropout": nn.Dropout().eval(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slope_is_autograds(name):
    activation = ACTIVATIONS[name]
    x = torch.linspace(-3, 3, 24, dtype=torch.float64, requires_grad=True)
    output = activation(x)
    (expected,) = torch.autograd.grad(output.sum(), x)
    found = layers.slope(activation, output.detach())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert found.dtype == torch.float64


def test_the_list_of_activations_is_what_slope_knows():
    for kind in layers.ACTIVATIONS:
        assert layers.slope(kind(), torch.rand(3)).shape == (3,)
    with pytest.raises(TypeError, match="the slope of GELU cannot be read off its output"):
        layers.slope(nn.GELU(), torch.rand(3))
