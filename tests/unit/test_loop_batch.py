"""Advantages and batches, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sparkrl.config.schema import Advantage
from sparkrl.errors import AdapterError, DataError
from sparkrl.loop.advantages import group_advantages
from sparkrl.loop.batch import build_batch, rollout_metrics
from sparkrl.types import FinishReason, Group, Problem, Response, Score, ScoredGroup


def scored_group(
    rewards: list[float], lengths: list[int], *, version: int = 3, finish=FinishReason.STOP
) -> ScoredGroup:
    problem = Problem(
        uid="p", messages=(), answer="1", data_source="test", prompt_ids=np.array([5, 6, 7], dtype=np.int32)
    )
    responses = tuple(
        Response(
            uid=f"p/{index}",
            token_ids=np.arange(length, dtype=np.int32),
            log_probs=np.full(length, -0.5, dtype=np.float32),
            routed_experts=np.zeros((3 + length - 1, 2, 2), dtype=np.uint8),
            policy_version=version,
            finish_reason=finish,
            text="",
        )
        for index, length in enumerate(lengths)
    )
    scores = tuple(Score(reward=reward, correct=reward > 0, extracted=None) for reward in rewards)
    return ScoredGroup(group=Group(problem=problem, responses=responses), scores=scores)


def test_grpo_advantages_of_two_right_and_two_wrong_match_hand_computed_values() -> None:
    # mean 0, sample standard deviation sqrt(4/3) = 1.1547005
    advantages = group_advantages(np.array([[1.0, 1.0, -1.0, -1.0]]))
    np.testing.assert_allclose(advantages, [[0.8660254, 0.8660254, -0.8660254, -0.8660254]], rtol=1e-5)


def test_grpo_advantages_of_equal_rewards_are_zero() -> None:
    assert np.array_equal(group_advantages(np.array([[1.0, 1.0], [-1.0, -1.0]])), np.zeros((2, 2), dtype=np.float32))


def test_dr_grpo_advantages_are_centred_and_not_scaled() -> None:
    advantages = group_advantages(np.array([[1.0, 0.0, 0.0, 0.0]]), kind=Advantage.dr_grpo)
    np.testing.assert_allclose(advantages, [[0.75, -0.25, -0.25, -0.25]], rtol=1e-6)


def test_groups_do_not_mix() -> None:
    both = group_advantages(np.array([[1.0, -1.0], [5.0, 1.0]]))
    alone = np.concatenate([group_advantages(np.array([[1.0, -1.0]])), group_advantages(np.array([[5.0, 1.0]]))])
    np.testing.assert_array_equal(both, alone)


def test_single_response_group_is_refused() -> None:
    with pytest.raises(DataError, match="at least 2 responses"):
        group_advantages(np.array([[1.0]]))


def test_reward_that_is_not_finite_is_refused_and_named() -> None:
    with pytest.raises(DataError, match="response 1 to prompt 0 of the batch is nan"):
        group_advantages(np.array([[1.0, np.nan]]))


def test_batch_spreads_the_advantage_over_each_token() -> None:
    batch = build_batch(
        [scored_group([1.0, -1.0], [2, 4])], policy_version=3, temperature=1.0, advantage=Advantage.dr_grpo
    )
    assert [sequence.advantages.tolist() for sequence in batch.sequences] == [[1.0, 1.0], [-1.0] * 4]


def test_batch_leaves_out_aborted_responses() -> None:
    items = [scored_group([1.0, -1.0], [2, 2]), scored_group([1.0, -1.0], [2, 2], finish=FinishReason.ABORT)]
    batch = build_batch(items, policy_version=3, temperature=1.0, advantage=Advantage.grpo)
    assert len(batch.sequences) == 2
    with pytest.raises(DataError, match="nothing to train on"):
        build_batch(items[1:], policy_version=3, temperature=1.0, advantage=Advantage.grpo)


def test_batch_refuses_responses_of_another_version() -> None:
    with pytest.raises(AdapterError, match="sampled under adapter version 2, the trainer holds version 3"):
        build_batch(
            [scored_group([1.0, -1.0], [1, 1], version=2)], policy_version=3, temperature=1.0, advantage=Advantage.grpo
        )


def test_rollout_metrics_count_accuracy_not_reward() -> None:
    metrics = rollout_metrics([scored_group([1.0, -1.0], [2, 4]), scored_group([-1.0, -1.0], [6, 8])])
    assert metrics["rollout/accuracy"] == 0.25
    assert metrics["rollout/reward_mean"] == -0.5
    assert metrics["rollout/mixed_groups"] == 0.5
    assert metrics["rollout/response_tokens_mean"] == 5.0
    assert metrics["rollout/tokens"] == 20.0
