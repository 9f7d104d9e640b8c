"""Ctrl-C and SIGTERM: finish the step, save, and leave; a second one leaves at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupt:
    """Turns signals into a wish to stop that the loop looks at between steps.

    Args:
        task: cancelled when a stop cannot wait (outside a step, or on the second signal).
        say: shows one line to the user.
    """

    def __init__(self, task: asyncio.Task, say: Callable[[str], None] = print) -> None:
        self.requested = False
        self._task = task
        self._say = say
        self._in_step = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A stretch of work that one signal lets finish."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    @contextmanager
    def installed(self) -> Iterator[Interrupt]:
        """Handle SIGINT and SIGTERM while inside."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield self
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._in_step and not self.requested:
            self._say("Stopping after this step; its checkpoint will be saved. Once more stops at once.")
        else:
            self._say("Stopping now; what was saved is kept.")
            self._task.cancel()
        self.requested = True
