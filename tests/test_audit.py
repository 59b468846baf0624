"""The audit of a network, its formats and its command."""

import json

import pytest
import torch
from bs4 import BeautifulSoup
from networks import Recurrent
from torch import nn
from torch.nn import functional

from gradinv import client, victims
from gradinv.__main__ import main
from gradinv.attacks import r_gap, restore_labels, unmix, walk_back
from gradinv.audit import audit, formats, input_shape, load
from gradinv.layers import read

CONV = nn.Conv2d(3, 8, 3, padding=1)


class Function(nn.Module):
    """Its activation is a function, which no hook sees."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(functional.relu(self.first(x.flatten(1) * 2)))


@pytest.fixture(scope="module")
def cnn6d():
    return audit(victims.cnn6d(), (3, 32, 32), "cnn6d")


@pytest.fixture(scope="module")
def resnet():
    return audit(victims.resnet(18, width=16), (3, 32, 32), "<b>resnet</b>")


def applies(found):
    return {attack.name: attack.applies for attack in found.attacks}


def test_decisive_layer_of_cnn6d(cnn6d):
    assert (cnn6d.decisive.name, cnn6d.decisive.nullity) == ("2", 280)
    assert "it withholds 280 of the 3,468 directions" in cnn6d.findings[0]
    assert "396 virtual constraints" in cnn6d.findings[1]
    assert applies(cnn6d) == {
        **{"walk_back": "no", "unmix": "no", "r_gap": "yes", "restore_labels": "no", "match_gradients": "yes"}
    }
    best = cnn6d.changes[0]
    assert (best.layer, best.what, best.nullity_before) == ("2", "10 filters instead of 20", 280)
    # the convolution loses half of its weights, and so does the one that takes its output
    assert best.weights_before - best.weights_after == (2160 + 6480) // 2


def test_a_change_is_what_it_says(cnn6d):
    narrow = audit(victims.cnn6(second=10), (3, 32, 32))
    assert narrow.decisive.nullity == cnn6d.changes[0].nullity_after
    assert sum(layer.weights for layer in narrow.report.layers) == cnn6d.changes[0].weights_after


def test_best_change_of_a_resnet_is_a_skip(resnet):
    best, *_ = resnet.changes
    assert (best.layer, best.what, best.nullity_before, best.nullity_after) == ("layer2.0", "cut its skip", 0, 4608)
    cut = audit(victims.resnet(18, width=16, cut=("layer2.0",)), (3, 32, 32))
    assert (cut.decisive.name, cut.decisive.nullity) == ("layer2.0.conv1", best.nullity_after)
    assert sum(layer.weights for layer in cut.report.layers) == best.weights_after
    assert "nothing in the count" in resnet.findings[0]
    assert "safe" not in formats.as_text(resnet) + formats.as_text(cut)


@pytest.mark.parametrize(
    "model, shape",
    [
        (victims.fc((48, 10, 5)), (3, 4, 4)),
        (victims.fc((48, 10, 5), bias=False), (3, 4, 4)),
        (victims.fc((48, 10, 5), bias="last"), (3, 4, 4)),
        (nn.Sequential(CONV, nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)), (3, 4, 4)),
        (nn.Sequential(CONV, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 5), nn.Flatten()), (3, 4, 4)),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.LayerNorm(6), nn.Linear(6, 5)), (3, 4, 4)),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.GELU(), nn.Linear(6, 5)), (3, 4, 4)),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 6, bias=False), nn.GELU(), nn.Linear(6, 5)), (3, 4, 4)),
        (victims.resnet(18, width=2, stem="imagenet"), (3, 32, 32)),
        (Function(), (3, 2, 2)),
        (Recurrent(), (1, 4, 4)),
    ],
)
def test_attacks_apply_where_the_audit_says(model, shape):
    said = applies(audit(model, shape))
    update = client.gradient(model, torch.rand(1, *shape), torch.tensor([1]), reveal_labels=False)
    walked = walk_back(update)
    expected = "yes" if walked.pixels is not None else "no" if walked.features is None else "in part"
    assert said["walk_back"] == expected, walked.why
    assert said["unmix"] == ("no" if unmix(update).status == "not applicable" else "yes")
    assert said["r_gap"] == ("no" if r_gap(update).status == "not applicable" else "yes")
    try:
        restore_labels(update)
    except ValueError:
        assert said["restore_labels"] == "no"
    else:
        assert said["restore_labels"] == "yes"


@pytest.mark.parametrize("make", [lambda: victims.resnet(18, width=4), lambda: victims.cnn6d(), lambda: Function()])
def test_layers_are_read_alike_without_values(make):
    shape = (3, 2, 2) if isinstance(make(), Function) else (3, 32, 32)
    with torch.device("meta"):
        bare = make()
    facts = [
        [(layer.name, layer.output_shape, layer.follows) for layer in read(model, shape)] for model in (make(), bare)
    ]
    assert facts[0] == facts[1]
    assert applies(audit(bare, shape))["r_gap"] in ("no", "not known")


def test_what_is_not_counted_is_listed():
    model = nn.Sequential(CONV, nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    found = audit(model, (3, 4, 4))
    assert "1 (GroupNorm): it has weights" in formats.as_text(found)
    assert "not counted" in " ".join(found.findings)


def test_a_frozen_network_is_noted():
    found = audit(victims.fc((12, 5, 3)).requires_grad_(False), (3, 2, 2))
    assert "Every parameter is frozen" in found.notes[0] and applies(found)["walk_back"] == "no"


def test_a_library_that_normalises_outside_is_noted():
    with torch.device("meta"):
        model = load("torchvision.models:squeezenet1_1")
    assert "normalised pictures" in audit(model, (3, 64, 64)).notes[0]


def test_json_comes_back_as_it_was(cnn6d, resnet):
    for found in (cnn6d, resnet):
        assert json.loads(formats.as_json(found)) == formats.facts(found)
    layers = json.loads(formats.as_json(cnn6d))["layers"]
    assert [layer["nullity"] for layer in layers if layer["name"] == "2"] == [280]
    assert all(layer["rank"] + layer["nullity"] == layer["x"] for layer in layers)


def test_html_is_one_plain_page(resnet):
    page = formats.as_html(resnet)
    soup = BeautifulSoup(page, "html.parser")
    assert "<b>" not in page and soup.h1.text.startswith("<b>resnet</b>")
    assert not soup.find_all(["script", "link", "img", "iframe"]) and "url(" not in page and "http" not in page
    for table in soup.find_all("table"):
        assert table.caption.text and table.parent["tabindex"] == "0"
        assert all(head.get("scope") in ("col", "row") for head in table.find_all("th"))


def test_long_tables_show_few_layers_first():
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(12, 12) for _ in range(40)))
    soup = BeautifulSoup(formats.fragment(audit(model, (3, 2, 2))), "html.parser")
    folded = soup.find("details")
    assert "All 40 layers" in folded.summary.text and len(folded.tbody.find_all("tr")) == 40
    shown = [table for table in soup.find_all("table") if "10 of 40" in table.caption.text]
    assert len(shown) == 1 and len(shown[0].tbody.find_all("tr")) == 10


MODEL = """
from torch import nn
import beside

