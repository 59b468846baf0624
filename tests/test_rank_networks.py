"""The counts of whole networks: hand-built ones with known answers, and those of torchvision."""

import pytest
import torch
import torchvision
from networks import Net, Recurrent
from torch import nn
from torch.nn import functional

from gradinv import rank

WEIGHTS = "it has weights, and is neither a convolution in two dimensions nor a linear layer"
COMPUTED = "its weights are computed or fixed, so that their gradient is not sent as such"
PRODUCT = "it multiplies two values that both come from the picture"
OWN_SCALE = "it divides by a size of its own input"
UNSEEN = "the picture does not reach its weights, as far as can be seen"
AROUND = "it adds constants around its input, which count among the unknowns of what follows"
DROPPED = "it leaves out a part of its input, and the layers before it count all of their output as known"
ODD = "it combines values from the picture otherwise than by a sum or side by side"


def conv(inputs=4, outputs=4, size=3, *, padding=1, **options):
    return nn.Conv2d(inputs, outputs, size, padding=padding, bias=False, **options)


def rows(report):
    return {row.name: row for row in report.layers if row.weights}


def lines(report):
    return {(line.name, line.why) for line in report.not_counted}


def dense_nullity(model, shape, weight):
    """Of all equations that a layer's output and its weights' gradient give for the picture, one pixel at a time."""
    unit = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).view(-1, *shape)
    outputs = torch.stack([model(one[None]).flatten() for one in unit])
    k = torch.randn(outputs.shape[1], dtype=torch.float64)
    gradients = [torch.autograd.grad(output @ k, weight, retain_graph=True)[0].flatten() for output in outputs]
    equations = torch.cat([outputs.detach(), torch.stack(gradients)], 1)
    return len(unit) - int(torch.linalg.matrix_rank(equations, rtol=1e-9))


# --- one layer, however it is called ---

