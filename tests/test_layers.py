"""A network read as its layers: what ran, on which shapes, and whether it took the layer before's output."""

import copy

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
    "elu": nn.ELU(),
    "small elu": nn.ELU(0.3),
    "softplus": nn.Softplus(),
    "sharp softplus": nn.Softplus(5.0, threshold=8.0),
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


# --- what came in, from what came out ---


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "relu"])
def test_inverse_gives_the_input(name):
    x = torch.linspace(-3, 3, 24, dtype=torch.float64)
    found = layers.inverse(ACTIVATIONS[name], ACTIVATIONS[name](x))
    torch.testing.assert_close(found, x, rtol=1e-9, atol=1e-10)
    assert found.dtype == torch.float64


def test_a_relu_gives_its_output_back():
    output = torch.tensor([0.0, 2.0])
    assert torch.equal(layers.inverse(nn.ReLU(), output), output)


def test_what_has_no_inverse_is_named():
    with pytest.raises(TypeError, match="GELU has no inverse"):
        layers.inverse(nn.GELU(), torch.rand(3))


@pytest.mark.parametrize("margin", [1e-3, 1e-6])
@pytest.mark.parametrize("name", ["sigmoid", "tanh", "elu", "small elu", "softplus", "sharp softplus"])
def test_an_inverse_goes_on_along_a_tangent(name, margin):
    """Defined, rising and without a jump outside of the range."""
    activation = ACTIVATIONS[name]
    y = torch.linspace(-2.5, 2.5, 5001, dtype=torch.float64).requires_grad_()
    x = layers.inverse(activation, y, margin)
    (rise,) = torch.autograd.grad(x.sum(), y)
    assert x.isfinite().all() and rise.isfinite().all() and (x.diff() > 0).all() and (rise > 0).all()
    within = activation(x.detach())
    inside = (within - y.detach()).abs() < 1e-9  # elsewhere the range ends
    assert inside.any() and not inside.all()
    outside = rise.detach()[~inside & (y.detach() < 0)]
    assert outside.std() < 1e-6 * outside.mean()  # a straight line


def norms(kind=nn.BatchNorm2d, **options):
    norm = kind(3, **options).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.2, 2)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


