"""Unmixing a minibatch: every picture exactly, what cannot be unmixed, and that no picture is invented."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradinv import attacks, client, data, victims
from gradinv.attacks import unmix


def batch(n, seed=0):
    return torch.rand(n, 1, 5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normed(*sizes, activation=nn.ReLU, seed=0):
    """A fully connected network that makes its pixels lie around zero."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(victims.Normalize((0.5,), (0.3,)), nn.Flatten(), *layers[:-1]).double().eval()


def error(found, truth):
    """The largest error of any picture against the nearest one found."""
    return max((found - one).abs().flatten(1).max(1).values.min().item() for one in truth)


def invented(found, truth):
    """The largest error of any picture that was found against the nearest true one."""
    return error(truth, found)


def sent(model, pixels, labels=None, **options):
    labels = torch.arange(len(pixels)) % 4 if labels is None else torch.tensor(labels)
    return client.gradient(model, pixels, labels, **options)


def changed(update, change):
    return dataclasses.replace(update, gradient={name: change(name, value) for name, value in update.gradient.items()})


@pytest.mark.parametrize("n", [1, 2, 6, 12])
def test_a_batch_is_exact_and_gives_its_gradient_back(n):
    pixels = batch(n)
    update = sent(normed(40, 200, 50, 4), pixels, reveal_labels=False)
    result = unmix(update)
    assert result.status == "recovered" and len(result.pixels) == n
    assert error(result.pixels, pixels) < 1e-12 and result.loss < 1e-12
    again = client.gradient(update.model, result.pixels.clamp(0, 1), result.labels)
    for name, value in update.gradient.items():
        torch.testing.assert_close(again.gradient[name], value, rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 9),
    seed=st.integers(0, 2**16),
    hidden=st.booleans(),
    depth=st.integers(0, 2),
    scale=st.sampled_from([1.0, 0.01, 5.0]),
    declared=st.booleans(),
)
def test_any_small_batch_of_a_wide_network(n, seed, hidden, depth, scale, declared):
    pixels, labels = batch(n, seed), torch.randint(4, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    model = normed(40, 240, *[60] * depth, 4, seed=seed)
    update = sent(model, pixels, labels, reveal_labels=not hidden, scale=scale)
    result = unmix(update if declared else dataclasses.replace(update, scale=1.0))
    assert result.status == "recovered" and error(result.pixels, pixels) < 1e-9
    nearest = torch.cdist(pixels.flatten(1), result.pixels.flatten(1)).argmin(1)
    assert [result.labels[i].item() for i in nearest] == labels


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 12),
    width=st.integers(6, 40),
    classes=st.sampled_from([1, 2, 3, 10]),
    shift=st.sampled_from([0.0, 0.5, 1.0]),
    scale=st.sampled_from([1.0, 0.5, 3.0]),
    seed=st.integers(0, 2**16),
)
def test_no_picture_is_ever_invented(n, width, classes, shift, scale, seed):
    pixels, generator = batch(n, seed), torch.Generator().manual_seed(seed)
    model = normed(40, width, classes, seed=seed)
    with torch.no_grad():
        model[2].bias += shift  # so that units treat the pictures alike
    labels, loss = torch.randint(classes, (n,), generator=generator), "cross_entropy"
    if classes == 1:
        labels, loss = 2 * torch.randint(2, (n,), generator=generator) - 1, "logistic"
    update = client.gradient(model, pixels, labels, loss=loss, reveal_labels=False, scale=scale)
    result = unmix(dataclasses.replace(update, scale=1.0), patience=3)
    assert result.status in ("recovered", "approximate")
    assert result.pixels is None or invented(result.pixels, pixels) < 1e-6
    if result.status == "recovered":
        assert len(result.pixels) == n and sorted(result.labels.tolist()) == sorted(labels.tolist())


