"""R-GAP's equation for the logit, the twins of a picture, and every way to read a last layer."""

import math

import pytest
import torch
from torch import nn

from gradinv import attacks, client, layers, victims
from gradinv.attacks import FOLD, mu_roots, twin_ratio
from gradinv.attacks.last_layer import starts
from gradinv.client import Update


def value_at(mu):
    return -mu / (1 + math.exp(mu))


@pytest.mark.parametrize(
    "mu", [-700.0, -30.0, -5.0, -1.0, -1e-6, 1e-9, 0.01, 0.5, 1.0, 1.2, 1.4, 2.0, 5.0, 30.0, 600.0]
)
def test_roots_hold_the_logit(mu):
    roots = mu_roots(value_at(mu))
    assert len(roots) == (2 if mu > 0 else 1)
    assert min(abs(root - mu) for root in roots) <= 1e-9 * max(abs(mu), 1e-9)
    for root in roots:
        assert value_at(root) == pytest.approx(value_at(mu), rel=1e-9)
    assert list(roots) == sorted(roots, reverse=True)


def test_the_fold_is_where_both_roots_meet():
    assert pytest.approx(1.278465, abs=5e-7) == FOLD
    assert 1 + math.exp(FOLD) * (1 - FOLD) == pytest.approx(0, abs=1e-12)  # the value's slope vanishes there
    assert mu_roots(value_at(FOLD)) == pytest.approx((FOLD, FOLD), abs=1e-7)
    for distance in (1e-12, 1e-9, 1e-6, 1e-3):
        high, low = mu_roots(1 - FOLD + distance)
        assert low <= FOLD <= high and math.isfinite(low) and math.isfinite(high)


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("side", [1, -1])
def test_roots_near_the_fold(side, distance):
    mu = FOLD + side * distance
    high, low = mu_roots(value_at(mu))
    found, other = (high, low) if side > 0 else (low, high)
    assert found == pytest.approx(mu, abs=1e-13 / distance)  # the value hardly moves there, so rounding grows
    assert value_at(other) == pytest.approx(value_at(mu), rel=1e-13)
    assert (other - FOLD) * side < 0


@pytest.mark.parametrize("value", [1 - FOLD - 1e-9, -1.0, -math.inf, math.nan])
def test_no_root_below_the_fold(value):
    assert mu_roots(value) == ()


def test_a_zero_value_has_the_root_zero():
    assert mu_roots(0.0) == (0.0,) and mu_roots(-0.0) == (0.0,)


# mu, its twin and their ratio, worked out from the equation by hand
TWINS = [(0.01, 7.2890), (0.05, 5.3952), (0.5, 2.5088), (1.0, 1.5969), (2.0, 0.7362), (3.0, 0.3427), (5.0, 0.0693)]


@pytest.mark.parametrize(("mu", "twin"), TWINS)
def test_twin_ratio(mu, twin):
    assert twin_ratio(mu) * mu == pytest.approx(twin, abs=6e-5)
    assert twin_ratio(twin_ratio(mu) * mu) == pytest.approx(1 / twin_ratio(mu), rel=1e-6)  # the twin's twin
    assert (twin_ratio(mu) < 1) == (mu > FOLD)


@pytest.mark.parametrize("mu", [0.0, -1e-9, -3.0])
def test_a_wrong_sign_has_no_twin(mu):
    assert twin_ratio(mu) is None


def test_twin_ratio_at_the_ends():
    assert twin_ratio(FOLD) == pytest.approx(1, abs=1e-6)
    assert twin_ratio(800.0) == 0  # e^800 is no float
    assert math.isfinite(twin_ratio(1e-9)) and twin_ratio(1e-9) > 1e10


def logistic_update(model, pixels, label):
    return client.gradient(model.double(), pixels.double(), torch.tensor([label]), loss="logistic")


@pytest.mark.parametrize("label", [-1, 1])
@pytest.mark.parametrize("make", [lambda: victims.fc((1024 * 3, 20, 1), bias=False), victims.cnn6])
def test_logits_are_read_off_the_last_layer(make, label):
    model, pixels = make().double(), torch.rand(1, 3, 32, 32).double()
    mu = label * model(pixels).item()
    roots = attacks.logits(logistic_update(model, pixels, label))
    assert min(abs(root - mu) for root in roots) < 1e-10
    assert len(roots) == (2 if mu > 0 else 1)


@pytest.mark.parametrize("make", [lambda: victims.fc((3072, 20, 1), bias=False, activation="relu"), victims.cnn6])
def test_the_twin_has_the_same_gradient(make):
    model, pixels = make().double(), torch.rand(1, 3, 32, 32).double()
    output = model(pixels).item()
    label = 1 if output > 0 else -1
    ratio = twin_ratio(abs(output))
    twin = pixels * ratio
    both = []
    for x in (pixels, twin):
        working = make_gradient(model, x, label)
        both.append(working)
    for real, other in zip(*both, strict=True):
        torch.testing.assert_close(other, real, rtol=1e-9, atol=1e-12 * real.abs().max().item())
    assert abs(ratio - 1) > 0.01  # and is another picture


