"""Remake the small trained weights that ship in `gradinv/weights/`.

One recipe for all: SGD with Nesterov momentum and a one-cycle step size on the first 18,000 CIFAR-10
training pictures; training pictures 18,000 to 19,999 are held out and give the accuracy. Weights are stored
in half precision beside a JSON record of how they came about.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from gradinv import data, victims
from gradinv.files import write_atomically

TRAINED_ON, HELD_OUT = 18_000, 2_000
BATCH = 128


@dataclass(frozen=True)
class Recipe:
    """How to build and train one network; a snapshot is stored after each epoch in `snapshots` and the last."""

    build: Callable[[], nn.Module]
    epochs: int
    lr: float
    augment: bool
    snapshots: tuple[int, ...] = ()


def _skip_cut(width: int, cut: tuple[str, ...], snapshots: tuple[int, ...] = ()) -> Recipe:
    return Recipe(lambda: victims.resnet(18, width, cut=cut), epochs=30, lr=0.1, augment=True, snapshots=snapshots)


# Of a ResNet-18
BLOCKS = tuple(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1))

# The networks of width 64 are too large to ship; the full scale of a chapter makes them where it runs.
RECIPES = {
    "fc": Recipe(lambda: victims.fc((3072, 64, 64, 10)), epochs=20, lr=0.05, augment=False, snapshots=(1, 5)),
    "lenet": Recipe(lambda: victims.lenet(), epochs=30, lr=0.02, augment=False),
    "lenet-10": Recipe(lambda: victims.lenet(), epochs=10, lr=0.02, augment=False, snapshots=(1, 3)),
    "resnet20-w16": Recipe(lambda: victims.resnet(20, 16), epochs=30, lr=0.1, augment=True),
    "resnet20-w16-plain": Recipe(lambda: victims.resnet(20, 16), epochs=30, lr=0.1, augment=False),
    "resnet20-w64": Recipe(lambda: victims.resnet(20, 64), epochs=30, lr=0.1, augment=True),
    "resnet18-w16": _skip_cut(16, (), snapshots=(1, 5)),
    **{f"resnet18-w{width}": _skip_cut(width, ()) for width in (8, 64)},
    **{f"resnet18-w{width}-cut-{block}": _skip_cut(width, (block,)) for width in (8, 16, 64) for block in BLOCKS},
}


def train(name: str, *, seed: int = 0, device: str | torch.device = "cpu") -> dict:
    """Train one recipe and store its snapshots; returns the record of the last one.

    Order of pictures, crops and start are drawn on the CPU, so that every device sees the same ones.

    Needs 20,000 CIFAR-10 training pictures (`python -m gradinv fetch cifar10`).
    Raises ValueError for an unknown recipe, DataError without the pictures.
    """
    if name not in RECIPES:
        raise ValueError(f"name must be one of {', '.join(RECIPES)}, got {name!r}")
    recipe = RECIPES[name]
    device = torch.device(device)
    known = data.load("cifar10", TRAINED_ON, split="train", device=device)
    held_out = data.load("cifar10", HELD_OUT, start=TRAINED_ON, split="train", device=device)
    torch.manual_seed(seed)
    net = recipe.build().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), recipe.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = TRAINED_ON // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.epochs * steps)
    for epoch in tqdm(range(1, recipe.epochs + 1), desc=name):
        net.train()
        for chosen in torch.randperm(TRAINED_ON)[: steps * BATCH].split(BATCH):
            chosen = chosen.to(device)
            pixels = known.pixels[chosen]
            if recipe.augment:
                pixels = crop_and_flip(pixels)
            # bfloat16 halves the time on processors that have it and changes no published number
            with torch.autocast(device.type, torch.bfloat16):
                loss = functional.cross_entropy(net(pixels), known.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        net.eval()
        if epoch in (*recipe.snapshots, recipe.epochs):
            record = {
                "recipe": name,
                "epoch": epoch,
                "epochs": recipe.epochs,
                "seed": seed,
                "trained_on": f"{known.source}, the first {TRAINED_ON}",
                "augmented": recipe.augment,
                "held_out": HELD_OUT,
                "held_out_correct": correct(net, held_out),
                "train_loss": round(loss.item(), 4),
                "torch": torch.__version__,
            }
            _store(net, name if epoch == recipe.epochs else f"{name}-epoch{epoch}", record)
    return record


def crop_and_flip(pixels: torch.Tensor) -> torch.Tensor:
    """Each picture (n, c, h, w) shifted by up to 4 pixels over reflected borders, and mirrored half of the time."""
    n, _, height, width = pixels.shape
    padded = functional.pad(pixels, (4, 4, 4, 4), mode="reflect")
    rows = torch.randint(0, 9, (n, 1)) + torch.arange(height)
    columns = torch.randint(0, 9, (n, 1)) + torch.arange(width)
    mirrored = torch.rand(n, 1) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    which, rows, columns = (index.to(pixels.device) for index in (torch.arange(n)[:, None, None], rows, columns))
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@torch.no_grad()
def correct(net: nn.Module, images: data.Images) -> int:
    """How many pictures the network labels rightly."""
    return sum(
        int((net(pixels).argmax(1) == labels).sum())
        for pixels, labels in zip(images.pixels.split(500), images.labels.split(500), strict=True)
    )


def _store(net: nn.Module, name: str, record: dict) -> None:
    state = {
        key: value.half().contiguous() if value.is_floating_point() else value
        for key, value in net.state_dict().items()
    }
    write_atomically(victims.WEIGHTS / f"{name}.safetensors", lambda path: save_file(state, path))
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(victims.WEIGHTS / f"{name}.json", lambda path: path.write_text(text))
