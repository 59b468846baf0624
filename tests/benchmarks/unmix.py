"""What unmixing a batch costs: over the size of the batch, and against drawing rows.

    OMP_NUM_THREADS=1 python tests/benchmarks/unmix.py [--quick]

A batch of real pictures of 32 x 32 goes through a fully connected network with two hidden layers, in double precision.
"time" is the attack's wall-clock time over that of the first batch. "draws" says how many times the time of the search
for minima fits into that of the search by draws, for batches that this can do; the two take turns, and the ratio is the
median over the rounds. The error is the largest of any pixel of any picture. `--quick` takes two small batches and one
round.
"""

import argparse
import statistics
import time

import pandas
import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

from gradinv import client, data, victims
from gradinv.attacks import unmix

BATCHES = {16: 512, 24: 512, 32: 1024, 48: 2048, 64: 4096}  # and the units of each hidden layer
DRAWN = {8, 12, 14}
QUICK = {4: 64, 8: 256}
ROUNDS = 3


def sent(batch: int, width: int) -> tuple[client.Update, torch.Tensor]:
    """The gradient of the first pictures that installed packages carry, with labels in turn, and the pictures."""
    sets = [data.load(name, None if name == "photos" else 20) for name in ("cifar10", "cifar100", "imagenet", "photos")]
    pixels = torch.cat([adaptive_avg_pool2d(images.pixels.double(), 32) for images in sets])[:batch]
    torch.manual_seed(0)
    front = victims.Normalize(victims.CIFAR10_MEAN, victims.CIFAR10_STD)
    net = nn.Sequential(front, *victims.fc((3072, width, width, 10))).double().eval()
    return client.gradient(net, pixels, torch.arange(batch) % 10, reveal_labels=False), pixels


def spent(update: client.Update, **options) -> tuple[float, torch.Tensor | None]:
    started = time.perf_counter()
    found = unmix(update, **options).pixels
    return time.perf_counter() - started, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    batches = QUICK if quick else {8: 256, 12: 512, 14: 512, **BATCHES}
    rows, first = [], None
    for batch, width in batches.items():
        update, pixels = sent(batch, width)
        spent(update)  # what is made on first use
        times, ratios = [], []
        for _ in range(1 if quick else ROUNDS):
            taken, found = spent(update)
            times.append(taken)
            if batch in DRAWN:
                ratios.append(spent(update, search="sampling", patience=100)[0] / taken)
        far = torch.cdist(pixels.flatten(1), found.flatten(1), p=float("inf")).amin(1).max().item()
        first = first or statistics.median(times)
        rows.append(
            {
                "pictures": batch,
                "units": width,
                "time": statistics.median(times) / first,
                "draws": statistics.median(ratios) if ratios else None,
                "error": far,
            }
        )
    print(pandas.DataFrame(rows).to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    main()
