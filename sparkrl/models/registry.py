"""Model families: what a training run has to know about an architecture, in one place.

Everything that depends on the family (class, module names of each LoRA group, router, layers) is looked up here, so
that another family is one more entry and no `if` elsewhere.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MuseSparkTextConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from sparkrl.errors import CheckpointError, UnknownFamilyError
from sparkrl.models import muse_spark, muse_spark_config, qwen3, qwen3_config, qwen3_moe


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """How many expert ids a token carries; all 0 for a dense model, whose routes are arrays without content."""

    layers: tuple[int, ...] = ()
    """Indices of the layers that route, in order: the L of every routes array."""
    top_k: int = 0
    num_experts: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)


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
    lora_groups: dict[str, tuple[str, ...]]
    """Group name to name endings of the modules it adapts, what the server can carry."""
    router_class: type[nn.Module] | None = None
    """None for a dense family, as the next."""
    experts_class: type[nn.Module] | None = None
    expert_parameters: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    """Endings of the fused expert weights, gate_up first; PEFT's `target_parameters`."""
    run_on: tuple[str, ...] = ("cpu",)
    """Devices that the whole loop has been run on; elsewhere it is written, and the start-up proofs have to hold."""
    prefixes: tuple[str, ...] = ("model.", "lm_head.")
    """Beginnings of the names of this model's own tensors; others (towers) in a checkpoint are left alone."""
    tied: tuple[tuple[str, str], ...] = ()
    """With `tie_word_embeddings`: parameter, and the tensor it is read from."""

    def is_experts(self, module: nn.Module) -> bool:
        """Whether a module holds a layer's routed experts."""
        return self.experts_class is not None and isinstance(module, self.experts_class)

    def stored_name(self, name: str, config: PreTrainedConfig) -> str:
        """Name in the checkpoint of a parameter of `model_class`."""
        return dict(self.tied).get(name, name) if config.tie_word_embeddings else name

    def build(self, config: PreTrainedConfig, dtype: torch.dtype, *, attention: str = "sdpa") -> nn.Module:
        """An empty model on the current default device; parameters that must stay float32 do."""
        config = copy.deepcopy(config)
        config._attn_implementation = attention
        config._experts_implementation = "eager"  # transformers' own; the families here have theirs
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return self.model_class(config)
        finally:
            torch.set_default_dtype(previous)

    def shapes(self, config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
        """Shape of everything that a model of this config keeps in checkpoints, by name; takes no memory.

        Parameters that are tied to another one are left out.

        Raises:
            CheckpointError: no model can be built from the config.
        """
        try:
            with torch.device("meta"):
                model = self.build(config, torch.bfloat16)
        except Exception as error:  # whatever sizes that contradict each other raise in torch or transformers
            raise CheckpointError(
                f"config.json describes no {self.name} model that can be built: {error}", hint="download it again"
            ) from error
        found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        return {name: shape for name, shape in found.items() if self.stored_name(name, config) == name}


# these describe the files, not the architecture
_OF_FILES = ("architectures", "model_type", "quantization_config", "dtype", "torch_dtype", "transformers_version")

_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "moe_hidden_size", "decoder_sparse_step",
)  # fmt: skip
"""Sizes and counts; transformers takes 0, -1 and null for many of them, and the model fails as it is built."""


def _parse(config_class: type[PreTrainedConfig], fields: dict[str, Any], family: str) -> Any:
    kept = {name: value for name, value in fields.items() if name not in _OF_FILES}
    try:
        config = config_class(**kept)
    except Exception as error:  # transformers' strict dataclasses raise their own types
        raise CheckpointError(f"config.json of a {family} model is not valid: {error}") from error
    for name in _POSITIVE:
        value = getattr(config, name, 1)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"config.json: `{name}` of a {family} model must be a positive whole number, got: {value!r}"
            )
    return config


def _parse_muse_spark(raw: dict[str, Any]) -> PreTrainedConfig:
    nested = raw.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError(f"`text_config` in config.json must be an object, got: {nested!r}")
    fields = dict(raw if nested is None else nested)
    extra = {"num_shared_experts": fields.pop("num_shared_experts", 0)}
    config = _parse(MuseSparkTextConfig, fields, "muse_spark")
    muse_spark_config.check_config(config, extra)
    return config


def _parse_qwen3(raw: dict[str, Any]) -> PreTrainedConfig:
    config = _parse(Qwen3Config, raw, "qwen3")
    qwen3_config.check_config(config)
    return config


def _parse_qwen3_moe(raw: dict[str, Any]) -> PreTrainedConfig:
    config = _parse(Qwen3MoeConfig, raw, "qwen3_moe")
    qwen3_config.check_config(config)
    return config


def _muse_spark_routing(config: PreTrainedConfig) -> RoutingShape:
    return RoutingShape(
        layers=tuple(layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "sparse"),
        top_k=config.num_experts_per_tok,
        num_experts=config.num_local_experts,
    )


def _qwen3_moe_routing(config: Any) -> RoutingShape:
    return RoutingShape(
        layers=tuple(layer for layer in range(config.num_hidden_layers) if qwen3_moe.is_sparse(config, layer)),
        top_k=config.num_experts_per_tok,
        num_experts=config.num_experts,
    )


def _no_routing(config: PreTrainedConfig) -> RoutingShape:
    return RoutingShape()


_DENSE_MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
_QWEN3_ATTENTION = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o"))
_TIED_HEAD = (("lm_head.weight", "model.embed_tokens.weight"),)

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
            "mlp": _DENSE_MLP,
        },
        prefixes=("model.language_model.", "lm_head."),
        run_on=("cpu", "cuda"),
    ),
    Family(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        model_class=qwen3.Qwen3ForCausalLM,
        parse_config=_parse_qwen3_moe,
        routing=_qwen3_moe_routing,
        layer_class=qwen3.DecoderLayer,
        router_class=qwen3_moe.Router,
        experts_class=qwen3_moe.Experts,
        # not the MLP of its dense layers: PEFT takes every `gate_proj` of this family for an expert's
        lora_groups={"attention": _QWEN3_ATTENTION, "experts": ("mlp.experts",)},
        tied=_TIED_HEAD,
    ),
    Family(
        name="qwen3",
        model_types=("qwen3",),
        model_class=qwen3.Qwen3ForCausalLM,
        parse_config=_parse_qwen3,
        routing=_no_routing,
        layer_class=qwen3.DecoderLayer,
        lora_groups={"attention": _QWEN3_ATTENTION, "mlp": _DENSE_MLP},
        tied=_TIED_HEAD,
    ),
)


def family_of(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        UnknownFamilyError: no family knows it; lists those that exist.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = [name for family in FAMILIES for name in family.model_types]
    near = difflib.get_close_matches(model_type, known, n=1)
    raise UnknownFamilyError(
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
