"""Rank analysis: how much of a layer's input, or of a whole picture, a gradient determines."""

from gradinv.rank.counts import BlockCount, LayerCount, NotCounted, RankReport, analyse
from gradinv.rank.generic import Convolution, generic_nullity, rank_bound
from gradinv.rank.jacobian import Identifiability, identifiable
from gradinv.rank.numerical import lost, lost_directions, nullity

__all__ = [
    "BlockCount",
    "Convolution",
    "Identifiability",
    "LayerCount",
    "NotCounted",
    "RankReport",
    "analyse",
    "generic_nullity",
    "identifiable",
    "lost",
    "lost_directions",
    "nullity",
    "rank_bound",
]
