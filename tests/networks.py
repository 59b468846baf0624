"""Networks that more than one test file takes apart."""

from torch import nn


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
