"""Tiny models with an adapter on everything, for tests of compiled layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MuseSparkTextConfig, PreTrainedConfig, Qwen3MoeConfig

from sparkrl.config.schema import LoraConfig
from sparkrl.lora.targets import add_adapter, resolve_targets
from sparkrl.models.registry import family_of

VOCABULARY = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXED = ("sparse", "dense")
TRACED = "aot_eager"
"""Traces the graphs that inductor would compile, forward and backward, and runs them as they are."""

Pass = tuple[Tensor, dict[str, Tensor]]


def muse_spark(kinds: Sequence[str]) -> MuseSparkTextConfig:
    """Its last layer is without rotary embedding where there are two."""
    return MuseSparkTextConfig(
        num_hidden_layers=len(kinds),
        mlp_layer_types=list(kinds),
        layer_types=["sliding_attention", *["full_attention"] * (len(kinds) - 1)],
        layer_rope_theta=[10000.0] * 3 if len(kinds) == 3 else [10000.0, 0.0],
        moe_hidden_size=32,
        num_local_experts=8,
        sliding_window=8,
        **COMMON,
    )


def qwen3() -> Qwen3MoeConfig:
    """A dense layer and a sparse one."""
    return Qwen3MoeConfig(num_hidden_layers=2, mlp_only_layers=[0], num_experts=8, norm_topk_prob=True, **COMMON)


def adapted_model(
    config: PreTrainedConfig, dtype: torch.dtype, *, dropout: float = 0.0, checkpointing: bool = False
) -> nn.Module:
    """With an adapter on everything, and routes that stay those of the first pass."""
    torch.manual_seed(0)
    family = family_of(config.model_type)
    model: Any = family.build(config, dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(rank=4, alpha=4, dropout=dropout, targets=["all_linear"])
    model = add_adapter(model, lora, resolve_targets(lora.targets, family, model), family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    chosen: dict[tuple[int, int], Tensor] = {}  # a rounding must not change a choice
    routers = [module for module in model.modules() if isinstance(module, family.router_class)]
    for index, router in enumerate(routers):
        router.replay = functools.partial(_same_routes, chosen, index)
    return model.train()


def _same_routes(chosen: dict[tuple[int, int], Tensor], index: int, live_TK: Tensor) -> Tensor:
    return chosen.setdefault((index, len(live_TK)), live_TK)


def training_step(model: nn.Module, tokens: int) -> Pass:
    """Log-probs and gradients."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, VOCABULARY, (1, tokens + 1), generator=generator)
    positions = torch.arange(tokens)[None] % 13
    out = model(input_ids=ids[:, :-1], position_ids=positions, targets=ids[:, 1:])
    out.log_probs.mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.log_probs.detach(), grads


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def assert_near(found: Pass, wanted: Pass, limit: float) -> None:
    """Log-probs and every gradient: the difference's norm over the norm."""
    assert distance(found[0], wanted[0]) < limit
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert distance(found[1][name], grad) < limit, name
