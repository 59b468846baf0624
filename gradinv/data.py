"""Real pictures as pixels in [0, 1], with no download.

`load` looks in `$GRADINV_DATA` (default `~/.cache/gradinv`) for `NAME/SPLIT.npz`, then in what an
installed package ships: `foolbox` carries the first 20 test pictures of CIFAR-10, CIFAR-100 and MNIST
and 20 of ImageNet, scikit-image and scikit-learn carry large photographs. `fetch` is the only function
of this package that touches the network.
"""

import hashlib
import os
import pathlib
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from gradinv.files import write_atomically

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# sha256 over the files of the 20 pictures that foolbox ships, so that a damaged or
# changed wheel is noticed and never becomes a result.
BUNDLED = {
    "cifar10": ("png", 10, "43cf17f53f8817b58c2d157181a0cc1cdf6a0f1f2f368d7bab27ddc24167221d"),
    "cifar100": ("png", 100, "7c02360cdf931a2da9e5965069744e01b9dc45d3b1192d1dc2588c3047bccce1"),
    "mnist": ("png", 10, "cdc093f3e29311f9ff8cf21cecca5cda76151ec40e0b866c409ec626ad7579d9"),
    "imagenet": ("jpg", 1000, "d625818dacf79cc40ced71ff12f1d4955c3d2655ae4b047b3c93b1819cb8f3fe"),
}
PHOTOS = {
    "astronaut": "skimage/data/astronaut.png",
    "chelsea": "skimage/data/chelsea.png",
    "coffee": "skimage/data/coffee.png",
    "rocket": "skimage/data/rocket.jpg",
    "hubble": "skimage/data/hubble_deep_field.jpg",
    "retina": "skimage/data/retina.jpg",
    "china": "sklearn/datasets/images/china.jpg",
    "flower": "sklearn/datasets/images/flower.jpg",
}
SQUARE = 224
DEVICES = ("auto", "cpu", "cuda")
NAMES = ("cifar10", "cifar100", "mnist", "imagenet", "photos")
FETCHABLE = ("cifar10", "cifar100", "mnist")


class DataError(ValueError):
    """The pictures asked for are not here, or a file that holds them is damaged."""


@dataclass(frozen=True)
class Images:
    """Pictures and their labels.

    pixels (n, c, h, w) float32 in [0, 1]; labels (n,) int64; classes the name of each label; source
    says in words where the bytes came from, and goes into every recorded result.
    """

    pixels: Float[Tensor, "n c h w"]
    labels: Int64[Tensor, " n"]
    classes: tuple[str, ...]
    name: str
    source: str

    def __len__(self) -> int:
        return len(self.pixels)

    def __repr__(self) -> str:
        return f"Images({self.name}: {len(self)} of shape {tuple(self.pixels.shape[1:])}; {self.source})"

    def names(self) -> list[str]:
        """The class name of each picture."""
        return [self.classes[label] for label in self.labels.tolist()]


def directory() -> pathlib.Path:
    """Where fetched files live: `$GRADINV_DATA`, else `~/.cache/gradinv`."""
    return pathlib.Path(os.environ.get("GRADINV_DATA") or pathlib.Path.home() / ".cache/gradinv")


def device(name: str = "auto") -> torch.device:
    """The device called "cpu" or "cuda"; "auto" is CUDA where there is one, else the CPU.

    Raises ValueError for another name, or for "cuda" where there is none.
    """
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch finds no CUDA device here: use 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load(
    name: str, n: int | None = None, *, start: int = 0, split: str = "test", device: str | torch.device | None = None
) -> Images:
    """Pictures `start` … `start + n` of a set, in the set's official order.

    Args:
        name: "cifar10", "cifar100", "mnist", "imagenet" or "photos" (both 224 x 224 centre squares), or
            the name of a folder in `$GRADINV_DATA`.
        n: how many; None takes all that are here.
        start: index of the first one.
        split: "test" or "train".
        device: where the tensors go.

    Raises:
        DataError: unknown name or split, more pictures than are here, or a damaged file (it is named).
    """
    if n is not None and n < 1:
        raise DataError(f"n must be at least 1, got {n}")
    if start < 0:
        raise DataError(f"start must not be negative, got {start}")
    path = directory() / name / f"{split}.npz"
    if path.exists():
        found = _read_npz(path)
    elif name == "photos" and split == "test":
        found = _photos()
    elif name in BUNDLED and split == "test" and find_spec("foolbox"):
        found = _bundled(name)
    elif name not in NAMES:
        raise DataError(f"name must be one of {', '.join(NAMES)} or a folder in {directory()}, got {name!r}")
    elif split not in ("test", "train"):
        raise DataError(f"split must be 'test' or 'train', got {split!r}")
    else:
        raise DataError(f"no {split} pictures of {name} in {directory()}; {_advice(name, split)}")
    images, labels, classes, source = found
    stop = len(images) if n is None else start + n
    if stop > len(images) or start >= len(images):
        raise DataError(
            f"{name}/{split} holds {len(images)} pictures here, asked for {start} to {stop}; {_advice(name, split)}"
        )
    pixels = torch.from_numpy(np.ascontiguousarray(images[start:stop])).to(device)
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    return Images(
        pixels.permute(0, 3, 1, 2).float().div(255).contiguous(),
        torch.from_numpy(labels[start:stop].astype(np.int64)).to(device),
        classes,
        name,
        source,
    )


