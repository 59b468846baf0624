"""What the last layer says: the label, and the factor of the loss."""

import pytest
import torch
from torch import nn

from gradinv import attacks, client, victims
from gradinv.attacks.labels import found_scale, last_bias


def update_of(model, label=2, n=1, shape=(3, 32, 32), **options):
    return client.gradient(model, torch.rand(n, *shape), torch.full((n,), label), reveal_labels=False, **options)


NETWORKS = {
    "lenet": victims.lenet,
    "convnet": lambda: victims.convnet(4),
    "resnet": lambda: victims.resnet(20, 4),
    "fc": lambda: victims.fc((3072, 20, 10), bias="last"),
}


@pytest.mark.parametrize("label", [0, 4, 9])
@pytest.mark.parametrize("name", NETWORKS)
def test_label_and_scale_are_read_off(name, label):
    model = NETWORKS[name]()
    for scale in (0.5, 1.0, 32.0):
        update = update_of(model, label, scale=scale)
        assert attacks.restore_labels(update).tolist() == [label]
        assert found_scale(update, last_bias(update)) == pytest.approx(scale, rel=1e-3)


class Halved(nn.Module):
    """Does something to the outputs of its last layer."""

    def __init__(self):
        super().__init__()
        self.net = victims.fc((12, 6, 4))

    def forward(self, x):
        return self.net(x) / 2


class Again(nn.Module):
    """Runs its last layer twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


class InPlace(nn.Module):
    """Changes the outputs of its last layer where they lie."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).mul_(20)


@pytest.mark.parametrize(
    "update",
    [
        lambda: update_of(victims.fc((12, 6, 4)), n=2, shape=(12,)),
        lambda: update_of(victims.fc((12, 6, 4), bias=False), shape=(12,)),
        lambda: update_of(victims.fc((12, 6, 1)), 1, shape=(12,), loss="logistic"),
        lambda: update_of(Halved(), shape=(12,)),
        lambda: update_of(Again(), shape=(4,)),
        lambda: update_of(InPlace(), shape=(4,)),
        lambda: update_of(nn.Sequential(nn.Unflatten(1, (4, 3)), nn.Linear(3, 1), nn.Flatten()), shape=(12,)),
    ],
    ids=["batch", "no bias", "logistic", "changed outputs", "twice", "in place", "many vectors"],
)
def test_what_cannot_be_read_is_said(update):
    update = update()
    assert found_scale(update, last_bias(update)) is None
    with pytest.raises(ValueError, match=r"labels can be restored (for one picture|from the bias)"):
        attacks.restore_labels(update)


def test_a_gradient_that_was_changed_has_no_scale():
    update = update_of(victims.lenet())
    update.gradient["7.weight"].add_(0.1 * torch.randn_like(update.gradient["7.weight"]))
    assert found_scale(update, last_bias(update)) is None


def test_a_confident_network_has_no_scale():
    model = victims.fc((12, 6, 4))
    with torch.no_grad():
        model[3].bias[2] += 30
    update = update_of(model, shape=(12,))
    assert found_scale(update, last_bias(update)) is None


def test_a_network_that_is_one_layer():
    update = update_of(nn.Linear(12, 4), shape=(12,))
    assert attacks.restore_labels(update).tolist() == [2]
    assert found_scale(update, last_bias(update)) == pytest.approx(1, rel=1e-4)
