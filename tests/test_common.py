"""What every victim and every attack must pass. A new one is found by itself and gets these for free."""

import copy
import inspect

import pytest
import torch
from torch import nn

from gradinv import attacks, client, metrics, rank, victims
from gradinv.attacks import STATUSES, Reconstruction
from gradinv.client import Update

# Small versions of the victims whose default is large, and arguments of those that need some.
ARGUMENTS = {"fc": {"sizes": (3072, 6, 10)}, "convnet": {"width": 4}, "resnet": {"width": 4}}
SHAPES = {"fcn3": (1, 28, 28)}  # of the victims that do not take 3 x 32 x 32
LOGISTIC = {"cnn6", "cnn6d", "fcn3"}  # one logit
DTYPES = (torch.float32, torch.float64)


def public_functions(module):
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and inspect.unwrap(function).__module__.startswith(module.__name__)
    }


VICTIMS = sorted(set(public_functions(victims)) - {"trained"})  # `trained` loads a victim that is listed
ATTACKS = {
    name: function
    for name, function in public_functions(attacks).items()
    if Reconstruction.__name__ in str(inspect.signature(function).return_annotation)
}
CLOSED = {"walk_back", "r_gap", "unmix"}  # solved, not searched: no steps, and exact at any scale
ACTIVATIONS = {"unmix": "relu"}  # of those that need another one than a sigmoid
OPTIONS = {name: {} if name in CLOSED else {"steps": 4} for name in ATTACKS}


def victim(name):
    """A victim, a batch of two pictures for it, their labels and the loss."""
    model = public_functions(victims)[name](**ARGUMENTS.get(name, {}))
    pixels = torch.rand(2, *SHAPES.get(name, (3, 32, 32)))
    if name in LOGISTIC:
        return model, pixels, torch.tensor([1, -1]), "logistic"
    return model, pixels, torch.tensor([3, 7]), "cross_entropy"


def state_of(model):
    """All that an attack or a client could spoil."""
    return {
        "training": [module.training for module in model.modules()],
        "tensors": {name: value.clone() for name, value in model.state_dict(keep_vars=True).items()},
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "grad": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    }


def assert_same_state(before, after):
    for key in ("training", "requires_grad", "hooks"):
        assert before[key] == after[key], key
    for name, value in before["tensors"].items():
        assert torch.equal(value, after["tensors"][name]), name
    for old, new in zip(before["grad"], after["grad"], strict=True):
        assert (old is None) == (new is None)
        assert old is None or torch.equal(old, new)


