"""H-GAP: which of two pictures it takes, and what it does without one of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradinv import attacks, client, victims
from gradinv.attacks import Reconstruction, hybrid, roughness

SHAPE = (1, 9, 8)


@pytest.fixture
def update():
    torch.manual_seed(1)
    return client.gradient(victims.fc((72, 6, 4), activation="sigmoid"), torch.rand(1, *SHAPE), torch.tensor([2]))


def pictures():
    """A rough one and a smooth one."""
    rough = torch.rand(1, *SHAPE)
    return rough, functional.avg_pool2d(rough, 3, 1, 1, count_include_pad=False)


def made(pixels, status="approximate", labels=None, alternatives=()):
    return Reconstruction(pixels, labels, status, f"made to be {status}", 0.5, [1.0], alternatives, 3.0)


def give(monkeypatch, recursive, searched):
    """Both attacks give what was made; the updates and options that they were given."""
    asked = {}

    def r_gap(update, **options):
        asked["r_gap"] = (update, options)
        return recursive

    def dlg(update, **options):
        asked["dlg"] = (update, options)
        return searched

    monkeypatch.setattr(hybrid, "r_gap", r_gap)
    monkeypatch.setattr(hybrid, "dlg", dlg)
    return asked


@pytest.mark.parametrize("smooth_is", ["R-GAP", "DLG"])
def test_it_takes_the_smoother(smooth_is, monkeypatch, update):
    rough, smooth = pictures()
    mine, theirs = made(smooth, "recovered", alternatives=[rough + 1]), made(rough, alternatives=[rough + 2])
    if smooth_is == "DLG":
        mine, theirs = made(rough, "ambiguous", alternatives=[rough + 1]), made(smooth, alternatives=[rough + 2])
    asked = give(monkeypatch, mine, theirs)
    found, taken = attacks.h_gap(update, steps=7), mine if smooth_is == "R-GAP" else theirs
    assert torch.equal(found.pixels, smooth) and found.status == taken.status and found.loss == taken.loss
    assert found.why.startswith(smooth_is) and taken.why in found.why
    assert torch.equal(found.alternatives[0], rough)
    assert [torch.equal(a, b) for a, b in zip(found.alternatives[1:], taken.alternatives, strict=True)] == [True]
    assert found.seconds > 0 and found.seconds != taken.seconds
    assert asked["dlg"][1] == {"steps": 7} and asked["r_gap"][1] == {}


def test_a_tie_goes_to_the_recursive_attack(monkeypatch, update):
    rough, _ = pictures()
    give(monkeypatch, made(rough, "recovered"), made(rough.clone()))
    assert attacks.h_gap(update).status == "recovered"


def test_a_label_that_was_found_is_handed_on(monkeypatch, update):
    rough, smooth = pictures()
    hidden = client.gradient(update.model, torch.rand(1, *SHAPE), torch.tensor([2]), reveal_labels=False)
    asked = give(monkeypatch, made(rough, labels=torch.tensor([3])), made(smooth))
    attacks.h_gap(hidden)
    assert asked["r_gap"][0].labels is None and asked["dlg"][0].labels.tolist() == [3]
    assert hidden.labels is None  # in a copy
    asked = give(monkeypatch, made(rough, labels=torch.tensor([3])), made(smooth))
    attacks.h_gap(update)
    assert asked["dlg"][0].labels.tolist() == [2]  # a known label stays
    asked = give(monkeypatch, made(rough), made(smooth))
    attacks.h_gap(hidden)
    assert asked["dlg"][0].labels is None


@pytest.mark.parametrize("status", ["not applicable", "blocked", "weak gradient"])
def test_without_a_recursive_picture_it_is_dlg(status, monkeypatch, update):
    _, smooth = pictures()
    give(monkeypatch, made(None, status), made(smooth))
    found = attacks.h_gap(update)
    assert torch.equal(found.pixels, smooth) and found.status == "approximate"
    assert "DLG alone" in found.why and f"made to be {status}" in found.why


def test_without_a_searched_picture_it_is_r_gap(monkeypatch, update):
    rough, _ = pictures()
    give(monkeypatch, made(rough, "recovered"), made(None, "not applicable"))
    found = attacks.h_gap(update)
    assert torch.equal(found.pixels, rough) and found.status == "recovered" and "R-GAP alone" in found.why


def test_a_batch_is_dlgs(monkeypatch, update):
    batch = client.gradient(update.model, torch.rand(2, *SHAPE), torch.tensor([2, 0]))
    rough, smooth = pictures()
    give(monkeypatch, made(smooth, "ambiguous"), made(rough.repeat(2, 1, 1, 1)))
    found = attacks.h_gap(batch)
    assert found.pixels.shape == (2, *SHAPE) and "DLG alone" in found.why


def test_a_network_that_is_not_covered_is_dlgs():
    net = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 4))
    found = attacks.h_gap(client.gradient(net, torch.rand(1, *SHAPE), torch.tensor([1])), steps=2)
    assert found.pixels.shape == (1, *SHAPE) and "DLG alone" in found.why and "MaxPool2d" in found.why


def test_features_are_refused():
    update = client.gradient(victims.fc((12, 4)), torch.rand(1, 12), torch.tensor([1]))
    with pytest.raises(ValueError, match=r"h_gap needs pictures \(channels, height, width\), got input_shape=\(12,\)"):
        attacks.h_gap(update)


def test_a_real_recursive_picture_wins_against_noise(monkeypatch):
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(288, 4))
    smooth, noise = torch.linspace(0.2, 0.8, 72).view(1, *SHAPE), torch.rand(1, *SHAPE)
    monkeypatch.setattr(hybrid, "dlg", lambda update: made(noise, labels=update.labels))
    found = attacks.h_gap(client.gradient(net, smooth, torch.tensor([1]), reveal_labels=False))
    assert found.status == "recovered" and found.why.startswith("R-GAP is the smoother")
    assert found.labels.tolist() == [1] and (found.pixels - smooth).abs().max() < 1e-3
    assert torch.equal(found.alternatives[0], noise)


def test_roughness():
    noise, smooth = pictures()
    assert roughness(torch.full((2, 3, 5, 4), 0.7)).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert roughness(noise) > 2 * roughness(smooth) > 0
    both = roughness(torch.cat([noise, smooth]))
    assert both.shape == (2,)
    torch.testing.assert_close(both, torch.cat([roughness(noise), roughness(smooth)]))
    torch.testing.assert_close(roughness(3 * noise), 3 * roughness(noise))
    torch.testing.assert_close(roughness(noise + 0.5), roughness(noise), rtol=1e-4, atol=1e-5)


def test_roughness_by_hand():
    dot = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    dot[0, 0, 1, 1] = 1.0
    # the middle is 8/9 from its mean, an edge pixel 1/6 (of six pixels), a corner 1/4
    expected = ((8 / 9) ** 2 + 4 * (1 / 6) ** 2 + 4 * (1 / 4) ** 2) ** 0.5
    assert roughness(dot).item() == pytest.approx(expected, rel=1e-12)
