"""An endless, resumable order over problems."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from sparkrl.errors import DataError
from sparkrl.types import Problem


class ProblemStream:
    """Serves problems epoch after epoch.

    The order depends only on the seed and the epoch's number, so a stream restored from its state serves exactly
    what the first one would have. No two problems of one `take` are the same.
    """

    def __init__(self, problems: tuple[Problem, ...], *, seed: int, shuffle: bool) -> None:
        if not problems:
            raise DataError("a problem stream needs at least one problem, got none")
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = hashlib.sha256("\n".join(problem.uid for problem in problems).encode()).hexdigest()[:16]
        self._position = 0
        self._start_epoch(0)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._epoch

    @property
    def remaining(self) -> int:
        """Problems of the current epoch that have not been served."""
        return len(self._order) - self._position

    def require(self, num_problems: int) -> None:
        """Refuse a number of problems a step that `take` could not serve.

        Raises:
            DataError: more problems asked for than there are.
        """
        total = len(self._problems)
        if not 0 < num_problems <= total:
            raise DataError(
                f"cannot take {num_problems} different problems a step from a data set of {total}",
                hint=f"set `loop.num_prompts` between 1 and {total}",
            )

    def take(self, num_problems: int) -> tuple[Problem, ...]:
        """The next problems.

        Shuffled: a rest too small for the request is given up (other problems fall into the rest of every epoch).
        Unshuffled: the request goes on at the start of the file, or its last problems would never be served.

        Raises:
            DataError: more problems asked for than there are.
        """
        self.require(num_problems)
        picked = self._order[self._position : self._position + num_problems]
        self._position += len(picked)
        if len(picked) < num_problems:
            self._start_epoch(self._epoch + 1)
            kept = [] if self._shuffle else picked
            self._position = num_problems - len(kept)
            picked = kept + self._order[: self._position]
        return tuple(self._problems[index] for index in picked)

    def state(self) -> dict[str, Any]:
        """Plain values that `restore` takes, fit for JSON."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            DataError: the state belongs to other problems, another seed or another order.
        """
        own = self.state()
        for key in ("fingerprint", "seed", "shuffle"):
            if state.get(key) != own[key]:
                what = "data set" if key == "fingerprint" else f"`{key}`"
                raise DataError(
                    f"cannot go on from this checkpoint: its {what} differs "
                    f"(checkpoint: {state.get(key)}, now: {own[key]})",
                    hint="resume with the data set, seed and `data.shuffle` that the run was started with",
                )
        self._start_epoch(int(state["epoch"]))
        self._position = int(state["position"])

    def _start_epoch(self, epoch: int) -> None:
        total = len(self._problems)
        order = np.random.default_rng([self._seed, epoch]).permutation(total) if self._shuffle else np.arange(total)
        self._order: list[int] = order.tolist()
        self._epoch = epoch
        self._position = 0
