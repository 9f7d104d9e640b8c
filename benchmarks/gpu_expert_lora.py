"""Expert LoRA on one GPU: a training step against PEFT and frozen experts. `python -m benchmarks.gpu_expert_lora`.

As `benchmarks.expert_lora`, in bfloat16 and with the three variants one after the other in one process, each as it is
and with `trainer.compile`. Of PEFT's layer compilation reaches all but the experts, which PEFT's wrapper runs. A step
is forward, backward and dropping the gradients of sequences packed into one row, without gradient checkpointing.
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
from sparkrl.models.compiled import compile_layers
from sparkrl.models.experts import ExpertFactors, RoutedExperts, run_experts
from sparkrl.models.registry import family_of

EXPERTS, TOP_K, LAYERS, LATENT, INNER, HIDDEN = 128, 8, 2, 4096, 2048, 4096
TOKENS = (256, 1024, 8192)
WARMUP, REPEATS, PROFILED = 3, 10, 3
TOP = 15
"""Kernels and host operators that a profile names."""
MODES: dict[str, str | None] = {"compiled": "inductor", "eager": None, "kernels": "inductor"}
"""`kernels` is `compiled` over `sparkrl.models.kernel_experts`, measured when asked for."""
DEFAULT_MODES = ("compiled", "eager")
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


def measure(
    shape: dict[str, Any] = SHAPE,
    token_counts: tuple[int, ...] = TOKENS,
    *,
    device: str = "cuda",
    variants: tuple[str, ...] = VARIANTS,
    modes: tuple[str, ...] = DEFAULT_MODES,
    keep: Callable[[dict], None] = lambda found: None,
) -> dict:
    """All figures, ready for JSON. Smaller shapes and `device="cpu"` are for trying the script itself.

    Args:
        keep: called with what there is whenever a case is done.
    """
    experts = shape["num_hidden_layers"] * shape["num_local_experts"]
    out: dict[str, Any] = {
        "shape": shape,
        "expert_parameters": experts * 3 * shape["moe_hidden_size"] * shape["moe_intermediate_size"],
        "rank": LoraConfig().rank,
        "tokens": {tokens: {"tflop": useful_flops(shape, tokens)} for tokens in token_counts},
    }
    # profiles come last: once CUPTI is loaded, every kernel's start takes longer
    for profiles in (False, True):
        for variant in variants:
            model, step = _make(variant, shape, device)
            for mode in modes:
                compile_layers(model, MODES[mode], own_kernels=mode == "kernels")
                for tokens in token_counts:
                    figures = out["tokens"][tokens].setdefault(variant, {}).setdefault(mode, {})
                    if profiles:
                        figures["profile"] = _profile(step, tokens, device)
                    else:
                        figures |= _timed(step, tokens, device)
                        flops = out["tokens"][tokens]["tflop"]["frozen" if variant == "frozen" else "with_lora"]
                        figures["mfu"] = flops * 1e12 / (figures["ms"] / 1e3) / PEAK_FLOPS
                    keep(out)
            del step, model
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    out["kernel"] = {mode: kernel_errors(device, MODES[mode], own_kernels=mode == "kernels") for mode in modes}
    for figures in out["tokens"].values():
        figures["rows_an_expert"] = figures["tflop"].pop("rows_an_expert")
        if set(variants) == set(VARIANTS):
            figures["compared"] = {mode: _compare(figures, mode) for mode in modes}
    return out


def _compare(figures: dict[str, Any], mode: str) -> dict[str, float]:
    """Ratios of times and of memory; PEFT as it comes is `stock`."""
    frozen, ours, peft = (figures[variant][mode] for variant in ("frozen", "sparkrl", "peft"))
    stock = figures["peft"].get("eager", peft)
    extra, extra_peft = (f["peak_mib"] - frozen["peak_mib"] for f in (ours, peft))
    return {
        "extra_mib": extra,
        "extra_mib_peft": extra_peft,
        "extra_memory_of_peft": extra / extra_peft,
        "peft_over_sparkrl": peft["ms"] / ours["ms"],
        "stock_peft_over_sparkrl": stock["ms"] / ours["ms"],
        "sparkrl_over_frozen": ours["ms"] / frozen["ms"],
    }


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


def kernel_errors(device: str, backend: str | None = None, *, own_kernels: bool = False) -> dict[str, float]:
    """Largest error of a bfloat16 layer's value and gradients to float64 on the CPU, over the largest value.

    Some experts have no row, which is where grouped kernels go wrong first.
    """

    class Small(RoutedExperts):
        num_experts, hidden_dim, intermediate_dim = 16, 128, 64
        compile_backend = backend

        def __init__(self) -> None:
            super().__init__()
            self.act_fn = nn.SiLU()
            self.gate_up_proj = nn.Parameter(torch.randn(16, 128, 128) * 0.1, requires_grad=False)
            self.down_proj = nn.Parameter(torch.randn(16, 128, 64) * 0.1, requires_grad=False)

    torch.manual_seed(0)
    base = Small()
    base.own_kernels = own_kernels
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


def _make(variant: str, shape: dict[str, Any], device: str) -> tuple[nn.Module, Callable[[int], None]]:
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
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]

    def step(tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, shape["vocab_size"], (1, tokens + 1), generator=generator).to(device)
        positions = (torch.arange(tokens)[None] % SEQUENCE).to(device)
        out = adapted(input_ids=ids[:, :-1], position_ids=positions, targets=ids[:, 1:])
        (-out.log_probs.mean()).backward()
        for parameter in trained:
            parameter.grad = None

    return adapted, step


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


def _profile(step: Callable[[int], None], tokens: int, device: str) -> dict[str, Any]:
    """A step: time the GPU is busy, kernels and host operators, and (name, ms, calls) of those that take longest."""
    on_gpu = device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            step(tokens)
        if on_gpu:
            torch.cuda.synchronize()
    events = profiler.events()
    host_names = {event.name for event in events if event.device_type == torch.autograd.DeviceType.CPU}
    kernels: dict[str, list[float]] = {}
    host: dict[str, list[float]] = {}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CPU:
            host.setdefault(event.name, []).append(event.self_cpu_time_total)
        elif event.name not in host_names or event.name.startswith("triton_"):
            # the others are ranges that host operators span on the GPU
            kernels.setdefault(event.name, []).append(event.device_time)

    def top(times: dict[str, list[float]]) -> list[tuple[str, float, float]]:
        longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
        return [(name[:160], sum(us) / 1e3 / PROFILED, len(us) / PROFILED) for name, us in longest]

    return {
        "gpu_busy_ms": sum(map(sum, kernels.values())) / 1e3 / PROFILED,
        "kernels": sum(map(len, kernels.values())) / PROFILED,
        "host_operators": sum(map(len, host.values())) / PROFILED,
        "top_kernels": top(kernels),
        "top_host": top(host),
    }


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench_gpu_expert_lora.json"))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--modes", nargs="+", default=list(DEFAULT_MODES), choices=list(MODES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    arguments = parser.parse_args()

    def keep(found: dict) -> None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")

    result = measure(
        token_counts=tuple(arguments.tokens),
        variants=tuple(arguments.variants),
        modes=tuple(arguments.modes),
        keep=keep,
    )
    keep(result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
