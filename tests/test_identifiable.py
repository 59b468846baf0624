"""The rank of a gradient's Jacobian: known ranks, lost directions that change nothing, and what is refused."""

import dataclasses

import pytest
import torch
from torch import nn

from gradinv import client, rank, victims

SHAPE = (2, 6, 6)


def update_of(model, shape=SHAPE, n=1, loss="cross_entropy", mode="eval", **options):
    pixels = torch.rand(n, *shape, dtype=next(model.parameters()).dtype)
    labels = torch.zeros(n, dtype=torch.int64) if loss == "cross_entropy" else torch.ones(n, dtype=torch.int64)
    return client.gradient(model, pixels, labels, loss=loss, mode=mode, **options), pixels


def small(filters=2, activation=None):
    conv = nn.Conv2d(2, filters, 3, 2, 1, bias=False)
    head = nn.Linear(9 * filters, 4)
    return nn.Sequential(conv, activation or nn.LeakyReLU(0.2), nn.Flatten(), head).eval()


def gradient_at(model, pixels, label=0):
    value = nn.functional.cross_entropy(model(pixels), torch.tensor([label]))
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, list(model.parameters()))])


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.2), nn.Sigmoid(), nn.Tanh()], ids=str)
@pytest.mark.parametrize("filters", [1, 2, 3, 6])
def test_a_layer_behind_the_picture_loses_what_counting_says(filters, activation):
    model = small(filters, activation)
    expected = rank.generic_nullity(rank.Convolution.of(model[0]), SHAPE[1:])
    found = rank.identifiable(update_of(model)[0])
    assert found.exact and found.nullity == expected
    assert expected > 0 or filters == 6


def test_lost_directions_change_nothing_and_others_do():
    model = small().double()
    update, pixels = update_of(model)
    found = rank.identifiable(update, pixels)
    assert found.lost.shape == (found.nullity, 1, *SHAPE)
    flat = found.lost.flatten(1)
    torch.testing.assert_close(flat @ flat.T, torch.eye(len(flat), dtype=torch.float64))
    here = gradient_at(model, pixels)
    mixed = 1e-3 * torch.randn(len(flat), dtype=torch.float64) @ flat
    assert (gradient_at(model, pixels + mixed.view_as(pixels)) - here).norm() < 1e-9 * here.norm()
    other = torch.randn(1, flat.shape[1], dtype=torch.float64)
    other = 1e-3 * (other - other @ flat.T @ flat)
    assert (gradient_at(model, pixels + other.view_as(pixels)) - here).norm() > 1e-6 * here.norm()


def test_the_rank_is_that_of_the_dense_jacobian():
    model = small(3, nn.Tanh()).double()
    update, pixels = update_of(model)
    parameters = dict(model.named_parameters())

    def gradient(x):
        value = nn.functional.cross_entropy(model(x), torch.tensor([0]))
        parts = torch.autograd.grad(value, list(parameters.values()), create_graph=True)
        return torch.cat([part.flatten() for part in parts])

    dense = torch.autograd.functional.jacobian(gradient, pixels).flatten(1)
    assert rank.identifiable(update, pixels).rank == int(torch.linalg.matrix_rank(dense, rtol=1e-10))


def test_mixing_many_rows_keeps_the_rank(monkeypatch):
    update, pixels = update_of(victims.fc((72, 40, 10), activation="tanh"))
    mixed = rank.identifiable(update, pixels)
    assert sum(value.numel() for value in update.gradient.values()) > 4 * 72
    assert mixed.rank == 72 and mixed.nullity == 0
    narrow, pixels = update_of(nn.Sequential(small(1), nn.Linear(4, 400), nn.Linear(400, 5)))
    assert sum(value.numel() for value in narrow.gradient.values()) > 4 * 72
    lost = rank.generic_nullity(rank.Convolution.of(small(1)[0]), SHAPE[1:])
    assert rank.identifiable(narrow, pixels).nullity == lost > 0


def test_parameters_that_are_not_sent_do_not_count():
    update, pixels = update_of(small(2))
    last = {name: value for name, value in update.gradient.items() if name.startswith("3.")}
    less = rank.identifiable(dataclasses.replace(update, gradient=last), pixels)
    assert less.rank <= 18 < rank.identifiable(update, pixels).rank  # the last layer tells its 18 inputs at most


