"""Run a rule in a child process that the kernel ends when one response takes too long."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from sparkrl.errors import WorkerError
from sparkrl.reward.rules import Rule
from sparkrl.types import Score

_READY = "ready"
_STOP_GRACE_S = 2.0
_WARM_UP = "Answer: $\\frac{1}{2}$"
_MEMORY_BYTES = 2 * 2**30
"""What a rule may take on top of its imports; `9^{9^{9^9}}` would otherwise fill the machine within the time limit."""


class Outcome(Enum):
    """What became of scoring one response."""

    SCORED = "scored"
    TIMED_OUT = "timed_out"
    """The rule took longer than the limit."""
    CRASHED = "crashed"
    """The rule raised, or its process died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Score and how it came about; anything but SCORED is a wrong answer."""

    score: Score
    outcome: Outcome


class TimedScorer:
    """Scores responses one after another, each under its own hard limit.

    An alarm with the kernel's default action ends the child even while it is inside C code (a regular expression,
    say) where no Python handler would run. Children are forked from a server process that has the rule's imports
    loaded already, so replacing one costs milliseconds. The child also ends when its parent dies.
    """

    def __init__(self, rule: Rule, *, timeout_s: float, wrong: Score, preload: Sequence[str] = ()) -> None:
        """
        Args:
            rule: importable function (text, answer) -> Score.
            timeout_s: limit for one response, seconds.
            wrong: the score of a response whose scoring timed out or crashed.
            preload: modules that the fork server imports once.
        """
        self._rule = rule
        self._timeout_s = timeout_s
        self._wrong = wrong
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *preload])
        self._child: ForkServerProcess | None = None
        self._pipe: Connection | None = None

    def start(self) -> None:
        """Start the child and wait until the rule's imports are loaded; `score` does it where this was not called.

        Raises:
            WorkerError: the scoring process cannot be started (the rule's own imports fail, say).
        """
        self._ensure_child()

    def score(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Score (text, answer) pairs; one verdict each, in order.

        Raises:
            WorkerError: as `start`.
        """
        verdicts: list[Verdict] = []
        while len(verdicts) < len(items):
            pipe = self._ensure_child()
            try:
                pipe.send(items[len(verdicts) :])
                while len(verdicts) < len(items):
                    score: Score | None = pipe.recv()
                    outcome = Outcome.CRASHED if score is None else Outcome.SCORED
                    verdicts.append(Verdict(score=score or self._wrong, outcome=outcome))
            except (EOFError, OSError):  # the child is gone, and with it the response it was working on
                timed_out = self._reap() == -signal.SIGALRM
                outcome = Outcome.TIMED_OUT if timed_out else Outcome.CRASHED
                verdicts.append(Verdict(score=self._wrong, outcome=outcome))
        return verdicts

    def close(self) -> None:
        """End the child."""
        self._reap()

    def _ensure_child(self) -> Connection:
        if self._pipe is not None:
            return self._pipe
        ours, theirs = self._context.Pipe()
        child = self._context.Process(
            target=_serve, args=(theirs, self._rule, self._timeout_s), name="sparkrl-scorer", daemon=True
        )
        child.start()
        theirs.close()  # or the child's end would never read as closed
        self._child, self._pipe = child, ours
        try:
            greeting = ours.recv()
        except EOFError:
            greeting = f"the process ended with exit code {self._reap()}"
        if greeting != _READY:
            self._reap()
            raise WorkerError(f"a reward worker cannot run its rule: {greeting}")
        return ours

    def _reap(self) -> int | None:
        """Close the pipe, end the child if it still runs, return its exit code (-signal when a signal ended it)."""
        child, pipe, self._child, self._pipe = self._child, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if child is None:
            return None
        child.join(_STOP_GRACE_S)
        if child.is_alive():
            child.kill()
            child.join()
        exit_code = child.exitcode
        child.close()
        return exit_code


def _serve(pipe: Connection, rule: Rule, timeout_s: float) -> None:
    """Body of the child: score batches until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the driver's terminal is the driver's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        rule(_WARM_UP, "0")  # loads what the rule imports and compiles at first use, outside the time limit
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    _limit_memory()
    pipe.send(_READY)
    while True:
        try:
            items = pipe.recv()
        except EOFError:
            return
        for text, answer in items:
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            try:
                score = rule(text, answer)
            except Exception:  # one response must not end the run; counted as a crash by the parent
                score = None
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            pipe.send(score)


def _limit_memory() -> None:
    """Bound the process's address space; an allocation past it raises or ends the process, and counts as a crash."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():  # not Linux: the time limit alone has to do
        return
    taken = int(statistics.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + _MEMORY_BYTES
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
