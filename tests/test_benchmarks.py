"""The races run, compare like with like, and write what they say they do."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from gradinv import client

ROOT = pathlib.Path(__file__).parent.parent
RACE = ROOT / "tests/benchmarks/matching.py"
FIELDS = {
    "agreement": {"network", "cost_ours", "cost_public", "cost_difference", "picture_difference"},
    "per_step": {
        *("network", "together", "steps", "rounds", "time_ratio", "lowest", "highest", "work_ratio"),
        *("psnr_ours", "psnr_public"),
    },
    "side_by_side": {"network", "device", "together", "per_second", "ratio"},
    "to_psnr": {"code", "schedule", "steps", "psnr", "time_ratio", "work_ratio", "reached"},
    "memory": {"network", "before_ours", "peak_ours", "before_public", "peak_public", "ratio"},
    "ingredients": {"network", "variant", "together", "time_ratio", "work_ratio"},
}


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    pytest.importorskip("breaching")
    out = tmp_path_factory.mktemp("race") / "matching.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, RACE, "--quick", "--out", out], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_both_sides_minimise_the_same_sum(race):
    assert [row["network"] for row in race["agreement"]] == ["LeNet", "ConvNet", "ResNet-18"]
    for row in race["agreement"]:
        assert row["cost_difference"] < 1e-10
        assert row["picture_difference"] < 1e-6


def test_both_sides_end_with_the_same_picture(race):
    """Signs of single precision may differ, and their best iterate is one step ahead of the best objective."""
    assert len(race["per_step"]) == 6
    for row in race["per_step"]:
        assert row["psnr_ours"] == pytest.approx(row["psnr_public"], abs=0.3)


def test_the_record_has_its_fields(race):
    check(race)
    assert race["quick"]


def test_the_committed_record_has_its_fields():
    path = ROOT / "book/benchmarks/matching.json"
    if not path.exists():
        pytest.skip("the race has not been run")
    record = json.loads(path.read_text())
    check(record)
    assert not record["quick"]


def check(record):
    assert {"date", "device_name", "threads", "versions", "quick", "width", "load"} <= set(record)
    assert set(record["versions"]) == {"python", "torch", "breaching"}
    for part, fields in FIELDS.items():
        assert record[part]
        for row in record[part]:
            assert set(row) == fields


# --- the recursive attack's, in this process and with a small network in place of CNN6 ---


@pytest.fixture
def recursive_race(monkeypatch):
    path = ROOT / "tests/benchmarks/recursive.py"
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location("recursive_race", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "recursive_race", module)
    spec.loader.exec_module(module)
    return module


def small_case(race, where, dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(4, 12, 3, 2, 1, bias=False)
    features = 12 * (where[0] // 2) * (where[1] // 2)
    net = nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(features, 1, bias=False)).to(dtype)
    pixels = torch.rand(1, 3, *where, dtype=dtype)
    with torch.no_grad():
        net[-1].weight *= -net(pixels).sign()
    return race.Case(net, pixels, client.gradient(net, pixels, torch.tensor([1]), loss="logistic"))


@pytest.mark.parametrize("side", ["ours", "qr", "svd"])
def test_every_side_finds_the_picture(recursive_race, side):
    victim = small_case(recursive_race, (8, 6))
    assert recursive_race.error(recursive_race.SIDES[side](victim), victim) < 1e-8


def test_the_public_side_finds_the_picture(recursive_race):
    pytest.importorskip("breaching")
    victim = small_case(recursive_race, (8, 8), torch.float32)
    recursive_race.public_settings.cache_clear()
    found = recursive_race.public(victim)
    assert found.shape == victim.pixels.shape and recursive_race.error(found, victim) < 0.05


def test_the_case_is_one_root_of_the_papers_network(recursive_race):
    victim = recursive_race.case((16, 16))
    assert victim.net(victim.pixels).item() < 0 and victim.update.labels.tolist() == [1]
    assert victim.pixels.shape == (1, 3, 16, 16) and victim.pixels.dtype == torch.float64


def test_the_recursive_race_writes_its_tables(recursive_race, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        recursive_race, "case", lambda where, dtype=torch.float64: small_case(recursive_race, where, dtype)
    )
    monkeypatch.setattr(recursive_race, "peak_of", lambda *_: [2.0, 3.0])
    monkeypatch.setitem(recursive_race.SIDES, "public", recursive_race.ours)
    recursive_race.main(["--quick", "--out", str(tmp_path / "race.json")])
    record = json.loads((tmp_path / "race.json").read_text())
    assert set(record) == {"threads", "torch", "load", "size", "dense", "public"}
    (row,) = record["size"]
    assert (row["height"], row["width"], row["seconds_ratio"], row["added"]) == (8, 8, 1, 1.0)
    assert [row["side"] for row in record["dense"]] == ["qr", "svd"]
    for row in record["dense"] + record["public"]:
        assert row["time_ratio"] > 0 and row["lowest"] <= row["time_ratio"] <= row["highest"] and row["work_ratio"] > 0
        assert row["error"] < 1e-4 and row["error_ours"] < 1e-4
    printed = capsys.readouterr().out
    assert all(f"\n{part}\n" in printed for part in ("size", "dense", "public"))


def test_the_cost_of_unmixing_is_printed():
    done = subprocess.run(
        [sys.executable, ROOT / "tests/benchmarks/unmix.py", "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.strip().splitlines()
    assert header.split() == ["pictures", "units", "time", "draws", "error"] and len(rows) == 2
    assert all(float(row.split()[-1]) < 1e-9 for row in rows)


def test_the_cost_of_local_steps_is_printed():
    done = subprocess.run(
        [sys.executable, ROOT / "tests/benchmarks/local.py", "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.strip().splitlines()
    assert header.split() == ["steps", "time", *["memory", "step", "by", "step"], *["memory", "one", "graph"], "apart"]
    assert len(rows) == 2 and all(float(row.split()[-1]) < 1e-6 for row in rows)
