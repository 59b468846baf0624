"""What does a gradient give away about the picture it was computed from?

One path, walked one way: `data.load`, a network of `victims`, `client.gradient`, an `Update`, a function of
`attacks`, a `Reconstruction`, `metrics`, `claims.record`.
"""

from gradinv import attacks, claims, client, data, defences, metrics, plots, privacy, rank, victims

__version__ = "0.1.0"
__all__ = ["attacks", "claims", "client", "data", "defences", "metrics", "plots", "privacy", "rank", "victims"]