SCALES = {
    "batch norm": (norms, (2, 3, 4, 5)),
    "batch norm without factors": (lambda: norms(affine=False), (2, 3, 4, 5)),
    "batch norm with another epsilon": (lambda: norms(eps=0.3), (2, 3, 1, 2)),
    "batch norm of vectors": (lambda: norms(nn.BatchNorm1d), (2, 3)),
    "normalise": (lambda: victims.Normalize(victims.CIFAR10_MEAN, victims.CIFAR10_STD), (2, 3, 4, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCALES)
def test_layers_that_scale_channels(name, dtype):
    make, shape = SCALES[name]
    module, x = make(), torch.rand(shape, dtype=dtype, requires_grad=True)
    module = module.to(dtype)
    output = module(x)
    (expected,) = torch.autograd.grad(output.sum(), x)
    found = layers.slope(module, output.detach())
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(layers.inverse(module, output.detach()), x.detach(), **close)
    assert found.dtype == dtype and not found.requires_grad


# --- a linear layer as an operator ---


def drawn(seed):
    """A random layer, what is pooled after it or None, and the shape of its input."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    def pair(low, high):
        return draw(low, high), draw(low, high)

    if draw(0, 7) == 0:
        features = draw(1, 9)
        return nn.Linear(features, draw(1, 9), bias=draw(0, 1) == 1), None, (features,)
    groups, height, width = draw(1, 3), draw(5, 9), draw(5, 9)
    channels, filters = groups * draw(1, 2), groups * draw(1, 3)
    kernel, dilation, stride = pair(1, 3), pair(1, 2), pair(1, 3)
    padding, mode = [(draw(0, 2), "zeros"), (pair(0, 2), "zeros"), ("same", "zeros"), ("valid", "zeros")][draw(0, 3)]
    if padding == "same":
        stride = 1
    elif padding != "valid" and draw(0, 1):
        mode = ("circular", "reflect", "replicate")[draw(0, 2)]
    options = {"dilation": dilation, "groups": groups, "bias": draw(0, 1) == 1, "padding_mode": mode}
    conv = nn.Conv2d(channels, filters, kernel, stride, padding, **options)
    pools = [None, None, nn.AvgPool2d(2, pair(1, 2), 1), nn.AvgPool2d((1, 2), ceil_mode=True), nn.AdaptiveAvgPool2d(2)]
    size = conv(torch.zeros(1, channels, height, width)).shape[2:]
    pool = pools[draw(0, 4)] if min(size) > 1 else None
    return conv, pool, (channels, height, width)


def operator_of(*modules, shape):
    return layers.Operator(*layers.read(nn.Sequential(*modules), shape))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("seed", range(200))
def test_a_layers_equations_are_autograds(seed):
    torch.manual_seed(seed)
    layer, pool, shape = drawn(seed)
    modules = [module.double() for module in (layer, pool) if module]
    operator = operator_of(*modules, shape=shape)
    x = torch.rand(1, *shape, dtype=torch.float64)
    outputs = nn.Sequential(*modules)(x)
    assert operator.input_shape == shape and operator.output_shape == tuple(outputs.shape[1:])
    torch.testing.assert_close(operator.apply(x) + operator.bias, outputs.detach(), rtol=1e-12, atol=1e-12)
    k = torch.randn_like(outputs).detach()
    (expected,) = torch.autograd.grad((outputs * k).sum(), layer.weight)
    torch.testing.assert_close(operator.weight_gradient(x, k), expected, rtol=1e-11, atol=1e-11)
    rows, groups = operator.gradient_rows(k), operator.groups  # (filters, kernel, pixels) for any one channel
    planes = x.view(groups, shape[0] // groups, -1)[torch.arange(len(rows)) * groups // len(rows)]
    by_rows = torch.einsum("fkp,fcp->fck", rows, planes)
    torch.testing.assert_close(by_rows.reshape(expected.shape), expected, rtol=1e-11, atol=1e-11)
    several = torch.randn(3, *operator.output_shape, dtype=torch.float64)
    y = torch.randn(3, *shape, dtype=torch.float64)
    inner = (operator.apply(y) * several).sum()
    torch.testing.assert_close((operator.adjoint(several) * y).sum(), inner, rtol=1e-10, atol=1e-10)
    g = torch.randn_like(expected)  # K^T, by the gradient in place of the weights
    inner = (operator.weight_gradient(y[:1], k) * g).sum()
    torch.testing.assert_close((operator.adjoint(k, g) * y[:1]).sum(), inner, rtol=1e-10, atol=1e-10)


def test_the_random_layers_are_of_every_kind():
    found = [drawn(seed) for seed in range(200)]
    convolutions = [layer for layer, *_ in found if isinstance(layer, nn.Conv2d)]
    assert 10 < len(found) - len(convolutions) < 50
    assert {layer.padding_mode for layer in convolutions} == {"zeros", "circular", "reflect", "replicate"}
    assert {type(layer.padding) for layer in convolutions} == {str, tuple}
    assert {layer.groups for layer in convolutions} == {1, 2, 3}
    assert {type(pool) for _, pool, _ in found} == {type(None), nn.AvgPool2d, nn.AdaptiveAvgPool2d}


POOLINGS = [nn.AvgPool2d(2), nn.AvgPool2d(3, 1, 1), nn.AvgPool2d((2, 3), (1, 2)), nn.AdaptiveAvgPool2d((3, 2))]


@pytest.mark.parametrize("pool", POOLINGS, ids=str)
def test_a_pooling_by_itself(pool):
    operator = operator_of(pool, shape=(2, 7, 6))
    x = torch.randn(3, 2, 7, 6, dtype=torch.float64)
    assert operator.weight is None and not operator.bias.any()
    outputs = operator.apply(x)
    torch.testing.assert_close(outputs, pool(x))
    z = torch.randn_like(outputs)
    torch.testing.assert_close((operator.adjoint(z) * x).sum(), (outputs * z).sum(), rtol=1e-10, atol=1e-10)


def test_the_operator_is_double_and_leaves_the_layer_alone():
    conv = nn.Conv2d(2, 3, 3)
    before = copy.deepcopy(conv.state_dict())
    operator = operator_of(conv, shape=(2, 5, 5))
    assert operator.apply(torch.rand(1, 2, 5, 5, dtype=torch.float64)).dtype == torch.float64
    assert not operator.weight.requires_grad and operator.weight_name == "0.weight"
    assert all(torch.equal(value, before[name]) for name, value in conv.state_dict().items())


def test_a_model_that_is_one_layer():
    operator = layers.Operator(layers.read(nn.Linear(4, 2), (4,))[0])
    assert (operator.name, operator.weight_name) == ("", "weight")


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_balance(size):
    """A column of the gradient's equations becomes about ten times as long as one of W."""
    conv = nn.Conv2d(3, 8, 3, padding=1)
    operator = operator_of(conv, shape=(3, 8, 8))
    k = size * torch.randn(1, *operator.output_shape, dtype=torch.float64)
    factor = layers.balance(operator, k)
    middle = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    middle[0, 1, 4, 4] = 1.0
    ratio = factor * operator.weight_gradient(middle, k).norm() / operator.apply(middle).norm()
    assert 1 < ratio.item() < 10  # a corner of the kernel sees a part of k only


# --- elementwise layers, undone together ---


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "relu"])
def test_undo_goes_back_through_several_layers(name):
    module = nn.Sequential(norms(), ACTIVATIONS[name], nn.Flatten(), norms(lambda n: nn.BatchNorm1d(30)), nn.Tanh())
    module = module.double().eval()
    z = torch.rand(1, 3, 5, 2, dtype=torch.float64, requires_grad=True)
    after = tuple(layers.read(module, (3, 5, 2)))
    outputs = module(z)
    k = torch.randn_like(outputs)
    (expected,) = torch.autograd.grad((outputs * k).sum(), z)
    x, sensitivity, known = layers.undo(after, outputs.detach(), k)
    torch.testing.assert_close(x, z.detach(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(sensitivity, expected, rtol=1e-8, atol=1e-9)
    assert known.all() and known.dtype == torch.bool and known.shape == z.shape


def test_undo_says_what_a_relu_cut_off():
    after = tuple(layers.read(nn.ReLU(), (4,)))
    x, k, known = layers.undo(after, torch.tensor([[0.0, 2.0, 1e-9, 1.0]]), torch.ones(1, 4), 1e-6)
    assert known.tolist() == [[False, True, False, True]]
    assert k.tolist() == [[0.0, 1.0, 0.0, 1.0]] and x.tolist() == [[0.0, 2.0, 0.0, 1.0]]


def test_a_stage_takes_its_bias_off():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.AvgPool2d(2), nn.Sigmoid()).double()
    _, (stage,) = layers.chain(net, (1, 5, 5))
    x = torch.rand(1, 1, 5, 5, dtype=torch.float64)
    outputs = net(x).detach()
    z, _, known = stage.undo(outputs, torch.ones_like(outputs))
    torch.testing.assert_close(z, stage.operator.apply(x))
    assert known.all()


# --- a network as a chain ---


def test_a_chain_of_stages():
    net = nn.Sequential(
        *(victims.Normalize((0.5,), (0.2,)), nn.Conv2d(1, 4, 3, bias=False), nn.AvgPool2d(2), nn.Sigmoid()),
        *(nn.AvgPool2d(2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2), nn.Identity()),
    ).eval()
    front, stages = layers.chain(net, (1, 6, 6))
    assert [layer.name for layer in front] == ["0"]
    assert [stage.operator.name for stage in stages] == ["1", "4", "7"]
    assert [[layer.name for layer in stage.after] for stage in stages] == [["3"], ["5", "6"], ["8"]]
    assert [stage.operator.output_shape for stage in stages] == [(4, 2, 2), (4, 1, 1), (2,)]
    assert stages[1].operator.weight is None


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (victims.cnn6, (3, 32, 32)),
        (victims.fcn3, (1, 28, 28)),
        (victims.lenet, (3, 32, 32)),
        (lambda: Block(lambda m, x: m.b(m.a(x).view(1, 6))), (6,)),
        (lambda: nn.Linear(3, 2), (3,)),
    ],
)
def test_chains_of_the_victims(make, shape):
    model = make()
    front, stages = layers.chain(model, shape)
    names = [name for name, module in model.named_modules() if hasattr(module, "weight")]
    assert front == () or all(isinstance(layer.module, nn.Flatten) for layer in front)
    assert [stage.operator.name for stage in stages] == names


