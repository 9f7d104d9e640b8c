"""Work on blocks of memory, shared out among the cores of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

_FEW_BYTES = 16 << 20
"""Up to so many bytes threads cost more than they save."""
_MOST = 8
"""Threads that read and write as fast as memory, or a GPU's bus, allows."""
T = TypeVar("T")


def thread_count(num_bytes: int) -> int:
    """Threads for work on so many bytes."""
    return min(_MOST, len(os.sched_getaffinity(0))) if num_bytes > _FEW_BYTES else 1


@contextmanager
def working(jobs: Iterable[T], run: Callable[[T], Any], *, num_threads: int) -> Iterator[None]:
    """Run all jobs in threads beside the block's own work; all are done when the block ends.

    With one thread the caller's own does them, at the end of the block.

    Raises:
        Exception: the first one of a job; jobs that had not begun by then are left out.
    """
    queue, errors = iter(jobs), list[BaseException]()
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                job = next(queue, queue)
            if job is queue:
                return
            try:
                run(job)  # type: ignore[arg-type]
            except BaseException as error:  # handed on to the caller, in whose thread it belongs
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_threads)] if num_threads > 1 else []
    for thread in threads:
        thread.start()
    try:
        yield
        if not threads:
            work()
    except BaseException as error:
        errors.insert(0, error)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def one_core_each() -> Iterator[None]:
    """Threads that begin inside compute on one core each: torch would give each of them a crew of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
