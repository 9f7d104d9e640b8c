"""Tiny random Qwen3 checkpoints, dense and sparse, written by transformers itself, which is the reference too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from word_tokenizer import tokenizer_files

from sparkrl.types import Adapter

VOCAB, LAYERS, EXPERTS, TOP_K = 96, 4, 8, 2
SPARSE = (0, 2, 3)
"""Layer 1 of the sparse model is dense, so routes must leave it out."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_SPARSE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [layer for layer in range(LAYERS) if layer not in SPARSE],
}


def build(folder: Path, family: str) -> Path:
    """Write a BF16 checkpoint as it is published: each expert on its own; the dense one ties its head."""
    torch.manual_seed(0)
    model: Any
    if family == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_COMMON, **_SPARSE))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**_COMMON, tie_word_embeddings=True))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if name.endswith("embed_tokens.weight"):
                noise *= 0.4  # the head is the same tensor in the dense model
            elif parameter.ndim >= 2:
                noise *= parameter.shape[-1] ** -0.5
            else:
                noise = 1 + 0.2 * noise
            parameter.copy_(noise)
    model.to(torch.bfloat16).save_pretrained(folder)
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    for name, text in tokenizer_files(VOCAB, chat_template=template).items():
        (folder / name).write_text(text)
    return folder


def reference(folder: Path, adapter: Adapter | None = None) -> nn.Module:
    """transformers in float32; with an adapter, put on by PEFT."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    if adapter is None:
        return model
    tensors = {}
    for spec in adapter.manifest:
        raw = adapter.buffer[spec.offset : spec.offset + 4 * int(np.prod(spec.shape))]
        tensors[spec.name] = torch.from_numpy(raw.copy().view(np.float32)).reshape(spec.shape)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=adapter.config["r"],
            lora_alpha=adapter.config["lora_alpha"],
            target_modules=sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in tensors if "_proj." in name}),
            target_parameters=experts if any("experts" in name for name in tensors) else None,
        ),
    )
    unused = set_peft_model_state_dict(wrapped, tensors).unexpected_keys
    assert not unused, unused
    return wrapped.eval()


@torch.no_grad()
def score(
    model: nn.Module, prompt_ids: np.ndarray, token_ids: np.ndarray, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """float32 [T] log-probs of the response, and int64 [P + T - 1, L, K] sorted expert ids (L = 0 for dense)."""
    chosen: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(lambda module, args, out: chosen.append(out[2])) for router in routers]
    ids = torch.from_numpy(np.concatenate([prompt_ids, token_ids]).astype(np.int64))[None]
    log_probs = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    for hook in hooks:
        hook.remove()
    first = len(prompt_ids) - 1
    picked = log_probs[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0]
    routes = torch.stack(chosen, 1)[:-1].sort(-1).values.numpy() if chosen else np.zeros((ids.shape[1] - 1, 0, 0))
    return picked.numpy(), routes