def delicate():
    """A model with batch norm, dropout, a frozen parameter, `.grad` in place and mixed modes."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten()),
        *(nn.Linear(4 * 6 * 4, 8), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(8, 5)),
    )
    model.train()
    model[1].eval()
    model[0].bias.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    return model


def small_update(attack="", *, dtype=torch.float32, reveal_labels=True, batch=1, scale=1.0):
    """The update of a network that suits an attack, on 2 x 5 x 4 pictures."""
    model = victims.fc((40, 9, 5), activation=ACTIVATIONS.get(attack, "sigmoid")).to(dtype)
    pixels, labels = torch.rand(batch, 2, 5, 4, dtype=dtype), torch.arange(batch) % 5
    update = client.gradient(model, pixels, labels, reveal_labels=reveal_labels)
    return copy_with(update, gradient={name: value * scale for name, value in update.gradient.items()}), pixels


def copy_with(update, **changes):
    fields = {name: getattr(update, name) for name in update.__dataclass_fields__}
    return Update(**{**fields, **changes})


def run(name, update, **options):
    return ATTACKS[name](update, **{**OPTIONS[name], **options})


def test_the_lists_are_not_empty():
    assert {"fc", "lenet", "convnet", "resnet", "cnn6", "cnn6d", "fcn3"} <= set(VICTIMS)
    assert {"walk_back", "match_gradients", "inverting_gradients", "dlg", "r_gap", "h_gap", "unmix"} <= set(ATTACKS)
    assert not {"logits", "mu_roots", "total_variation"} & set(ATTACKS)


# --- victims ---


@pytest.mark.parametrize("name", VICTIMS)
def test_victim_is_ready_to_attack(name):
    model, pixels, *_ = victim(name)
    assert not any(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    outputs = model(pixels)
    assert outputs.ndim == 2 and len(outputs) == 2
    assert outputs.isfinite().all() and not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("name", VICTIMS)
def test_victim_sees_each_picture_alone(name):
    model, pixels, *_ = victim(name)
    model.double()
    together = model(pixels.double())
    torch.testing.assert_close(together[1:], model(pixels[1:].double()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", VICTIMS)
def test_victim_follows_the_seed(name):
    make, arguments = public_functions(victims)[name], ARGUMENTS.get(name, {})
    weights = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        weights.append(torch.cat([parameter.flatten() for parameter in make(**arguments).parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VICTIMS)
def test_victim_gives_a_gradient_and_stays_as_it_was(name, dtype):
    model, pixels, labels, loss = victim(name)
    model.to(dtype).train()
    before = state_of(model)
    update = client.gradient(model, pixels.to(dtype), labels, loss=loss)
    assert_same_state(before, state_of(model))
    assert list(update.gradient) == [parameter for parameter, _ in model.named_parameters()]
    assert all(value.dtype == dtype and value.isfinite().all() for value in update.gradient.values())
    assert all(not value.requires_grad for value in update.gradient.values())
    assert any(value.any() for value in update.gradient.values())


@pytest.mark.parametrize("name", VICTIMS)
def test_victim_gives_the_same_gradient_bit_for_bit(name):
    model, pixels, labels, loss = victim(name)
    first, second = (client.gradient(model, pixels, labels, loss=loss).gradient for _ in range(2))
    assert all(torch.equal(first[parameter], second[parameter]) for parameter in first)


@pytest.mark.parametrize("name", VICTIMS)
def test_victim_refuses_another_number_of_channels(name):
    model, pixels, labels, loss = victim(name)
    for channels in {1, pixels.shape[1] + 1} - {pixels.shape[1]}:
        wrong = torch.rand(2, channels, *pixels.shape[2:])
        with pytest.raises(ValueError, match="do not fit the model"):
            client.gradient(model, wrong, labels, loss=loss)
        with pytest.raises(ValueError, match="does not fit the model"):
            rank.analyse(model, tuple(wrong.shape[1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", VICTIMS)
def test_victim_runs_on_a_gpu(name):
    model, pixels, labels, loss = victim(name)
    update = client.gradient(model.cuda(), pixels.cuda(), labels.cuda(), loss=loss)
    assert all(value.is_cuda and value.isfinite().all() for value in update.gradient.values())


# --- attacks ---


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_leaves_model_and_update_as_they_were(name, mode):
    model = delicate()
    update = client.gradient(model, torch.rand(2, 1, 8, 6), torch.tensor([0, 4]), mode=mode)
    before, sent = state_of(model), copy.deepcopy(dict(update.gradient))
    run(name, update)
    assert_same_state(before, state_of(model))
    assert all(torch.equal(sent[parameter], update.gradient[parameter]) for parameter in sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_follows_the_models_dtype(name, dtype):
    update, pixels = small_update(name, dtype=dtype)
    result = run(name, update)
    assert result.pixels.dtype == dtype and result.pixels.shape == pixels.shape
    assert not result.pixels.requires_grad and result.pixels.isfinite().all()


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_answers_alike_bit_for_bit(name):
    update, _ = small_update(name)
    results = []
    for _ in range(2):
        torch.rand(3)  # the global generator may stand anywhere
        results.append(run(name, update))
    first, second = results
    assert torch.equal(first.pixels, second.pixels)
    assert first.loss == second.loss and list(first.history) == list(second.history)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_leaves_the_global_generator_alone(name):
    update, _ = small_update(name)
    before = torch.get_rng_state()
    run(name, update)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_says_how_it_went(name):
    update, _ = small_update(name)
    result = run(name, update)
    assert result.status in STATUSES and result.why
    assert result.status in repr(result) and result.why in repr(result)
    assert torch.equal(result.labels, update.labels)
    assert result.seconds > 0 and len(result.history) > 0


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_finds_the_label_when_it_is_hidden(name):
    update, _ = small_update(name, reveal_labels=False)
    assert update.labels is None
    options = {} if name in CLOSED else {"steps": 60, "lr": 0.1}
    if name in ("dlg", "h_gap"):
        options = {"steps": 30}
    assert run(name, update, **options).labels.tolist() == [0]


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_works_without_grad_mode(name):
    update, _ = small_update(name)
    with torch.no_grad():
        inside = run(name, update)
    assert torch.equal(inside.pixels, run(name, update).pixels)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_names_a_shape_that_does_not_fit(name):
    update, _ = small_update(name)
    with pytest.raises(ValueError, match=r"\(.*2, 5, 7\).* (do|does) not fit the model"):
        run(name, copy_with(update, input_shape=(2, 5, 7)))


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_on_a_zero_gradient(name):
    update, _ = small_update(name, scale=0.0)
    result = run(name, update)
    assert result.status == "weak gradient" and "zero" in result.why and result.pixels is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_on_a_gradient_that_is_not_finite(name, value):
    update, _ = small_update(name)
    update.gradient["1.weight"][0, 0] = value
    result = run(name, update)
    assert result.status == "not applicable" and "not finite" in result.why and result.pixels is None


@pytest.mark.parametrize("scale", [2.0**80, 2.0**-80])
@pytest.mark.parametrize("name", sorted(set(ATTACKS) - {"dlg", "h_gap"}))  # its Euclidean distance has a scale
def test_attack_on_a_huge_or_tiny_gradient(name, scale):
    normal, scaled = (small_update(name, scale=factor)[0] for factor in (1.0, 1.0))
    scaled = copy_with(normal, gradient={key: value * scale for key, value in normal.gradient.items()})
    options = {} if name in CLOSED else {"objective": "cosine"}
    expected, result = run(name, normal, **options), run(name, scaled, **options)
    torch.testing.assert_close(result.pixels, expected.pixels, rtol=1e-5, atol=1e-6)
    if name not in CLOSED:
        assert result.status == ("weak gradient" if scale < 1 else expected.status)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_on_one_channel_pictures_that_are_not_square(name):
    model = victims.fc((20 * 12, 6, 3), activation=ACTIVATIONS.get(name, "sigmoid"))
    pixels = torch.rand(1, 1, 20, 12)
    result = run(name, client.gradient(model, pixels, torch.tensor([2])))
    assert result.pixels.shape == pixels.shape
    assert not metrics.psnr(result.pixels, pixels).isnan().any()  # DLG can be exact here


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_on_a_part_of_the_gradient(name):
    update, _ = small_update(name)
    part = copy_with(update, gradient={"1.weight": update.gradient["1.weight"]})
    result = run(name, part)
    assert result.status == ("not applicable" if name in CLOSED else "approximate")


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_refuses_an_unknown_option(name):
    update, _ = small_update(name)
    with pytest.raises(TypeError, match="no_such_option"):
        run(name, update, no_such_option=1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_runs_on_a_gpu(name):
    update, pixels = small_update(name)
    model = copy.deepcopy(update.model).cuda()
    result = run(name, client.gradient(model, pixels.cuda(), update.labels.cuda()))
    assert result.pixels.is_cuda and result.status == run(name, update).status


def test_an_attack_asks_for_an_update():
    with pytest.raises(ValueError, match=r"update must be an Update .*, got dict"):
        client.expect_update({"weight": torch.zeros(2)})
