"""What the trace sees of a network that does more than call its layers one after the other."""

import copy

import pytest
import torch
from networks import Net, Recurrent
from torch import nn
from torch.nn import functional

from gradinv import rank
from gradinv.trace import trace


def functions(model, shape=(3, 6, 6)):
    return [call.function for call in trace(model, shape)]


def conv(inputs=3, outputs=4, **options):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


# --- what a value was made from ---


def test_layers_and_functions_with_the_modules_that_ran_them():
    model = nn.Sequential(conv(), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    found = [
        (call.name, call.kind, call.function, call.takes, call.weight, call.size) for call in trace(model, (3, 6, 6))
    ]
    assert found == [
        ("0", "Conv2d", "conv2d", (-1,), "0.weight", 144),
        ("1", "ReLU", "relu", (0,), None, 144),
        ("2", "Flatten", "flatten", (1,), None, 144),
        ("3", "Linear", "linear", (2,), "3.weight", 2),
    ]


def takers(model, name, shape=(3, 6, 6)):
    """What the layer of that name takes, as functions, back to the picture."""
    calls = trace(model, shape)
    number = next(n for n, call in enumerate(calls) if call.name == name and call.weight)
    seen, front = [], set(calls[number].takes)
    while front - {-1}:
        last = max(front)
        seen.append(calls[last].function)
        front = front - {last} | set(calls[last].takes)
    return seen


def into_a_part(net, x):
    out = x.new_zeros(1, 8, 6, 6)
    out[:, ::2] = net.a(x)
    out[:, 1::2] = x[:, :1]
    return net.last(out)


def through_a_view(net, x):
    y = net.a(x)
    y[:, :1].add_(x[:, :1])
    return net.last(y)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (into_a_part, ["__setitem__", "__getitem__", "__setitem__", "conv2d"]),
        (through_a_view, ["add_", "__getitem__", "__getitem__", "conv2d"]),
        (lambda net, x: net.last(net.a(x).relu_()), ["relu_", "conv2d"]),
        (lambda net, x: net.last(torch.zeros(1, 4, 6, 6).to(x)), None),
        (lambda net, x: net.last(torch.zeros_like(net.a(x))), None),
    ],
    ids=["into a part", "through a view", "in place", "like the picture", "as large as a value"],
)
def test_what_a_layer_takes(run, expected):
    model = Net(run, a=conv(), last=nn.Conv2d(8 if run is into_a_part else 4, 2, 1))
    if expected is None:
        assert "last.weight" not in [call.weight for call in trace(model, (3, 6, 6))]
    else:
        assert takers(model, "last") == expected


def test_parts_of_one_value_are_taken_one_by_one():
    gate = Net(lambda net, x: torch.mul(*net.a(x).chunk(2, 1)), a=conv())
    assert trace(gate, (3, 6, 6))[-1].takes == (1, 1)


def test_parameters_are_known_behind_what_is_computed_from_them():
    model = Net(lambda net, x: x.flatten(1) @ (2 * net.a.weight.t()), a=nn.Linear(12, 2))
    assert trace(model, (3, 2, 2))[-1].parameters == ("a.weight",)
    normed = trace(nn.utils.parametrizations.weight_norm(nn.Linear(12, 2)), (12,))[-1]
    assert normed.weight is None
    assert set(normed.parameters) == {"bias", *(f"parametrizations.weight.original{n}" for n in (0, 1))}


@pytest.mark.parametrize("order", [{"bias": 2, "weight": 1, "input": 0}, {"input": 0, "bias": 2, "weight": 1}], ids=str)
def test_named_arguments_in_any_order(order):
    def run(net, x):
        given = x, net.a.weight, net.a.bias
        return functional.conv2d(**{name: given[place] for name, place in order.items()}, padding=(1,))

    call = trace(Net(run, a=conv()), (3, 6, 6))[-1]
    assert (call.weight, call.weight_shape, call.options["padding"]) == ("a.weight", (4, 3, 3, 3), (1, 1))


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clamp(0, 1)


