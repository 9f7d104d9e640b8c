"""Training on what a server sampled, and the adapter that came of it, for tests that run both."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import numpy as np

from sparkrl.lora.peft_format import load_adapter, pack
from sparkrl.trainer.group import TrainerGroup
from sparkrl.types import Adapter, Group, TrainBatch, TrainSequence


def random_batch(groups: Sequence[Group], random: np.random.Generator, *, version: int = 0) -> TrainBatch:
    """Every response with an advantage drawn for it."""
    sequences = tuple(
        TrainSequence(
            uid=response.uid,
            prompt_ids=group.problem.prompt_ids,
            response_ids=response.token_ids,
            rollout_log_probs=response.log_probs,
            routed_experts=response.routed_experts,
            advantages=np.full(len(response.token_ids), random.standard_normal(), np.float32),
        )
        for group in groups
        for response in group.responses
    )
    return TrainBatch(sequences=sequences, policy_version=version, temperature=1.0)


async def saved_adapter(group: TrainerGroup, version: int = 0) -> Adapter:
    """The ranks' adapter by way of the PEFT files that a checkpoint holds, whole."""
    with tempfile.TemporaryDirectory() as folder:
        await group.save(folder)
        return pack(*load_adapter(folder), version)
