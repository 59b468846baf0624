"""The fast layers give what plain autograd gives, for every run by itself, and do no more work than they say."""

import copy

import pytest
import torch
from test_common import VICTIMS, victim
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gradinv import attacks, client, victims
from gradinv.attacks import double_backward, matching
from gradinv.attacks.double_backward import stack

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def one_each(model, pixels, labels, **options):
    """An update a picture."""
    return [client.gradient(model, pixels[i : i + 1], labels[i : i + 1], **options) for i in range(len(pixels))]


def slopes(updates, starts, *, fast, objective="cosine"):
    """The data term and the pictures' gradient, a row a run: together if fast, else one by one."""
    if fast:
        data, _, (found,) = matching._Match(updates, objective, 0.0)(starts.clone().requires_grad_(True))
        return data, found
    alone = [
        matching._Match([update], objective, 0.0, fast=False)(start[None].clone().requires_grad_(True))
        for update, start in zip(updates, starts, strict=True)
    ]
    return torch.cat([data for data, *_ in alone]), torch.cat([found for *_, (found,) in alone])


def assert_agree(updates, starts, tolerance, **options):
    for quick, plain in zip(
        slopes(updates, starts, fast=True, **options), slopes(updates, starts, fast=False, **options), strict=True
    ):
        for mine, theirs in zip(quick, plain, strict=True):
            assert (mine - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("objective", ["cosine", "euclidean"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", VICTIMS)
def test_fast_and_plain_agree_on_every_victim(name, dtype, objective):
    model, pixels, labels, loss = victim(name)
    model, pixels = model.to(dtype), pixels.to(dtype)
    for module in model.modules():  # statistics unlike an untrained network's; single precision then rounds more
        if isinstance(module, nn.BatchNorm2d) and dtype == torch.float64:
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    updates = one_each(model, pixels, labels, loss=loss)
    starts = torch.rand(2, 1, *pixels.shape[1:], dtype=dtype)
    assert_agree(updates, starts, TOLERANCE[dtype], objective=objective)
    assert_agree(updates[:1], starts[:1], TOLERANCE[dtype], objective=objective)


CONVOLUTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": (2, 1), "padding": (0, 2)},
    "dilation": {"dilation": (1, 2), "padding": 1},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "padding": 1},
    "same": {"padding": "same", "kernel_size": (2, 3)},
    "circular": {"padding": (1, 2), "padding_mode": "circular", "stride": 2},
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("way", ["grouped", "in turn", "patches"])
@pytest.mark.parametrize("pictures", [1, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_kind_of_convolution(name, pictures, way, monkeypatch):
    monkeypatch.setattr(double_backward, "GROUPED", 10**9 if way == "grouped" else 0)
    monkeypatch.setattr(double_backward, "FEW_PIXELS", 10**9 if way == "patches" else 0)
    middle = nn.Conv2d(4, 8, **{"kernel_size": 3, **CONVOLUTIONS[name]})
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), middle, nn.Softplus(), nn.AdaptiveAvgPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 5)).double()
    updates = [
        client.gradient(model, torch.rand(pictures, 2, 9, 7).double(), torch.randint(5, (pictures,))) for _ in range(3)
    ]
    assert matching._plan(updates[0], 3, None, 5) == (3, True)
    assert_agree(updates, torch.rand(3, pictures, 2, 9, 7).double(), 1e-12)


def test_norms_and_layers_over_many_vectors():
    layers = (nn.Unflatten(1, (4, 6)), nn.Linear(6, 5), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))
    model = nn.Sequential(*layers, nn.BatchNorm1d(3)).double().eval()
    model[2].running_mean.uniform_(-1, 1)
    updates = one_each(model, torch.rand(2, 24).double(), torch.tensor([0, 2]))
    assert matching._plan(updates[0], 2, None, 3) == (2, True)
    assert_agree(updates, torch.rand(2, 1, 24).double(), 1e-12)


