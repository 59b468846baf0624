"""The ledger: what the papers claim, the rule by which each claim passes, and what was measured.

`book/claims.yml` holds a row a claim. A chapter calls `record`, which judges the measured values by the row's
rule for the chapter's scale. While a chapter is run by `python -m gradinv run`, verdicts also go to the file
named in `$GRADINV_RECORD`, and the runner turns them into `CHAPTER.SCALE.json`.
"""

import ast
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

SCALES = ("smoke", "laptop", "full")
VERDICTS = ("reproduced", "partly", "not reproduced", "out of reach at this scale", "no figure to compare with")
# All that a rule may hold, so that it can compare numbers and do nothing else.
RULE_PARTS = (
    *(ast.Expression, ast.Name, ast.Load, ast.Constant, ast.Call),
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow),
    *(ast.Compare, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
)
RULE_FUNCTIONS = {"abs": abs, "min": min, "max": max}
# a checkout has the book beside the package; $GRADINV_BOOK says where it is when the package is installed apart
BOOK = pathlib.Path(os.environ.get("GRADINV_BOOK") or pathlib.Path(__file__).parent.parent / "book")
RESULTS = BOOK / "results"


@dataclass(frozen=True)
class Claim:
    """A row of the ledger.

    paper is a key of the bibliography, where a place in it, says the claim in our words, reported the figure in
    the paper or None where it could not be read. passes_when maps a scale to a rule over the recorded values, or
    to None where that scale cannot decide; partly_when, where given, is the weaker rule for "partly".
    """

    id: str
    paper: str
    where: str
    says: str
    reported: str | None
    unit: str
    chapter: str
    read_in: str
    passes_when: Mapping[str, str | None] | None
    partly_when: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What a chapter found about one claim."""

    id: str
    verdict: str
    values: Mapping[str, float | int | str | bool]
    rule: str | None
    says: str
    reported: str | None
    unit: str

    def __str__(self) -> str:
        return f"{self.id}: {self.verdict} ({self.found})"

    @property
    def found(self) -> str:
        """The measured values in words."""
        return in_words(self.values)


@functools.cache
def ledger() -> Mapping[str, Claim]:
    """Every claim by id. Raises FileNotFoundError outside a checkout of the book."""
    path = BOOK / "claims.yml"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: the ledger is part of the book's source, so work in a "
            "checkout of it (pip install -e .) or set GRADINV_BOOK"
        )
    claims = [Claim(**row) for row in yaml.safe_load(path.read_text())]
    return {claim.id: claim for claim in claims}


def record(claim_id: str, value: Any, *, scale: str, **context) -> Verdict:
    """Judge a measurement by the ledger's rule, and keep it when a run asks for that.

    Args:
        claim_id: a row of the ledger.
        value: one number (called `value` in the rule), or several by name; a tensor or array of one entry is a number.
        scale: "smoke", "laptop" or "full".
        context: what produced it, such as device, seed and the data's source; kept with the verdict.

    Raises:
        ValueError: unknown claim or scale, or a rule that names a value that was not measured.
    """
    claims = ledger()
    if claim_id not in claims:
        raise ValueError(f"claim_id must be a row of book/claims.yml, got {claim_id!r}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    values = {
        name: getattr(number, "item", lambda number=number: number)()
        for name, number in (value if isinstance(value, Mapping) else {"value": value}).items()
    }
    verdict = judge(claims[claim_id], values, scale)
    target = os.environ.get("GRADINV_RECORD")
    if target:
        with open(target, "a") as file:
            file.write(json.dumps({**asdict(verdict), "scale": scale, **context}, default=str) + "\n")
    return verdict


def judge(claim: Claim, values: Mapping[str, Any], scale: str) -> Verdict:
    """The verdict on measured values, by the claim's rule for the scale."""
    rule = (claim.passes_when or {}).get(scale)
    if claim.passes_when is None:
        verdict = "no figure to compare with"
    elif rule is None:
        verdict = "out of reach at this scale"
    elif _holds(claim, rule, values):
        verdict = "reproduced"
    elif claim.partly_when and _holds(claim, claim.partly_when, values):
        verdict = "partly"
    else:
        verdict = "not reproduced"
    return Verdict(claim.id, verdict, dict(values), rule, claim.says, claim.reported, claim.unit)


def table(verdicts) -> pd.DataFrame:
    """Verdicts as the table that ends a chapter."""
    return pd.DataFrame(
        [
            {
                "claim": verdict.says,
                "paper": verdict.reported or "not readable",
                "here": verdict.found,
                "passes when": verdict.rule or "",
                "verdict": verdict.verdict,
            }
            for verdict in verdicts
        ]
    )


def in_words(values: Mapping[str, Any]) -> str:
    """Measured values as a line of text, with four digits where they are not whole: "psnr = 21.35, count = 7"."""
    return ", ".join(
        f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}" for name, value in values.items()
    )


def glue(name: str, value) -> None:
    """Store a value in the notebook under a name, so that any page of the book can print it with `{glue:text}`.

    Writes what `myst_nb.glue(name, value, display=False)` writes, and needs only IPython, so that a chapter runs
    where the site builder is not installed.
    """
    from IPython.core.formatters import format_display_data
    from IPython.display import display

    prefix = "application/papermill.record/"
    if isinstance(value, np.generic | torch.Tensor):
        value = value.item()  # a page formats plain numbers only
    bundle, metadata = format_display_data(value)
    metadata["scrapbook"] = {"name": name, "mime_prefix": prefix}
    display({prefix + mime: data for mime, data in bundle.items()}, raw=True, metadata=metadata)


def glue_verdicts(verdicts) -> None:
    """Store each verdict under its claim's id, and each of its values under `id.name`."""
    for verdict in verdicts:
        glue(verdict.id, verdict.verdict)
        for name, value in verdict.values.items():
            glue(f"{verdict.id}.{name}", value)


def results(directory: pathlib.Path = RESULTS) -> list[dict]:
    """The run records in a directory, one a chapter and scale, in the order of chapter and scale."""
    runs = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    return sorted(runs, key=lambda run: (run["chapter"], SCALES.index(run["scale"])))


def overview(runs: list[dict]) -> pd.DataFrame:
    """Every claim of the ledger with the verdict of each scale."""
    found = {(claim["id"], run["scale"]): claim["verdict"] for run in runs for claim in run["claims"]}
    return pd.DataFrame(
        [
            {
                "claim": claim.id,
                "chapter": claim.chapter,
                **{scale: found.get((claim.id, scale), "not run") for scale in SCALES},
            }
            for claim in ledger().values()
        ]
    )


def _holds(claim: Claim, rule: str, values: Mapping[str, Any]) -> bool:
    try:
        tree = ast.parse(rule, mode="eval")
        for part in ast.walk(tree):
            named = not isinstance(part, ast.Call) or (
                isinstance(part.func, ast.Name) and part.func.id in RULE_FUNCTIONS
            )
            if not isinstance(part, RULE_PARTS) or not named:
                raise ValueError(f"{ast.unparse(part)} is not allowed in a rule")
        answer = eval(compile(tree, "rule", "eval"), {"__builtins__": {}}, {**RULE_FUNCTIONS, **values})
        if not isinstance(answer, bool):
            raise ValueError(f"it gives {answer!r}, not true or false")
        return answer
    except Exception as error:
        raise ValueError(f"the rule of {claim.id} ({rule}) cannot be judged from {sorted(values)}: {error}") from error
