"""Correction for the distance between trainer and server: truncated importance weights, IcePop, rejection by k3.

Server and trainer hold the same adapter when a step is sampled, so what lies between their log-probs is numerics
(precision, quantization, kernels) and, without replay, other experts. Replay takes the experts out of it; what is left
is what these options weigh or leave out. Weights and masks are computed by verl's `rollout_corr_helper`.

A rejected token, or one of weight 0, counts as a token of loss 0: what the loss is divided by stays the number of all
response tokens (or sequences), so others do not weigh more for it, and micro-batches and ranks still add up.

Legend: B row, M longest response.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

from sparkrl.config.schema import CorrectionConfig, CorrectionWeights, Rejection
from sparkrl.types import TrainSequence


def correct(log_ratio_BM: Tensor, response_mask_BM: Tensor, cfg: CorrectionConfig) -> tuple[Tensor | None, Tensor]:
    """Weights of the token losses, and the tokens that stay in the loss.

    Args:
        log_ratio_BM: trainer minus server log-probs of the sampled tokens, nats, before the step's first update.
        response_mask_BM: bool, response tokens of counted rows.
    Returns:
        Weights, float64, None where none are asked for; the mask without rejected tokens.
    Source: verl.trainer.ppo.rollout_corr_helper, verl 0.9.1; truncated importance sampling,
        fengyao.notion.site/off-policy-rl; IcePop, ring-moe.github.io.
    """
    # verl also works out figures, which divide by the number of tokens and by the mean weight. One more row, in which
    # both sides agree, keeps them finite where a micro-batch is a filler or all its weights are 0. In float64, because
    # k3 of a small difference cancels in float32.
    wide_BM = functional.pad(log_ratio_BM.double(), (0, 0, 0, 1))
    mask_BM = functional.pad(response_mask_BM, (0, 0, 0, 1), value=True)
    weights_BM = None
    if cfg.weights is not CorrectionWeights.none:
        bounds = f"{cfg.min_weight!r}_{cfg.max_weight!r}" if cfg.min_weight else cfg.max_weight
        weights_BM, _ = compute_rollout_correction_weights(
            wide_BM, mask_BM, rollout_is=cfg.weights.value, rollout_is_threshold=bounds
        )
        weights_BM = weights_BM[:-1]
    kept_BM = mask_BM
    if cfg.reject is not Rejection.none:
        kept_BM, _ = compute_rollout_rejection_mask(
            wide_BM, mask_BM, rollout_rs=cfg.reject.value, rollout_rs_threshold=cfg.max_k3
        )
    return weights_BM, kept_BM[:-1]


def correction_metrics(
    log_probs: Sequence[np.ndarray], sequences: Sequence[TrainSequence], cfg: CorrectionConfig
) -> dict[str, float]:
    """What the correction did to a step; names as in docs/metrics.md, none where it is off.

    Args:
        log_probs: the trainer's, before the update, float32 [T] for each sequence, nats.
    """
    log_ratio_BM = pad_sequence(
        [
            torch.from_numpy(ours.astype(np.float64) - sequence.rollout_log_probs)
            for ours, sequence in zip(log_probs, sequences, strict=True)
        ],
        batch_first=True,
    )
    mask_BM = torch.arange(log_ratio_BM.shape[1]) < torch.tensor([len(ours) for ours in log_probs])[:, None]
    weights_BM, kept_BM = correct(log_ratio_BM, mask_BM, cfg)
    metrics: dict[str, float] = {}
    if weights_BM is not None:
        weights = weights_BM[mask_BM]
        by_sequence = cfg.weights is CorrectionWeights.sequence
        whole_BM = log_ratio_BM.sum(1, keepdim=True).expand_as(log_ratio_BM) if by_sequence else log_ratio_BM
        unbounded = whole_BM[mask_BM].exp()
        mean, square = float(weights.mean()), float((weights**2).mean())
        metrics |= {
            "correct/weight_mean": mean,
            "correct/weight_max": float(weights.max()),
            "correct/weights_cut": float(((unbounded > cfg.max_weight) | (unbounded < cfg.min_weight)).double().mean()),
            "correct/effective_samples": mean**2 / square if square else 0.0,
        }
    if cfg.reject is not Rejection.none:
        rejected_BM = mask_BM & ~kept_BM
        metrics |= {
            "correct/rejected_tokens": float(rejected_BM[mask_BM].double().mean()),
            "correct/rejected_responses": float(rejected_BM.any(1).double().mean()),
        }
    return metrics
