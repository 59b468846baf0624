"""What clipped gradients with noise guarantee, and an attacker who comes close to it.

The noise multiplier is the noise's standard deviation on the summed gradient over the clipping norm, and neighbours
differ by adding or removing one picture. Then a release is, in the worst case, one Gaussian number of deviation
`noise_multiplier` that is shifted by 1 where the picture took part.
"""

import math
import warnings

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri
from torch import Tensor

from gradinv.client import Update, expect_positive, expect_update, expect_whole


def implied_multiplier(std: float, *, clip: float, expected_batch: float | int = 1) -> float:
    """The noise multiplier of an averaged gradient that carries noise of standard deviation `std`.

    Raises ValueError where nothing is clipped: noise alone guarantees nothing.
    """
    expect_positive("std", std)
    expect_positive("expected_batch", expected_batch)
    if not 0 < clip < math.inf:
        raise ValueError(
            f"clip must be a finite number above 0, got {clip}: noise without clipping guarantees nothing, since one "
            "picture can move the gradient by any amount; clip each picture's gradient (defences.private_gradient)"
        )
    return std * expected_batch / clip


def gaussian_delta(noise_multiplier: float, epsilon: float, releases: int = 1) -> float:
    """The smallest delta with (epsilon, delta)-differential privacy of some full-batch releases, exactly.

    The analytic Gaussian mechanism (Balle & Wang 2018, theorem 8); t releases are one with noise / sqrt(t).
    """
    shift = _shift(noise_multiplier, releases)
    _at_least_zero("epsilon", epsilon)
    return float(
        ndtr(shift / 2 - epsilon / shift) - math.exp(min(epsilon + log_ndtr(-shift / 2 - epsilon / shift), 0.0))
    )


def gaussian_epsilon(noise_multiplier: float, delta: float, releases: int = 1) -> float:
    """The smallest epsilon with (epsilon, delta)-differential privacy of some full-batch releases, exactly."""
    shift = _shift(noise_multiplier, releases)
    _probability("delta", delta)
    if gaussian_delta(noise_multiplier, 0.0, releases) <= delta:
        return 0.0
    largest = shift**2 / 2 - shift * ndtri(delta)  # where the first of the two terms alone is delta
    return float(
        brentq(lambda epsilon: gaussian_delta(noise_multiplier, epsilon, releases) - delta, 0, largest, xtol=1e-12)
    )


