"""Pass rules and measured values in words, as Markdown: `max_error < 1e-9` is "*largest error* is below 10⁻⁹".

`book/value_names.yml` has the words for each claim's values; a name that is not there is taken apart into words.
"""

import ast
import functools
import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import yaml

from gradinv import claims

YES_OR_NO = "whether "
# Parts of the names that chapters give to their values, where the part alone is not a word.
WORDS = {
    "max": "largest",
    "sd": "standard deviation",
    "lr": "learning rate",
    "low": "lower end",
    "high": "upper end",
    "reidentified": "re-identified",
    **{part: part.upper() for part in ("mse", "psnr", "ssim", "dlg", "mlp", "fc", "tv")},
    **{"rgap": "R-GAP", "cnn6": "CNN6", "cnn6d": "CNN6-d", "lenet": "LeNet", "adam": "Adam", "opacus": "Opacus"},
    **{"resnet": "ResNet", "resnet20": "ResNet20", "euclid": "Euclidean"},
}
COMPARISONS = {
    ast.Lt: "is below",
    ast.LtE: "is at most",
    ast.Gt: "is above",
    ast.GtE: "is at least",
    ast.Eq: "is equal to",
    ast.NotEq: "is other than",
}
SIGNS = {ast.Add: "+", ast.Sub: "−", ast.Mult: "×", ast.Div: "/", ast.Pow: "to the power of"}
FUNCTIONS = {"abs": "the size of", "min": "the smallest of", "max": "the largest of"}
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@functools.cache
def named() -> Mapping[str, Mapping[str, str]]:
    """The words for values, by claim or pattern of claims."""
    return yaml.safe_load((claims.BOOK / "value_names.yml").read_text())


def words(claim_id: str) -> Mapping[str, str]:
    """The words for a claim's values, by name; none for an unknown claim."""
    met = [names for claim, names in named().items() if claim_id and fnmatchcase(claim_id, claim)]
    return {key: text for names in met for key, text in names.items()}


def name(identifier: str, claim_id: str = "") -> str:
    """The name of a value, its claim's or in parts: `mse_ratio` is "*MSE ratio*", `lr_1e_2` "*learning rate 0.01*"."""
    return _italic(_name(identifier, words(claim_id)))


def _italic(text: str) -> str:
    return f"*{text.removeprefix(YES_OR_NO)}*"


def emphasis(text: str) -> str:
    """The HTML of what stands between two stars, where no Markdown is read."""
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


def _name(identifier, known) -> str:
    if identifier in known:
        return known[identifier]
    value, _, end = identifier.rpartition("_")
    if end in ("low", "high") and value in known:
        return f"{WORDS[end]} of the interval of the {known[value]}"
    parts = re.sub(r"(?<![a-z0-9])1e_(\d+)", r"1e-\1", identifier).split("_")
    return " ".join(number(float(part)) if part.startswith("1e-") else WORDS.get(part, part) for part in parts)


