"""Training small victims: a recipe runs, stores what it says, and answers alike."""

import json

import pytest
import torch

from gradinv import data, train, victims


@pytest.fixture
def small(trained_on_brightness, monkeypatch):
    """A recipe of three short epochs, and the place for its weights."""
    weights = trained_on_brightness(10)
    monkeypatch.setattr(train, "BATCH", 32)
    recipe = train.Recipe(lambda: victims.fc((3072, 16, 10)), epochs=3, lr=0.05, augment=True, snapshots=(1,))
    monkeypatch.setitem(train.RECIPES, "small", recipe)
    return weights


def test_a_recipe_stores_its_snapshots(small):
    record = train.train("small")
    assert sorted(path.name for path in small.iterdir()) == [
        *("small-epoch1.json", "small-epoch1.safetensors", "small.json", "small.safetensors")
    ]
    assert record == json.loads((small / "small.json").read_text())
    assert (record["epoch"], record["epochs"], record["held_out"], record["seed"]) == (3, 3, 32, 0)
    assert "made here" in record["trained_on"] and record["augmented"]


def test_the_record_counts_what_the_stored_network_does(small):
    record = train.train("small")
    net, facts = victims.trained("small")
    assert facts == record
    held_out = data.load("cifar10", 32, start=128, split="train")
    assert abs(train.correct(net, held_out) - record["held_out_correct"]) <= 1  # stored in half precision
    assert not net.training and next(net.parameters()).dtype == torch.float32


def test_training_follows_the_seed(small):
    weights = []
    for seed in (0, 0, 1):
        train.train("small", seed=seed)
        weights.append(victims.trained("small")[0][1].weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_training_names_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADINV_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"name must be one of fc, .*got 'nothing'"):
        train.train("nothing")
    with pytest.raises(data.DataError, match="no train pictures of cifar10"):
        train.train("fc")


def test_every_recipe_builds_and_its_stored_weights_fit():
    stored = {path.stem for path in victims.WEIGHTS.glob("*.safetensors")}
    assert stored and {name.split("-epoch")[0] for name in stored} <= set(train.RECIPES)
    for name in stored:
        net, facts = victims.trained(name)
        assert all(value.isfinite().all() for value in net.state_dict().values())
        assert name == facts["recipe"] or name == f"{facts['recipe']}-epoch{facts['epoch']}"


def test_crop_and_flip_moves_and_mirrors_only():
    ramp = torch.arange(32.0).expand(1, 1, 32, 32) / 31
    pixels = torch.cat([ramp, ramp.transpose(2, 3)], 1).repeat(64, 1, 1, 1)
    moved = train.crop_and_flip(pixels)
    assert moved.shape == pixels.shape and set(moved.unique().tolist()) <= set(pixels.unique().tolist())
    centre = moved[:, 0, 16, 10:22].diff(dim=1)  # away from the reflected borders
    rising, falling = (centre > 0).all(1), (centre < 0).all(1)
    assert (rising | falling).all() and 16 < falling.sum() < 48
    assert (moved[:, 1, 10:22, 16].diff(dim=1) > 0).all()  # never upside down
    shifts = ((moved[:, 1, 16, 16] * 31).round() - 16).unique()
    assert shifts.min() == -4 and shifts.max() == 4
