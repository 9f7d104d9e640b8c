"""The weights of each model family, with their shapes.

Legend of shapes: V vocabulary, H hidden width, Z width that experts read and write, I expert width, E experts.
Source of names and shapes: transformers/models/muse_spark, qwen3 and qwen3_moe of transformers 5.20.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkrl.planning.facts import ModelFacts

_BLOCK = 16
"""Values that share one NVFP4 scale byte."""


class Stored(Enum):
    """How a weight lies in the checkpoint."""

    bf16 = "bf16"
    fp32 = "fp32"
    nvfp4 = "nvfp4"


class Split(Enum):
    """How tensor parallelism divides a weight in the server."""

    none = "none"
    heads = "heads"
    kv_heads = "kv_heads"
    """As heads, but repeated where there are more GPUs than key-value heads."""
    vocab = "vocab"
    inner = "inner"
    experts = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight, as often as it occurs."""

    part: str
    name: str
    """Ending of its name in the checkpoint."""
    shape: tuple[int, ...]
    count: int
    """Layers that have it."""
    stored: Stored = Stored.bf16
    split: Split = Split.none

    @property
    def size(self) -> int:
        """Parameters in one layer."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The module that holds it, as `lora.targets` names it."""
        return self.name.removesuffix(".weight") if self.name.endswith(".weight") else self.name.rpartition(".")[0]

    def bytes_as(self, stored: Stored, *, plain_bytes: int = 2) -> float:
        """Bytes in one layer, held as `stored`; `plain_bytes` is the width of what is neither float32 nor packed."""
        if stored is Stored.nvfp4:
            # nibbles, one scale byte a block, and two float32 factors a tensor (gate and up have their own)
            halves = 2 if self.name.endswith("gate_up_proj") else 1
            return self.size / 2 + self.size / _BLOCK + 8 * self.shape[0] * halves
        return self.size * (4 if stored is Stored.fp32 else plain_bytes)


def _tables(facts: ModelFacts) -> list[Weight]:
    shape = (facts.vocab_size, facts.hidden_size)
    return [
        Weight(part="embedding", name="embed_tokens.weight", shape=shape, count=1, split=Split.vocab),
        Weight(part="head", name="lm_head.weight", shape=shape, count=0 if facts.tied_head else 1, split=Split.vocab),
    ]


def _attention(facts: ModelFacts) -> list[Weight]:
    hidden, every = facts.hidden_size, facts.num_layers
    query, key_value = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim

    def weight(name: str, shape: tuple[int, int], split: Split) -> Weight:
        return Weight(part="attention", name=f"self_attn.{name}.weight", shape=shape, count=every, split=split)

    return [
        weight("q_proj", (query, hidden), Split.heads),
        weight("k_proj", (key_value, hidden), Split.kv_heads),
        weight("v_proj", (key_value, hidden), Split.kv_heads),
        weight("o_proj", (hidden, query), Split.heads),
    ]


def _experts(facts: ModelFacts) -> list[Weight]:
    num, inner, width = facts.num_experts, facts.moe_intermediate_size, facts.expert_width
    found = []
    for count, stored in (
        (facts.quantized_layers, Stored.nvfp4),
        (facts.sparse_layers - facts.quantized_layers, Stored.bf16),
    ):
        for name, shape in (("gate_up_proj", (num, 2 * inner, width)), ("down_proj", (num, width, inner))):
            found.append(
                Weight(
                    part="experts",
                    name=f"mlp.experts.{name}",
                    shape=shape,
                    count=count,
                    stored=stored,
                    split=Split.experts,
                )
            )
    return found


def _mlp(facts: ModelFacts) -> list[Weight]:
    hidden, inner, dense = facts.hidden_size, facts.intermediate_size, facts.num_layers - facts.sparse_layers
    return [
        Weight(part="mlp", name=f"mlp.{name}_proj.weight", shape=shape, count=dense, split=Split.inner)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner)))
    ]


def _small(part: str, count: int, *named: tuple[str, tuple[int, ...]], stored: Stored = Stored.bf16) -> list[Weight]:
    return [Weight(part=part, name=name, shape=shape, count=count, stored=stored) for name, shape in named]


def _muse_spark(facts: ModelFacts) -> list[Weight]:
    hidden, latent, every, sparse = facts.hidden_size, facts.expert_width, facts.num_layers, facts.sparse_layers
    query, norms = facts.num_heads * facts.head_dim, "norms and gates"
    gate = Weight(
        part="attention", name="self_attn.gate_proj.weight", shape=(query, hidden), count=every, split=Split.heads
    )
    return [
        *_tables(facts),
        *_attention(facts),
        gate,
        *_small(
            "latent",
            sparse,
            ("mlp.pre_expert_proj.weight", (latent, hidden)),
            ("mlp.post_expert_proj.weight", (hidden, latent)),
        ),
        *_small(
            "router",
            sparse,
            ("mlp.gate.weight", (facts.num_experts, hidden)),
            ("mlp.gate.e_score_correction_bias", (facts.num_experts,)),
            stored=Stored.fp32,
        ),
        *_experts(facts),
        *_mlp(facts),
        *_small(
            norms, every, ("input_layernorm.weight", (hidden,)), ("pre_feedforward_layernorm.weight", (hidden,)),
            ("post_feedforward_layernorm.weight", (hidden,)),
        ),
        *_small(
            norms,
            every,
            ("post_attention_residual_gate.gate", (hidden,)),
            ("post_feedforward_residual_gate.gate", (hidden,)),
            stored=Stored.fp32,
        ),
        *_small(
            norms, sparse, ("mlp.pre_expert_norm.weight", (latent,)), ("mlp.experts.post_expert_norm.weight", (latent,))
        ),
        *_small(norms, 1, ("norm.weight", (hidden,))),
    ]  # fmt: skip


def _qwen3(facts: ModelFacts) -> list[Weight]:
    hidden, every, norms = facts.hidden_size, facts.num_layers, "norms"
    return [
        *_tables(facts),
        *_attention(facts),
        *_small("router", facts.sparse_layers, ("mlp.gate.weight", (facts.num_experts, hidden))),
        *_experts(facts),
        *_mlp(facts),
        *_small(
            norms,
            every,
            ("input_layernorm.weight", (hidden,)),
            ("post_attention_layernorm.weight", (hidden,)),
            ("self_attn.q_norm.weight", (facts.head_dim,)),
            ("self_attn.k_norm.weight", (facts.head_dim,)),
        ),
        *_small(norms, 1, ("norm.weight", (hidden,))),
    ]


TABLES: dict[str, Callable[[ModelFacts], list[Weight]]] = {
    "muse_spark": _muse_spark,
    "qwen3_moe": _qwen3,
    "qwen3": _qwen3,
}
"""Family to its weights."""