def number(value, digits: int = 7) -> str:
    """A number with so many digits, at most four beside a power of ten; yes and no, and no number, in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "not defined" if math.isnan(value) else f"unbounded {'above' if value > 0 else 'below'}"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return power(f"{float(mantissa):g}", int(exponent))
    return text.replace("-", "−")


def power(mantissa: str, exponent: int) -> str:
    """`1e-16` reads "10⁻¹⁶" and `-2.5e-30` reads "−2.5 × 10⁻³⁰"."""
    ten = "10" + str(exponent).translate(RAISED)
    return ten if mantissa == "1" else f"{mantissa.replace('-', '−')}\u00a0×\u00a0{ten}"


def rule(expression: str, claim_id: str = "") -> str:
    """A rule of the ledger in words. Raises ValueError for what no rule may hold."""
    tree, known = ast.parse(expression, mode="eval").body, words(claim_id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in FUNCTIONS:
            node.id = _name(node.id, known)
    return _phrase(tree)


def judged(rules: Iterable[str | None]) -> set[str]:
    """The names of the values that rules use."""
    trees = [ast.walk(ast.parse(rule)) for rule in rules if rule]
    return {node.id for tree in trees for node in tree if isinstance(node, ast.Name)} - set(FUNCTIONS)


def values(measured: Mapping, claim_id: str = "", apart: Iterable[str] = ()) -> dict[str, str]:
    """Measured values by their names in words, with the interval of `x` behind it where `x_low` and `x_high` are there.

    An end of an interval that is among `apart` stands on its own.
    """
    known = words(claim_id)
    intervals = {key: (f"{key}_low", f"{key}_high") for key in measured}
    intervals = {
        key: ends for key, ends in intervals.items() if measured.keys() >= set(ends) and not set(ends) & set(apart)
    }
    inside = {end for ends in intervals.values() for end in ends}
    found = {}
    for key, value in measured.items():
        if key not in inside:
            called = _name(key, known)
            interval = f" ({_between(measured, *intervals[key])})" if key in intervals else ""
            text = number(bool(value) if called.startswith(YES_OR_NO) else value, 7 if isinstance(value, int) else 4)
            found[_italic(called)] = text + interval
    return found


def prose(text: str) -> str:
    """A text of the ledger with the signs of print: "5 +- 1", "3 x 4" and "1e-6" read "5 ± 1", "3 × 4" and "10⁻⁶"."""
    text = re.sub(r"(?<=\d) x (?=\d)", "\u00a0×\u00a0", text.replace("+-", "±"))
    return re.sub(r"\b(\d[\d.]*)e(-?\d+)\b", lambda found: power(found[1], int(found[2])), text)


def _between(measured, low, high):
    return f"{number(measured[low], 4)} to {number(measured[high], 4)}"


def _phrase(node) -> str:
    match node:
        case ast.Name():
            return _italic(node.id)
        case ast.Constant():
            return number(node.value)
        case ast.BoolOp():
            *parts, last = (_bracketed(value, ast.BoolOp) for value in node.values)
            return f"{', '.join(parts)} {'and' if isinstance(node.op, ast.And) else 'or'} {last}"
        case ast.UnaryOp(op=ast.Not()):
            return f"not ({_phrase(node.operand)})"
        case ast.UnaryOp():
            return ("−" if isinstance(node.op, ast.USub) else "") + _bracketed(node.operand, ast.BinOp)
        case ast.BinOp():
            kind = ast.BinOp if isinstance(node.op, ast.Mult | ast.Div | ast.Pow) else ()
            right = _bracketed(node.right, kind or (ast.BinOp if _sums(node.right) else ()))
            return f"{_bracketed(node.left, kind)} {SIGNS[type(node.op)]} {right}"
        case ast.Call():
            return f"{FUNCTIONS[node.func.id]} {' and '.join(map(_phrase, node.args))}"
        case ast.Compare():
            sides = [node.left, *node.comparators]
            return " and ".join(map(_comparison, sides, node.ops, sides[1:]))
    raise ValueError(f"{ast.unparse(node)} is not allowed in a rule")


def _comparison(left, operator, right) -> str:
    """One comparison; a bound on the size of a difference reads "is within ... of", and a fact needs no number."""
    match left, operator, right:
        case ast.Name(id=fact), ast.Eq(), ast.Constant(value=0 | 1 as answer) if fact.startswith(YES_OR_NO):
            return _phrase(left) if answer else f"not: {_phrase(left)}"
    if isinstance(left, ast.Call) and left.func.id == "abs" and isinstance(operator, ast.Lt | ast.LtE):
        middle, inner = "0", left.args[0]
        if isinstance(inner, ast.BinOp) and _sums(inner):
            middle = ("−" if isinstance(inner.op, ast.Add) else "") + _phrase(inner.right)
            inner = inner.left
        return f"{_phrase(inner)} is within {_phrase(right)} of {middle}"
    return f"{_phrase(left)} {COMPARISONS[type(operator)]} {_phrase(right)}"


def _sums(node) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)


def _bracketed(node, kind) -> str:
    return f"({_phrase(node)})" if isinstance(node, kind) else _phrase(node)
