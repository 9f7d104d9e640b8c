"""A model's shape and its weights, from config.json alone.

Legend of shapes: V vocabulary, H hidden width, Z latent width, I expert width, E experts, D head width.
Source of names and shapes: transformers/models/muse_spark of transformers 5.20.2, whose default config is the
published model's.
"""

from __future__ import annotations

import fnmatch
import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from sparkrl.config.load import resolve_path
from sparkrl.config.schema import Config
from sparkrl.errors import CheckpointError, ConfigError

SHAPES = Path(__file__).parent
_MODEL_TYPES = ("muse_spark_text", "muse_spark")
_BLOCK = 16
"""Values that share one NVFP4 scale byte."""
_PERIOD = 4
"""Layers an attention cycle has; the last of each is full attention, counted from the end."""


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
    stored: Stored
    split: Split

    @property
    def size(self) -> int:
        """Parameters in one layer."""
        return math.prod(self.shape)

    def bytes_as(self, stored: Stored, *, plain_bytes: int = 2) -> float:
        """Bytes in one layer, held as `stored`; `plain_bytes` is the width of what is neither float32 nor packed."""
        if stored is Stored.nvfp4:
            # nibbles, one scale byte a block, and two float32 factors a tensor (gate and up have their own)
            halves = 2 if self.name.endswith("gate_up_proj") else 1
            return self.size / 2 + self.size / _BLOCK + 8 * self.shape[0] * halves
        return self.size * (4 if stored is Stored.fp32 else plain_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a plan has to know of a model."""

    source: str
    """Where the shape was read."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    latent_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    sliding_window: int
    max_positions: int
    full_layers: int
    sliding_layers: int
    sparse_layers: int
    quantized_layers: int
    """Sparse layers whose experts are NVFP4 in the checkpoint."""

    def weights(self) -> tuple[Weight, ...]:
        """Every weight of the text model."""
        hidden, latent, inner, experts = (
            self.hidden_size,
            self.latent_size,
            self.moe_intermediate_size,
            self.num_experts,
        )
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        every, sparse = self.num_layers, self.sparse_layers
        dense, plain = every - sparse, sparse - self.quantized_layers

        def weight(part: str, name: str, shape: tuple[int, ...], count: int, **kinds: Any) -> Weight:
            stored, split = kinds.get("stored", Stored.bf16), kinds.get("split", Split.none)
            return Weight(part=part, name=name, shape=shape, count=count, stored=stored, split=split)

        gate_up, down = (experts, 2 * inner, latent), (experts, latent, inner)
        fp4, fp32 = Stored.nvfp4, Stored.fp32
        found = (
            weight("embedding", "embed_tokens.weight", (self.vocab_size, hidden), 1, split=Split.vocab),
            weight("head", "lm_head.weight", (self.vocab_size, hidden), 1, split=Split.vocab),
            weight("attention", "q_proj.weight", (query, hidden), every, split=Split.heads),
            weight("attention", "k_proj.weight", (key_value, hidden), every, split=Split.kv_heads),
            weight("attention", "v_proj.weight", (key_value, hidden), every, split=Split.kv_heads),
            weight("attention", "gate_proj.weight", (query, hidden), every, split=Split.heads),
            weight("attention", "o_proj.weight", (hidden, query), every, split=Split.heads),
            weight("latent", "pre_expert_proj.weight", (latent, hidden), sparse),
            weight("latent", "post_expert_proj.weight", (hidden, latent), sparse),
            weight("router", "gate.weight", (experts, hidden), sparse, stored=fp32),
            weight("router", "gate.e_score_correction_bias", (experts,), sparse, stored=fp32),
            weight("experts", "experts.gate_up_proj", gate_up, self.quantized_layers, stored=fp4, split=Split.experts),
            weight("experts", "experts.down_proj", down, self.quantized_layers, stored=fp4, split=Split.experts),
            weight("experts", "experts.gate_up_proj", gate_up, plain, split=Split.experts),
            weight("experts", "experts.down_proj", down, plain, split=Split.experts),
            weight("dense", "mlp.gate_proj.weight", (self.intermediate_size, hidden), dense, split=Split.inner),
            weight("dense", "mlp.up_proj.weight", (self.intermediate_size, hidden), dense, split=Split.inner),
            weight("dense", "mlp.down_proj.weight", (hidden, self.intermediate_size), dense, split=Split.inner),
            weight("norms and gates", "input_layernorm.weight", (hidden,), every),
            weight("norms and gates", "pre_feedforward_layernorm.weight", (hidden,), every),
            weight("norms and gates", "post_feedforward_layernorm.weight", (hidden,), every),
            weight("norms and gates", "post_attention_residual_gate.gate", (hidden,), every, stored=fp32),
            weight("norms and gates", "post_feedforward_residual_gate.gate", (hidden,), every, stored=fp32),
            weight("norms and gates", "pre_expert_norm.weight", (latent,), sparse),
            weight("norms and gates", "experts.post_expert_norm.weight", (latent,), sparse),
            weight("norms and gates", "norm.weight", (hidden,), 1),
        )
        return tuple(weight for weight in found if weight.count)

    def parameters(self) -> dict[str, int]:
        """Parameters of each part."""
        parts: dict[str, int] = {}
        for weight in self.weights():
            parts[weight.part] = parts.get(weight.part, 0) + weight.size * weight.count
        return parts

    def active_parameters(self) -> int:
        """Parameters one token passes through, its embedding row and the head left out."""
        parts = self.parameters()
        routed = parts.get("experts", 0) * self.top_k // self.num_experts
        return routed + sum(n for part, n in parts.items() if part not in ("experts", "embedding", "head"))

    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors of the text checkpoint, headers left out."""
        return round(sum(weight.bytes_as(weight.stored) * weight.count for weight in self.weights()))

    def kv_bytes(self, num_tokens: int, *, element_bytes: int = 2, num_gpus: int = 1) -> dict[str, int]:
        """Key-value cache of one sequence on each of `num_gpus`, full and sliding layers apart, bytes."""
        heads = -(-self.num_kv_heads // num_gpus)
        per_token = 2 * heads * self.head_dim * element_bytes
        return {
            "full": self.full_layers * num_tokens * per_token,
            "sliding": self.sliding_layers * min(num_tokens, self.sliding_window) * per_token,
        }

    def kv_share(self, num_tokens: int) -> float:
        """Key-value cache of a sequence over what it would be if every layer were full attention."""
        return sum(self.kv_bytes(num_tokens).values()) / (
            self.num_layers * num_tokens * 2 * self.num_kv_heads * self.head_dim * 2
        )


def read_facts(config: Config) -> ModelFacts:
    """The shape of `model.path`, or of `model.shape` where that path is not on this machine.

    Raises:
        ConfigError: neither is there.
        CheckpointError: config.json is damaged, of another family, or lacks a field.
    """
    try:
        path = resolve_path(config.model.path, key="model.path") / "config.json"
    except ConfigError as error:
        shape = config.model.shape
        if shape is None:
            raise
        path = SHAPES / f"{shape}.json"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
            raise ConfigError(f"no published shape named `{shape}`; there are: {known}") from error
        return _parse(_read(path), path, source=f"published shape `{shape}`; {config.model.path} is not here")
    return _parse(_read(path), path, source=str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}", hint="set `model.path`") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got: {type(raw).__name__}")
    return raw


def _parse(raw: dict[str, Any], path: Path, *, source: str) -> ModelFacts:
    if raw.get("model_type") not in _MODEL_TYPES:
        raise CheckpointError(
            f"unknown model family: {path} says `model_type: {raw.get('model_type')}`",
            hint=f"known families: {', '.join(_MODEL_TYPES)}",
        )
    text = raw.get("text_config") or raw
    scheme = raw.get("quantization_config") or text.get("quantization_config")

    def number(name: str) -> int:
        value = text.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{path}: `{name}` must be a positive whole number, got: {value}")
        return value

    num_layers = number("num_hidden_layers")
    attention = text.get("layer_types") or [
        "sliding_attention" if (num_layers - 1 - layer) % _PERIOD else "full_attention" for layer in range(num_layers)
    ]
    feed_forward = text.get("mlp_layer_types") or ["sparse"] * num_layers
    for name, kinds in (("layer_types", attention), ("mlp_layer_types", feed_forward)):
        if len(kinds) != num_layers:
            raise CheckpointError(f"{path}: `{name}` has {len(kinds)} entries for {num_layers} layers")
    sparse = [layer for layer, kind in enumerate(feed_forward) if kind == "sparse"]
    quantized = [] if scheme is None else [layer for layer in sparse if not _is_ignored(layer, scheme)]
    return ModelFacts(
        source=source,
        vocab_size=number("vocab_size"),
        hidden_size=number("hidden_size"),
        num_layers=num_layers,
        num_heads=number("num_attention_heads"),
        num_kv_heads=number("num_key_value_heads"),
        head_dim=number("head_dim"),
        intermediate_size=number("intermediate_size"),
        latent_size=number("moe_hidden_size"),
        moe_intermediate_size=number("moe_intermediate_size"),
        num_experts=number("num_local_experts"),
        top_k=number("num_experts_per_tok"),
        sliding_window=number("sliding_window"),
        max_positions=number("max_position_embeddings"),
        full_layers=sum(kind == "full_attention" for kind in attention),
        sliding_layers=sum(kind != "full_attention" for kind in attention),
        sparse_layers=len(sparse),
        quantized_layers=len(quantized),
    )


def _is_ignored(layer: int, scheme: dict[str, Any]) -> bool:
    """Whether ModelOpt's ignore list leaves this layer's experts in BF16, under the names either library gives them."""
    names = [
        f"{prefix}.layers.{layer}.{block}.experts"
        for prefix in ("model", "model.language_model", "language_model.model")
        for block in ("mlp", "feed_forward")
    ]
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in scheme.get("ignore") or [])
