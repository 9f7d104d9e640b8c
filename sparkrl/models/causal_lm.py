"""What the language models of all families share: the head, and log-probs of given targets in place of logits.

Legend: B row, S position, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import ModelOutput

from sparkrl.models.head import soft_cap, token_log_probs


@dataclass
class CausalLMOutput(ModelOutput):
    """What the language model returns; `log_probs` and `entropy` instead of `logits` when targets are given."""

    logits: Tensor | None = None
    """float32 [B, S, V], soft-capped where the family does so, before any temperature."""
    log_probs: Tensor | None = None
    """float32 [B, S], nats, of the targets at the given temperature."""
    entropy: Tensor | None = None
    """float32 [B, S], nats a token, at the given temperature."""
    past_key_values: Cache | None = None


class Head(nn.Linear):
    """Output projection; with targets, their log-probs, so that its weight is used inside its own forward only.

    Args:
        multiplier: factor on the logits.
        cap: bound of the soft cap `cap * tanh(x / cap)`; None has none.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, multiplier: float = 1.0, cap: float | None = None) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.multiplier, self.cap = multiplier, cap

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, S, H] to float32 logits [B, S, V] and None, or to the targets' log-probs and entropies, both [B, S]."""
        if targets is None:
            return soft_cap(super().forward(hidden), self.multiplier, self.cap)[0], None
        log_probs, entropy = token_log_probs(
            hidden.flatten(0, 1),
            self.weight,
            targets.flatten(),
            multiplier=self.multiplier,
            cap=self.cap,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
        )
        return log_probs.view(targets.shape), None if entropy is None else entropy.view(targets.shape)


def places(
    input_ids: Tensor, config: PreTrainedConfig, past: Cache | None, position_ids: Tensor | None, use_cache: bool | None
) -> tuple[Tensor, Cache | None]:
    """Positions of the tokens, int64 [1, S] behind what the cache has seen unless they are given, and the cache."""
    if use_cache and past is None:
        past = DynamicCache(config=config)
    if position_ids is None:
        seen = past.get_seq_length() if past is not None else 0
        position_ids = (torch.arange(input_ids.shape[1], device=input_ids.device) + seen).unsqueeze(0)
    return position_ids, past


class CausalLM:
    """The forward pass of a family's language model: `self.model` is the decoder, `self.lm_head` a `Head`.

    Takes [B, S] rows with an attention mask, or sequences packed into one row [1, T] whose `position_ids` restart at 0
    at each sequence.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_grad: bool = False,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits, or the targets' log-probs without ever holding all logits.

        Args:
            input_ids: int64 [B, S].
            attention_mask: [B, S], 1 for real tokens, right or left padded; None when nothing is padded.
            position_ids: int64 [B, S]; restarts at 0 mark packed sequences when B is 1.
            targets: int64 [B, S], the token that each position predicts; None asks for logits.
            temperature: divides the logits before log-probs and entropy are taken.
            with_entropy: also return the entropy.
            entropy_grad: whether the entropy is differentiated.
            logits_to_keep: only the last so many positions get logits; 0 is all.
        """
        parts: Any = self
        body = parts.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden, cache = body.last_hidden_state, body.past_key_values
        if targets is not None:
            log_probs, entropy = parts.lm_head(
                hidden, targets, temperature=temperature, with_entropy=with_entropy, entropy_grad=entropy_grad
            )
            return CausalLMOutput(log_probs=log_probs, entropy=entropy, past_key_values=cache)
        logits, _ = parts.lm_head(hidden[:, -logits_to_keep:])
        return CausalLMOutput(logits=logits, past_key_values=cache)