@pytest.mark.parametrize("last", [-40.0, 0.0])
@pytest.mark.parametrize("classes", [1, 2, 10])
def test_pictures_of_one_direction_are_not_their_mean(classes, last):
    pixels, model = batch(3), normed(40, 30, classes)
    with torch.no_grad():
        model[2].bias += 5.0  # every unit is on
        model[-1].bias[0] += last  # and the network is sure
    labels, loss = torch.zeros(3, dtype=torch.int64), "logistic" if classes == 1 else "cross_entropy"
    update = client.gradient(model, pixels, labels + (classes == 1), loss=loss, reveal_labels=False)
    result = unmix(update, patience=3)
    assert result.pixels is None or invented(result.pixels, pixels) < 1e-6


@pytest.mark.parametrize("difference", [1e-6, 1e-5, 1e-4, 1e-3])
def test_near_duplicates_with_one_logit(difference):
    pixels = batch(2)[[0, 0, 1]]
    pixels[1, 0, 2, 2] += difference
    update = client.gradient(normed(40, 200, 1), pixels, torch.tensor([1, 1, -1]), loss="logistic")
    result = unmix(update, patience=3)
    assert result.pixels is None or invented(result.pixels, pixels) < 1e-6


def test_a_thousand_classes():
    pixels = batch(3)
    result = unmix(sent(normed(40, 200, 1000), pixels, [7, 500, 999], reveal_labels=False))
    assert result.status == "recovered" and sorted(result.labels.tolist()) == [7, 500, 999]


@pytest.mark.parametrize("seed", range(3))
def test_single_precision_invents_nothing_either(seed):
    pixels = batch(6, seed).float()
    result = unmix(sent(normed(40, 24, 4, seed=seed).float(), pixels), patience=3)
    assert result.pixels is None or invented(result.pixels, pixels) < 1e-3


@pytest.mark.parametrize("difference", [1e-7, 1e-5, 1e-3])
def test_near_duplicates_are_not_called_recovered(difference):
    pixels = batch(5)
    pixels[1] = pixels[0]
    pixels[1, 0, 2, 2] += difference
    result = unmix(sent(normed(40, 200, 4), pixels, [0, 0, 1, 2, 3]), patience=5)
    assert result.status == "approximate" or error(result.pixels, pixels) < 1e-6


def test_a_repeated_picture_is_found_once_and_counted():
    pixels = batch(3)[[0, 1, 2, 1, 1]]
    result = unmix(sent(normed(40, 200, 4), pixels, [0, 1, 2, 1, 1], reveal_labels=False))
    assert result.status == "recovered" and len(result.pixels) == 3 and "3 different of" in result.why
    assert error(result.pixels, pixels) < 1e-10 and sorted(result.labels.tolist()) == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("reveal_labels", [True, False])
def test_a_picture_with_two_labels_is_one_picture(reveal_labels):
    pixels = batch(3)[[0, 1, 2, 1, 1]]
    result = unmix(sent(normed(40, 200, 4), pixels, [0, 1, 2, 3, 3], reveal_labels=reveal_labels))
    assert result.status == "recovered" and len(result.pixels) == 3
    assert sorted(result.labels.tolist()) == [0, 1, 2, 3, 3]


def test_look_alikes_are_left_out_and_the_others_stay_certain():
    pixels = batch(5)
    pixels[1] = 0.999 * pixels[0]
    result = unmix(sent(normed(40, 200, 4), pixels, [0, 0, 1, 2, 3]))
    assert result.status == "approximate" and 2 <= len(result.pixels) <= 4
    assert invented(result.pixels, pixels) < 1e-6


def test_one_pattern_for_all_hides_all():
    model = normed(40, 60, 4)
    with torch.no_grad():
        model[2].bias += 100.0  # every unit is on
    result = unmix(sent(model, batch(4)), patience=3)
    assert result.status == "approximate" and result.pixels is None and "0 of 3 directions" in result.why