def make_gradient(model, pixels, label):
    # by hand, since the twin leaves [0, 1], which a client does not accept
    loss = torch.nn.functional.softplus(-label * model(pixels)[0, 0])
    return torch.autograd.grad(loss, list(model.parameters()))


def test_a_bias_breaks_the_twin():
    model, pixels = victims.fc((12, 6, 1)).double(), torch.rand(1, 12).double()
    output = model(pixels).item()
    label = 1 if output > 0 else -1
    real, other = (make_gradient(model, x, label) for x in (pixels, pixels * twin_ratio(abs(output))))
    assert any((a - b).abs().max() > 1e-3 * a.abs().max() for a, b in zip(real, other, strict=True))


def test_logits_names_what_it_needs():
    pixels = torch.rand(1, 12)
    one = logistic_update(victims.fc((12, 1), bias=False), pixels, 1)
    with pytest.raises(ValueError, match="one picture with loss='logistic', got loss='cross_entropy'"):
        attacks.logits(client.gradient(victims.fc((12, 4)), pixels, torch.tensor([1])))
    two = client.gradient(one.model, torch.rand(2, 12).double(), torch.tensor([1, -1]), loss="logistic")
    with pytest.raises(ValueError, match="batch_size=2"):
        attacks.logits(two)
    with pytest.raises(ValueError, match="a last layer that is linear without bias, got Linear"):
        attacks.logits(logistic_update(victims.fc((12, 1)), pixels, 1))
    with pytest.raises(ValueError, match="a last layer that is linear without bias, got LeakyReLU"):
        attacks.logits(logistic_update(victims.fcn3(), torch.rand(1, 1, 28, 28), 1))
    model = nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 1, bias=False)).double()
    whole = logistic_update(model, pixels, 1)
    part = Update(model, {"0.weight": whole.gradient["0.weight"]}, (12,), 1, whole.labels, "logistic")
    with pytest.raises(ValueError, match=r"the gradient of 1\.weight, got 0\.weight"):
        attacks.logits(part)


# --- starts ---


def last_layer(bias=False, outputs=1, behind=(), margin=None):
    """A network of one hidden layer, a picture, and the picture's features, in double precision.

    margin: of the first output, or with two outputs by how much the first is above the second.
    """
    net = nn.Sequential(nn.Linear(12, 7), nn.Sigmoid(), nn.Linear(7, outputs, bias=bias), *behind).double().eval()
    pixels = torch.rand(1, 12, dtype=torch.float64)
    features = net[:2](pixels).detach()
    if margin is not None:
        with torch.no_grad():
            if outputs == 2:
                net[2].weight[1] = -net[2].weight[0]
                margin = margin / 2
            net[2].weight *= margin / (net[2].weight[0] @ features[0])
    return net, pixels, features


def sent(net, pixels, label, loss="cross_entropy", **options):
    return client.gradient(net, pixels, torch.tensor([label]), loss=loss, **options)


def starts_of(update, without=()):
    stages = layers.chain(update.model, update.input_shape)[1]
    left_out = [f"2.{part}" for part in without]
    gradient = {name: value / update.scale for name, value in update.gradient.items() if name not in left_out}
    return starts(update, stages[-1], gradient)


def true_k(net, features, label):
    """dL/dz behind the last linear layer, by autograd."""
    z = net[2](features).detach().requires_grad_()
    outputs = net[3:](z)
    if outputs.shape[1] == 1:
        loss = torch.nn.functional.softplus(-label * outputs).sum()
    else:
        loss = torch.nn.functional.cross_entropy(outputs, torch.tensor([label]))
    k = torch.autograd.grad(loss, z)[0]
    if outputs.shape[1] > 1 and net[2].bias is None:  # where softmax - 1 keeps no digits, the sum over rows does
        k[0, label] = 0
        k[0, label] = -k.sum()
    return k


def assert_one_is_true(found, net, features, label, rtol=1e-8):
    k = true_k(net, features, label)
    same = [
        start.label == label
        and torch.allclose(start.x, features, rtol, 1e-12)
        and torch.allclose(start.k, k, rtol, 1e-12 * float(k.abs().max()))
        for start in found
    ]
    assert sum(same) == 1


def assert_all_explain(found, weight_gradient):
    for start in found:
        torch.testing.assert_close(start.k.T @ start.x, weight_gradient, rtol=1e-7, atol=1e-300)


