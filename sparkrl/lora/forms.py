"""An adapter's other forms on disk, each an invertible conversion of PEFT's own.

- `peft`: fused experts, one pair of factors for all of a layer's gate_up_proj and one for its down_proj, as PEFT's
  `target_parameters` writes them; what this package trains and stock PEFT and vLLM's 3D loader read.
- `peft_2d`: one pair for every expert's `gate_proj`, `up_proj` and `down_proj`, as PEFT writes them for models whose
  experts are modules of their own; what vLLM's 2D loader (Qwen3-MoE) reads.
- `vllm_native`: Muse Spark under vLLM 0.33's own module names: query, key, value and output gate fused into one module
  (rank 4R, block diagonal B, query and key rows in the order in which vLLM rotates them), latent projections as
  `pooler` and `unpooler`.

Legend: E expert, R rank, I expert width, O output rows, D head width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from sparkrl.errors import CheckpointError
from sparkrl.lora.peft_format import rank_and_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention's widths, in which alone the native form depends on the model."""

    query: int
    """Rows of q_proj, and of the output gate."""
    key: int
    """Rows of k_proj, and of v_proj."""
    dim: int
    """D."""

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Of a model's text config."""
        dim = config.head_dim
        return cls(query=config.num_attention_heads * dim, key=config.num_key_value_heads * dim, dim=dim)


Tensors = dict[str, Tensor]
Adapted = tuple[Tensors, dict[str, Any]]
"""Tensors by name, and the content of adapter_config.json."""


class Form(Enum):
    """Form of an adapter on disk."""

    peft = "peft"
    peft_2d = "peft-2d"
    vllm_native = "vllm-native"


_FUSED = re.compile(r"^(?P<at>.*\.experts)(?P<inner>\.base_layer)?\.lora_(?P<factor>[AB])\.weight$")
_SINGLE = re.compile(
    r"^(?P<at>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.lora_(?P<factor>[AB])\.weight$"
)
_PATTERNS = ("rank_pattern", "alpha_pattern")
_QKVG = ("q", "k", "v", "gate")
_NATIVE = (
    ("model.language_model.layers.", "model.layers."),
    (".mlp.pre_expert_proj.", ".feed_forward.pooler."),
    (".mlp.post_expert_proj.", ".feed_forward.unpooler."),
    (".mlp.experts.", ".feed_forward.experts."),
)
"""Beginnings and parts of names, here and in vLLM."""
_FUSED_QKV = re.compile(r"^(?P<at>.*\.self_attn)\.qkv_proj\.lora_(?P<factor>[AB])\.weight$")


def form_of(tensors: Mapping[str, Any]) -> Form:
    """The form that an adapter's names are of."""
    if any(_SINGLE.match(name) for name in tensors):
        return Form.peft_2d
    if any(_FUSED_QKV.match(name) or ".feed_forward." in name for name in tensors):
        return Form.vllm_native
    return Form.peft


def convert(tensors: Mapping[str, Tensor], config: Mapping[str, Any], form: Form, *, heads: Heads | None) -> Adapted:
    """Bring an adapter of any form into another.

    Args:
        heads: of the model; needed where `vllm_native` is on either side.
    Raises:
        CheckpointError: tensors are missing, have the wrong rank, or say something that the form cannot.
    """
    found = form_of(tensors)
    plain = (dict(tensors), dict(config)) if found is Form.peft else _TO_PEFT[found](tensors, config, heads)
    return plain if form is Form.peft else _FROM_PEFT[form](*plain, heads)


