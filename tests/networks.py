"""Networks that more than one test file takes apart."""

from torch import nn


class Recurrent(nn.Module):
    """An LSTM over the rows of a one-channel picture (n, 1, rows, 4), and a layer on its last output."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.cell(x.squeeze(1))[0][:, -1])
