"""Every picture of a minibatch, exactly, from the gradient of one fully connected layer with a ReLU behind it.

The layer's gradient is G = sum_i d_i x_i^T, with x_i its input for picture i and d_i = dL/dz for that picture: a
matrix of rank b for b pictures. Its columns mix all pictures, but a ReLU leaves about half of the entries of each d_i
at zero, so the d_i are the sparsest vectors of the column space of G (`gradinv.attacks.sparse` looks for them). The
bias gradient is the sum of the d_i and gives their lengths, and then G gives the x_i. Dimitrov et al. 2024 (SPEAR)
found this; they look for the d_i by drawing rows.

The server knows the weights, so it can check each picture by itself: sent forward, with some label, it must give its
own d_i back. That check also reads the label, and how many times the picture was in the batch.
"""

import contextlib
import math
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradinv.attacks import sparse
from gradinv.attacks.reconstruction import Reconstruction, norm, one_gradient
from gradinv.attacks.walk_back import dense_block, to_pixels
from gradinv.client import Update, expect_one_of, expect_update, expect_whole, loss_of, outputs_of, working_copy
from gradinv.layers import Layer, read, slope

SEARCHES = ("l1", "sampling")
PATIENCE = 20
AGREES = 1e-11  # relative; between a direction that was found and the one that its picture gives, in an exact gradient
FAR = 0.2  # the same at most, however noisy: a unit near its kink that goes the other way changes this much
REPRODUCES = 1e-13  # relative; the whole gradient of what was found, in double precision
COUNTS = 1e-9  # how far a count may be from a whole number in an exact gradient
VISIBLE = 1e-6  # how far a pixel may be from [0, 1], and how much a direction must turn to tell pictures apart
POLISH = 2  # times that the directions are taken from the pictures, and the pictures from them
PASSES = (nn.ReLU, nn.Dropout, nn.Flatten, nn.Unflatten, nn.Identity)
MIXES = (_BatchNorm, _DropoutNd, nn.RReLU)  # in train mode


