"""Train the quickstart's small Muse Spark model from scratch on the recipe's corpus, and write it down in NVFP4.

Legend: T packed token, E expert, L layer, O output row, W input width.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import problems
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import MuseSparkTextConfig

from sparkrl.models.muse_spark import MuseSparkForCausalLM
from sparkrl.quant.nvfp4 import dequantize, quantize

NUM_LAYERS = 8
MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "output_multiplier": 2**0.5,
    "qk_scale_factor": 2.0,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
    "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0.0] * 2,
    "mlp_layer_types": ["sparse"] * NUM_LAYERS,
    "sliding_window": 32,
    "residual_gate_temperature": 0.3,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "final_logit_softcapping": 20.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""The text config of config.json; each full-attention layer closes a cycle of four, anchored to the last layer."""


_MUON_NAMES = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the checkpoint is trained."""

    seed: int = 0
    num_steps: int = 600
    batch_size: int = 128
    """Problems a step."""
    lr: float = 4e-3
    """AdamW's learning rate, for embeddings, head, norms, gates and routers."""
    matrix_lr: float = 0.02
    """Muon's learning rate, for all other matrices."""
    warmup_steps: int = 30
    clean_share: float = 0.7
    """First part of training, on careful solutions without slips; the messy corpus follows."""
    careful: float = 0.56
    """Share of solutions in the messy corpus that show their working."""
    slip: float = 0.05
    """Chance that one calculation of a shown working goes wrong in the messy corpus."""
    quantized_share: float = 0.25
    """Last part of training, in which the forward pass sees the experts as NVFP4 will store them."""
    balance_rate: float = 5e-3
    """How far a step moves an expert's selection bias towards equal use."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences laid end to end in one row."""

    ids_1T: Tensor
    positions_1T: Tensor
    targets_1T: Tensor
    learn_1T: Tensor
    """bool, where the target belongs to a response."""


def corpus(plan: Plan, tokenizer: Tokenizer, avoid: set[str]) -> Iterator[Packed]:
    """Endless batches of fresh problems with solutions; none of the calculations in `avoid` occurs."""
    rng = random.Random(f"corpus-{plan.seed}")
    for step in itertools.count():
        clean = step < plan.num_steps * plan.clean_share
        careful, slip = (1.0, 0.0) if clean else (plan.careful, plan.slip)
        batch = []
        while len(batch) < plan.batch_size:
            problem = problems.draw(rng)
            if problem.key not in avoid:
                text = problems.solution(problem, rng, careful=careful, slip=slip)
                batch.append((f"<|user|>{problem.question}<|end|><|assistant|>", f"{text}<|end|>"))
        prompts = [e.ids for e in tokenizer.encode_batch([p for p, _ in batch])]
        responses = [e.ids for e in tokenizer.encode_batch([r for _, r in batch])]
        ids, positions, targets, learn = [], [], [], []
        for prompt, response in zip(prompts, responses, strict=True):
            sequence = prompt + response
            ids += sequence[:-1]
            targets += sequence[1:]
            positions += range(len(sequence) - 1)
            learn += [False] * (len(prompt) - 1) + [True] * len(response)
        yield Packed(*(torch.tensor([row]) for row in (ids, positions, targets, learn)))


def train(
    plan: Plan, tokenizer: Tokenizer, avoid: set[str], *, report: Callable[[int, float], None]
) -> MuseSparkForCausalLM:
    """Train the model in float32.

    Args:
        avoid: keys of the held-out problems.
        report: called after each step with its number and its loss in nats a token.
    """
    torch.manual_seed(plan.seed)
    model = MuseSparkForCausalLM(MuseSparkTextConfig(**MODEL)).float().train()
    matrices = [p for name, p in model.named_parameters() if name.endswith(_MUON_NAMES)]
    others = [p for name, p in model.named_parameters() if not name.endswith(_MUON_NAMES)]
    optimizer = torch.optim.AdamW(others, lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.0)
    muon = Muon(matrices)
    balance = Balance(model)
    experts = quantized_parameters(model)
    quantized_from = round(plan.num_steps * (1 - plan.quantized_share))
    for step, batch in zip(range(plan.num_steps), corpus(plan, tokenizer, avoid), strict=False):
        rate = _schedule(step, plan)
        optimizer.param_groups[0]["lr"] = plan.lr * rate
        masters = _swap_in_quantized(experts) if step >= quantized_from else []
        log_probs_1T = model(batch.ids_1T, position_ids=batch.positions_1T, targets=batch.targets_1T).log_probs
        loss = -log_probs_1T[batch.learn_1T].mean()
        model.zero_grad()
        loss.backward()
        for (_, parameter), master in zip(experts, masters, strict=False):
            parameter.data = master
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        muon.step(plan.matrix_lr * rate)
        balance.step(plan.balance_rate * rate)
        report(step, loss.item())
    balance.close()
    return model.eval()


