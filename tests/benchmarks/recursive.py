"""What the recursive attack costs: over the size of the picture, against dense least squares, against public code.

    OMP_NUM_THREADS=1 python tests/benchmarks/recursive.py [--quick] [--large] [--public] [--out FILE]

The network is R-GAP's CNN6. Its second convolution is widened where the size asks for it, so that every layer has full
rank. The tables give the largest error of a pixel, so that one sees who found the picture.

"size" is the attack alone, by height and width. "dense" walks the same way, but builds the two matrices of each
convolution in double precision and gives them to LAPACK's least squares: "qr" needs full rank, "svd" is what NumPy's
`lstsq` does. "public" is R-GAP in the PyPI package `breaching` 0.1.2, with its own settings. It works in single
precision, so there both sides get a gradient in single precision; elsewhere it is in double precision.

A ratio says how many times our time fits into theirs, as the median over rounds in which all sides take turns. "time"
is wall-clock time, "work" is processor time, which depends less on what else the machine does. `--large` also takes
the dense sides at 32 x 32 (several minutes, 3 GB), `--public` also the public code there (two runs of several minutes,
7 GB). `--quick` is one round at 8 x 8, and a few steps of the public code's search for the logit, to see that
everything runs.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pandas
import torch
from matching import high_water, spent, taking_turns
from torch import Tensor, nn
from torch.nn import functional

from gradinv import client, data, victims
from gradinv.attacks import r_gap, recursive
from gradinv.layers import balance

# height and width, and the filters of the second convolution: the paper's 36, or 64 where they would lose something
SIZES = {(8, 8): 36, (16, 16): 36, (24, 24): 36, (32, 32): 36, (32, 48): 36, (48, 48): 36, (64, 64): 64}
QUICK, SMALL, PAPER = (8, 8), (16, 16), (32, 32)
ROUNDS = 3
SCALE = 0.1  # the label that the public code is fixed to, which makes its picture 1 / 0.1 times as loud


@dataclass(frozen=True)
class Case:
    """A network, a real picture resized, and the update that it makes; its logit has the wrong sign, so one root."""

    net: nn.Module
    pixels: Tensor
    update: client.Update


def case(size: tuple[int, int], dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(0)
    net = victims.cnn6(second=SIZES[size], size=size).to(dtype)
    pixels = data.load("cifar10", 1).pixels.to("cpu", dtype)
    pixels = functional.interpolate(pixels, size, mode="bilinear").clamp(0, 1)
    with torch.no_grad():
        net[-1].weight *= -net(pixels).sign()
    return Case(net, pixels, client.gradient(net, pixels, torch.tensor([1]), loss="logistic"))


# ---- the sides ----


def ours(victim: Case) -> Tensor:
    return r_gap(victim.update).pixels


def dense(driver: str, victim: Case) -> Tensor:
    """The same walk with dense matrices."""
    with mock.patch.object(recursive, "solve", functools.partial(dense_solve, driver, recursive.solve)):
        return r_gap(victim.update).pixels


def dense_solve(driver: str, solve: Callable, operator, k, gradient, z, known) -> recursive.Solution:
    if not isinstance(operator.module, nn.Conv2d):
        return solve(operator, k, gradient, z, known)
    count = z.new_tensor(operator.input_shape).prod().int().item()
    rows, factor = operator.gradient_rows(k), balance(operator, k)
    filters, kernel, pixels = rows.shape
    channels = operator.input_shape[0]
    matrix = z.new_zeros(gradient.numel() + z.numel(), count)
    by_channel = matrix[: gradient.numel()].view(filters, channels, kernel, channels, pixels)
    for channel in range(channels):
        by_channel[:, channel, :, channel] = factor * rows
    unit = torch.eye(count, dtype=z.dtype).view(count, *operator.input_shape)
    matrix[gradient.numel() :] = operator.apply(unit).flatten(1).T
    right = torch.cat([factor * gradient.flatten(), z.flatten()])
    found = torch.linalg.lstsq(matrix, right[:, None], driver={"qr": "gels", "svd": "gelsd"}[driver])
    x = found.solution.view(1, *operator.input_shape)
    facts = {"unknowns": count, "gradient rows": gradient.numel(), "weight rows": z.numel(), "rank": count}
    return recursive.Solution(x, operator.adjoint(k), facts | {"nullity": 0, "condition": None, "residual": 0.0})


def public(victim: Case) -> Tensor:
    """The picture that `breaching` finds."""
    from breaching.attacks import prepare_attack

    net, update = victim.net, victim.update
    setup = {"dtype": torch.float32, "device": torch.device("cpu")}
    attacker = prepare_attack(net, nn.CrossEntropyLoss(), public_settings(update.input_shape[1:] == QUICK), setup)
    shape = update.input_shape
    sent = {
        "parameters": list(net.parameters()),
        "buffers": [],
        "metadata": types.SimpleNamespace(shape=shape, modality="vision", mean=[0.0] * 3, std=[1.0] * 3),
    }
    received = {
        "gradients": [value.clone() for value in update.gradient.values()],
        "buffers": None,
        "metadata": {"num_data_points": 1, "labels": torch.tensor([0]), "local_hyperparams": None},
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a lot
        found, _ = attacker.reconstruct([sent], [received], {})
    return found["data"].detach().view(1, *shape) * SCALE


@functools.cache
def public_settings(quick: bool):
    import breaching

    with contextlib.redirect_stdout(io.StringIO()):
        return breaching.get_attack_config("rgap", overrides=["inversion.steps=30"] if quick else [])


SIDES: dict[str, Callable[[Case], Tensor]] = {
    "ours": ours,
    "qr": functools.partial(dense, "qr"),
    "svd": functools.partial(dense, "svd"),
    "public": public,
}


# ---- the parts ----


def size(sizes: list[tuple[int, int]], rounds: int) -> list[dict]:
    """Time and memory of the attack, both also relative to the smallest picture."""
    rows = []
    for where in sizes:
        victim = case(where)
        found = [spent(lambda victim=victim: ours(victim)) for _ in range(rounds)]
        row = {"height": where[0], "width": where[1], "filters": SIZES[where], "rounds": rounds}
        row["max_error"] = error(found[-1][0], victim)
        row["seconds"] = statistics.median(used["time"] for _, used in found)
        before, peak = peak_of("ours", where, "float64")
        rows.append({**row, "peak": peak, "added": peak - before})
    for row in rows:
        row |= {f"{name}_ratio": row[name] / rows[0][name] for name in ("seconds", "added")}
    return rows


def race(sides: list[str], sizes: list[tuple[int, int]], rounds: int, dtype: str) -> list[dict]:
    """Each side against ours."""
    rows = []
    for where in sizes:
        victim, errors = case(where, getattr(torch, dtype)), {}

        def run(side, victim=victim, errors=errors):
            found, used = spent(lambda: SIDES[side](victim))
            errors[side] = error(found, victim)
            return used

        if rounds > 1:
            run("ours")  # what happens once
        runs = {side: functools.partial(run, side) for side in ("ours", *sides)}
        used = {side: pandas.DataFrame(each) for side, each in taking_turns(runs, rounds).items()}
        peaks = {side: peak_of(side, where, dtype) for side in runs}
        for side in sides:
            ratios = used[side] / used["ours"]
            rows.append(
                {
                    **{"height": where[0], "width": where[1], "side": side, "rounds": rounds},
                    **{"error_ours": errors["ours"], "error": errors[side]},
                    **{"time_ratio": ratios["time"].median(), "lowest": ratios["time"].min()},
                    **{"highest": ratios["time"].max(), "work_ratio": ratios["work"].median()},
                    **{"peak_ratio": peaks[side][1] / peaks["ours"][1], "added": peaks[side][1] - peaks[side][0]},
                }
            )
    return rows


def error(found: Tensor, victim: Case) -> float:
    return (found - victim.pixels).abs().max().item()


def peak_of(side: str, where: tuple[int, int], dtype: str) -> list[float]:
    """Peak memory in MiB, before and after, of a process that does nothing but one attack."""
    command = [sys.executable, __file__, "--peak", side, *map(str, where), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak(side: str, where: tuple[int, int], dtype: str) -> list[float]:
    victim = case(where, getattr(torch, dtype))
    if side == "public":
        public_settings(where == QUICK)
    before = high_water()
    SIDES[side](victim)
    return [before, high_water()]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round at tiny sizes")
    parser.add_argument("--large", action="store_true", help="the dense sides at 32 x 32 too")
    parser.add_argument("--public", action="store_true", help="the public code at 32 x 32 too")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON to write")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="breaching|hydra")
    os.environ.pop("GRADINV_DATA", None)  # the bundled pictures, whoever runs this
    if options.peak:
        side, height, width, dtype = options.peak
        print(json.dumps(peak(side, (int(height), int(width)), dtype)))
        return
    rounds, small = (1, QUICK) if options.quick else (ROUNDS, SMALL)
    installed = importlib.util.find_spec("breaching") is not None
    record = {
        "threads": torch.get_num_threads(),
        "torch": importlib.metadata.version("torch"),
        "load": [round(os.getloadavg()[0], 1)],
        "size": size([QUICK] if options.quick else list(SIZES)[1:], rounds),
        "dense": race(["qr", "svd"], [small], rounds, "float64"),
        "public": race(["public"], [small], rounds, "float32") if installed else [],
    }
    if options.large:
        record["dense"] += race(["qr", "svd"], [PAPER], 1, "float64")
    if options.public and installed:
        record["public"] += race(["public"], [PAPER], 1, "float32")
    record["load"].append(round(os.getloadavg()[0], 1))
    for part in ("size", "dense", "public"):
        print(f"\n{part}\n{pandas.DataFrame(record[part]).to_string(index=False, float_format='{:.3g}'.format)}")
    print(f"\n{record['threads']} thread(s), torch {record['torch']}, load {record['load']}")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
