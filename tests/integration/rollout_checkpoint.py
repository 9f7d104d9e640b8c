"""A tiny random Muse Spark checkpoint, and transformers' own model over it as an independent reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel
from word_tokenizer import tokenizer_files

from sparkrl.quant.checkpoint import write_checkpoint
from sparkrl.quant.nvfp4 import quantize
from sparkrl.types import Adapter, Problem

VOCAB, LAYERS, EXPERTS, TOP_K = 96, 5, 8, 2
SPARSE = [0, 2, 3, 4]
"""Layer 1 is dense, so routes must leave it out."""
QUANTIZED = [2, 3]
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_hidden_size": 32,
    "moe_intermediate_size": 48,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "routed_scaling_factor": 1.3,
    "output_multiplier": 0.7,
    "qk_scale_factor": 2.0,
    "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"],
    "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0.0, 10000.0],
    "mlp_layer_types": ["sparse" if i in SPARSE else "dense" for i in range(LAYERS)],
    "sliding_window": 16,
    "final_logit_softcapping": 20.0,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_PREFIX = "model.language_model."


def build(folder: Path) -> Path:
    """Write the checkpoint; layers 2 and 3 hold NVFP4 experts with scales that are no powers of two."""
    torch.manual_seed(0)
    model = MuseSparkTextModel(MuseSparkTextConfig(**FIELDS))
    random = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {"lm_head.weight": (torch.randn(VOCAB, 64, generator=random) * 0.4).bfloat16()}
    for name, value in model.state_dict().items():
        if "inv_freq" in name:
            continue
        noise = torch.randn(value.shape, generator=random)
        fp32 = name.endswith((".gate", "mlp.gate.weight", "e_score_correction_bias"))
        if name.endswith("e_score_correction_bias"):
            value = noise * 0.05
        elif value.ndim >= 2:
            value = noise * value.shape[-1] ** -0.5
        else:
            value = (1.0 if name == "norm.weight" else 0.0) + noise * 0.2
        if name == "embed_tokens.weight":
            value = noise
        tensors[_PREFIX + name] = value if fp32 else value.bfloat16()
    for layer in QUANTIZED:
        for part in ("gate_up_proj", "down_proj"):
            name = f"{_PREFIX}layers.{layer}.mlp.experts.{part}"
            weight = tensors.pop(name)
            if part == "gate_up_proj":
                halves = [quantize(half, power_of_two=False) for half in weight.chunk(2, dim=1)]
                packed = torch.cat([half.packed for half in halves], dim=1)
                blocks = torch.cat([half.block_scale for half in halves], dim=1)
                scale = torch.stack([half.global_scale for half in halves], dim=1)
            else:
                packed, blocks, scale = quantize(weight, power_of_two=False)
            tensors |= {name: packed, f"{name}_weight_scale": blocks, f"{name}_weight_scale_2": scale}
            tensors[f"{name}_input_scale"] = torch.ones_like(scale)
    ignored = [f"model.layers.{i}.mlp*" for i in range(LAYERS) if i not in QUANTIZED]
    config = {
        **FIELDS,
        "architectures": ["MuseSpark1xForCausalLM"],
        "model_type": "muse_spark_text",
        "num_shared_experts": 0,
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_scheme": None,
            "ignore": ["lm_head", *ignored],
        },
    }
    generation = json.dumps({"eos_token_id": 1, "pad_token_id": 0})
    files = {**tokenizer_files(VOCAB), "generation_config.json": generation}
    write_checkpoint(folder, tensors, config, files=files)
    return folder


def dequantized(folder: Path) -> dict[str, Tensor]:
    """Every logical tensor in float32, NVFP4 decoded with numpy in float64 and rounded to bfloat16."""
    stored = load_file(folder / "model.safetensors")
    out = {}
    for name, value in stored.items():
        if name.endswith(("_weight_scale", "_weight_scale_2", "_input_scale")):
            continue
        if value.dtype != torch.uint8:
            out[name] = value.float()
            continue
        codes = value.numpy()
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        numbers = _MAGNITUDES[nibbles & 7] * np.where(nibbles & 8, -1.0, 1.0)
        blocks = stored[f"{name}_weight_scale"].float().numpy().astype(np.float64).repeat(16, axis=-1)
        scale = stored[f"{name}_weight_scale_2"].numpy().astype(np.float64)
        per_row = scale.repeat(codes.shape[1] // 2, axis=1) if scale.ndim == 2 else scale[:, None]
        out[name] = torch.from_numpy(numbers * blocks * per_row[..., None]).bfloat16().float()
    return out


class _Reference(nn.Module):
    """transformers' decoder under the checkpoint's names."""

    def __init__(self) -> None:
        super().__init__()
        config = MuseSparkTextConfig(**FIELDS)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        self.model = nn.Module()
        self.model.language_model = MuseSparkTextModel(config)
        self.lm_head = nn.Linear(64, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.language_model(ids, use_cache=False).last_hidden_state
        cap = FIELDS["final_logit_softcapping"]
        return cap * torch.tanh(self.lm_head(hidden) * FIELDS["output_multiplier"] / cap)


def reference(folder: Path, adapter: Adapter | None = None) -> nn.Module:
    """transformers in float32; with an adapter, put on by PEFT."""
    model = _Reference().eval()
    model.load_state_dict(dequantized(folder), strict=False)
    if adapter is None:
        return model
    linear = ["q_proj", "k_proj", "v_proj", "self_attn.gate_proj", "o_proj", "pre_expert_proj", "post_expert_proj"]
    linear += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]  # of the dense layer
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=adapter.config["r"],
            lora_alpha=adapter.config["lora_alpha"],
            target_modules=linear,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    tensors = {}
    for spec in adapter.manifest:
        raw = adapter.buffer[spec.offset : spec.offset + 4 * int(np.prod(spec.shape))]
        tensors[spec.name] = torch.from_numpy(raw.copy().view(np.float32)).reshape(spec.shape)
    unused = set_peft_model_state_dict(wrapped, tensors).unexpected_keys
    assert not unused, unused
    return wrapped.eval()


@torch.no_grad()
def score(
    model: nn.Module, prompt_ids: np.ndarray, token_ids: np.ndarray, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """float32 [T] log-probs of the response, and int64 [P + T - 1, L, K] sorted expert ids."""
    routers = [layer.mlp.gate for layer in _decoder(model).layers if hasattr(layer.mlp, "gate")]
    chosen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda module, args, out: chosen.append(out[2])) for router in routers]
    ids = torch.from_numpy(np.concatenate([prompt_ids, token_ids]).astype(np.int64))[None]
    log_probs = (model(ids)[0] / temperature).log_softmax(-1)
    for hook in hooks:
        hook.remove()
    first = len(prompt_ids) - 1
    picked = log_probs[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0]
    return picked.numpy(), torch.stack(chosen, 1)[:-1].sort(-1).values.numpy()


def _decoder(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if isinstance(module, MuseSparkTextModel))


def problems(num: int, *, length: int = 20, seed: int = 0) -> list[Problem]:
    """Random prompts of slightly different lengths."""
    random = np.random.default_rng(seed)
    return [
        Problem(
            uid=f"s{seed}-{i}",
            messages=(),
            answer="",
            data_source="random",
            prompt_ids=random.integers(2, VOCAB, length + i % 3, dtype=np.int32),
        )
        for i in range(num)
    ]
