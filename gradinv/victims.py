"""The networks under attack.

Every function returns an `nn.Module` in eval mode that takes pixels in [0, 1], with PyTorch's random
generator deciding its weights. Networks that the papers feed with normalised pictures normalise inside,
as their first layer. `trained` gives the small weights made for this book.
"""

import hashlib
import json
import math
import pathlib
from collections.abc import Sequence

import torch
import torchvision
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from gradinv.client import expect_one_of

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
PADDINGS = ("zeros", "circular")
LEAK = 0.2  # slope of R-GAP's LeakyReLU (Zhu & Blaschko 2021)
WEIGHTS = pathlib.Path(__file__).parent / "weights"


class Normalize(nn.Module):
    """Pixels in [0, 1] to (pixels - mean) / std, channel by channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        if pixels.shape[1] != len(self.mean):  # one grey channel would spread over three in silence
            raise ValueError(f"pixels must have {len(self.mean)} channels, got {pixels.shape[1]}")
        return (pixels - self.mean) / self.std


class NoSkip(nn.Module):
    """Stands where a residual block's skip connection was, and contributes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(())


def _activation(name: str) -> nn.Module:
    makers = {
        "relu": nn.ReLU,
        "leaky_relu": lambda: nn.LeakyReLU(LEAK),
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
        "identity": nn.Identity,
    }
    if name not in makers:
        raise ValueError(f"activation must be one of {', '.join(makers)}, got {name!r}")
    return makers[name]()


def fc(sizes: Sequence[int], *, bias: bool | str | Sequence[bool] = True, activation: str = "relu") -> nn.Module:
    """A stack of fully connected layers of the given sizes, input first (Proposition 3.1, Geiping et al. 2020).

    bias: True, False, "last" (on the last layer only), or one boolean a layer.
    """
    count = len(sizes) - 1
    if count < 1:
        raise ValueError(f"sizes needs an input and an output, got {tuple(sizes)}")
    if bias == "last":
        bias = [False] * (count - 1) + [True]
    biases = [bias] * count if isinstance(bias, bool) else list(bias)
    if len(biases) != count or not all(isinstance(flag, bool) for flag in biases):
        raise ValueError(f"bias must be True, False, 'last' or {count} booleans, got {bias!r}")
    layers: list[nn.Module] = [nn.Flatten()]
    for i in range(count):
        layers += [nn.Linear(sizes[i], sizes[i + 1], bias=biases[i]), _activation(activation)]
    return nn.Sequential(*layers[:-1]).eval()


def lenet(
    channels: int = 3, classes: int = 10, size: int = 32, activation: str = "sigmoid", bias: bool = True
) -> nn.Module:
    """The small smooth network of DLG, "LeNet (Zhu)": weights and biases uniform in (-0.5, 0.5).

    Three 5 x 5 convolutions of 12 filters, strides 2, 2, 1, and one linear layer; 15,826 parameters for
    32 x 32 colour pictures and 10 classes. R-GAP's LeNet has no biases, one channel and one logit, for pictures of
    28 x 28; with activation="leaky_relu" it is their LeNet* (Zhu & Blaschko 2021).
    """
    layers = []
    for inputs, stride in ((channels, 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(inputs, 12, 5, stride, padding=2, bias=bias), _activation(activation)]
    side = math.ceil(math.ceil(size / 2) / 2)
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * side * side, classes, bias=bias))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(-0.5, 0.5)
    return net.eval()


def convnet(width: int = 64, classes: int = 10, padding: str = "zeros") -> nn.Module:
    """The ConvNet of Geiping et al. 2020 for 32 x 32 colour pictures: eight 3 x 3 convolutions, each with
    batch norm and ReLU, two 3 x 3 max-pools, one linear layer; 2,904,970 parameters at width 64.

    padding: "zeros" or "circular".
    """
    expect_one_of("padding", padding, PADDINGS)
    plan = (1, 2, 2, 4, 4, 4, "pool", 4, 4, "pool")
    layers: list[nn.Module] = [Normalize(CIFAR10_MEAN, CIFAR10_STD)]
    inputs = 3
    for item in plan:
        if item == "pool":
            layers.append(nn.MaxPool2d(3))
            continue
        outputs = item * width
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, padding_mode=padding), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * 9, classes)).eval()