def windows(pixels: Float[Tensor, "n c h w"], side: int, stride: int) -> Float[Tensor, "m c side side"]:
    """All squares of side by side pixels, `stride` apart, such as strangers for a line-up.

    Place after place in reading order, and at each place the pictures in theirs.
    """
    if not 1 <= side <= min(pixels.shape[2:]) or stride < 1:
        raise ValueError(
            f"side must be from 1 to {min(pixels.shape[2:])} and stride at least 1, got {side} and {stride}"
        )
    height, width = pixels.shape[2:]
    return torch.cat(
        [
            pixels[:, :, top : top + side, left : left + side]
            for top in range(0, height - side + 1, stride)
            for left in range(0, width - side + 1, stride)
        ]
    )


def fetch(name: str) -> pathlib.Path:
    """Download a set once with torchvision, which checks its hash, and store it as `NAME/SPLIT.npz`.

    Raises DataError for a set that has no open download.
    """
    if name not in FETCHABLE:
        raise DataError(
            f"name must be one of {', '.join(FETCHABLE)}, got {name!r}; "
            "ImageNet has no open download, put NAME/SPLIT.npz in place by hand"
        )
    from torchvision import datasets  # slow to import, and only needed here

    maker = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "mnist": datasets.MNIST}[name]
    folder = directory() / name
    for split in ("test", "train"):
        try:
            got = maker(folder / "download", train=split == "train", download=True)
        except (OSError, RuntimeError) as error:  # urllib's errors are OSErrors
            raise DataError(f"{name} could not be downloaded ({error}); nothing was stored in {folder}") from error
        write_npz(
            folder / f"{split}.npz",
            np.asarray(got.data),
            np.asarray(got.targets),
            got.classes,
            f"{name} {split}, {len(got.data)} pictures, torchvision download",
        )
    return folder


def write_npz(path: pathlib.Path, images: np.ndarray, labels: np.ndarray, classes, source: str) -> None:
    """Store pictures (n, h, w[, 3]) uint8 with a sha256 beside them, which `load` checks."""

    def save(temporary: pathlib.Path):
        with temporary.open("wb") as file:
            np.savez(file, images=images, labels=labels, classes=np.array(classes), source=np.array(source))

    write_atomically(path, save)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    write_atomically(path.with_suffix(".npz.sha256"), lambda temporary: temporary.write_text(digest + "\n"))


def _read_npz(path: pathlib.Path):
    digest = path.with_suffix(".npz.sha256")
    if digest.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != digest.read_text().split()[0]:
        raise DataError(f"{path} does not match {digest.name}: the file is damaged, fetch it again")
    try:
        # a zip archive carries a checksum of each member, so a flipped byte in a file that came without
        # a .sha256 is noticed here
        with np.load(path) as file:
            missing = {"images", "labels", "classes", "source"} - set(file.files)
            if missing:
                raise DataError(
                    f"{path} has no {', '.join(sorted(missing))}; gradinv.data.write_npz writes such a file"
                )
            images, labels = file["images"], file["labels"]
            if images.dtype != np.uint8 or images.ndim not in (3, 4) or labels.shape != images.shape[:1]:
                raise ValueError(
                    f"images must be uint8 (n, h, w[, 3]), got {images.dtype} {images.shape}, "
                    f"with labels {labels.shape}"
                )
            return images, labels, tuple(file["classes"].tolist()), str(file["source"])
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, OSError, RuntimeError) as error:
        raise DataError(f"{path} is damaged or not a picture file ({error}): fetch it again") from error


def _package_file(relative: str) -> pathlib.Path:
    package = relative.split("/")[0]
    spec = find_spec(package)
    if spec is None:
        raise DataError(f"the pictures in {package} need that package: pip install -e '.[book]'")
    return pathlib.Path(spec.origin).parent.parent / relative


def _bundled(name: str):
    ending, classes, expected = BUNDLED[name]
    files = sorted(_package_file("foolbox/data").glob(f"{name}_*.{ending}"))
    found = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if found != expected:
        raise DataError(
            f"{files[0].parent if files else 'foolbox'}/{name}_*.{ending} are not the pictures this "
            "package knows: a file is damaged or changed, reinstall foolbox"
        )
    pictures = [Image.open(file) for file in files]
    if name == "imagenet":
        pictures = [_square(picture) for picture in pictures]
    labels = np.array([int(file.stem.split("_")[2]) for file in files])
    names = CIFAR10_CLASSES if name == "cifar10" else tuple(map(str, range(classes)))
    return (
        np.stack([np.asarray(picture) for picture in pictures]),
        labels,
        names,
        f"{name} test 0 to {len(files) - 1}, as shipped in foolbox",
    )


def _photos():
    squares = [np.asarray(_square(Image.open(_package_file(relative)))) for relative in PHOTOS.values()]
    return (
        np.stack(squares),
        np.arange(len(squares)),
        tuple(PHOTOS),
        "photographs shipped in scikit-image and scikit-learn, centre squares",
    )


def _square(picture: Image.Image) -> Image.Image:
    """The centre square in colour, at 224 x 224."""
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.convert("RGB").crop((left, top, left + side, top + side))
    return square.resize((SQUARE, SQUARE), Image.Resampling.BICUBIC)


def _advice(name: str, split: str) -> str:
    if name in FETCHABLE:
        return f"python -m gradinv fetch {name} brings the whole set"
    return f"put {name}/{split}.npz into {directory()} (gradinv.data.write_npz writes one)"