@pytest.mark.parametrize("scale", [1.0, 0.5, 9.0])
@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize(("outputs", "label"), [(1, 1), (1, -1), (2, 0), (2, 1), (5, 0), (5, 4)])
def test_a_bias_leaves_one_start(outputs, label, reveal, scale):
    net, pixels, features = last_layer(True, outputs)
    loss = "logistic" if outputs == 1 else "cross_entropy"
    found = starts_of(sent(net, pixels, label, loss, reveal_labels=reveal, scale=scale))
    assert len(found) == 1 and found[0].mu is None
    assert_one_is_true(found, net, features, label)


@pytest.mark.parametrize("behind", [(), (nn.Identity(),), (nn.LeakyReLU(0.2),), (nn.LeakyReLU(0.2), nn.Dropout())])
@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize("label", [1, -1])
@pytest.mark.parametrize("margin", [-8.0, -1.0, -0.1, 0.1, 1.0, 3.0, 20.0, 40.0])
def test_the_logistic_loss_leaves_every_root(margin, label, reveal, behind):
    net, pixels, features = last_layer(behind=behind, margin=margin)
    mu = label * net(pixels).item()
    update = sent(net, pixels, label, "logistic", reveal_labels=reveal)
    found = starts_of(update)
    assert len(found) == (2 if mu > 0 else 1) * (1 if reveal else 2)
    assert_one_is_true(found, net, features, label)
    assert_all_explain(found, update.gradient["2.weight"])
    for start in found:  # and each gives the output that it was read through
        assert net[2:](start.x).item() == pytest.approx(start.label * start.mu, rel=1e-7)


@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize(("outputs", "label"), [(2, 0), (2, 1), (5, 0), (5, 4), (100, 7)])
def test_cross_entropy_without_a_bias(outputs, label, reveal):
    for _ in range(10):
        net, pixels, features = last_layer(outputs=outputs)
        update = sent(net, pixels, label, reveal_labels=reveal)
        found = starts_of(update)
        assert_one_is_true(found, net, features, label)
        assert_all_explain(found, update.gradient["2.weight"])
        for start in found:
            k = net[2](start.x).softmax(1) - torch.eye(outputs)[start.label]
            torch.testing.assert_close(start.k, k.detach(), rtol=1e-7, atol=1e-10)
        assert len(found) == 1 or outputs == 2  # the sign of k names the label where there are more than two


@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize("margin", [20.0, 30.0, 50.0, -5.0, -30.0, -100.0])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_extreme_margins(bias, outputs, margin, reveal):
    net, pixels, features = last_layer(bias, outputs, margin=margin)
    label, loss = (1, "logistic") if outputs == 1 else (0, "cross_entropy")
    if bias:
        nn.init.zeros_(net[2].bias)
    update = sent(net, pixels, label, loss, reveal_labels=reveal)
    assert_one_is_true(starts_of(update), net, features, label, rtol=1e-6)


def test_a_batch_whose_labels_are_known_starts_with_the_most_frequent():
    net, _, _ = last_layer()
    pixels = torch.rand(3, 12, dtype=torch.float64)
    for labels in ((1, 1, -1), (-1, 1, -1)):
        update = client.gradient(net, pixels, torch.tensor(labels), loss="logistic")
        assert {start.label for start in starts_of(update)} == {1 if sum(labels) > 0 else -1}


@pytest.mark.parametrize(
    ("options", "without", "loss", "message"),
    [
        ({}, ["weight"], "logistic", "the gradient of 2.weight is not in this update"),
        ({"bias": True}, ["bias"], "logistic", "2 has a bias whose gradient is not in this update"),
        ({"outputs": 3}, [], "logistic", "2 has 3 outputs, and the logistic loss takes one"),
        ({"outputs": 3, "behind": [nn.LeakyReLU()]}, [], "cross_entropy", r"3 \(LeakyReLU\) stands between 2 and"),
        ({"behind": [nn.Tanh()]}, [], "logistic", r"3 \(Tanh\) stands between 2 and the loss"),
    ],
)
def test_a_last_layer_that_cannot_be_read_is_named(options, without, loss, message):
    net, pixels, _ = last_layer(**options)
    update = sent(net, pixels, 1, "cross_entropy" if options.get("outputs", 1) > 1 else loss)
    update = Update(net, update.gradient, (12,), 1, update.labels, loss)
    with pytest.raises(layers.NotCovered, match=message):
        starts_of(update, without)


def test_a_gradient_below_the_fold_has_no_start():
    net, pixels, _ = last_layer()
    update = sent(net, pixels, 1, "logistic")
    weight = net[2].weight.detach()
    update.gradient["2.weight"].copy_(-0.3 * weight / weight.square().sum())
    assert starts_of(update) == []
