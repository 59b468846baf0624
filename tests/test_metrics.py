"""Errors between reconstruction and truth: closed forms, another library's SSIM, brute-force pairing."""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from skimage.metrics import structural_similarity

from gradinv import metrics

BOTH = [metrics.mse, metrics.psnr, metrics.ssim]


def pictures(n=3, shape=(3, 16, 13)):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("distance", [0.5, 0.1, 1e-3])
def test_a_constant_error(distance):
    truth = pictures() * (1 - distance)
    torch.testing.assert_close(
        metrics.mse(truth + distance, truth), torch.full((len(truth),), distance**2), rtol=1e-3, atol=0
    )
    expected = torch.full((len(truth),), -20 * math.log10(distance))
    torch.testing.assert_close(metrics.psnr(truth + distance, truth), expected, rtol=1e-3, atol=0)


def test_each_picture_has_its_own_error():
    truth = torch.full((3, 1, 8, 8), 0.5)
    error = torch.tensor([0.1, 0.2, 0.4]).view(3, 1, 1, 1)
    torch.testing.assert_close(metrics.mse(truth + error, truth), torch.tensor([0.01, 0.04, 0.16]))
    torch.testing.assert_close(metrics.psnr(truth + error, truth), torch.tensor([20.0, 13.9794, 7.9588]))


def test_equal_pictures():
    truth = pictures()
    assert (metrics.mse(truth, truth) == 0).all()
    assert (metrics.psnr(truth, truth) == math.inf).all()  # one exact picture a batch spoils no other
    torch.testing.assert_close(metrics.ssim(truth, truth), torch.ones(3))
    mixed = torch.cat([truth[:1], truth[1:] * 0.5])
    assert metrics.psnr(mixed, truth).isinf().tolist() == [True, False, False]


def test_what_is_clamped():
    truth, outside = torch.ones(1, 1, 12, 12), torch.full((1, 1, 12, 12), 3.0)
    assert metrics.mse(outside, truth) == 4
    assert metrics.psnr(outside, truth) == math.inf
    torch.testing.assert_close(metrics.ssim(outside, truth), torch.ones(1))


@pytest.mark.parametrize("metric", BOTH)
def test_nan_stays_nan_in_its_own_picture(metric):
    truth = pictures(2)
    broken = truth.clone()
    broken[0, 0, 5, 5] = math.nan
    assert metric(broken, truth * 0.9).isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 20, 12), (1, 11, 16)])
def test_ssim_is_scikit_images(shape):
    truth = pictures(2, shape)
    noisy = (truth + 0.1 * torch.randn(2, *shape)).clamp(0, 1)
    for i, found in enumerate(metrics.ssim(noisy, truth).tolist()):
        # the same window, with the border mirrored as ours is, and cut off again
        border = ((0, 0), (5, 5), (5, 5))
        pair = [np.pad(picture[i].double().numpy(), border, mode="reflect") for picture in (truth, noisy)]
        _, whole = structural_similarity(
            *pair,
            data_range=1.0,
            channel_axis=0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            full=True,
        )
        assert found == pytest.approx(whole[:, 5:-5, 5:-5].mean(), abs=2e-4)


def test_ssim_refuses_pictures_smaller_than_its_window():
    with pytest.raises(ValueError, match=r"truth must be at least 6 x 6 .* got \(1, 1, 8, 5\)"):
        metrics.ssim(torch.rand(1, 1, 8, 5), torch.rand(1, 1, 8, 5))
    assert metrics.ssim(torch.rand(1, 1, 6, 6), torch.rand(1, 1, 6, 6)).isfinite().all()


def test_grey_baseline_is_the_deviation_from_the_mean_colour():
    truth = pictures()
    variance = truth.flatten(2).var(2, unbiased=False).mean(1)
    torch.testing.assert_close(metrics.grey_baseline(truth), -10 * variance.log10())
    half = torch.cat([torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4)], 3)
    torch.testing.assert_close(metrics.grey_baseline(half), torch.tensor([20 * math.log10(2)]))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pair_is_the_best_of_all_orders(n):
    truth, found = pictures(n, (2, 3, 4)), torch.rand(n, 2, 3, 4)
    order = metrics.pair(found, truth)
    costs = {
        choice: metrics.mse(found[list(choice)], truth).sum().item() for choice in itertools.permutations(range(n))
    }
    assert costs[tuple(order.tolist())] == min(costs.values())


def test_pair_undoes_a_shuffle():
    truth = pictures(6)
    shuffle = torch.randperm(6)
    assert torch.equal(truth[shuffle][metrics.pair(truth[shuffle], truth)], truth)


