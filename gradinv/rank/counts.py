"""The equations that a gradient gives for each layer's input (Zhu & Blaschko 2021, section 4).

A layer's input has |x| unknowns. Its weights' gradient gives |W| equations, its output |z| more, and an
over-determined layer before it |V| virtual ones. RA-i = |x| - |W| - |z| - |V|: above zero the input cannot be
recovered in full. The converse fails, since equations can repeat each other; `nullity` is what is really lost.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from gradinv.layers import pads_of
from gradinv.rank.generic import Convolution, generic_nullity
from gradinv.trace import LOOKS, Call, trace

SUMS = ("add", "add_", "sub", "sub_", "subtract", "__radd__", "__rsub__")
JOINS = ("cat", "concat", "concatenate")
# What puts values side by side, so that none of them is lost
APART = (*JOINS, "stack", "hstack", "vstack", "dstack", "column_stack", "copy_", "__setitem__")
PRODUCTS = ("mul", "div", "true_divide", "addcmul", "addcdiv", "scaled_dot_product", "__mul__", "__rmul__")
MATRIX = ("matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "addmm", "baddbmm", "einsum", "tensordot", "__matmul__")
GATES = ("glu",)  # the product of two halves of one value
OWN_SCALE = ("layer_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm", "normalize")
WINDOWS = ("max_pool", "avg_pool", "adaptive_", "fractional_max_pool", "lp_pool")
REDUCTIONS = ("mean", "sum", "amax", "amin", "max", "min", "median", "logsumexp", "interpolate")
WEIGHTED = ("conv", "linear", "bilinear")
FLAT = ("round", "sign", "floor", "ceil", "trunc", "detach", "detach_", "argmax", "argmin")
UNSEEN = "the picture does not reach its weights, as far as can be seen"
TOGETHER = "the layers before it count their outputs, of which only the sum is known"
ONE_BY_ONE = "one of its branches may make up for what another one loses, but they count one by one"
DROPPED = "it leaves out a part of its input, and the layers before it count all of their output as known"
# What may stand beside counted layers below a skip: with it around, their input follows from the sum all the same
BELOW_A_SKIP = (*OWN_SCALE, "add", "sub", "mul", "div")


@dataclass(frozen=True)
class LayerCount:
    """The equations for one layer's input.

    x, weights, z: |x|, |W| and |z|; virtual: |V| as the sum of surpluses of the layers that its input went through;
    budget: |V| as what is left of them after their deficits; nullity: how many of the |x| directions the gradient of
    these weights and the output leave open for almost all weights and sensitivities (for a pooling, which has no
    weights: at least as many); beside: other layers with the same input, whose equations come on top; geometry, size:
    of a convolution in two dimensions, and height and width of its input; ra: |x| - |W| - |z|; ra_virtual:
    ra - virtual.
    """

    name: str
    kind: str
    x: int
    weights: int
    z: int
    virtual: int
    budget: int
    nullity: int
    beside: tuple[str, ...] = ()
    geometry: Convolution | None = None
    size: tuple[int, int] = (1, 1)

    @property
    def rank(self) -> int:
        return self.x - self.nullity

    @property
    def ra(self) -> int:
        return self.x - self.weights - self.z

    @property
    def ra_virtual(self) -> int:
        return self.ra - self.virtual


@dataclass(frozen=True)
class BlockCount:
    """The equations for the input of layers with a skip around them (appendix D of the paper).

    kind: "sum" or "concatenation", how the skip joins what it went around; layers: what it goes around, in order;
    x, f: entries of the input and of the sum or concatenation; shortcut: weights of the skip's own layer. The skip of a
    concatenation, and of a sum without such a layer, carries the whole input.
    with_skip: |x| - |W| - |Ws| - |f|, with W the last layer's weights and Ws the shortcut's; without_skip: the largest
    ra of the layers.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    x: int
    weights: int
    shortcut: int
    f: int
    without_skip: int

    @property
    def with_skip(self) -> int:
        return self.x - self.weights - self.shortcut - self.f


@dataclass(frozen=True)
class NotCounted:
    """Something that a network does which the counts leave out, why, and the names of its parameters."""

    name: str
    kind: str
    why: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind}): {self.why}"