@pytest.mark.parametrize("sizes", [(40, 60, 200, 4), (40, 12, 200, 4), (40, 80, 80, 200, 4), (40, 200, 60, 200, 4)])
def test_any_layer_of_a_stack_will_do(sizes):
    pixels = batch(6)
    update = sent(normed(*sizes), pixels)
    part = {name: value for name, value in update.gradient.items() if name != "2.bias"}
    for each in (update, dataclasses.replace(update, gradient=part)):
        result = unmix(each)
        assert result.status == "recovered" and error(result.pixels, pixels) < 1e-9


def test_the_layer_that_sees_the_picture_will_do_whatever_follows():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(40, 200), nn.ReLU(), nn.Unflatten(1, (2, 10, 10))),
        *(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(192, 4)),
    )
    pixels = batch(5)
    result = unmix(sent(model.double().eval(), pixels))
    assert result.status == "recovered" and error(result.pixels, pixels) < 1e-9


class Forked(nn.Module):
    """A layer whose ReLU is taken more than once."""

    def __init__(self, kind):
        super().__init__()
        self.flat = nn.Sequential(victims.Normalize((0.5,), (0.3,)), nn.Flatten())
        self.first, self.relu = nn.Linear(40, 200), nn.ReLU()
        self.second, self.third = nn.Linear(200, 200 if kind == "twice" else 4), nn.Linear(200, 4)
        self.kind = kind

    def forward(self, x):
        h = self.relu(self.first(self.flat(x)))
        if self.kind == "two heads":
            return self.second(h) + self.third(h)
        if self.kind == "skip":
            return self.third(h) + self.second(h.tanh())
        return self.third(self.second(self.second(h)))


@pytest.mark.parametrize("kind", ["two heads", "skip", "twice"])
def test_what_comes_after_the_relu_may_fork(kind):
    torch.manual_seed(0)
    pixels = batch(4)
    result = unmix(sent(Forked(kind).double().eval(), pixels))
    assert result.status == "recovered" and error(result.pixels, pixels) < 1e-9


def test_a_relu_in_place():
    torch.manual_seed(0)
    pixels = batch(4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(40, 90), nn.ReLU(inplace=True), nn.Linear(90, 4)).double()
    result = unmix(sent(model.eval(), pixels))
    assert result.status == "recovered" and error(result.pixels, pixels) < 1e-9


@pytest.mark.parametrize("centred", [True, False])
def test_a_black_picture_is_a_picture(centred):
    pixels = batch(4)
    pixels[2] = 0.5 if centred else 0.0
    model = normed(40, 200, 4) if centred else victims.fc((40, 200, 4)).double()
    result = unmix(sent(model, pixels))
    assert result.status == "recovered" and error(result.pixels, pixels) < 1e-9


def test_single_precision():
    pixels = batch(8).float()
    result = unmix(sent(normed(40, 200, 4).float(), pixels))
    assert result.status == "recovered" and result.pixels.dtype == torch.float32
    assert error(result.pixels, pixels) < 1e-4


@pytest.mark.parametrize("relative", [1e-6, 1e-3, 1e-2])
def test_noise_costs_precision_and_is_said(relative):
    pixels, generator = batch(6), torch.Generator().manual_seed(0)
    update = sent(normed(40, 300, 4), pixels)
    size = torch.cat([value.flatten() for value in update.gradient.values()])
    std = relative * size.norm() / len(size) ** 0.5
    noisy = changed(update, lambda _, value: value + std * torch.randn(value.shape, generator=generator).double())
    result = unmix(noisy)
    assert result.status == "approximate" and len(result.pixels) == 6
    assert error(result.pixels, pixels) < 100 * relative


def test_a_logistic_loss():
    pixels, labels = batch(6), torch.tensor([1, -1, 1, 1, -1, 1])
    update = client.gradient(normed(40, 200, 50, 1), pixels, labels, loss="logistic", reveal_labels=False)
    result = unmix(update)
    assert result.status == "recovered" and error(result.pixels, pixels) < 1e-9
    nearest = torch.cdist(pixels.flatten(1), result.pixels.flatten(1)).argmin(1)
    assert torch.equal(result.labels[nearest], labels)


