"""The networks under attack: published sizes, and what each option changes."""

import hashlib
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradinv import client, victims

# Parameter counts of the papers' networks.
COUNTS = {
    "lenet": (lambda: victims.lenet(), 15_826),
    "lenet, 100 classes": (lambda: victims.lenet(classes=100), 85_036),
    "lenet, MNIST": (lambda: victims.lenet(1, size=28), 312 + 2 * 3_612 + 588 * 10 + 10),
    "convnet": (lambda: victims.convnet(), 2_904_970),
    "convnet, circular": (lambda: victims.convnet(padding="circular"), 2_904_970),
    "pooled": (lambda: victims.pooled_convnet(), 16 * 27 + 16 * 288 + 32 * 288 + 32 * 576 + 144 + 650),
    "resnet20-4": (lambda: victims.resnet(20), 4_327_754),
    "resnet32-10": (lambda: victims.resnet(32, width=160, classes=100), 46_429_060),
    "resnet18": (lambda: victims.resnet(18), 11_173_962),
    "resnet18-w16": (lambda: victims.resnet(18, width=16), 701_466),
    "resnet18-w128": (lambda: victims.resnet(18, width=128), 44_662_922),
    "resnet34": (lambda: victims.resnet(34), 21_282_122),
    "resnet50": (lambda: victims.resnet(50), 23_520_842),
    "torchvision's resnet18": (lambda: victims.torchvision_resnet(18), 11_689_512),
    "torchvision's resnet152": (lambda: victims.torchvision_resnet(152), 60_192_808),
    "cnn6": (lambda: victims.cnn6(), 125_456),
    "cnn6d": (lambda: victims.cnn6d(), 118_544),
    "fcn3": (lambda: victims.fcn3(), 884_100),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name):
    make, count = COUNTS[name]
    with torch.device("meta"):
        net = make()
    assert sum(parameter.numel() for parameter in net.parameters()) == count


def test_pixels_are_normalised_inside():
    normalize = victims.Normalize(victims.CIFAR10_MEAN, victims.CIFAR10_STD)
    mean = torch.tensor(victims.CIFAR10_MEAN).view(1, 3, 1, 1)
    std = torch.tensor(victims.CIFAR10_STD).view(1, 3, 1, 1)
    torch.testing.assert_close(normalize((mean + 2 * std).expand(1, 3, 4, 5)), torch.full((1, 3, 4, 5), 2.0))
    assert not list(normalize.parameters())  # the client does not send the mean


def test_a_grey_picture_is_not_spread_over_three_channels():
    with pytest.raises(ValueError, match="pixels must have 3 channels, got 1"):
        victims.Normalize(victims.CIFAR10_MEAN, victims.CIFAR10_STD)(torch.rand(1, 1, 4, 4))


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        (True, [True] * 3),
        (False, [False] * 3),
        ("last", [False, False, True]),
        ([True, False, True], [True, False, True]),
        ((False, True, False), [False, True, False]),
    ],
)
def test_fc_bias(bias, expected):
    net = victims.fc((5, 4, 3, 2), bias=bias)
    assert [layer.bias is not None for layer in net if isinstance(layer, nn.Linear)] == expected


@pytest.mark.parametrize("bias", ["first", [True], (True, False), (1, 0, 1)])
def test_fc_refuses_another_bias(bias):
    with pytest.raises(ValueError, match="bias must be True, False, 'last' or 3 booleans, got"):
        inspect.unwrap(victims.fc)((5, 4, 3, 2), bias=bias)


def test_fc_is_what_it_says():
    net = victims.fc((6, 4, 3), activation="tanh")
    pixels = torch.rand(2, 1, 2, 3)
    hidden = torch.tanh(functional.linear(pixels.flatten(1), net[1].weight, net[1].bias))
    torch.testing.assert_close(net(pixels), functional.linear(hidden, net[3].weight, net[3].bias))