LAYERS = {
    "a module": (conv(2, 3), (2, 6, 5)),
    "a function": (Net(lambda net, x: functional.conv2d(x, net.a.weight, stride=2), a=conv(2, 3)), (2, 6, 5)),
    "padded before": (Net(lambda net, x: net.a(functional.pad(x, (0, 2, 1, 0))), a=conv(2, 3, padding=0)), (2, 6, 5)),
    "padded at the sides": (Net(lambda net, x: net.a(functional.pad(x, (2, 1))), a=conv(2, 3, padding=0)), (2, 6, 5)),
    "cropped": (Net(lambda net, x: net.a(functional.pad(x, (-1, 0, 0, 1))), a=conv(2, 3, padding=0)), (2, 6, 5)),
    "padded twice": (nn.Sequential(nn.ZeroPad2d(1), conv(2, 3)), (2, 6, 5)),
    "circular before": (nn.Sequential(nn.CircularPad2d(1), conv(2, 2, stride=2, padding=0)), (2, 6, 5)),
    "circular": (conv(2, 2, stride=2, padding_mode="circular"), (2, 6, 5)),
    "reflect": (conv(2, 2, stride=2, padding_mode="reflect"), (2, 6, 5)),
    "the same size": (conv(2, 2, (2, 3), padding="same"), (2, 6, 5)),
    "a filter a channel": (conv(3, 3, stride=2, groups=3), (3, 6, 5)),
    "groups": (conv(4, 2, groups=2), (4, 4, 5)),
    "a kernel of two sides": (conv(2, 3, (3, 1), padding=(1, 0), dilation=(2, 1)), (2, 6, 5)),
    "a linear map": (nn.Linear(7, 3, bias=False), (7,)),
    "of tokens": (nn.Linear(7, 3, bias=False), (2, 5, 7)),
    "of few tokens": (nn.Linear(7, 3, bias=False), (1, 2, 7)),
    "as a function": (Net(lambda net, x: functional.linear(x.mT, net.a.weight), a=nn.Linear(4, 2)), (1, 4, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_layer(name):
    model, shape = LAYERS[name]
    model = model.double()
    report = rank.analyse(model, shape)
    (row,) = report.layers
    weight = next(value for value in model.parameters() if value.ndim > 1)
    assert (row.x, row.weights) == (torch.Size(shape).numel(), weight.numel())
    assert row.z == model(torch.zeros(1, *shape, dtype=torch.float64)).numel()
    assert row.nullity == dense_nullity(model, shape, weight)
    assert row.name == ("a" if isinstance(model, Net) else "1" if isinstance(model, nn.Sequential) else "")
    assert not report.not_counted and not report.blocks


def test_a_linear_map_of_tokens_is_a_convolution_of_one_pixel():
    for tokens, inputs, outputs in ((600, 12, 5), (7, 90, 40), (64, 16, 16)):
        (linear,) = rank.analyse(nn.Linear(inputs, outputs), (1, tokens, inputs)).layers
        (pixel,) = rank.analyse(nn.Conv2d(inputs, outputs, 1), (inputs, tokens, 1)).layers
        assert (linear.x, linear.weights, linear.z, linear.nullity) == (pixel.x, pixel.weights, pixel.z, pixel.nullity)


# --- what has no row has a line ---


def gate(net, x):
    return x * torch.sigmoid(net.b(functional.adaptive_avg_pool2d(net.a(x), 1).flatten(1)))[..., None, None]


def tied(net, x):
    return net.head(net.a(net.a(x)).flatten(1))


def head(features=64):
    return nn.Linear(features, 2)


SHAPE = (4, 4, 4)
# a network for pictures of SHAPE, its layers with a row, and name and reason of its lines
LINES = {
    "a gate": (Net(gate, a=conv(), b=nn.Linear(4, 4)), "a b", [("", PRODUCT)]),
    "two halves of one value": (Net(lambda net, x: torch.mul(*net.a(x).chunk(2, 1)), a=conv()), "a", [("", PRODUCT)]),
    "glu": (nn.Sequential(conv(), nn.GLU(1)), "0", [("1", PRODUCT)]),
    "attention": (
        Net(lambda net, x: functional.scaled_dot_product_attention(*net.a(x).chunk(2, 1)[:1] * 3), a=conv()),
        "a",
        [("", PRODUCT)],
    ),
    "a weight that runs twice": (
        Net(tied, a=conv(), head=head()),
        "head",
        [("a", "its weights run 2 times, and their gradient is a sum")],
    ),
    "a weight that also runs otherwise": (
        Net(lambda net, x: net.head(x.flatten(1)) @ net.head.weight, head=head(), last=head()),
        "",
        [("head", "its weights run 2 times, and their gradient is a sum"), ("", WEIGHTS), ("last", UNSEEN)],
    ),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(4, 4, 1), conv()), "1", [("0", WEIGHTS)]),
    "one dimension": (
        Net(lambda net, x: net.b(net.a(x.flatten(2))), a=nn.Conv1d(4, 4, 1), b=head(16)),
        "b",
        [("a", WEIGHTS)],
    ),
    "norms": (
        nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4, elementwise_affine=False), nn.InstanceNorm2d(4), conv()),
        "3",
        [("0", WEIGHTS), ("1", OWN_SCALE), ("2", OWN_SCALE)],
    ),
    "batch norm without statistics": (
        nn.Sequential(nn.BatchNorm2d(4, affine=False, track_running_stats=False), conv()),
        "1",
        [("0", OWN_SCALE)],
    ),
    "frozen batch norm": (
        nn.Sequential(conv(), nn.BatchNorm2d(4), torchvision.ops.FrozenBatchNorm2d(4), nn.ReLU(inplace=True)),
        "0",
        [],
    ),
    "attention with heads": (
        Net(lambda net, x: net.b(net.a(*[x.flatten(2)] * 3)[0]), a=nn.MultiheadAttention(16, 2), b=head(16)),
        "b",
        [("a", WEIGHTS)],
    ),
    "positions": (
        Net(lambda net, x: net.b(x.flatten(2) + net.a(torch.arange(4))), a=nn.Embedding(4, 16), b=head(16)),
        "b",
        [("", WEIGHTS)],
    ),
    "weight norm": (nn.Sequential(nn.utils.parametrizations.weight_norm(conv()), conv()), "1", [("0", COMPUTED)]),
    "a kernel from the picture": (Net(lambda net, x: torch.conv2d(x, net.a(x)), a=conv()), "a", [("", COMPUTED)]),
    "fixed weights": (
        Net(lambda net, x: torch.conv2d(net.a(x), torch.ones(1, 4, 1, 1)), a=conv()),
        "a",
        [("", COMPUTED)],
    ),
    "a fixed matrix": (
        Net(lambda net, x: net.a(x) @ torch.ones(4, 2), a=conv()),
        "a",
        [("", "it multiplies by a matrix that is no weight")],
    ),
    "pictures side by side": (
        Net(lambda net, x: net.head(net.a(x.view(2, 2, 4, 4)).flatten()), a=conv(2, 2), head=head()),
        "head",
        [("a", "it runs on 2 pictures at once")],
    ),
    "frozen": (
        nn.Sequential(conv().requires_grad_(False), conv()),
        "1",
        [("0", "its weights are frozen, so that no gradient is sent for them")],
    ),
    "padded before an activation": (nn.Sequential(nn.ZeroPad2d(1), nn.ReLU(), conv()), "2", [("0", AROUND)]),
    "padded twice, and not with zeros": (nn.Sequential(nn.CircularPad2d(1), conv()), "1", [("0", AROUND)]),
    "coordinates": (
        Net(lambda net, x: net.a(torch.cat([x, torch.ones(1, 1, 4, 4)], 1)), a=conv(5)),
        "a",
        [("", AROUND)],
    ),
    "the larger one": (Net(lambda net, x: torch.maximum(net.a(x), x), a=conv()), "a", [("", ODD)]),
    "a look at values": (
        Net(lambda net, x: net.a(x) if x.sum() > 0 else x, a=conv()),
        "a",
        [("", "the network looks at values here, and may run otherwise for another picture")],
    ),
    "never reached": (Net(lambda net, x: net.a(x), a=conv(), b=conv()), "a", [("b", UNSEEN)]),
}


