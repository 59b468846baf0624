"""What going back through local steps costs: step by step, against one graph over all of them.

    OMP_NUM_THREADS=1 python tests/benchmarks/local.py [--quick]

One evaluation of the match and its slope with respect to the picture, for a ConvNet and more and more local steps.
"one graph" differentiates the whole training at once, as the code of the papers does; "step by step" is what
`match_gradients` does. "time" is ours over the other's, the median over the rounds, in turns. "memory" is the growth of
the process, each in a process of its own, in units of the network's weights. "apart" is the relative difference of the
two slopes. `--quick` takes a narrow network, few steps and one round.
"""

import argparse
import pathlib
import re
import statistics
import subprocess
import sys
import time

import pandas
import torch
from torch import Tensor
from torch.func import functional_call

from gradinv import client, data, victims
from gradinv.attacks.matching import _LocalMatch

STEPS, WIDTH, ROUNDS = (2, 5, 10, 20, 50), 16, 3
QUICK = ((2, 3), 4, 1)


def problem(width: int, steps: int) -> tuple[client.Update, Tensor]:
    """The update of one real picture, and noise to start from, in double precision."""
    images = data.load("cifar10", 1)
    pixels = images.pixels.double()
    torch.manual_seed(0)
    local = client.LocalTraining(epochs=steps, lr=1e-2)
    update = client.local_update(victims.convnet(width).double(), pixels, images.labels, local)
    return update, torch.rand_like(pixels)[None].requires_grad_()


def step_by_step(update: client.Update, pixels: Tensor) -> Tensor:
    return _LocalMatch([update], "cosine", 0.0)(pixels)[2][0]


def one_graph(update: client.Update, pixels: Tensor) -> Tensor:
    start = {name: weight.detach().requires_grad_() for name, weight in update.model.named_parameters()}
    now = start
    for chosen in update.local.batches(update.batch_size):
        outputs = functional_call(update.model, now, (pixels[0][chosen],))
        loss = torch.nn.functional.cross_entropy(outputs, update.labels[chosen])
        slopes = torch.autograd.grad(loss, list(now.values()), create_graph=True)
        now = {name: w - update.local.lr * g for (name, w), g in zip(now.items(), slopes, strict=True)}
    ours = torch.cat([(start[name] - now[name]).flatten() for name in update.gradient])
    sent = torch.cat([change.flatten() for change in update.gradient.values()])
    cost = 1 - torch.nn.functional.cosine_similarity(ours, sent, dim=0)
    return torch.autograd.grad(cost, pixels)[0]


WAYS = {"step by step": step_by_step, "one graph": one_graph}


def grown(way: str, width: int, steps: int) -> float:
    """By how much a process grows for one evaluation, in units of the weights."""
    command = [sys.executable, __file__, "--grow", way, str(width), str(steps)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak() -> int:
    """The most bytes that this process has held; of Linux, since a child's `ru_maxrss` begins with its parent's."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--grow", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.grow:
        way, width, steps = options.grow
        update, pixels = problem(int(width), int(steps))
        before = peak()
        WAYS[way](update, pixels)
        weights = sum(change.nbytes for change in update.gradient.values())
        print((peak() - before) / weights)
        return
    many, width, rounds = QUICK if options.quick else (STEPS, WIDTH, ROUNDS)
    rows = []
    for steps in many:
        update, pixels = problem(width, steps)
        ratios = []
        for _ in range(rounds):
            times, slopes = [], []
            for way in WAYS.values():
                started = time.perf_counter()
                slopes.append(way(update, pixels))
                times.append(time.perf_counter() - started)
            ratios.append(times[0] / times[1])
        memory = {f"memory {name}": round(grown(name, width, steps), 1) for name in WAYS}
        apart = float((slopes[0] - slopes[1]).norm() / slopes[1].norm())
        rows.append({"steps": steps, "time": round(statistics.median(ratios), 2), **memory, "apart": f"{apart:.0e}"})
    print(pandas.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
