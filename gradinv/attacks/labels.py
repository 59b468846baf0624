"""What the last layer says before any search: the label, and the factor between the gradient and that of the loss.

Of z = W h + b and cross-entropy, one picture leaves dL/db = p - onehot(label) and dL/dW = dL/db h^T, with p the
softmax of z. The one negative entry of dL/db is the label (Zhao et al. 2020, iDLG); a row of dL/dW divided by its
entry of dL/db is h, so that p is known too, and with it the size that dL/db should have.
"""

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from gradinv.client import Update, expect_update, outputs_of, working_copy
from gradinv.layers import Layer, read

CLOSE = 1e-3  # relative; a last layer whose gradient is less exactly dL/db h^T was changed on its way


def restore_labels(update: Update, *, bias: str | None = None) -> Int64[Tensor, " 1"]:
    """The label of the one picture of an update, read off the bias of the last layer.

    bias: the name of that bias, for a caller who knows it; it is looked for otherwise.
    Raises ValueError for more than one picture, another loss than cross-entropy, or a network that does not end
    in a fully connected layer whose bias gradient was sent.
    """
    expect_update(update)
    if update.batch_size > 1 or update.loss != "cross_entropy":
        raise ValueError(
            "labels can be restored for one picture with cross-entropy, got "
            f"batch_size={update.batch_size} and loss={update.loss!r}"
        )
    bias = bias or last_bias(update)
    if bias is None:
        raise ValueError(
            "labels can be restored from the bias of a fully connected layer whose outputs are the network's and "
            "which runs once: this network does not end in one, or its gradient was not sent"
        )
    return update.gradient[bias].argmin()[None]


def found_scale(update: Update, bias: str | None) -> float | None:
    """How many times the gradient of the loss the sent one is, by the layer of that bias; None where it cannot tell."""
    weight = bias and f"{bias.removesuffix('bias')}weight"
    if weight not in update.gradient:
        return None
    by_bias, by_weight = update.gradient[bias].double(), update.gradient[weight].double()
    h = by_bias @ by_weight / by_bias.square().sum()
    if not (torch.outer(by_bias, h) - by_weight).norm() <= CLOSE * by_weight.norm():
        return None
    parameters = dict(update.model.named_parameters())
    z = parameters[weight].detach().double() @ h + parameters[bias].detach().double()
    expected = z.softmax(0)
    expected[by_bias.argmin()] -= 1
    if not expected.norm() > CLOSE:  # a confident network: p - onehot drowns in rounding
        return None
    return float(by_bias @ expected / expected.square().sum())


def last_bias(update: Update) -> str | None:
    """The bias that tells a label: of the fully connected layer whose outputs are the network's, run once and sent."""
    if update.batch_size > 1 or update.loss != "cross_entropy":
        return None
    last: Layer = read(update.model, update.input_shape)[-1]
    name = f"{last.name}.bias" if last.name else "bias"
    if not isinstance(last.module, nn.Linear) or len(last.input_shape) != 1 or name not in update.gradient:
        return None
    model = working_copy(update.model, "eval")
    given: list[Tensor] = []
    model.get_submodule(last.name).register_forward_hook(lambda module, inputs, output: given.append(output.clone()))
    like = update.gradient[name]
    with torch.no_grad():
        outputs = outputs_of(model, like.new_full((1, *update.input_shape), 0.5))
    return name if len(given) == 1 and torch.equal(outputs, given[0]) else None