def test_a_picture_that_leaves_no_trace_is_said_so():
    pixels, model = batch(4), normed(40, 200, 4)
    labels = torch.tensor([0, 1, 2, 3])
    three = client.gradient(model, pixels[:3], labels[:3])
    update = dataclasses.replace(changed(three, lambda _, value: 0.75 * value), batch_size=4, labels=labels)
    result = unmix(update)
    assert len(result.pixels) == 3 and "1 left no trace" in result.why.replace("of which ", "")


def test_sampling_finds_the_same():
    pixels = batch(6)
    update = sent(normed(40, 200, 4), pixels)
    by_luck, by_search = unmix(update, search="sampling"), unmix(update)
    assert by_luck.status == by_search.status == "recovered"
    assert error(by_luck.pixels, by_search.pixels) < 1e-10


@pytest.mark.parametrize("name", ["fc", "fc-epoch5"])
def test_a_trained_network(name):
    images = data.load("cifar10", 4)
    result = unmix(client.gradient(victims.trained(name)[0].double(), images.pixels.double(), images.labels))
    assert result.pixels is None or invented(result.pixels, images.pixels.double()) < 1e-9
    assert name != "fc" or result.status == "recovered"


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh, nn.LeakyReLU])
def test_without_a_relu_nothing_is_sparse(activation):
    result = unmix(sent(normed(40, 60, 4, activation=activation), batch(3)))
    assert result.status == "not applicable" and "ReLU" in result.why


def test_batch_norm_in_train_mode_ties_the_pictures_together():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(40, 60), nn.ReLU(), nn.BatchNorm1d(60), nn.Linear(60, 4)).double()
    assert "ties the pictures" in unmix(sent(model, batch(3), mode="train")).why
    assert unmix(sent(model.eval(), batch(3))).status == "recovered"


@pytest.mark.parametrize(("option", "value"), [("search", "luck"), ("patience", 0), ("seed", -1)])
def test_bad_options_are_named(option, value):
    with pytest.raises(ValueError, match=option):
        unmix(sent(normed(40, 60, 4), batch(3)), **{option: value})


def test_what_the_update_declares_wrongly():
    pixels, model = batch(4), normed(40, 200, 4)
    update = sent(model, pixels, [0, 1, 2, 3])
    few = unmix(dataclasses.replace(update, batch_size=2, labels=None), patience=2)
    assert few.status == "approximate" and few.pixels is None
    wrong = unmix(dataclasses.replace(update, labels=torch.tensor([0, 1, 2, 2])), patience=2)
    assert wrong.status == "approximate"
    with pytest.raises(ValueError, match="labels must lie in 0 to 3"):
        unmix(dataclasses.replace(update, labels=torch.tensor([0, 1, 2, 9])))


def test_pruning_is_not_sparsity():
    update = dataclasses.replace(sent(normed(40, 200, 4), batch(3)), pruned=True)
    assert unmix(update).status == "not applicable" and "left out" in unmix(update).why


def test_a_later_layer_may_send_nothing():
    update = sent(normed(40, 200, 4), batch(3))
    part = changed(update, lambda name, value: 0 * value if name == "4.weight" else value)
    assert unmix(part).status == "approximate"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_a_noisy_gradient(dtype):
    model = normed(40, 200, 4).to(dtype)
    assert unmix(client.gradient(model, batch(2).to(dtype), torch.tensor([0, 1])), patience=2).status in (
        *("approximate", "recovered"),
    )


def test_history_tells_how_the_search_went():
    history = attacks.unmix(sent(normed(40, 200, 4), batch(10))).history
    assert history[-1] == {"layer": "2", "directions": 10, "of": 10, "certain": 10}
    assert all(earlier["directions"] <= later["directions"] for earlier, later in itertools.pairwise(history))