class Twice(nn.Module):
    """One convolution that runs twice, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.a, self.b = nn.Linear(75, 75), nn.Linear(75, 75, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        x = self.conv(torch.tanh(self.conv(x))).flatten(1)
        return self.b(torch.sigmoid(self.a(x)))[:, :4]


def test_shared_weights_add_up():
    model = Twice().double()
    updates = one_each(model, torch.rand(2, 3, 5, 5).double(), torch.tensor([1, 3]))
    assert matching._plan(updates[0], 2, None, 4) == (2, True)
    assert_agree(updates, torch.rand(2, 1, 3, 5, 5).double(), 1e-12)


def test_a_part_of_the_gradient():
    model = victims.convnet(2).double()
    whole = one_each(model, torch.rand(2, 3, 32, 32).double(), torch.tensor([1, 3]))
    names = ["1.bias", "4.weight", "5.bias"]
    part = [
        client.Update(model, {name: each.gradient[name] for name in names}, each.input_shape, labels=each.labels)
        for each in whole
    ]
    assert_agree(part, torch.rand(2, 1, 3, 32, 32).double(), 1e-12)


# --- networks that the fast layers do not cover ---


class ReadsItsWeight(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.layer(x) + x @ self.layer.weight))


class MixesItsBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(x - x.mean(0)) + x)


def layer_norm():
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def weight_norm():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("make", [ReadsItsWeight, MixesItsBatch, layer_norm, weight_norm])
def test_other_networks_are_attacked_one_run_at_a_time_and_right(make):
    model = make().double()
    updates = one_each(model, torch.rand(2, 6).double(), torch.tensor([1, 2]))
    together, _ = matching._plan(updates[0], 2, None, 3)
    assert together == 1
    side = attacks.match_gradients(updates, steps=4, seed=3)
    for i, result in enumerate(side):
        assert torch.equal(result.pixels, attacks.match_gradients(updates[i], steps=4, seed=3 + i).pixels)


def test_statistics_of_the_batch_are_not_shared():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 3)).double()
    update = client.gradient(model, torch.rand(2, 1, 5, 5).double(), torch.tensor([0, 1]), mode="train")
    assert matching._plan(update, 2, None, 3)[0] == 1
    with pytest.raises(ValueError, match=r"1\.weight has no gradient for each of 2 runs"):
        stack(model, "train", list(update.gradient), 2)


def test_a_large_network_uses_the_fast_layers_alone_and_a_small_one_does_not(monkeypatch):
    update = client.gradient(victims.lenet(), torch.rand(1, 3, 32, 32), torch.tensor([3]))
    assert matching._plan(update, 1, None, 10) == (1, False)
    monkeypatch.setattr(matching, "WORTH_IT", 1)
    assert matching._plan(update, 1, None, 10) == (1, True)
    assert matching._plan(update, 5, 1, 10) == (1, True)
    assert matching._plan(update, 5, 3, 10) == (3, True)
    monkeypatch.setattr(matching, "CPU_ROOM", 1)
    assert matching._plan(update, 5, None, 10) == (1, True)


# --- the work ---


def operations(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_a_step_costs_seven_forward_passes():
    model = victims.convnet(4)
    update = client.gradient(model, torch.rand(1, 3, 32, 32), torch.tensor([3]))
    pixels = torch.rand(1, 1, 3, 32, 32, requires_grad=True)
    forward = operations(lambda: model(pixels[0]))
    match = matching._Match([update], "cosine", 0.0)
    # the first layer's input gradient is the one product that matching does not need in the first pass
    assert operations(lambda: match(pixels)) <= 7.1 * forward


@pytest.mark.parametrize("fast", [True, False])
def test_the_model_is_left_as_it_was(fast):
    model = victims.convnet(2)
    before = copy.deepcopy(model.state_dict())
    update = client.gradient(model, torch.rand(1, 3, 32, 32), torch.tensor([3]))
    matching._Match([update], "cosine", 0.0, fast=fast)(torch.rand(1, 1, 3, 32, 32, requires_grad=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
