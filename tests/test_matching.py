"""Gradient matching: cost and slope against autograd and finite differences, and the edges."""

import copy
import dataclasses
import gc
import inspect
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradinv import attacks, client, metrics, victims
from gradinv.attacks import matching
from gradinv.client import Update

TV = 3e-2


def network(kind="conv"):
    """Small smooth networks in double precision, for 2 x 6 x 5 pictures and 4 classes."""
    if kind == "dense":
        return victims.fc((60, 8, 4), activation="tanh").double().eval()
    layers = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Softplus(), nn.Flatten(), nn.Linear(36, 4))
    return nn.Sequential(*layers).double().eval()


def pictures(n=1):
    return torch.rand(n, 2, 6, 5, dtype=torch.float64)


def update_of(model, n=1, **options):
    return client.gradient(model, pictures(n), torch.arange(n) % 4, **options)


def reference(update, pixels, objective, tv=0.0, labels=None):
    """The objective written out, with its whole graph."""
    model = copy.deepcopy(update.model).train(update.mode == "train")
    parameters = dict(model.named_parameters())
    labels = update.labels if labels is None else labels
    if update.loss == "logistic":
        loss = functional.softplus(-labels * model(pixels)[:, 0]).mean()
    else:
        loss = functional.cross_entropy(model(pixels), labels)
    gradient = torch.autograd.grad(loss, [parameters[name] for name in update.gradient], create_graph=True)
    ours = torch.cat([value.flatten() for value in gradient])
    theirs = torch.cat([value.flatten() for value in update.gradient.values()])
    if objective == "cosine":
        cost = 1 - functional.cosine_similarity(ours, theirs, dim=0, eps=0)
    else:
        cost = (ours - theirs).square().sum()
    if tv:
        cost = cost + tv * (pixels[..., 1:] - pixels[..., :-1]).abs().mean()
        cost = cost + tv * (pixels[..., 1:, :] - pixels[..., :-1, :]).abs().mean()
    return cost


def cost_at(update, pixels, objective, tv=0.0):
    """The objective as the attack reports it for its starting point."""
    return attacks.match_gradients(update, objective=objective, tv=tv, steps=1, init=pixels).history[0]


def scaled(update, factor):
    return changed(update, gradient={name: value * factor for name, value in update.gradient.items()})


def changed(update, **changes):
    return Update(**{**{name: getattr(update, name) for name in update.__dataclass_fields__}, **changes})


# --- the objective ---