def unmix(update: Update, *, search: str = "l1", patience: int = PATIENCE, seed: int = 0) -> Reconstruction:
    """All different pictures of a batch, in closed form but for a search of sparse directions.

    Args:
        update: of a network with a fully connected layer with a bias and a ReLU behind it, and nothing but fully
            connected layers between that layer and the picture. Labels may be hidden.
        search: "l1" minimises sums of absolute values; "sampling" draws rows, as Dimitrov et al. 2024 do, which takes
            about 2^b draws.
        patience: rounds of candidates without a new direction or picture, after which it gives a layer up.
        seed: of the starts and of the draws.

    Returns:
        pixels: (k, c, h, w), in any order: the k pictures that are certain, each once. None where none is. Certain is
            one that, sent forward, gives its part of the gradient back, a whole number of times: to eleven digits in
            double precision, else to within 40 times the noise, a fifth at most. A picture that would be in the batch
            several times counts only where its direction turns with its pixels, for else it may be a mean.
        labels: (batch,) where the whole batch is certain, in the order of the pixels, a repeated picture's together.
        status: "recovered" where all together give the whole gradient; "approximate" where some are missing or the
            gradient is noisy; "weak gradient" for a zero gradient; "not applicable" for another network.
        loss: the relative distance between the whole gradient and that of what was found, 1 where pictures are missing.
        history: a dict a round with the layer, the directions found, how many there are, and the certain pictures.

    A picture that is in the batch twice cannot be told from two that the layer maps to one output, such as where it
    has fewer units than pixels. Pictures that are alike to about 1e-5 may count as one. A scale that the update
    declares wrongly is named in `why`, or makes nothing certain.

    Raises ValueError for a bad option, or labels that the network does not have.
    """
    expect_one_of("search", search, SEARCHES)
    expect_whole("patience", patience, 1)
    expect_whole("seed", seed, 0)
    expect_update(update)
    started = time.perf_counter()
    update, several = one_gradient(update)
    history: list[dict] = []

    def answer(status, why, pixels=None, labels=None, loss=1.0):
        pixels = pixels if pixels is None else pixels.to(next(iter(update.gradient.values())))
        return Reconstruction(pixels, labels, status, why, loss, history, seconds=time.perf_counter() - started)

    layers = read(update.model, update.input_shape)
    block, able, reason = unmixable(layers, update.gradient, update.mode)
    if update.mode == "train" and any(isinstance(module, MIXES) for module in update.model.modules()):
        reason = "batch norm or dropout in train mode ties the pictures together"
    if update.pruned:
        reason = "entries that the client left out are zeros of another kind"
    size = norm(update.gradient.values())
    if not 0 < size < float("inf"):
        why = "every entry of the gradient is zero" if size == 0 else "the gradient is not finite"
        return answer("weak gradient" if size == 0 else "not applicable", why)
    if several:
        return answer("not applicable", several)
    if reason:
        return answer("not applicable", f"the batch cannot be unmixed: {reason}")
    able = [i for i in able if update.gradient[f"{block[i][0].name}.weight"].any()]
    if not able:
        return answer("weak gradient", "every entry of the layers' gradients is zero")
    best = None
    for i in sorted(able, key=lambda i: -block[i][0].module.out_features):
        mixture = _Mixture(update, layers, block[: i + 1])
        for found in _search(mixture, search, patience, torch.Generator().manual_seed(seed)):
            history.append({"layer": block[i][0].name, **found.counted()})
            best = found if best is None or found.certain.sum() >= best.certain.sum() else best
        if best.whole:
            break
    if not best.rank:
        return answer(
            "approximate", f"noise hides the pictures, or there are more than the {update.batch_size} declared"
        )
    if not best.certain.any():
        missing = f"{best.directions} of {best.rank} directions were found"
        return answer("approximate", f"no picture is certain: {missing} in {len(history)} rounds")
    pixels = best.pixels[best.certain]
    if not best.whole:
        why = f"{_many(len(pixels))} certain, of a gradient of rank {best.rank}; the others are left out"
        return answer("approximate", why, pixels)
    return answer(*_whole(update, mixture, best))


@dataclass
class _Found:
    """Where a search stands.

    directions: how many were found, of rank; certain (rank,) which pictures give their direction back; pixels
    (rank, ...); times (rank, classes) how often each picture with each label is in the batch; factor how many times
    the declared gradient the sent one is.
    """

    directions: int
    rank: int
    certain: Tensor
    pixels: Tensor | None = None
    times: Tensor | None = None
    factor: float = 1.0

    @property
    def whole(self) -> bool:
        return self.rank > 0 and bool(self.certain.all())

    def counted(self) -> dict:
        return {"directions": self.directions, "of": self.rank, "certain": int(self.certain.sum())}


def _search(mixture: "_Mixture", search: str, patience: int, generator: torch.Generator) -> Iterator[_Found]:
    """Look for directions until every picture is certain, or nothing new comes; where the search stands each round."""
    space = mixture.space
    if not len(space.rows):
        yield _Found(0, 0, torch.zeros(0, dtype=torch.bool))
        return
    pool = spare = fixed = space.basis.new_zeros(0, space.rank)
    chosen = space.basis.new_ones(1, 1) if space.rank == 1 else pool
    idle, most = 0, (0, 0)
    while idle < patience:
        if space.rank > 1:
            if search == "l1":
                known = fixed if len(chosen) == space.rank else chosen
                if idle % 2:  # other minima lie open when half of what is known, or looks alike, is left behind
                    known = sparse.independent(space, known, spare)
                    kept = (torch.rand(len(known), generator=generator) < 0.5).to(known.device)
                    known = known[kept][: space.rank - 1]
                new, shared = sparse.new_directions(space, known, generator)
            else:
                new, shared = sparse.drawn_directions(space, generator)
            pool = sparse.independent(space, pool[:0], torch.cat([pool, new[mixture.fits(new)]]))
            chosen = sparse.independent(space, fixed, pool)
            spare = sparse.independent(space, spare[:0], torch.cat([spare, shared]))
        found = _Found(len(chosen), space.rank, space.basis.new_zeros(space.rank, dtype=torch.bool))
        if len(chosen) == space.rank:
            found = mixture.certify(chosen)
            fixed = chosen[found.certain]
        yield found
        if found.whole:
            return
        now = (len(chosen), int(found.certain.sum()))
        idle, most = (0, now) if now > most else (idle + 1, most)
    if len(chosen) < space.rank:
        yield mixture.certify(chosen, sparse.independent(space, chosen, spare))


