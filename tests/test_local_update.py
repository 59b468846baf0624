"""Local training: the client's steps against a loop written by hand."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from gradinv import client, victims
from gradinv.client import LocalTraining


def net():
    torch.manual_seed(0)
    return victims.fc((12, 7, 4), activation="tanh").double()


def pictures(n=5):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, 12, dtype=torch.float64, generator=generator), torch.arange(n) % 4


def by_hand(model, pixels, labels, local):
    """SGD with momentum and weight decay, written out."""
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    speed = {name: torch.zeros_like(value) for name, value in weights.items()}
    for chosen in local.batches(len(pixels)):
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        outputs = torch.func.functional_call(model, leaves, pixels[chosen])
        slopes = torch.autograd.grad(functional.cross_entropy(outputs, labels[chosen]), list(leaves.values()))
        for (name, value), slope in zip(weights.items(), slopes, strict=True):
            speed[name] = local.momentum * speed[name] + slope + local.weight_decay * value
            weights[name] = value - local.lr * speed[name]
    return {name: value.detach() - weights[name] for name, value in model.named_parameters()}


@settings(max_examples=25, deadline=None)
@given(
    epochs=st.integers(1, 4),
    batch_size=st.sampled_from([None, 1, 2, 3, 7]),
    lr=st.sampled_from([1e-4, 0.1, 1.0]),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    shuffle=st.sampled_from([None, 0, 3]),
)
def test_the_steps_are_those_of_a_loop_by_hand(**options):
    model, local = net(), LocalTraining(**options)
    update = client.local_update(model, *pictures(), local)
    for name, value in by_hand(model, *pictures(), local).items():
        torch.testing.assert_close(update.gradient[name], value, rtol=1e-10, atol=1e-14)
    assert update.local == local and update.batch_size == 5


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_one_step_is_the_gradient_times_its_size(dtype, close):
    model, (pixels, labels) = net().to(dtype), pictures()
    update = client.local_update(model, pixels.to(dtype), labels, LocalTraining(lr=0.5, momentum=0.9))
    for name, value in client.gradient(model, pixels.to(dtype), labels).gradient.items():
        torch.testing.assert_close(update.gradient[name] / 0.5, value, rtol=0, atol=close)


def test_batches_cover_every_epoch_and_keep_the_last_part():
    steps = LocalTraining(epochs=3, batch_size=4, shuffle=0).batches(10)
    assert [len(step) for step in steps] == [4, 4, 2] * 3
    epochs = [torch.cat(steps[i : i + 3]) for i in (0, 3, 6)]
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    assert [step.tolist() for step in LocalTraining(batch_size=2).batches(3)] == [[0, 1], [2]]


def test_the_model_stays_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()
    model[0].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    update = client.local_update(model, *pictures(), LocalTraining(epochs=2), mode="train", reveal_labels=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "0.bias" not in update.gradient and update.labels is None and model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 0.0}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"shuffle": -1}, "shuffle"),
    ],
)
def test_a_number_out_of_range_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        LocalTraining(**options)


def test_a_training_that_leaves_the_finite_numbers_says_so():
    with pytest.raises(ValueError, match="lr must be small enough"):
        client.local_update(net().float(), pictures()[0].float(), pictures()[1], LocalTraining(5, lr=1e38))