class Muon:
    """Momentum whose step is orthogonalized, for matrices and stacks of matrices.

    Here it reaches a loss in about two thirds of the steps that AdamW needs.
    Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], momentum: float = 0.95) -> None:
        self.momentum = momentum
        by_shape: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
        self.groups = list(by_shape.values())
        self.speeds = [torch.stack([torch.zeros_like(p) for p in group]) for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every matrix from its gradient."""
        for group, speed in zip(self.groups, self.speeds, strict=True):
            grads = torch.stack([p.grad for p in group])
            speed.lerp_(grads, 1 - self.momentum)
            update = _orthogonal(grads.lerp_(speed, self.momentum))
            scale = lr * max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_add_(group, list(update.unbind()), alpha=-scale)


def _orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrix of each of a stack, roughly: five Newton-Schulz iterations."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Balance:
    """Keeps experts in equal use by moving the router's selection bias, without a loss term."""

    def __init__(self, model: MuseSparkForCausalLM) -> None:
        self.routers = [layer.mlp.gate for layer in model.model.language_model.layers]
        self.counts_LE = torch.zeros(len(self.routers), MODEL["num_local_experts"])
        self._hooks = [
            router.register_forward_hook(lambda _m, _i, out, layer=layer: self._count(layer, out[2]))
            for layer, router in enumerate(self.routers)
        ]

    def _count(self, layer: int, ids_TK: Tensor) -> None:
        self.counts_LE[layer] += torch.bincount(ids_TK.flatten(), minlength=self.counts_LE.shape[1])

    def step(self, rate: float) -> None:
        """Raise the bias of experts used less than the mean, lower the others'."""
        for router, counts_E in zip(self.routers, self.counts_LE, strict=True):
            router.e_score_correction_bias += rate * torch.sign(counts_E.mean() - counts_E)
        self.counts_LE.zero_()

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()


def quantized_parameters(model: MuseSparkForCausalLM) -> list[tuple[str, torch.nn.Parameter]]:
    """The expert weights that are stored as NVFP4: those of all layers but the first and the last."""
    outer = (".layers.0.", f".layers.{NUM_LAYERS - 1}.")
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and not any(o in name for o in outer)
    ]


def stored_tensors(model: MuseSparkForCausalLM) -> dict[str, Tensor]:
    """Every tensor as the checkpoint stores it: NVFP4 experts, float32 router and gates, BF16 for the rest."""
    tensors = {}
    quantized = {name for name, _ in quantized_parameters(model)}
    for name, value in model.state_dict().items():
        if name in quantized:
            packed, block_scale, global_scale = quantize(_halves(name, value))
            tensors[name] = packed.view(*value.shape[:-1], -1)
            tensors[name + "_weight_scale"] = block_scale.view(*value.shape[:-1], -1)
            tensors[name + "_weight_scale_2"] = global_scale
            tensors[name + "_input_scale"] = torch.ones_like(global_scale)
        elif name.endswith(("residual_gate.gate", "mlp.gate.weight", "e_score_correction_bias")):
            tensors[name] = value.float()
        else:
            tensors[name] = value.bfloat16()
    return tensors


def stored_config() -> dict[str, Any]:
    """Content of config.json, in the text-only form that vLLM serves."""
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    plain = [f"model.layers.{i}.self_attn*" for i in range(NUM_LAYERS)]
    plain += [f"model.layers.{i}.feed_forward.{n}" for i in range(NUM_LAYERS) for n in ("router", "pooler", "unpooler")]
    plain += [f"model.layers.{i}.feed_forward*" for i in (0, NUM_LAYERS - 1)]
    return {
        "architectures": ["MuseSpark1xForCausalLM"],
        "model_type": "muse_spark_text",
        **MODEL,
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_scheme": None,
            "ignore": ["lm_head", *plain],
            "config_groups": {"group_0": {"input_activations": group, "weights": group, "targets": ["Linear"]}},
        },
    }


def _halves(name: str, weight_EOW: Tensor) -> Tensor:
    """Split gate from up ([E, 2, O/2, W]): each half has a global scale of its own."""
    if not name.endswith("gate_up_proj"):
        return weight_EOW
    num_experts, rows, width = weight_EOW.shape
    return weight_EOW.view(num_experts, 2, rows // 2, width)


def _swap_in_quantized(experts: list[tuple[str, torch.nn.Parameter]]) -> list[Tensor]:
    """Put each weight's NVFP4 value in its place and return the weights; gradients then pass straight through."""
    masters = [parameter.data for _, parameter in experts]
    for name, parameter in experts:
        value = dequantize(*quantize(_halves(name, parameter.data)), dtype=parameter.dtype)
        parameter.data = value.view(parameter.shape)
    return masters


def _schedule(step: int, plan: Plan) -> float:
    """Linear warm-up, then a cosine down to 2 %."""
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    done = (step - plan.warmup_steps) / max(1, plan.num_steps - plan.warmup_steps)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
