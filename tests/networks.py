"""Networks and layers that more than one test file takes apart, and the equations of a layer as one matrix."""

import torch
from torch import nn

# channels, filters, kernel, stride, padding, height, width, rank: a formula that forgets the border is wrong on them
KNOWN_RANKS = [(3, 4, 2, 2, 1, 8, 7, 110), (3, 6, 2, 2, 1, 7, 7, 129), (1, 3, 2, 3, 1, 8, 7, 24)]


def dense_equations(operator, sensitivity, known=None):
    """All equations of a layer as one matrix: a row for each known output and each weight."""
    size = torch.Size(operator.input_shape).numel()
    unit = torch.eye(size, dtype=torch.float64).view(size, *operator.input_shape)
    outputs = operator.apply(unit).flatten(1).T
    matrix = [outputs if known is None else outputs[known.flatten()]]
    if sensitivity is not None:
        matrix.append(torch.stack([operator.weight_gradient(one[None], sensitivity).flatten() for one in unit], 1))
    # the gradient's equations are as long as the output's, so that one cut-off does for both
    sizes = [rows.norm().clamp(min=1e-300) for rows in matrix]
    return torch.cat([rows / size for rows, size in zip(matrix, sizes, strict=True)])


class Recurrent(nn.Module):
    """An LSTM over the rows of a one-channel picture (n, 1, rows, 4), and a layer on its last output."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.cell(x.squeeze(1))[0][:, -1])


class Net(nn.Module):
    """Layers by name, and a function of the network and the picture that says how they run."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.run(self, x)