@pytest.mark.parametrize("name", LINES)
def test_rows_and_lines(name):
    model, counted, expected = LINES[name]
    if not counted:
        with pytest.raises(ValueError, match=r"not counted: head \(Linear\): its weights run 2 times"):
            rank.analyse(model, SHAPE)
        return
    report = rank.analyse(model, SHAPE)
    assert list(rows(report)) == counted.split()
    assert lines(report) == set(expected)
    assert every_weight_is_named(model, report)


def every_weight_is_named(model, report):
    named = {name for line in report.not_counted for name in line.parameters}
    counted = {f"{name}.weight".lstrip(".") for name in rows(report)}
    return {name for name, value in model.named_parameters() if value.ndim > 1} <= named | counted


# a function that throws numbers away, and what its line says
FLAT = "no gradient passes through it"
DROPS = {
    "a crop": (lambda net, x: net.head(x[:, :, :2, :2].flatten(1)), {DROPPED}),
    "the largest": (lambda net, x: net.head(x.flatten(1).topk(16, 1)[0]), {DROPPED}),
    "lengths": (lambda net, x: net.head(x.norm(dim=1).flatten(1)), {DROPPED}),
    "rounding": (lambda net, x: net.head(x.flatten(1)[:, :16].round()), {DROPPED, FLAT}),
    "nothing": (lambda net, x: net.head(net.a(x[:, :2]).mean(1).flatten(1) + x[:, 2:].mean(1).flatten(1)), set()),
}


@pytest.mark.parametrize("name", DROPS)
def test_what_is_thrown_away_has_a_line(name):
    run, said = DROPS[name]
    report = rank.analyse(Net(run, head=nn.Linear(16, 3), a=conv(2, 4)), (4, 4, 4))
    assert {reason for _, reason in lines(report)} & {DROPPED, FLAT} == said


def test_a_recurrent_layer():
    assert lines(rank.analyse(Recurrent(), (1, 3, 4))) == {("cell", WEIGHTS), ("", DROPPED)}


def test_frozen_throughout_counts_as_trained():
    model = nn.Sequential(conv(), nn.Flatten(), head())
    assert rank.analyse(model.requires_grad_(False), SHAPE) == rank.analyse(model.requires_grad_(True), SHAPE)


# --- poolings ---


@pytest.mark.parametrize(
    ("pool", "x", "z"),
    [
        (nn.MaxPool2d(2, return_indices=True), 64, 16),
        (nn.MaxPool2d(3, 1, 1), 64, 64),
        (nn.AvgPool2d(3, 1, 1), 64, 64),
        (nn.Sequential(nn.ZeroPad2d(1), nn.AvgPool2d(2)), 64, 36),
        (nn.AdaptiveAvgPool2d(1), 64, 4),
        (nn.AdaptiveAvgPool2d(4), None, None),
        (nn.AdaptiveAvgPool2d(6), 64, 144),
        (nn.Upsample(scale_factor=2), 64, 256),
        (Net(lambda net, x: functional.interpolate(x, size=(2, 2), mode="bilinear")), 64, 16),
        (Net(lambda net, x: x.flatten(2).mean(2)), 64, 4),
        (Net(lambda net, x: x.amax((2, 3))), 64, 4),
        (Net(lambda net, x: x.max(2)), 64, 16),
    ],
    ids=str,
)
def test_poolings(pool, x, z):
    report = rank.analyse(Net(lambda net, x: net.pool(net.a(x)), a=conv(), pool=pool), SHAPE)
    found = [(row.x, row.z, row.nullity) for row in report.layers if not row.weights]
    assert found == ([] if x is None else [(x, z, max(x - z, 0))])
    assert not report.not_counted


