"""Pass rules and measured values in words, as Markdown: `max_error < 1e-9` reads "*largest error* below 10⁻⁹"."""

import ast
import re
from collections.abc import Mapping

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
    ast.Lt: "below",
    ast.LtE: "at most",
    ast.Gt: "above",
    ast.GtE: "at least",
    ast.Eq: "equal to",
    ast.NotEq: "other than",
}
SIGNS = {ast.Add: "+", ast.Sub: "−", ast.Mult: "×", ast.Div: "/", ast.Pow: "to the power of"}
FUNCTIONS = {"abs": "size of", "min": "smallest of", "max": "largest of"}
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def name(identifier: str) -> str:
    """The name of a value: `mse_ratio` is "*MSE ratio*" and `lr_1e_2` is "*learning rate 0.01*"."""
    parts = re.sub(r"(?<![a-z0-9])1e_(\d+)", r"1e-\1", identifier).split("_")
    return f"*{' '.join(number(float(part)) if part.startswith('1e-') else WORDS.get(part, part) for part in parts)}*"


def number(value, digits: int = 7) -> str:
    """A number with so many digits and a power of ten where Python would write one; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return power(mantissa, int(exponent)) if exponent else mantissa.replace("-", "−")


def power(mantissa: str, exponent: int) -> str:
    """`1e-16` reads "10⁻¹⁶" and `-2.5e-30` reads "−2.5 × 10⁻³⁰"."""
    ten = "10" + str(exponent).translate(RAISED)
    return ten if mantissa == "1" else f"{mantissa.replace('-', '−')}\u00a0×\u00a0{ten}"


def rule(expression: str) -> str:
    """A rule of the ledger in words. Raises ValueError for what no rule may hold."""
    return _phrase(ast.parse(expression, mode="eval").body)


def values(measured: Mapping) -> str:
    """Measured values in words, with the interval of `x` behind it where `x_low` and `x_high` were measured too."""
    intervals = {key: (f"{key}_low", f"{key}_high") for key in measured}
    intervals = {key: ends for key, ends in intervals.items() if measured.keys() >= set(ends)}
    inside = {end for ends in intervals.values() for end in ends}
    found = []
    for key, value in measured.items():
        if key in inside or (key == "high" and "low" in measured):
            continue
        if key == "low" and "high" in measured:
            found.append(f"*interval*: {_between(measured, 'low', 'high')}")
            continue
        interval = f" ({_between(measured, *intervals[key])})" if key in intervals else ""
        found.append(f"{name(key)}: {number(value, 7 if isinstance(value, int) else 4)}{interval}")
    return "; ".join(found)


def _between(measured, low, high):
    return f"{number(measured[low], 4)} to {number(measured[high], 4)}"


def _phrase(node) -> str:
    match node:
        case ast.Name():
            return name(node.id)
        case ast.Constant():
            return number(node.value)
        case ast.BoolOp():
            word = " and " if isinstance(node.op, ast.And) else " or "
            return word.join(_bracketed(value, ast.BoolOp) for value in node.values)
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
    """One comparison; a bound on the size of a difference reads "within ... of"."""
    if isinstance(left, ast.Call) and left.func.id == "abs" and isinstance(operator, ast.Lt | ast.LtE):
        middle, inner = "0", left.args[0]
        if isinstance(inner, ast.BinOp) and _sums(inner):
            middle = ("−" if isinstance(inner.op, ast.Add) else "") + _phrase(inner.right)
            inner = inner.left
        return f"{_phrase(inner)} within {_phrase(right)} of {middle}"
    return f"{_phrase(left)} {COMPARISONS[type(operator)]} {_phrase(right)}"


def _sums(node) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)


def _bracketed(node, kind) -> str:
    return f"({_phrase(node)})" if isinstance(node, kind) else _phrase(node)