net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
number = 5

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, beside.CLASSES))

def broken():
    raise RuntimeError("no\\nweights")

def wrong():
    return "a network"

def empty():
    return nn.ReLU()

class Odd(nn.Module):
    def forward(self, x):
        return self.missing(x)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a file `own_network.py`, and the file of its own that it imports."""
    (tmp_path / "own_network.py").write_text(MODEL)
    (tmp_path / "beside.py").write_text("CLASSES = 3")
    (tmp_path / "bad_network.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["own_network:build", "own_network.py:build", "own_network.py:net"])
def test_command_finds_the_network(folder, capsys, place):
    assert main(["audit", place, "--input", "3x2x2"]) == 0
    printed = capsys.readouterr().out
    assert f"{place} for one picture of 3x2x2" in printed and "walk_back: yes" in printed


def test_command_takes_a_path_elsewhere_and_writes_a_file(folder, monkeypatch, capsys):
    monkeypatch.chdir("/")
    words = ["audit", f"{folder}/own_network.py:build", "--input", "12"]
    assert main([*words, "--format", "json", "--out", str(folder / "found.json")]) == 0
    assert json.loads((folder / "found.json").read_text())["input_shape"] == [12]
    assert main([*words, "--format", "html"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    "place, size, words",
    [
        ("own_network", "3x2x2", "must be MODULE:FACTORY"),
        (":build", "3x2x2", "must be MODULE:FACTORY"),
        ("no_such_module:build", "3x2x2", "no_such_module could not be imported: ModuleNotFoundError: No module named"),
        ("bad_network.py:build", "3x2x2", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("nothing.py:build", "3x2x2", "there is no file nothing.py"),
        ("own_network.py:biuld", "3x2x2", "has no biuld; near it: build"),
        ("own_network.py:broken", "3x2x2", "failed when called without arguments: RuntimeError: no weights"),
        ("own_network.py:wrong", "3x2x2", "must give an nn.Module, got str"),
        ("own_network.py:number", "3x2x2", "must be a network or give one when called, got int"),
        ("own_network.py:build", "3,2,2", "such as 3x32x32 or 784, got '3,2,2'"),
        ("own_network.py:build", "3x0x2", "got '3x0x2'"),
        ("own_network.py:build", "3x4x4", "input_shape (3, 4, 4) does not fit the model"),
        ("own_network.py:empty", "3x4x4", "must have a convolution or a linear layer to count"),
        ("own_network.py:Odd", "3x4x4", "'Odd' object has no attribute 'missing'"),
    ],
)
def test_wrong_words_are_told_in_one_line(folder, capsys, place, size, words):
    assert main(["audit", place, "--input", size]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_wrong_format_and_wrong_file_are_refused(folder, capsys):
    assert main(["audit", "own_network.py:build", "--input", "12", "--format", "pdf"]) == 2
    assert "format must be one of table, json, html, got 'pdf'" in capsys.readouterr().err
    assert main(["audit", "own_network.py:build", "--input", "12", "--out", "/dev/null/nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_sizes():
    assert input_shape("3x32x32") == (3, 32, 32) and input_shape("784") == (784,)