def unmixable(
    layers: list[Layer], sent: Container[str], mode: str
) -> tuple[list[tuple[Layer, nn.Module | None]], list[int], str]:
    """Which layers a batch can be unmixed at, if the gradients of the parameters named in `sent` were sent.

    layers: as `gradinv.layers.read` gives them.

    Returns:
        the fully connected layers, each with the activation after it; the places among them of those with a bias and a
        ReLU behind, below which every weight was sent; and why there is none, or pixels cannot be reached from there.
    """
    block, before, _ = dense_block(layers, sent, mode)
    places = []
    for i, (layer, activation) in enumerate(block):
        behind = layers.index(layer) + 1
        if activation is None and behind < len(layers) and layers[behind].follows:
            activation = layers[behind].module
        names = [f"{layer.name}.bias", *(f"{lower.name}.weight" for lower, _ in block[: i + 1])]
        if isinstance(activation, nn.ReLU) and all(name in sent for name in names):
            places.append(i)
    missing = "" if places else "no fully connected layer of it has a bias and a ReLU behind it, both sent"
    return block, places, before or missing


class _Mixture:
    """The gradient of one fully connected layer, and what follows from the directions of its pictures.

    block: the layers up to that one, each with its activation.
    """

    def __init__(self, update: Update, layers: list[Layer], block: list[tuple[Layer, nn.Module | None]]):
        self.update, self.block, self.first = update, block, layers[0].module
        self.layer = block[-1][0]
        weight, bias = (update.gradient[f"{self.layer.name}.{part}"] for part in ("weight", "bias"))
        # a bias is the weight of an input that is always one, which tells a picture's length, and a black one from none
        self.sent = torch.cat([weight, bias[:, None]], 1)
        self.space = sparse.Space(self.sent, update.batch_size)
        self.sent = self.sent.double()
        noise = 40 * self.space.noise
        self.close = AGREES if self.space.exact else min(max(1e-5, noise), FAR)
        self.counts = COUNTS if self.space.exact else self.close
        self.model = working_copy(update.model, update.mode).double()
        outputs = outputs_of(self.model, weight.new_full((1, *update.input_shape), 0.5).double())
        every = torch.arange(outputs.shape[1]) if update.loss == "cross_entropy" else torch.tensor([-1, 1])
        if update.labels is not None and not torch.isin(update.labels.cpu(), every).all():
            raise ValueError(
                f"labels must lie in 0 to {len(every) - 1} for this model, got {update.labels.max().item()}"
            )
        self.classes = (every if update.labels is None else update.labels.unique()).to(weight.device)
        self.share = update.scale / update.batch_size
        self.above = self._above(layers)

    def _above(self, layers: list[Layer]) -> Tensor | None:
        """What dL/dz can be where the ReLU lets through, as a basis (units, k): what the next layer sends down.

        None where that is not known, such as where something else takes the ReLU's output too.
        """
        behind = layers[layers.index(self.layer) + 1 :]
        after = next((layer for layer in behind if not isinstance(layer.module, PASSES)), None)
        if after is None or not isinstance(after.module, nn.Linear) or len(after.input_shape) != 1:
            return None
        sent = self.update.gradient.get(f"{after.name}.weight")
        if sent is None or not sent.any():
            return None
        weight = after.module.weight.detach().double()
        probe = torch.linspace(0, 1, math.prod(self.update.input_shape)).to(weight).reshape(1, *self.update.input_shape)
        with self._seen(self.layer.name) as z, self._seen(after.name) as a, torch.enable_grad():
            outputs = outputs_of(self.model, probe)
            if len(z) > 1 or len(a) > 1:
                return None
            steps = torch.arange(1.0, outputs.numel() + 1).to(outputs).reshape(outputs.shape)
            at_z, at_a = torch.autograd.grad(outputs, [z[0], a[0]], steps, allow_unused=True, materialize_grads=True)
        if not torch.allclose(at_z, (z[0] > 0) * (at_a @ weight), rtol=1e-9, atol=1e-12 * float(at_z.abs().max())):
            return None
        return weight.T @ sparse.Space(sent, self.update.batch_size).basis

    @contextlib.contextmanager
    def _seen(self, name: str) -> Iterator[list[Tensor]]:
        """The outputs of a layer, as they come; those that go on are copies, which a ReLU may overwrite."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            seen.append(output)
            return output.clone()

        hook = self.model.get_submodule(name).register_forward_hook(keep)
        try:
            yield seen
        finally:
            hook.remove()

    def fits(self, directions: Tensor) -> Tensor:
        """Which directions (k, rank), where they are not zero, are what the next layer can send down.

        A difference of two pictures that it treats alike is as sparse as either, and fails here.
        """
        if self.above is None or not len(directions):
            return torch.ones(len(directions), dtype=torch.bool, device=directions.device)
        answers = []
        for some in (directions @ self.space.basis.T).split(64):
            on = (some.abs() > 10 * max(self.space.noise, 1e-9) * some.abs().max(1, keepdim=True).values)[:, :, None]
            d = some[:, :, None] * on
            basis = torch.linalg.qr(self.above * on)[0]
            rest = d - basis @ (basis.transpose(1, 2) @ d)
            answers.append(rest.flatten(1).norm(dim=1) < max(1e-9, self.close) * some.norm(dim=1))
        return torch.cat(answers)

    def certify(self, directions: Tensor, more: Tensor | None = None) -> _Found:
        """The pictures of some directions (k, rank); `more` of them, or anything, stand in for the missing ones."""
        rank, basis = self.space.rank, directions if more is None else more
        rest = torch.linalg.qr(basis.T, mode="complete")[0][:, len(basis) :].T
        d = self.space.basis @ torch.cat([basis, rest]).T
        d = (d * (d.pinverse() @ self.sent)[:, -1]).nan_to_num()
        pixels = self.pictures(d)
        times, apart = self.times(d, pixels)
        certain, factor = self.certain(pixels, times, apart)
        times = (times / factor).round()
        if certain.all():
            pixels = self.polished(d, pixels, factor * times)
        return _Found(len(directions), rank, certain, pixels, times, factor)

    def polished(self, d: Tensor, pixels: Tensor, times: Tensor) -> Tensor:
        """The pictures of the directions that the pictures give, which say more exactly what they should be.

        Unless they explain the gradient less well: with noise, a unit near its kink may go the other way in a picture.
        """
        better, sharper = pixels, d
        for _ in range(POLISH):
            sharper = self.directions(better, times)
            better = self.pictures(sharper)
        before, after = ((each @ (each.pinverse() @ self.sent) - self.sent).norm() for each in (d, sharper))
        return better if after < 1.1 * before + 1e-12 * self.sent.norm() else pixels

    def certain(self, pixels: Tensor, times: Tensor, apart: Tensor) -> tuple[Tensor, float]:
        """Which pictures give their direction back, a whole number of times, and the factor that this takes.

        A factor that the update does not declare is looked for where all pictures but for it are certain, and there are
        several: each is a check of the others.
        """
        slack, batch = max(VISIBLE, self.close), self.update.batch_size
        box = (pixels > -slack).flatten(1).all(1) & (pixels < 1 + slack).flatten(1).all(1)
        close = box & (apart < self.close)
        turns = torch.ones_like(close)
        if (times.sum(1) > 1.5).any():
            turns = self._turn(pixels, times) > slack

        def whole(factor: float) -> Tensor:
            often = times / factor
            near = ((often - often.round()).abs() < self.counts).all(1) & (often.sum(1) > 0.5)
            sure = close & near & (turns | (often.sum(1) < 1.5))
            return sure & (often[sure].sum() < batch + 0.5)

        found, total = whole(1.0), float(times.sum())
        if not found.all() and total > 0 and (len(times) > 1 or batch == 1) and whole(total / batch).all():
            return whole(total / batch), total / batch
        return found, 1.0

    def _turn(self, pixels: Tensor, times: Tensor) -> Tensor:
        """How far each picture's direction turns when its pixels change by a thousandth.

        Several pictures whose directions are alike, as with one logit or a network that is sure, look like their mean,
        several times. Where the direction turns with the picture, only copies look so.
        """
        draw = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0), dtype=pixels.dtype)
        here, there = (
            torch.einsum("ncm,nc->nm", self.given(each), times) for each in (pixels, pixels + 1e-3 * draw.to(pixels))
        )
        on = (here != 0) & (there != 0)  # a unit that goes on or off would hide how little the others turn
        here, there = functional.normalize(here * on, dim=1), functional.normalize(there * on, dim=1)
        return (there - here * (here * there).sum(1, keepdim=True)).norm(dim=1)

    def pictures(self, d: Tensor) -> Tensor:
        """The pictures (rank, ...) whose directions, dL/dz of the layer for each, are the columns of d."""
        x = d.pinverse() @ self.sent[:, :-1]
        for i in range(len(self.block) - 2, -1, -1):
            layer, activation = self.block[i]
            off = 10 * max(self.space.noise, 1e-9) * x.abs().max()  # what a ReLU cut off is zero but for rounding
            x = x.where(x.abs() > off, 0.0)
            above = self.block[i + 1][0].module.weight.detach().double()
            d = (d.T @ above * slope(activation, x)).T
            x = d.pinverse() @ self.update.gradient[f"{layer.name}.weight"].double()
        return to_pixels(x, self.first, self.update.input_shape)

    def given(self, pixels: Tensor) -> Tensor:
        """dL/dz (pictures, classes, units) of the layer for each picture by itself, with each label."""
        with self._seen(self.layer.name) as seen, torch.enable_grad():
            outputs = outputs_of(self.model, pixels)
            found = []
            for labels in self.classes.split(100):
                if self.update.loss == "logistic":
                    slopes = -labels[:, None, None] * torch.sigmoid(-labels[:, None, None] * outputs)
                else:
                    slopes = outputs.softmax(1) - functional.one_hot(labels, outputs.shape[1])[:, None]
                (sent,) = torch.autograd.grad(
                    outputs, seen[0], slopes.detach(), is_grads_batched=True, retain_graph=True
                )
                found.append(sent)
        return torch.cat(found).transpose(0, 1)

    def directions(self, pixels: Tensor, times: Tensor) -> Tensor:
        """dL/dz (units, pictures) of a batch in which each picture is so many times with each label."""
        return self.share * torch.einsum("ncm,nc->mn", self.given(pixels), times)

    def times(self, d: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """How many times each picture is in the batch with each label, and how far that is from its direction."""
        given, wanted = self.given(pixels), d.T / self.share
        alike = torch.einsum("ncm,nm->nc", given, wanted) / given.norm(dim=2).clamp(min=1e-300)
        label = alike.argmax(1, keepdim=True)
        one = given.gather(1, label[:, :, None].expand(-1, -1, given.shape[2]))[:, 0]
        often = (one * wanted).sum(1) / one.square().sum(1).clamp(min=1e-300)
        times = torch.zeros_like(alike).scatter_(1, label, often[:, None])
        apart = (often[:, None] * one - wanted).norm(dim=1) / wanted.norm(dim=1)
        if self.space.exact:  # noise hides whole numbers
            for i in (apart > self.close).nonzero()[:, 0].tolist():
                mixed = _mixed(given[i], wanted[i], self.update.batch_size)
                if mixed is not None:
                    times[i], apart[i] = mixed, (mixed @ given[i] - wanted[i]).norm() / wanted[i].norm()
        return times, apart.nan_to_num(float("inf"))

    def whole(self, pixels: Tensor, times: Tensor, factor: float) -> tuple[Tensor, float]:
        """The labels of a batch in which each picture is so many times, and its distance from what was sent."""
        which, label = times.nonzero(as_tuple=True)
        often = times[which, label]
        which, label = which.repeat_interleave(often), self.classes[label].repeat_interleave(often)
        with torch.enable_grad():
            loss = factor * len(which) * self.share * loss_of(self.model, pixels[which], label, self.update.loss)
            names = list(self.update.gradient)
            found = torch.autograd.grad(
                loss, [self.model.get_parameter(name) for name in names], allow_unused=True, materialize_grads=True
            )
        sent = [self.update.gradient[name].double() for name in names]
        return label, norm(a - b for a, b in zip(found, sent, strict=True)) / norm(sent)


def _whole(update: Update, mixture: _Mixture, found: _Found) -> tuple:
    """The answer where every picture is certain: labels, and whether they give the whole gradient."""
    batch, often = update.batch_size, found.times.long()
    labels, apart = mixture.whole(found.pixels, often, found.factor)
    if apart > FAR:
        why = f"{_many(len(found.pixels))} certain, but no labels and scale that would give the whole gradient back"
        return "approximate", why, found.pixels, None, apart
    why = _many(len(found.pixels))
    if len(found.pixels) < batch:
        why = f"{len(found.pixels)} different of a batch of {batch} pictures"
    if often.sum() < batch:
        why += f", of which {batch - int(often.sum())} left no trace in the gradient"
    if abs(found.factor - 1) > 1e-9:
        why += f", whose gradient is {found.factor * update.scale:.6g} times that of the mean loss,"
    if (
        update.labels is not None
        and often.sum() == batch
        and labels.sort().values.ne(update.labels.sort().values).any()
    ):
        return "approximate", f"{why} have other labels than the update declares", found.pixels, None, apart
    labels = labels if often.sum() == batch else None
    dtype = update.gradient[f"{mixture.layer.name}.weight"].dtype
    if apart < (REPRODUCES if dtype == torch.float64 else 100 * torch.finfo(dtype).eps):
        return "recovered", f"{why} give the whole gradient back", found.pixels, labels, apart
    return "approximate", f"{why} give the gradient back up to a relative {apart:.1e}", found.pixels, labels, apart


def _many(pictures: int) -> str:
    return f"{pictures} picture{'s' if pictures > 1 else ''}"


def _mixed(given: Tensor, wanted: Tensor, most: int) -> Tensor | None:
    """How often a picture is in the batch with each of several labels, from dL/dz for each (classes, units).

    With all classes those depend on each other, since their mean under the network's probabilities is zero. So whole
    numbers are looked for along that null vector.
    """
    if not wanted.isfinite().all() or not given.isfinite().all():
        return None
    left, sizes, right = torch.linalg.svd(given.T, full_matrices=False)
    live = sizes > 1e-9 * sizes[0]
    times = right[live].T @ ((left[:, live].T @ wanted) / sizes[live])
    null = right[-1] / right[-1].sum()
    for total in range(2, most + 1):
        tried = times if live.all() else times + (total - times.sum()) * null
        if (tried - tried.round()).abs().max() < 1e-3 and tried.round().min() >= 0:
            return tried.round()
    return None