def linear_with(*modules):
    return nn.Sequential(nn.Linear(6, 6), *modules, nn.Linear(6, 2))


NO_FACTOR = nn.BatchNorm1d(6)
nn.init.zeros_(NO_FACTOR.weight)
# a network for vectors of six, the mode, and the reason
REFUSED = {
    "gelu": (linear_with(nn.GELU()), "eval", r"1 \(GELU\) is neither linear nor elementwise with an inverse"),
    "prelu": (linear_with(nn.PReLU()), "eval", r"1 \(PReLU\) is neither"),
    "flat leaky relu": (linear_with(nn.LeakyReLU(0.0)), "eval", r"1 \(LeakyReLU\) has the slope 0.0"),
    "falling leaky relu": (linear_with(nn.LeakyReLU(-0.1)), "eval", r"1 \(LeakyReLU\) has the slope -0.1"),
    "batch norm in train mode": (linear_with(nn.BatchNorm1d(6)), "train", r"1 \(BatchNorm1d\) is in train mode"),
    "dropout in train mode": (linear_with(nn.Dropout()), "train", r"1 \(Dropout\) is in train mode"),
    "a factor of zero": (linear_with(NO_FACTOR), "eval", r"1 \(BatchNorm1d\) multiplies a channel by zero"),
    "no weights": (nn.Sequential(nn.Flatten(), nn.Tanh()), "eval", "no convolution and no fully connected layer"),
    "twice": (Block(lambda m, x: m.b(m.a(m.a(x)))), "eval", r"a \(Linear\) has weights that run more than once"),
    "functional": (Block(JOINS["functional relu"][0]), "eval", "the model does something that is n"),
    "flip": (Block(JOINS["flip"][0]), "eval", "the model does something that is n"),
    "transpose": (Block(JOINS["transpose"][0]), "eval", "the model does something that is n"),
    "scale": (Block(lambda m, x: m.b(m.a(x) * 1.5)), "eval", "the model does something that is n"),
    "scaled picture": (Block(lambda m, x: m.b(m.a(2 * x))), "eval", "the model does something that is n"),
    "scaled output": (Block(lambda m, x: 2 * m.b(m.a(x))), "eval", "after its last layer"),
    "scaled output in place": (Block(lambda m, x: m.b(m.a(x)).mul_(2)), "eval", "after its last layer"),
    "output of another shape": (Block(lambda m, x: m.b(m.a(x))[:, :3]), "eval", "after its last layer"),
    "a layer beside": (Block(lambda m, x: m.b(m.a(x)) + m.a.bias), "eval", "after its last layer, or beside"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_chain_is_named(name):
    model, mode, message = REFUSED[name]
    with pytest.raises(layers.NotCovered, match=message):
        layers.chain(model, (6,), mode)


def test_more_that_is_no_chain():
    many = nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(9, 2))
    with pytest.raises(layers.NotCovered, match=r"0 \(Linear\) runs on many vectors of a \(1, 3, 4\) input"):
        layers.chain(many, (1, 3, 4))
    pooled = nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2))
    with pytest.raises(layers.NotCovered, match=r"1 \(MaxPool2d\) is neither linear"):
        layers.chain(pooled, (1, 3, 3))
    normed = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten(), nn.Linear(9, 2))
    with pytest.raises(layers.NotCovered, match=r"0 \(BatchNorm2d\) keeps no running statistics"):
        layers.chain(normed, (1, 3, 3))
    with pytest.raises(layers.NotCovered, match=r"cell \(LSTM\)"):
        layers.chain(Recurrent(), (1, 3, 4))
    with pytest.raises(ValueError, match="does not fit the model"):
        layers.chain(victims.lenet(), (3, 40, 40))


def test_tied_weights_are_no_chain():
    model = Block(lambda m, x: m.b(m.a(x)))
    model.b.weight = model.a.weight
    with pytest.raises(layers.NotCovered, match=r"a \(Linear\) has weights that run more than once"):
        layers.chain(model, (6,))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_chain_leaves_the_model_alone(mode):
    model = linear_with(nn.Sigmoid()).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    layers.chain(model, (6,), mode)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())