def test_pair_is_one_to_one_though_one_picture_is_nearest_to_all():
    truth, found = pictures(3), torch.stack([pictures(3).mean(0), *torch.full((2, 3, 16, 13), 9.0)])
    assert sorted(metrics.pair(found, truth).tolist()) == [0, 1, 2]


def test_pair_refuses_what_is_not_finite():
    with pytest.raises(ValueError, match="reconstruction and truth must be finite to be paired"):
        metrics.pair(pictures() * math.nan, pictures())


@pytest.mark.parametrize("metric", [metrics.mse, metrics.ssim, metrics.pair])
def test_another_shape_is_named(metric):
    with pytest.raises(ValueError, match=r"reconstruction must have the truth's shape \(3, 3, 16, 13\), got \(2, 3"):
        inspect.unwrap(metric)(pictures(3)[:2], pictures(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_inputs_and_dtypes(dtype):
    truth = torch.rand(4, 9, dtype=dtype)
    assert metrics.mse(truth * 0.5, truth).shape == metrics.psnr(truth * 0.5, truth).shape == (4,)
    assert metrics.mse(truth * 0.5, truth).dtype == dtype


def test_distractors_nearer_counts_what_lies_between():
    truth = torch.tensor([[0.0], [1.0], [5.0]])
    found = torch.tensor([[0.1], [0.3], [8.0]])
    others = torch.tensor([[0.31], [7.0], [20.0]])
    assert metrics.distractors_nearer(found, truth, others).tolist() == [0, 2, 1]
    assert metrics.distractors_nearer(found, truth, others[:0]).tolist() == [0, 1, 0]
    assert metrics.distractors_nearer(found, truth, truth).tolist() == [1, 3, 1]  # its own copy, and what is nearer


def test_distractors_of_another_shape_are_named():
    with pytest.raises(ValueError, match="distractors must have pictures of shape"):
        metrics.distractors_nearer(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4))


def test_a_copy_of_the_truth_is_never_told_apart():
    truth = torch.rand(2, 5)
    found = truth + 1e-9
    others = torch.cat([torch.rand(1000, 5), truth])
    assert (metrics.distractors_nearer(found, truth, others) >= 1).all()
    with pytest.raises(ValueError, match="must be finite"):
        metrics.distractors_nearer(found * float("nan"), truth, others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standardised_pictures_forget_brightness_and_contrast(dtype):
    truth = pictures(4).to(dtype)
    rows = metrics.standardised(truth)
    assert rows.shape == (4, 3 * 16 * 13) and rows.dtype == dtype
    torch.testing.assert_close(rows.mean(1), torch.zeros(4, dtype=dtype), atol=1e-7, rtol=0)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4, dtype=dtype))
    torch.testing.assert_close(metrics.standardised(0.3 * truth + 0.4), rows, atol=1e-6, rtol=0)
    torch.testing.assert_close(metrics.standardised(-truth), -rows)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1.0, 1e-20])
def test_a_picture_of_one_value_standardises_to_zeros_and_spoils_no_other(value):
    mixed = torch.cat([torch.full((1, 3, 33, 17), value), torch.rand(1, 3, 33, 17)])
    flat, other = metrics.standardised(mixed)
    assert (flat == 0).all()
    torch.testing.assert_close(other.norm(), torch.tensor(1.0))
    faint = 0.5 + 1e-4 * mixed  # what little there is still counts
    torch.testing.assert_close(metrics.standardised(faint)[1], other, atol=1e-3, rtol=0)


def test_standardised_wants_pictures():
    with pytest.raises(ValueError, match=r"pictures must be a tensor \(n, \.\.\.\), got \(5,\)"):
        inspect.unwrap(metrics.standardised)(torch.rand(5))


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 7, 10)])
def test_best_shift_is_the_best_of_all(shape):
    truth, other = pictures(4, shape), pictures(5, shape)[:4]
    found = metrics.mse(metrics.best_shift(other, truth), truth)
    every = [
        metrics.mse(other.roll((down, across), (-2, -1)), truth)
        for down in range(shape[1])
        for across in range(shape[2])
    ]
    torch.testing.assert_close(found, torch.stack(every).amin(0), rtol=1e-6, atol=0)


def test_best_shift_undoes_a_shift():
    truth = pictures(4)
    moved = torch.stack([picture.roll((k, 3 * k), (-2, -1)) for k, picture in enumerate(truth)])
    assert torch.equal(metrics.best_shift(moved, truth), truth)


def test_best_shift_wants_pictures():
    with pytest.raises(ValueError, match="truth must be pictures"):
        inspect.unwrap(metrics.best_shift)(torch.rand(2, 5), torch.rand(2, 5))
