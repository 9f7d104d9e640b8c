"""A random, calm Muse Spark in NVFP4 for measurements on a GPU, and transformers' own model over it as the reference.

Legend: B sequence, T token, L layer, K routed slot, E expert, R rank.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from transformers import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel

from sparkrl.quant.checkpoint import CheckpointReader, write_checkpoint
from sparkrl.quant.nvfp4 import quantize
from sparkrl.rollout.probe import make_adapter
from sparkrl.types import Adapter, Problem

_PREFIX = "model.language_model."


def shape(
    *,
    layers: int = 8,
    hidden: int = 512,
    latent: int = 256,
    inner: int = 256,
    experts: int = 32,
    top_k: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
) -> dict[str, Any]:
    """Text config of a small model; every fourth layer attends to everything, counted from the end."""
    full = [(layers - 1 - i) % 4 == 0 for i in range(layers)]
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "intermediate_size": 2 * hidden,
        "moe_hidden_size": latent,
        "moe_intermediate_size": inner,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "routed_scaling_factor": 1.0,
        "output_multiplier": 0.5**0.5,
        "qk_scale_factor": 2.0,
        "layer_types": ["full_attention" if f else "sliding_attention" for f in full],
        "layer_rope_theta": [0.0 if f else 500000.0 for f in full],
        "mlp_layer_types": ["sparse"] * layers,
        "sliding_window": 64,
        "residual_gate_temperature": 0.3,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "final_logit_softcapping": 20.0,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def large() -> dict[str, Any]:
    """Text config of 2.8B parameters, 0.6B of them active: the published model's proportions at an eighth of its width
    and a fifth of its depth."""
    return shape(layers=12, hidden=2048, latent=1024, inner=1024, experts=64, top_k=8, kv_heads=4, vocab=32768)


def num_parameters(fields: Mapping[str, Any]) -> dict[str, int]:
    """Parameters of a model of sparse layers: all, and those that one token uses, its embedding left out."""
    hidden, latent, inner = fields["hidden_size"], fields["moe_hidden_size"], fields["moe_intermediate_size"]
    q, kv = (fields[f"num_{n}_heads"] * fields["head_dim"] for n in ("attention", "key_value"))
    shared = hidden * (3 * q + 2 * kv) + 2 * hidden * latent + fields["num_local_experts"] * hidden
    expert, head = 3 * latent * inner, fields["vocab_size"] * hidden
    layers = fields["num_hidden_layers"]
    return {
        "all": layers * (shared + fields["num_local_experts"] * expert) + 2 * head,
        "active": layers * (shared + fields["num_experts_per_tok"] * expert) + head,
    }


def build(
    folder: Path,
    fields: Mapping[str, Any],
    *,
    tokenizer: Path,
    nvfp4: bool = True,
    seed: int = 7,
    device: str = "cpu",
) -> Path:
    """Write a checkpoint whose middle layers' experts are NVFP4, or their exact BF16 values.

    Experts share most of their weights, so that another choice near a tie moves the output little, as in a trained
    model. Up and gate halves get different global scales.

    Args:
        tokenizer: folder whose tokenizer files are taken along.
        device: where the numbers are drawn; each has its own.
    """
    random = torch.Generator(device).manual_seed(seed)

    def noise(*size: int, std: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=random, device=device) * std

    layers, hidden, latent = fields["num_hidden_layers"], fields["hidden_size"], fields["moe_hidden_size"]
    inner, experts, vocab = fields["moe_intermediate_size"], fields["num_local_experts"], fields["vocab_size"]
    q, kv = (fields[f"num_{n}_heads"] * fields["head_dim"] for n in ("attention", "key_value"))
    narrow = (512 / hidden) ** 0.5
    out: dict[str, Tensor] = {
        f"{_PREFIX}embed_tokens.weight": noise(vocab, hidden).bfloat16(),
        f"{_PREFIX}norm.weight": (1 + noise(hidden, std=0.1)).bfloat16(),
        "lm_head.weight": noise(vocab, hidden, std=0.1 * narrow).bfloat16(),
    }
    for layer in range(layers):
        at = f"{_PREFIX}layers.{layer}."
        linear = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "gate": (q, hidden), "o": (hidden, q)}
        for name, (rows, width) in linear.items():
            out[f"{at}self_attn.{name}_proj.weight"] = noise(rows, width, std=width**-0.5).bfloat16()
        for name in ("input_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            out[f"{at}{name}.weight"] = noise(hidden, std=0.1).bfloat16()
        for name in ("post_attention_residual_gate", "post_feedforward_residual_gate"):
            out[f"{at}{name}.gate"] = noise(hidden, std=0.15) - 0.2
        out[f"{at}mlp.gate.weight"] = noise(experts, hidden, std=0.12 * narrow)
        out[f"{at}mlp.gate.e_score_correction_bias"] = noise(experts, std=0.03)
        out[f"{at}mlp.pre_expert_proj.weight"] = noise(latent, hidden, std=hidden**-0.5).bfloat16()
        out[f"{at}mlp.pre_expert_norm.weight"] = noise(latent, std=0.1).bfloat16()
        out[f"{at}mlp.post_expert_proj.weight"] = noise(hidden, latent, std=latent**-0.5).bfloat16()
        out[f"{at}mlp.experts.post_expert_norm.weight"] = noise(latent, std=0.1).bfloat16()
        up_gain = torch.exp2(torch.randint(-2, 3, (experts, 1, 1), generator=random, device=device).float())
        for name, (rows, width) in {"gate_up": (2 * inner, latent), "down": (latent, inner)}.items():
            weight = 0.9 * noise(1, rows, width) + 0.436 * noise(experts, rows, width)
            weight = weight * width**-0.5
            if name == "gate_up":
                weight[:, inner:] *= up_gain
            full = f"{at}mlp.experts.{name}_proj"
            if not 0 < layer < layers - 1:
                out[full] = weight.bfloat16()
                continue
            halves = weight.view(experts, 2, inner, width) if name == "gate_up" else weight
            packed, blocks, scale = quantize(halves)
            out[full] = packed.view(experts, rows, -1)
            out[f"{full}_weight_scale"] = blocks.view(experts, rows, -1)
            out[f"{full}_weight_scale_2"] = scale
            out[f"{full}_input_scale"] = torch.ones_like(scale)
    files = {path.name: path.read_text() for path in tokenizer.glob("tokenizer*.json")}
    files["generation_config.json"] = json.dumps({"eos_token_id": 1, "pad_token_id": 0})
    config = {
        "architectures": ["MuseSpark1xForCausalLM"],
        "model_type": "muse_spark_text",
        **fields,
        "num_shared_experts": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    out = {name: tensor.cpu() for name, tensor in out.items()}
    write_checkpoint(folder, out, config | {"quantization_config": _quantization(layers)}, files=files)
    if not nvfp4:
        reader = CheckpointReader(folder)
        plain = {name: reader.read(name).clone() for name in reader.names}
        write_checkpoint(folder, plain, config, files=files, overwrite=True)
    return folder


def _quantization(layers: int) -> dict[str, Any]:
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    plain = [f"model.layers.{i}.self_attn*" for i in range(layers)]
    plain += [f"model.layers.{i}.feed_forward.{n}" for i in range(layers) for n in ("router", "pooler", "unpooler")]
    plain += [f"model.layers.{i}.feed_forward*" for i in (0, layers - 1)]
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *plain],
        "config_groups": {"group_0": {"input_activations": group, "weights": group, "targets": ["Linear"]}},
    }


def adapter(
    fields: Mapping[str, Any], *, rank: int = 32, b_std: float = 0.01, version: int = 1, seed: int = 3
) -> Adapter:
    """A random adapter on everything, rounded to bfloat16 values so that every side holds the same numbers."""
    made = make_adapter(
        MuseSparkTextConfig(**fields), rank=rank, alpha=2 * rank, b_std=b_std, seed=seed, version=version
    )
    rounded = torch.from_numpy(made.buffer.view(np.float32).copy()).bfloat16().float().numpy().view(np.uint8)
    return dataclasses.replace(made, buffer=rounded, checksum=xxhash.xxh3_64_hexdigest(rounded))


def prompts(num: int, vocabulary: int, *, length: int) -> list[Problem]:
    """Random prompts of `length` tokens, equal at every call."""
    random = np.random.default_rng(1)
    return [
        Problem(
            uid=f"r{i}",
            messages=(),
            answer="",
            data_source="random",
            prompt_ids=random.integers(2, vocabulary, length, dtype=np.int32),
        )
        for i in range(num)
    ]


def gap(reference: Tensor, served: Tensor) -> dict[str, float]:
    """k3 and the size of the difference between two sets of log-probs of the same tokens, nats."""
    delta = (reference - served).double().flatten()
    size = delta.abs()
    return {
        "k3": (torch.expm1(delta) - delta).mean().item(),
        "dlogp_mean": size.mean().item(),
        "dlogp_p999": size.quantile(0.999).item(),
        "dlogp_max": size.max().item(),
    }


class Reference:
    """transformers in float32, the adapter merged into the weights as PEFT would merge it.

    Args:
        folder: the checkpoint.
        fields: its text config.
        adapter: None scores the base model.
    """

    def __init__(self, folder: Path, fields: Mapping[str, Any], adapter: Adapter | None, device: str = "cuda") -> None:
        config = MuseSparkTextConfig(**fields)
        config._attn_implementation, config._experts_implementation = "sdpa", "eager"
        self.config, self.device = config, device
        reader = CheckpointReader(folder)
        weights = {name: reader.read(name).to(device).float() for name in reader.names}
        if adapter is not None:
            _merge(weights, adapter, fields["num_local_experts"], device)
        with torch.device(device):
            self.body = MuseSparkTextModel(config).float().eval()
        body = {name.removeprefix(_PREFIX): w for name, w in weights.items() if name.startswith(_PREFIX)}
        missing, unexpected = self.body.load_state_dict(body, strict=False)
        assert not unexpected and not missing, (missing, unexpected)
        self.head_VH = weights["lm_head.weight"]
        self._routes_BTLK: Tensor | None = None
        for index, layer in enumerate(self.body.layers):
            self._hook(layer.mlp.gate, index)

    def _hook(self, gate: Any, index: int) -> None:
        live = type(gate).forward

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, ids = live(gate, hidden)
            if self._routes_BTLK is not None:
                ids = self._routes_BTLK[:, :, index].reshape(-1, gate.top_k)
                picked = torch.sigmoid(logits).gather(1, ids)
                weights = picked / (picked.sum(-1, keepdim=True) + gate.norm_topk_prob_eps) * gate.routed_scaling_factor
            return logits, weights, ids

        gate.forward = forward

    def head(self, hidden: Tensor) -> Tensor:
        """Output of the language-model head, before multiplier and cap."""
        return hidden @ self.head_VH.T

    @torch.no_grad()
    def score(self, ids_BT: Tensor, num_prompt: int, routes_BTLK: Tensor | None) -> Tensor:
        """float32 [B, T - num_prompt] log-probs, nats; `routes_BTLK` are replayed, None routes live."""
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        self._routes_BTLK = None if routes_BTLK is None else routes_BTLK.to(self.device).long()
        ids_BT = ids_BT.to(self.device)
        hidden = self.body(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state[:, num_prompt - 1 :]
        cap = self.config.final_logit_softcapping
        logits = cap * torch.tanh(self.head(hidden) * self.config.output_multiplier / cap)
        torch.backends.cuda.matmul.allow_tf32 = allowed
        return logits.log_softmax(-1).gather(-1, ids_BT[:, num_prompt:, None])[..., 0].cpu()


def _merge(weights: dict[str, Tensor], adapter: Adapter, num_experts: int, device: str) -> None:
    scale = adapter.config["lora_alpha"] / adapter.config["r"]
    rank = adapter.config["r"]
    flat = adapter.buffer.view(np.float32)
    found = {
        spec.name.removeprefix("base_model.model."): torch.from_numpy(
            flat[spec.offset // 4 : spec.offset // 4 + int(np.prod(spec.shape))].copy()
        )
        .view(spec.shape)
        .to(device)
        for spec in adapter.manifest
    }
    for name in [name for name in found if name.endswith("lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        a, b = found[name], found[f"{module}.lora_B.weight"]
        if ".experts" not in module:
            weights[f"{module}.weight"] += scale * b @ a
            continue
        part = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
        a_ERI = a.view(num_experts, rank, -1)
        b_EOR = b.view(-1, rank, num_experts).permute(2, 0, 1)
        weights[f"{module.removesuffix('.base_layer')}.{part}"] += scale * torch.bmm(b_EOR, a_ERI)
