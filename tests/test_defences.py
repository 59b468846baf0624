"""What a device does to its gradient: what each defence changes, what it leaves, and what it refuses."""

import copy
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_common import assert_same_state, delicate, small_update, state_of
from torch import nn

from gradinv import attacks, client, data, defences, metrics, victims
from gradinv.attacks.reconstruction import norm
from gradinv.client import Update
from gradinv.defences import add_noise, clip_norm, clipped_gradients, private_gradient, prune, quantise

DEFENCES = {
    "clip_norm": lambda update: clip_norm(update, 0.01),
    "add_noise": lambda update: add_noise(update, 0.1),
    "prune": lambda update: prune(update, 0.5),
    "quantise": lambda update: quantise(update, 3),
}
# entries as a float32 gradient may have them, zeros and equal ones included
entries = st.lists(st.floats(-1e3, 1e3, width=32), min_size=6, max_size=6)
cheap = settings(max_examples=60, deadline=None)


def flat(update):
    return torch.cat([value.flatten() for value in update.gradient.values()])


def update_of(values):
    """An update whose six numbers are the given ones."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    values = torch.tensor(values)
    return Update(model, {"1.weight": values[:4].view(2, 2), "1.bias": values[4:]}, (2,))


def batch(count=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 4 * 3, 5))
    return model, torch.rand(count, 1, 6, 5), torch.arange(count) % 5


# --- every defence of an update ---


@pytest.mark.parametrize("name", DEFENCES)
def test_a_defence_leaves_its_input_as_it_was(name):
    model = delicate()
    update = client.gradient(model, torch.rand(2, 1, 8, 6), torch.tensor([0, 4]))
    before, sent = state_of(model), copy.deepcopy(dict(update.gradient))
    generator = torch.get_rng_state()
    DEFENCES[name](update)
    assert_same_state(before, state_of(model))
    assert all(torch.equal(sent[key], value) for key, value in update.gradient.items())
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DEFENCES)
def test_a_defence_keeps_names_shapes_and_dtype(name, dtype):
    update, _ = small_update(dtype=dtype)
    defended = DEFENCES[name](update)
    assert list(defended.gradient) == list(update.gradient)
    for key, value in update.gradient.items():
        assert defended.gradient[key].shape == value.shape and defended.gradient[key].dtype == dtype
    assert not torch.equal(flat(defended), flat(update))
    assert defended.labels is update.labels and defended.model is update.model
    assert defended.pruned == (name == "prune")


@pytest.mark.gpu
@pytest.mark.parametrize("name", DEFENCES)
def test_a_defence_runs_on_a_gpu(name):
    update, pixels = small_update()
    defended = DEFENCES[name](client.gradient(update.model.cuda(), pixels.cuda(), update.labels.cuda()))
    assert all(value.is_cuda for value in defended.gradient.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda update: clip_norm(update, 0.0), "bound must be a finite number above 0, got 0"),
        (lambda update: clip_norm(update, math.inf), "bound must be a finite number above 0, got inf"),
        (lambda update: clip_norm(update, math.nan), "bound must be a finite number above 0, got nan"),
        (lambda update: add_noise(update, -1.0), "std must be a finite number of at least 0, got -1"),
        (lambda update: add_noise(update, math.inf), "std must be a finite number"),
        (lambda update: prune(update, 1.0), "share must be at least 0 and below 1, got 1"),
        (lambda update: prune(update, -0.1), "share must be at least 0"),
        (lambda update: quantise(update, 0), "bits must be a whole number from 1 to 16, got 0"),
        (lambda update: quantise(update, 17), "bits must be a whole number from 1 to 16, got 17"),
    ],
)
def test_a_defence_names_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call(small_update()[0])


# --- each by itself ---


@cheap
@given(entries, st.floats(1e-3, 1e3))
def test_clipping_shortens_and_keeps_the_direction(values, bound):
    update = update_of(values)
    clipped = clip_norm(update, bound)
    size = norm(update.gradient.values())
    assert norm(clipped.gradient.values()) <= bound * (1 + 1e-6)
    if size <= bound:
        assert torch.equal(flat(clipped), flat(update))
    else:
        torch.testing.assert_close(flat(clipped) * (size / bound), flat(update), rtol=1e-5, atol=1e-4)


def test_noise_has_its_deviation_and_follows_the_seed():
    update = client.gradient(victims.fc((3072, 30, 10)), torch.rand(1, 3, 32, 32), torch.tensor([3]))
    noise = flat(add_noise(update, 0.2)) - flat(update)
    count = len(noise)
    assert abs(noise.mean()) < 5 * 0.2 / count**0.5 and abs(noise.std() / 0.2 - 1) < 5 / (2 * count) ** 0.5
    assert torch.equal(flat(add_noise(update, 0.2)), flat(add_noise(update, 0.2, seed=0)))
    again = flat(add_noise(update, 0.2, seed=1)) - flat(update)
    assert abs(torch.corrcoef(torch.stack([noise, again]))[0, 1]) < 5 / count**0.5
    assert torch.equal(flat(add_noise(update, 0.0)), flat(update))


@cheap
@given(entries, st.floats(0, 0.999))
def test_pruning_keeps_exactly_the_largest(values, share):
    update = update_of(values)
    before, after = flat(update), flat(prune(update, share))
    kept = after != 0
    assert torch.equal(after[kept], before[kept])
    assert (~kept).sum() >= round(share * len(before))
    removed = before[(~kept) & (before != 0)].abs()
    assert len(removed) <= round(share * len(before))
    assert not len(removed) or not kept.any() or removed.max() <= after[kept].abs().min()


def test_pruning_counts_over_all_parameters_together():
    update = update_of([1.0, -2.0, 3.0, -4.0, 100.0, 200.0])
    assert flat(prune(update, 0.5)).tolist() == [0, 0, 0, -4, 100, 200]
    assert flat(prune(update_of([1.0] * 6), 0.5)).count_nonzero() == 3  # ties, too
    assert torch.equal(flat(prune(update, 0.0)), flat(update))


@cheap
@given(entries, st.integers(1, 16))
def test_quantising_errs_by_at_most_half_a_step(values, bits):
    update = update_of(values)
    quantised = quantise(update, bits)
    for name, value in update.gradient.items():
        step = (value.max() - value.min()).item() / (2**bits - 1)
        found = quantised.gradient[name]
        assert (found - value).abs().max() <= 0.5 * step * (1 + 1e-3) + 1e-6 * value.abs().max()
        assert len(found.unique()) <= 2**bits


@cheap
@given(entries, st.integers(1, 8))
@example([0.0, 0.0, 0.0, 0.0, 0.0, 1.4e-45], 2)  # the smallest number of single precision
def test_quantising_twice_changes_nothing_more(values, bits):
    once = quantise(update_of(values), bits)
    torch.testing.assert_close(
        flat(quantise(once, bits)), flat(once), rtol=1e-5, atol=1e-6 * flat(once).abs().max().item()
    )


# --- what attacks make of it ---


def test_clipping_changes_no_attack():
    update, pixels = small_update(dtype=torch.float64)
    clipped = clip_norm(update, 1e-3 * norm(update.gradient.values()))
    torch.testing.assert_close(attacks.walk_back(clipped).pixels, pixels, rtol=0, atol=1e-9)
    expected = attacks.match_gradients(update, steps=20).pixels
    torch.testing.assert_close(attacks.match_gradients(clipped, steps=20).pixels, expected, rtol=0, atol=1e-6)


def test_the_mean_of_many_noisy_releases_is_the_gradient():
    update, pixels = small_update(dtype=torch.float64)
    std = 0.01 * norm(update.gradient.values())
    releases = torch.stack([flat(add_noise(update, std, seed=i)) for i in range(400)])
    assert abs((releases.mean(0) - flat(update)).std() / (std / 20) - 1) < 0.15
    assert metrics.mse(attacks.walk_back(add_noise(update, std)).pixels, pixels) > 0


def test_who_knows_the_mask_matches_what_was_left():
    update, pixels = small_update(dtype=torch.float64)
    pruned = prune(update, 0.6)
    at_truth = attacks.match_gradients(pruned, init=pixels, steps=1).loss
    without_mask = attacks.match_gradients(
        Update(pruned.model, pruned.gradient, pruned.input_shape, 1, pruned.labels), init=pixels, steps=1
    ).loss
    assert at_truth < 1e-12 < 1e-5 < without_mask


# --- the release of DP-SGD ---


def test_without_noise_and_clip_it_is_the_mean_gradient():
    model, pixels, labels = batch()
    plain = client.gradient(model, pixels, labels)
    options = {"clip": math.inf, "noise_multiplier": 0.0}
    release = private_gradient(model, pixels, labels, reveal_labels=True, **options)
    assert list(release.gradient) == list(plain.gradient)
    torch.testing.assert_close(flat(release), flat(plain), rtol=1e-5, atol=1e-7)
    assert (release.batch_size, release.scale, release.input_shape) == (4, 1.0, (1, 6, 5))
    assert torch.equal(release.labels, labels)
    assert private_gradient(model, pixels, labels, **options).labels is None


def test_it_clips_each_picture_and_divides_by_the_expected_batch():
    model, pixels, labels = batch()
    alone = torch.stack([flat(client.gradient(model, pixels[i : i + 1], labels[i : i + 1])) for i in range(4)])
    bound = alone.norm(dim=1).median().item()  # some are longer, some shorter
    expected = alone * (bound / alone.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(clipped_gradients(model, pixels, labels, clip=bound), expected, rtol=1e-4, atol=1e-6)
    release = private_gradient(model, pixels, labels, clip=bound, noise_multiplier=0.0, expected_batch=8.0)
    torch.testing.assert_close(flat(release), expected.sum(0) / 8, rtol=1e-4, atol=1e-6)
    # how many were drawn would tell who was
    assert (release.batch_size, release.scale, release.labels) == (8, 1.0, None)


@cheap
@given(st.integers(0, 6), st.floats(0.05, 5), st.floats(0.5, 20))
def test_no_picture_moves_the_sum_by_more_than_the_clip(count, bound, expected_batch):
    model, pixels, labels = batch(count + 1)
    options = {"clip": bound, "noise_multiplier": 0.0, "expected_batch": expected_batch}
    with_it = flat(private_gradient(model, pixels, labels, **options))
    without = flat(private_gradient(model, pixels[:count], labels[:count], **options))
    assert (with_it - without).norm() * expected_batch <= bound * (1 + 1e-4)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_noise_on_the_averaged_gradient(count):
    """Its deviation is multiplier x clip / expected batch, whoever was drawn, and nobody may have been."""
    model = victims.fc((3072, 20, 10))
    pixels, labels = torch.rand(count, 3, 32, 32), torch.arange(count)
    options = {"clip": 0.5, "expected_batch": 4.0}
    release = private_gradient(model, pixels, labels, noise_multiplier=1.5, **options)
    noise = flat(release) - flat(private_gradient(model, pixels, labels, noise_multiplier=0.0, **options))
    expected = 1.5 * 0.5 / 4
    assert abs(noise.std() / expected - 1) < 5 / (2 * len(noise)) ** 0.5
    assert abs(noise.mean()) < 5 * expected / len(noise) ** 0.5
    if not count:
        assert release.labels is None and release.batch_size == 4
        assert not flat(private_gradient(model, pixels, labels, noise_multiplier=0.0, **options)).any()


def test_noise_follows_the_seed_and_leaves_the_global_generator_alone():
    model, pixels, labels = batch()
    before = torch.get_rng_state()
    first, second, other = (
        flat(private_gradient(model, pixels, labels, clip=1.0, noise_multiplier=1.0, seed=seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_the_model_stays_as_it_was():
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 6), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 5))
    model.train()
    model[1].bias.requires_grad_(False)
    model[1].weight.grad = torch.ones_like(model[1].weight)
    before = state_of(model)
    pixels, labels = torch.rand(3, 1, 6, 5), torch.arange(3)
    release = private_gradient(model, pixels, labels, clip=math.inf, noise_multiplier=0.0)
    assert_same_state(before, state_of(model))
    assert not any(hasattr(parameter, "grad_sample") for parameter in model.parameters())
    plain = client.gradient(model, pixels, labels)  # dropout off, the frozen bias not sent
    assert list(release.gradient) == list(plain.gradient)
    torch.testing.assert_close(flat(release), flat(plain), rtol=1e-5, atol=1e-7)


def test_noise_without_a_clip_is_refused():
    model, pixels, labels = batch()
    with pytest.raises(ValueError, match=r"clip must be finite where noise_multiplier is above 0.*no sensitivity"):
        private_gradient(model, pixels, labels, clip=math.inf, noise_multiplier=1.0)


@pytest.mark.parametrize("place", [nn.BatchNorm2d(2), nn.Sequential(nn.Identity(), nn.BatchNorm2d(2))])
def test_batch_norm_is_refused(place):
    model, pixels, labels = batch()
    model[1] = place
    with pytest.raises(ValueError, match=r"model must not have .*BatchNorm.*use group norm"):
        private_gradient(model, pixels, labels, clip=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": 0.0}, "clip must be a number above 0, got 0"),
        ({"clip": math.nan}, "clip must be a number above 0, got nan"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be a finite number of at least 0, got -1"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be a finite number"),
        ({"expected_batch": 0.0}, "expected_batch must be a finite number above 0, got 0"),
        ({"pixels": torch.zeros(0, 1, 6, 5), "labels": torch.zeros(0, dtype=torch.long)}, "expected_batch must be"),
        ({"pixels": 2 * torch.ones(4, 1, 6, 5)}, r"pixels must lie in \[0, 1\]"),
        ({"labels": torch.tensor([0, 1, 2, -1])}, "labels must be class indices from 0 on, got -1"),
        ({"pixels": torch.rand(4, 3, 6, 5)}, "do not fit the model"),
        ({"loss": "mse"}, "loss must be one of"),
    ],
)
def test_a_release_names_what_is_wrong(changes, message):
    model, pixels, labels = batch()
    arguments = {"pixels": pixels, "labels": labels, "clip": 1.0, "noise_multiplier": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        private_gradient(model, **arguments)


def test_logistic_loss_and_bundled_pictures():
    model = victims.cnn6()
    images = data.load("cifar10", 2)
    labels = torch.tensor([1, -1])
    release = defences.private_gradient(
        model, images.pixels, labels, clip=math.inf, noise_multiplier=0.0, loss="logistic"
    )
    plain = client.gradient(model, images.pixels, labels, loss="logistic")
    torch.testing.assert_close(flat(release), flat(plain), rtol=1e-4, atol=1e-7)


class Centred(nn.Module):
    """Takes the mean of the batch off, as a batch norm without weights would."""

    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(3),
        nn.BatchNorm2d(3).requires_grad_(False),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, affine=False, track_running_stats=False),
        nn.InstanceNorm2d(3, track_running_stats=True),
        Centred(),
    ],
    ids=["trained", "frozen", "plain", "batch statistics", "instance", "by hand"],
)
@pytest.mark.parametrize("call", [private_gradient, clipped_gradients])
def test_where_pictures_meet_nothing_is_clipped(layer, call):
    model = nn.Sequential(nn.Conv2d(1, 3, 3), layer, nn.Tanh(), nn.Flatten(), nn.Linear(3 * 4 * 3, 4)).eval()
    options = {"noise_multiplier": 1.0} if call is private_gradient else {}
    with pytest.raises(ValueError, match="model must"):
        call(model, torch.rand(5, 1, 6, 5), torch.arange(5) % 4, clip=1.0, **options)


def test_noise_is_secret_unless_a_seed_is_given():
    model, pixels, labels = batch()
    options = {"clip": 1.0, "noise_multiplier": 1.0}
    releases = [flat(private_gradient(model, pixels, labels, **options)) for _ in range(2)]
    assert not torch.equal(*releases)


def test_a_gradient_that_is_not_finite_is_refused():
    update, _ = small_update()
    update.gradient["1.weight"][0, 0] = math.nan
    for change in (lambda u: clip_norm(u, 1.0), lambda u: prune(u, 0.5), lambda u: quantise(u, 2)):
        with pytest.raises(ValueError, match="finite"):
            change(update)
