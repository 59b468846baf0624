"""A network read as its layers, once: what the analytic attacks and the rank analysis stand on."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """One leaf module as it ran.

    name and module as in the model; input_shape and output_shape of one picture, without the batch axis;
    follows says whether its input is the previous layer's output, unchanged or reshaped (for the first layer:
    the picture).
    """

    name: str
    module: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    follows: bool


@torch.no_grad()
def read(model: nn.Module, input_shape: tuple[int, ...]) -> list[Layer]:
    """The leaf modules in the order in which they run on one picture of shape (c, h, w) or (features,).

    Raises ValueError when the model does not accept a picture of that shape.
    """
    if len(input_shape) not in (1, 3):
        raise ValueError(f"input_shape must be (channels, height, width) or (features,), got {tuple(input_shape)}")
    # the copy, which gets the hooks, shares the weights: nothing here writes to them
    tensors = (*model.parameters(), *model.buffers())
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
    reference = next(model.parameters(), torch.empty(0))
    picture = torch.zeros(1, *input_shape, dtype=reference.dtype, device=reference.device)
    layers: list[Layer] = []
    arrived: dict[str, tuple] = {}
    # Keeping the last output alive keeps its address from being given to another tensor.
    left = [(_identity(picture), picture)]

    def before(name):
        # read before the layer runs, since an in-place activation changes its own input
        return lambda module, inputs, named: arrived.update({name: _identity(_first(inputs, named))})

    def after(name):
        def hook(module, inputs, named, output):
            taken, given = _first(inputs, named), _first((output,), {})
            layers.append(
                Layer(name, module, tuple(taken.shape[1:]), tuple(given.shape[1:]), arrived[name] == left[0][0])
            )
            left[0] = (_identity(given), given)

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_pre_hook(before(name), with_kwargs=True)
            module.register_forward_hook(after(name), with_kwargs=True)
    try:
        model(picture)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        raise ValueError(f"input_shape {tuple(input_shape)} does not fit the model: {error}") from error
    return layers


def _first(inputs: tuple, named: dict) -> Tensor:
    """The first tensor among a layer's arguments or outputs; a recurrent layer gives several, nested."""
    for value in (*inputs, *named.values()):
        found = value if isinstance(value, Tensor) else _first(tuple(value), {}) if isinstance(value, tuple) else None
        if found is not None:
            return found
    return torch.empty(1, 0)


def _identity(tensor: Tensor) -> tuple:
    """The same for a tensor and its reshapes; another one after any change in place, such as a skip's addition."""
    return tensor.data_ptr(), tensor.numel(), tensor.is_contiguous(), tensor._version


def slope(activation: nn.Module, output: Tensor) -> Tensor:
    """The derivative of an activation, read off its output.

    Raises TypeError for an activation whose slope cannot be read off its output.
    """
    match activation:
        case nn.ReLU():
            return (output > 0).to(output)
        case nn.LeakyReLU():
            return torch.ones_like(output).where(output > 0, activation.negative_slope)
        case nn.Sigmoid():
            return output * (1 - output)
        case nn.Tanh():
            return 1 - output**2
        case nn.Identity() | nn.Dropout():
            return torch.ones_like(output)
    raise TypeError(f"the slope of {type(activation).__name__} cannot be read off its output")


ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout)