@pytest.mark.parametrize("sizes", [(), (5,)])
def test_fc_needs_an_input_and_an_output(sizes):
    with pytest.raises(ValueError, match="sizes needs an input and an output"):
        victims.fc(sizes)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", functional.relu),
        ("leaky_relu", lambda x: functional.leaky_relu(x, 0.2)),
        ("sigmoid", torch.sigmoid),
        ("tanh", torch.tanh),
        ("identity", lambda x: x),
    ],
)
def test_activation(name, function):
    x = torch.linspace(-2, 2, 9)[None]
    torch.testing.assert_close(victims.fc((9, 9, 1), activation=name)[2](x), function(x))


def test_unknown_activation_is_named():
    with pytest.raises(ValueError, match=r"activation must be one of relu.*got 'gelu'"):
        victims.fc((3, 2, 1), activation="gelu")


def test_lenet_weights_are_uniform_in_a_half():
    weights = torch.cat([parameter.flatten() for parameter in victims.lenet().parameters()])
    assert weights.abs().max() <= 0.5
    assert abs(weights.var().item() - 1 / 12) < 0.002  # the variance of a uniform draw of width 1


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (1, 27), (2, 9)])
def test_lenet_takes_any_square(channels, size):
    assert victims.lenet(channels, 7, size)(torch.rand(2, channels, size, size)).shape == (2, 7)


def test_cutting_a_skip_removes_the_identity():
    torch.manual_seed(1)
    whole = victims.resnet(18, width=4)
    torch.manual_seed(1)
    cut = victims.resnet(18, width=4, cut=("layer1.0",))
    x = torch.rand(2, 4, 8, 8) + 0.1
    block, without = whole.layer1[0], cut.layer1[0]
    inside = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
    torch.testing.assert_close(block(x), torch.relu(inside + x))
    torch.testing.assert_close(without(x), torch.relu(inside))


@pytest.mark.parametrize("depth", [18, 50])
def test_cutting_a_shortcut_removes_its_weights(depth):
    whole = dict(victims.resnet(depth, width=4).named_parameters())
    cut = dict(victims.resnet(depth, width=4, cut=("layer2.0",)).named_parameters())
    assert {name for name in whole if name not in cut} == {
        f"layer2.0.downsample.{name}" for name in ("0.weight", "1.weight", "1.bias")
    }


def test_a_single_name_may_be_cut():
    assert isinstance(victims.resnet(18, width=2, cut="layer2.1").layer2[1].downsample, victims.NoSkip)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 19}, "depth must be one of .*18.*got 19"),
        ({"stem": "mnist"}, "stem must be 'cifar' or 'imagenet', got 'mnist'"),
        ({"cut": ("layer9.0",)}, "cut must name blocks among layer1.0.*got 'layer9.0'"),
    ],
)
def test_resnet_names_a_wrong_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        victims.resnet(**{"width": 2, **arguments})


def test_imagenet_stem_halves_twice():
    assert victims.resnet(18, width=2, stem="imagenet").maxpool(torch.rand(1, 2, 16, 16)).shape == (1, 2, 8, 8)
    assert victims.resnet(18, width=2, stem="imagenet")(torch.rand(1, 3, 224, 224)).shape == (1, 10)


@pytest.mark.parametrize(("padding", "commutes"), [("circular", True), ("zeros", False)])
def test_circular_padding_moves_with_the_picture(padding, commutes):
    front = victims.convnet(width=4, padding=padding)[:10].double()  # up to the third convolution's ReLU
    pixels = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    moved = front(pixels.roll((5, -3), dims=(2, 3)))
    difference = (moved - front(pixels).roll((5, -3), dims=(2, 3))).abs().max()
    assert (difference < 1e-12) == commutes


def test_convnet_refuses_another_padding():
    with pytest.raises(ValueError, match="padding must be one of zeros, circular, got 'reflect'"):
        victims.convnet(padding="reflect")


def test_rgap_networks_have_no_bias_and_one_logit():
    for net in (victims.cnn6(), victims.cnn6d(), victims.fcn3()):
        assert not [name for name, _ in net.named_parameters() if name.endswith("bias")]
    assert victims.cnn6()(torch.rand(1, 3, 32, 32)).shape == (1, 1)


def test_fcn3_ends_in_leaky_relu():
    net, pixels = victims.fcn3(), torch.rand(8, 1, 28, 28)
    torch.testing.assert_close(net(pixels), functional.leaky_relu(net[:-1](pixels), 0.2))
    assert isinstance(net[-1], nn.LeakyReLU)


