"""The race against public code runs, minimises the same sum on both sides, and writes what the status page prints."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

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