def pooled_convnet(
    width: int = 16, classes: int = 10, padding: str | Sequence[str] = "circular", activation: str = "relu"
) -> nn.Module:
    """A network for colour pictures of any size that cannot tell where things are: four 3 x 3 convolutions of stride
    1, the mean over all places, one linear layer.

    With circular padding everywhere its gradient is the same for all cyclic shifts of a picture, which is what the
    translation-invariant network of Geiping et al. 2020 must have been like; the paper does not describe it.

    padding: "zeros" or "circular", for all convolutions or one for each.
    """
    modes = (padding,) * 4 if isinstance(padding, str) else tuple(padding)
    if len(modes) != 4 or not set(modes) <= set(PADDINGS):
        raise ValueError(f"padding must be {' or '.join(map(repr, PADDINGS))}, or four of these, got {padding!r}")
    layers: list[nn.Module] = [Normalize(CIFAR10_MEAN, CIFAR10_STD)]
    inputs = 3
    for times, mode in zip((1, 2, 2, 4), modes, strict=True):
        outputs = times * width
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, padding_mode=mode), _activation(activation)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)).eval()


class _ResNet(nn.Module):
    """torchvision's residual blocks in the CIFAR arrangement, of any width, with skips that can be cut."""

    def __init__(self, block, counts: Sequence[int], width: int, classes: int, stem: str):
        super().__init__()
        self.normalize = Normalize(CIFAR10_MEAN, CIFAR10_STD)
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        inputs = width
        for stage, count in enumerate(counts):
            blocks = []
            for i in range(count):
                planes, stride = width * 2**stage, 2 if stage and not i else 1
                outputs = planes * block.expansion
                shortcut = None
                if stride > 1 or inputs != outputs:
                    shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
                blocks.append(block(inputs, planes, stride, shortcut))
                inputs = outputs
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages = len(counts)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(self.normalize(pixels)))))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(self.avgpool(x).flatten(1))


