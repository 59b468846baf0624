"""Train a small CNN by DP-SGD at several budgets, and measure what each training gives away.

Each step is one `defences.private_gradient`, so that what the attacks see is what the training uses. The pictures are
those of `gradinv.train`: the first 18,000 CIFAR-10 training pictures, with the next 2,000 held out for the accuracy.
The first 20 test pictures are an attacker's candidates for one more picture of the training set. Records go to
`gradinv/weights/NAME.json`; the weights are not kept.
"""

import json
import math
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

from gradinv import data, defences, privacy, train, victims
from gradinv.files import write_atomically

DELTA = 1e-5
EXPECTED_BATCH, EPOCHS = 512, 10
CANDIDATES = 20


@dataclass(frozen=True)
class Budget:
    """epsilon at delta = 1e-5 (infinite: no noise), the clipping norm (infinite: none), and the step size."""

    epsilon: float
    clip: float = 1.0
    lr: float = 0.5
    momentum: float = 0.9


PRIVATE_BUDGETS = {
    "dp-plain": Budget(math.inf, math.inf, 0.15),
    "dp-clip": Budget(math.inf),
    "dp-eps64": Budget(64.0),
    "dp-eps16": Budget(16.0),
    "dp-eps8": Budget(8.0),
    "dp-eps4": Budget(4.0),
    "dp-eps2": Budget(2.0),
    "dp-eps1": Budget(1.0),
}


def small_cnn() -> nn.Module:
    """Three convolutions with group norm and tanh, and one linear layer: 20,394 parameters.

    Group norm takes its statistics from one picture, so each picture has a gradient of its own.
    """
    layers: list[nn.Module] = [victims.Normalize(victims.CIFAR10_MEAN, victims.CIFAR10_STD)]
    for inputs, outputs, kernel in ((3, 16, 5), (16, 32, 3), (32, 32, 3)):
        layers += [nn.Conv2d(inputs, outputs, kernel, 2, kernel // 2), nn.GroupNorm(4, outputs), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)).eval()


def train_privately(name: str, *, seed: int = 0) -> dict:
    """Train at one of `PRIVATE_BUDGETS` and store the record, which is returned.

    Needs 20,000 CIFAR-10 training pictures (`python -m gradinv fetch cifar10`).
    Raises ValueError for an unknown budget, DataError without the pictures.
    """
    if name not in PRIVATE_BUDGETS:
        raise ValueError(f"name must be one of {', '.join(PRIVATE_BUDGETS)}, got {name!r}")
    budget = PRIVATE_BUDGETS[name]
    known = data.load("cifar10", train.TRAINED_ON, split="train")
    held_out = data.load("cifar10", train.HELD_OUT, start=train.TRAINED_ON, split="train")
    candidates = data.load("cifar10", CANDIDATES)
    sample_rate = EXPECTED_BATCH / train.TRAINED_ON
    steps = round(EPOCHS / sample_rate)
    sampling = {"sample_rate": sample_rate, "steps": steps}
    noise = 0.0 if budget.epsilon == math.inf else privacy.noise_for(budget.epsilon, DELTA, **sampling)
    torch.manual_seed(seed)
    net = small_cnn()
    optimizer = torch.optim.SGD(net.parameters(), budget.lr, momentum=budget.momentum)
    grams = []
    for step in tqdm(range(steps), desc=name):
        rows = defences.clipped_gradients(net, candidates.pixels, candidates.labels, clip=budget.clip)
        grams.append(rows.double() @ rows.double().T)
        drawn = torch.rand(len(known)) < sample_rate
        release = defences.private_gradient(
            net,
            known.pixels[drawn],
            known.labels[drawn],
            clip=budget.clip,
            noise_multiplier=noise,
            expected_batch=EXPECTED_BATCH,
            seed=seed * steps + step,
        )
        for parameter, gradient in zip(net.parameters(), release.gradient.values(), strict=True):
            parameter.grad = gradient
        optimizer.step()
    record = {
        "budget": name,
        "delta": DELTA,
        "epsilon": privacy.sampled_epsilon(noise, DELTA, **sampling) if noise else None,
        "noise_multiplier": noise,
        "clip": None if budget.clip == math.inf else budget.clip,
        **sampling,
        "lr": budget.lr,
        "momentum": budget.momentum,
        "seed": seed,
        "trained_on": f"{known.source}, the first {train.TRAINED_ON}",
        "held_out": train.HELD_OUT,
        "held_out_correct": train.correct(net, held_out),
        "candidates": f"{candidates.source}, {CANDIDATES} pictures",
        "torch": torch.__version__,
    }
    if noise:
        rate, error = privacy.guessing_rate(torch.stack(grams), noise * budget.clip, sample_rate=sample_rate)
        record |= {"guessed": rate, "guessed_error": error}
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(victims.WEIGHTS / f"{name}.json", lambda path: path.write_text(text))
    return record


def private_records() -> dict[str, dict]:
    """The stored record of each training in `PRIVATE_BUDGETS`, from the weakest protection to the strongest."""
    return {name: json.loads((victims.WEIGHTS / f"{name}.json").read_text()) for name in PRIVATE_BUDGETS}
