"""A random tiny NVFP4 checkpoint, an independent reference for it, and batches, for the trainer's tests."""

import json

import numpy as np
import torch
from transformers import MuseSparkTextConfig
from transformers.models.muse_spark import modeling_muse_spark as hf

from sparkrl.config.schema import Config, Precision
from sparkrl.quant.checkpoint import CheckpointReader, write_checkpoint
from sparkrl.quant.nvfp4 import quantize
from sparkrl.types import TrainBatch, TrainSequence

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 8, 2, 97
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "moe_hidden_size": 48,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "sliding_window": 16,
    "output_multiplier": 0.7,
    "qk_scale_factor": 2.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def text_config():
    config = MuseSparkTextConfig(**FIELDS)
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    return config


def write(folder):
    """Random weights; the middle layers' experts in NVFP4, gate and up with a scale each."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    names = [*hf.MuseSparkTextModel(text_config()).state_dict().items()]
    for name, like in [("model.language_model." + n, v) for n, v in names] + [
        ("lm_head.weight", torch.empty(VOCAB, 64))
    ]:
        if name.endswith("inv_freq"):
            continue
        value = torch.randn(like.shape, generator=generator) * 0.15
        exact = "residual_gate" in name or ".mlp.gate." in name
        value = value if exact else value.bfloat16()
        expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if not expert or any(f"layers.{i}." in name for i in (0, LAYERS - 1)):
            tensors[name] = value
            continue
        halves = value.chunk(2, 1) if name.endswith("gate_up_proj") else (value,)
        parts = [quantize(half) for half in halves]
        tensors[name] = torch.cat([part.packed for part in parts], 1)
        tensors[name + "_weight_scale"] = torch.cat([part.block_scale for part in parts], 1)
        scales = torch.stack([part.global_scale for part in parts], 1)
        tensors[name + "_weight_scale_2"] = scales if len(parts) == 2 else scales[:, 0]
        tensors[name + "_input_scale"] = torch.ones_like(tensors[name + "_weight_scale_2"])
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *(f"model.layers.{i}.feed_forward*" for i in (0, LAYERS - 1))],
    }
    config = text_config().to_dict() | {
        "architectures": ["MuseSpark1xForCausalLM"],
        "model_type": "muse_spark_text",
        "quantization_config": quantization,
    }
    write_checkpoint(folder, tensors, json.loads(json.dumps(config)))


def config(path, *, workers=1, dtype="float32", lr=0.0, **trainer):
    cfg = Config(recipe_name="test")
    cfg.model.path = str(path)
    cfg.lora.rank, cfg.lora.alpha = 8, 16
    cfg.trainer.num_workers, cfg.trainer.dtype, cfg.trainer.num_threads = workers, Precision[dtype], 1
    cfg.trainer.optimizer.lr = lr
    for name, value in trainer.items():
        setattr(cfg.trainer, name, value)
    return cfg


class Reference:
    """transformers' own text model in float32 on the dequantized weights."""

    def __init__(self, path):
        reader = CheckpointReader(path)
        prefix = "model.language_model."
        self.model = hf.MuseSparkTextModel(text_config()).float().eval()
        state = {
            name.removeprefix(prefix): reader.read(name).float() for name in reader.names if name.startswith(prefix)
        }
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        assert not unexpected and all("inv_freq" in name for name in missing)
        self.head = reader.read("lm_head.weight").float()
        self.routes = []
        for layer in self.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, out: self.routes.append(out[2]))

    @torch.no_grad()
    def __call__(self, prompt, response, temperature=1.0):
        """Log-probs of the response, float32 [T], and the experts chosen, uint8 [P + T - 1, L, K]."""
        self.routes.clear()
        tokens = torch.tensor([*prompt, *response])
        hidden = self.model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0]
        logits = 20.0 * torch.tanh(hidden @ self.head.T * 0.7 / 20.0) / temperature
        log_p = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        return log_p[len(prompt) - 1 :].numpy(), torch.stack(self.routes, 1).to(torch.uint8).numpy()


def batch(reference, num=12, seed=0, temperature=1.0):
    """Random sequences with the reference's log-probs and routes: on-policy for a fresh adapter."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(num):
        prompt, response = (rng.integers(2, VOCAB, rng.integers(low, high)) for low, high in ((2, 12), (1, 30)))
        log_probs, routes = reference(prompt.tolist(), response.tolist(), temperature)
        rows.append(
            TrainSequence(
                uid=f"r{i}",
                prompt_ids=prompt.astype(np.int32),
                response_ids=response.astype(np.int32),
                rollout_log_probs=log_probs,
                routed_experts=routes,
                advantages=np.full(len(response), rng.standard_normal(), np.float32),
            )
        )
    return TrainBatch(sequences=tuple(rows), policy_version=0, temperature=temperature)
