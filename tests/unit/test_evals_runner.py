"""One evaluation from sampling to figures."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from sparkrl.config.schema import EvalConfig
from sparkrl.errors import WorkerError
from sparkrl.evals import evaluate, evaluation_of, mean_at_k, paired_gain, with_gain
from sparkrl.types import FinishReason, Group, Problem, Response, Sampling, Score, ScoredGroup


class Parrot:
    """A sampler whose n-th response to problem p is the n-th word of p's text; a trailing `~` marks a cut-off one."""

    def __init__(self, *, lose=0):
        self.calls = []
        self.asked = []
        self._lose = lose

    async def sample(self, problems, sampling):
        self.calls.append(sampling)
        self.asked.append([problem.uid for problem in problems])
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
                for n, word in enumerate(words[: sampling.num_responses])
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
    evaluation = run(Parrot(), EvalConfig(k=4, name="tiny"))
    result = evaluation.result
    interval = mean_at_k(np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=bool))
    assert (result.name, result.step, result.k, result.num_problems) == ("tiny", 30, 4, 3)
    assert (result.mean, result.low, result.high) == (0.25, interval.low, interval.high)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert result.mean_tokens == pytest.approx((4 + 3 + 3 + 5) / 12)
    assert result.truncated == pytest.approx(2 / 12)
    # Two of four: 1 - C(2, 2) / C(4, 2) = 5/6; one of four: 1 - C(3, 2) / C(4, 2) = 1/2.
    assert result.extra == {
        "pass_at_2": pytest.approx((5 / 6 + 1 / 2) / 3),
        "maj_at_k": pytest.approx(1 / 3),
        "extraction_failures": pytest.approx(3 / 12),
    }
    assert [[answer.response for answer in row] for row in evaluation.answers] == [
        ["7", "7", "8", "?"],
        ["8", "8", "7", "88"],
        ["?", "?", "1", "2"],
    ]
    assert evaluation.answers[1][3].finish_reason == "length" and evaluation.answers[2][0].extracted is None


def test_evaluate_passes_its_own_sampling_options_and_budget():
    sampler = Parrot()
    run(sampler, EvalConfig(k=2, temperature=0.6, top_p=0.9))
    run(sampler, EvalConfig(k=2, max_response_tokens=9))
    assert sampler.calls == [
        Sampling(num_responses=2, temperature=0.6, top_p=0.9, max_tokens=64, seed=11),
        Sampling(num_responses=2, temperature=1.0, top_p=1.0, max_tokens=9, seed=11),
    ]


def test_evaluate_with_num_problems_takes_the_first_ones():
    result = run(Parrot(), EvalConfig(k=4, num_problems=1)).result
    assert (result.num_problems, result.mean) == (1, 0.5)


def test_evaluate_when_the_rollout_loses_a_problem_raises():
    with pytest.raises(WorkerError, match="4 responses to each of 3 problems and got 8 responses to 2"):
        run(Parrot(lose=1), EvalConfig(k=4))


def test_evaluate_in_parts_hands_each_part_on_as_soon_as_it_is_scored():
    sampler, kept = Parrot(), []
    evaluation = run(sampler, EvalConfig(k=4), problems_at_once=2, keep=kept.append)
    assert sampler.asked == [["0", "1"], ["2"]]
    assert [[answer.problem_uid for answer in answers] for answers in kept] == [["0"] * 4 + ["1"] * 4, ["2"] * 4]
    assert [answer for answers in kept for answer in answers] == [
        answer for row in evaluation.answers for answer in row
    ]
    assert evaluation == run(Parrot(), EvalConfig(k=4))


def test_evaluate_gone_on_with_asks_only_what_was_not_answered_in_full():
    whole = run(Parrot(), EvalConfig(k=4))
    answered = {"0": whole.answers[0], "1": whole.answers[1][:3], "9": whole.answers[0]}
    sampler = Parrot()
    assert run(sampler, EvalConfig(k=4), answered=answered) == whole
    assert sampler.asked == [["1", "2"]]


def test_evaluate_of_complete_answers_asks_nothing():
    whole = run(Parrot(), EvalConfig(k=4))
    sampler = Parrot()
    assert run(sampler, EvalConfig(k=4), answered={row[0].problem_uid: row for row in whole.answers}) == whole
    assert sampler.asked == []


def test_gain_pairs_problems_by_name_and_not_by_place():
    whole = run(Parrot(), EvalConfig(k=4))
    none_right = [[dataclasses.replace(answer, correct=False) for answer in row] for row in whole.answers]
    cfg = EvalConfig(k=4, confidence=0.9)
    gain = with_gain(whole, none_right[::-1], cfg).result.extra
    expected = paired_gain(
        np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=bool), np.zeros((3, 4), dtype=bool), confidence=0.9
    )
    assert (gain["gain"], gain["gain_low"], gain["gain_high"]) == (expected.mean, expected.low, expected.high)
    assert expected.mean == 0.25


def test_gain_over_a_baseline_of_other_problems_is_left_out():
    whole = run(Parrot(), EvalConfig(k=4))
    assert with_gain(whole, (), EvalConfig(k=4)) is whole
    assert with_gain(whole, whole.answers[:2], EvalConfig(k=4)) is whole
    assert evaluation_of(whole.answers, EvalConfig(k=4), step=30) == whole
