"""Proposition 3.1: the walk back through fully connected layers, against the pictures that it must find."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradinv import attacks, client, metrics, victims
from gradinv.client import Update

ROWS = ("best", "least_squares", "mean")


def update_of(model, pixels, labels=(1,), **options):
    model.to(pixels.dtype)
    return client.gradient(model.eval(), pixels, torch.tensor(labels), **options)


def error(result, pixels):
    return (result.pixels - pixels).abs().max().item()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("activation", ["leaky_relu", "sigmoid", "tanh", "identity"])
@pytest.mark.parametrize("bias", [True, "last", [True, False, False], [False, True, False]])
def test_one_biased_layer_is_enough(bias, activation, row):
    # the biased layer must come after the unbiased ones it walks through, which holds for all four
    pixels = torch.rand(1, 2, 5, 3, dtype=torch.float64)
    result = attacks.walk_back(update_of(victims.fc((30, 9, 8, 4), bias=bias, activation=activation), pixels), row=row)
    assert result.status == "recovered"
    assert error(result, pixels) < 1e-10
    assert result.pixels.shape == pixels.shape


def test_relu_network_in_single_precision():
    pixels = torch.rand(1, 3, 8, 8)
    result = attacks.walk_back(update_of(victims.fc((192, 40, 30, 10), bias="last"), pixels))
    assert result.status == "recovered" and error(result, pixels) < 1e-3


def test_flat_inputs():
    pixels = torch.rand(1, 12, dtype=torch.float64)
    result = attacks.walk_back(update_of(victims.fc((12, 4)), pixels))
    assert result.pixels.shape == (1, 12) and error(result, pixels) < 1e-12


def test_a_normalising_first_layer_is_undone():
    normalize = victims.Normalize(victims.CIFAR10_MEAN, victims.CIFAR10_STD)
    model = nn.Sequential(normalize, *victims.fc((192, 16, 10)))
    pixels = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    result = attacks.walk_back(update_of(model, pixels))
    assert result.status == "recovered" and error(result, pixels) < 1e-10


def test_no_bias_means_no_start():
    result = attacks.walk_back(update_of(victims.fc((12, 5, 4), bias=False), torch.rand(1, 12)))
    assert result.status == "not applicable" and result.pixels is None and "bias" in result.why


def test_a_layer_that_is_off_blocks():
    # the 10-8-5-3 stack whose middle layer is off for every input in (0, 1)
    model = victims.fc((10, 8, 5, 3)).double()
    with torch.no_grad():
        model[3].weight.fill_(-5.0)
        model[3].bias.fill_(-1.0)
    update = update_of(model, torch.rand(1, 10, dtype=torch.float64))
    result = attacks.walk_back(update)
    assert result.status == "blocked" and result.pixels is None
    assert [entry["live rows"] for entry in result.history] == [3, 0, 0]
    assert [entry["rows"] for entry in result.history] == [3, 5, 8]
    assert not update.gradient["1.weight"].any()  # the block is in the gradient, not in the attack


def test_history_counts_the_live_rows():
    model = victims.fc((12, 9, 7, 4)).double()
    pixels = torch.rand(1, 12, dtype=torch.float64)
    result = attacks.walk_back(update_of(model, pixels))
    hidden = torch.relu(model[1](pixels))
    live = [4, int((model[3](hidden) > 0).sum()), int((model[1](pixels) > 0).sum())]
    assert [entry["live rows"] for entry in result.history] == live
    assert [entry["layer"] for entry in result.history] == ["5", "3", "1"]


@pytest.mark.parametrize("label", range(4))
def test_the_label_is_read_off_the_last_bias(label):
    update = update_of(victims.fc((12, 6, 4)), torch.rand(1, 12), (label,), reveal_labels=False)
    assert attacks.walk_back(update).labels.tolist() == [label]


def test_a_saturated_network_still_leaks():
    model = victims.fc((12, 7, 4), activation="sigmoid").double()
    pixels = torch.rand(1, 12, dtype=torch.float64)
    with torch.no_grad():
        model[3].weight *= 40
        model[3].bias[2] += 50
    update = update_of(model, pixels, (2,))
    assert sum(value.norm() for value in update.gradient.values()) < 1e-6
    assert error(attacks.walk_back(update), pixels) < 1e-6


# --- batches ---


def test_a_batch_gives_the_mixture_that_algebra_says():
    model, pixels, labels = victims.fc((12, 4)), torch.rand(3, 12, dtype=torch.float64), (0, 1, 3)
    update = update_of(model, pixels, labels)
    slopes = (model(pixels).softmax(1) - functional.one_hot(torch.tensor(labels), 4)).detach()  # (picture, row)
    best = slopes.sum(0).abs().argmax()
    weights = slopes[:, best] / slopes[:, best].sum()
    result = attacks.walk_back(update)
    assert result.status == "ambiguous" and "3 pictures" in result.why
    torch.testing.assert_close(result.pixels, (weights @ pixels)[None], rtol=1e-9, atol=1e-12)
    assert result.labels.tolist() == list(labels)


def test_a_batch_of_one_picture_thrice_is_that_picture():
    pixels = torch.rand(1, 12, dtype=torch.float64)
    update = update_of(victims.fc((12, 6, 4)), pixels.repeat(3, 1), (2, 2, 2))
    torch.testing.assert_close(attacks.walk_back(update).pixels, pixels)


# --- networks that are more than a stack ---


def test_only_the_last_layer_gives_features():
    model = victims.fc((12, 9, 4)).double()
    pixels = torch.rand(1, 12, dtype=torch.float64)
    whole = update_of(model, pixels)
    part = Update(model, {name: whole.gradient[name] for name in ("3.weight", "3.bias")}, (12,), 1, whole.labels)
    result = attacks.walk_back(part)
    assert result.status == "not applicable" and "1.weight is not in this update" in result.why
    assert result.pixels is None
    torch.testing.assert_close(result.features, torch.relu(model[1](pixels)).detach(), rtol=1e-12, atol=1e-13)


def test_only_the_last_bias_is_refused():
    model = victims.fc((144, 4))
    whole = update_of(model, torch.rand(1, 3, 8, 6))
    part = Update(model, {"1.bias": whole.gradient["1.bias"]}, (3, 8, 6), 1, whole.labels)
    result = attacks.walk_back(part)
    assert result.status == "not applicable" and "4 numbers for 144 unknown pixels" in result.why


def test_a_convolution_before_the_stack_gives_features():
    model = victims.lenet().double()
    pixels = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    result = attacks.walk_back(update_of(model, pixels))
    assert result.status == "not applicable" and "features, not pixels" in result.why and result.pixels is None
    assert "5 (Sigmoid)" in result.why or "Conv2d" in result.why
    torch.testing.assert_close(result.features, model[:7](pixels).detach(), rtol=1e-9, atol=1e-11)


def test_features_of_a_batch_are_called_a_mixture():
    result = attacks.walk_back(update_of(victims.lenet(), torch.rand(2, 3, 32, 32), (1, 5)))
    assert result.status == "not applicable" and "a mixture over 2 pictures" in result.why


def test_pooled_features_of_a_resnet():
    model = victims.resnet(18, width=4).double()
    pixels = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    seen = []
    model.avgpool.register_forward_hook(lambda module, inputs, output: seen.append(output.flatten(1)))
    result = attacks.walk_back(update_of(model, pixels))
    assert result.status == "not applicable" and "avgpool" in result.why
    torch.testing.assert_close(result.features, seen[0].detach(), rtol=1e-9, atol=1e-11)


def test_dropout_lets_the_walk_through_only_in_eval_mode():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 4, bias=True))
    pixels = torch.rand(1, 12, dtype=torch.float64)
    result = attacks.walk_back(update_of(model, pixels))
    assert result.status == "recovered" and error(result, pixels) < 1e-10
    model[1] = nn.Linear(12, 9, bias=False)  # a biased first layer would be read whatever follows it
    result = attacks.walk_back(update_of(model, pixels, mode="train"))
    assert result.status == "not applicable" and "Dropout in train mode" in result.why


def test_dropout_on_the_picture_is_not_called_the_picture():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 4))
    result = attacks.walk_back(update_of(model, torch.rand(1, 12), mode="train"))
    assert result.status == "not applicable" and result.pixels is None


def test_an_activation_on_the_picture_is_not_called_the_picture():
    model = nn.Sequential(nn.Flatten(), nn.Sigmoid(), nn.Linear(12, 4))
    pixels = torch.rand(1, 12, dtype=torch.float64)
    result = attacks.walk_back(update_of(model, pixels))
    assert result.status == "not applicable" and "Sigmoid" in result.why and result.pixels is None
    torch.testing.assert_close(result.features, pixels.sigmoid())


class Model(nn.Module):
    """Layers a, b and head, joined as `join(self, x)` says."""

    def __init__(self, join, bias=False):
        super().__init__()
        self.a, self.b = nn.Linear(12, 12, bias=bias), nn.Linear(12, 12, bias=bias)
        self.head, self.act = nn.Linear(12, 4), nn.ReLU()
        self.join = join

    def forward(self, x):
        return self.join(self, x)


def add_in_place(m, x):
    first = m.act(m.a(x))
    second = m.b(first)
    second += first
    return m.head(second)


# Each of these feeds `head`, or a layer below it, with something that is not the layer before it.
DETOURS = {
    "skip": lambda m, x: m.head(m.act(m.b(m.act(m.a(x))) + x)),
    "skip in place": add_in_place,
    "skip past the head's input": lambda m, x: m.head(m.b(m.act(m.a(x)))) + m.a(x)[:, :4],
    "functional activation": lambda m, x: m.head(functional.relu(m.b(functional.relu(m.a(x))))),
    "functional activation in place": lambda m, x: m.head(functional.relu_(m.b(functional.relu_(m.a(x))))),
    "scaled picture": lambda m, x: m.head(m.act(m.b(m.act(m.a(2 * x))))),
    "reversed features": lambda m, x: m.head(m.act(m.b(m.act(m.a(x)).flip(1)))),
    "the same layer twice": lambda m, x: m.head(m.act(m.a(m.act(m.a(x))))),
    "two branches": lambda m, x: m.head(m.act(m.a(x)) * m.act(m.b(x))),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", DETOURS)
def test_a_wrong_picture_is_never_called_recovered(name, bias):
    pixels = torch.rand(1, 12, dtype=torch.float64)
    result = attacks.walk_back(update_of(Model(DETOURS[name], bias), pixels))
    assert result.status in ("not applicable", "approximate") or error(result, pixels) < 1e-8
    if result.status == "not applicable":
        assert result.pixels is None


def test_tied_weights_are_not_walked_through():
    model = Model(lambda m, x: m.head(m.act(m.b(m.act(m.a(x))))), bias=True)
    model.b.weight = model.a.weight
    result = attacks.walk_back(update_of(model, torch.rand(1, 12, dtype=torch.float64)))
    assert result.status == "not applicable" and "run more than once" in result.why


def test_a_layer_on_many_vectors_is_not_walked_through():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    result = attacks.walk_back(update_of(model, torch.rand(1, 2, 3, 5)))
    assert result.status == "not applicable" and "many vectors" in result.why and result.features.shape == (1, 24)


def test_a_functional_flatten_is_seen_through():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.Sequential(nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))

        def forward(self, x):
            return self.stack(x.view(len(x), -1))

    pixels = torch.rand(1, 1, 4, 3, dtype=torch.float64)
    result = attacks.walk_back(update_of(Flat(), pixels))
    assert result.status == "recovered" and error(result, pixels) < 1e-10


# --- noise ---


@pytest.mark.parametrize("row", ROWS)
def test_a_noisy_gradient_is_only_approximate(row):
    pixels = torch.rand(1, 2, 5, 3, dtype=torch.float64)
    update = update_of(victims.fc((30, 9, 4), activation="sigmoid"), pixels)
    noisy = {name: value + 1e-4 * value.norm() * torch.randn_like(value) for name, value in update.gradient.items()}
    result = attacks.walk_back(Update(update.model, noisy, (2, 5, 3), 1, update.labels), row=row)
    assert result.status == "approximate" and "rank one" in result.why
    assert result.loss > 0 and metrics.psnr(result.pixels, pixels).isfinite().all()


def test_least_squares_averages_noise_out():
    pixels = torch.rand(1, 30, dtype=torch.float64)
    update = update_of(victims.fc((30, 400), activation="identity"), pixels)
    noise = 1e-4 * torch.randn_like(update.gradient["1.weight"])
    noisy = {**update.gradient, "1.weight": update.gradient["1.weight"] + noise}
    errors = {
        row: metrics.mse(
            attacks.walk_back(Update(update.model, noisy, (30,), 1, update.labels), row=row).pixels, pixels
        ).item()
        for row in ROWS
    }
    slopes = update.gradient["1.bias"]
    # the noise's variance over the sum of squares of all rows, or of the best row alone
    assert errors["least_squares"] == pytest.approx(1e-8 / slopes.square().sum().item(), rel=1.0)
    assert errors["least_squares"] < errors["best"] < errors["mean"]


def test_an_unknown_row_is_named():
    update = update_of(victims.fc((12, 4)), torch.rand(1, 12))
    with pytest.raises(ValueError, match="row must be one of best, least_squares, mean, got 'worst'"):
        attacks.walk_back(update, row="worst")


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.Softmax(dim=1)])
def test_a_biased_first_layer_needs_no_slope(activation):
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), activation, nn.Linear(6, 4)).double()
    pixels = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    found = attacks.walk_back(client.gradient(net, pixels, torch.tensor([1])))
    assert found.status == "recovered"
    assert (found.pixels - pixels).abs().max() < 1e-9


def test_a_slope_that_cannot_be_read_stops_the_walk():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6, bias=False), nn.GELU(), nn.Linear(6, 4)).double()
    found = attacks.walk_back(client.gradient(net, torch.rand(1, 3, 2, 2, dtype=torch.float64), torch.tensor([1])))
    assert found.status == "not applicable"
    assert "the slope of GELU" in found.why


class Functional(nn.Module):
    """The way many people write a network: nothing but the linear layers is a module."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.b(functional.relu(self.a(x.view(len(x), -1))))


def test_a_biased_layer_on_the_picture_is_read_whatever_follows():
    net, pixels = Functional().double(), torch.rand(1, 3, 2, 2, dtype=torch.float64)
    update = client.gradient(net, pixels, torch.tensor([1]), reveal_labels=False)
    found = attacks.walk_back(update)
    assert found.status == "recovered"
    assert (found.pixels - pixels).abs().max() < 1e-9
    assert found.labels is None  # the last layer was not read, so the label was not either
    normed = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 4)).double()
    found = attacks.walk_back(client.gradient(normed, pixels, torch.tensor([1])))
    assert found.status == "recovered" and (found.pixels - pixels).abs().max() < 1e-9