DEPTHS = {
    18: (BasicBlock, (2, 2, 2, 2)),
    20: (BasicBlock, (3, 3, 3)),
    32: (BasicBlock, (5, 5, 5)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


def resnet(
    depth: int = 18, width: int = 64, classes: int = 10, cut: Sequence[str] = (), stem: str = "cifar"
) -> nn.Module:
    """A residual network for small pictures, built from torchvision's blocks (He et al. 2016).

    Args:
        depth: 18, 34, 50, 101, 152 (four stages), or 20 and 32 (three stages; width 64 is "ResNet20-4",
            width 160 "ResNet32-10").
        width: channels of the first stage; each later stage doubles them.
        classes: outputs.
        cut: names of blocks whose skip connection is removed, such as ("layer2.0",).
        stem: "cifar" (one 3 x 3 convolution) or "imagenet" (7 x 7, stride 2, and a max-pool).
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth must be one of {sorted(DEPTHS)}, got {depth}")
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f"stem must be 'cifar' or 'imagenet', got {stem!r}")
    net = _ResNet(*DEPTHS[depth], width, classes, stem)
    blocks = {name: module for name, module in net.named_modules() if isinstance(module, (BasicBlock, Bottleneck))}
    for name in (cut,) if isinstance(cut, str) else cut:
        if name not in blocks:
            raise ValueError(f"cut must name blocks among {', '.join(blocks)}, got {name!r}")
        blocks[name].downsample = NoSkip()
    return net.eval()


def torchvision_resnet(depth: int = 18, *, trained: bool = False) -> nn.Module:
    """torchvision's residual network for ImageNet's 1000 classes, for pictures of 224 x 224 or any other size.

    Depth 18 has 11,689,512 parameters and depth 152 has 60,192,808 (He et al. 2016).

    Args:
        depth: 18, 34, 50, 101 or 152.
        trained: load torchvision's weights IMAGENET1K_V1 from the folder of `torch.hub`. Nothing is ever downloaded.

    Raises:
        ValueError: another depth, or a file of weights that is damaged.
        FileNotFoundError: the weights are not there; the message names the file and what to do.
    """
    depths = [known for known, (_, counts) in DEPTHS.items() if len(counts) == 4]
    if depth not in depths:
        raise ValueError(f"depth must be one of {depths}, got {depth}")
    weights = torch.load(_hub_file(depth), map_location="cpu", weights_only=True) if trained else None
    net = getattr(torchvision.models, f"resnet{depth}")(weights=None)
    if trained:
        net.load_state_dict(weights)
    return nn.Sequential(Normalize(IMAGENET_MEAN, IMAGENET_STD), net).eval()


def _hub_file(depth: int) -> pathlib.Path:
    """torchvision's weights on disk, whose name ends in the beginning of their sha256."""
    weights = torchvision.models.get_weight(f"ResNet{depth}_Weights.IMAGENET1K_V1")
    path = pathlib.Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: download {weights.url} into that folder, or let torchvision.models.resnet{depth}"
            f'(weights="IMAGENET1K_V1") do it once'
        )
    if not hashlib.sha256(path.read_bytes()).hexdigest().startswith(path.stem.rpartition("-")[2]):
        raise ValueError(f"{path} is damaged, its hash is not the one in its name: download {weights.url} again")
    return path


def cnn6(activation: str = "leaky_relu", *, second: int = 36, size: tuple[int, int] = (32, 32)) -> nn.Module:
    """CNN6 of R-GAP (Zhu & Blaschko 2021): six convolutions and one logit, no bias, for colour pictures.

    second: filters of its second convolution, which decide what is lost there; size: (height, width) of the pictures.
    """
    plan = (
        (3, 12, 4, 2, 2),
        (12, second, 3, 2, 1),
        (second, 36, 3, 1, 1),
        (36, 36, 3, 1, 1),
        (36, 64, 3, 2, 1),
        (64, 128, 3, 1, 1),
    )
    layers, sides = [], size
    for inputs, outputs, kernel, stride, padding in plan:
        layers += [nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), _activation(activation)]
        sides = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * math.prod(sides), 1, bias=False)).eval()


def cnn6d() -> nn.Module:
    """CNN6-d of R-GAP: CNN6 with its second convolution narrowed to 20 filters, which makes it rank-deficient."""
    return cnn6(second=20)


def fcn3() -> nn.Module:
    """FCN3 of R-GAP for 28 x 28 grey pictures: 784-1000-100-1, no bias, LeakyReLU on the output too."""
    return nn.Sequential(*fc((784, 1000, 100, 1), bias=False, activation="leaky_relu"), nn.LeakyReLU(LEAK)).eval()


def trained(name: str) -> tuple[nn.Module, dict]:
    """A network with the weights made by `python -m gradinv train`, and the record of that training.

    The record holds the recipe, the data it saw and the accuracy on held-out pictures.
    Raises ValueError for a name that is not there.
    """
    from gradinv.train import RECIPES  # train imports this module

    record, weights = WEIGHTS / f"{name}.json", WEIGHTS / f"{name}.safetensors"
    if not (record.exists() and weights.exists()):
        known = ", ".join(sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))
        raise ValueError(f"name must be one of {known}, got {name!r}")
    facts = json.loads(record.read_text())
    net = RECIPES[facts["recipe"]].build()
    # stored in half precision to keep the package small; the attacks see single precision
    net.load_state_dict(
        {key: value.float() if value.is_floating_point() else value for key, value in load_file(weights).items()}
    )
    return net.eval(), facts
