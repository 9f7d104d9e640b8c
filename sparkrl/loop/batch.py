"""From scored groups to what the trainer consumes, and to the metrics of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkrl.config.schema import Advantage
from sparkrl.errors import AdapterError, DataError
from sparkrl.loop.advantages import group_advantages
from sparkrl.types import FinishReason, ScoredGroup, TrainBatch, TrainSequence


def build_batch(
    scored: Sequence[ScoredGroup],
    *,
    policy_version: int,
    temperature: float,
    advantage: Advantage,
    overlong_filtering: bool = False,
) -> TrainBatch:
    """One training sequence a response, with the group's advantage on each of its tokens.

    Responses the server gave up (`abort`) or left empty are left out after the advantages are computed, with
    `overlong_filtering` those that the budget cut off too.

    Raises:
        AdapterError: a response was sampled under another version than `policy_version`.
        DataError: nothing is left to train on.
    """
    rewards_PG = np.array([[score.reward for score in item.scores] for item in scored], dtype=np.float64)
    advantages_PG = group_advantages(rewards_PG, kind=advantage)
    dropped = {FinishReason.ABORT, FinishReason.LENGTH} if overlong_filtering else {FinishReason.ABORT}
    sequences = []
    for item, advantages_G in zip(scored, advantages_PG, strict=True):
        for response, value in zip(item.group.responses, advantages_G, strict=True):
            if response.policy_version != policy_version:
                raise AdapterError(
                    f"response {response.uid} was sampled under adapter version {response.policy_version}, "
                    f"the trainer holds version {policy_version}"
                )
            if response.finish_reason in dropped or len(response.token_ids) == 0:
                continue
            sequences.append(
                TrainSequence(
                    uid=response.uid,
                    prompt_ids=item.group.problem.prompt_ids,
                    response_ids=response.token_ids,
                    rollout_log_probs=response.log_probs,
                    routed_experts=response.routed_experts,
                    advantages=np.full(len(response.token_ids), value, dtype=np.float32),
                )
            )
    if not sequences:
        if overlong_filtering:
            raise DataError(
                "every response of the step was cut off, aborted or empty; there is nothing to train on",
                hint="raise `rollout.max_response_tokens`, or set `algorithm.overlong_filtering=false`",
            )
        raise DataError("every response of the step was aborted or empty; there is nothing to train on")
    return TrainBatch(sequences=tuple(sequences), policy_version=policy_version, temperature=temperature)


def rollout_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Rewards, accuracy and lengths of one step's responses; names as in docs/metrics.md.

    Right, wrong and unreadable answers (`rollout/extraction_failures`, counted by the rewarder) and what could not be
    scored in time add up to all responses.
    """
    rewards_PG = np.array([[score.reward for score in item.scores] for item in scored], dtype=np.float64)
    correct_PG = np.array([[score.correct for score in item.scores] for item in scored])
    wrong = [not score.correct and score.extracted is not None for item in scored for score in item.scores]
    responses = [response for item in scored for response in item.group.responses]
    tokens = np.array([len(response.token_ids) for response in responses])
    return {
        "rollout/reward_mean": float(rewards_PG.mean()),
        "rollout/reward_std": float(rewards_PG.std()),
        "rollout/accuracy": float(correct_PG.mean()),
        "rollout/wrong_answers": float(np.mean(wrong)),
        "rollout/mixed_groups": float((correct_PG.any(axis=1) & ~correct_PG.all(axis=1)).mean()),
        "rollout/response_tokens_mean": float(tokens.mean()),
        "rollout/response_tokens_max": float(tokens.max()),
        "rollout/truncated": float(np.mean([response.finish_reason is FinishReason.LENGTH for response in responses])),
        "rollout/aborted": float(np.mean([response.finish_reason is FinishReason.ABORT for response in responses])),
        "rollout/tokens": float(tokens.sum()),
    }