def test_functions_with_a_backward_of_their_own():
    assert functions(Net(lambda net, x: net.a(Clamp.apply(x)), a=conv())) == ["clamp", "conv2d"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_a_scripted_module_hides_is_named():
    scripted = torch.jit.script(nn.Sequential(conv(4, 4), nn.ReLU()))
    model = nn.Sequential(conv(), scripted, nn.Flatten(), nn.Linear(144, 2))
    assert functions(model) == ["conv2d"]
    hidden = [line.parameters for line in rank.analyse(model, (3, 6, 6)).not_counted]
    assert hidden == [("1.0.weight",), ("3.weight",)]


# --- any model runs, and nothing of it changes ---


def by_value(net, x):
    return net.a(x) if x.sum() > 0 else x


def counting(net, x):
    net.calls += 1
    net.seen.add_(1)
    return net.a(x * net.mask) if float(net.seen.sum()) else x


class Plain(Net):
    """With a tensor as a plain attribute, one that hangs on the graph, a counter and a buffer."""

    def __init__(self, run):
        super().__init__(run, a=conv())
        self.mask, self.scale, self.calls = torch.ones(3, 6, 6), self.a.weight * 2, 0
        self.register_buffer("seen", torch.zeros(1))


MODELS = {
    "batch norm": lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 2)),
    "looks at values": lambda: Net(by_value, a=conv()),
    "counts its calls": lambda: Plain(counting),
    "a tensor as attribute": lambda: Plain(lambda net, x: net.a(x * net.mask)),
    "makes a tensor": lambda: Net(lambda net, x: net.a(x + torch.zeros(6) + torch.randn(6)), a=conv()),
    "half precision": lambda: conv().half(),
    "frozen": lambda: conv().requires_grad_(False),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(conv()),
    "weight norm by hooks": lambda: torch.nn.utils.weight_norm(conv()),
    "a tuple": lambda: Net(lambda net, x: (net.a(x), {"b": [x]}), a=conv()),
    "shapes alone": lambda: conv().to("meta"),
    "a part that no one calls by its hooks": lambda: Net(lambda net, x: net.a.forward(x), a=conv()),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_left_as_it_was(name):
    model = MODELS[name]().train()
    before = copy.deepcopy(model.state_dict())
    values = [*model.parameters(), *model.buffers()]
    random = torch.get_rng_state()
    assert any("conv2d" in call.function for call in trace(model, (3, 6, 6)))
    assert all(module.training for module in model.modules())
    hooks = [hook for module in model.modules() for hook in (module._forward_hooks, module._forward_pre_hooks)]
    assert sum(map(len, hooks)) == (name == "weight norm by hooks")
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(before[key].is_meta or torch.equal(before[key], after[key]) for key in before)
    assert all(one is two for one, two in zip(values, [*model.parameters(), *model.buffers()], strict=True))
    assert all(value.grad is None for value in model.parameters())
    assert getattr(model, "calls", 0) == 0
    assert torch.equal(torch.get_rng_state(), random)


def test_under_inference_mode():
    with torch.inference_mode():
        assert functions(nn.Sequential(conv(), nn.ReLU())) == ["conv2d", "relu"]
        assert functions(Net(by_value, a=conv()))[-1] == "conv2d"


def test_recurrent_layers_are_one_call():
    call = trace(Recurrent(), (1, 3, 4))[1]
    assert call.function == "lstm" and "cell.weight_ih_l0" in call.parameters


def test_a_module_called_twice_and_a_tied_weight():
    twice = Net(lambda net, x: net.pool(net.a(net.pool(x))), a=conv(), pool=nn.MaxPool2d(2))
    assert [call.name for call in trace(twice, (3, 8, 8))] == ["pool", "a", "pool"]
    tied = Net(lambda net, x: net.b(net.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    tied.b.weight = tied.a.weight
    assert [call.weight for call in trace(tied, (4,))] == ["a.weight", "a.weight"]  # the name in the gradient


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (conv(), (4, 6, 6), r"input_shape \(4, 6, 6\) does not fit the model: .*expected input"),
        (Net(lambda net, x: {}["no"], a=conv()), (3, 6, 6), "does not fit the model: 'no'"),
    ],
    ids=["channels", "error of its own"],
)
def test_what_does_not_run(model, shape, message):
    with pytest.raises(ValueError, match=message):
        rank.analyse(model, shape)


def test_a_lazy_layer_has_to_be_told_its_size_first():
    with pytest.raises(ValueError, match="does not fit the model"):
        rank.analyse(nn.LazyConv2d(4, 3), (3, 6, 6))
