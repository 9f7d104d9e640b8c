"""One evaluation from sampling to figures."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from sparkrl.config.schema import EvalConfig
from sparkrl.errors import WorkerError
from sparkrl.evals import evaluate, mean_at_k
from sparkrl.types import FinishReason, Group, Problem, Response, Score, ScoredGroup


class Parrot:
    """A sampler whose n-th response to problem p is the n-th word of p's text; a trailing `~` marks a cut-off one."""

    def __init__(self, *, lose=0):
        self.calls = []
        self._lose = lose

    async def sample(self, problems, **options):
        self.calls.append(options)
        groups = []
        for problem in problems[: len(problems) - self._lose]:
            words = problem.messages[0]["content"].split()
            responses = tuple(
                Response(
                    uid=f"{problem.uid}/{n}",
                    token_ids=np.zeros(len(word), dtype=np.int32),
                    log_probs=np.zeros(len(word), dtype=np.float32),
                    routed_experts=np.zeros((len(word), 1, 1), dtype=np.uint8),
                    policy_version=0,
                    finish_reason=FinishReason.LENGTH if word.endswith("~") else FinishReason.STOP,
                    text=word.rstrip("~"),
                )
                for n, word in enumerate(words[: options["num_responses"]])
            )
            groups.append(Group(problem=problem, responses=responses))
        return tuple(groups)


class Equality:
    """Right when the response is the answer; `?` is a response without an answer."""

    async def score(self, groups):
        return tuple(
            ScoredGroup(
                group=group,
                scores=tuple(
                    Score(
                        reward=1.0 if response.text == group.problem.answer else -1.0,
                        correct=response.text == group.problem.answer,
                        extracted=None if response.text == "?" else response.text,
                    )
                    for response in group.responses
                ),
            )
            for group in groups
        )


def make_problems():
    return tuple(
        Problem(
            uid=str(n),
            messages=({"role": "user", "content": text},),
            answer="7",
            data_source="d",
            prompt_ids=np.zeros(1, dtype=np.int32),
        )
        for n, text in enumerate(["7 7 8 ?", "8 8 7 88~", "? ?~ 1 2"])
    )


def run(sampler, cfg, **more):
    options = {"step": 30, "max_tokens": 64, "seed": 11} | more
    return asyncio.run(evaluate(sampler, Equality(), make_problems(), cfg, **options))


def test_evaluate_of_known_responses_gives_figures_computed_by_hand():
    result, groups = run(Parrot(), EvalConfig(k=4, name="tiny"))
    interval = mean_at_k(np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=bool))
    assert (result.name, result.step, result.k, result.num_problems) == ("tiny", 30, 4, 3)
    assert (result.mean, result.low, result.high) == (0.25, interval.low, interval.high)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert result.mean_tokens == pytest.approx((4 + 3 + 3 + 5) / 12)
    assert result.truncated == pytest.approx(2 / 12)
    assert result.extra == {"maj_at_k": pytest.approx(1 / 3), "extraction_failures": pytest.approx(3 / 12)}
    assert [len(group.scores) for group in groups] == [4, 4, 4]


def test_evaluate_passes_its_own_sampling_options_and_budget():
    sampler = Parrot()
    run(sampler, EvalConfig(k=2, temperature=0.6, top_p=0.9))
    run(sampler, EvalConfig(k=2, max_response_tokens=9))
    common = {"num_responses": 2, "seed": 11}
    assert sampler.calls == [
        common | {"temperature": 0.6, "top_p": 0.9, "max_tokens": 64},
        common | {"temperature": 1.0, "top_p": 1.0, "max_tokens": 9},
    ]


def test_evaluate_with_num_problems_takes_the_first_ones():
    result, _ = run(Parrot(), EvalConfig(k=4, num_problems=1))
    assert (result.num_problems, result.mean) == (1, 0.5)


def test_evaluate_when_the_rollout_loses_a_problem_raises():
    with pytest.raises(WorkerError, match="4 responses to each of 3 problems and got 8 responses to 2"):
        run(Parrot(lose=1), EvalConfig(k=4))
