"""The ledger and its judge."""

import ast
import json
import pathlib
import re

import pytest
import torch
import yaml

from gradinv import claims
from gradinv.claims import Claim

ROOT = pathlib.Path(__file__).parent.parent
ROWS = yaml.safe_load((ROOT / "book/claims.yml").read_text())
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
CHAPTERS = {pathlib.Path(entry["file"]).name for part in TOC["parts"] for entry in part["chapters"]}
RULES = [
    (row["id"], rule)
    for row in ROWS
    for rule in sorted({*(row["passes_when"] or {}).values(), row.get("partly_when")} - {None})
]


def claim(passes_when, partly_when=None):
    return Claim("a.claim", "key", "section 1", "it holds", None, "dB", "chapter", "paper", passes_when, partly_when)


def verdict(rule, values, **options):
    return claims.judge(claim({"smoke": rule}, **options), values, "smoke").verdict


# --- the ledger ---


def test_ids_are_unique():
    ids = [row["id"] for row in ROWS]
    assert len(set(ids)) == len(ids) >= 10
    assert list(claims.ledger()) == ids


def test_papers_are_in_the_bibliography():
    keys = set(re.findall(r"^@\w+\{([^,\s]+),", (ROOT / "book/references.bib").read_text(), re.M))
    assert {row["paper"] for row in ROWS} <= keys


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_row_is_whole(row):
    assert row["chapter"] in CHAPTERS
    for key in ("id", "paper", "where", "says", "unit", "read_in"):
        assert isinstance(row[key], str) and row[key].strip(), key
    assert row["reported"] is None or (isinstance(row["reported"], str) and row["reported"].strip())
    assert row["says"].endswith(".")
    if row["passes_when"] is None:
        assert "partly_when" not in row
    else:
        assert set(row["passes_when"]) == set(claims.SCALES)
        assert any(row["passes_when"].values())


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_a_rule_can_be_judged(name, rule):
    names = {part.id for part in ast.walk(ast.parse(rule, mode="eval")) if isinstance(part, ast.Name)}
    measured = names - set(claims.RULE_FUNCTIONS)
    assert measured
    # judged by values of each sign and size; a rule that says the same for all would decide nothing
    answers = {verdict(rule, dict.fromkeys(measured, value)) for value in (-1e9, -1.0, 0.0, 0.3, 1.0, 1e9)}
    assert answers <= {"reproduced", "not reproduced"} and "not reproduced" in answers


def test_the_ledger_is_missed_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BOOK", tmp_path)
    claims.ledger.cache_clear()
    try:
        with pytest.raises(FileNotFoundError, match=r"claims\.yml is not there: .*checkout"):
            claims.ledger()
    finally:
        claims.ledger.cache_clear()


# --- the judge ---


def test_the_five_verdicts():
    rules = {"smoke": None, "laptop": "value > 10", "full": "value > 20"}
    row = claim(rules, "value > 5")
    assert claims.judge(row, {"value": 30}, "laptop").verdict == "reproduced"
    assert claims.judge(row, {"value": 15}, "full").verdict == "partly"
    assert claims.judge(row, {"value": 1}, "full").verdict == "not reproduced"
    assert claims.judge(row, {"value": 30}, "smoke").verdict == "out of reach at this scale"
    assert claims.judge(claim(None), {"value": 30}, "full").verdict == "no figure to compare with"
    assert {
        *("reproduced", "partly", "not reproduced", "out of reach at this scale", "no figure to compare with")
    } == set(claims.VERDICTS)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("value < 1e-5 or value == 0.5", True),
        ("abs(value - 1) <= 0.5 and not value > 1", True),
        ("0 < value < 0.4", False),
        ("value ** 2 + 3 * value / 2 - 1 == 0", True),
        ("-value < 0", True),
        ("max(value, other) == other", True),
        ("min(value, other) == other", False),
        ("flag and value != other", True),
        ("True", True),
    ],
)
def test_rules_compare_and_calculate(rule, expected):
    found = verdict(rule, {"value": 0.5, "other": 2, "flag": True})
    assert found == ("reproduced" if expected else "not reproduced")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_reproduces_nothing(number):
    assert verdict("abs(value) < 1e9", {"value": number}) == "not reproduced"


ATTEMPTS = [
    "open({path!r}, 'w') == 0",
    "__import__('pathlib').Path({path!r}).touch() == 0",
    "os.system('touch {path}') == 0",
    "pathlib.Path({path!r}).touch() == 0",
    "value.__class__.__base__.__subclasses__() == 0",
    "(lambda: 1)() == 1",
    "[x for x in (1,)] == 1",
    "abs.__self__ == 0",
    "abs(*[value]) > 0",
    "f'{{value}}' == 0",
    "(value := 3) > 1",
    "value if value else 0",
    "{{'a': 1}} == 0",
    "value[0] > 1",
    "value > 1; value < 2",
    "import os",
]


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_rule_cannot_run_code(attempt, tmp_path):
    path = tmp_path / "made"
    with pytest.raises(ValueError, match=r"the rule of a\.claim .* cannot be judged"):
        verdict(attempt.format(path=str(path)), {"value": 0.5})
    assert not path.exists()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("value > ", "invalid syntax"),
        ("", "cannot be judged"),
        ("other > 1", r"cannot be judged from \['value'\]: name 'other' is not defined"),
        ("value", "it gives 0.5, not true or false"),
        ("value / 0 > 1", "division by zero"),
    ],
)
def test_a_rule_that_cannot_be_judged_is_named(rule, message):
    with pytest.raises(ValueError, match=message):
        verdict(rule, {"value": 0.5})


