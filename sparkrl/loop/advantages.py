"""Advantages: verl's estimators over one prompt's group.

Legend: P prompts, G responses in a group.
"""

from __future__ import annotations

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from sparkrl.config.schema import Advantage
from sparkrl.errors import DataError


def group_advantages(rewards_PG: np.ndarray, *, kind: Advantage = Advantage.grpo) -> np.ndarray:
    """Centre (GRPO: and scale) rewards within each prompt's group.

    Args:
        rewards_PG: float [P, G], reward points.
        kind: `grpo` divides by the group's standard deviation (plus 1e-6), `dr_grpo` does not.
    Returns:
        float32 [P, G], unitless for `grpo`, reward points for `dr_grpo`. A row of equal rewards is all zeros.
    Raises:
        DataError: G < 2, or a reward is not finite.
    Source: GRPO, arXiv:2402.03300; Dr. GRPO, arXiv:2503.20783.
    """
    if rewards_PG.ndim != 2 or rewards_PG.shape[1] < 2:
        raise DataError(f"a group needs at least 2 responses, got rewards of shape {rewards_PG.shape}")
    if not np.isfinite(rewards_PG).all():
        prompt, response = np.argwhere(~np.isfinite(rewards_PG))[0]
        raise DataError(
            f"the reward of response {response} to prompt {prompt} of the batch is {rewards_PG[prompt, response]}"
        )
    num_prompts, group_size = rewards_PG.shape
    # verl sums token rewards into an outcome per response: one token a response carries all of it.
    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards=torch.from_numpy(rewards_PG.reshape(-1, 1).astype(np.float32)),
        response_mask=torch.ones(num_prompts * group_size, 1),
        index=np.repeat(np.arange(num_prompts), group_size),
        norm_adv_by_std_in_grpo=kind is Advantage.grpo,
    )
    return advantages.numpy().reshape(num_prompts, group_size)