# --- sums and concatenations ---


def blocks(report):
    return [(block.kind, block.layers, block.x, block.f, block.with_skip) for block in report.blocks]


def exposed(report):
    return [row.name for row in report.exposed]


def plus_in_place(net, x):
    y = net.a(x)
    y += x
    return y


@pytest.mark.parametrize("run", [lambda net, x: x + net.a(x), lambda net, x: x - net.a(x), plus_in_place])
def test_a_skip_over_one_layer_changes_nothing(run):
    report = rank.analyse(Net(run, a=conv()), SHAPE)
    (block,) = report.blocks
    assert block.layers == ("a",)
    assert block.with_skip == block.without_skip == report.layers[0].ra == report.index  # appendix D
    assert not report.exposed


@pytest.mark.parametrize("count", [2, 3])
def test_a_skip_over_more_layers(count):
    narrow = [conv(4, 1), *[conv(1, 1)] * (count - 2), conv(1, 4)]
    model = Net(lambda net, x: torch.relu_(net.body(x).add_(x)), body=nn.Sequential(*narrow))
    report = rank.analyse(model, SHAPE)
    assert blocks(report) == [("sum", tuple(f"body.{n}" for n in range(count)), 64, 64, -36)]
    assert report.blocks[0].without_skip == report.layers[0].ra == 64 - 36 - 16
    assert report.index == -36


def test_a_shortcut_with_a_layer():
    model = Net(
        lambda net, x: torch.relu(net.b(torch.relu(net.a(x))) + net.s(x)),
        a=conv(4, 6, stride=2),
        b=conv(6, 6),
        s=conv(4, 6, 1, stride=2, padding=0),
    )
    report = rank.analyse(model, SHAPE)
    assert blocks(report) == [("sum", ("a", "b", "s"), 64, 24, 64 - 324 - 24 - 24)]
    assert (report.blocks[0].weights, report.blocks[0].shortcut) == (324, 24)
    found = rows(report)
    assert found["a"].beside == ("s",) and found["s"].beside == ("a",) and found["b"].beside == ()


def test_a_block_inside_a_block():
    inner = Net(lambda net, x: x + net.b(net.a(x)), a=conv(4, 1), b=conv(1, 4))
    outer = Net(
        lambda net, x: net.last(x + net.c(net.inner(net.d(x)))), c=conv(4, 4, 1, padding=0), d=conv(), inner=inner
    )
    outer.last = conv()
    report = rank.analyse(outer, SHAPE)
    assert [block.layers for block in report.blocks] == [("inner.a", "inner.b"), ("d", "inner.a", "inner.b", "c")]
    assert exposed(report) == ["last"]
    assert report.blocks[1].with_skip == report.index == -16  # the inner one does not decide


TOGETHER = "the layers before it count their outputs, of which only the sum is known"
ONE_BY_ONE = "one of its branches may make up for what another one loses, but they count one by one"
# no skip around the layers a and b, or c
NO_SKIPS = {
    "another branch of two": (lambda net, x: net.b(net.a(x)) + net.d(net.c(x)), TOGETHER),
    "a part of the input": (lambda net, x: net.b(net.a(x)) + functional.pad(x[:, :2], (0,) * 4 + (1, 1)), TOGETHER),
    "a pooled input": (lambda net, x: net.b(net.a(x)) + functional.avg_pool2d(x, 3, 1, 1), TOGETHER),
    "half of the input": (lambda net, x: torch.cat([x[:, :2], net.b(net.a(x))], 1), None),
    "the other half": (lambda net, x: torch.cat([x[:, :2], net.e(x[:, 2:])], 1), None),
    "halves in one call": (lambda net, x: (lambda p, q: torch.cat([p, net.e(q)], 1))(*x.chunk(2, 1)), None),
    "another branch": (lambda net, x: torch.cat([net.b(net.a(x)), net.c(x)], 1), ONE_BY_ONE),
}


