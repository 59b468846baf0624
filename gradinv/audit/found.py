"""What an architecture lets a gradient say about a picture.

No attack runs here. Nothing but the shapes of the weights counts, so that most networks take seconds.
"""

from dataclasses import dataclass, replace

from torch import nn

from gradinv.audit.applies import Attack, attacks_of
from gradinv.audit.changes import Change, changes_of
from gradinv.rank import LayerCount, RankReport, analyse
from gradinv.victims import Normalize


@dataclass(frozen=True)
class Audit:
    """What `audit` found; `report` is the rank analysis, `notes` are cautions about the network itself."""

    name: str
    input_shape: tuple[int, ...]
    report: RankReport
    attacks: tuple[Attack, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def decisive(self) -> LayerCount | None:
        """Of the layers that no skip goes around, the one that leaves most open; None where there is none."""
        return max(self.report.exposed, key=lambda layer: (layer.nullity, layer.ra), default=None)

    @property
    def findings(self) -> list[str]:
        """What an attacker can recover in theory, in sentences."""
        return [*_decided(self.decisive), *_around(self.report)]


def audit(model: nn.Module, input_shape: tuple[int, ...], name: str = "") -> Audit:
    """Rank analysis of a network, the attacks that apply to it, and the changes that would withhold most.

    Raises ValueError where the model does not accept that shape, or nothing in it can be counted.
    """
    report = analyse(model, input_shape)
    attacks = attacks_of(model, tuple(input_shape), report.calls)
    found = Audit(name or type(model).__name__, tuple(input_shape), report, attacks, (), _notes(model))
    return replace(found, changes=changes_of(report, found.decisive))


def _decided(decisive: LayerCount | None) -> list[str]:
    if decisive is None:
        return ["A skip goes around every layer with weights, so no single layer decides."]
    if not decisive.nullity:
        return [
            "Every counted layer that no skip goes around has nullity 0: for almost all weights, nothing in the "
            "count of their equations stops recovery."
        ]
    lines = [
        f"Layer {decisive.name or decisive.kind} decides: it withholds {decisive.nullity:,} of the {decisive.x:,} "
        "directions of its input. Its own equations, from its weights' gradient and its output, leave them open for "
        "almost all weights."
    ]
    if decisive.budget:
        lines.append(
            f"Layers before it give {decisive.virtual:,} virtual constraints, and layers that lack equations leave "
            f"{decisive.budget:,} of them. They may restore some of these directions, or all."
        )
    elif decisive.virtual:
        lines.append(
            f"Layers before it give {decisive.virtual:,} virtual constraints, and layers that lack equations use up "
            "as many. What is known of pictures may still fill these directions in."
        )
    else:
        lines.append("No layer before it gives virtual constraints. What is known of pictures may still fill these in.")
    return lines


def _around(report: RankReport) -> list[str]:
    """What the layers without weights, the skips and what is not counted add to the finding."""
    lines = []
    pools = [layer for layer in report.layers if not layer.weights and layer.nullity]
    if pools:
        most = max(pools, key=lambda layer: layer.nullity)
        count = "The pooling" if len(pools) == 1 else f"Of {len(pools)} poolings,"
        lines.append(
            f"{count} {most.name or most.kind} loses {'' if len(pools) == 1 else 'most, '}at least {most.nullity:,} of "
            f"the {most.x:,} directions of its input; the gradients of the layers before it have to make up for that."
        )
    lacking = [block for block in report.blocks if block.with_skip > 0]
    if report.blocks:
        lines.append(
            "The layers that a skip goes around do not decide, since their input can follow from where it joins them."
        )
    if lacking:
        most = max(lacking, key=lambda block: block.with_skip)
        lines.append(
            f"By counting, {len(lacking)} of the {len(report.blocks)} skips lack equations all the same; at "
            f"{most.name} there are {most.with_skip:,} fewer than the {most.x:,} unknowns. Gradients of other layers "
            "inside may make up for some."
        )
    if report.not_counted:
        lines.append("Some of the network is not counted, as listed below. The numbers hold for the rest alone.")
    return lines


def _notes(model: nn.Module) -> tuple[str, ...]:
    notes = []
    if type(model).__module__.startswith(("torchvision.", "timm.")) and not any(
        isinstance(module, Normalize) for module in model.modules()
    ):
        notes.append(
            "This library's networks expect normalised pictures. The counts do not change, but before an attack make "
            "victims.Normalize(mean, std) the first layer, since attacks work on pixels in [0, 1]."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        notes.append("Every parameter is frozen, so nothing would be sent; the counts take them as trained.")
    return tuple(notes)
