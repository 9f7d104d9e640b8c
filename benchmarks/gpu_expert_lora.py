"""Expert LoRA on one GPU: a training step against PEFT and frozen experts. `python -m benchmarks.gpu_expert_lora`.

As `benchmarks.expert_lora`, in bfloat16 and with the three variants one after the other in one process. A step is
forward, backward and dropping the gradients of sequences packed into one row, without gradient checkpointing.
Peak memory of a step is above what model and adapter hold before it. FLOPs count what the step needs: forward and
input gradients of frozen weights, and of the factors their own gradients as well; what PEFT spends beyond that (the
merged weight and its gradient) is not useful work and not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.expert_lora import SEQUENCE, VARIANTS, add_variant
from sparkrl.config.schema import LoraConfig
from sparkrl.models.experts import ExpertFactors, RoutedExperts, run_experts
from sparkrl.models.registry import family_of

EXPERTS, TOP_K, LAYERS, LATENT, INNER, HIDDEN = 128, 8, 2, 4096, 2048, 4096
TOKENS = (256, 1024, 8192)
WARMUP, REPEATS = 3, 10
PEAK_FLOPS = 990e12
"""Dense bfloat16 of an H200, FLOP/s. Source: NVIDIA's data sheet."""
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 4096,
    "moe_hidden_size": LATENT,
    "moe_intermediate_size": INNER,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "sliding_window": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def measure(shape: dict[str, Any] = SHAPE, token_counts: tuple[int, ...] = TOKENS, *, device: str = "cuda") -> dict:
    """All figures, ready for JSON. Smaller shapes and `device="cpu"` are for trying the script itself."""
    experts = shape["num_hidden_layers"] * shape["num_local_experts"]
    out: dict[str, Any] = {
        "shape": shape,
        "expert_parameters": experts * 3 * shape["moe_hidden_size"] * shape["moe_intermediate_size"],
        "rank": LoraConfig().rank,
        "kernel": kernel_errors(device),
        "tokens": {tokens: {"tflop": useful_flops(shape, tokens)} for tokens in token_counts},
    }
    for variant in VARIANTS:
        step = _make(variant, shape, device)
        for tokens in token_counts:
            out["tokens"][tokens][variant] = _timed(step, tokens, device)
        del step
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    for figures in out["tokens"].values():
        flops = figures["tflop"]
        figures["rows_an_expert"] = flops.pop("rows_an_expert")
        for variant in VARIANTS:
            useful = flops["frozen" if variant == "frozen" else "with_lora"]
            figures[variant]["mfu"] = useful * 1e12 / (figures[variant]["ms"] / 1e3) / PEAK_FLOPS
        extra = {v: figures[v]["peak_mib"] - figures["frozen"]["peak_mib"] for v in ("sparkrl", "peft")}
        figures["extra_mib"] = extra
        figures["peft_over_sparkrl"] = figures["peft"]["ms"] / figures["sparkrl"]["ms"]
        figures["sparkrl_over_frozen"] = figures["sparkrl"]["ms"] / figures["frozen"]["ms"]
        figures["extra_memory_of_peft"] = extra["sparkrl"] / extra["peft"]
    return out


def useful_flops(shape: dict[str, Any], tokens: int) -> dict[str, float]:
    """TFLOP of one step: `frozen` (no LoRA on experts) and `with_lora`, and rows an expert."""
    hidden, latent, inner = shape["hidden_size"], shape["moe_hidden_size"], shape["moe_intermediate_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    rank, layers, top_k = LoraConfig().rank, shape["num_hidden_layers"], shape["num_experts_per_tok"]
    linears = [(hidden, heads), (hidden, keys), (hidden, keys), (hidden, heads), (heads, hidden)]
    linears += [(hidden, latent), (latent, hidden)]
    # 2 a weight forward and 2 for the input's gradient; factors have their own gradient, 2 more
    dense = sum(4 * i * o + 6 * rank * (i + o) for i, o in linears) + 4 * hidden * shape["num_local_experts"]
    # a token sees half its sequence on average; scores and values, forward and twice that backward
    attention = 3 * 4 * heads * min(SEQUENCE, tokens) / 2
    experts = top_k * 4 * 3 * latent * inner
    factors = top_k * 6 * rank * (latent + 2 * inner + inner + latent)
    head = 4 * hidden * shape["vocab_size"]
    frozen = tokens * (layers * (dense + attention + experts) + head)
    return {
        "frozen": frozen / 1e12,
        "with_lora": (frozen + tokens * layers * factors) / 1e12,
        "rows_an_expert": tokens * top_k / shape["num_local_experts"],
    }


def kernel_errors(device: str) -> dict[str, float]:
    """Largest error of a bfloat16 layer's value and gradients to float64 on the CPU, over the largest value.

    Some experts have no row, which is where grouped kernels go wrong first.
    """

    class Small(RoutedExperts):
        num_experts, hidden_dim, intermediate_dim = 16, 128, 64

        def __init__(self) -> None:
            super().__init__()
            self.act_fn = nn.SiLU()
            self.gate_up_proj = nn.Parameter(torch.randn(16, 128, 128) * 0.1, requires_grad=False)
            self.down_proj = nn.Parameter(torch.randn(16, 128, 64) * 0.1, requires_grad=False)

    torch.manual_seed(0)
    base = Small()
    ids = torch.rand(200, 13).argsort(-1)[:, :4]  # three experts get nothing
    inputs = [torch.randn(200, 128), torch.rand(200, 4)]
    inputs += [torch.randn(shape) * 0.1 for shape in ((16, 32, 128), (16, 128, 32), (16, 32, 64), (16, 128, 32))]
    inputs = [tensor.bfloat16() for tensor in inputs]
    base.bfloat16()

    def run(where: str, dtype: torch.dtype) -> list[torch.Tensor]:
        layer = base.to(where, dtype)
        leaves = [tensor.to(where, dtype).requires_grad_() for tensor in inputs]
        out = run_experts(layer, leaves[0], ids.to(where), leaves[1], ExpertFactors(*leaves[2:], scale=2.0))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    found, wanted = run(device, torch.bfloat16), run("cpu", torch.float64)
    names = ("value", "input", "routing_weights", "gate_up_A", "gate_up_B", "down_A", "down_B")
    return {
        name: float((one.cpu().double() - other).abs().max() / other.abs().max())
        for name, one, other in zip(names, found, wanted, strict=True)
    }


def _make(variant: str, shape: dict[str, Any], device: str) -> Callable[[int], None]:
    from transformers import MuseSparkTextConfig

    torch.manual_seed(0)
    family = family_of("muse_spark_text")
    with torch.device(device):
        model = family.build(MuseSparkTextConfig(**shape), torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        adapted = add_variant(variant, model, family)
    adapted.train()

    def step(tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, shape["vocab_size"], (1, tokens + 1), generator=generator).to(device)
        positions = (torch.arange(tokens)[None] % SEQUENCE).to(device)
        out = adapted(input_ids=ids[:, :-1], position_ids=positions, targets=ids[:, 1:])
        (-out.log_probs.mean()).backward()
        adapted.zero_grad(set_to_none=True)

    return step


def _timed(step: Callable[[int], None], tokens: int, device: str) -> dict[str, float]:
    on_gpu = device == "cuda"
    for _ in range(WARMUP):
        step(tokens)
    seconds = []
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(REPEATS):
        began = time.perf_counter()
        step(tokens)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "ms": 1e3 * statistics.median(seconds),
        "worst_ms": 1e3 * max(seconds),
        "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else float("nan"),
    }


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench_gpu_expert_lora.json"))
    arguments = parser.parse_args()
    result = measure()
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