def sampled_epsilon(noise_multiplier: float, delta: float, *, sample_rate: float, steps: int) -> float:
    """The epsilon of DP-SGD with Poisson sampling, by Opacus's PRV accountant (to about 0.01); exact without."""
    from opacus.accountants import PRVAccountant  # slow to import

    expect_positive("noise_multiplier", noise_multiplier)
    _probability("delta", delta)
    _sampling(sample_rate, steps)
    if sample_rate == 1:
        return gaussian_epsilon(noise_multiplier, delta, steps)
    accountant = PRVAccountant()
    accountant.history = [(noise_multiplier, sample_rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the rough estimate that only sets the range of its grid
        return max(0.0, float(accountant.get_epsilon(delta=delta)))


def noise_for(epsilon: float, delta: float, *, sample_rate: float, steps: int) -> float:
    """The noise multiplier with which DP-SGD stays within (epsilon, delta), by the same accountant."""
    from opacus.accountants.utils import get_noise_multiplier  # slow to import

    expect_positive("epsilon", epsilon)
    _probability("delta", delta)
    _sampling(sample_rate, steps)
    if sample_rate == 1:
        least, most = 1e-3 * math.sqrt(steps), 1e9 * math.sqrt(steps)
        if not gaussian_epsilon(most, delta, steps) < epsilon < gaussian_epsilon(least, delta, steps):
            raise ValueError(f"epsilon must be one that some noise between {least:g} and {most:g} gives, got {epsilon}")
        return brentq(lambda noise: gaussian_epsilon(noise, delta, steps) - epsilon, least, most)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        return get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps, accountant="prv"
        )


def reconstruction_bound(prior: float, noise_multiplier: float, releases: int = 1) -> float:
    """No attacker finds the picture with a larger probability from some full-batch releases.

    prior: the probability of success of the best guess without a release, 1 / n for one of n equally likely pictures.
    The attacker may know all other pictures and the network. Balle et al. 2022, with the closed form that Hayes et
    al. 2023 give for Gaussian noise: Phi(Phi^-1(prior) + sqrt(releases) / noise_multiplier).
    """
    _probability("prior", prior)
    return float(ndtr(ndtri(prior) + _shift(noise_multiplier, releases)))


def sampled_bound(
    prior: float, noise_multiplier: float, *, sample_rate: float, steps: int, samples: int = 50_000, seed: int = 0
) -> float:
    """As `reconstruction_bound`, for DP-SGD with Poisson sampling, estimated by drawing (Hayes et al. 2023).

    By the lemma of Neyman and Pearson the worst event of probability `prior` without the picture is a large likelihood
    ratio. Its threshold is a quantile of `samples` draws without the picture, its probability a share of as many draws
    with it. So it is the bound up to the error of drawing, about 1 / sqrt(samples).
    """
    _probability("prior", prior)
    expect_positive("noise_multiplier", noise_multiplier)
    _sampling(sample_rate, steps)
    if samples * prior < 100:
        raise ValueError(f"samples must be at least {math.ceil(100 / prior)} for a prior of {prior}, got {samples}")
    draws = torch.Generator().manual_seed(seed)
    without, with_it = torch.zeros(2, samples, dtype=torch.float64)
    for _ in range(steps):
        noise = torch.randn(2, samples, generator=draws) / noise_multiplier
        drawn = torch.rand(samples, generator=draws) < sample_rate
        noise[1] += drawn / noise_multiplier**2
        without += _ratio(noise[0].double() - 0.5 / noise_multiplier**2, sample_rate)
        with_it += _ratio(noise[1].double() - 0.5 / noise_multiplier**2, sample_rate)
    threshold = without.quantile(1 - prior)
    above, at = (float((without > threshold).double().mean()), float((without == threshold).double().mean()))
    reached, tied = (float((with_it > threshold).double().mean()), float((with_it == threshold).double().mean()))
    share = min(max((prior - above) / at, 0.0), 1.0) if at else 0.0  # of the ties, so that the event has the prior
    return max(reached + share * tied, prior)


def guess_candidate(
    update: Update,
    candidates: Float[Tensor, "n parameters"],
    *,
    expected_batch: float | int,
    others: Float[Tensor, " parameters"] | None = None,
) -> int:
    """Which of some candidates was in a full-batch release: an attacker who knows everything else.

    Args:
        update: the release, by `defences.private_gradient`.
        candidates: the clipped gradient of each, by `defences.clipped_gradients`.
        expected_batch: what the release was divided by.
        others: the sum of the clipped gradients of all other pictures in it; none by default.

    Returns the index of the candidate that explains the release best: with Gaussian noise, the nearest.
    """
    expect_update(update)
    expect_positive("expected_batch", expected_batch)
    release = torch.cat([value.flatten() for value in update.gradient.values()]) * expected_batch
    if candidates.shape[1:] != release.shape:
        raise ValueError(
            f"candidates must have {len(release)} columns like the gradient, got {tuple(candidates.shape)}"
        )
    if not len(candidates) or not candidates.isfinite().all():
        raise ValueError("candidates must be at least one row of finite numbers")
    if others is not None and others.shape != release.shape:
        raise ValueError(f"others must have {len(release)} entries like the gradient, got shape {tuple(others.shape)}")
    rest = release if others is None else release - others
    return int((candidates - rest).norm(dim=1).argmin())


def guessing_rate(
    grams: Float[Tensor, "steps n n"], std: float, *, sample_rate: float = 1.0, trials: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """How often the attacker of `guess_candidate` finds which of n pictures took part in a training; standard error.

    A picture is drawn, takes part in each step with probability `sample_rate`, and the attacker, who sees every
    step's release and network and takes the other pictures off, picks the likeliest. All of this depends on the
    candidates' gradients only through their inner products, so it is played `trials` times on these.

    Args:
        grams: the inner products of the candidates' clipped gradients at each step.
        std: deviation of the noise on the summed gradient, the noise multiplier times the clipping norm.
    """
    expect_positive("std", std)
    if not len(grams) or grams.shape[1] != grams.shape[2] or not grams.isfinite().all():
        raise ValueError(f"grams must be finite, square and one a step at least, got shape {tuple(grams.shape)}")
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    _sampling(sample_rate, len(grams))
    draws = torch.Generator().manual_seed(seed)
    count = grams.shape[1]
    target = torch.randint(count, (trials,), generator=draws)
    evidence = torch.zeros(trials, count, dtype=torch.float64)
    for gram in grams.double():
        values, vectors = torch.linalg.eigh(gram)
        root = vectors * values.clamp_min(0).sqrt()  # the gradients' coordinates in the space that they span
        noise = torch.randn(trials, count, generator=draws).double() @ root.T * std
        drawn = torch.rand(trials, 1, generator=draws) < sample_rate
        evidence += _ratio((drawn * gram[target] + noise - gram.diagonal() / 2) / std**2, sample_rate)
    rate = float((evidence.argmax(1) == target).double().mean())
    return rate, math.sqrt(rate * (1 - rate) / trials)


def _ratio(exponent: Tensor, sample_rate: float) -> Tensor:
    """The logarithm of the likelihood with the picture, drawn with `sample_rate`, over that without it."""
    if sample_rate == 1:
        return exponent
    absent = torch.full((), math.log1p(-sample_rate), dtype=exponent.dtype)
    return torch.logaddexp(absent, exponent + math.log(sample_rate))


def _shift(noise_multiplier: float, releases: int) -> float:
    """How far the picture moves the releases together, in deviations of their noise."""
    expect_positive("noise_multiplier", noise_multiplier)
    return math.sqrt(expect_whole("releases", releases, 1)) / noise_multiplier


def _sampling(sample_rate: float, steps: int) -> None:
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie above 0 and at most at 1, got {sample_rate}")
    expect_whole("steps", steps, 1)


def _probability(argument: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{argument} must lie between 0 and 1, got {value}")


def _at_least_zero(argument: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{argument} must be a finite number of at least 0, got {value}")
