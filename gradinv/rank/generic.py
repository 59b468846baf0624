"""How many directions of a convolution's input are lost for almost all weights and sensitivities, by counting.

A convolution has C input channels, n filters, P places for its kernel and D entries in the kernel of a channel. With X
the (P, C D) matrix of what each entry meets at each place, its output is X w^T and its weights' gradient is k X, for
weights w (n, C D) and sensitivities k (n, P). `generic_nullity` bounds the rank of these equations from above:

1. *Gradient.* They are the same for each channel. The entry d gives at most min(n, P) equations for the pixels that it
   meets, one for each of them at most, so their rank is at most a flow from entries to pixels. With a stride,
   entries fall into classes that meet different pixels, and a class with few pixels is full early.
2. *Output.* A place gives at most min(n, C times the entries that do not lie on padding) equations for the pixels that
   it sees, and a pixel takes C at most: a flow from places to pixels. It is where the border loses equations.
3. *Shared.* k (X w^T) = (k X) w^T, for every pair of filters: where the gradient's equations hold, the output's obey
   min(n, P) min(n, C D) equations already.
4. Any class of entries may be given up: then its pixels count in full, and only the others meet 2 and 3.

One set of weights and sensitivities for which the rank is as large proves that the bound is what almost all have. The
bound was reached by all but a few in a thousand random layers, all of them small. So small layers are drawn and
measured instead.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import torch
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import connected_components, maximum_flow
from torch import nn
from torch.nn import functional

from gradinv.layers import pads_of
from gradinv.rank.numerical import null_space

# Up to this many unknowns in a group of channels, a layer is drawn at random and its rank measured
SMALL = 500


@dataclass(frozen=True)
class Convolution:
    """The geometry of a convolution; pads are those of `torch.nn.functional.pad`: left, right, top, bottom."""

    channels: int
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    mode: str = "constant"

    @staticmethod
    def of(conv: nn.Conv2d) -> "Convolution":
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        pads = pads_of(conv.padding, conv.kernel_size, conv.dilation)
        shape = conv.in_channels, conv.out_channels, conv.kernel_size
        return Convolution(*shape, conv.stride, pads, conv.dilation, conv.groups, mode)

    def places(self, size: tuple[int, int]) -> np.ndarray:
        """(places, kernel entries): the number of the pixel that each entry meets there, -1 for padding."""
        pixels = torch.arange(1.0, 1 + size[0] * size[1], dtype=torch.float64).view(1, 1, *size)
        padded = functional.pad(pixels, self.pads, self.mode)
        met = functional.unfold(padded, self.kernel, dilation=self.dilation, stride=self.stride)
        return met[0].T.round().long().numpy() - 1


@cache
def generic_nullity(conv: Convolution, size: tuple[int, int]) -> int:
    """The dimensions of the input of such a convolution that its gradient and its output leave open.

    size: height and width of the input. For almost all weights and sensitivities; the special ones of a network, such
    as those behind a global mean or a class token, may lose more.

    Raises ValueError where conv is a layer and not its geometry.
    """
    if not isinstance(conv, Convolution):
        raise ValueError(f"conv must be a rank.Convolution, got {type(conv).__name__}: use rank.Convolution.of(conv)")
    channels, filters = conv.channels // conv.groups, conv.filters // conv.groups
    met = conv.places(size)
    unknowns = channels * size[0] * size[1]
    if unknowns <= SMALL:
        rank = _drawn(channels, filters, met, size[0] * size[1])
    else:
        rank = rank_bound(channels, filters, met)
    return conv.groups * (unknowns - rank)


def rank_bound(channels: int, filters: int, met: np.ndarray) -> int:
    """The bound of this module on the rank, for one group; met as given by `Convolution.places`."""
    places = len(met)
    seen = met >= 0
    place, entry = np.nonzero(seen)
    pixel = met[seen]
    touched = len(np.unique(pixel))
    if filters >= places:  # k has a left inverse
        return channels * touched
    kind = _classes(entry, pixel, met.shape[1])
    gradient, left, entries = 0, {}, {}
    for name in np.unique(kind):
        mine = kind == name
        pixels = len(np.unique(pixel[mine]))
        rank = _by_entries(entry[mine], pixel[mine], filters)
        gradient, left[name], entries[name] = gradient + rank, pixels - rank, len(np.unique(entry[mine]))
    open_ = [name for name, count in left.items() if count]
    bounds = [channels * sum(left.values())]
    for count in range(len(open_)) if len(open_) <= 4 else (0,):  # the choices double with each class
        for given_up in combinations(open_, count):
            kept = [name for name in open_ if name not in given_up]
            mine = np.isin(kind, kept)
            most = np.minimum(filters, channels * np.bincount(place[mine], minlength=places))
            shared = min(filters * min(filters, channels * sum(entries[name] for name in kept)), int(most.sum()))
            output = _flow(place[mine], pixel[mine], most, channels, entry[mine])
            bounds.append(channels * sum(left[name] for name in given_up) + max(output - shared, 0))
    return channels * gradient + min(bounds)


def _classes(entry: np.ndarray, pixel: np.ndarray, entries: int) -> np.ndarray:
    """A number for each pair: the same for entries that meet a common pixel, directly or over others."""
    both = entries + pixel.max(initial=0) + 1
    graph = coo_matrix((np.ones(len(entry), bool), (entry, entries + pixel)), shape=(both, both))
    return connected_components(graph, directed=False)[1][entry]


def _by_entries(entry: np.ndarray, pixel: np.ndarray, most: int) -> int:
    """The largest flow from entries, `most` each, to pixels, one each, by pixels that the same entries meet."""
    _, entry = np.unique(entry, return_inverse=True)
    pixels, pixel = np.unique(pixel, return_inverse=True)
    meets = np.zeros((len(pixels), entry.max() + 1), bool)
    meets[pixel, entry] = True
    patterns, counts = np.unique(meets, axis=0, return_counts=True)
    source, target = np.nonzero(patterns.T)
    return _largest_flow(source, target, np.full(patterns.shape[1], most), counts)


def _flow(place: np.ndarray, pixel: np.ndarray, most: np.ndarray, channels: int, entry: np.ndarray) -> int:
    """The largest flow from places, `most[place]` each, to pixels, `channels` each.

    Sent through one kernel entry after the other; where that does not fill either side, by an exact algorithm.
    """
    room = channels * (np.bincount(pixel) > 0)
    rest, limit = most.copy(), min(int(most.sum()), int(room.sum()))
    counts = np.bincount(entry)
    for one in np.argsort(-counts, kind="stable")[: (counts > 0).sum()]:
        mine = entry == one
        if np.bincount(pixel[mine]).max() > 1:  # padding by copies: an entry meets a pixel twice
            continue
        sent = np.minimum(rest[place[mine]], room[pixel[mine]])
        rest[place[mine]] -= sent
        room[pixel[mine]] -= sent
    if most.sum() - rest.sum() == limit:
        return limit
    return _largest_flow(place, pixel, most, np.full(pixel.max() + 1, channels))


def _largest_flow(source: np.ndarray, target: np.ndarray, supply: np.ndarray, demand: np.ndarray) -> int:
    sources, targets = len(supply), len(demand)
    pair = np.unique(source.astype(np.int64) * targets + target)
    source, target = pair // targets, pair % targets
    start, end = sources + targets, sources + targets + 1
    rows = np.concatenate([np.full(sources, start), source, sources + np.arange(targets)])
    columns = np.concatenate([np.arange(sources), sources + target, np.full(targets, end)])
    room = np.concatenate([supply, np.minimum(supply[source], demand[target]), demand]).astype(np.int32)
    graph = csr_matrix((room, (rows, columns)), shape=(end + 1, end + 1))
    return int(maximum_flow(graph, start, end).flow_value)


def _drawn(channels: int, filters: int, met: np.ndarray, pixels: int) -> int:
    """The numerical rank of the equations of one group, for weights and sensitivities drawn at random."""
    generator = torch.Generator().manual_seed(0)
    places, entries = met.shape
    meets = functional.one_hot(torch.from_numpy(met) + 1, pixels + 1)[..., 1:].double()
    weights = torch.randn(filters, channels, entries, generator=generator, dtype=torch.float64)
    sensitivity = torch.randn(filters, places, generator=generator, dtype=torch.float64)
    gradient = torch.einsum("fp,pex->fex", sensitivity, meets).flatten(0, 1)
    free = null_space(gradient)
    output = torch.einsum("fce,pex,ux->fpcu", weights, meets, free).flatten(0, 1).flatten(1)
    values = torch.linalg.svdvals(output)
    found = int((values > 1e-9 * max(1.0, values[0].item())).sum()) if len(values) else 0
    return channels * (pixels - len(free)) + found
