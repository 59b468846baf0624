"""R-GAP: networks whose input it must find, and what it says of those where it cannot."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradinv import attacks, client, layers, metrics, victims
from gradinv.attacks import FOLD, recursive, twin_ratio
from gradinv.client import Update

KEYS = {"layer", "unknowns", "gradient rows", "weight rows", "rank", "nullity", "condition", "residual"}
VIRTUAL = {"virtual constraints", "virtual gradient rows", "evaluations", "virtual residual"}
SMALL = (1, 6, 5)


def stack(*modules, shape=SMALL, outputs=1, bias=False, behind=()):
    """The modules, a fully connected layer on what they give, and what stands behind it; in double precision."""
    front = nn.Sequential(*modules, nn.Flatten()).eval()
    features = front(torch.rand(1, *shape)).shape[1]
    return nn.Sequential(*front, nn.Linear(features, outputs, bias=bias), *behind).double().eval()


def conv(inputs, outputs, kernel=3, stride=1, padding=1, bias=False, **options):
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=bias, **options)


def two(activation, inputs=1, **options):
    """Two convolutions with an activation after each."""
    return conv(inputs, 4, **options), activation, conv(4, 6, stride=2, **options), activation


def random_norm(norm):
    """A frozen batch norm with statistics and factors of both signs."""
    count = norm.num_features
    norm.running_mean.copy_(torch.randn(count))
    norm.running_var.copy_(torch.rand(count) + 0.3)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(count) + torch.tensor([2.0, -2.0]).repeat(count)[:count])
        norm.bias.copy_(torch.randn(count))
    return norm


def picture(shape=SMALL, count=1, dtype=torch.float64):
    return torch.rand(count, *shape, dtype=dtype)


def update_of(net, pixels, label, **options):
    net = net.to(pixels.dtype)
    loss = "logistic" if net(pixels).shape[1] == 1 else "cross_entropy"
    labels = torch.tensor([label] if isinstance(label, int) else label)
    return client.gradient(net, pixels, labels, **{"loss": loss, **options})


def label_of(net, pixels, right=True):
    """The label that the network gives the picture, or for one logit the other one."""
    output = net(pixels).detach()
    return (1 if (output.item() > 0) == right else -1) if output.shape[1] == 1 else int(output.argmax())


def with_logit(net, pixels, size, last=-1):
    """The network with its last weights scaled such that the first logit has the given size."""
    with torch.no_grad():
        net[last].weight *= size / net(pixels)[0, 0].abs()
    return net


def copy_with(update, **changes):
    fields = {name: getattr(update, name) for name in update.__dataclass_fields__}
    return Update(**{**fields, **changes})


def error(found, pixels):
    return float((found - pixels).abs().max())


def assert_recovered(found, pixels, tolerance=1e-8):
    assert found.status == "recovered", found.why
    assert error(found.pixels, pixels) < tolerance


# --- networks whose equations have full rank ---

NETWORKS = {
    "leaky relu": lambda: stack(*two(nn.LeakyReLU(0.2))),
    "steep leaky relu": lambda: stack(*two(nn.LeakyReLU(1.5))),
    "sigmoid": lambda: stack(*two(nn.Sigmoid())),
    "tanh": lambda: stack(*two(nn.Tanh())),
    "elu": lambda: stack(*two(nn.ELU(0.7))),
    "softplus": lambda: stack(*two(nn.Softplus(2.0))),
    "identity": lambda: stack(*two(nn.Identity())),
    "biases": lambda: stack(*two(nn.Tanh(), bias=True)),
    "a bias in the last layer": lambda: stack(*two(nn.LeakyReLU(0.2)), bias=True),
    "two activations": lambda: stack(conv(1, 4), nn.Tanh(), nn.LeakyReLU(0.1), conv(4, 6, stride=2), nn.Sigmoid()),
    "dropout": lambda: stack(*two(nn.Sequential(nn.LeakyReLU(0.2), nn.Dropout(0.3)))),
    "batch norm": lambda: stack(
        conv(1, 4), random_norm(nn.BatchNorm2d(4)), nn.LeakyReLU(0.2), conv(4, 6), random_norm(nn.BatchNorm2d(6))
    ),
    "batch norm behind a fully connected layer": lambda: stack(
        conv(1, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(90, 7), random_norm(nn.BatchNorm1d(7)), nn.ELU()
    ),
    "batch norm without factors": lambda: stack(conv(1, 4), nn.BatchNorm2d(4, affine=False), nn.Tanh()),
    "batch norm on the picture": lambda: stack(random_norm(nn.BatchNorm2d(1)), *two(nn.ELU())),
    "asymmetric stride and padding": lambda: stack(
        conv(1, 9, (3, 2), (2, 1), (1, 0)), nn.LeakyReLU(0.2), conv(9, 14, (2, 3), (1, 2), (0, 2)), nn.Sigmoid()
    ),
    "groups": lambda: stack(conv(1, 4), nn.Tanh(), conv(4, 8, groups=2), nn.LeakyReLU(0.2), conv(8, 8, groups=8)),
    "dilation": lambda: stack(conv(1, 6, 2, dilation=2), nn.LeakyReLU(0.2)),
    "circular padding": lambda: stack(*two(nn.Sigmoid(), padding_mode="circular")),
    "reflected padding": lambda: stack(*two(nn.LeakyReLU(0.2), padding_mode="reflect")),
    "padding to the same size": lambda: stack(conv(1, 6, (5, 3), padding="same"), nn.Tanh()),
    "pooling directly after a convolution": lambda: stack(conv(1, 9), nn.AvgPool2d(2), nn.Sigmoid()),
    "a deeper pooling": lambda: stack(conv(1, 4), nn.LeakyReLU(0.2), conv(4, 12), nn.AvgPool2d(2, 1), nn.ELU()),
    "an invertible pooling": lambda: stack(conv(1, 4), nn.Tanh(), nn.AvgPool2d(2, 1, 1), conv(4, 5), nn.ELU()),
    "a pooling on the picture": lambda: stack(nn.AvgPool2d(2, 1, 1), conv(1, 4), nn.Sigmoid()),
    "adaptive pooling": lambda: stack(conv(1, 12), nn.AdaptiveAvgPool2d((5, 4)), nn.LeakyReLU(0.2)),
    "relu": lambda: stack(conv(1, 40), nn.ReLU(), conv(40, 30), nn.ReLU()),
    "fully connected": lambda: victims.fc((30, 20, 10, 1), bias=False, activation="tanh"),
    "fully connected relu": lambda: victims.fc((30, 20, 10, 1), bias=False),
    "one layer": lambda: victims.fc((30, 1), bias=False),
    "features through an unflatten": lambda: stack(
        nn.Flatten(), nn.Linear(30, 48), nn.Tanh(), nn.Unflatten(1, (3, 4, 4)), conv(3, 5), nn.LeakyReLU(0.2)
    ),
    "a leaky relu behind the logit": lambda: stack(*two(nn.LeakyReLU(0.2)), behind=[nn.LeakyReLU(0.2)]),
    "ten classes": lambda: stack(*two(nn.LeakyReLU(0.2)), outputs=10),
    "ten classes, sigmoid": lambda: stack(*two(nn.Sigmoid()), outputs=10),
    "ten classes, biased": lambda: stack(*two(nn.LeakyReLU(0.2)), outputs=10, bias=True),
    "two classes": lambda: stack(*two(nn.Tanh()), outputs=2),
    "two classes, biased": lambda: stack(*two(nn.Tanh()), outputs=2, bias=True),
}


@pytest.mark.parametrize("reveal", [True, False], ids=["label known", "label hidden"])
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_picture_is_found(name, right, reveal):
    net, pixels = NETWORKS[name]().double(), picture()
    label = label_of(net, pixels, right)
    if not right and net(pixels).shape[1] > 1:
        label = (label + 1) % net(pixels).shape[1]
    found = attacks.r_gap(update_of(net, pixels, label, reveal_labels=reveal))
    candidates = [found.pixels, *found.alternatives]
    assert min(error(each, pixels) for each in candidates) < 1e-8, found.why
    assert found.loss < 1e-7
    if found.status == "ambiguous":  # then the others are as good
        assert len(candidates) > 1 and f"{len(candidates)} inputs" in found.why
        # without a bias, a hidden label and two roots look alike only where louder is just louder
        assert name not in ("sigmoid", "tanh", "biases", "batch norm", "ten classes, biased", "two classes, biased")
    else:
        assert_recovered(found, pixels)
        assert found.labels.tolist() == [label]


def lenet(activation):
    return victims.lenet(1, 1, 28, activation, bias=False)


# the network, the shape of its pictures, and whether louder is just louder for it
PAPER = {
    "CNN6": (victims.cnn6, (3, 32, 32)),
    "LeNet": (lambda: lenet("sigmoid"), (1, 28, 28)),
    "LeNet*": (lambda: lenet("leaky_relu"), (1, 28, 28)),
    "FCN3": (victims.fcn3, (1, 28, 28)),
}


@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name in PAPER for label in (1, -1) if (name, label) != ("CNN6", -1)]
)
def test_networks_of_the_paper(name, label):
    make, shape = PAPER[name]
    net, pixels = make().double(), picture(shape)
    if name != "LeNet":
        with_logit(net, pixels, 0.6, -2 if name == "FCN3" else -1)  # the twin is 3.8 times as loud
    found = attacks.r_gap(update_of(net, pixels, label))
    assert_recovered(found, pixels, 1e-7)
    assert found.loss < 1e-9 and all(row["nullity"] == 0 for row in found.history)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_slope_of_a_leaky_relu_behind_the_logit_counts(sign):
    net, pixels = victims.fcn3().double(), picture((1, 28, 28))
    with torch.no_grad():
        net[-2].weight *= sign * net(pixels).sign()
    assert net(pixels).sign().item() == sign
    with_logit(net, pixels, 0.3, -2)
    for label in (1, -1):
        assert_recovered(attacks.r_gap(update_of(net, pixels, label)), pixels)


def test_single_precision():
    net, pixels = stack(*two(nn.LeakyReLU(0.2)), bias=True), picture(dtype=torch.float32)
    found = attacks.r_gap(update_of(net, pixels, 1))
    assert_recovered(found, pixels, 1e-4)
    assert found.pixels.dtype == torch.float32


def test_flat_inputs():
    pixels = picture((12,))
    found = attacks.r_gap(update_of(victims.fc((12, 7, 4), activation="tanh"), pixels, 2))
    assert_recovered(found, pixels)
    assert found.pixels.shape == (1, 12)


def test_relu_with_dead_units():
    net, pixels = stack(conv(1, 40, bias=True), nn.ReLU(), conv(40, 30), nn.ReLU()), picture()
    with torch.no_grad():
        net[0].bias[:15] = -10.0
    first = net[:2](pixels)
    assert not first[:, :15].any() and 0.2 < (first == 0).double().mean() < 0.9
    found = attacks.r_gap(update_of(net, pixels, 1))
    assert_recovered(found, pixels)
    assert found.history[-1]["weight rows"] == int((first > 0).sum()) < found.history[-1]["unknowns"] * 40


@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize(("bias", "margin"), [(True, 20.0), (True, 30.0), (True, 50.0), (False, 10.0)])
def test_tiny_sensitivities(bias, margin, reveal):
    net, pixels = stack(*two(nn.Sigmoid()), outputs=2, bias=bias), picture()
    with torch.no_grad():
        net[-1].weight[1] = -net[-1].weight[0]
        if bias:
            net[-1].bias.zero_()
    with_logit(net, pixels, margin / 2)
    label = label_of(net, pixels)
    update = update_of(net, pixels, label, reveal_labels=reveal)
    assert float(update.gradient["5.weight"].abs().max()) < 2.7**-margin
    found = attacks.r_gap(update)
    assert_recovered(found, pixels, 1e-6)
    assert found.labels.tolist() == [label]


@pytest.mark.parametrize("margin", [20.0, 40.0])
def test_a_tiny_sensitivity_of_one_logit(margin):
    net, pixels = stack(*two(nn.Sigmoid())), picture()
    with_logit(net, pixels, margin)
    assert_recovered(attacks.r_gap(update_of(net, pixels, label_of(net, pixels))), pixels, 1e-6)


@pytest.mark.parametrize("scale", [0.5, 7.0])
@pytest.mark.parametrize("name", ["sigmoid", "ten classes", "ten classes, biased", "fully connected relu"])
def test_a_scaled_gradient(name, scale):
    net, pixels = NETWORKS[name]().double(), picture()
    label = label_of(net, pixels, right=False)
    found = attacks.r_gap(update_of(net, pixels, label, scale=scale))
    assert_recovered(found, pixels)
    plain = attacks.r_gap(update_of(net, pixels, label))
    torch.testing.assert_close(found.pixels, plain.pixels, rtol=1e-9, atol=1e-9)


# --- what the recursion passes down ---


def seen_by_autograd(net, pixels, label):
    """By layer: input, output without bias and dL/d(output)."""
    seen, outputs = {}, {}

    def keep(name):
        def hook(module, inputs, output):
            output.retain_grad()
            outputs[name] = (inputs[0].detach(), output)

        return hook

    hooks = [
        module.register_forward_hook(keep(name))
        for name, module in net.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    logits = net(pixels)
    loss = (
        functional.softplus(-label * logits).sum()
        if logits.shape[1] == 1
        else functional.cross_entropy(logits, torch.tensor([label]))
    )
    loss.backward()
    for hook in hooks:
        hook.remove()
    for name, (x, output) in outputs.items():
        seen[name] = (x, output.grad)
    return seen


@pytest.mark.parametrize(
    "name",
    [
        *("sigmoid", "leaky relu", "elu", "softplus", "batch norm", "groups", "asymmetric stride and padding"),
        *("pooling directly after a convolution", "fully connected", "ten classes, biased", "two activations"),
        *("a leaky relu behind the logit", "relu", "circular padding", "features through an unflatten"),
    ],
)
def test_sensitivities_and_inputs_of_every_layer_are_autograds(name, monkeypatch):
    net, pixels, solve, walked = NETWORKS[name]().double(), picture(), recursive.solve, []

    def watched(operator, k, *rest):
        solution = solve(operator, k, *rest)
        walked.append((operator.name, solution.x, operator.sensitivity(k)))
        return solution

    monkeypatch.setattr(recursive, "solve", watched)
    label = label_of(net, pixels, right=False)
    attacks.r_gap(update_of(net, pixels, label))
    seen = seen_by_autograd(net, pixels, label)
    assert [name for name, *_ in walked] == list(seen)[::-1]
    for layer, x, k in walked:
        torch.testing.assert_close(x, seen[layer][0].view_as(x), rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(k, seen[layer][1].view_as(k), rtol=1e-8, atol=1e-9 * float(k.abs().max()))


@pytest.mark.parametrize(
    "name", ["leaky relu", "groups", "asymmetric stride and padding", "pooling directly after a convolution"]
)
def test_both_solvers_agree(name, monkeypatch):
    net, pixels, found = NETWORKS[name]().double(), picture(), {}
    update = update_of(net, pixels, label_of(net, pixels, right=False))
    for direct in (0, 10_000):
        monkeypatch.setattr(recursive, "DIRECT", direct)
        found[direct] = attacks.r_gap(update)
    torch.testing.assert_close(found[0].pixels, found[10_000].pixels, rtol=1e-8, atol=1e-8)
    for free, direct in zip(found[0].history, found[10_000].history, strict=True):
        assert [free[key] for key in ("layer", "rank", "nullity")] == [
            direct[key] for key in ("layer", "rank", "nullity")
        ]
        assert direct["condition"] >= 1 and free["condition"] >= 1
        assert free["residual"] < 1e-8 and direct["residual"] < 1e-8


@pytest.mark.parametrize("direct", [0, 10_000])
def test_both_solvers_give_the_least_norm(direct, monkeypatch):
    monkeypatch.setattr(recursive, "DIRECT", direct)
    first = conv(2, 2, 2, 2, 0).double()
    pixels = picture((2, 6, 5))
    operator = layers.Operator(layers.read(first, (2, 6, 5))[0])
    k, z = torch.randn(1, *operator.output_shape, dtype=torch.float64), operator.apply(pixels)
    known = torch.rand(z.shape) < 0.8
    found = recursive.solve(operator, k, operator.weight_gradient(pixels, k), z, known)
    unit = torch.eye(60, dtype=torch.float64).view(60, 2, 6, 5)
    rows = [operator.apply(unit).flatten(1).T[known.flatten()]]
    rows.append(torch.stack([operator.weight_gradient(one[None], k).flatten() for one in unit], 1))
    matrix = torch.cat(rows)
    rank_ = int(torch.linalg.matrix_rank(matrix, rtol=1e-9))
    assert found.facts["rank"] == rank_ < 60 and found.facts["nullity"] == 60 - rank_
    least = torch.linalg.pinv(matrix, rtol=1e-9) @ (matrix @ pixels.flatten())
    torch.testing.assert_close(found.x.flatten(), least, rtol=1e-8, atol=1e-9)


# --- two roots ---


def homogeneous(size, brightest=1.0):
    """A network for which louder is just louder, a picture, and the logit that the network gives it."""
    net, pixels = stack(*two(nn.LeakyReLU(0.2))), picture()
    pixels *= brightest / pixels.max()
    return with_logit(net, pixels, size), pixels


@pytest.mark.parametrize("size", [0.5, 0.9, 1.5, 3.0, 6.0])
def test_twins_in_the_box_are_both_given(size):
    ratio = twin_ratio(size)
    net, pixels = homogeneous(size, min(1.0, 1 / ratio))
    found = attacks.r_gap(update_of(net, pixels, label_of(net, pixels)))
    assert found.status == "ambiguous" and "2 inputs" in found.why
    pair = [found.pixels, *found.alternatives]
    assert len(pair) == 2
    for wanted in (pixels, pixels * ratio):
        assert min(error(each, wanted) for each in pair) < 1e-8
    assert (ratio < 1) == (size > FOLD)


@pytest.mark.parametrize("size", [0.1, 0.6, 1.1])
def test_the_box_rules_out_a_louder_twin(size):
    net, pixels = homogeneous(size)
    found = attacks.r_gap(update_of(net, pixels, label_of(net, pixels)))
    assert_recovered(found, pixels)
    assert "box" in found.why and len(found.alternatives) == 1
    assert error(found.alternatives[0], pixels * twin_ratio(size)) < 1e-7


@pytest.mark.parametrize("size", [0.1, 0.6, 2.0, 5.0])
@pytest.mark.parametrize("name", ["sigmoid", "tanh", "elu", "biases", "batch norm"])
def test_deeper_layers_rule_out_a_twin(name, size):
    net, pixels = NETWORKS[name]().double(), picture()
    with_logit(net, pixels, size)
    found = attacks.r_gap(update_of(net, pixels, label_of(net, pixels)))
    assert_recovered(found, pixels)
    assert found.alternatives == [] and "box" not in found.why


def test_a_wrong_label_has_no_twin():
    net, pixels = homogeneous(2.0)
    found = attacks.r_gap(update_of(net, pixels, label_of(net, pixels, right=False)))
    assert_recovered(found, pixels)
    assert found.alternatives == []


def test_a_hidden_label_of_a_homogeneous_network():
    """-x has the gradient of x where nothing is bent; the box tells them apart."""
    net, pixels = stack(*two(nn.Identity())), picture()
    label = label_of(net, pixels, right=False)
    found = attacks.r_gap(update_of(net, pixels, label, reveal_labels=False))
    assert_recovered(found, pixels)
    assert found.labels.tolist() == [label]
    assert error(found.alternatives[0], -pixels) < 1e-8


# --- batches ---


@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize("labels", [(1, -1), (1, 1), (-1, -1)])
def test_a_batch_gives_a_mixture(labels, reveal):
    pixels = picture((1, 28, 28), 2)
    found = attacks.r_gap(update_of(victims.fcn3(), pixels, labels, reveal_labels=reveal))
    assert found.status == "ambiguous" and "2 pictures" in found.why
    basis, mixture = pixels.flatten(1).T, found.pixels.flatten()
    rest = mixture - basis @ torch.linalg.lstsq(basis, mixture).solution
    assert rest.norm() / mixture.norm() < 1e-6
    assert found.labels.tolist() == list(labels) if reveal else found.labels is None


def test_a_batch_of_equal_pictures_is_that_picture():
    net, pixels = stack(*two(nn.Sigmoid()), outputs=4, bias=True), picture()
    found = attacks.r_gap(update_of(net, pixels.repeat(3, 1, 1, 1), (2, 2, 2)))
    assert found.status == "ambiguous" and error(found.pixels, pixels) < 1e-8


# --- layers that leave something open ---


def deficient(activation=nn.Sigmoid, filters=3):
    """A few filters read what six give: the upper convolution leaves some of its input open."""
    return stack(conv(1, 6), activation(), conv(6, filters, 3, 2, 1), activation(), shape=(1, 6, 6))


@pytest.mark.parametrize("filters", [2, 3])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Softplus, nn.Tanh, partial(nn.LeakyReLU, 0.2), nn.ELU], ids=str)
def test_virtual_constraints_fill_the_gap_of_a_small_network(activation, seed, filters):
    torch.manual_seed(seed)
    net, pixels = deficient(activation, filters), picture((1, 6, 6))
    update = update_of(net, pixels, label_of(net, pixels, right=False))
    plain = attacks.r_gap(update, virtual=False)
    row = plain.history[1]
    assert plain.status == "approximate" and error(plain.pixels, pixels) > 1e-2
    assert row["nullity"] > 0 and f"2 leave {row['nullity']} of its 216 inputs open" in plain.why
    found = attacks.r_gap(update)
    assert_recovered(found, pixels, 1e-6)
    assert "virtual constraints" in found.why
    row = found.history[1]
    assert row["virtual constraints"] == 216 - 36 and row["virtual residual"] < 1e-6 and row["evaluations"] > 0


def test_a_unit_read_on_the_wrong_side_of_its_kink_is_turned():
    net, pixels = stack(conv(1, 6), nn.LeakyReLU(0.2)), picture()
    stage = layers.chain(net, pixels.shape[1:])[1][0]
    given, above = net[:2](pixels).detach(), torch.randn(1, *stage.operator.output_shape, dtype=torch.float64)
    _, k, known = stage.undo(given, above)
    sent = stage.operator.weight_gradient(pixels, k)
    unit = given.abs().argmin()
    misread = given.clone()
    misread.view(-1)[unit] *= -1e-6
    z, wrong, _ = stage.undo(misread, above)
    assert (wrong != k).sum() == 1
    off = recursive.solve(stage.operator, wrong, sent, z, known).facts["residual"]
    tolerance = 2 * float(misread.abs().min() / misread.abs().max())
    right, turned = recursive._turned(stage, misread, above, wrong, sent, z, known, off, tolerance)
    assert turned and torch.allclose(right, k, 1e-12)
    again, turned = recursive._turned(stage, misread, above, right, sent, z, known, 1e-3 * off, tolerance)
    assert not turned and torch.equal(again, right)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh, partial(nn.LeakyReLU, 0.2)], ids=str)
def test_virtual_constraints_reach_several_layers_back(activation, seed):
    torch.manual_seed(seed)
    net = stack(
        conv(1, 8), activation(), conv(8, 10), activation(), conv(10, 3, 2, 2, 0), activation(), shape=(1, 6, 6)
    )
    pixels = picture((1, 6, 6))
    found = attacks.r_gap(update_of(net, pixels, label_of(net, pixels, right=False)))
    assert_recovered(found, pixels, 1e-8)
    row = found.history[1]
    constraints = 36 * (8 - 1) + 36 * (10 - 8)  # of the first layer and of the second
    assert row["virtual constraints"] == constraints and row["virtual gradient rows"] == 0 < row["nullity"]


def test_cnn6d_without_virtual_constraints():
    net, pixels = victims.cnn6d().double(), picture((3, 32, 32))
    found = attacks.r_gap(update_of(net, pixels, label_of(net, pixels, right=False)), virtual=False)
    assert found.status == "approximate" and metrics.mse(found.pixels, pixels).item() > 1e-4
    assert "the equations of 2 leave 280 of its 3468 inputs open" in found.why
    assert [row["nullity"] for row in found.history] == [0, 0, 0, 0, 0, 280, 0]


def test_cnn6d_with_virtual_constraints():
    net, pixels = victims.cnn6d().double(), picture((3, 32, 32))
    found = attacks.r_gap(update_of(net, pixels, label_of(net, pixels, right=False)))
    assert found.status == "recovered" and metrics.mse(found.pixels, pixels).item() < 1e-8
    assert found.history[5]["virtual constraints"] == 3468 - 3072


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: stack(conv(1, 12), nn.AdaptiveAvgPool2d((3, 2)), nn.LeakyReLU(0.2)),
        lambda: stack(nn.AvgPool2d(2, 1), conv(1, 4), nn.Sigmoid()),
        lambda: stack(conv(1, 2, 1, 2, 0), nn.Sigmoid()),
    ],
    ids=["pooled", "a pooling on the picture", "strides past pixels"],
)
def test_a_picture_that_many_others_equal_is_not_called_recovered(make, virtual):
    """The least of the inputs with this gradient reproduces it, and so do all others."""
    net, pixels = make(), picture()
    found = attacks.r_gap(update_of(net, pixels, label_of(net, pixels, right=False)), virtual=virtual)
    assert found.history[-1]["nullity"] > 0 and error(found.pixels, pixels) > 1e-3
    assert found.status in ("ambiguous", "approximate")
    assert f"leave {found.history[-1]['nullity']} of its 30 inputs open" in found.why


# --- what it does not cover ---


class Joined(nn.Module):
    """Layers a, b and head, joined as `join(self, x)` says."""

    def __init__(self, join):
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(12, outputs, bias=False) for outputs in (12, 12, 4))
        self.act, self.join = nn.Tanh(), join

    def forward(self, x):
        return self.join(self, x.flatten(1))


LAST = (nn.Flatten(), nn.Linear(12, 4))
# a network for pictures of 3 x 2 x 2, the mode of the client, and the reason
REFUSED = {
    "max-pooling": (nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 4)), "eval", r"0 \(MaxPool2d\)"),
    "gelu": (nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 4)), "eval", r"2 \(GELU\)"),
    "softmax": (nn.Sequential(*LAST, nn.Softmax(1)), "eval", r"2 \(Softmax\)"),
    "layer norm": (nn.Sequential(nn.LayerNorm(2), *LAST), "eval", r"0 \(LayerNorm\)"),
    "a functional activation": (
        Joined(lambda m, x: m.head(m.b(m.a(x)).sigmoid())),
        "eval",
        "the model does something that is n",
    ),
    "a scaled picture": (Joined(lambda m, x: m.head(m.b(m.a(2 * x)))), "eval", "the model does something that is n"),
    "a scaled output": (Joined(lambda m, x: 2 * m.head(m.b(m.a(x)))), "eval", "after its last layer"),
    "an output plus a layer's": (
        Joined(lambda m, x: m.head(m.b(m.a(x))) + m.a.weight[0, 0]),
        "eval",
        "beside its layers",
    ),
    "weights used twice": (Joined(lambda m, x: m.head(m.b(m.a(m.a(x))))), "eval", "weights that run more than once"),
    "batch norm in train mode": (
        nn.Sequential(nn.BatchNorm2d(3), *LAST),
        "train",
        r"0 \(BatchNorm2d\) is in train mode",
    ),
    "dropout in train mode": (nn.Sequential(nn.Dropout(), *LAST), "train", r"0 \(Dropout\) is in train mode"),
    "batch norm without statistics": (
        nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), *LAST),
        "eval",
        "no running statistics",
    ),
    "a flat leaky relu": (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.LeakyReLU(0.0), nn.Linear(12, 4)),
        "eval",
        "slope 0.0, so it has no inverse",
    ),
    "a layer on many vectors": (
        nn.Sequential(nn.Linear(2, 2), nn.Flatten(), nn.Linear(12, 4)),
        "eval",
        "runs on many vectors",
    ),
    "a transposed convolution": (
        nn.Sequential(nn.ConvTranspose2d(3, 3, 1), *LAST),
        "eval",
        r"0 \(ConvTranspose2d\) is neither linear",
    ),
    "a convolution at the end": (
        nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.Flatten()),
        "eval",
        r"0 \(Conv2d\) comes last, which must be fully connected",
    ),
    "a pooling at the end": (
        nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "eval",
        "comes last, which must be fully connected",
    ),
    "an activation before cross-entropy": (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 4, bias=False), nn.Tanh()),
        "eval",
        r"2 \(Tanh\) stands between 1 and the loss",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_is_not_covered_is_named(name):
    net, mode, why = REFUSED[name]
    found = attacks.r_gap(update_of(net, picture((3, 2, 2), 2), (1, 3), mode=mode))
    assert found.status == "not applicable" and found.pixels is None
    assert re.search(why, found.why), found.why


def part_of(update, *without):
    return copy_with(update, gradient={name: g for name, g in update.gradient.items() if name not in without})


def test_a_missing_last_gradient_is_named():
    net = stack(*two(nn.Sigmoid()))
    update = update_of(net, picture(), 1)
    found = attacks.r_gap(part_of(update, "5.weight"))
    assert found.status == "not applicable" and "the gradient of 5.weight is not in this update" in found.why


def test_a_missing_last_bias_is_named():
    update = update_of(stack(*two(nn.Sigmoid()), bias=True), picture(), 1)
    found = attacks.r_gap(part_of(update, "5.bias"))
    assert found.status == "not applicable" and "5 has a bias whose gradient is not in this update" in found.why


def test_the_logistic_loss_takes_one_output():
    update = update_of(stack(*two(nn.Sigmoid()), outputs=3), picture(), 1)
    found = attacks.r_gap(copy_with(update, loss="logistic"))
    assert found.status == "not applicable" and "5 has 3 outputs, and the logistic loss takes one" in found.why


def test_a_gradient_that_no_output_explains_is_named():
    update = update_of(stack(*two(nn.Sigmoid())), picture(), 1)
    weight = update.model[5].weight.detach()
    gradient = {**update.gradient, "5.weight": -weight / weight.square().sum()}  # below the fold
    found = attacks.r_gap(copy_with(update, gradient=gradient))
    assert found.status == "not applicable" and "no output of the model explains the gradient of 5" in found.why


@pytest.mark.parametrize("missing", [("0.weight",), ("2.weight",), ("0.weight", "2.weight")])
def test_outputs_alone_may_be_enough(missing):
    net, pixels = stack(conv(1, 4), nn.Tanh(), conv(4, 4), nn.LeakyReLU(0.2)), picture()
    update = update_of(net, pixels, label_of(net, pixels, right=False))
    found = attacks.r_gap(part_of(update, *missing))
    assert_recovered(found, pixels)
    rows = {row["layer"]: row["gradient rows"] for row in found.history}
    assert {f"{layer}.weight" for layer, count in rows.items() if count == 0} == set(missing)


def test_outputs_alone_may_not_be_enough():
    net, pixels = stack(*two(nn.Sigmoid())), picture()
    update = update_of(net, pixels, label_of(net, pixels, right=False))
    found = attacks.r_gap(part_of(update, "2.weight"), virtual=False)
    assert found.status == "approximate" and "the equations of 2 leave" in found.why
    assert found.history[1]["gradient rows"] == 0


def test_a_fully_connected_layer_without_its_gradient():
    pixels = picture()
    wide = victims.fc((30, 40, 20, 4), activation="tanh")
    update = update_of(wide, pixels, 1)
    assert_recovered(attacks.r_gap(part_of(update, "1.weight")), pixels)
    found = attacks.r_gap(part_of(update, "3.weight"), virtual=False)
    assert found.status == "approximate" and "the equations of 3 leave 20 of its 40 inputs open" in found.why


def test_frozen_weights_send_nothing():
    net, pixels = stack(conv(1, 4), nn.Tanh()), picture()
    net[0].requires_grad_(False)
    update = update_of(net, pixels, label_of(net, pixels, right=False))
    assert "0.weight" not in update.gradient
    assert_recovered(attacks.r_gap(update), pixels)


def test_a_layer_that_lets_nothing_through_blocks():
    net = stack(conv(1, 4), nn.Sigmoid(), conv(4, 6, bias=True), nn.ReLU(), outputs=3, bias=True)
    with torch.no_grad():
        net[2].bias.fill_(-50.0)
    found = attacks.r_gap(update_of(net, picture(), 1))
    assert found.status == "blocked" and "dL/dz of 2 is zero in every entry" in found.why
    assert found.pixels is None and [row["layer"] for row in found.history] == ["5"]


def test_a_zero_gradient():
    update = update_of(stack(*two(nn.Sigmoid())), picture(), 1)
    zero = {name: torch.zeros_like(value) for name, value in update.gradient.items()}
    found = attacks.r_gap(copy_with(update, gradient=zero))
    assert found.status == "weak gradient" and found.pixels is None and "zero" in found.why


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["0.weight", "2.weight", "5.weight"])
def test_a_gradient_that_is_not_finite(name, value):
    update = update_of(stack(*two(nn.Sigmoid())), picture(), 1)
    update.gradient[name].view(-1)[0] = value
    found = attacks.r_gap(update)
    assert found.status == "not applicable" and "not finite" in found.why and found.pixels is None


@pytest.mark.parametrize("size", [1e-3, 1e-6])
def test_a_noisy_gradient_is_only_approximate(size):
    net, pixels = stack(*two(nn.LeakyReLU(0.2)), outputs=3, bias=True), picture()
    update = update_of(net, pixels, 1)
    noisy = {name: g + size * g.abs().max() * torch.randn_like(g) for name, g in update.gradient.items()}
    found = attacks.r_gap(copy_with(update, gradient=noisy))
    assert found.status == "approximate" and "does not reproduce the gradient" in found.why
    assert error(found.pixels, pixels) < 1e4 * size and found.loss > 1e-2 * size


def test_a_shape_that_does_not_fit_is_named():
    update = update_of(stack(*two(nn.Sigmoid())), picture(), 1)
    with pytest.raises(ValueError, match="does not fit the model"):
        attacks.r_gap(copy_with(update, input_shape=(1, 7, 7)))


# --- the history ---


@pytest.mark.parametrize("direct", [0, 10_000])
@pytest.mark.parametrize("make", [lambda: deficient(nn.Tanh), lambda: stack(*two(nn.LeakyReLU(0.2)), shape=(1, 6, 6))])
def test_the_history_has_a_row_a_layer(make, direct, monkeypatch):
    monkeypatch.setattr(recursive, "DIRECT", direct)
    net, pixels = make(), picture((1, 6, 6))
    update = update_of(net, pixels, label_of(net, pixels, right=False))
    found, again = attacks.r_gap(update), attacks.r_gap(update)
    assert found.history == again.history and torch.equal(found.pixels, again.pixels)
    assert [row["layer"] for row in found.history] == ["5", "2", "0"]
    for row in found.history:
        module = net.get_submodule(row["layer"])
        assert set(row) == (KEYS | VIRTUAL if row["nullity"] else KEYS)
        assert row["gradient rows"] == module.weight.numel()
        assert row["rank"] + row["nullity"] == row["unknowns"]
        assert row["condition"] >= 1 and 0 <= row["residual"] < 1e-3
        assert all(type(value) in (int, float, str) for value in row.values())
    assert [row["weight rows"] for row in found.history] == [
        1,
        net[4](net[:4](pixels)).shape[1],
        net[0](pixels).numel(),
    ]
    assert found.seconds > 0


def test_a_rank_that_is_too_large_to_find_is_none(monkeypatch):
    from gradinv.rank import numerical

    net, pixels = NETWORKS["sigmoid"](), picture()
    update = update_of(net, pixels, label_of(net, pixels, right=False))
    monkeypatch.setattr(numerical, "LARGEST", 10)
    monkeypatch.setattr(recursive, "DIRECT", 0)
    found = attacks.r_gap(update)
    assert_recovered(found, pixels, 1e-6)
    assert [row["nullity"] for row in found.history] == [0, None, None]
    assert [row["rank"] for row in found.history] == [found.history[0]["unknowns"], None, None]
