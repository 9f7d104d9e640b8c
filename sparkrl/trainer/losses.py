"""The policy loss: verl's functions, normalized over the whole batch.

Legend: B row, M longest response.
"""

from __future__ import annotations

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig

from sparkrl.config.schema import AlgorithmConfig
from sparkrl.trainer.batch import MicroBatch, Totals
from sparkrl.trainer.correction import correct


class Loss:
    """Loss of one micro-batch.

    Summed over micro-batches and averaged over ranks, as FSDP averages gradients, it is the mini-batch's loss.

    Args:
        response_budget: tokens that `seq_mean_token_sum_norm` divides by. Left to itself verl takes the longest
            response of a micro-batch, so that a loss would depend on how responses are packed.
    """

    def __init__(self, algorithm: AlgorithmConfig, *, response_budget: int) -> None:
        self._algorithm = algorithm
        self._response_budget = response_budget
        self._function = get_policy_loss_fn(algorithm.loss.value)
        self._config = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio_low=algorithm.clip_low,
            clip_ratio_high=algorithm.clip_high,
            clip_ratio_c=algorithm.clip_dual,
            loss_agg_mode=algorithm.aggregation.value,
            policy_loss=PolicyLossConfig(loss_mode=algorithm.loss.value),
        )

    def __call__(self, log_probs_BM: Tensor, entropy_BM: Tensor | None, batch: MicroBatch, totals: Totals) -> Tensor:
        """Loss to call backward on.

        Args:
            log_probs_BM: float32, nats, of the response tokens.
            entropy_BM: float32, nats a token; needed with an entropy bonus.
        """
        scale = {
            "dp_size": totals.num_ranks,
            "batch_num_tokens": totals.num_tokens,
            "global_batch_size": totals.num_sequences,
            "loss_scale_factor": self._response_budget,
        }
        self._config.global_batch_info.update(scale)
        mode = self._algorithm.aggregation.value
        # on-policy the ratio is 1, and only its gradient counts
        old_BM = batch.old_log_probs if batch.old_log_probs is not None else log_probs_BM.detach()
        trainer_BM = batch.trainer_log_probs if batch.trainer_log_probs is not None else log_probs_BM.detach()
        weights_BM, mask_BM = correct(
            trainer_BM - batch.rollout_log_probs, batch.response_mask, self._algorithm.correction
        )
        loss, _ = self._function(
            old_log_prob=old_BM,
            log_prob=log_probs_BM,
            advantages=batch.advantages,
            response_mask=mask_BM,
            loss_agg_mode=mode,
            config=self._config,
            rollout_is_weights=None if weights_BM is None else weights_BM.float(),
        )
        if self._algorithm.entropy_coef and entropy_BM is not None:
            loss = loss - self._algorithm.entropy_coef * agg_loss(entropy_BM, mask_BM, mode, **scale)
        if self._algorithm.kl_coef and batch.base_log_probs is not None:
            kl_BM = kl_penalty(log_probs_BM, batch.base_log_probs, "k3")  # type: ignore[arg-type]
            loss = loss + self._algorithm.kl_coef * agg_loss(kl_BM, mask_BM, mode, **scale)
        return loss
