"""Score groups of responses on Ray workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from sparkrl.config.schema import RewardConfig
from sparkrl.errors import WorkerError
from sparkrl.reward.rules import PRELOAD, RULES, Rule
from sparkrl.reward.timed_scorer import Outcome, TimedScorer, Verdict
from sparkrl.types import Group, Score, ScoredGroup

WRONG = Score(reward=-1.0, correct=False, extracted=None, parts={"answer": -1.0})
"""Score of a response that could not be scored in time: what every rule gives a wrong answer."""

_STOP_WAIT_S = 5.0
"""How long `stop` waits for workers to end their scoring processes themselves."""


class RewardWorker:
    """Ray actor around one scoring process. The actor itself never runs a rule, so it always answers."""

    def __init__(self, rule: Rule, timeout_s: float, preload: Sequence[str]) -> None:
        self._scorer = TimedScorer(rule, timeout_s=timeout_s, wrong=WRONG, preload=preload)

    def start(self) -> None:
        """Start the scoring process and wait for its imports."""
        self._scorer.start()

    def score(self, items: list[tuple[str, str]]) -> list[Verdict]:
        return self._scorer.score(items)

    def close(self) -> None:
        self._scorer.close()


class Rewarder:
    """Spreads responses over reward workers, a batch a worker.

    Truncated responses are scored like any other: whether an answer in a cut-off response counts is the rule's
    affair. Whether an aborted response is used at all is the loop's.
    """

    def __init__(self, workers: Sequence[ActorHandle]) -> None:
        self._workers = list(workers)
        self._counts: Counter[Outcome] = Counter()
        self._extraction_failures = 0.0

    @classmethod
    def start(cls, cfg: RewardConfig, *, rule: Rule | None = None) -> Rewarder:
        """Create the workers; they load the rule's imports while the caller goes on.

        Args:
            cfg: number of workers, the rule and its time limit.
            rule: importable scoring function to use in place of `cfg.rule`.
        """
        # No CPU is reserved: scoring is short, and a laptop's cores are all taken by server and trainer.
        actor: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(RewardWorker)
        preload = () if rule is not None else PRELOAD[cfg.rule]
        chosen = rule if rule is not None else RULES[cfg.rule]
        workers = [actor.remote(chosen, cfg.timeout_s, preload) for _ in range(cfg.num_workers)]
        for worker in workers:
            worker.start.remote()
        return cls(workers)

    async def score(self, groups: Sequence[Group]) -> tuple[ScoredGroup, ...]:
        """Score every response; the order of groups and responses is kept.

        Raises:
            WorkerError: a worker died or cannot run its rule.
        """
        items = [(response.text, group.problem.answer) for group in groups for response in group.responses]
        verdicts = iter(await self._verdicts(items))
        scored = []
        num_unread = 0
        for group in groups:
            scores = []
            for _ in group.responses:
                verdict = next(verdicts)
                scores.append(verdict.score)
                self._counts[verdict.outcome] += 1
                num_unread += verdict.outcome is Outcome.SCORED and verdict.score.extracted is None
            scored.append(ScoredGroup(group=group, scores=tuple(scores)))
        self._extraction_failures = num_unread / max(len(items), 1)
        return tuple(scored)

    def metrics(self) -> dict[str, float]:
        """What docs/metrics.md lists: the fraction of responses without a readable answer in the latest `score`, and
        the numbers of time-outs and crashes of the rule since `metrics` was last called, evaluations included."""
        counts, self._counts = self._counts, Counter()
        return {
            "rollout/extraction_failures": self._extraction_failures,
            "reward/timeouts": float(counts[Outcome.TIMED_OUT]),
            "reward/crashes": float(counts[Outcome.CRASHED]),
        }

    async def stop(self) -> None:
        """End the workers and their scoring processes, also in mid-score. A second call does nothing."""
        workers, self._workers = self._workers, []
        # An actor takes its calls in turn: behind a batch of slow responses the wait would be minutes. Killed, it takes
        # its child along, which then finds its pipe closed.
        closing = [asyncio.ensure_future(_settle(worker.close.remote())) for worker in workers]
        if closing:
            await asyncio.wait(closing, timeout=_STOP_WAIT_S)
        for call in closing:
            call.cancel()
        for worker in workers:
            ray.kill(worker)

    async def _verdicts(self, items: list[tuple[str, str]]) -> list[Verdict]:
        if not items:
            return []
        if not self._workers:
            raise WorkerError("the reward workers have been stopped")
        size = -(-len(items) // len(self._workers))
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        calls = [worker.score.remote(chunk) for worker, chunk in zip(self._workers, chunks, strict=False)]
        try:
            results: list[list[Verdict]] = await asyncio.gather(*calls)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (
                cause if isinstance(cause, WorkerError) else WorkerError(f"a reward worker failed: {cause}")
            ) from None
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"a reward worker died: {error}") from None
        return [verdict for result in results for verdict in result]


async def _settle(ref: Any) -> None:
    """Wait for a call; a worker that died has nothing left to end."""
    try:
        await ref
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
        return
