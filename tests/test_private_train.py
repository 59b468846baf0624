"""Private training of a small network: it runs, stores what it says, and the stored records keep their promises."""

import json

import pytest
import torch

from gradinv import __main__, client, data, privacy, private_train
from gradinv.private_train import PRIVATE_BUDGETS, Budget, small_cnn, train_privately


@pytest.fixture
def small(trained_on_brightness, monkeypatch):
    """A budget of a few short steps, and the place for its record."""
    weights = trained_on_brightness(2)
    monkeypatch.setattr(private_train, "EXPECTED_BATCH", 32)
    monkeypatch.setattr(private_train, "EPOCHS", 2)
    monkeypatch.setattr(private_train, "CANDIDATES", 4)
    monkeypatch.setitem(PRIVATE_BUDGETS, "small", Budget(8.0))
    return weights


def test_a_budget_is_kept_and_stored(small):
    record = train_privately("small")
    assert record == json.loads((small / "small.json").read_text())
    assert [path.name for path in small.iterdir()] == ["small.json"]
    assert 7.9 < record["epsilon"] < 8.01
    assert (record["sample_rate"], record["steps"], record["held_out"], record["clip"]) == (0.25, 8, 32, 1.0)
    assert 0 <= record["guessed"] <= 1 and record["guessed_error"] < 0.01
    assert "made here" in record["trained_on"]


def test_private_training_follows_the_seed(small):
    first, second, other = (train_privately("small", seed=seed) for seed in (0, 0, 1))
    assert first == second and first["guessed"] != other["guessed"]


def test_the_command_line_trains_privately(small, capsys):
    assert __main__.main(["train", "dp-plain"]) == 0
    record = json.loads((small / "dp-plain.json").read_text())
    assert record["noise_multiplier"] == 0 and record["epsilon"] is None and "guessed" not in record
    assert record["held_out_correct"] > 24  # bright or dark is easily told
    assert "dp-plain" in capsys.readouterr().out


def test_private_training_names_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADINV_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"name must be one of dp-plain, .*got 'nothing'"):
        train_privately("nothing")
    with pytest.raises(data.DataError, match="no train pictures of cifar10"):
        train_privately("dp-eps8")


def test_the_small_cnn_gives_each_picture_its_own_gradient():
    net, images = small_cnn(), data.load("cifar10", 2)
    assert sum(parameter.numel() for parameter in net.parameters()) == 20_394
    both = client.gradient(net, images.pixels, images.labels)
    alone = [client.gradient(net, images.pixels[i : i + 1], images.labels[i : i + 1]) for i in range(2)]
    for name, value in both.gradient.items():
        mean = (alone[0].gradient[name] + alone[1].gradient[name]) / 2
        torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", PRIVATE_BUDGETS)
def test_stored_records_keep_their_promises(name):
    record, budget = private_train.private_records()[name], PRIVATE_BUDGETS[name]
    assert record["budget"] == name and record["lr"] == budget.lr
    assert record["held_out_correct"] / record["held_out"] > 0.2
    if not record["noise_multiplier"]:
        assert record["epsilon"] is None
        return
    sampling = {"sample_rate": record["sample_rate"], "steps": record["steps"]}
    assert record["epsilon"] <= budget.epsilon
    assert privacy.sampled_epsilon(record["noise_multiplier"], record["delta"], **sampling) == pytest.approx(
        record["epsilon"], abs=0.05
    )
    bound = privacy.sampled_bound(1 / 20, record["noise_multiplier"], **sampling)
    assert record["guessed"] <= bound + 3 * record["guessed_error"]
