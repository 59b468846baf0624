"""Single changes of a network that would leave more of a layer's input open, by geometry alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradinv.rank import LayerCount, RankReport, generic_nullity
from gradinv.trace import Call

BEST = 5  # changes that are listed, at most


@dataclass(frozen=True)
class Change:
    """One change of the network, by geometry alone.

    nullity_before, nullity_after: of the decisive layer; weights_before, weights_after: of all layers that are
    counted, None where the change reaches further than can be told.
    """

    layer: str
    what: str
    nullity_before: int
    nullity_after: int
    weights_before: int
    weights_after: int | None


def changes_of(report: RankReport, decisive: LayerCount | None) -> tuple[Change, ...]:
    """The changes that raise the nullity of the decisive layer, the one that raises it most first."""
    before, weights = decisive.nullity if decisive else 0, sum(layer.weights for layer in report.layers)
    alone = [layer for layer in report.exposed if layer.geometry and not layer.beside]
    found = [*_cut(report), *_halved(alone, report), *_strided(alone, report.calls)]
    changes = [
        Change(layer, what, before, after, weights, None if more is None else weights + more)
        for layer, what, after, more in found
        if after > before
    ]
    return tuple(sorted(changes, key=lambda change: -change.nullity_after)[:BEST])


def _cut(report: RankReport):
    """Cut one skip: the layers that it alone goes around decide too."""
    row = {layer.name: layer for layer in report.layers}
    skips = Counter(name for block in report.blocks for name in block.layers)
    for block in report.blocks:
        inner = block.layers[:-1] if block.shortcut else block.layers
        gone = set(block.layers) - set(inner)
        bared = [row[name] for name in inner if skips[name] == 1]
        lost = [
            layer.nullity
            for layer in bared
            if all(layer.nullity <= row[other].nullity for other in layer.beside if other not in gone)
        ]
        if lost:
            joined = block.kind == "concatenation"
            note = "; the layers behind take fewer channels" if joined else ""
            yield block.name, f"cut its skip{note}", max(lost), None if joined else -block.shortcut


def _halved(layers: list[LayerCount], report: RankReport):
    """Halve the filters of one convolution: it gives fewer equations."""
    weights = {layer.name: layer.weights for layer in report.layers}
    for layer in layers:
        conv, filters = layer.geometry, layer.geometry.filters // 2
        takers = _takers(layer.name, report.calls)
        if not filters or filters % conv.groups or takers == []:
            continue
        after = generic_nullity(replace(conv, filters=filters), layer.size)
        if takers is None:
            yield layer.name, f"{filters} filters instead of {conv.filters}; the layers behind have to fit", after, None
        else:
            changed = [weights[name] for name in (layer.name, *takers) if name in weights]
            more = sum(count * filters // conv.filters - count for count in changed)
            yield layer.name, f"{filters} filters instead of {conv.filters}", after, more


def _strided(layers: list[LayerCount], calls: Sequence[Call]):
    """Double the stride of one convolution with a kernel of three pixels or more: its output is smaller."""
    free = any(call.function.startswith(("adaptive_", "mean")) for call in calls)  # of the size of the picture
    free = free or not any(call.function == "linear" for call in calls)
    for layer in layers:
        conv = layer.geometry
        if min(conv.kernel) >= 3:
            stride = tuple(2 * step for step in conv.stride)
            after = generic_nullity(replace(conv, stride=stride), layer.size)
            note = "" if free else ", and a fully connected layer fewer inputs"
            what = f"stride {stride[0]} instead of {conv.stride[0]}; the layers behind see smaller pictures{note}"
            yield layer.name, what, after, 0 if free else None


def _takers(name: str, calls: Sequence[Call]) -> list[str] | None:
    """The layers that take the output of this one, and None where that output is joined with another one."""
    carrying = {i for i, call in enumerate(calls) if call.weight == f"{name}.weight"}
    takers = []
    for i, call in enumerate(calls):
        if not carrying & set(call.takes):
            continue
        if len(call.takes) > 1 or call.options.get("groups", 1) > 1:
            return None
        if call.weight:
            takers.append(call.weight.removesuffix(".weight"))
        else:
            carrying.add(i)
    return takers