@dataclass(frozen=True)
class RankReport:
    """The counts of a whole network, in running order, what they leave out, and the trace that they were made from."""

    layers: Sequence[LayerCount]
    blocks: Sequence[BlockCount]
    not_counted: Sequence[NotCounted]
    calls: Sequence[Call] = field(repr=False)

    @property
    def exposed(self) -> list[LayerCount]:
        """The layers with weights that no skip goes around: where one of them lacks equations, nothing makes up.

        Of several layers with the same input, the one that loses least.
        """
        inside = {name for block in self.blocks for name in block.layers}
        lost = {layer.name: (layer.nullity, layer.ra) for layer in self.layers if layer.weights}
        return [
            layer
            for layer in self.layers
            if layer.weights and layer.name not in inside and all(lost[layer.name] <= lost[x] for x in layer.beside)
        ]

    @property
    def index(self) -> int:
        """The largest RA-i, without virtual constraints: over blocks that lie in no other one, and over the layers
        that no skip goes around, where those with the same input count together.

        Branches that are joined count one by one, though one can make up for another: then it is an upper bound.
        """
        inside = [set(block.layers) for block in self.blocks]
        blocks = [block for block in self.blocks if not any(set(block.layers) < other for other in inside)]
        gives = {row.name: row.weights + row.z for row in self.layers if not any(row.name in names for names in inside)}
        layers = [row.ra - sum(gives.get(name, 0) for name in row.beside) for row in self.exposed]
        return max(layers + [block.with_skip for block in blocks])

    def table(self) -> pd.DataFrame:
        """A row a layer, in the order in which they run."""
        columns = ("name", "kind", "x", "weights", "z", "virtual", "budget", "ra", "ra_virtual", "rank", "nullity")
        return pd.DataFrame([{column: getattr(layer, column) for column in columns} for layer in self.layers])

    def block_table(self) -> pd.DataFrame:
        """A row a skip connection, with the index with and without it."""
        columns = ("name", "kind", "layers", "x", "weights", "shortcut", "f", "with_skip", "without_skip")
        rows = [{column: getattr(block, column) for column in columns} for block in self.blocks]
        return pd.DataFrame(rows, columns=columns)

    def plot(self) -> Figure:
        """RA-i of each layer as bars: negative ones have equations to spare."""
        import matplotlib.pyplot as plt

        rows = [layer for layer in self.layers if layer.weights]
        figure, axis = plt.subplots(figsize=(6.4, 0.25 * len(rows) + 1))
        axis.barh([row.name for row in rows], [row.ra for row in rows])
        axis.axvline(0, color="black", linewidth=1)
        axis.set_xscale("symlog")
        axis.invert_yaxis()
        axis.set_xlabel("RA-i = |x| - |W| - |z|")
        return figure


def analyse(model: nn.Module, input_shape: tuple[int, ...]) -> RankReport:
    """Count the equations of every layer.

    Convolutions in two dimensions, linear maps (of many vectors too) and poolings have a row. Batch norm with frozen
    statistics and activations keep their input's size and have none. All else that has weights, products of two
    values, and sums of values that cannot be told apart are named in `not_counted`, with every weight that has no row:
    one that works on the picture more than once, or is frozen while others are trained (where all are frozen, they
    count as trained). The values of the weights are not looked at.

    Args:
        model: any module.
        input_shape: (channels, height, width) of one picture, or (features,).

    Raises:
        ValueError: the model does not accept that shape, or nothing in it can be counted.
    """
    if not isinstance(input_shape, tuple | list) or not all(isinstance(size, int) for size in input_shape):
        raise ValueError(f"input_shape must be (channels, height, width), got {type(input_shape).__name__}")
    if len(input_shape) not in (1, 3) or min(input_shape) < 1:
        raise ValueError(f"input_shape must be (channels, height, width) or (features,), got {tuple(input_shape)}")
    calls = trace(model, tuple(input_shape))
    own = dict(model.named_parameters())
    used = Counter(name for call in calls for name in call.parameters)
    frozen = {name for name, parameter in own.items() if not parameter.requires_grad}
    frozen = frozen if len(frozen) < len(own) else set()
    why = {number: _why_not(call, calls, used, frozen) for number, call in enumerate(calls)}
    before = _ancestors(calls)
    row_of = _rows(calls, before, why)
    missing = {number for number in why if why[number] and not calls[number].function.startswith(BELOW_A_SKIP)}
    blocks, others = _blocks(calls, row_of, before, missing)
    for number in others:
        why[number] = why[number] or (TOGETHER if calls[number].function in SUMS else ONE_BY_ONE)
    lines = [NotCounted(calls[n].name, calls[n].kind, why[n], calls[n].parameters) for n in why if why[n]]
    for name, parameter in own.items():
        if parameter.ndim > 1 and not used[name]:
            owner = name.rpartition(".")[0]
            lines.append(NotCounted(owner, type(model.get_submodule(owner)).__name__, UNSEEN, (name,)))
    lines = list(dict.fromkeys(lines))
    if not any(row.weights for row in row_of.values()):
        raise ValueError(
            f"model must have a convolution or a linear layer to count, got {type(model).__name__}"
            + "".join(f"; not counted: {line}" for line in lines)
        )
    return RankReport(list(row_of.values()), blocks, lines, calls)