CASES = [
    (kind, objective, tv) for kind in ("conv", "dense") for objective in ("cosine", "euclidean") for tv in (0.0, TV)
]


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("kind", "objective", "tv"), CASES)
def test_cost_and_slope_are_autograds(kind, objective, tv, mode):
    update = update_of(network(kind), 3, mode=mode)
    pixels = pictures(3).requires_grad_(True)
    expected = reference(update, pixels, objective, tv)
    (slope,) = torch.autograd.grad(expected, pixels)
    data, cost, (found,) = matching._Match([update], objective, tv)(pixels[None])
    data, cost, found = data[0], cost[0], found[0]
    torch.testing.assert_close(cost, expected.detach(), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(found, slope, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(data, reference(update, pixels, objective).detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("objective", ["cosine", "euclidean"])
def test_what_a_client_pruned_says_nothing(objective):
    pixels = pictures()
    update = client.gradient(network(), pixels, torch.tensor([1]))
    kept = {name: value.where(value.abs() > value.abs().median(), 0.0) for name, value in update.gradient.items()}
    update = dataclasses.replace(update, gradient=kept)
    at_truth = [
        matching._Match([each], objective, 0.0)(pixels[None].clone().requires_grad_(True))[0]
        for each in (update, dataclasses.replace(update, pruned=True))
    ]
    assert at_truth[0] > 1e-4 and at_truth[1] < 1e-20


@pytest.mark.parametrize(("objective", "tv"), [("cosine", 0.0), ("cosine", TV), ("euclidean", 0.0)])
def test_slope_agrees_with_finite_differences(objective, tv):
    update, step = update_of(network()), 1e-6
    pixels, direction = pictures(), torch.randn(1, 2, 6, 5, dtype=torch.float64)
    *_, (slope,) = matching._Match([update], objective, tv)(pixels[None].clone().requires_grad_(True))
    slope = slope[0]
    ahead, behind = (cost_at(update, pixels + sign * step * direction, objective, tv) for sign in (1, -1))
    assert (ahead - behind) / (2 * step) == pytest.approx((slope * direction).sum().item(), rel=1e-5, abs=1e-9)


def test_slope_with_unknown_labels_is_autograds():
    update = update_of(network(), 2, reveal_labels=False)
    pixels, soft = (pictures(2).requires_grad_(True), torch.randn(2, 4, dtype=torch.float64, requires_grad=True))
    expected = reference(update, pixels, "euclidean", labels=soft.softmax(1))
    slopes = torch.autograd.grad(expected, [pixels, soft])
    _, cost, found = matching._Match([update], "euclidean", 0.0)(pixels[None], soft[None])
    torch.testing.assert_close(cost[0], expected.detach())
    for mine, theirs in zip(found, slopes, strict=True):
        torch.testing.assert_close(mine[0], theirs, rtol=1e-9, atol=1e-12)


def test_logistic_loss_is_matched():
    model = victims.fc((60, 5, 1), activation="tanh").double()
    update = client.gradient(model, pictures(2), torch.tensor([1, -1]), loss="logistic")
    pixels = pictures(2)
    assert cost_at(update, pixels, "cosine") == pytest.approx(reference(update, pixels, "cosine").item(), rel=1e-10)


@pytest.mark.parametrize("objective", ["cosine", "euclidean"])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_truth_costs_nothing(objective, mode):
    model, truth = network(), pictures(3)
    model[1].running_mean.fill_(0.3)
    update = client.gradient(model, truth, torch.arange(3), mode=mode)
    other = changed(update, mode={"eval": "train", "train": "eval"}[mode])
    assert abs(cost_at(update, truth, objective)) < 1e-12
    assert cost_at(other, truth, objective) > 1e-4


def test_a_part_of_the_gradient_is_matched_alone():
    update, pixels = update_of(network()), pictures()
    part = changed(update, gradient={"4.bias": update.gradient["4.bias"], "0.weight": update.gradient["0.weight"]})
    assert cost_at(part, pixels, "cosine") == pytest.approx(reference(part, pixels, "cosine").item(), rel=1e-10)


@pytest.mark.filterwarnings("ignore:the gradient is 0.5 times")
def test_half_the_loss_halves_the_gradient():
    model, truth = network("dense"), pictures()
    update = client.gradient(model, truth, torch.tensor([2]))
    half = scaled(update, 0.5)
    square = sum(value.square().sum().item() for value in update.gradient.values())
    assert abs(cost_at(half, truth, "cosine")) < 1e-12
    assert cost_at(half, truth, "euclidean") == pytest.approx(square / 4, rel=1e-12)


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 7.0, 1e30])
def test_the_cosine_has_no_scale(factor):
    update = update_of(network())
    options = {"steps": 12, "init": pictures(), "tv": TV}
    plain, other = (attacks.match_gradients(one, **options) for one in (update, scaled(update, factor)))
    torch.testing.assert_close(other.pixels, plain.pixels, rtol=1e-9, atol=1e-9)
    assert other.history == pytest.approx(plain.history, rel=1e-9)


def test_the_cosine_sees_a_sign():
    update = update_of(network())
    pixels = pictures()
    assert cost_at(update, pixels, "cosine") + cost_at(scaled(update, -1.0), pixels, "cosine") == pytest.approx(2)


def test_total_variation():
    pixels = torch.tensor([[[[0.0, 1.0, 3.0], [4.0, 4.0, 4.0]]]])
    assert attacks.total_variation(pixels).item() == pytest.approx((1 + 2 + 0 + 0) / 4 + (4 + 3 + 1) / 3)
    assert attacks.total_variation(torch.cat([pixels, 0 * pixels])).item() == pytest.approx(3 / 8 + 8 / 6)


@pytest.mark.parametrize("shape", [(1, 1, 5, 1), (1, 1, 1, 5), (1, 3, 1, 1)])
def test_total_variation_of_one_pixel_is_zero_not_nan(shape):
    pixels = torch.arange(float(math.prod(shape))).reshape(shape)
    assert attacks.total_variation(pixels).item() == (1.0 if max(shape[2:]) > 1 else 0.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 3))
    update = client.gradient(model, torch.rand(shape), torch.tensor([1]))
    result = attacks.match_gradients(update, tv=0.1, steps=3)
    assert result.status == "approximate" and result.pixels.isfinite().all()


# --- what it finds ---


@pytest.mark.parametrize("seed", range(3))
def test_dlg_finds_a_small_picture_exactly(seed):
    torch.manual_seed(seed)
    model, truth = (victims.fc((12, 7, 4), activation="sigmoid").double(), torch.rand(1, 12, dtype=torch.float64))
    result = attacks.dlg(client.gradient(model, truth, torch.tensor([1])), seed=seed)
    assert result.status == "approximate"  # an optimiser certifies no more
    assert metrics.mse(result.pixels, truth).item() < 1e-12
    assert result.loss < 1e-15


def test_a_saturated_network_is_called_a_weak_gradient():
    model, truth = (victims.fc((12, 7, 4), activation="sigmoid").double(), torch.rand(1, 12, dtype=torch.float64))
    with torch.no_grad():
        model[3].weight *= 40
        model[3].bias[1] += 60
    update = client.gradient(model, truth, torch.tensor([1]))
    result = attacks.dlg(update, steps=3)
    assert matching.norm(update.gradient.values()) < 1e-6
    assert result.status == "weak gradient" and result.pixels is not None