def interleave(rows_OR: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from [even | odd] halves, as the checkpoint has them, to pairs, as vLLM rotates."""
    return rows_OR.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(rows_OR.shape)


def deinterleave(rows_OR: Tensor, head_dim: int) -> Tensor:
    """Inverse of `interleave`."""
    return rows_OR.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(rows_OR.shape)


def to_2d(tensors: Mapping[str, Tensor], config: Mapping[str, Any], heads: Heads | None = None) -> Adapted:
    """`peft` to `peft_2d`. Gate and up of an expert share their A, which is written for both."""
    out: Tensors = {}
    for name, value in tensors.items():
        found = _FUSED.match(name)
        if not found:
            out[name] = value
            continue
        rank = rank_and_scale(config, name)[0]
        experts = _experts(name, value, rank, is_a=found["factor"] == "A")
        for expert, factor in enumerate(experts):
            halves = factor.chunk(2) if found["factor"] == "B" else (factor, factor)
            parts = dict(zip(("gate", "up"), halves, strict=True)) if found["inner"] else {"down": factor}
            for part, rows in parts.items():
                out[f"{found['at']}.{expert}.{part}_proj.lora_{found['factor']}.weight"] = rows.clone()
    modules = [*_modules(config, tensors), *(f"{part}_proj" for part in ("gate", "up", "down"))]
    renamed = {
        "mlp.experts.gate_up_proj": r"experts\.\d+\.(gate|up)_proj",
        "mlp.experts.down_proj": r"experts\.\d+\.down_proj",
    }
    changed = {"target_parameters": None, "target_modules": list(dict.fromkeys(modules))}
    return dict(sorted(out.items())), {**config, **changed, **_patterns(config, renamed)}


def from_2d(tensors: Mapping[str, Tensor], config: Mapping[str, Any], heads: Heads | None = None) -> Adapted:
    """Inverse of `to_2d`.

    Raises:
        CheckpointError: an expert is missing, or its gate and up do not share their A.
    """
    out: Tensors = {}
    groups: dict[str, dict[tuple[str, str], dict[int, Tensor]]] = {}
    for name, value in tensors.items():
        if found := _SINGLE.match(name):
            parts = groups.setdefault(found["at"], {})
            parts.setdefault((found["part"], found["factor"]), {})[int(found["expert"])] = value
        else:
            out[name] = value
    for at, parts in groups.items():
        num_experts = 1 + max(expert for by_expert in parts.values() for expert in by_expert)
        stacked = {}
        for part in ("gate", "up", "down"):
            for factor in "AB":
                by_expert = parts.get((part, factor), {})
                # not a set of all numbers: a name may claim any
                missing = next((expert for expert in range(num_experts) if expert not in by_expert), None)
                if missing is not None:
                    raise CheckpointError(f"the adapter lacks `{at}.{missing}.{part}_proj.lora_{factor}.weight`")
                shapes = {tuple(value.shape) for value in by_expert.values()}
                if len(shapes) > 1:
                    raise CheckpointError(f"the experts of `{at}` have different ranks or widths: {sorted(shapes)}")
                stacked[part, factor] = torch.stack([by_expert[expert] for expert in range(num_experts)])
        if not torch.equal(stacked["gate", "A"], stacked["up", "A"]):
            raise CheckpointError(
                f"gate_proj and up_proj of `{at}` have different `lora_A`; fused, they share one",
                hint="train the fused experts, or serve this adapter where experts are modules of their own",
            )
        pairs = {".base_layer": (stacked["gate", "A"], torch.cat([stacked["gate", "B"], stacked["up", "B"]], dim=1))}
        for inner, (a_ERI, b_EOR) in {**pairs, "": (stacked["down", "A"], stacked["down", "B"])}.items():
            out[f"{at}{inner}.lora_A.weight"] = a_ERI.flatten(0, 1)
            out[f"{at}{inner}.lora_B.weight"] = b_EOR.permute(1, 2, 0).flatten(1).contiguous()
    modules = [name for name in _modules(config, tensors) if name not in ("gate_proj", "up_proj", "down_proj")]
    changed = {"target_modules": modules, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    renamed = {
        r"experts\.\d+\.(gate|up)_proj": "mlp.experts.gate_up_proj",
        r"experts\.\d+\.down_proj": "mlp.experts.down_proj",
    }
    return dict(sorted(out.items())), {**config, **changed, **_patterns(config, renamed)}


def to_native(tensors: Mapping[str, Tensor], config: Mapping[str, Any], heads: Heads | None) -> Adapted:
    """`peft` to `vllm_native`.

    Raises:
        CheckpointError: a layer's adapter covers some of the four projections that vLLM fuses, but not all.
    """
    width = _needed(heads).dim
    out: Tensors = {}
    done = set()
    for name, value in tensors.items():
        at, _, rest = name.partition(".self_attn.")
        part = rest.split("_proj.")[0]
        if not rest or part not in _QKVG:
            out[_native_name(name)] = value
            continue
        if at in done:
            continue
        done.add(at)
        factors = []
        for part in _QKVG:
            names = [f"{at}.self_attn.{part}_proj.lora_{factor}.weight" for factor in "AB"]
            missing = [one for one in names if one not in tensors]
            if missing:
                raise CheckpointError(
                    f"the adapter lacks `{missing[0]}`; vLLM fuses query, key, value and output gate into one module, "
                    "so the native form needs all four",
                    hint="export it as `peft`, which the servers of this package take as it is",
                )
            factors.append((tensors[names[0]], tensors[names[1]]))
        b_parts = [interleave(b, width) if i < 2 else b for i, (_, b) in enumerate(factors)]
        fused = _native_name(f"{at}.self_attn.qkv_proj")
        out[f"{fused}.lora_A.weight"] = torch.cat([a for a, _ in factors])
        out[f"{fused}.lora_B.weight"] = torch.block_diag(*b_parts)
    modules = ["qkv_proj", "o_proj", "pooler", "unpooler", "experts", "experts.base_layer"]
    pattern = {"qkv_proj": 4 * int(config["r"])}, {"qkv_proj": 4 * config["lora_alpha"]}
    if config.get("use_rslora"):
        raise CheckpointError("an adapter with `use_rslora` has no native form: its scale would change with the rank")
    changed = {"target_modules": modules, "rank_pattern": {**(config.get("rank_pattern") or {}), **pattern[0]}}
    changed |= {"alpha_pattern": {**(config.get("alpha_pattern") or {}), **pattern[1]}}
    return dict(sorted(out.items())), {**config, **changed}


def from_native(tensors: Mapping[str, Tensor], config: Mapping[str, Any], heads: Heads | None) -> Adapted:
    """Inverse of `to_native`; `target_modules` names what the tensors are for."""
    shape, rank = _needed(heads), int(config["r"])
    widths = (shape.query, shape.key, shape.key, shape.query)
    out: Tensors = {}
    for name, value in tensors.items():
        found = _FUSED_QKV.match(name)
        if not found:
            out[_native_name(name, back=True)] = value
            continue
        at = _native_name(found["at"], back=True)
        a, b = tensors[f"{found['at']}.qkv_proj.lora_A.weight"], tensors[f"{found['at']}.qkv_proj.lora_B.weight"]
        if a.shape[0] != 4 * rank or tuple(b.shape) != (sum(widths), 4 * rank):
            raise CheckpointError(
                f"`{found['at']}.qkv_proj` has factors of {tuple(a.shape)} and {tuple(b.shape)}, expected rank "
                f"{4 * rank} and {sum(widths)} rows"
            )
        blocks = b.split(widths)
        if torch.block_diag(*(block[:, i * rank : (i + 1) * rank] for i, block in enumerate(blocks))).ne(b).any():
            raise CheckpointError(f"`{found['at']}.qkv_proj.lora_B.weight` is not block diagonal with four blocks")
        for i, (part, rows) in enumerate(zip(_QKVG, blocks, strict=True)):
            own = rows[:, i * rank : (i + 1) * rank]
            out[f"{at}.{part}_proj.lora_A.weight"] = a[i * rank : (i + 1) * rank].contiguous()
            out[f"{at}.{part}_proj.lora_B.weight"] = (deinterleave(own, shape.dim) if i < 2 else own).contiguous()
    experts = any(".experts" in name for name in out)
    changed: dict[str, Any] = {
        "target_modules": _endings(out),
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if experts else None,
    }
    kept = {key: value for key, value in config.items() if key not in _PATTERNS}
    for key in _PATTERNS:
        if pattern := {name: value for name, value in (config.get(key) or {}).items() if name != "qkv_proj"}:
            changed[key] = pattern
    return dict(sorted(out.items())), {**kept, **changed}


def _experts(name: str, value: Tensor, rank: int, *, is_a: bool) -> Tensor:
    """[E, R, in] or [E, out, R] of a fused factor."""
    packed = value.shape[0 if is_a else 1]
    if value.ndim != 2 or packed % rank:
        raise CheckpointError(f"`{name}` has shape {tuple(value.shape)}, which rank {rank} does not divide")
    if is_a:
        return value.unflatten(0, (packed // rank, rank))
    return value.unflatten(1, (rank, packed // rank)).permute(2, 0, 1)


def _modules(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[str]:
    """`target_modules` as a list; of an expression, which PEFT takes too, what it has matched."""
    modules = config.get("target_modules") or []
    return _endings(tensors) if isinstance(modules, str) else list(modules)


def _endings(names: Iterable[str]) -> list[str]:
    """The last two parts of the names of linear modules."""
    return sorted({".".join(name.split(".lora_")[0].split(".")[-2:]) for name in names if ".experts" not in name})


def _patterns(config: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for key in _PATTERNS:
        if config.get(key):
            found[key] = {renamed.get(name, name): value for name, value in config[key].items()}
    return found


def _native_name(name: str, *, back: bool = False) -> str:
    for ours, theirs in _NATIVE:
        name = name.replace(theirs, ours) if back else name.replace(ours, theirs)
    return name


def _needed(heads: Heads | None) -> Heads:
    if heads is None:
        raise CheckpointError(
            "the native form depends on the widths of the model's attention, and the model is not known",
            hint="name its checkpoint with `--model`",
        )
    return heads


_Converter = Callable[[Mapping[str, Tensor], Mapping[str, Any], "Heads | None"], Adapted]
_FROM_PEFT: dict[Form, _Converter] = {Form.peft_2d: to_2d, Form.vllm_native: to_native}
_TO_PEFT: dict[Form, _Converter] = {Form.peft_2d: from_2d, Form.vllm_native: from_native}
