"""What the last layer says: the label, and the factor of the loss."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradinv import attacks, client, victims
from gradinv.attacks.labels import found_scale, last_layer
from gradinv.attacks.reconstruction import norm
from gradinv.client import LocalTraining


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
        assert found_scale(update, last_layer(update)) == pytest.approx(scale, rel=1e-3)


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
        lambda: update_of(victims.fc((12, 6, 1)), 1, shape=(12,), loss="logistic"),
        lambda: update_of(Halved(), shape=(12,)),
        lambda: update_of(Again(), shape=(4,)),
        lambda: update_of(InPlace(), shape=(4,)),
        lambda: update_of(nn.Sequential(nn.Unflatten(1, (4, 3)), nn.Linear(3, 1), nn.Flatten()), shape=(12,)),
    ],
    ids=["logistic", "changed outputs", "twice", "in place", "many vectors"],
)
def test_what_cannot_be_read_is_said(update):
    update = update()
    assert found_scale(update, last_layer(update)) is None
    with pytest.raises(ValueError, match="labels can be restored from cross-entropy"):
        attacks.restore_labels(update)
    with pytest.raises(ValueError, match="labels can be restored from cross-entropy"):
        attacks.least_counts(update)


def test_a_gradient_that_was_changed_has_no_scale():
    update = update_of(victims.lenet())
    update.gradient["7.weight"].add_(0.1 * torch.randn_like(update.gradient["7.weight"]))
    assert found_scale(update, last_layer(update)) is None


def test_a_confident_network_has_no_scale():
    model = victims.fc((12, 6, 4))
    with torch.no_grad():
        model[3].bias[2] += 30
    update = update_of(model, shape=(12,))
    assert found_scale(update, last_layer(update)) is None


def test_a_network_that_is_one_layer():
    update = update_of(nn.Linear(12, 4), shape=(12,))
    assert attacks.restore_labels(update).tolist() == [2]
    assert found_scale(update, last_layer(update)) == pytest.approx(1, rel=1e-4)


# --- batches ---

DUPLICATES = [7, 7, 7, 0, 2, 2, 9, 4]


def batch_of(model, labels=DUPLICATES, **options):
    pixels = torch.rand(len(labels), 3, 32, 32, generator=torch.Generator().manual_seed(5))
    return client.gradient(model, pixels, torch.tensor(labels), reveal_labels=False, **options)


def no_bias(model):
    """The same without a bias on its last layer."""
    [*_, last] = (module for module in model.modules() if isinstance(module, nn.Linear))
    last.bias = None
    return model


def signed():
    return no_bias(victims.fc((3072, 128, 64, 10), activation="tanh"))


def changed(update, **changes):
    return dataclasses.replace(update, **changes)


@pytest.mark.parametrize("loss_scale", [1.0, 8.0], ids=["mean", "sum"])
@pytest.mark.parametrize("name", NETWORKS)
def test_counts_of_a_batch(name, loss_scale):
    torch.manual_seed(0)
    update = batch_of(NETWORKS[name](), scale=loss_scale)
    assert attacks.restore_labels(update).tolist() == sorted(DUPLICATES)


@pytest.mark.parametrize("make", [lambda: no_bias(victims.convnet(4)), signed], ids=["positive", "signed"])
def test_counts_without_a_bias(make):
    torch.manual_seed(0)
    assert attacks.restore_labels(batch_of(make())).tolist() == sorted(DUPLICATES)


def test_different_labels_come_as_a_set_in_ascending_order():
    torch.manual_seed(0)
    update = batch_of(victims.convnet(4), [2, 0, 3])
    assert attacks.restore_labels(update).tolist() == [0, 2, 3]
    assert attacks.least_counts(update)[[0, 2, 3]].tolist() == [1, 1, 1]


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("sure", [1.0, 60.0])
def test_one_label_without_a_bias(classes, label, sure):
    torch.manual_seed(classes)
    model = victims.fc((12, 40, classes), bias=False).double()
    with torch.no_grad():
        model[-1].weight.mul_(sure)
    update = client.gradient(model, torch.rand(1, 12).double(), torch.tensor([label]), reveal_labels=False)
    assert attacks.restore_labels(update).tolist() == [label]


def test_only_the_bias_was_sent():
    torch.manual_seed(0)
    update = batch_of(victims.convnet(4))
    [*_, name] = update.gradient
    only = changed(update, gradient={name: update.gradient[name]})
    assert attacks.restore_labels(only).tolist() == sorted(DUPLICATES)


def test_only_the_weight_was_sent():
    torch.manual_seed(0)
    update = batch_of(victims.convnet(4))
    [*_, name, _] = update.gradient
    only = changed(update, gradient={name: update.gradient[name]})
    assert attacks.restore_labels(only).tolist() == sorted(DUPLICATES)
    assert not attacks.least_counts(only).any()


def sure_network():
    """Gives a class by the brightest of four pixels, and is rather sure of it."""
    model = nn.Linear(4, 4).double()
    with torch.no_grad():
        model.weight.copy_(9 * torch.eye(4))
        model.bias.zero_()
    return model


def test_public_pictures_tell_what_a_sure_network_says():
    torch.manual_seed(0)
    model, pixels = sure_network(), torch.rand(4000, 4).double()
    drawn = model(pixels).softmax(1).multinomial(1)[:, 0]  # it is as often right as it says
    chosen = torch.cat([(drawn == 0).nonzero()[:400, 0], (drawn == 1).nonzero()[:100, 0]])
    update = client.gradient(model, pixels[chosen], drawn[chosen], reveal_labels=False)
    wrong = [
        (attacks.restore_labels(update, **known).bincount(minlength=4) - torch.tensor([400, 100, 0, 0])).abs().sum()
        for known in ({"public": torch.rand(1000, 4).double()}, {})
    ]
    assert wrong[0] <= 20 and wrong[1] >= 100


@pytest.mark.parametrize(
    ("public", "message"),
    [
        (torch.rand(3, 5).double(), "public must hold pictures of shape"),
        (torch.rand(0, 4).double(), "empty batch"),
        (2 + torch.rand(3, 4).double(), r"must lie in \[0, 1\]"),
        (torch.rand(3, 4), "float32"),
    ],
)
def test_public_pictures_must_fit(public, message):
    update = client.gradient(sure_network(), torch.rand(2, 4).double(), torch.tensor([0, 1]), reveal_labels=False)
    with pytest.raises(ValueError, match=message):
        attacks.restore_labels(update, public=public)


@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=12), seed=st.integers(0, 99), scale=st.floats(0.1, 9))
def test_least_counts_are_never_too_many(labels, seed, scale):
    torch.manual_seed(seed)
    model = victims.fc((6, 5, 4)).double()
    with torch.no_grad():
        model[-1].weight.mul_(scale)
    labels = torch.tensor(labels)
    update = client.gradient(model, torch.rand(len(labels), 6).double(), labels, reveal_labels=False)
    least, counted = attacks.least_counts(update), attacks.restore_labels(update)
    assert (least <= labels.bincount(minlength=4)).all()
    assert len(counted) == len(labels) and (counted.bincount(minlength=4) >= least).all()
    assert counted.tolist() == sorted(counted.tolist())


# --- odd gradients ---


def small_batch(model=None):
    model = model or victims.fc((12, 7, 4), activation="tanh").double()
    return client.gradient(model, torch.rand(4, 12).double(), torch.tensor([0, 1, 1, 3]), reveal_labels=False)


def times(update, factor):
    return changed(update, gradient={name: value * factor for name, value in update.gradient.items()})


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused(factor):
    for read_off in (attacks.restore_labels, attacks.least_counts):
        with pytest.raises(ValueError, match="update must be finite"):
            read_off(times(small_batch(), factor))


def test_a_search_goes_on_without_the_updates_that_say_nothing():
    update = small_batch()
    odd = [times(update, factor) for factor in (float("nan"), 0.0, 1.0)]
    found = attacks.match_gradients(odd, steps=1)
    assert [one.status for one in found] == ["not applicable", "weak gradient", "approximate"]
    assert found[2].labels.tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("factor", [1e-200, 1e-12, 1e12, 1e200])
def test_a_gradient_of_any_size_is_counted(factor):
    assert len(attacks.restore_labels(times(small_batch(), factor))) == 4


def test_a_bias_gradient_that_is_all_zero_is_counted_somehow():
    update = small_batch()
    update.gradient["4.bias" if "4.bias" in update.gradient else "3.bias"].zero_()
    assert len(attacks.restore_labels(update)) == 4


def test_one_picture_whose_gradient_was_rounded_away_has_no_label():
    model = victims.fc((12, 6, 4))
    with torch.no_grad():
        model[3].bias[2] = 200
    update = update_of(model, shape=(12,))
    with pytest.raises(ValueError, match="the label cannot be told"):
        attacks.restore_labels(update)
    assert attacks.walk_back(update).labels is None
    attacks.match_gradients(update, steps=1)


def test_more_pictures_than_declared_are_no_proof():
    with pytest.raises(ValueError, match="batch_size or scale is not what the client used"):
        attacks.least_counts(changed(small_batch(), scale=1e-3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_rounding_proves_no_picture(dtype, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 10))
    with torch.no_grad():
        model[2].bias[5] = -12  # a class that the model has never seen
    labels = torch.randint(0, 10, (64,))
    pixels, count = torch.rand(64, 6), labels.bincount(minlength=10)
    plain = client.gradient(model.to(dtype), pixels.to(dtype), labels)
    assert (attacks.least_counts(plain) <= count).all()
    for local in (LocalTraining(lr=1e-4), LocalTraining(epochs=5, batch_size=16, lr=1e-3)):
        update = client.local_update(model.float(), pixels, labels, local)
        assert (attacks.least_counts(update) <= count).all()


def test_a_shared_bias_tells_nothing():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(5, 4), nn.Linear(12, 4)
            self.up = nn.Linear(4, 5)
            self.first.bias = self.last.bias

        def forward(self, x):
            return self.last(torch.tanh(self.up(self.first(x))))

    assert last_layer(small_batch(Tied().double())) is None


def test_outputs_that_change_in_train_mode_only_tell_nothing():
    class Tripled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = victims.fc((12, 6, 4)).double()

        def forward(self, x):
            return self.net(x) * (3 if self.training else 1)

    pixels = torch.rand(2, 12).double()
    for mode, there in (("eval", True), ("train", False)):
        update = client.gradient(Tripled(), pixels, torch.tensor([0, 1]), mode=mode)
        assert (last_layer(update) is not None) == there


def test_a_network_without_layers_of_its_own_has_no_last_one():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 4).double()

        def forward(self, x):
            return nn.functional.linear(x, self.layer.weight, self.layer.bias)

    assert last_layer(small_batch(Functional())) is None
    assert attacks.match_gradients(small_batch(Functional()), steps=1).status == "approximate"


# --- changes of weights ---

TRAININGS = {
    "one step": LocalTraining(lr=0.1),
    "decay": LocalTraining(lr=0.1, weight_decay=0.5),
    "many steps": LocalTraining(epochs=10, lr=0.01),
    "batches": LocalTraining(epochs=3, batch_size=2, lr=0.01),
    "a last batch that is smaller": LocalTraining(epochs=2, batch_size=3, lr=0.01, shuffle=4),
    "momentum and decay": LocalTraining(epochs=5, lr=0.01, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_counts_from_a_change_of_weights(name):
    torch.manual_seed(0)
    pixels = torch.rand(len(DUPLICATES), 3, 32, 32, generator=torch.Generator().manual_seed(5))
    model, local = victims.convnet(4), TRAININGS[name]
    update = client.local_update(model, pixels, torch.tensor(DUPLICATES), local, reveal_labels=False)
    assert attacks.restore_labels(update).tolist() == sorted(DUPLICATES)


@pytest.mark.parametrize("local", [LocalTraining(lr=0.1, weight_decay=0.5), LocalTraining(epochs=4, momentum=0.9)])
def test_a_proof_from_a_change_of_weights(local):
    model, labels = victims.fc((6, 5, 4)).double(), torch.tensor([0, 0, 3])
    least = attacks.least_counts(client.local_update(model, torch.rand(3, 6).double(), labels, local))
    assert least.any() and (least <= labels.bincount(minlength=4)).all()


@pytest.mark.parametrize(
    "local",
    [LocalTraining(batch_size=2), LocalTraining(batch_size=1, momentum=0.5), LocalTraining(epochs=2, weight_decay=0.1)],
)
def test_no_proof_where_pictures_count_unlike(local):
    update = client.local_update(victims.fc((6, 5, 4)), torch.rand(3, 6), torch.tensor([0, 0, 3]), local)
    with pytest.raises(ValueError, match="count every picture alike"):
        attacks.least_counts(update)


@pytest.mark.parametrize("name", ["one step", "decay"])
def test_the_mean_gradient_of_one_step_is_the_gradient(name):
    model, pixels, labels = victims.fc((6, 5, 4)).double(), torch.rand(3, 6).double(), torch.tensor([0, 1, 3])
    one = client.mean_gradient(client.local_update(model, pixels, labels, TRAININGS[name]))
    for key, value in client.gradient(model, pixels, labels).gradient.items():
        torch.testing.assert_close(one.gradient[key], value, rtol=0, atol=1e-12)
    assert one.local is None and one.model is model


@pytest.mark.parametrize(
    "local", [LocalTraining(8, lr=1e-3), LocalTraining(8, lr=1e-3, momentum=0.9, weight_decay=0.1)]
)
def test_the_mean_gradient_of_many_steps_is_that_at_the_mean_place(local):
    model, pixels, labels = (
        victims.fc((6, 5, 4), activation="tanh").double(),
        torch.rand(3, 6).double(),
        torch.arange(3),
    )
    mean = client.mean_gradient(client.local_update(model, pixels, labels, local))
    here = client.gradient(model, pixels, labels).gradient
    there = client.gradient(mean.model, pixels, labels).gradient
    far = norm(value - here[key] for key, value in mean.gradient.items())
    assert norm(value - there[key] for key, value in mean.gradient.items()) < 0.01 * far


def test_a_gradient_is_its_own_mean():
    update = update_of(victims.fc((12, 6, 4)), shape=(12,))
    assert client.mean_gradient(update) is update