# --- record ---


@pytest.fixture
def row(monkeypatch):
    made = claim({"smoke": "value > 1 and other == 2", "laptop": None, "full": None})
    monkeypatch.setattr(claims, "ledger", lambda: {made.id: made})
    return made


def test_record_writes_a_line_where_a_run_asks_for_it(row, tmp_path, monkeypatch):
    target = tmp_path / "records.jsonl"
    monkeypatch.setenv("GRADINV_RECORD", str(target))
    values = {"value": torch.tensor(3.0), "other": 2}
    found = claims.record("a.claim", values, scale="smoke", device="cpu", path=tmp_path)
    claims.record("a.claim", {"value": 0.0, "other": 2}, scale="smoke")
    first, second = map(json.loads, target.read_text().splitlines())
    assert found.verdict == first["verdict"] == "reproduced" and second["verdict"] == "not reproduced"
    assert first["values"] == {"value": 3.0, "other": 2} and first["scale"] == "smoke" and first["device"] == "cpu"
    assert first["rule"] == "value > 1 and other == 2" and first["says"] == row.says and first["reported"] is None


def test_record_writes_nothing_by_itself(row, tmp_path, monkeypatch):
    monkeypatch.delenv("GRADINV_RECORD", raising=False)
    monkeypatch.chdir(tmp_path)
    claims.record("a.claim", {"value": 3, "other": 2}, scale="smoke")
    assert not list(tmp_path.iterdir())


def test_one_number_is_called_value(monkeypatch):
    made = claim({"smoke": "value > 1"})
    monkeypatch.setattr(claims, "ledger", lambda: {made.id: made})
    found = claims.record("a.claim", torch.tensor([2.5]), scale="smoke")
    assert found.values == {"value": 2.5} and found.verdict == "reproduced"
    assert str(found) == "a.claim: reproduced (value = 2.5)"


def test_record_names_what_it_does_not_know(row):
    with pytest.raises(ValueError, match=r"claim_id must be a row of book/claims\.yml, got 'nothing'"):
        claims.record("nothing", 1.0, scale="smoke")
    with pytest.raises(ValueError, match="scale must be one of smoke, laptop, full, got 'huge'"):
        claims.record("a.claim", 1.0, scale="huge")
    with pytest.raises(ValueError, match=r"cannot be judged from \['value'\]"):
        claims.record("a.claim", 3.0, scale="smoke")


# --- tables ---


def test_table_shows_both_figures():
    verdicts = [claims.judge(claim({"smoke": "value > 1"}), {"value": 1 / 3, "count": 7}, "smoke")]
    (line,) = claims.table(verdicts).to_dict("records")
    assert line["paper"] == "not readable" and line["here"] == "value = 0.3333, count = 7"
    assert line["passes when"] == "value > 1" and line["verdict"] == "not reproduced"


def test_values_in_words():
    values = {"third": 1 / 3, "large": 123456.0, "whole": 1234567, "flag": True, "name": "cpu", "none": float("nan")}
    expected = "third = 0.3333, large = 1.235e+05, whole = 1234567, flag = True, name = cpu, none = nan"
    assert claims.in_words(values) == claims.judge(claim(None), values, "smoke").found == expected
    assert claims.in_words({}) == ""


def test_overview_has_a_row_a_claim(row):
    runs = [
        {"chapter": "b", "scale": "full", "claims": [{"id": "a.claim", "verdict": "partly"}]},
        {"chapter": "b", "scale": "smoke", "claims": [{"id": "a.claim", "verdict": "reproduced"}]},
    ]
    (line,) = claims.overview(runs).to_dict("records")
    assert (line["smoke"], line["laptop"], line["full"]) == ("reproduced", "not run", "partly")


def test_results_are_in_order(tmp_path):
    for chapter, scale in (("b", "full"), ("a", "full"), ("a", "smoke"), ("b", "laptop")):
        record = {"chapter": chapter, "scale": scale, "claims": []}
        (tmp_path / f"{chapter}.{scale}.json").write_text(json.dumps(record))
    found = [(run["chapter"], run["scale"]) for run in claims.results(tmp_path)]
    assert found == [("a", "smoke"), ("a", "full"), ("b", "laptop"), ("b", "full")]


def test_glue_writes_what_the_site_builder_reads(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: shown.append((data, options)))
    verdicts = [claims.judge(claim({"smoke": "value > 1"}), {"value": 3.0}, "smoke")]
    claims.glue_verdicts(verdicts)
    names = [options["metadata"]["scrapbook"]["name"] for _, options in shown]
    assert names == ["a.claim", "a.claim.value"]
    assert shown[1][0]["application/papermill.record/text/plain"] == "3.0"
    assert all(options["raw"] for _, options in shown)


def test_glue_is_what_myst_nb_writes(monkeypatch):
    myst_nb = pytest.importorskip("myst_nb")
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: shown.append((data, options["metadata"])))
    monkeypatch.setattr(
        "myst_nb.glue.display", lambda data, **options: shown.append((data, options["metadata"])), raising=False
    )
    monkeypatch.setattr("myst_nb.core.execute.base.glue", None, raising=False)
    claims.glue("name", 2.5)
    myst_nb.glue("name", 2.5, display=False)
    assert shown[0] == shown[1]
