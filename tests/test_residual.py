"""R-GAP on residual blocks: how a block is found, what is solved, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock

from gradinv import attacks, client, layers, victims
from gradinv.attacks import recursive

SHAPE = (3, 6, 6)


def leaky():
    return nn.LeakyReLU(0.2)


def conv(inputs, outputs, kernel=3, stride=1, bias=False):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)


class Skip(nn.Module):
    """A block of one's own: branches `trunk` and `way`, joined as `join(self, x)` says, and an activation."""

    def __init__(self, trunk, way=None, last=None, join=None):
        super().__init__()
        self.trunk, self.way, self.last = trunk, way or nn.Sequential(), last or nn.Identity()
        self.join = join or (lambda m, x: m.trunk(x) + m.way(x))

    def forward(self, x):
        return self.last(self.join(self, x))


class Sum(nn.Module):
    """A block with nothing behind its sum."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.act = first, second, nn.Tanh()

    def forward(self, x):
        return x + self.second(self.act(self.first(x)))


def block(inputs, outputs, activation, middle=None, stride=1, bias=False, **options):
    first, second = conv(inputs, middle or outputs, 3, stride, bias), conv(middle or outputs, outputs, bias=bias)
    if inputs != outputs or stride > 1:
        options.setdefault("way", conv(inputs, outputs, 1, stride, bias))
    return Skip(nn.Sequential(first, activation(), second), last=activation(), **options)


def basic_block(inputs, outputs, stride=1):
    way = None
    if inputs != outputs or stride > 1:
        way = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
    return BasicBlock(inputs, outputs, stride, way)


def net(*blocks, channels=12, activation=leaky, outputs=10, bias=True, shape=SHAPE):
    """A convolution, the blocks, and a fully connected layer; frozen batch norms with statistics of their own."""
    front = nn.Sequential(conv(shape[0], channels), activation(), *blocks, nn.Flatten()).eval()
    features = front(torch.rand(1, *shape)).shape[1]
    model = nn.Sequential(*front, nn.Linear(features, outputs, bias=bias)).double().eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, 0, 0.3)
    return model


def attacked(model, dtype=torch.float64, label=1, shape=SHAPE):
    """What R-GAP finds, and how far it is from the picture."""
    model, pixels = model.to(dtype), torch.rand(1, *shape, dtype=dtype)
    loss = "logistic" if model(pixels).shape[1] == 1 else "cross_entropy"
    found = attacks.r_gap(client.gradient(model, pixels, torch.tensor([label]), loss=loss))
    return found, float("inf") if found.pixels is None else float((found.pixels - pixels).abs().max())


NETWORKS = {
    "identity": lambda: net(block(12, 12, leaky), block(12, 12, leaky)),
    "shortcut": lambda: net(block(12, 16, leaky, stride=2)),
    "shortcut of 3 x 3": lambda: net(block(12, 16, leaky, way=conv(12, 16, 3, 2), stride=2)),
    "shortcut first": lambda: net(block(12, 16, leaky, join=lambda m, x: m.way(x) + m.trunk(x))),
    "sum in place": lambda: net(block(12, 12, leaky, join=lambda m, x: m.trunk(x).add_(x))),
    "nothing behind": lambda: net(Sum(conv(12, 12), conv(12, 12)), Sum(conv(12, 12), conv(12, 12)), activation=nn.Tanh),
    "biases": lambda: net(block(12, 12, leaky, bias=True), block(12, 16, leaky, bias=True)),
    "sigmoid": lambda: net(block(12, 12, nn.Sigmoid), activation=nn.Sigmoid),
    "tanh": lambda: net(block(12, 16, nn.Tanh), activation=nn.Tanh),
    "relu": lambda: net(block(24, 24, nn.ReLU), channels=24, activation=nn.ReLU),
    "relu with a shortcut": lambda: net(block(16, 32, nn.ReLU), channels=16, activation=nn.ReLU),
    "basic block": lambda: net(basic_block(24, 24), channels=24, activation=nn.ReLU),
    "basic block with a shortcut": lambda: net(basic_block(16, 32), channels=16, activation=nn.ReLU),
    "one logit": lambda: net(block(12, 12, leaky), outputs=1, bias=False),
    "fully connected": lambda: net(
        nn.Flatten(), nn.Linear(432, 30), Skip(nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 30)))
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_picture_is_found(name):
    found, error = attacked(NETWORKS[name]())
    assert found.status == "recovered", found.why
    assert error < 1e-6 and found.loss < 1e-7


@pytest.mark.parametrize("name", ["identity", "shortcut", "biases", "sigmoid", "basic block"])
def test_single_precision(name):
    found, error = attacked(NETWORKS[name](), torch.float32)
    assert found.status == "recovered", found.why
    assert error < 1e-3


def test_the_history_has_a_row_a_block():
    model = NETWORKS["shortcut"]()
    found, _ = attacked(model)
    plain, row, first = found.history
    assert [each["layer"] for each in found.history] == ["4", "2", "0"]
    assert set(row) == set(plain) == set(first)
    assert row["unknowns"] == 16 * 9 + 12 * 36
    assert row["gradient rows"] == sum(weight.numel() for weight in model[2].parameters())
    assert row["weight rows"] == 2 * 16 * 9 and row["nullity"] == 0 and row["rank"] == row["unknowns"]
    assert row["condition"] >= 1 and row["residual"] < 1e-6


def bottleneck(skip):
    """Two filters read eight channels: far fewer equations for them than unknowns, without the skip."""
    return net(block(8, 8, leaky, middle=2) if skip else block(8, 8, leaky, middle=2).trunk, channels=8)


def test_a_skip_opens_a_bottleneck():
    found, error = attacked(bottleneck(skip=True))
    assert found.status == "recovered" and error < 1e-6, found.why
    assert all(row["nullity"] == 0 for row in found.history)
    model = bottleneck(skip=False).double()
    pixels = torch.rand(1, *SHAPE).double()
    found = attacks.r_gap(client.gradient(model, pixels, torch.tensor([1])), virtual=False)
    assert found.status == "approximate" and found.history[-2]["nullity"] > 0, found.why
    assert (found.pixels - pixels).abs().max() > 1e-2


@pytest.mark.parametrize("activation", [leaky, nn.Tanh, nn.ELU])
def test_newton_steps_find_what_the_linear_equations_leave_open(activation):
    found, error = attacked(
        net(block(4, 4, activation), channels=4, activation=activation, shape=(3, 8, 8)), shape=(3, 8, 8)
    )
    row = found.history[1]
    assert row["nullity"] > 0 and row["nonlinear equations"] == 4 * 64 and row["evaluations"] > 1
    assert found.status == "recovered" and found.why == "nonlinear equations filled the gap"
    assert error < 1e-6 and row["residual"] < 1e-6


def test_newton_steps_through_batch_norm():
    trunk = nn.Sequential(conv(4, 4), nn.BatchNorm2d(4), nn.Tanh(), conv(4, 4), nn.BatchNorm2d(4))
    found, error = attacked(
        net(Skip(trunk, last=nn.Tanh()), channels=4, activation=nn.Tanh, shape=(3, 8, 8)), shape=(3, 8, 8)
    )
    assert found.history[1]["nullity"] > 0 and found.status == "recovered", found.why
    assert error < 1e-6


def test_what_a_relu_hides_is_reported():
    found, error = attacked(net(block(6, 4, nn.ReLU, stride=2), channels=6, activation=nn.ReLU))
    assert found.status == "approximate" and error > 1e-2
    assert found.history[1]["nullity"] > 0 and "the equations of 2 leave" in found.why


# --- how a block is read ---


def names(model, shape=(3, 32, 32)):
    return [stage.name for stage in layers.chain(model, shape)[1] if isinstance(stage, layers.Block)]


def test_the_blocks_of_a_resnet():
    blocks = [f"layer{stage}.{i}" for stage in (1, 2, 3) for i in (0, 1, 2)]
    assert names(victims.resnet(20, width=2)) == blocks


def test_a_cut_skip_leaves_two_plain_layers():
    model = victims.resnet(20, width=2, cut=("layer1.1", "layer2.0"))
    assert not {"layer1.1", "layer2.0"} & set(names(model)) and len(names(model)) == 7
    plain = {stage.name for stage in layers.chain(model, (3, 32, 32))[1] if isinstance(stage, layers.Stage)}
    assert {"layer1.1.conv1", "layer1.1.conv2", "layer2.0.conv1", "layer2.0.conv2"} < plain


def test_a_block_in_the_model_itself():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.act = conv(3, 8), conv(8, 8), conv(8, 8), nn.Tanh()
            self.head = nn.Linear(288, 10)

        def forward(self, x):
            x = self.act(self.a(x))
            return self.head(self.act(self.c(self.act(self.b(x))) + x).flatten(1))

    found, error = attacked(Flat().double())
    assert found.status == "recovered" and error < 1e-6, found.why
    assert [row["layer"] for row in found.history] == ["head", "b to c", "a"]


def test_a_block_gives_what_its_module_gives():
    model = net(basic_block(4, 6, 2), basic_block(6, 6), channels=4, activation=nn.ReLU)
    found = [stage for stage in layers.chain(model, SHAPE)[1] if isinstance(stage, layers.Block)]
    for stage, module in zip(found, model[2:4], strict=True):
        x = torch.rand(1, *stage.shapes[1], dtype=torch.float64)
        given = module(x.clone())
        torch.testing.assert_close(stage.forward(x).view_as(given), given)
        f, k, known = stage.undo(given, torch.ones_like(given))
        torch.testing.assert_close(known, given > 0)
        torch.testing.assert_close(k, known.double())
        middle = module.relu(module.bn1(module.conv1(x)))
        torch.testing.assert_close(f * known, (stage.main(middle) + stage.side(x)) * known)


def test_the_sensitivity_below_a_block_is_autograds():
    model = net(basic_block(16, 32), channels=16, activation=nn.ReLU)
    stage = layers.chain(model, SHAPE)[1][1]
    x = torch.rand(1, *stage.shapes[1], dtype=torch.float64, requires_grad=True)
    given, k = model[2](x), torch.randn(1, 32, 6, 6, dtype=torch.float64)
    weights = dict(model[2].named_parameters())
    below, *gradient = torch.autograd.grad(given, [x, *weights.values()], k)
    gradient = {f"2.{name}": value for name, value in zip(weights, gradient, strict=True)}
    f, k, known = stage.undo(given.detach(), k)
    found = recursive.solve_block(stage, k, gradient, f, known)
    torch.testing.assert_close(found.x, x.detach(), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.k, below, rtol=1e-7, atol=1e-7)


# --- what is refused ---

trunk = partial(block, 12, 12, leaky)
REFUSED = {
    "three convolutions": (
        lambda: Skip(nn.Sequential(*(conv(12, 12) for _ in range(3))), conv(12, 12, 1), nn.Tanh()),
        r"before 2.last \(Tanh\) .* the branches have 3 and 1",
    ),
    "three convolutions and the identity": (
        lambda: Skip(nn.Sequential(*(conv(12, 12) for _ in range(3)))),
        "in 2.trunk, or between it and 4, the model does something",
    ),
    "one convolution": (lambda: Skip(conv(12, 12), conv(12, 12, 1)), "the branches have 1 and 1"),
    "two branches of two": (lambda: trunk(way=nn.Sequential(conv(12, 12), conv(12, 12))), "the branches have 2 and 2"),
    "concatenation": (
        lambda: trunk(join=lambda m, x: torch.cat([m.trunk(x), x], 1)),
        r"before 2.last \(LeakyReLU\) the model does something .* nor the sum of branches of 2.trunk",
    ),
    "a difference": (lambda: trunk(join=lambda m, x: m.trunk(x) - x), "in 2.trunk, or between it and 4"),
    "a product": (lambda: trunk(join=lambda m, x: m.trunk(x) * x), "in 2.trunk, or between it and 4"),
    "a scaled skip": (lambda: trunk(join=lambda m, x: m.trunk(x) + 0.5 * x), "in 2.trunk, or between it and 4"),
    "activation in the shortcut": (
        lambda: trunk(way=nn.Sequential(conv(12, 12, 1), nn.Tanh())),
        r"2.way.1 \(Tanh\) comes between a linear layer of 2 and the sum",
    ),
    "activation before the sum": (
        lambda: Skip(nn.Sequential(conv(12, 12), nn.Tanh(), conv(12, 12), nn.Tanh())),
        r"2.trunk.3 \(Tanh\) comes between a linear layer of 2.trunk and the sum",
    ),
    "activation first": (
        lambda: Skip(nn.Sequential(nn.Tanh(), conv(12, 12), nn.Tanh(), conv(12, 12)), conv(12, 12, 1)),
        r"2.trunk.0 \(Tanh\) comes before the linear layers of a branch of 2",
    ),
    "an activation that is not a layer": (
        lambda: trunk(join=lambda m, x: m.trunk[2](torch.relu(m.trunk[0](x))) + x),
        r"before 2.trunk.2 \(Conv2d\) the model does something that is neither a layer nor the sum",
    ),
    "shared weights": (lambda: Skip(nn.Sequential(*[conv(12, 12)] * 2)), "has weights that run more than once"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_blocks_are_refused(name):
    make, why = REFUSED[name]
    model = net(make())
    with pytest.raises(layers.NotCovered, match=why):
        layers.chain(model, SHAPE)
    found, _ = attacked(model)
    assert found.status == "not applicable" and found.pixels is None


def test_a_bottleneck_of_torchvision_is_refused():
    with pytest.raises(layers.NotCovered, match=r"before layer1.0.relu \(ReLU\) .* the branches have 3 and 1"):
        layers.chain(victims.resnet(50, width=2), (3, 32, 32))


def test_a_block_comes_last():
    model = nn.Sequential(
        conv(3, 10),
        nn.Flatten(),
        nn.Linear(360, 10),
        Skip(nn.Sequential(nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 10))),
    ).double()
    found, _ = attacked(model)
    assert found.status == "not applicable" and "comes last, which must be" in found.why