def test_a_relu_network_is_attacked_too():
    model, truth = victims.fc((12, 40, 4), activation="relu").double(), torch.rand(1, 12, dtype=torch.float64)
    result = attacks.dlg(client.gradient(model, truth, torch.tensor([1])), restarts=3, steps=60)
    assert metrics.mse(result.pixels, truth).item() < 1e-6


@pytest.mark.parametrize("options", [{"optimizer": "signed-adam"}, {"optimizer": "adam", "lr": 0.05}])
def test_adam_gets_close(options):
    model, truth = network("dense"), pictures()
    update = client.gradient(model, truth, torch.tensor([3]))
    result = attacks.match_gradients(update, steps=200, **options)
    assert result.loss < 0.05 * result.history[0]
    assert metrics.psnr(result.pixels, truth) > metrics.grey_baseline(truth)


@pytest.mark.parametrize("label", range(4))
def test_an_unknown_label_is_found_with_the_picture(label):
    model, truth = (victims.fc((12, 7, 4), activation="sigmoid").double(), torch.rand(1, 12, dtype=torch.float64))
    update = client.gradient(model, truth, torch.tensor([label]), reveal_labels=False)
    result = attacks.dlg(update, steps=10)
    assert result.labels.tolist() == [label]
    assert metrics.mse(result.pixels, truth).item() < 1e-3


def test_unknown_labels_of_a_batch_are_found_as_a_set():
    torch.manual_seed(4)
    model, truth = (victims.fc((6, 30, 4), activation="sigmoid").double(), torch.rand(3, 6, dtype=torch.float64))
    update = client.gradient(model, truth, torch.tensor([2, 0, 3]), reveal_labels=False)
    result = attacks.dlg(update, restarts=2, steps=25)
    assert sorted(result.labels.tolist()) == [0, 2, 3]
    order = metrics.pair(result.pixels, truth)
    assert metrics.mse(result.pixels[order], truth).max() < 1e-3
    assert result.labels[order].tolist() == [2, 0, 3]


# --- starts, restarts, steps ---


def test_a_given_start_is_taken_as_it_is():
    update, start = update_of(network()), pictures() * 3 - 1  # outside the box too
    kept = start.clone()
    result = attacks.match_gradients(update, steps=1, init=start)
    assert result.history[0] == pytest.approx(reference(update, start, "cosine").item(), rel=1e-10)
    assert torch.equal(start, kept)


def start(init, shape=(200, 2, 6, 5), seed=0):
    return matching._start(init, shape, torch.Generator().manual_seed(seed))


def test_named_starts():
    assert (start("grey") == 0.5).all()
    assert start("uniform").min() >= 0 and start("uniform").max() <= 1 and abs(start("uniform").mean() - 0.5) < 0.02
    assert abs(start("normal").mean() - 0.5) < 0.02 and abs(start("normal").std() - 0.25) < 0.01