@pytest.mark.parametrize("name", NO_SKIPS)
def test_what_is_no_skip(name):
    run, line = NO_SKIPS[name]
    report = rank.analyse(Net(run, a=conv(), b=conv(), c=conv(), d=conv(), e=conv(2, 2)), SHAPE)
    assert not report.blocks
    assert {reason for _, reason in lines(report)} == {UNSEEN, *([line] if line else [])}


def test_a_skip_carries_all_that_its_layers_see():
    def run(net, x):
        y = net.a(x)
        return y + net.b(torch.cat([y, x], 1))  # b sees x too, but the sum carries y alone

    report = rank.analyse(Net(run, a=conv(), b=conv(8, 4)), SHAPE)
    assert blocks(report) == [("concatenation", ("a",), 64, 128, 64 - 144 - 128)]
    assert exposed(report) == ["b"] and {reason for _, reason in lines(report)} == {TOGETHER}


def dense(net, x):
    for layer in net.layers:
        x = torch.cat([x, layer(torch.relu(x))], 1)
    return net.last(x)


def test_dense_connections():
    model = Net(dense, layers=nn.ModuleList([conv(4, 1), conv(5, 1), conv(6, 1)]), last=conv(7, 2))
    report = rank.analyse(model, SHAPE)
    assert [block.layers for block in report.blocks] == [(f"layers.{n}",) for n in range(3)]
    assert all(rows(report)[f"layers.{n}"].nullity for n in range(3))
    assert {block.kind for block in report.blocks} == {"concatenation"}
    assert all(block.with_skip < 0 for block in report.blocks)  # its input is a part of what it gives
    assert exposed(report) == ["last"] and report.index == rows(report)["last"].ra


def test_branches_with_one_input_count_together():
    model = Net(
        lambda net, x: torch.cat([net.a(x), net.b(x)], 1), a=conv(4, 1, 1, padding=0), b=conv(4, 2, 1, padding=0)
    )
    report = rank.analyse(model, SHAPE)
    found = rows(report)
    assert found["a"].beside == ("b",) and found["b"].beside == ("a",)
    assert (found["a"].ra, found["b"].ra) == (64 - 4 - 16, 64 - 8 - 32)
    assert exposed(report) == ["b"]  # it loses less
    assert report.index == 64 - 12 - 48
    assert {line for _, line in lines(report)} == {ONE_BY_ONE}


def test_virtual_constraints_come_from_the_layers_before():
    model = Net(
        lambda net, x: torch.cat([net.b(net.a(x)), net.d(net.c(x))], 1),
        a=conv(4, 8),
        b=conv(8, 2),
        c=conv(4, 2),
        d=conv(2, 2),
    )
    found = rows(rank.analyse(model, SHAPE))
    assert {name: row.virtual for name, row in found.items()} == {"a": 0, "b": 64, "c": 0, "d": 0}


# --- networks as they are ---


def build(name):
    """On shapes alone where that works."""
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    try:
        with torch.device("meta"):
            return torchvision.models.get_model(name, weights=None, **options)
    except (RuntimeError, NotImplementedError):
        return torchvision.models.get_model(name, weights=None, **options)


# counted layers, skips
NETWORKS = {
    "alexnet": (8, 0),
    "vgg11": (11, 0),
    "resnet50": (54, 16),
    "densenet121": (121, 58),
    "googlenet": (58, 0),
    "inception_v3": (95, 0),
    "mobilenet_v3_small": (54, 6),
    "shufflenet_v2_x0_5": (57, 0),
    "squeezenet1_1": (26, 0),
    "mnasnet0_5": (53, 10),
    "efficientnet_b0": (82, 9),
    "convnext_tiny": (59, 18),
    "regnet_y_400mf": (86, 16),
    "swin_t": (53, 12),
    "swin_v2_t": (53, 12),
    "maxvit_t": (151, 29),
    "vit_b_32": (26, 12),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_weight_of_a_network_has_a_row_or_a_line(name):
    model = build(name)
    report = rank.analyse(model, (3, 299, 299) if name == "inception_v3" else (3, 224, 224))
    assert (len(rows(report)), len(report.blocks)) == NETWORKS[name]
    assert every_weight_is_named(model, report)
    assert all(0 <= row.nullity <= row.x and row.ra >= -row.weights - row.z for row in report.layers)
    assert all(row.nullity >= row.ra for row in report.layers)  # equations cannot give more than their number
    assert set(exposed(report)) <= set(rows(report)) and len(report.table()) == len(report.layers)


def test_a_deep_network():
    report = rank.analyse(build("resnet152"), (3, 224, 224))
    assert len(report.blocks) == 50 and not report.not_counted
