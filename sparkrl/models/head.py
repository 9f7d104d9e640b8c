"""Log-probs and entropy of given tokens from the language-model head, a chunk of tokens at a time.

Every token's log-prob depends on that token's hidden state alone, so its gradient is one row of width H. It is computed
in forward, next to the log-prob, and only those rows are kept: no [tokens, vocabulary] tensor outlives a chunk, and
backward does not touch the head again.

Legend: T token, C token of a chunk, V vocabulary, H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
"""Size of one float32 [C, V] work tensor; several are alive at a time."""


def token_log_probs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    multiplier: float,
    cap: float | None,
    temperature: float,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets_T` under `softmax(soft_cap(head(x)) / temperature)`.

    Args:
        hidden_TH: [T, H] in the compute type.
        weight_VH: [V, H], same type. When it needs a gradient the plain, memory-hungry path is taken.
        targets_T: int64 [T].
        multiplier, cap: see `soft_cap`.
        entropy_grad: whether the entropy will be differentiated; costs one more product with the head.
    Returns:
        float32 [T] log-probs in nats and, when asked for, float32 [T] entropies in nats.
    """
    if weight_VH.requires_grad and torch.is_grad_enabled():
        log_p_TV = _log_softmax(hidden_TH, weight_VH, multiplier, cap, temperature)[0]
        log_probs = log_p_TV.gather(1, targets_T[:, None])[:, 0]
        return log_probs, -(log_p_TV.exp() * log_p_TV).sum(-1) if with_entropy else None
    log_probs, entropy = _Head.apply(
        hidden_TH, weight_VH, targets_T, multiplier, cap, temperature, with_entropy, with_entropy and entropy_grad
    )
    if not with_entropy:
        return log_probs, None
    return log_probs, entropy if entropy_grad else entropy.detach()


def soft_cap(
    scores: Tensor, multiplier: float, cap: float | None, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """`cap * tanh(scores * multiplier / cap) / temperature`, or `scores * multiplier / temperature` without a cap.

    Returns:
        float32 logits, and the tangent itself, which the slope is made of (None without a cap).
    """
    if cap is None:
        return scores.float() * (multiplier / temperature), None
    squashed = torch.tanh(scores.float() * (multiplier / cap))
    return squashed * (cap / temperature), squashed


def head_product(hidden: Tensor, weight_VH: Tensor) -> Tensor:
    """float32 `hidden @ weight_VH.T`, not rounded to the compute type on the way where the device can.

    Logits reach tens, where bfloat16 steps by a sixteenth and more; the server's head keeps float32 as well.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight_VH.T, out_dtype=torch.float32)
    return (hidden @ weight_VH.T).float()


def _log_softmax(
    hidden: Tensor, weight_VH: Tensor, multiplier: float, cap: float | None, temperature: float
) -> tuple[Tensor, Tensor | None]:
    logits, squashed = soft_cap(head_product(hidden, weight_VH), multiplier, cap, temperature)
    return torch.log_softmax(logits, -1), squashed


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, targets_T, multiplier, cap, temperature, with_entropy, entropy_grad):
        num_tokens = hidden_TH.shape[0]
        keep = ctx.needs_input_grad[0]
        log_probs_T = hidden_TH.new_empty(num_tokens, dtype=torch.float32)
        entropy_T = torch.empty_like(log_probs_T) if with_entropy else log_probs_T.new_empty(0)
        slope_TH = torch.empty_like(hidden_TH) if keep else None
        entropy_slope_TH = torch.empty_like(hidden_TH) if keep and entropy_grad else None
        chunk = max(1, CHUNK_BYTES // (4 * weight_VH.shape[0]))
        for start in range(0, num_tokens, chunk):
            part = slice(start, start + chunk)
            log_p_CV, squashed_CV = _log_softmax(hidden_TH[part], weight_VH, multiplier, cap, temperature)
            target_C1 = targets_T[part, None]
            log_probs_T[part] = log_p_CV.gather(1, target_C1)[:, 0]
            if not keep and not with_entropy:
                continue
            p_CV = log_p_CV.exp()
            if with_entropy:
                entropy_C1 = -(p_CV * log_p_CV).sum(-1, keepdim=True)
                entropy_T[part] = entropy_C1[:, 0]
            if slope_TH is None:
                continue
            # d logit / d (head output), the soft cap's slope included
            cap_slope_CV = multiplier / temperature
            if squashed_CV is not None:
                cap_slope_CV = (1 - squashed_CV.square()) * cap_slope_CV
            if entropy_slope_TH is not None:
                d_CV = -p_CV * (log_p_CV + entropy_C1) * cap_slope_CV
                entropy_slope_TH[part] = d_CV.to(weight_VH.dtype) @ weight_VH
            d_CV = (-p_CV).scatter_add_(1, target_C1, torch.ones_like(p_CV[:, :1])) * cap_slope_CV
            slope_TH[part] = d_CV.to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(slope_TH, entropy_slope_TH)
        return log_probs_T, entropy_T

    @staticmethod
    def backward(ctx, grad_log_probs_T, grad_entropy_T):
        slope_TH, entropy_slope_TH = ctx.saved_tensors
        grad_TH = grad_log_probs_T[:, None] * slope_TH
        if entropy_slope_TH is not None:
            grad_TH = grad_TH + grad_entropy_T[:, None] * entropy_slope_TH
        return grad_TH.to(slope_TH.dtype), None, None, None, None, None, None, None
