"""A race between this package's gradient matching and public code, the PyPI package `breaching` 0.1.2.

    pip install -e ".[race]"
    OMP_NUM_THREADS=1 python tests/benchmarks/matching.py [--quick] [--out FILE]

Both sides get the same network in eval mode, the same real picture, target gradient, start, steps, schedule and
threads, and they take turns. `breaching` runs its own loop with its own settings for this attack. It sees pixels, as
we do, so its mean is 0 and its deviation 1. Its total variation also counts the step to a border of zeros; the
formula of this package stands in its list of regularisers instead, so that both sides minimise the same sum.
The part "agreement" checks that they do.

A ratio says how many times our time fits into theirs. "time" is wall-clock time, "work" is processor time, which
depends less on what else the machine does. `--quick` does everything at tiny sizes, to see that it runs.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pandas
import torch
from torch import Tensor, nn

from gradinv import client, data, metrics, victims
from gradinv.attacks import match_gradients
from gradinv.attacks.matching import _Match, _start
from gradinv.files import write_atomically

OUT = pathlib.Path(__file__).parent.parent.parent / "book/benchmarks/matching.json"
PICTURES = 20  # the bundled ones; more victims take them again, from other starts
TV = 4e-4
STEP_SIZE = {"step": 0.025, "linear": 0.1}  # in pixels: 0.1 and 0.4 on normalised pictures
PUBLIC_SCHEDULE = {"step": "step-lr", "linear": "linear"}
WARM_UP = 2  # steps of the short run that is taken off a long one, with all that happens once


@dataclass(frozen=True)
class Size:
    """How much to do. The numbers by network are those of `NETWORKS`, in that order."""

    width: int
    rounds: int
    steps: tuple[int, ...]  # of each run that is timed
    together: tuple[int, ...]  # victims side by side
    long: int  # steps of the paper's schedule in the race to a PSNR
    budgets: tuple[int, ...]  # steps of the linear schedule, tried in this order
    calls: tuple[int, ...]  # evaluations of one variant in a row


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "LeNet": lambda width: victims.lenet(),
    "ConvNet": victims.convnet,
    "ResNet-18": lambda width: victims.resnet(18, width),
}
FULL = Size(64, 5, (200, 16, 16), (16, 4, 4), 500, (60, 80, 100, 150, 200), (50, 2, 2))
QUICK = Size(4, 1, (3, 3, 3), (2, 2, 2), 8, (4, 6), (2, 2, 2))


@dataclass(frozen=True)
class Case:
    """One network and, a victim each: a picture, the update its gradient makes, and a start."""

    name: str
    net: nn.Module
    truth: list[Tensor]
    updates: list[client.Update]
    starts: list[Tensor]


def case(name: str, size: Size, count: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Case:
    torch.manual_seed(0)
    net = NETWORKS[name](size.width).to(device, dtype)
    images = data.load("cifar10", min(count, PICTURES), device=device)
    again = [i % PICTURES for i in range(count)]
    truth, labels = list(images.pixels[again].to(dtype).split(1)), images.labels[again].split(1)
    updates = [client.gradient(net, *victim) for victim in zip(truth, labels, strict=True)]
    starts = [normal(truth[0].shape, seed).to(dtype) for seed in range(count)]
    return Case(name, net, truth, updates, starts)


def normal(shape: torch.Size, seed: int) -> Tensor:
    """The start that `match_gradients` takes with this seed and init="normal"."""
    return _start("normal", shape, torch.Generator().manual_seed(seed))


def ours(case: Case, steps: int, schedule: str = "step", lr: float | None = None) -> tuple[list[Tensor], list[float]]:
    """The pictures found, and the first victim's objective by step."""
    options = {"tv": TV, "steps": steps, "lr": lr or STEP_SIZE[schedule], "schedule": schedule, "progress": False}
    if len(case.updates) == 1:
        found = [match_gradients(case.updates[0], init=case.starts[0], **options)]
    else:  # which draw the same starts by themselves
        found = match_gradients(case.updates, **options)
    return [result.pixels for result in found], found[0].history


