"""Model families: what a training run has to know about an architecture, in one place.

Everything that depends on the family (class, module names of each LoRA group, router, layers) is looked up here, so
that another family is one more entry and no `if` elsewhere.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MuseSparkTextConfig, PreTrainedConfig

from sparkrl.errors import CheckpointError
from sparkrl.models import muse_spark
from sparkrl.models.muse_spark_config import check_config


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """How many expert ids a token carries."""

    num_layers: int
    """Layers that route, in order."""
    top_k: int
    num_experts: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json, the flat text form first."""
    model_class: type[nn.Module]
    """Causal language model whose parameter names are the checkpoint's."""
    parse_config: Callable[[dict[str, Any]], PreTrainedConfig]
    """config.json's content to a checked text config."""
    routing: Callable[[PreTrainedConfig], RoutingShape]
    layer_class: type[nn.Module]
    """Decoder layer, the unit of sharding and of gradient checkpointing."""
    router_class: type[nn.Module]
    experts_class: type[nn.Module]
    lora_groups: dict[str, tuple[str, ...]]
    """Group name to name endings of the modules it adapts."""
    expert_parameters: tuple[str, str]
    """Endings of the fused expert weights, gate_up first; PEFT's `target_parameters`."""

    def build(self, config: PreTrainedConfig, dtype: torch.dtype, *, attention: str = "sdpa") -> nn.Module:
        """An empty model on the current default device; parameters that must stay float32 do."""
        config._attn_implementation = attention
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return self.model_class(config)
        finally:
            torch.set_default_dtype(previous)


def _parse_muse_spark(raw: dict[str, Any]) -> PreTrainedConfig:
    fields = dict(raw.get("text_config") or raw)
    # these describe the files, not the architecture
    dropped = ("architectures", "model_type", "quantization_config", "dtype", "torch_dtype", "transformers_version")
    extra = {"num_shared_experts": fields.pop("num_shared_experts", 0)}
    for name in dropped:
        fields.pop(name, None)
    try:
        config = MuseSparkTextConfig(**fields)
    except Exception as error:  # transformers' strict dataclasses raise their own types
        raise CheckpointError(f"config.json of a muse_spark model is not valid: {error}") from error
    check_config(config, extra)
    return config


def _muse_spark_routing(config: PreTrainedConfig) -> RoutingShape:
    return RoutingShape(
        num_layers=sum(kind == "sparse" for kind in config.mlp_layer_types),
        top_k=config.num_experts_per_tok,
        num_experts=config.num_local_experts,
    )


FAMILIES = (
    Family(
        name="muse_spark",
        model_types=("muse_spark_text", "muse_spark"),
        model_class=muse_spark.MuseSparkForCausalLM,
        parse_config=_parse_muse_spark,
        routing=_muse_spark_routing,
        layer_class=muse_spark.DecoderLayer,
        router_class=muse_spark.Router,
        experts_class=muse_spark.Experts,
        lora_groups={
            "attention": tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "gate", "o")),
            "latent": ("mlp.pre_expert_proj", "mlp.post_expert_proj"),
            "experts": ("mlp.experts",),
        },
        expert_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
)


def family_of(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        CheckpointError: no family knows it; lists those that exist.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = [name for family in FAMILIES for name in family.model_types]
    near = difflib.get_close_matches(model_type, known, n=1)
    raise CheckpointError(
        f"unknown model family: config.json says `model_type: {model_type}`\nknown families: {', '.join(known)}",
        hint=f"did you mean `{near[0]}`?" if near else "point `model.path` at a checkpoint of one of these families",
    )


def load_config(folder: str | Path) -> tuple[Family, PreTrainedConfig]:
    """Read a checkpoint's config.json.

    Raises:
        CheckpointError: no or broken config.json, an unknown family, or a field that breaks the family's rules.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"no config.json in {folder}", hint="set `model.path` to the folder of a checkpoint"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got: {type(raw).__name__}")
    family = family_of(str(raw.get("model_type")))
    return family, family.parse_config(raw)
