"""The match of a change of weights: its slope, what it assumes, its memory; and what closed forms say of one."""

import dataclasses
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from gradinv import attacks, client, defences, metrics, victims
from gradinv.attacks import matching
from gradinv.attacks.reconstruction import norm
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


def test_one_step_is_the_gradient_to_a_search():
    pixels, labels = pictures(2)
    options = {"steps": 5, "init": "grey"}
    plain = attacks.match_gradients(client.gradient(net(), pixels, labels), **options)
    step = attacks.match_gradients(client.local_update(net(), pixels, labels, LocalTraining(lr=0.1)), **options)
    torch.testing.assert_close(step.pixels, plain.pixels)
    torch.testing.assert_close(step.loss, plain.loss, rtol=1e-6, atol=0)


def test_what_a_client_pruned_is_left_out():
    pixels, labels = pictures(2)
    update = defences.prune(client.local_update(net(), pixels, labels, LOCAL[2]), 0.5)
    match = matching._LocalMatch([update], "cosine", 0.0)
    here, there = pixels[None].clone().requires_grad_(True), (pixels[None] + 1e-6).requires_grad_(True)
    assert match(here)[0] < 1e-20 < match(there)[0]


class Unused(nn.Module):
    """Has a layer that takes no part in the loss, which SGD leaves alone."""

    def __init__(self):
        super().__init__()
        self.net, self.aux = net(), nn.Linear(5, 2).double()

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("local", [LOCAL[2], LocalTraining(lr=0.1, weight_decay=0.5)])
def test_what_has_no_part_in_the_loss_does_not_decay(local):
    pixels, labels = pictures(3)
    model = Unused()
    update = client.local_update(model, pixels, labels, local)
    assert matching._LocalMatch([update], "cosine", 0.0)(pixels[None].clone().requires_grad_(True))[0] < 1e-20
    assert not client.mean_gradient(update).gradient["aux.weight"].any()


def test_what_was_not_sent_is_trained_all_the_same():
    pixels, labels = pictures(3)
    update = client.local_update(net(), pixels, labels, LocalTraining(epochs=5, lr=0.5))
    part = dataclasses.replace(update, gradient=dict(list(update.gradient.items())[-2:]))
    data, _, slopes = matching._LocalMatch([part], "cosine", 0.0)(pixels[None].clone().requires_grad_(True))
    assert data < 1e-20 and slopes[0].abs().max() < 1e-8


def test_a_scaled_loss_is_no_local_training():
    update = client.local_update(net(), *pictures(1), LocalTraining())
    with pytest.raises(ValueError, match="local must be a LocalTraining, on the mean loss"):
        dataclasses.replace(update, scale=2.0)


SAID = {
    "through 3 local steps": LocalTraining(epochs=3),
    "through 4 local steps with the batches in the order that the update gives": LocalTraining(2, 2),
    "through 4 local steps, whose batches are hidden and were taken in order": LocalTraining(2, 2, shuffle=1),
    "through 1 local step": LocalTraining(),
}


@pytest.mark.parametrize("said", SAID)
def test_an_attack_says_what_it_assumes(said):
    pixels, labels = pictures(3)
    update = client.local_update(net(), pixels, labels, SAID[said], reveal_order="hidden" not in said)
    assert attacks.match_gradients(update, steps=2).why == f"the best match after 2 steps; {said}"
    hidden = attacks.match_gradients(dataclasses.replace(update, labels=None), steps=2)
    assert hidden.labels.tolist() == [0, 1, 2]
    assert "the labels were read off the last layer and are " in hidden.why
    assert hidden.why.endswith("each label in the batch of its place in ascending order") == ("order" in said)


def test_a_hidden_order_hides_the_seed_and_costs_the_match():
    pixels, labels = pictures(4)
    local = LocalTraining(2, 1, lr=0.5, shuffle=3)
    known = client.local_update(net(), pixels, labels, local)
    hidden = client.local_update(net(), pixels, labels, local, reveal_order=False)
    assert known.local.shuffle == 3 and hidden.local.shuffle == "hidden"
    truth = pixels[None].clone().requires_grad_(True)
    assert matching._LocalMatch([known], "cosine", 0.0)(truth)[0] < 1e-20
    assert matching._LocalMatch([hidden], "cosine", 0.0)(truth)[0] > 1e-6
    with pytest.raises(ValueError, match="shuffle must be a seed or None for the client"):
        client.local_update(net(), pixels, labels, LocalTraining(shuffle="hidden"))


def test_a_small_step_is_not_a_weak_gradient_but_a_rounded_one_is():
    pixels, labels = pictures(1)
    small = client.local_update(net(), pixels, labels, LocalTraining(lr=1e-9))
    assert attacks.match_gradients(small, steps=2).status == "approximate"
    rounded = client.local_update(net().float(), pixels.float(), labels, LocalTraining(lr=1e-9))
    found = attacks.match_gradients(rounded, steps=2)
    assert (found.status == "weak gradient" and "rounding" in found.why) or not norm(rounded.gradient.values())


@pytest.mark.parametrize("attack", ["walk_back", "r_gap", "unmix"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_closed_form_takes_one_step_and_says_why_not_more(attack, decay):
    torch.manual_seed(0)
    model = victims.fc((30, 40, 20, 4)).double()
    pixels, labels = pictures(1)
    step = client.local_update(model, pixels, labels, LocalTraining(lr=0.2, weight_decay=decay))
    found = getattr(attacks, attack)(step)
    assert found.status == "recovered" and metrics.mse(found.pixels, pixels) < 1e-20
    more = getattr(attacks, attack)(client.local_update(model, pixels, labels, LocalTraining(epochs=2)))
    assert more.status == "not applicable" and "the weights moved between 2 local steps" in more.why
    # where they moved little, the mean gradient may be tried
    little = client.local_update(model, pixels, labels, LocalTraining(epochs=2, lr=1e-6))
    found = getattr(attacks, attack)(client.mean_gradient(little))
    assert metrics.mse(found.pixels, pixels) < 1e-6


MEMORY = """
import re, torch
from gradinv import attacks, client, victims

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
model, start = victims.convnet(16), peak()
update = client.local_update(
    model, torch.rand(1, 3, 32, 32), torch.tensor([1]), client.LocalTraining(epochs=100, lr=1e-4)
)
attacks.match_gradients(update, steps=1)
print(peak() - start)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="Linux tells the peak of one process")
def test_memory_of_a_hundred_steps():
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    weights = sum(parameter.numel() for parameter in victims.convnet(16).parameters()) * 4
    assert 50 * weights < int(run.stdout) < 2**30  # the weights of all steps, and the graph of one
