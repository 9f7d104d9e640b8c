"""Run one evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparkrl.config.schema import EvalConfig
from sparkrl.errors import WorkerError
from sparkrl.evals.metrics import maj_at_k, mean_at_k, paired_gain, pass_at_k
from sparkrl.types import Answer, EvalResult, FinishReason, Group, Problem, Sampling, ScoredGroup

Answers = tuple[Answer, ...]
"""The k answers to one problem."""


class Sampler(Protocol):
    """What an evaluation needs of the rollout."""

    async def sample(self, problems: Sequence[Problem], sampling: Sampling) -> tuple[Group, ...]: ...


class Rewarder(Protocol):
    """What an evaluation needs of the reward."""

    async def score(self, groups: Sequence[Group]) -> tuple[ScoredGroup, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation: its figures and every answer behind them."""

    result: EvalResult
    answers: tuple[Answers, ...]
    """k a problem, in the order of the problems."""


async def evaluate(
    rollout: Sampler,
    rewarder: Rewarder,
    problems: Sequence[Problem],
    cfg: EvalConfig,
    *,
    step: int,
    max_tokens: int,
    seed: int,
    problems_at_once: int | None = None,
    answered: Mapping[str, Answers] | None = None,
    keep: Callable[[Sequence[Answer]], None] | None = None,
) -> Evaluation:
    """Sample k responses to every evaluation problem and score them.

    Args:
        problems: the evaluation set; `cfg.num_problems` takes the first ones of it.
        step: optimizer steps made so far, written into the result.
        max_tokens: response budget where `cfg` sets none, tokens.
        seed: pass the same seed at every step of a run, so that two evaluations differ by the policy and not by
            the draw of their samples.
        problems_at_once: problems of one call to the rollout; None makes one call of all.
        answered: answers that an interrupted evaluation left, by problem; a problem with all k of them is not asked
            again.
        keep: called with the answers of every call to the rollout as soon as they are scored.
    Returns:
        The figures and the answers. An aborted response counts as wrong.
    Raises:
        WorkerError: the rollout did not return k responses to every problem.
    """
    chosen = tuple(problems[: cfg.num_problems])
    found = {uid: tuple(answers) for uid, answers in (answered or {}).items() if len(answers) == cfg.k}
    missing = [problem for problem in chosen if problem.uid not in found]
    size = problems_at_once or max(len(missing), 1)
    sampling = Sampling(
        num_responses=cfg.k,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        max_tokens=cfg.max_response_tokens or max_tokens,
        seed=seed,
    )
    for start in range(0, len(missing), size):
        asked = missing[start : start + size]
        groups = await rollout.sample(asked, sampling)
        _check_complete(groups, asked, cfg)
        new = [answers_of(item) for item in await rewarder.score(groups)]
        if keep is not None:
            keep([answer for answers in new for answer in answers])
        found.update({answers[0].problem_uid: answers for answers in new})
    return evaluation_of([found[problem.uid] for problem in chosen], cfg, step=step)


def evaluation_of(answers: Sequence[Answers], cfg: EvalConfig, *, step: int) -> Evaluation:
    """The evaluation that k answers to each problem make."""
    return Evaluation(result=_summarize(answers, cfg, step=step), answers=tuple(answers))


def with_gain(evaluation: Evaluation, baseline: Sequence[Answers], cfg: EvalConfig) -> Evaluation:
    """The same evaluation with `gain`, `gain_low` and `gain_high` among its figures: accuracy minus the baseline's.

    Args:
        baseline: answers of the model with a zero adapter. When they are missing or to other problems (a run that was
            resumed with another evaluation set) there is no gain to speak of, and the evaluation is returned as it is.
    """
    before = {row[0].problem_uid: row for row in baseline}
    if set(before) != {row[0].problem_uid for row in evaluation.answers}:
        return evaluation
    paired = [before[row[0].problem_uid] for row in evaluation.answers]
    gain = paired_gain(_verdicts(evaluation.answers), _verdicts(paired), confidence=cfg.confidence)
    figures = {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}
    result = dataclasses.replace(evaluation.result, extra={**evaluation.result.extra, **figures})
    return dataclasses.replace(evaluation, result=result)


def answers_of(scored: ScoredGroup) -> Answers:
    """What is kept of a scored group."""
    problem = scored.group.problem
    return tuple(
        Answer(
            problem_uid=problem.uid,
            index=index,
            prompt=problem.messages[-1]["content"],
            response=response.text,
            answer=problem.answer,
            extracted=score.extracted,
            correct=score.correct,
            reward=score.reward,
            tokens=len(response.token_ids),
            finish_reason=response.finish_reason.value,
        )
        for index, (response, score) in enumerate(zip(scored.group.responses, scored.scores, strict=True))
    )


def _summarize(answers: Sequence[Answers], cfg: EvalConfig, *, step: int) -> EvalResult:
    """The figures of an evaluation, from k answers to each problem."""
    correct_PK = _verdicts(answers)
    extracted = [[answer.extracted for answer in row] for row in answers]
    flat = [answer for row in answers for answer in row]
    interval = mean_at_k(correct_PK, confidence=cfg.confidence)
    fewer = [2**power for power in range(1, cfg.k.bit_length()) if 2**power < cfg.k]
    return EvalResult(
        name=cfg.name,
        step=step,
        k=cfg.k,
        num_problems=len(answers),
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        pass_at_k=pass_at_k(correct_PK, cfg.k),
        mean_tokens=float(np.mean([answer.tokens for answer in flat])),
        truncated=float(np.mean([answer.finish_reason == FinishReason.LENGTH.value for answer in flat])),
        extra={
            **{f"pass_at_{num}": pass_at_k(correct_PK, num) for num in fewer},
            "maj_at_k": maj_at_k(extracted, correct_PK.tolist()),
            "extraction_failures": float(np.mean([answer.extracted is None for answer in flat])),
        },
    )


def _verdicts(answers: Sequence[Answers]) -> np.ndarray:
    """bool [P, K]."""
    return np.array([[answer.correct for answer in row] for row in answers], dtype=bool)


def _check_complete(groups: Sequence[Group], asked: Sequence[Problem], cfg: EvalConfig) -> None:
    expected = [(problem.uid, cfg.k) for problem in asked]
    got = [(group.problem.uid, len(group.responses)) for group in groups]
    if got != expected:
        raise WorkerError(
            f"evaluation `{cfg.name}` asked for {cfg.k} responses to each of {len(asked)} problems and got "
            f"{sum(num for _, num in got)} responses to {len(got)} problems"
        )
