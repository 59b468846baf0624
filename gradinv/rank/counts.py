"""The equations that a gradient gives for each layer's input (Zhu & Blaschko 2021, section 4).

A layer's input has |x| unknowns. Its weights' gradient gives |W| equations, its output |z| more, and an
over-determined layer before it |V| virtual ones. RA-i = |x| - |W| - |z| - |V|: above zero the input cannot be
recovered in full. The converse fails, since equations can repeat each other; `nullity` is what is really lost.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from gradinv.rank.generic import Convolution, generic_nullity, pads_of
from gradinv.trace import Call, trace

SUMS = ("add", "add_", "__add__", "__radd__", "__iadd__")
JOINS = ("cat", "concat", "concatenate")
PRODUCTS = ("mul", "matmul", "bmm", "baddbmm", "div", "einsum", "scaled_dot_product", "__mul__", "__matmul__")
POOLS = ("max_pool", "avg_pool", "adaptive_", "fractional_max_pool", "lp_pool", "mean", "sum", "amax", "interpolate")
WEIGHTED = ("conv", "linear", "bilinear")
# What may stand beside counted layers below a skip: with it around, their input follows from the sum all the same
BELOW_A_SKIP = ("layer_norm", "group_norm", "rms_norm", "instance_norm", "add", "sub", "mul", "div")


@dataclass(frozen=True)
class LayerCount:
    """The equations for one layer's input.

    x, weights, z: |x|, |W| and |z|; virtual: |V| as the sum of surpluses of earlier layers; budget: |V| as what is
    left of them after earlier deficits; nullity: how many of the |x| directions the gradient of these weights and the
    output leave open for almost all weights and sensitivities (for a pooling, which has no weights: at least as
    many); beside: other layers with the same input, whose equations come on top; ra: |x| - |W| - |z|; ra_virtual:
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
    x, f: entries of the input and of the sum or concatenation; shortcut: weights of the skip's own layer.
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
    """Something that a network does which the counts leave out, and why. What is counted is right without it."""

    name: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind}): {self.why}"


@dataclass(frozen=True)
class RankReport:
    """The counts of a whole network, in running order, and what they leave out."""

    layers: Sequence[LayerCount]
    blocks: Sequence[BlockCount]
    not_counted: Sequence[NotCounted]

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
        """The largest RA-i, without virtual constraints: over blocks, and over the layers that no skip goes around."""
        return max([layer.ra for layer in self.exposed] + [block.with_skip for block in self.blocks])

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
    statistics and activations keep their input's size and have none. All else that has weights, and products of two
    values, is named in `not_counted`. The weights themselves are not looked at.

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
    used = Counter(call.weight for call in calls if call.weight)
    row_of: dict[int, LayerCount] = {}
    missing: list[NotCounted] = []
    virtual = budget = 0
    for number, call in enumerate(calls):
        why = _why_not(call, used)
        if why:
            missing.append(NotCounted(call.name, call.kind, why))
            continue
        row = _row(call, calls, virtual, budget)
        if row:
            row_of[number] = row
            surplus = max(row.z - row.x, 0)
            virtual += surplus
            budget = max(budget + surplus - max(row.ra, 0), 0)
    if not any(row.weights for row in row_of.values()):
        left_out = "".join(f"; not counted: {line}" for line in dict.fromkeys(missing))
        raise ValueError(
            f"model must have a convolution or a linear layer to count, got {type(model).__name__}{left_out}"
        )
    taken: dict[int, list[str]] = {}
    for number, row in row_of.items():
        if row.weights:
            taken.setdefault(_source(calls[number], calls), []).append(row.name)
    for number, row in row_of.items():
        others = taken.get(_source(calls[number], calls), ()) if row.weights else ()
        row_of[number] = replace(row, beside=tuple(name for name in others if name != row.name))
    blocks = _blocks(calls, row_of, {n for n, call in enumerate(calls) if _breaks_a_block(call, used)})
    return RankReport(list(row_of.values()), blocks, list(dict.fromkeys(missing)))


