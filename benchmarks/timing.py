"""Timing side by side: the calls that are compared take turns, so that a busy moment hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def medians(calls: Mapping[str, Callable[[], Any]], *, repeats: int, warmup: int = 1) -> dict[str, float]:
    """Median seconds of each call.

    Args:
        calls: by name; each is called `warmup + repeats` times, in turns.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run a block with so many torch threads, and put the number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
