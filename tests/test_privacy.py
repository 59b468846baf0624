"""What noise guarantees: the Gaussian mechanism, the bounds on reconstruction, and an attacker who comes near them."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import nn

from gradinv import defences, privacy, victims
from gradinv.privacy import (
    gaussian_delta,
    gaussian_epsilon,
    guess_candidate,
    guessing_rate,
    implied_multiplier,
    noise_for,
    reconstruction_bound,
    sampled_bound,
    sampled_epsilon,
)

cheap = settings(max_examples=60, deadline=None)
noises, priors = st.floats(0.05, 50), st.floats(1e-6, 0.999)
deltas = st.floats(1e-10, 0.1)


# --- epsilon ---


def test_one_release_with_noise_1():
    assert round(gaussian_epsilon(1.0, 1e-5), 3) == 4.377


@cheap
@given(noises, deltas, st.integers(1, 100))
def test_epsilon_and_delta_fit_together(noise, delta, releases):
    epsilon = gaussian_epsilon(noise, delta, releases)
    assert epsilon >= 0
    if epsilon > 0:
        assert gaussian_delta(noise, epsilon, releases) == pytest.approx(delta, rel=1e-4)
    else:
        assert gaussian_delta(noise, 0.0, releases) <= delta


@cheap
@given(noises, deltas, st.floats(1.01, 3))
def test_epsilon_falls_with_noise_and_with_delta(noise, delta, factor):
    epsilon = gaussian_epsilon(noise, delta)
    assume(epsilon > 0)
    assert gaussian_epsilon(noise * factor, delta) < epsilon
    assert gaussian_epsilon(noise, min(delta * factor, 0.5)) < epsilon


@cheap
@given(noises, st.integers(1, 50), deltas)
def test_releases_compose_as_less_noise(noise, releases, delta):
    assert gaussian_epsilon(noise, delta, releases) == pytest.approx(
        gaussian_epsilon(noise / math.sqrt(releases), delta), rel=1e-9, abs=1e-12
    )


def test_delta_is_the_largest_gap_between_the_two_outcomes():
    """From its definition: the most by which an event is likelier with the picture than e^epsilon times without."""
    grid = torch.linspace(-40, 40, 400_001, dtype=torch.float64).numpy()
    for noise, epsilon in ((1.0, 0.5), (2.0, 0.1), (0.5, 6.0)):
        gap = norm.pdf(grid, 1, noise) - math.exp(epsilon) * norm.pdf(grid, 0, noise)
        assert gaussian_delta(noise, epsilon) == pytest.approx(gap.clip(0).sum() * (grid[1] - grid[0]), rel=1e-6)


def test_the_accountant_agrees_where_both_apply():
    assert sampled_epsilon(1.0, 1e-5, sample_rate=1.0, steps=1) == gaussian_epsilon(1.0, 1e-5)
    nearly = sampled_epsilon(2.0, 1e-5, sample_rate=0.999999, steps=4)
    assert nearly == pytest.approx(gaussian_epsilon(2.0, 1e-5, 4), abs=0.03)


def test_sampling_lowers_epsilon_and_steps_raise_it():
    full = gaussian_epsilon(1.0, 1e-5, 10)
    tenth = sampled_epsilon(1.0, 1e-5, sample_rate=0.1, steps=10)
    assert tenth < full
    assert tenth < sampled_epsilon(1.0, 1e-5, sample_rate=0.1, steps=40)


@pytest.mark.parametrize(("sample_rate", "steps"), [(0.05, 50), (1.0, 3)])
def test_noise_for_a_budget_stays_within_it(sample_rate, steps):
    noise = noise_for(2.0, 1e-5, sample_rate=sample_rate, steps=steps)
    assert 1.97 < sampled_epsilon(noise, 1e-5, sample_rate=sample_rate, steps=steps) < 2.011


# --- a guarantee needs a clip ---


@pytest.mark.parametrize("clip", [math.inf, 0.0, -1.0, math.nan])
def test_noise_without_clipping_is_no_guarantee(clip):
    with pytest.raises(ValueError, match=r"clip must be a finite number above 0.*noise without clipping guarantees"):
        implied_multiplier(0.1, clip=clip)


@cheap
@given(noises, st.floats(0.1, 10), st.floats(1, 1000))
def test_the_multiplier_of_an_averaged_gradient(noise, clip, expected_batch):
    std = noise * clip / expected_batch
    assert implied_multiplier(std, clip=clip, expected_batch=expected_batch) == pytest.approx(noise)


# --- the bounds ---


@cheap
@given(priors, noises, st.integers(1, 100))
def test_the_bound_lies_between_the_prior_and_one(prior, noise, releases):
    assert prior - 1e-12 <= reconstruction_bound(prior, noise, releases) <= 1


@cheap
@given(priors, noises, st.floats(1.01, 3))
def test_the_bound_falls_with_noise_and_rises_with_the_prior(prior, noise, factor):
    bound = reconstruction_bound(prior, noise)
    assert reconstruction_bound(prior, noise * factor) <= bound + 1e-12
    assert reconstruction_bound(min(prior * factor, 0.9995), noise) >= bound - 1e-12


@cheap
@given(priors, noises, st.floats(0.0, 5.0))
def test_the_bound_is_no_larger_than_what_epsilon_and_delta_allow(prior, noise, epsilon):
    """Any (epsilon, delta) of the release gives the weaker bound e^epsilon prior + delta."""
    weaker = math.exp(epsilon) * prior + gaussian_delta(noise, epsilon)
    assert reconstruction_bound(prior, noise) <= weaker + 1e-9


@pytest.mark.parametrize(("prior", "noise", "steps"), [(0.1, 1.0, 1), (0.1, 2.0, 5), (0.01, 0.7, 1)])
def test_the_sampled_bound_is_the_closed_form_where_everyone_takes_part(prior, noise, steps):
    found = sampled_bound(prior, noise, sample_rate=1.0, steps=steps)
    assert found == pytest.approx(reconstruction_bound(prior, noise, steps), abs=0.02)
    assert found == sampled_bound(prior, noise, sample_rate=1.0, steps=steps)  # follows its seed
    assert found != sampled_bound(prior, noise, sample_rate=1.0, steps=steps, seed=1)


def test_the_sampled_bound_of_one_step_by_integration():
    prior, noise, rate = 0.1, 0.8, 0.3
    threshold = norm.isf(prior) * noise  # the ratio grows with the outcome, so the worst event is a large outcome
    exact = (1 - rate) * prior + rate * norm.sf(threshold, 1, noise)
    assert sampled_bound(prior, noise, sample_rate=rate, steps=1) == pytest.approx(exact, abs=0.01)


def test_the_sampled_bound_grows_with_rate_and_steps():
    low, middle, high = (
        sampled_bound(0.1, 1.0, sample_rate=rate, steps=steps) for rate, steps in ((0.05, 20), (0.2, 20), (0.2, 80))
    )
    assert 0.09 < low < middle < high < reconstruction_bound(0.1, 1.0, 20)


# --- an attacker who knows everything else ---


def released(count=8, features=200):
    torch.manual_seed(1)
    model = victims.fc((features, 12, 5))
    pixels, labels = torch.rand(count, features), torch.arange(count) % 5
    return model, pixels, labels, defences.clipped_gradients(model, pixels, labels, clip=1.0)


def test_without_noise_the_guess_is_right():
    model, pixels, labels, rows = released()
    for target in range(3):
        release = defences.private_gradient(
            model, pixels[[target, 6, 7]], labels[[target, 6, 7]], clip=1.0, noise_multiplier=0.01, expected_batch=5.0
        )
        assert guess_candidate(release, rows[:6], expected_batch=5.0, others=rows[6] + rows[7]) == target


def test_with_much_noise_it_guesses_as_well_as_without_a_release():
    model, pixels, labels, rows = released()
    right = [
        guess_candidate(
            defences.private_gradient(model, pixels[:1], labels[:1], clip=1.0, noise_multiplier=100.0, seed=seed),
            rows,
            expected_batch=1.0,
        )
        == 0
        for seed in range(100)
    ]
    assert sum(right) < 35  # 1 in 8


@pytest.mark.parametrize("noise", [0.3, 0.7, 1.5])
def test_the_success_stays_below_the_bound_and_near_it(noise):
    *_, rows = released()
    rate, error = guessing_rate((rows @ rows.T)[None], noise, trials=4000)
    bound = reconstruction_bound(1 / 8, noise)
    assert rate <= bound + 3 * error
    assert rate > bound / 2


def test_releases_and_inner_products_tell_the_same():
    model, pixels, labels, rows = released()
    noise, trials = 0.7, 300
    right = 0
    for seed in range(trials):
        target = seed % 8
        release = defences.private_gradient(
            model, pixels[[target]], labels[[target]], clip=1.0, noise_multiplier=noise, seed=seed
        )
        right += guess_candidate(release, rows, expected_batch=1.0) == target
    rate, _ = guessing_rate((rows @ rows.T)[None], noise)
    assert abs(right / trials - rate) < 4 * math.sqrt(rate * (1 - rate) / trials)


def test_orthogonal_candidates_by_integration():
    """n orthogonal gradients of norm 1: the right one wins with probability E[Phi(Z + 1 / noise)^(n - 1)]."""
    noise, count = 0.6, 5
    grid = torch.linspace(-8, 12, 20_001, dtype=torch.float64).numpy()
    exact = (norm.pdf(grid, 1 / noise) * norm.cdf(grid) ** (count - 1)).sum() * (grid[1] - grid[0])
    rate, error = guessing_rate(torch.eye(count)[None], noise, trials=20_000)
    assert abs(rate - exact) < 4 * error


@pytest.mark.parametrize("sample_rate", [0.2, 1.0])
def test_a_training_stays_below_its_bound(sample_rate):
    steps, noise, count = 12, 1.5, 5
    rate, error = guessing_rate(torch.eye(count).expand(steps, count, count), noise, sample_rate=sample_rate)
    bound = sampled_bound(1 / count, noise, sample_rate=sample_rate, steps=steps)
    assert 1 / count < rate <= bound + 3 * error + 0.01  # the bound is drawn, too
    assert guessing_rate(torch.eye(count).expand(steps, count, count), noise, sample_rate=sample_rate)[0] == rate


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_epsilon(0.0, 1e-5), "noise_multiplier must be a finite number above 0, got 0"),
        (lambda: gaussian_epsilon(math.inf, 1e-5), "noise_multiplier must be a finite number above 0, got inf"),
        (lambda: gaussian_epsilon(1.0, 0.0), "delta must lie between 0 and 1, got 0"),
        (lambda: gaussian_epsilon(1.0, 1e-5, 0), "releases must be a whole number of at least 1, got 0"),
        (lambda: gaussian_delta(1.0, -1.0), "epsilon must be a finite number of at least 0, got -1"),
        (lambda: sampled_epsilon(1.0, 1e-5, sample_rate=0.0, steps=1), "sample_rate must lie above 0 and at most at 1"),
        (
            lambda: sampled_epsilon(1.0, 1e-5, sample_rate=0.1, steps=0),
            "steps must be a whole number of at least 1, got 0",
        ),
        (lambda: noise_for(0.0, 1e-5, sample_rate=0.1, steps=1), "epsilon must be a finite number above 0, got 0"),
        (lambda: reconstruction_bound(1.0, 1.0), "prior must lie between 0 and 1, got 1"),
        (lambda: sampled_bound(1e-4, 1.0, sample_rate=0.1, steps=1), "samples must be at least 1000000 for a prior"),
        (lambda: guessing_rate(torch.eye(2)[None], 0.0), "std must be a finite number above 0, got 0"),
        (lambda: implied_multiplier(0.0, clip=1.0), "std must be a finite number above 0, got 0"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_candidates_must_fit_the_release():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    release = defences.private_gradient(model, torch.rand(1, 4), torch.tensor([0]), clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"candidates must have 10 columns like the gradient, got \(3, 9\)"):
        guess_candidate(release, torch.zeros(3, 9), expected_batch=1.0)
    assert privacy.guess_candidate(release, torch.zeros(3, 10), expected_batch=1.0) == 0


@pytest.mark.parametrize(
    ("prior", "noise", "rate"), [(0.5, 0.1, 0.01), (0.1, 1e-3, 0.5), (0.1, 0.5, 0.5), (0.1, 2.0, 0.1)]
)
def test_one_sampled_step_has_a_closed_form(prior, noise, rate):
    """Without the picture half of a mixture of one step is the same, so the best event is that of the Gaussian."""
    expected = (1 - rate) * prior + rate * privacy.reconstruction_bound(prior, noise)
    found = privacy.sampled_bound(prior, noise, sample_rate=rate, steps=1)
    assert found >= prior and abs(found - expected) < 0.01


def test_sampled_epsilon_is_never_negative():
    assert privacy.sampled_epsilon(5.0, 0.9, sample_rate=0.01, steps=10) >= 0
