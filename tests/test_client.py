"""What a device sends: the gradient is autograd's, and whatever does not fit is named."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradinv import client, victims
from gradinv.client import Update

# The tests run under a type checker, which would refuse a wrong tensor first; readers run without it.
plain_gradient = inspect.unwrap(client.gradient)
PIXELS, LABELS = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 3])


def net(**options):
    return victims.fc((12, 7, 4), **options)


def test_gradient_is_the_mean_over_the_batch():
    model = net().double()
    pixels = torch.rand(3, 12, dtype=torch.float64)
    labels = torch.tensor([0, 2, 3])
    update = client.gradient(model, pixels, labels)
    functional.cross_entropy(model(pixels), labels).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(update.gradient[name], parameter.grad, rtol=1e-12, atol=1e-14)
    alone = [client.gradient(model, pixels[[i]], labels[[i]]).gradient for i in range(3)]
    for name, value in update.gradient.items():
        torch.testing.assert_close(value, sum(single[name] for single in alone) / 3, rtol=1e-12, atol=1e-14)


def test_gradient_agrees_with_finite_differences():
    model = net(activation="sigmoid").double()
    pixels, step = PIXELS.double(), 1e-6
    gradient = client.gradient(model, pixels, LABELS).gradient["1.weight"]
    direction = torch.randn_like(gradient)

    def loss_at(distance):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            moved[1].weight += distance * direction
            return functional.cross_entropy(moved(pixels), LABELS)

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-7, atol=1e-9)


def test_logistic_loss_is_softplus_of_the_margin():
    model = victims.fc((12, 5, 1), bias=False).double()
    pixels, labels = PIXELS.double(), torch.tensor([-1, 1])
    update = client.gradient(model, pixels, labels, loss="logistic")
    torch.log1p(torch.exp(-labels * model(pixels)[:, 0])).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(update.gradient[name], parameter.grad, rtol=1e-10, atol=1e-14)


def test_logistic_loss_stays_finite_for_a_large_logit():
    model = victims.fc((12, 1), bias=False)
    with torch.no_grad():
        model[1].weight.fill_(1e4)
    update = client.gradient(model, PIXELS[:1], torch.tensor([-1]), loss="logistic")
    torch.testing.assert_close(update.gradient["1.weight"], PIXELS[:1])  # the slope there is 1


def test_update_holds_what_was_sent_and_no_pictures():
    update = client.gradient(net(), PIXELS, LABELS)
    assert update.input_shape == (12,) and update.batch_size == 2
    assert torch.equal(update.labels, LABELS) and update.labels is not LABELS
    assert set(update.__dataclass_fields__) == {
        *("model", "gradient", "input_shape", "batch_size", "labels", "loss", "mode", "scale", "pruned", "local")
    }
    assert client.gradient(net(), PIXELS, LABELS, reveal_labels=False).labels is None


def test_update_holds_the_model_itself():
    model = net()
    assert client.gradient(model, PIXELS, LABELS).model is model


def test_batch_norm_uses_running_statistics_or_the_batch():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4)).double()
    pixels, labels = torch.rand(2, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1])
    for mode in ("eval", "train"):
        sent = client.gradient(model, pixels, labels, mode=mode).gradient["0.weight"]
        reference = copy.deepcopy(model).train(mode == "train")
        functional.cross_entropy(reference(pixels), labels).backward()
        torch.testing.assert_close(sent, reference[0].weight.grad)
    assert model[1].num_batches_tracked == 0


def test_a_frozen_parameter_is_not_sent():
    model = net()
    model[1].weight.requires_grad_(False)
    update = client.gradient(model, PIXELS, LABELS)
    assert list(update.gradient) == ["1.bias", "3.weight", "3.bias"]
    assert not model[1].weight.requires_grad


def test_shared_weights_are_sent_once_with_the_sum():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(12, 12)
            self.second = self.first
            self.head = nn.Linear(12, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    model = Shared().double()
    update = client.gradient(model, PIXELS.double(), LABELS)
    assert list(update.gradient) == ["first.weight", "first.bias", "head.weight", "head.bias"]
    functional.cross_entropy(model(PIXELS.double()), LABELS).backward()
    torch.testing.assert_close(update.gradient["first.weight"], model.first.weight.grad)


def test_a_parameter_that_is_not_used_has_a_zero_gradient():
    model = nn.Sequential(nn.Linear(12, 4))
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    assert torch.equal(client.gradient(model, PIXELS, LABELS).gradient["spare"], torch.zeros(3))


def test_grad_mode_does_not_matter():
    model = net()
    expected = client.gradient(model, PIXELS, LABELS).gradient
    with torch.no_grad():
        assert all(
            torch.equal(client.gradient(model, PIXELS, LABELS).gradient[name], expected[name]) for name in expected
        )


def test_batch_norm_over_one_value_is_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))
    pixels, labels = torch.rand(1, 3, 8, 8), torch.tensor([1])
    with pytest.raises(ValueError, match="mode='train' needs more than one value per channel for batch norm"):
        client.gradient(model, pixels, labels, mode="train")
    client.gradient(model, pixels, labels)
    client.gradient(model, torch.rand(2, 3, 8, 8), torch.tensor([1, 0]), mode="train")


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


BAD = {
    "empty batch": ((PIXELS[:0], LABELS[:0]), {}, "pixels is an empty batch"),
    "no batch axis": ((PIXELS[0], LABELS[:1]), {}, r"pixels must have shape .* got \(12,\).*pixels\[None\]"),
    "one picture without its axis": ((torch.rand(1, 3, 4), LABELS[:1]), {}, r"got \(1, 3, 4\); a single picture"),
    "wrong width": ((torch.rand(2, 13), LABELS), {}, r"pixels of shape \(2, 13\) do not fit the model"),
    "numpy pixels": ((PIXELS.numpy(), LABELS), {}, "pixels must be a tensor, got ndarray"),
    "double pixels": (
        (PIXELS.double(), LABELS),
        {},
        "pixels must be torch.float32 on cpu like the model, got torch.float64",
    ),
    "bytes": ((torch.ones(2, 12, dtype=torch.uint8), LABELS), {}, "pixels must be torch.float32.*got torch.uint8"),
    "pixels elsewhere": ((PIXELS.to("meta"), LABELS), {}, "pixels must be torch.float32 on cpu .*on meta"),
    "nan": ((PIXELS * float("nan"), LABELS), {}, r"pixels must lie in \[0, 1\], got nan"),
    "one nan": ((PIXELS.index_fill(1, torch.tensor([3]), float("nan")), LABELS), {}, r"pixels must lie in \[0, 1\]"),
    "normalised": ((PIXELS - 0.5, LABELS), {}, "a victim that wants normalised input normalises inside itself"),
    "0 to 255": ((PIXELS * 255, LABELS), {}, r"pixels must lie in \[0, 1\], got .* to 2.."),
    "too few labels": ((PIXELS, LABELS[:1]), {}, r"labels must hold one label a picture \(2\), got 1"),
    "int32 labels": ((PIXELS, LABELS.int()), {}, "labels must be an int64 tensor.*got torch.int32"),
    "float labels": ((PIXELS, LABELS.float()), {}, "labels must be an int64 tensor.*got torch.float32"),
    "one-hot labels": ((PIXELS, torch.eye(4)[:2].long()), {}, r"labels must be an int64 tensor .*shape \(2, 4\)"),
    "list labels": ((PIXELS, [1, 3]), {}, "labels must be an int64 tensor.*got list"),
    "scalar label": ((PIXELS[:1], torch.tensor(1)), {}, r"labels must be an int64 tensor.*shape \(\)"),
    "labels elsewhere": ((PIXELS, LABELS.to("meta")), {}, "labels must be on cpu like the rest, got meta"),
    "class too large": ((PIXELS, torch.tensor([1, 4])), {}, "labels must lie in 0 to 3 for this model, got 4"),
    "negative class": ((PIXELS, torch.tensor([1, -1])), {}, "labels must be class indices from 0 on, got -1"),
    "the ignored class": ((PIXELS, torch.tensor([1, -100])), {}, "labels must be class indices from 0 on, got -100"),
    "logistic labels": ((PIXELS, LABELS), {"loss": "logistic"}, r"labels must be -1 or \+1 .*got \[1, 3\]"),
    "logistic outputs": ((PIXELS, LABELS * 0 + 1), {"loss": "logistic"}, r"a model with one output, got \(4,\)"),
    "loss": ((PIXELS, LABELS), {"loss": "mse"}, "loss must be one of cross_entropy, logistic, got 'mse'"),
    "mode": ((PIXELS, LABELS), {"mode": "test"}, "mode must be one of eval, train, got 'test'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(case):
    arguments, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        plain_gradient(net(), *arguments, **options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Flatten(), "model must have a parameter with requires_grad=True, got none"),
        (net().requires_grad_(False), "model must have a parameter with requires_grad=True, got none"),
        (Pair(12, 4), r"model must give one row of outputs a picture, shape \(2, classes\), got tuple"),
        (nn.Sequential(nn.Linear(12, 4), nn.Unflatten(1, (2, 2))), r"one row of outputs a picture.*got \(2, 2, 2\)"),
    ],
    ids=["no parameters", "all frozen", "two outputs", "outputs of two axes"],
)
def test_a_model_that_does_not_fit_is_named(model, message):
    with pytest.raises(ValueError, match=message):
        plain_gradient(model, PIXELS, LABELS)


def test_a_picture_too_small_for_the_model_is_named():
    from torchvision.models import VisionTransformer, alexnet

    transformer = VisionTransformer(64, 32, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8, num_classes=4)
    for model in (alexnet(num_classes=4), transformer):
        with pytest.raises(ValueError, match=r"pixels of shape \(1, 3, 32, 32\) do not fit the model"):
            client.gradient(model, torch.rand(1, 3, 32, 32), torch.tensor([0]))


def test_running_out_of_memory_is_not_called_a_shape_error():
    class Hungry(nn.Linear):
        def forward(self, x):
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        client.gradient(Hungry(12, 4), PIXELS, LABELS)


# --- Update ---


def update(**changes):
    model = net()
    gradient = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    gradient.update(changes.pop("entries", {}))
    return Update(**{"model": model, "gradient": gradient, "input_shape": (12,), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entries": {"9.weight": torch.zeros(3)}}, "gradient has '9.weight', which is no parameter of the model"),
        ({"entries": {"3.bias": torch.zeros(5)}}, r"gradient\['3.bias'\] must have shape \(4,\), got \(5,\)"),
        ({"entries": {"3.bias": torch.zeros(4).double()}}, r"gradient\['3.bias'\] must be torch.float32 .*float64"),
        ({"entries": {"3.bias": torch.zeros(4).half()}}, r"gradient\['3.bias'\] must be torch.float32 .*float16"),
        ({"entries": {"3.bias": torch.zeros(4).numpy()}}, r"gradient\['3.bias'\] must be a tensor, got ndarray"),
        ({"gradient": {}}, "gradient must not be empty"),
        (
            {"input_shape": (32, 32)},
            r"input_shape must be \(channels, height, width\) or \(features,\), got \(32, 32\)",
        ),
        ({"input_shape": ()}, "input_shape must be"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"labels": torch.tensor([1, 2])}, r"labels must hold one label a picture \(1\), got 2"),
        ({"labels": torch.tensor([-1])}, "labels must be class indices from 0 on, got -1"),
        ({"labels": torch.tensor([2]), "loss": "logistic"}, r"labels must be -1 or \+1"),
        ({"labels": torch.tensor([1]).to("meta")}, "labels must be on cpu like the rest, got meta"),
        ({"loss": "hinge"}, "loss must be one of"),
        ({"mode": "both"}, "mode must be one of"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_update_names_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        update(**changes)


def test_update_cannot_be_changed():
    with pytest.raises(AttributeError):
        update().mode = "train"
