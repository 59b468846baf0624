"""What the server assumes about batch norm, one rung at a time: with the right assumption the truth has the sent
gradient, with a wrong one it does not, and no buffer of anyone changes."""

import copy

import pytest
import torch

from gradinv import attacks, client, victims

PIXELS = torch.rand(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 3, 3, 7])


def network():
    """A residual network in double precision whose running statistics are those of some pictures."""
    net = victims.resnet(20, width=2).double()
    return settled(net, torch.rand(16, 3, 8, 8, dtype=torch.float64))


def settled(net, pixels):
    """A copy with running statistics of its own."""
    net = copy.deepcopy(net).train()
    with torch.no_grad():
        for _ in range(20):
            net(pixels)
    return net.eval()


def mismatch(update):
    """The matching loss of the true pictures."""
    return attacks.match_gradients(update, init=PIXELS, steps=1, lr=1e-12).history[0]


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("buffers", ["the server's", "the client's, sent"])
def test_truth_matches_in_each_declared_mode(mode, buffers):
    net = network()
    model = net if buffers == "the server's" else settled(net, PIXELS)
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert mismatch(client.gradient(model, PIXELS, LABELS, mode=mode)) <= 1e-10
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_truth_does_not_match_under_a_wrong_assumption():
    net = network()
    own = settled(net, PIXELS)  # same weights, the client's statistics
    trained = client.gradient(net, PIXELS, LABELS, mode="train")
    kept = client.gradient(own, PIXELS, LABELS)
    assert mismatch(client.Update(net, trained.gradient, trained.input_shape, 4, LABELS)) > 1e-3  # taken for eval
    assert mismatch(client.Update(net, kept.gradient, kept.input_shape, 4, LABELS)) > 1e-3  # buffers not sent


def test_running_statistics_do_not_matter_in_train_mode():
    net = network()
    sent = client.gradient(settled(net, PIXELS), PIXELS, LABELS, mode="train")
    assert mismatch(client.Update(net, sent.gradient, sent.input_shape, 4, LABELS, mode="train")) <= 1e-10
