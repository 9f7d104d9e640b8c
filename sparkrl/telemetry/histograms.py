"""How far trainer and rollout are apart, token by token, as histograms small enough to keep for every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

DLOGP = "agree/dlogp"
K3_TOKENS = "agree/k3_tokens"

_NUM_DLOGP_BINS = 64
_K3_DECADES = (-16, 2)
_K3_BINS_A_DECADE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts between edges."""

    name: str
    counts: tuple[int, ...]
    edges: tuple[float, ...]
    """One more than counts, rising."""

    def as_row(self, step: int) -> dict[str, Any]:
        """The row of histograms.jsonl."""
        return {"step": step, "name": self.name, "counts": list(self.counts), "edges": list(self.edges)}


def mismatch_histograms(dlogp: np.ndarray) -> tuple[Histogram, ...]:
    """Histograms of trainer minus rollout log-prob and of each token's k3.

    `agree/dlogp` has 64 equal bins from its least to its largest value, nats. `agree/k3_tokens` is over log10 of the k3
    of a token, exp(d) - 1 - d, in nats, with the same half-decade bins in every step, 1e-16 to 100; what lies outside,
    zero included, counts in the bin at that end.

    Args:
        dlogp: float [tokens], nats; what is not finite is left out.
    Returns:
        Nothing where no value is finite.
    """
    finite = np.asarray(dlogp, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return ()
    counts, edges = np.histogram(finite, bins=_NUM_DLOGP_BINS)
    first, last = _K3_DECADES
    decades = np.linspace(first, last, (last - first) * _K3_BINS_A_DECADE + 1)
    k3_counts, _ = np.histogram(np.log10(np.clip(token_k3(finite), 10.0**first, 10.0**last)), bins=decades)
    return (
        Histogram(name=DLOGP, counts=tuple(map(int, counts)), edges=tuple(map(float, edges))),
        Histogram(name=K3_TOKENS, counts=tuple(map(int, k3_counts)), edges=tuple(map(float, decades))),
    )


def token_k3(dlogp: np.ndarray) -> np.ndarray:
    """exp(d) - 1 - d, float64 [tokens], nats. Below 1e-3 by its series, where the plain formula loses its digits."""
    small = np.where(np.abs(dlogp) < 1e-3, dlogp, 0.0)
    series = small * small * (0.5 + small * (1.0 / 6.0 + small / 24.0))
    with np.errstate(over="ignore"):
        return np.where(np.abs(dlogp) < 1e-3, series, np.expm1(dlogp) - dlogp)