def _rows(calls: list[Call], before: list[frozenset[int]], why: dict[int, str]) -> dict[int, LayerCount]:
    """The row of each call that is counted, by its number, and the rows beside it."""
    rows: dict[int, LayerCount] = {}
    for number, call in enumerate(calls):
        row = None if why[number] else _row(call, calls, [rows[n] for n in rows if n in before[number]])
        if row:
            rows[number] = row
    taken: dict[int, list[str]] = {}
    for number, row in rows.items():
        if row.weights:
            taken.setdefault(_source(calls[number], calls), []).append(row.name)
    for number, row in rows.items():
        others = taken[_source(calls[number], calls)] if row.weights else ()
        rows[number] = replace(row, beside=tuple(name for name in others if name != row.name))
    return rows


def _ancestors(calls: list[Call]) -> list[frozenset[int]]:
    """The calls that each one depends on, itself among them."""
    before: list[frozenset[int]] = []
    for number, call in enumerate(calls):
        before.append(frozenset([number]).union(*(before[taken] for taken in call.takes if taken >= 0)))
    return before


def _why_not(call: Call, calls: list[Call], used: Counter, frozen: set[str]) -> str:
    """Why the counts leave out what this call does to the equations; empty where they need not say anything."""
    if call.function in LOOKS:
        return "the network looks at values here, and may run otherwise for another picture"
    if call.weight:
        pictures = call.input_shape[0] if call.function == "conv2d" and len(call.input_shape) == 4 else 1
        if used[call.weight] > 1:
            return f"its weights run {used[call.weight]} times, and their gradient is a sum"
        if call.weight in frozen:
            return "its weights are frozen, so that no gradient is sent for them"
        return f"it runs on {pictures} pictures at once" if pictures > 1 else ""
    if call.function == "batch_norm" and not call.options["training"]:
        return ""
    if call.parameters and call.function not in ("conv2d", "linear"):
        return "it has weights, and is neither a convolution in two dimensions nor a linear layer"
    if call.function.startswith(WEIGHTED):
        return "its weights are computed or fixed, so that their gradient is not sent as such"
    if call.function.startswith((*OWN_SCALE, "batch_norm")):
        return "it divides by a size of its own input"
    if call.function in GATES or (len(call.takes) > 1 and call.function.startswith((*PRODUCTS, *MATRIX))):
        return "it multiplies two values that both come from the picture"
    if call.function in MATRIX:
        return "it multiplies by a matrix that is no weight"
    if len(call.takes) > 1 and call.function not in (*SUMS, *APART):
        return "it combines values from the picture otherwise than by a sum or side by side"
    if call.function in FLAT:
        return "no gradient passes through it"
    if _drops(call, calls):
        return DROPPED
    if call.constants if call.function in JOINS else call.function == "pad" and not _merges(call, calls):
        return "it adds constants around its input, which count among the unknowns of what follows"
    return ""


def _drops(call: Call, calls: list[Call]) -> bool:
    """Whether a function that has no row gives fewer numbers than it takes, and nothing else takes the rest."""
    takes = math.prod(call.input_shape)
    counted = call.function.startswith((*WINDOWS, "pad")) or call.function in REDUCTIONS
    fewer = 0 < call.size < takes  # a comparison gives no numbers at all
    if counted or len(call.takes) > 1 or not fewer:
        return False
    beside = [other for other in calls if call.takes[0] in other.takes]
    alike = [other.size for other in beside if other.function == call.function]
    return len(alike) == len(beside) and sum(alike) < takes


def _merges(pad: Call, calls: list[Call]) -> bool:
    """Whether all that takes the padded value has it as a part of itself, or is a sum."""
    takers = [call for call in calls for taken in call.takes if taken >= 0 and calls[taken] is pad]
    parts = (call.function in SUMS or _padding(call, calls) is not None for call in takers)
    return max(pad.options["pad"]) <= 0 or all(parts)


def _padding(call: Call, calls: list[Call]) -> Call | None:
    """The padding right before a convolution or a pooling, where it counts as a part of it."""
    before = calls[call.takes[0]] if call.takes[0] >= 0 else None
    if before is None or before.function != "pad" or any(before.options["pad"][4:]):
        return None
    if call.weight and call.function == "conv2d":
        grown = before.options["mode"] == "constant" and min(before.options["pad"]) >= 0
        return before if grown or not any(_own_pads(call)) else None
    return before if call.function.startswith(WINDOWS) else None


