"""Every attack is a function of an `Update` and gives a `Reconstruction`."""

from gradinv.attacks.hybrid import h_gap, roughness
from gradinv.attacks.labels import least_counts, restore_labels
from gradinv.attacks.last_layer import FOLD, logits, mu_roots, twin_ratio
from gradinv.attacks.matching import dlg, inverting_gradients, match_gradients, total_variation
from gradinv.attacks.reconstruction import STATUSES, Reconstruction
from gradinv.attacks.recursive import r_gap
from gradinv.attacks.unmix import unmix
from gradinv.attacks.walk_back import walk_back

__all__ = [
    "FOLD",
    "STATUSES",
    "Reconstruction",
    "dlg",
    "h_gap",
    "inverting_gradients",
    "least_counts",
    "logits",
    "match_gradients",
    "mu_roots",
    "r_gap",
    "restore_labels",
    "roughness",
    "total_variation",
    "twin_ratio",
    "unmix",
    "walk_back",
]