def public(case: Case, steps: int, schedule: str = "step", lr: float | None = None) -> tuple[list[Tensor], list[float]]:
    """The same from `breaching`, which takes one victim after the other."""
    from breaching.attacks import prepare_attack

    dtype = case.starts[0].dtype
    settings = public_settings(steps, schedule, lr or STEP_SIZE[schedule], str(dtype).removeprefix("torch."))
    pictures, histories = [], []
    for update, start in zip(case.updates, case.starts, strict=True):
        setup = {"dtype": dtype, "device": start.device}
        attacker = prepare_attack(case.net, nn.CrossEntropyLoss(), settings, setup)
        attacker.regularizers = [Regularizer()]
        sent = {
            "parameters": list(case.net.parameters()),
            "buffers": list(case.net.buffers()),
            "metadata": types.SimpleNamespace(shape=update.input_shape, modality="vision"),
        }
        received = {
            "gradients": list(update.gradient.values()),
            "buffers": None,
            "metadata": {"num_data_points": 1, "labels": update.labels, "local_hyperparams": None},
        }
        result, statistics = attacker.reconstruct([sent], [received], {}, initial_data=start)
        pictures.append(result["data"])
        histories.append(statistics["Trial_0_Val"])
    return pictures, histories[0]


@functools.cache
def public_settings(steps: int, schedule: str, lr: float, dtype: str):
    """`breaching`'s own settings of the attack, with the numbers of this race."""
    import breaching

    changes = [
        f"optim.max_iterations={steps}",
        f"optim.step_size={lr}",
        f"optim.step_size_decay={PUBLIC_SCHEDULE[schedule]}",
        f"impl.dtype={dtype}",
        "regularization.total_variation.scale=0",
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        return breaching.get_attack_config("invertinggradients", overrides=changes)


class Regularizer:
    """This package's total variation, in the form that `breaching` asks for."""

    def initialize(self, *_):
        pass

    def __call__(self, pixels: Tensor) -> Tensor:
        return TV * variation(pixels)


def variation(pixels: Tensor) -> Tensor:
    return pixels.diff(dim=-1).abs().mean() + pixels.diff(dim=-2).abs().mean()


SIDES = {"ours": ours, "public": public}


def spent(run: Callable[[], object]) -> tuple[object, pandas.Series]:
    """What `run()` gives, and the time and the work it took."""
    before = time.perf_counter(), time.process_time()
    result = run()
    return result, pandas.Series({"time": time.perf_counter() - before[0], "work": time.process_time() - before[1]})


def taking_turns(runs: dict[str, Callable[[], pandas.Series]], rounds: int) -> dict[str, list[pandas.Series]]:
    """What each of `runs` gives, round by round; every other round goes backwards."""
    results: dict[str, list[pandas.Series]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            results[name].append(runs[name]())
    return results


def psnr(pictures: list[Tensor], case: Case) -> float:
    return metrics.psnr(torch.cat(pictures), torch.cat(case.truth)).mean().item()


# ---- the parts of the race ----


def agreement(size: Size) -> list[dict]:
    """In double precision: the objective at the start, and the pictures after one step.

    The start lies in the box and the step is small, so that the step improves on the start, and both give its picture.
    """
    rows = []
    for name in NETWORKS:
        victim = case(name, size, dtype=torch.float64)
        victim.starts[0].clamp_(0, 1)
        (mine, my_costs), (theirs, their_costs) = (side(victim, 1, lr=1e-4) for side in (ours, public))
        rows.append(
            {
                "network": name,
                "cost_ours": my_costs[0],
                "cost_public": their_costs[0],
                "cost_difference": abs(my_costs[0] / their_costs[0] - 1),
                "picture_difference": (mine[0] - theirs[0]).abs().max().item(),
            }
        )
    return rows


def per_step(size: Size) -> list[dict]:
    """The ratio of the times of one step, for one victim and for several side by side."""
    rows = []
    for name, steps, together in zip(NETWORKS, size.steps, size.together, strict=True):
        for count in (1, together):
            victim = case(name, size, count)
            steps_here = steps if count == 1 else max(WARM_UP, steps // 2)
            pictures = {}

            def one_step(side, victim=victim, steps=steps_here, pictures=pictures):
                _, short = spent(lambda: SIDES[side](victim, WARM_UP))
                (pictures[side], _), long = spent(lambda: SIDES[side](victim, WARM_UP + steps))
                return long - short

            for side in SIDES.values():
                side(victim, 1)
            results = taking_turns({side: functools.partial(one_step, side) for side in SIDES}, size.rounds)
            ratios = pandas.DataFrame(results["public"]) / pandas.DataFrame(results["ours"])
            rows.append(
                {
                    "network": name,
                    "together": count,
                    "steps": WARM_UP + steps_here,
                    "rounds": size.rounds,
                    "time_ratio": ratios["time"].median(),
                    "lowest": ratios["time"].min(),
                    "highest": ratios["time"].max(),
                    "work_ratio": ratios["work"].median(),
                    "psnr_ours": psnr(pictures["ours"], victim),
                    "psnr_public": psnr(pictures["public"], victim),
                }
            )
    return rows


def side_by_side(size: Size) -> list[dict]:
    """Victim-steps a second for several victims in one loop; on the CPU the small network alone, which gains most."""
    device = str(data.device())
    names = list(NETWORKS) if device == "cuda" else ["LeNet"]
    rows = []
    for name in names:
        for count in (1, 8, 32, 100):
            victims_here, steps = case(name, size, count, device=device), size.steps[0] if count == 1 else size.steps[1]

            def used(steps, victims_here=victims_here, count=count):
                options = {"tv": TV, "steps": steps, "at_once": count, "progress": False}
                return spent(lambda: match_gradients(victims_here.updates, **options))[1]["time"]

            used(WARM_UP)
            seconds = statistics.median(used(WARM_UP + steps) - used(WARM_UP) for _ in range(size.rounds))
            rows.append({"network": name, "device": device, "together": count, "per_second": count * steps / seconds})
        alone = rows[-4]["per_second"]
        for row in rows[-4:]:
            row["ratio"] = row["per_second"] / alone
    return rows


def to_psnr(size: Size) -> list[dict]:
    """How long each takes to the PSNR at which the paper's schedule ends, set-up included.

    The last rows tell schedule and engine apart: our engine with the paper's schedule, theirs with ours.
    """
    victim, rows = case("ConvNet", size), []

    def run(side, schedule, steps):
        (pictures, _), used = spent(lambda: SIDES[side](victim, steps, schedule))
        rows.append({"code": side, "schedule": schedule, "steps": steps, "psnr": psnr(pictures, victim), **used})
        return rows[-1]

    for side in SIDES.values():
        side(victim, 1)
    goal = run("public", "step", size.long)["psnr"]
    budgets = [*size.budgets, None]
    while budgets[0] and run("ours", "linear", budgets[0])["psnr"] < goal:
        budgets.pop(0)
    run("ours", "step", size.long)
    run("public", "linear", budgets[0] or size.budgets[-1])
    table = pandas.DataFrame(rows)
    for used in ("time", "work"):
        table[f"{used}_ratio"] = table[used].iloc[0] / table.pop(used)
    table["reached"] = table["psnr"] >= goal
    return table.to_dict("records")


def memory(size: Size) -> list[dict]:
    """Peak memory of a process that does nothing but one attack of a few steps, in MiB."""
    rows = []
    for name in NETWORKS if size is FULL else ["LeNet"]:
        row = {"network": name}
        for side in SIDES:
            command = [sys.executable, __file__, "--peak", side, name, *(["--quick"] if size is QUICK else [])]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row[f"before_{side}"], row[f"peak_{side}"] = json.loads(done.stdout.splitlines()[-1])
        rows.append({**row, "ratio": row["peak_public"] / row["peak_ours"]})
    return rows


def peak(side: str, name: str, size: Size) -> list[float]:
    """Peak memory in MiB before and after an attack; `memory` asks for it in a fresh process."""
    victim = case(name, size)
    if side == "public":
        public_settings(5, "step", STEP_SIZE["step"], "float32")
    before = high_water()
    SIDES[side](victim, 5)
    return [before, high_water()]


def high_water() -> float:
    """Peak resident memory so far in MiB. Linux hands `ru_maxrss` down from the parent, but not `VmHWM`."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (2**20 if sys.platform == "darwin" else 2**10)


def ingredients(size: Size) -> list[dict]:
    """What each part of the engine adds to the speed of one evaluation of objective and gradient.

    The first two variants are written here as public code has it: a graph over the cosine, run backwards into
    everything or into the pictures alone.
    """
    rows = []
    for name, calls, together in zip(NETWORKS, size.calls, size.together, strict=True):
        victim, several = case(name, size), case(name, size, together)
        variants = {
            "graph over the cosine, gradient of everything": (graph(victim, everything=True), 1),
            "graph over the cosine, gradient of the pictures": (graph(victim, everything=False), 1),
            "cosine differentiated by hand": (evaluation(victim, fast=False), 1),
            "and layers without unused gradients": (evaluation(victim, fast=True), 1),
            "and victims side by side": (evaluation(several, fast=True), together),
        }
        runs = {}
        for variant, (evaluate, count) in variants.items():
            evaluate()
            runs[variant] = functools.partial(repeat, evaluate, calls, count)
        results = {variant: pandas.DataFrame(used) for variant, used in taking_turns(runs, size.rounds).items()}
        first = next(iter(results.values()))
        for variant, used in results.items():
            ratios = (first / used).median()
            count = variants[variant][1]
            rows.append({"network": name, "variant": variant, "together": count, **ratios.add_suffix("_ratio")})
    return rows


def repeat(evaluate: Callable[[], object], calls: int, count: int) -> pandas.Series:
    return spent(lambda: [evaluate() for _ in range(calls)])[1] / count


def graph(victim: Case, everything: bool) -> Callable[[], object]:
    net, update = copy.deepcopy(victim.net), victim.updates[0]
    parameters, target = list(net.parameters()), list(update.gradient.values())
    pixels = victim.starts[0].clone().requires_grad_(True)

    def evaluate():
        net.zero_grad()
        pixels.grad = None
        loss = nn.functional.cross_entropy(net(pixels), update.labels)
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        inner = sum((mine * theirs).sum() for mine, theirs in zip(gradient, target, strict=True))
        size = sum(mine.square().sum() for mine in gradient) * sum(theirs.square().sum() for theirs in target)
        objective = 1 - inner / size.sqrt() + TV * variation(pixels)
        objective.backward(inputs=None if everything else [pixels])

    return evaluate


def evaluation(victim: Case, fast: bool) -> Callable[[], object]:
    match = _Match(victim.updates, "cosine", TV, fast=fast)
    pixels = torch.stack(victim.starts).requires_grad_(True)
    return lambda: match(pixels, None)


PARTS = {part.__name__: part for part in (agreement, per_step, side_by_side, to_psnr, memory, ingredients)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="everything at tiny sizes")
    parser.add_argument("--out", type=pathlib.Path, help=f"the JSON to write (default: {OUT.name} of the book)")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="breaching|hydra")
    os.environ.pop("GRADINV_DATA", None)  # the bundled pictures, whoever runs this
    if options.peak:
        print(json.dumps(peak(*options.peak, size)))
        return
    if options.quick and not options.out:
        parser.error("--quick needs --out, so that its numbers do not end up in the book")
    threads = torch.get_num_threads()
    record = {
        "date": datetime.date.today().isoformat(),
        "device_name": f"CPU, {threads} thread{'s' if threads > 1 else ''}",
        "threads": threads,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "breaching")},
        },
        "quick": options.quick,
        "width": size.width,
        "load": [round(os.getloadavg()[0], 1)],
    }
    for name, part in PARTS.items():
        record[name] = part(size)
        print(f"\n{name}\n{pandas.DataFrame(record[name]).to_string(index=False, float_format='{:.4g}'.format)}")
    record["load"].append(round(os.getloadavg()[0], 1))
    print(f"\n{record['device_name']}, {record['versions']}, {record['date']}, load {record['load']}")
    write_atomically(options.out or OUT, lambda path: path.write_text(json.dumps(record, indent=1) + "\n"))


if __name__ == "__main__":
    main()
