"""Which attacks apply to a network, without running one."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from gradinv.attacks.unmix import unmixable
from gradinv.attacks.walk_back import dense_block, is_readable
from gradinv.audit.load import in_one_line
from gradinv.layers import Block, Layer, NotCovered, chain, obstacle, read
from gradinv.trace import Call

LARGE = 50_000_000  # parameters; from here on it is not tried whether the layers form a chain
KINKED = ("relu", "leaky_relu", "prelu", "rrelu", "threshold", "hard", "clamp", "abs", "max", "adaptive_max", "amax")


@dataclass(frozen=True)
class Attack:
    """Whether an attack applies ("yes", "in part", "no", "not known"), and why."""

    name: str
    applies: str
    why: str


def attacks_of(model: nn.Module, input_shape: tuple[int, ...], calls: Sequence[Call]) -> tuple[Attack, ...]:
    """Which attacks apply to a network; calls as `gradinv.trace.trace` gives them."""
    try:
        layers = read(model, input_shape)
    except Exception as error:  # it ran when its calls were traced, so this is the fault of the hooks or the device
        why = f"the layers could not be read one by one: {in_one_line(error)}"
        read_ = [Attack(name, "not known", why) for name in ("walk_back", "unmix", "r_gap", "restore_labels")]
    else:
        sent = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        read_ = [
            Attack("walk_back", *_walk_back(layers, sent)),
            Attack("unmix", *_unmix(layers, sent)),
            Attack("r_gap", *_r_gap(model, input_shape, layers)),
            Attack("restore_labels", *_restore_labels(layers, calls, sent)),
        ]
    return (*read_, Attack("match_gradients", "yes", _match_gradients(calls)))


def _walk_back(layers: list[Layer], sent: set[str]) -> tuple[str, str]:
    block, before, front = dense_block(layers, sent, "eval")
    biased = [{f"{layer.name}.weight", f"{layer.name}.bias"} <= sent for layer, _ in block]
    if not any(biased):
        reason = f": {before}" if before and not block else ""
        return "no", f"no fully connected layer with a bias can be reached{reason}"
    block = block[: len(biased) - biased[::-1].index(True)]
    first = block[0][0].name or "the layer"
    for layer, activation in reversed(block):
        if f"{layer.name}.bias" not in sent and not is_readable(activation):
            return "in part", f"it stops above {layer.name}, which has no bias and a {type(activation).__name__} behind"
    if before:
        return "in part", f"it gives the {block[0][0].module.in_features:,} inputs of {first}, not pixels: {before}"
    if front:
        return "yes", f"{first} sees the picture itself and has a bias, so its gradient alone gives the picture"
    return "yes", f"from {block[-1][0].name or first} down to the picture all layers are fully connected"


def _unmix(layers: list[Layer], sent: set[str]) -> tuple[str, str]:
    block, places, reason = unmixable(layers, sent, "eval")
    if reason:
        return "no", f"it needs a fully connected layer with a ReLU behind and no other kind before: {reason}"
    layer = max((block[i][0] for i in places), key=lambda layer: layer.module.out_features)
    units = layer.module.out_features
    return "yes", (
        f"{layer.name or 'the layer'} has {units:,} units and a ReLU behind, so a batch of far fewer than "
        f"{units // 2:,} pictures can come out whole"
    )


def _r_gap(model: nn.Module, input_shape: tuple[int, ...], layers: list[Layer]) -> tuple[str, str]:
    why = obstacle(layers)
    if why:
        return "no", why
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    if count > LARGE or any(parameter.is_meta for parameter in parameters):
        reason = "the model is large" if count > LARGE else "the model has shapes and no values"
        return "not known", f"it covers each layer, but whether they form a chain was not tried: {reason}"
    try:
        _, stages = chain(model, input_shape)
    except NotCovered as error:
        return "no", in_one_line(error)
    except Exception as error:  # it does not run in double precision, for one
        return "not known", f"the layers could not be read as a chain: {in_one_line(error)}"
    last = stages[-1]
    if isinstance(last, Block) or not isinstance(last.operator.module, nn.Linear):
        return "no", f"{last.name} comes last, which must be a fully connected layer"
    bias = "" if last.operator.module.bias is not None else "; the last has no bias, so it may begin in several ways"
    return "yes", f"the network is a chain of {len(stages)} layers and residual blocks{bias}"


def _restore_labels(layers: list[Layer], calls: Sequence[Call], sent: set[str]) -> tuple[str, str]:
    last, call = layers[-1], calls[-1]
    name = f"{last.name}." if last.name else ""
    if not isinstance(last.module, nn.Linear) or call.weight != f"{name}weight" or len(last.input_shape) != 1:
        return "no", "the outputs of the network are not those of a fully connected layer"
    if last.module.out_features < 2:
        return "no", "one output leaves cross-entropy no classes"
    if f"{name}weight" not in sent and f"{name}bias" not in sent:
        return "no", f"{last.name}, the last layer, sends no gradient"
    if sum(other.weight == call.weight for other in calls) > 1:
        return "no", f"{last.name}, the last layer, runs more than once"
    if f"{name}bias" not in sent:
        return "yes", f"{name}weight tells labels with cross-entropy, less exactly than with a bias"
    return "yes", f"{name}bias tells the label of a single picture, and counts those of a batch, with cross-entropy"


def _match_gradients(calls: Sequence[Call]) -> str:
    why = "it works on every network that can be differentiated twice, and guarantees nothing"
    kinks = sorted({call.function.strip("_") for call in calls if call.function.startswith(KINKED)})
    if kinks:
        why += f"; this one has kinks ({', '.join(kinks)}) and is twice differentiable almost everywhere only"
    if any(call.function == "batch_norm" for call in calls):
        why += "; batch norm in train mode takes its statistics from the batch, so pass the clients' mode"
    return why