@pytest.mark.parametrize("init", ["normal", "uniform"])
def test_the_start_follows_the_seed(init):
    update = update_of(network())
    first, again, other = (attacks.match_gradients(update, steps=2, init=init, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.pixels, again.pixels) and first.history == again.history
    assert not torch.equal(first.pixels, other.pixels)


def test_the_best_restart_wins_by_its_data_term():
    update = update_of(network())
    options = {"steps": 6, "tv": TV}
    alone = [attacks.match_gradients(update, seed=5 + i, **options) for i in range(4)]
    result = attacks.match_gradients(update, seed=5, restarts=4, **options)
    ranked = sorted(alone, key=lambda one: one.loss)
    assert result.loss == pytest.approx(ranked[0].loss, rel=1e-9)  # together, sums may round otherwise
    assert len(result.alternatives) == 3
    for mine, one in zip([result.pixels, *result.alternatives], ranked, strict=True):
        torch.testing.assert_close(mine, one.pixels)


def test_the_loss_is_that_of_the_pictures_given():
    update = update_of(network())
    for options in ({"optimizer": "signed-adam", "lr": 0.3}, {"optimizer": "lbfgs", "steps": 2, "box": False}):
        result = attacks.match_gradients(update, **{"steps": 9, "tv": TV, **options})
        assert result.loss == pytest.approx(reference(update, result.pixels, "cosine").item(), rel=1e-9)
        whole = reference(update, result.pixels, "cosine", TV).item()
        assert min(result.history) == pytest.approx(whole, rel=1e-9)  # the best step, not the last


def test_every_step_is_in_the_history():
    assert len(attacks.match_gradients(update_of(network()), steps=7).history) == 7 + 1


def walk(update, start, optimizer, steps, lr, box, **options):
    """The point that Adam ends at, which need not be the best one it saw."""
    best = matching._Best(start[None].clone().requires_grad_(True), None)
    list(matching._adam(matching._Match([update], "cosine", 0.0), best, optimizer, steps, lr, "constant", box))
    return best.pixels.detach()[0]


@pytest.mark.parametrize("box", [True, False])
def test_the_box(box):
    update = update_of(network())
    options = {"steps": 5, "lr": 2.0, "box": box}
    result = attacks.match_gradients(update, schedule="constant", init=pictures(), **options)
    end = walk(update, pictures(), "signed-adam", **options)
    assert ((end >= 0) & (end <= 1)).all() == box
    assert not box or ((result.pixels >= 0) & (result.pixels <= 1)).all()


def test_a_signed_step_moves_every_pixel_by_the_step_size():
    update, start = update_of(network()), pictures() * 0.5 + 0.25
    *_, (slope,) = matching._Match([update], "cosine", 0.0)(start[None].clone().requires_grad_(True))
    end = walk(update, start, "signed-adam", 1, 0.01, True)
    torch.testing.assert_close(end, start - 0.01 * slope[0].sign(), rtol=1e-6, atol=1e-9)


def test_schedules():
    def steps(name, count):
        return [matching._decay(name, count)(step) for step in range(count)]

    assert steps("step", 8) == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001])
    assert steps("linear", 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert steps("constant", 3) == [1, 1, 1]
    whole = steps("step", 4800)  # the paper's budget: divided after 1800, 3000 and 4200 steps
    assert [whole.count(factor) for factor in sorted(set(whole), reverse=True)] == [1800, 1200, 1200, 600]


def test_the_papers_settings(monkeypatch):
    seen = []
    monkeypatch.setattr(matching, "match_gradients", lambda update, **options: seen.append(options))
    inspect.unwrap(attacks.inverting_gradients)(None)
    inspect.unwrap(attacks.dlg)(None)
    inspect.unwrap(attacks.dlg)(None, steps=5)
    cosine, euclid, own = seen
    assert (cosine["objective"], cosine["optimizer"], cosine["steps"]) == ("cosine", "signed-adam", 4800)
    assert (cosine["lr"], cosine["tv"], cosine["schedule"]) == (0.025, 4e-4, "step")
    assert (euclid["objective"], euclid["optimizer"], euclid["steps"], euclid["box"]) == (
        "euclidean",
        "lbfgs",
        300,
        False,
    )
    assert own["steps"] == 5


# --- numbers that are not finite ---


class Breaks(nn.Module):
    """A network whose output is NaN from a given evaluation on; each copy counts anew."""

    def __init__(self, after):
        super().__init__()
        self.net, self.after, self.calls = network("dense"), after, 0

    def forward(self, x):
        self.calls += 1
        return self.net(x) * (float("nan") if self.calls > self.after else 1.0)


def breaking(after):
    torch.manual_seed(7)
    model, truth = Breaks(10**9), pictures()
    update = client.gradient(model, truth, torch.tensor([1]))
    model.after, model.calls = after, 0
    return update


@pytest.mark.parametrize("optimizer", ["signed-adam", "adam"])
def test_adam_gives_the_best_finite_picture(optimizer):
    options = {"optimizer": optimizer, "schedule": "constant", "seed": 2}
    whole = attacks.match_gradients(breaking(10**9), steps=3, **options)
    broken = attacks.match_gradients(breaking(4), steps=20, **options)
    assert broken.status == "diverged" and "finite" in broken.why
    assert torch.equal(broken.pixels, whole.pixels) and broken.loss == whole.loss
    assert broken.history[:4] == whole.history and all(math.isnan(value) for value in broken.history[4:])


def test_lbfgs_gives_the_best_finite_picture():
    result = attacks.dlg(breaking(3), steps=50)
    assert result.status == "diverged" and result.pixels.isfinite().all() and math.isfinite(result.loss)
    finite = [value for value in result.history if math.isfinite(value)]
    assert len(finite) == 3 and result.loss == min(finite)
    assert len(result.history) < 200  # and it stops soon


@pytest.mark.parametrize("name", ["match_gradients", "dlg"])
def test_never_finite(name):
    result = getattr(attacks, name)(breaking(0), steps=3)
    assert result.status == "diverged" and result.pixels is None


def test_a_start_that_is_not_finite():
    result = attacks.match_gradients(update_of(network()), steps=3, init=pictures() * float("nan"))
    assert result.status == "diverged" and result.pixels is None


class BreaksOnDark(nn.Module):
    """A network whose output is NaN for a picture with a negative corner; a picture in the box never is."""

    def __init__(self):
        super().__init__()
        self.net = network("conv")

    def forward(self, x):
        return self.net(x) * torch.where(x[:, :1, 0, 0] < 0, float("nan"), 1.0)


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("optimizer", ["signed-adam", "lbfgs"])
def test_one_broken_run_leaves_the_others_right(optimizer, together):
    update = update_of(BreaksOnDark())
    dark = [start("normal", (1, 2, 6, 5), seed)[0, 0, 0, 0] < 0 for seed in range(300)]
    first = next(i for i in range(298) if dark[i + 1] and not dark[i] and not dark[i + 2])
    options = {"optimizer": optimizer, "steps": 3, "box": False, "lr": 1e-3}
    alone = [attacks.match_gradients(update, seed=first + i, **options) for i in range(3)]
    assert [one.status for one in alone] == ["approximate", "diverged", "approximate"]
    result = attacks.match_gradients(update, restarts=3, seed=first, at_once=together, **options)
    assert result.status == "approximate" and "1 of 3 starts never had a finite objective" in result.why
    best = min(alone[::2], key=lambda one: one.loss)
    torch.testing.assert_close(result.pixels, best.pixels, rtol=1e-6, atol=1e-8)
    # and the same for three victims, each with one start
    side = attacks.match_gradients([update] * 3, seed=first, at_once=together, **options)
    assert [one.status for one in side] == ["approximate", "diverged", "approximate"]
    assert side[1].pixels is None
    for mine, one in zip(side[::2], alone[::2], strict=True):
        torch.testing.assert_close(mine.pixels, one.pixels, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_start_where_the_gradient_vanishes(dtype):
    # all units are off at the black picture, so the first layer's gradient is exactly zero there
    model = victims.fc((60, 8, 4)).to(dtype)
    with torch.no_grad():
        model[1].weight.abs_()
        model[1].bias.fill_(-0.05)
    whole = client.gradient(model, torch.ones(1, 2, 6, 5, dtype=dtype), torch.tensor([1]))
    part = changed(whole, gradient={"1.weight": whole.gradient["1.weight"]})
    result = attacks.match_gradients(part, steps=4, init=torch.zeros(1, 2, 6, 5, dtype=dtype))
    assert result.status == "diverged" and "no step improved" in result.why
    assert result.pixels.isfinite().all()
    assert result.history[0] == 1.0  # cosine 0


def test_a_parameter_that_is_not_used_does_no_harm():
    model = network("dense")
    model.register_parameter("spare", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    update = client.gradient(model, pictures(), torch.tensor([1]))
    pixels = pictures()
    without = changed(update, gradient={key: value for key, value in update.gradient.items() if key != "spare"})
    assert cost_at(update, pixels, "cosine") == pytest.approx(reference(without, pixels, "cosine").item(), rel=1e-10)


# --- dropout, memory, options ---


def test_dropout_in_train_mode_follows_the_seed():
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 20), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(20, 4)).double()
    update = client.gradient(model, pictures(), torch.tensor([0]), mode="train")
    runs = []
    for draws in (1, 5):
        torch.rand(draws)
        runs.append(attacks.match_gradients(update, steps=6))
    assert torch.equal(runs[0].pixels, runs[1].pixels) and runs[0].history == runs[1].history


def test_running_statistics_stay_as_they_were():
    model = network()
    update = client.gradient(model, pictures(2), torch.tensor([0, 1]), mode="train")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attacks.match_gradients(update, steps=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("optimizer", ["signed-adam", "lbfgs"])
def test_memory_does_not_grow_with_the_steps(optimizer):
    held = {}

    class Counting(nn.Sequential):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls in (10, 300):
                gc.collect()
                tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
                held[self.calls] = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
            return super().forward(x)

    layers = (nn.Conv2d(3, 4, 5, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(4 * 14 * 14, 10))
    model = Counting(*layers)
    updates = [client.gradient(model, torch.rand(1, 3, 32, 32), torch.tensor([i])) for i in range(2)]
    attacks.match_gradients(updates, steps=320 if optimizer != "lbfgs" else 20, tv=TV, optimizer=optimizer)
    assert set(held) == {10, 300} and held[300] <= 1.05 * held[10]


# --- many at once ---

SEARCHES = [
    {"optimizer": "signed-adam", "schedule": "linear", "tv": TV},
    {"optimizer": "adam", "objective": "euclidean", "schedule": "constant"},
    {"optimizer": "lbfgs", "objective": "euclidean"},
]


@pytest.mark.parametrize("at_once", [None, 1, 2])
@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize("options", SEARCHES, ids=lambda options: options["optimizer"])
def test_side_by_side_is_one_by_one(options, reveal, at_once):
    model = network()
    updates = [client.gradient(model, pictures(2), torch.tensor([i, 3 - i]), reveal_labels=reveal) for i in range(3)]
    options = {"steps": 2, "restarts": 2, **options}
    side = attacks.match_gradients(updates, seed=7, at_once=at_once, **options)
    for i, mine in enumerate(side):
        alone = attacks.match_gradients(updates[i], seed=7 + 2 * i, at_once=1, **options)
        torch.testing.assert_close(mine.pixels, alone.pixels, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(mine.alternatives[0], alone.alternatives[0], rtol=1e-6, atol=1e-8)
        assert mine.history == pytest.approx(alone.history, rel=1e-6)
        assert torch.equal(mine.labels, alone.labels)
        assert mine.status == alone.status and mine.why == alone.why


def test_a_list_gives_a_list_and_an_update_a_result():
    update = update_of(network())
    assert isinstance(attacks.match_gradients(update, steps=1), attacks.Reconstruction)
    (one,) = attacks.match_gradients([update], steps=1)
    assert isinstance(one, attacks.Reconstruction)
    assert len(attacks.dlg([update] * 2, steps=1)) == len(attacks.inverting_gradients([update] * 2, steps=1)) == 2


def test_a_zero_and_a_broken_gradient_leave_the_others_right():
    update = update_of(network())
    broken = scaled(update, 1.0)
    broken.gradient["0.bias"][0] = float("inf")
    results = attacks.match_gradients([update, scaled(update, 0.0), broken, update], steps=3)
    assert [one.status for one in results] == ["approximate", "weak gradient", "not applicable", "approximate"]
    assert [one.pixels is None for one in results] == [False, True, True, False]
    alone = attacks.match_gradients(update, steps=3, seed=3)
    torch.testing.assert_close(results[3].pixels, alone.pixels, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda update: update_of(network()), "one and the same model"),
        (lambda update: update_of(update.model, 2), r"must share batch_size, got \[1, 2\]"),
        (lambda update: changed(update, mode="train"), "must share mode"),
        (lambda update: changed(update, labels=None), "all have labels or all hide them"),
        (lambda update: changed(update, gradient={"4.bias": update.gradient["4.bias"]}), "of the same names"),
        (lambda update: "update", "update must be an Update .*, got str"),
    ],
    ids=range(6),
)
def test_updates_that_do_not_go_together_are_named(other, message):
    update = update_of(network())
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(attacks.match_gradients)([update, other(update)], steps=1)


@pytest.mark.parametrize("nothing", [[], 3])
def test_no_update_at_all(nothing):
    with pytest.raises(ValueError, match="update must be an Update or a list of them"):
        inspect.unwrap(attacks.match_gradients)(nothing)


# --- stopping and progress ---


class Interrupted(nn.Module):
    """A network during whose given evaluation the user presses Ctrl-C."""

    at = None

    def __init__(self):
        super().__init__()
        self.net, self.calls = network("dense"), 0

    def forward(self, x):
        self.calls += 1
        if self.at and self.calls == self.at:
            raise KeyboardInterrupt
        return self.net(x)


@pytest.mark.parametrize("optimizer", ["signed-adam", "lbfgs"])
def test_ctrl_c_gives_the_best_so_far(optimizer):
    model = Interrupted()
    updates = [client.gradient(model, pictures(), torch.tensor([i])) for i in range(3)]
    whole = attacks.match_gradients(updates, steps=50, optimizer=optimizer, at_once=2)
    model.at = 8
    cut = attacks.match_gradients(updates, steps=50, optimizer=optimizer, at_once=2)
    for one, other in zip(cut[:2], whole[:2], strict=True):
        assert one.status == "approximate" and one.why == "the best match until it was stopped, after 7 evaluations"
        assert one.history == pytest.approx(other.history[:7])
        assert one.loss == min(one.history)
    assert cut[2].status == "not applicable" and cut[2].why == "stopped before its first step"
    assert cut[2].pixels is None


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_progress(progress, shown, capsys):
    attacks.match_gradients([update_of(network())] * 2, steps=3, progress=progress)
    said = capsys.readouterr().err
    assert ("6/6" in said) == shown and bool(said) == shown


def test_a_result_holds_its_own_pictures_only():
    results = attacks.match_gradients(one_model_updates(8), steps=1, restarts=3)
    assert len(pickle.dumps(results[0].pixels)) < 4 * results[0].pixels.nbytes


def one_model_updates(count):
    model = network()
    return [client.gradient(model, pictures(), torch.tensor([i % 4])) for i in range(count)]


# --- networks and gradients that matching cannot use ---


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Flatten(), nn.Linear(60, 8), nn.Hardsigmoid(), nn.Linear(8, 4)),
        lambda: (Counted(), nn.Linear(60, 8), nn.Tanh(), nn.Linear(8, 4)),
    ],
    ids=["no second derivative", "no way to the pixels"],
)
def test_a_network_without_the_derivative_is_named(layers):
    update = update_of(nn.Sequential(*layers()).double())
    with pytest.raises(ValueError, match="model must have a second derivative with respect to its pixels"):
        attacks.match_gradients(update, steps=1)