def test_a_few_probes_bound_the_rank():
    model = small(2)
    update, pixels = update_of(model)
    whole = rank.identifiable(update, pixels)
    few = rank.identifiable(update, pixels, probes=10)
    assert not few.exact and few.rank == 10 and few.unknowns == 72 and few.nullity == 62
    assert few.lost.shape == (0, 1, *SHAPE) and few.values.shape == (10,)
    many = rank.identifiable(update, pixels, probes=71)
    assert not many.exact and many.rank == whole.rank
    assert rank.identifiable(update, pixels, probes=1_000).exact


def test_a_large_picture_is_probed():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 4, 1), nn.Sigmoid(), nn.Flatten(), nn.Linear(4 * 16 * 16, 2)).eval()
    found = rank.identifiable(update_of(model, (3, 64, 64))[0])
    assert not found.exact and found.rank == 64


def test_a_batch_counts_all_its_pixels():
    model = victims.fc((12, 8, 10), activation="sigmoid")
    found = rank.identifiable(update_of(model, (12,), n=2)[0])
    assert found.unknowns == 24 and found.lost.shape == (24 - found.rank, 2, 12)


def test_batch_norm_in_train_mode_is_followed_and_left_alone():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    update, pixels = update_of(model, n=2, mode="train")
    found = rank.identifiable(update, pixels, probes=20)
    assert found.rank > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_black_picture_and_gradients_that_are_rounding():
    model = small(2, nn.Tanh()).double()
    update, _ = update_of(model)
    black = torch.zeros(1, *SHAPE, dtype=torch.float64)
    parameters = list(model.parameters())

    def gradient(x):
        value = nn.functional.cross_entropy(model(x), torch.tensor([0]))
        return torch.cat([part.flatten() for part in torch.autograd.grad(value, parameters, create_graph=True)])

    dense = torch.autograd.functional.jacobian(gradient, black).flatten(1)
    assert rank.identifiable(update, black).rank == int(torch.linalg.matrix_rank(dense, rtol=1e-10))
    normed = nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4))
    update, pixels = update_of(normed, mode="train")
    told = {name: value for name, value in update.gradient.items() if name != "0.bias"}  # it is zero but for rounding
    without = rank.identifiable(dataclasses.replace(update, gradient=told), pixels)
    assert rank.identifiable(update, pixels).rank == without.rank


def test_attention_is_differentiated():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(36, 3)

        def forward(self, x):
            x = x.flatten(2).transpose(1, 2).reshape(len(x), -1, 6)[:, :6]
            return self.head(self.attention(x, x, x, need_weights=False)[0].flatten(1))

    found = rank.identifiable(update_of(Attends().eval())[0])
    assert 0 < found.rank <= 36 and found.nullity >= 36


def test_hidden_labels_and_the_logistic_loss():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(18, 1)).eval()
    shown, pixels = update_of(model, loss="logistic")
    hidden, _ = update_of(model, loss="logistic", reveal_labels=False)
    assert rank.identifiable(shown, pixels).rank == rank.identifiable(hidden, pixels).rank


def test_the_same_seed_gives_the_same_answer():
    update, _ = update_of(small(2))
    one, other = rank.identifiable(update, seed=3), rank.identifiable(update, seed=3)
    assert torch.equal(one.values, other.values) and torch.equal(one.lost, other.lost)


def test_what_does_not_fit_is_named():
    update, pixels = update_of(small(2))
    with pytest.raises(ValueError, match=r"at must have the update's shape \(1, 2, 6, 6\), got \(2, 2, 6, 6\)"):
        rank.identifiable(update, torch.cat([pixels, pixels]))
    with pytest.raises(ValueError, match=r"at must hold finite floating numbers, got torch\.uint8"):
        rank.identifiable(update, torch.zeros(1, *SHAPE, dtype=torch.uint8))
    with pytest.raises(ValueError, match="probes must be at least 1, got 0"):
        rank.identifiable(update, pixels, probes=0)