def _why_not(call: Call, used: Counter) -> str:
    """Why the counts leave out what this call does to the equations; empty where they need not say anything."""
    if call.weight:
        if used[call.weight] > 1:
            return f"its weights run {used[call.weight]} times, and their gradient is a sum"
        if call.function == "conv2d" and call.input_shape[0] != 1:
            return f"it runs on {call.input_shape[0]} pictures at once"
        return ""
    if call.function == "batch_norm":
        return ""
    if call.parameters:
        return "it has weights, and is neither a convolution in two dimensions nor a linear layer"
    if call.function.startswith(WEIGHTED):
        return "its weights are computed, so that their gradient is not sent as such"
    if call.function.startswith(PRODUCTS) and len(call.takes) > 1:
        return "it multiplies two values that both come from the picture"
    return ""


def _breaks_a_block(call: Call, used: Counter) -> bool:
    return bool(_why_not(call, used)) and not call.function.startswith(BELOW_A_SKIP)


def _row(call: Call, calls: list[Call], virtual: int, budget: int) -> LayerCount | None:
    x, z = math.prod(call.input_shape), call.size
    if call.weight is None:
        if not call.function.startswith(POOLS) or len(call.takes) > 1 or x == z:
            return None
        return LayerCount(call.name, call.kind, x, 0, z, virtual, budget, max(x - z, 0))
    conv, size = _geometry(call, calls)
    x = conv.channels * size[0] * size[1]
    name = call.weight.removesuffix(".weight") if call.weight != "weight" else ""
    return LayerCount(name, call.kind, x, math.prod(call.weight_shape), z, virtual, budget, generic_nullity(conv, size))


def _source(call: Call, calls: list[Call]) -> int:
    """The call that made a layer's input, before padding."""
    taken = call.takes[0]
    return calls[taken].takes[0] if taken >= 0 and calls[taken].function == "pad" else taken


def _geometry(call: Call, calls: list[Call]) -> tuple[Convolution, tuple[int, int]]:
    """A weighted layer as a convolution, and its input's size. A linear map of vectors has a kernel of one pixel."""
    filters, channels, *kernel = call.weight_shape
    if call.function == "linear":
        return Convolution(channels, filters, (1, 1)), (math.prod(call.input_shape) // channels, 1)
    stride, dilation = (
        (value, value) if isinstance(value, int) else tuple(value) * (3 - len(value))
        for value in (call.options["stride"], call.options["dilation"])
    )
    padding = call.options["padding"]
    padding = (padding, padding) if isinstance(padding, int) else padding
    pads, mode, size = pads_of(padding, kernel, dilation), "constant", call.input_shape[2:]
    before = calls[call.takes[0]] if call.takes[0] >= 0 else None
    if before and before.function == "pad" and not any(pads) and len(before.options["pad"]) == 4:
        pads, mode, size = before.options["pad"], before.options["mode"], before.input_shape[2:]
    groups = call.options["groups"]
    shape = channels * groups, filters, tuple(kernel)
    return Convolution(*shape, stride, tuple(pads), dilation, groups, mode), tuple(size)


def _blocks(calls: list[Call], row_of: dict[int, LayerCount], missing: set[int]) -> list[BlockCount]:
    """The sums and concatenations of which one part went around layers with weights."""
    before: list[frozenset[int]] = []  # the calls that each one depends on, itself among them
    blocks = []
    for number, call in enumerate(calls):
        before.append(frozenset([number]).union(*(before[taken] for taken in call.takes if taken >= 0)))
        kind = "sum" if call.function in SUMS else "concatenation" if call.function in JOINS else None
        if kind is None or len(call.takes) < 2:
            continue
        sources = [before[taken] if taken >= 0 else frozenset() for taken in call.takes]
        common = frozenset.intersection(*sources)
        fork = max(common, default=-1)
        branches = [sorted(source - (before[fork] if fork >= 0 else frozenset())) for source in sources]
        weighted = [[row_of[one] for one in branch if one in row_of and row_of[one].weights] for branch in branches]
        side = min(range(len(branches)), key=lambda i: len(weighted[i]))
        main = sorted(set().union(*(branch for i, branch in enumerate(branches) if i != side)))
        layers = [row_of[one] for one in main if one in row_of and row_of[one].weights]
        around = len(weighted[side]) <= (1 if kind == "sum" else 0)
        if not layers or not around or missing & {*main, *branches[side]}:
            continue
        first = min(main)
        blocks.append(
            BlockCount(
                call.name or layers[0].name,
                kind,
                tuple(layer.name for layer in (*layers, *weighted[side])),
                math.prod(calls[first].input_shape),
                layers[-1].weights,
                sum(layer.weights for layer in weighted[side]),
                call.size,
                max(layer.ra for layer in layers),
            )
        )
    return blocks