class Counted(nn.Module):
    def forward(self, x):
        return (x * 255).long().to(x).flatten(1)


def test_half_precision_is_refused():
    model = victims.fc((12, 6, 4))
    update = client.gradient(model, torch.rand(1, 12), torch.tensor([1]))
    half = {name: value.half() for name, value in update.gradient.items()}
    with pytest.raises(ValueError, match=r"update must not be in half precision.* use model.float\(\)"):
        attacks.match_gradients(changed(update, model=copy.deepcopy(model).half(), gradient=half), steps=1)


def test_a_gradient_that_hangs_on_a_graph_is_taken_as_numbers():
    old, new = network("dense"), network("dense")
    difference = {
        name: value - after for (name, value), after in zip(old.named_parameters(), new.parameters(), strict=True)
    }
    update = Update(old, difference, (2, 6, 5), labels=torch.tensor([1]))
    for attack in (attacks.match_gradients, attacks.dlg):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert attack(update, steps=2).pixels.requires_grad is False


def test_a_huge_gradient_spoils_only_its_own_search():
    model = victims.lenet(size=16)
    updates = [client.gradient(model, torch.rand(1, 3, 16, 16), torch.tensor([i])) for i in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = attacks.dlg([scaled(updates[0], 1e18), updates[1]], steps=5)
    alone = attacks.dlg(updates[1], steps=5, seed=1)
    assert results[1].status == alone.status == "approximate"
    assert results[1].loss == pytest.approx(alone.loss, rel=0.5)


def test_the_memory_of_lbfgs_counts():
    update = client.gradient(victims.lenet(), torch.rand(1, 3, 32, 32), torch.tensor([1]))
    plain, with_memory = (matching._plan(update, 10**6, None, 10, memory=memory)[0] for memory in (False, True))
    assert with_memory < plain


# --- what the size and the digits of a gradient do ---


def test_a_cost_near_zero_keeps_its_digits():
    model, truth = victims.lenet(), torch.rand(1, 3, 32, 32)
    update, near = client.gradient(model, truth, torch.tensor([3])), truth + 1e-3 * torch.randn(truth.shape)
    exact = client.gradient(copy.deepcopy(model).double(), truth.double(), torch.tensor([3]))
    expected = cost_at(exact, near.double(), "cosine")
    assert 1e-9 < expected < 1e-4
    assert cost_at(update, near, "cosine") == pytest.approx(expected, rel=1e-4)
    assert 0 <= cost_at(update, truth, "cosine") < 1e-13


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_the_declared_scale_is_that_of_the_euclidean_distance(scale):
    model, truth = network("dense"), pictures()
    update = client.gradient(model, truth, torch.tensor([2]), scale=scale)
    plain = client.gradient(model, truth, torch.tensor([2]))
    for name, value in plain.gradient.items():
        torch.testing.assert_close(update.gradient[name], scale * value)
    assert abs(cost_at(update, truth, "euclidean")) < 1e-12
    start = pictures()
    assert cost_at(update, start, "euclidean") == pytest.approx(cost_at(plain, start, "euclidean"), rel=1e-12)


def test_half_the_loss_warns_for_euclid_only():
    update = update_of(network("dense"))
    with pytest.warns(UserWarning, match=r"the gradient is 0\.5 times that of the loss, but the update says scale=1"):
        attacks.match_gradients(scaled(update, 0.5), steps=1, objective="euclidean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attacks.match_gradients(scaled(update, 0.5), steps=1)
        attacks.match_gradients(update, steps=1, objective="euclidean")
        attacks.match_gradients(changed(scaled(update, 0.5), scale=0.5), steps=1, objective="euclidean")


def test_labels_are_restored_first():
    model = network()
    updates = [client.gradient(model, pictures(), torch.tensor([i]), reveal_labels=False) for i in (3, 1)]
    results = attacks.match_gradients(updates, steps=2, labels="restored")
    assert [one.labels.tolist() for one in results] == [[3], [1]]
    known = attacks.match_gradients(
        [changed(one, labels=torch.tensor([i])) for one, i in zip(updates, (3, 1), strict=True)], steps=2
    )
    assert torch.equal(results[0].pixels, known[0].pixels)


def test_labels_of_a_batch_are_restored_first():
    update = client.gradient(network(), pictures(3), torch.tensor([2, 0, 2]), reveal_labels=False)
    found = attacks.match_gradients(update, steps=2)
    assert found.labels.tolist() == [0, 2, 2]
    known = attacks.match_gradients(changed(update, labels=torch.tensor([0, 2, 2])), steps=2)
    assert torch.equal(found.pixels, known.pixels)


def test_labels_are_looked_for_where_the_last_layer_does_not_tell():
    model = nn.Sequential(network(), nn.Sigmoid())
    update = client.gradient(model, pictures(2), torch.tensor([2, 0]), reveal_labels=False)
    found, joint = (attacks.match_gradients(update, steps=2, labels=labels) for labels in ("restored", "joint"))
    assert torch.equal(found.pixels, joint.pixels) and torch.equal(found.labels, joint.labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "l1"}, "objective must be one of cosine, euclidean, got 'l1'"),
        ({"optimizer": "sgd"}, "optimizer must be one of signed-adam, adam, lbfgs, got 'sgd'"),
        ({"labels": "iDLG"}, "labels must be one of restored, joint, got 'iDLG'"),
        ({"at_once": 0}, "at_once must be a whole number of at least 1, got 0"),
        ({"schedule": "cosine"}, "schedule must be one of step, linear, constant, got 'cosine'"),
        ({"init": "noise"}, "init must be one of normal, uniform, grey or a tensor of pictures, got 'noise'"),
        ({"init": torch.zeros(1, 2, 6, 5).numpy()}, "init must be one of .*, got ndarray"),
        ({"init": torch.zeros(2, 6, 5)}, r"init must have shape \(1, 2, 6, 5\), got \(2, 6, 5\)"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": "10"}, "steps must be a whole number of at least 1, got '10'"),
        ({"restarts": 1.5}, "restarts must be a whole number of at least 1, got 1.5"),
        ({"seed": None}, "seed must be a whole number of at least 0, got None"),
        ({"lr": float("nan")}, "lr must be a positive number, got nan"),
        ({"tv": -1.0}, "tv must be a number of at least 0, got -1.0"),
        ({"tv": float("nan")}, "tv must be a number of at least 0, got nan"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(attacks.match_gradients)(update_of(network()), **options)


def test_inputs_that_are_no_pictures_have_no_total_variation():
    update = client.gradient(victims.fc((12, 4)), torch.rand(2, 12), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="tv must be 0 for inputs that are no pictures"):
        attacks.match_gradients(update, tv=0.1)


def test_a_label_that_the_model_lacks_is_named():
    update = changed(update_of(network()), labels=torch.tensor([9]))
    with pytest.raises(ValueError, match="labels must lie in 0 to 3 for this model, got 9"):
        attacks.match_gradients(update, steps=1)


def test_logistic_labels_must_be_known():
    model = victims.fc((60, 1)).double()
    update = client.gradient(model, pictures(), torch.tensor([1]), loss="logistic", reveal_labels=False)
    with pytest.raises(ValueError, match="labels must be known with loss='logistic', got None"):
        attacks.match_gradients(update)


def test_batch_norm_over_one_value_is_named():
    model = nn.Sequential(nn.Conv2d(2, 3, (6, 5)), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4)).double().eval()
    update = changed(client.gradient(model, pictures(), torch.tensor([1])), mode="train")
    with pytest.raises(ValueError, match="mode='train' needs more than one value per channel for batch norm"):
        attacks.match_gradients(update, steps=1)


def test_a_search_that_never_improved_says_so():
    net = victims.fc((12, 6, 4), activation="tanh").double()
    update = client.gradient(net, torch.rand(1, 12, dtype=torch.float64), torch.tensor([1]))
    found = attacks.match_gradients(update, steps=20, lr=1e30, box=False)
    assert found.status == "diverged" and "no step improved" in found.why


def test_attention_has_the_second_derivative_it_needs():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    net = torch.nn.Sequential(torch.nn.Unflatten(1, (3, 8)), layer, torch.nn.Flatten(), torch.nn.Linear(24, 4)).eval()
    update = client.gradient(net, torch.rand(1, 24), torch.tensor([1]))
    assert attacks.match_gradients(update, steps=5).status == "approximate"


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lenet", "convnet", "resnet"])
def test_a_captured_step_is_the_step(name, monkeypatch):
    model = {"lenet": victims.lenet, "convnet": lambda: victims.convnet(4), "resnet": lambda: victims.resnet(18, 4)}
    net = model[name]().double().cuda()
    updates = [
        client.gradient(net, torch.rand(1, 3, 32, 32).double().cuda(), torch.tensor([i]).cuda()) for i in range(3)
    ]
    options = {"steps": 12, "tv": TV, "schedule": "linear", "optimizer": "adam"}
    captured = attacks.match_gradients(updates, **options)
    monkeypatch.setattr(matching, "_captured", lambda step: step)
    eager = attacks.match_gradients(updates, **options)
    for one, other in zip(captured, eager, strict=True):
        assert one.history == pytest.approx(other.history, rel=1e-8)
        torch.testing.assert_close(one.pixels, other.pixels, rtol=1e-7, atol=1e-7)


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_is_taken_as_it_is():
    class Waits(nn.Sequential):
        def forward(self, x):
            float(x.sum())  # waits for the device, which a graph forbids
            return super().forward(x)

    model = Waits(*network("dense")).cuda()
    update = client.gradient(model, pictures().cuda(), torch.tensor([1]).cuda())
    assert attacks.match_gradients(update, steps=8).status == "approximate"


@pytest.mark.gpu
def test_the_gpu_follows_the_cpu():
    model = network()
    truth = pictures()
    cpu = attacks.match_gradients(client.gradient(model, truth, torch.tensor([1])), steps=5, optimizer="adam")
    there = client.gradient(copy.deepcopy(model).cuda(), truth.cuda(), torch.tensor([1]).cuda())
    gpu = attacks.match_gradients(there, steps=5, optimizer="adam")
    torch.testing.assert_close(gpu.pixels.cpu(), cpu.pixels, rtol=1e-7, atol=1e-8)
