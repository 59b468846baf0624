"""Pictures with no download: what is bundled, what a folder adds, and damage that never becomes a result."""

import hashlib
import shutil
import socket

import numpy as np
import pytest
import torch

from gradinv import data
from gradinv.data import DataError

# name, number here, shape, first labels
BUNDLED = [
    ("cifar10", 20, (3, 32, 32), [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]),
    ("cifar100", 20, (3, 32, 32), [49, 33, 72, 51, 71, 92, 15, 14, 23, 0]),
    ("mnist", 20, (1, 28, 28), [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]),
    ("imagenet", 20, (3, 224, 224), None),
    ("photos", 8, (3, 224, 224), [0, 1, 2, 3, 4, 5, 6, 7]),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder for fetched pictures, and no network."""

    def refuse(*arguments, **options):
        raise AssertionError("the network was used")

    monkeypatch.setenv("GRADINV_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return tmp_path / "data"


@pytest.mark.parametrize(("name", "count", "shape", "labels"), BUNDLED)
def test_what_is_bundled(name, count, shape, labels):
    images = data.load(name)
    assert len(images) == count and images.pixels.shape == (count, *shape)
    assert images.pixels.dtype == torch.float32 and images.labels.dtype == torch.int64
    assert images.pixels.min() >= 0 and images.pixels.max() <= 1 and images.pixels.is_contiguous()
    assert images.pixels.max() > 0.9 and images.pixels.std() > 0.1  # 0 to 1, not 0 to 255 or 0 to 1/255
    assert (images.pixels * 255 - (images.pixels * 255).round()).abs().max() < 1e-4
    assert labels is None or images.labels[: len(labels)].tolist() == labels
    assert images.labels.max() < len(images.classes)
    assert images.name == name and "shipped in" in images.source


def test_class_names():
    assert data.load("cifar10", 4).names() == ["cat", "ship", "ship", "airplane"]
    assert data.load("mnist", 2).names() == ["7", "2"]
    assert data.load("photos").names()[0] == "astronaut"


def test_start_and_n_take_a_slice():
    whole = data.load("cifar10")
    part = data.load("cifar10", 3, start=5)
    assert torch.equal(part.pixels, whole.pixels[5:8]) and torch.equal(part.labels, whole.labels[5:8])
    rest = data.load("cifar10", start=18)
    assert torch.equal(rest.pixels, whole.pixels[18:])


def test_two_loads_share_nothing():
    first = data.load("cifar10", 1)
    first.pixels.zero_()
    assert data.load("cifar10", 1).pixels.any()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("cifar10", 21), {}, "cifar10/test holds 20 pictures here, asked for 0 to 21; .*gradinv fetch cifar10"),
        (("cifar10", 1), {"start": 20}, "holds 20 pictures here, asked for 20 to 21"),
        (("cifar10",), {"start": 99}, "holds 20 pictures here"),
        (("cifar10", 0), {}, "n must be at least 1, got 0"),
        (("cifar10", -1), {}, "n must be at least 1, got -1"),
        (("cifar10",), {"start": -1}, "start must not be negative, got -1"),
        (("cifar10",), {"split": "train"}, "no train pictures of cifar10 in .*gradinv fetch cifar10"),
        (("photos",), {"split": "train"}, "no train pictures of photos in .*put photos/train.npz into"),
        (("imagenet", 21), {}, "put imagenet/test.npz into"),
        (("cifar10",), {"split": "val"}, "split must be 'test' or 'train', got 'val'"),
        (("cifar",), {}, "name must be one of cifar10, .* or a folder in .*, got 'cifar'"),
        (("",), {}, "name must be one of"),
    ],
    ids=str,
)
def test_what_is_not_here_is_named(arguments, options, message):
    with pytest.raises(DataError, match=message):
        data.load(*arguments, **options)


def test_a_set_without_a_download_is_named():
    with pytest.raises(DataError, match="ImageNet has no open download"):
        data.fetch("imagenet")


def test_without_the_package_that_ships_them(monkeypatch):
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"no test pictures of cifar10 in .*gradinv fetch cifar10"):
        data.load("cifar10")
    with pytest.raises(DataError, match="the pictures in skimage need that package: pip install"):
        data.load("photos")


# --- the device ---


@pytest.mark.parametrize(("here", "chosen"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_cuda_where_there_is_one(monkeypatch, here, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    assert data.device("auto") == data.device() == torch.device(chosen)
    assert data.device("cpu") == torch.device("cpu")


def test_cuda_is_never_replaced_by_another_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert data.device("cuda") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda', but PyTorch finds no CUDA device here: use 'auto'"):
        data.device("cuda")


@pytest.mark.parametrize("name", ["tpu", "CPU", "", "cuda:0"])
def test_an_unknown_device_is_named(name):
    with pytest.raises(ValueError, match=f"device must be one of auto, cpu, cuda, got {name!r}"):
        data.device(name)


# --- pictures put in place ---


def write(folder, n=6, shape=(4, 5, 3), name="own"):
    images = np.random.default_rng(0).integers(0, 256, (n, *shape), dtype=np.uint8)
    labels = np.arange(n) % 3
    data.write_npz(folder / name / "test.npz", images, labels, ["a", "b", "c"], "made here")
    return images, labels


@pytest.mark.parametrize(("shape", "channels"), [((4, 5, 3), 3), ((4, 5), 1), ((4, 5, 1), 1)])
def test_a_folder_of_ones_own(folder, shape, channels):
    images, labels = write(folder, shape=shape)
    found = data.load("own", 2, start=3)
    expected = torch.from_numpy(images[3:5]).reshape(2, 4, 5, channels).permute(0, 3, 1, 2).float() / 255
    assert torch.equal(found.pixels, expected) and found.labels.tolist() == labels[3:5].tolist()
    assert (found.classes, found.name, found.source) == (("a", "b", "c"), "own", "made here")


def test_a_folder_comes_before_what_is_bundled(folder):
    write(folder, name="cifar10")
    assert data.load("cifar10").source == "made here"


def test_nothing_else_lies_beside_the_file(folder):
    write(folder)
    assert sorted(path.name for path in (folder / "own").iterdir()) == ["test.npz", "test.npz.sha256"]
    digest = (folder / "own/test.npz.sha256").read_text().split()[0]
    assert digest == hashlib.sha256((folder / "own/test.npz").read_bytes()).hexdigest()


def test_a_flipped_byte_is_noticed_by_the_hash(folder):
    write(folder)
    path = folder / "own/test.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"test\.npz does not match test\.npz\.sha256: the file is damaged"):
        data.load("own")


def test_any_flipped_byte_is_noticed_or_harmless_without_a_hash(folder):
    write(folder, n=2, shape=(2, 2, 3))
    path = folder / "own/test.npz"
    path.with_suffix(".npz.sha256").unlink()
    whole, content = data.load("own"), path.read_bytes()
    noticed = 0
    for position in range(0, len(content), 3):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x41]) + content[position + 1 :])
        try:
            found = data.load("own")
        except DataError as error:
            assert str(path) in str(error)
            noticed += 1
            continue
        assert torch.equal(found.pixels, whole.pixels) and torch.equal(found.labels, whole.labels)
        assert (found.classes, found.source) == (whole.classes, whole.source)
    assert noticed > 100


@pytest.mark.parametrize("length", [0, 10, 300])
def test_a_file_cut_short_is_damaged(folder, length):
    write(folder)
    path = folder / "own/test.npz"
    path.with_suffix(".npz.sha256").unlink()
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=r"test\.npz is damaged or not a picture file"):
        data.load("own")


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (np.zeros((2, 4, 4, 3)), np.zeros(2)),
        (np.zeros((2, 4, 4, 3), np.float32), np.zeros(2)),
        (np.zeros((4, 4), np.uint8), np.zeros(4)),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros(3)),
    ],
    ids=["doubles", "floats in [0, 1]", "one picture", "labels of another number"],
)
def test_a_file_of_another_kind_is_named(folder, images, labels):
    data.write_npz(folder / "own/test.npz", images, labels, ["a"], "made here")
    with pytest.raises(DataError, match=r"test\.npz .*images must be uint8 \(n, h, w\[, 3\]\), got"):
        data.load("own")


def test_a_flipped_byte_in_a_bundled_picture_is_named(tmp_path, monkeypatch):
    source = data._package_file("foolbox/data")
    copy = tmp_path / "foolbox/data"
    shutil.copytree(source, copy)
    monkeypatch.setattr(data, "_package_file", lambda relative: tmp_path / relative)
    assert len(data.load("cifar10")) == 20
    victim = sorted(copy.glob("cifar10_*.png"))[7]
    content = bytearray(victim.read_bytes())
    content[-20] ^= 1
    victim.write_bytes(content)
    with pytest.raises(DataError, match=r"foolbox/data/cifar10_\*\.png are not the pictures this package knows"):
        data.load("cifar10")
    assert len(data.load("mnist")) == 20
    victim.unlink()
    with pytest.raises(DataError, match="are not the pictures this package knows"):
        data.load("cifar10")


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (224, 224), (50, 40)])
def test_the_centre_square(size):
    from PIL import Image

    picture = Image.new("L", size, 0)
    picture.paste(255, (size[0] // 2 - 4, size[1] // 2 - 4, size[0] // 2 + 4, size[1] // 2 + 4))
    square = np.asarray(data._square(picture))
    assert square.shape == (224, 224, 3)
    rows, columns = np.nonzero(square[..., 0] > 128)
    assert abs(rows.mean() - 111.5) < 2 and abs(columns.mean() - 111.5) < 2


@pytest.mark.parametrize(("side", "stride"), [(3, 2), (4, 1), (1, 5), (5, 4)])
def test_windows_are_all_squares_place_after_place(side, stride):
    pixels = torch.rand(2, 3, 5, 9)
    found = data.windows(pixels, side, stride)
    every = pixels.unfold(2, side, stride).unfold(3, side, stride)
    assert torch.equal(found, every.permute(2, 3, 0, 1, 4, 5).reshape(-1, 3, side, side))


def test_windows_without_overlap_put_together_are_the_picture():
    pixels = torch.rand(1, 3, 4, 4)
    one, two, three, four = data.windows(pixels, 2, 2)
    whole = torch.cat([torch.cat([one, two], 2), torch.cat([three, four], 2)], 1)
    assert torch.equal(whole, pixels[0])


@pytest.mark.parametrize(("side", "stride"), [(0, 1), (6, 1), (2, 0)])
def test_windows_that_do_not_fit_are_named(side, stride):
    with pytest.raises(ValueError, match=f"side must be from 1 to 5 and stride at least 1, got {side} and {stride}"):
        data.windows(torch.rand(1, 3, 5, 9), side, stride)
