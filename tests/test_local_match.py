"""The match of a change of weights: its slope against finite differences, and one step against a plain gradient."""

import pytest
import torch
from torch import nn

from gradinv import attacks, client, metrics
from gradinv.attacks import matching
from gradinv.client import LocalTraining


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 4 * 3, 4)).double().eval()


def pictures(n):
    return torch.rand(n, 1, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 4


LOCAL = [
    LocalTraining(),
    LocalTraining(epochs=3, lr=0.3),
    LocalTraining(epochs=2, batch_size=2, lr=0.5, momentum=0.9, weight_decay=0.05),
    LocalTraining(epochs=2, batch_size=2, lr=0.5, shuffle=1),
]


@pytest.mark.parametrize("objective", ["cosine", "euclidean"])
@pytest.mark.parametrize("local", LOCAL, ids=range(len(LOCAL)))
@pytest.mark.parametrize("hidden", [False, True])
def test_slope_agrees_with_finite_differences(local, objective, hidden):
    update = client.local_update(net(), *pictures(3), local, reveal_labels=not hidden)
    match = matching._LocalMatch([update], objective, 0.01)
    torch.manual_seed(1)
    unknowns = [torch.rand(1, 3, 1, 6, 5, dtype=torch.float64), *([torch.randn(1, 3, 4).double()] if hidden else [])]
    unknowns = [unknown.requires_grad_(True) for unknown in unknowns]
    _, _, slopes = match(*unknowns)
    for i, slope in enumerate(slopes):
        way, step = torch.randn_like(slope), 1e-6
        ahead, behind = (
            match(*[u + sign * step * way if j == i else u for j, u in enumerate(unknowns)])[1] for sign in (1, -1)
        )
        assert float((slope * way).sum()) == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("local", LOCAL, ids=range(len(LOCAL)))
def test_the_truth_matches(local):
    pixels, labels = pictures(3)
    update = client.local_update(net(), pixels, labels, local)
    data, _, slopes = matching._LocalMatch([update], "cosine", 0.0)(pixels[None].clone().requires_grad_(True))
    assert data < 1e-20 and slopes[0].abs().max() < 1e-8


def test_an_attack_through_local_steps_finds_the_picture():
    pixels, labels = pictures(1)
    update = client.local_update(net(), pixels, labels, LocalTraining(epochs=5, lr=0.1))
    result = attacks.match_gradients(update, objective="euclidean", optimizer="lbfgs", steps=40, box=False)
    assert metrics.psnr(result.pixels, pixels).item() > 60