def test_rgap_networks_scale_with_their_input():
    net, pixels = victims.cnn6().double(), torch.rand(1, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(net(3 * pixels), 3 * net(pixels))


@pytest.mark.parametrize("name", ["fc", "fc-epoch5", "resnet18-w16", "resnet18-w16-epoch5"])
def test_trained_weights_are_better_than_chance(name):
    from gradinv import data

    net, facts = victims.trained(name)
    images = data.load("cifar10", 20)
    assert facts["held_out_correct"] / facts["held_out"] > 0.2
    assert (net(images.pixels).argmax(1) == images.labels).sum() >= 5  # two are expected by chance
    assert not net.training and all(parameter.dtype == torch.float32 for parameter in net.parameters())


def test_trained_names_what_there_is():
    with pytest.raises(ValueError, match=r"name must be one of .*resnet18-w16.*got 'nothing'"):
        victims.trained("nothing")


@pytest.mark.parametrize(
    ("padding", "same"),
    [
        ("circular", True),
        ("zeros", False),
        (("circular",) * 3 + ("zeros",), False),
        (("zeros",) + ("circular",) * 3, False),
    ],
)
def test_gradients_of_shifted_pictures(padding, same):
    """With circular padding everywhere all shifts have one gradient; one layer with zeros is enough to tell them."""
    net = victims.pooled_convnet(width=4, padding=padding).double()
    pixels, labels = torch.rand(1, 3, 6, 5, dtype=torch.float64), torch.tensor([3])
    sent = client.gradient(net, pixels, labels).gradient
    size = torch.cat([value.flatten() for value in sent.values()]).norm()
    for down in range(6):
        for across in range(5):
            moved = client.gradient(net, pixels.roll((down, across), (-2, -1)), labels).gradient
            apart = torch.cat([(moved[name] - value).flatten() for name, value in sent.items()]).norm() / size
            assert (apart < 1e-10) == (same or down == across == 0)


@pytest.mark.parametrize("padding", ["reflect", ("zeros",) * 3, ("zeros", "circular", "same", "zeros")])
def test_pooled_convnet_refuses_another_padding(padding):
    with pytest.raises(ValueError, match="padding must be 'zeros' or 'circular', or four of these, got "):
        victims.pooled_convnet(padding=padding)


def test_torchvision_networks_normalise_inside():
    net, pixels = victims.torchvision_resnet(18), torch.rand(1, 3, 40, 48)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (victims.IMAGENET_MEAN, victims.IMAGENET_STD))
    torch.testing.assert_close(net(pixels), net[1]((pixels - mean) / std))
    assert net(pixels).shape == (1, 1000)


@pytest.mark.parametrize("depth", [17, 20, 32])
def test_torchvision_has_no_other_depth(depth):
    with pytest.raises(ValueError, match=rf"depth must be one of \[18, 34, 50, 101, 152\], got {depth}"):
        victims.torchvision_resnet(depth)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder of `torch.hub` without a network."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", None)
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("depth", [18, 152])
def test_missing_weights_are_named_and_not_fetched(hub, depth):
    with pytest.raises(FileNotFoundError, match=rf"resnet{depth}-\w{{8}}\.pth is not there: download https://"):
        victims.torchvision_resnet(depth, trained=True)
    assert not list(hub.iterdir())


def test_damaged_weights_are_named(hub):
    (hub / "resnet18-f37072fd.pth").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"resnet18-f37072fd\.pth is damaged"):
        victims.torchvision_resnet(18, trained=True)


def test_weights_on_disk_are_used(hub, monkeypatch):
    torch.manual_seed(7)
    there = victims.torchvision_resnet(18)
    torch.save(there[1].state_dict(), hub / "new.pth")
    name = f"resnet18-{hashlib.sha256((hub / 'new.pth').read_bytes()).hexdigest()[:8]}.pth"
    (hub / "new.pth").rename(hub / name)
    weights = type("Weights", (), {"url": f"https://example.org/{name}"})
    monkeypatch.setattr("torchvision.models.get_weight", lambda name: weights)
    loaded = victims.torchvision_resnet(18, trained=True)
    assert not loaded.training
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in there.state_dict().items())
