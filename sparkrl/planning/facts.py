"""A model's shape, from config.json alone."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkrl.config.load import resolve_path
from sparkrl.config.schema import Config
from sparkrl.errors import CheckpointError, ConfigError
from sparkrl.planning.weights import TABLES, Weight

SHAPES = Path(__file__).parent
_FAMILIES = {"muse_spark_text": "muse_spark", "muse_spark": "muse_spark", "qwen3_moe": "qwen3_moe", "qwen3": "qwen3"}
"""`model_type` of config.json to the family."""
_PERIOD = 4
"""Layers an attention cycle of Muse Spark has; the last of each is full attention, counted from the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a plan has to know of a model."""

    family: str
    source: str
    """Where the shape was read."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of a dense layer's MLP."""
    expert_width: int
    """What an expert reads and writes: the latent width, or the hidden width where there is none; 0 without experts."""
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
    tied_head: bool
    """Whether the head is the embedding's table."""

    def weights(self, *, untied: bool = False) -> tuple[Weight, ...]:
        """Every weight of the text model.

        Args:
            untied: with a head of its own, as the trainer holds it, even where the checkpoint has one table for both.
        """
        shape = replace(self, tied_head=False) if untied else self
        return tuple(weight for weight in TABLES[self.family](shape) if weight.count)

    def parameters(self) -> dict[str, int]:
        """Parameters of each part."""
        parts: dict[str, int] = {}
        for weight in self.weights():
            parts[weight.part] = parts.get(weight.part, 0) + weight.size * weight.count
        return parts

    def active_parameters(self) -> int:
        """Parameters one token passes through, its embedding row and the head left out."""
        parts = self.parameters()
        routed = parts.get("experts", 0) * self.top_k // max(self.num_experts, 1)
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


def _object(raw: dict[str, Any], name: str, path: Path) -> dict[str, Any] | None:
    value = raw.get(name)
    if not isinstance(value, dict | None):
        raise CheckpointError(f"{path}: `{name}` must be an object, got: {value!r}")
    return value


class _Fields:
    """config.json's fields, checked as they are read."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self._text = _object(raw, "text_config", path) or raw
        self._path = path
        self.scheme = _object(raw, "quantization_config", path) or _object(self._text, "quantization_config", path)

    def number(self, name: str, other_name: str = "", *, default: int | None = None) -> int:
        """A field of config.json; transformers 5 writes some under another name than they were published with."""
        value = self._text.get(name, self._text.get(other_name, default))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._path}: `{name}` must be a positive whole number, got: {value}")
        return value

    def list_of(self, name: str) -> list[Any]:
        value = self._text.get(name) or []
        if not isinstance(value, list):
            raise CheckpointError(f"{self._path}: `{name}` must be a list, got: {value!r}")
        return value

    def per_layer(self, name: str, default: list[str]) -> list[str]:
        kinds = self.list_of(name) or default
        if len(kinds) != len(default):
            raise CheckpointError(f"{self._path}: `{name}` has {len(kinds)} entries for {len(default)} layers")
        return kinds

    def quantized(self, sparse: Sequence[int]) -> int:
        return 0 if self.scheme is None else sum(not _is_ignored(layer, self.scheme) for layer in sparse)

    def common(self) -> dict[str, Any]:
        """The fields that all families share."""
        names = {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
            "intermediate_size": "intermediate_size",
            "max_positions": "max_position_embeddings",
        }
        return {ours: self.number(theirs) for ours, theirs in names.items()} | {
            "tied_head": bool(self._text.get("tie_word_embeddings"))
        }


def _parse(raw: dict[str, Any], path: Path, *, source: str) -> ModelFacts:
    family = _FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"unknown model family: {path} says `model_type: {raw.get('model_type')}`",
            hint=f"known families: {', '.join(_FAMILIES)}",
        )
    fields = _Fields(raw, path)
    own = _muse_spark(fields) if family == "muse_spark" else _qwen3(fields, sparse=family == "qwen3_moe")
    return ModelFacts(family=family, source=source, **fields.common(), **own)


def _muse_spark(fields: _Fields) -> dict[str, Any]:
    num_layers = fields.number("num_hidden_layers")
    attention = fields.per_layer(
        "layer_types",
        ["sliding_attention" if (num_layers - 1 - i) % _PERIOD else "full_attention" for i in range(num_layers)],
    )
    feed_forward = fields.per_layer("mlp_layer_types", ["sparse"] * num_layers)
    sparse = [layer for layer, kind in enumerate(feed_forward) if kind == "sparse"]
    return {
        "expert_width": fields.number("moe_hidden_size"),
        "moe_intermediate_size": fields.number("moe_intermediate_size"),
        "num_experts": fields.number("num_local_experts"),
        "top_k": fields.number("num_experts_per_tok"),
        "sliding_window": fields.number("sliding_window"),
        "full_layers": sum(kind == "full_attention" for kind in attention),
        "sliding_layers": sum(kind != "full_attention" for kind in attention),
        "sparse_layers": len(sparse),
        "quantized_layers": fields.quantized(sparse),
    }


def _qwen3(fields: _Fields, *, sparse: bool) -> dict[str, Any]:
    num_layers = fields.number("num_hidden_layers")
    attention = {"sliding_window": 0, "full_layers": num_layers, "sliding_layers": 0}
    if not sparse:
        absent = ("expert_width", "moe_intermediate_size", "num_experts", "top_k", "sparse_layers", "quantized_layers")
        return attention | dict.fromkeys(absent, 0)
    step, dense = fields.number("decoder_sparse_step", default=1), fields.list_of("mlp_only_layers")
    routed = [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense]
    return attention | {
        "expert_width": fields.number("hidden_size"),
        "moe_intermediate_size": fields.number("moe_intermediate_size"),
        "num_experts": fields.number("num_experts", "num_local_experts"),
        "top_k": fields.number("num_experts_per_tok"),
        "sparse_layers": len(routed),
        "quantized_layers": fields.quantized(routed),
    }


def _is_ignored(layer: int, scheme: dict[str, Any]) -> bool:
    """Whether ModelOpt's ignore list leaves this layer's experts in BF16, under the names either library gives them."""
    names = [
        f"{prefix}.layers.{layer}.{block}.experts"
        for prefix in ("model", "model.language_model", "language_model.model")
        for block in ("mlp", "feed_forward")
    ]
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in scheme.get("ignore") or [])