def _own_pads(call: Call) -> tuple[int, ...]:
    return pads_of(call.options["padding"], call.weight_shape[2:], call.options["dilation"])


def _virtual(earlier: list[LayerCount]) -> tuple[int, int]:
    """|V| in its two readings, from the layers that a value went through."""
    virtual = budget = 0
    for row in earlier:
        surplus = max(row.z - row.x, 0)
        virtual, budget = virtual + surplus, max(budget + surplus - max(row.ra, 0), 0)
    return virtual, budget


def _row(call: Call, calls: list[Call], earlier: list[LayerCount]) -> LayerCount | None:
    z, (virtual, budget) = call.size, _virtual(earlier)
    if call.weight is None:
        pool = call.function.startswith(WINDOWS)
        x = math.prod((_padding(call, calls) or call).input_shape)
        same = x == z and (not pool or call.function.startswith("adaptive_"))  # one pixel a window
        if not (pool or call.function in REDUCTIONS) or len(call.takes) > 1 or same:
            return None
        return LayerCount(call.name, call.kind, x, 0, z, virtual, budget, max(x - z, 0))
    conv, size = _geometry(call, calls)
    x = conv.channels * size[0] * size[1]
    name = call.weight.removesuffix(".weight") if call.weight != "weight" else ""
    geometry = conv if call.function == "conv2d" else None
    weights, lost = math.prod(call.weight_shape), generic_nullity(conv, size)
    return LayerCount(name, call.kind, x, weights, z, virtual, budget, lost, (), geometry, size)


def _source(call: Call, calls: list[Call]) -> int:
    """The call that made a layer's input, before padding."""
    return (_padding(call, calls) or call).takes[0]


def _geometry(call: Call, calls: list[Call]) -> tuple[Convolution, tuple[int, int]]:
    """A weighted layer as a convolution, and its input's size. A linear map of vectors has a kernel of one pixel."""
    filters, channels, *kernel = call.weight_shape
    if call.function == "linear":
        return Convolution(channels, filters, (1, 1)), (math.prod(call.input_shape) // channels, 1)
    pads, mode, size = _own_pads(call), "constant", call.input_shape[-2:]
    before = _padding(call, calls)
    if before:
        outer = (*before.options["pad"], 0, 0, 0, 0)[:4]
        pads = tuple(sum(both) for both in zip(pads, outer, strict=True))
        mode, size = before.options["mode"], before.input_shape[-2:]
    stride, dilation = call.options["stride"], call.options["dilation"]
    groups = call.options["groups"]
    shape = channels * groups, filters, tuple(kernel)
    return Convolution(*shape, stride, pads, dilation, groups, mode), tuple(size)


def _blocks(
    calls: list[Call], row_of: dict[int, LayerCount], before: list[frozenset[int]], missing: set[int]
) -> tuple[list[BlockCount], list[int]]:
    """The sums and concatenations of which one part went around layers with weights, and those of other branches."""
    blocks, others = [], []
    for number, call in enumerate(calls):
        kind = "sum" if call.function in SUMS else "concatenation" if call.function in JOINS else None
        if kind is None or len(call.takes) < 2:
            continue
        sources = [before[taken] if taken >= 0 else frozenset() for taken in call.takes]
        fork = max(frozenset.intersection(*sources), default=-1)
        branches = [source - (before[fork] if fork >= 0 else frozenset()) for source in sources]
        rows = [[row_of[one] for one in sorted(branch) if one in row_of] for branch in branches]
        inside = frozenset.union(*branches)
        first = min(inside, default=None)
        if not any(row.weights for branch in rows for row in branch):
            continue
        x = calls[fork].size if fork >= 0 else math.prod(calls[first].input_shape)
        side = min(range(len(rows)), key=lambda i: (len(rows[i]), -math.prod(call.shapes[i])))
        layers = [row_of[one] for one in sorted(inside - branches[side]) if one in row_of and row_of[one].weights]
        shortcut = rows[side]
        if shortcut:
            skips = kind == "sum" and len(shortcut) == 1 and shortcut[0].weights and shortcut[0].x == x
        else:
            skips = math.prod(call.shapes[side]) == x and all(calls[one].size >= x for one in branches[side])
        enters = {taken for one in inside for taken in calls[one].takes} - inside
        if not layers or not skips or enters != {fork} or missing & inside:
            others += [number] if kind == "sum" or sum(map(bool, rows)) > 1 else []
            continue
        blocks.append(
            BlockCount(
                call.name or layers[0].name,
                kind,
                tuple(layer.name for layer in (*layers, *shortcut)),
                x,
                layers[-1].weights,
                sum(layer.weights for layer in shortcut),
                call.size,
                max(layer.ra for layer in layers),
            )
        )
    return blocks, others
