"""A training step of expert LoRA: sparkrl's (activation side), PEFT's `target_parameters` (builds W + BA), and none.

All three run the same Muse Spark model with the same rank-32 adapter on attention and latent projections; what differs
is the adapter on the routed experts. Each lives in a process of its own, so that its memory can be told apart, and the
processes take turns step by step, so that a busy moment of the machine hits all of them. A step is forward, backward
and dropping the gradients, fp32, sequences of 128 tokens packed into one row.

Memory of a step is its peak above the resident size before it, when model and adapter are loaded and no gradient is.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from benchmarks.figures import Figure

NAME = "expert_lora"
THREADS = 2
TOKENS = (512, 4096)
SEQUENCE = 128
REPEATS = 5
VARIANTS = ("frozen", "sparkrl", "peft")
EXPERTS, TOP_K, LAYERS, LATENT, INNER = 64, 4, 4, 256, 128
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_hidden_size": LATENT,
    "moe_intermediate_size": INNER,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "sliding_window": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_FASTER, _MEMORY_SHARE, _SLOWDOWN = 3.0, 1 / 3, 1.5


def run() -> list[Figure]:
    """Measure the three variants at each number of tokens."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(THREADS),
        "OMP_WAIT_POLICY": "PASSIVE",  # those that wait for their turn must not spin
        "TRANSFORMERS_VERBOSITY": "error",
    }
    workers = {
        variant: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.expert_lora", variant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for variant in VARIANTS
    }
    try:
        figures = []
        for tokens in TOKENS:
            turns = [
                {variant: _one_step(worker, tokens) for variant, worker in workers.items()}
                for _ in range(1 + REPEATS)
            ][1:]
            figures += _figures(tokens, turns)
        return figures
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def _one_step(worker: subprocess.Popen[str], tokens: int) -> dict[str, float]:
    stdin, stdout = worker.stdin, worker.stdout
    assert stdin is not None and stdout is not None
    try:
        stdin.write(f"{tokens}\n")
        stdin.flush()
    except BrokenPipeError:
        raise RuntimeError("a process of the expert_lora benchmark died; its message is above") from None
    answer = stdout.readline()
    if not answer:
        raise RuntimeError("a process of the expert_lora benchmark died; its message is above")
    return json.loads(answer)


def _figures(tokens: int, turns: list[dict[str, dict[str, float]]]) -> list[Figure]:
    def median(variant: str, what: str) -> float:
        return statistics.median(turn[variant][what] for turn in turns)

    seconds = {variant: median(variant, "seconds") for variant in VARIANTS}
    extra = {variant: median(variant, "extra_bytes") for variant in VARIANTS}
    size = LAYERS * EXPERTS * 3 * LATENT * INNER / 1e6
    prefix = f"{size:.0f}M expert parameters, {tokens} tokens, {THREADS} threads: "
    labels = {
        "frozen": "experts frozen, no LoRA on them",
        "sparkrl": "sparkrl's expert LoRA",
        "peft": "PEFT target_parameters",
    }

    def figure(variant: str, what: str, value: float, unit: str, **more: Any) -> Figure:
        return Figure(
            benchmark=NAME, case=f"{prefix}{what}, {labels[variant]}", value=value, unit=unit, **more
        )

    step, memory = "step", "memory of a step"
    return [
        figure("frozen", step, 1e3 * seconds["frozen"], "ms"),
        figure("peft", step, 1e3 * seconds["peft"], "ms"),
        figure(
            "sparkrl",
            step,
            1e3 * seconds["sparkrl"],
            "ms",
            ratio=seconds["peft"] / seconds["sparkrl"],
            meaning="PEFT's time / sparkrl's",
            at_least=_FASTER,
        ),
        figure(
            "sparkrl",
            step,
            1e3 * seconds["sparkrl"],
            "ms",
            ratio=seconds["sparkrl"] / seconds["frozen"],
            meaning="sparkrl's time / frozen's",
            at_most=_SLOWDOWN,
        ),
        figure("frozen", memory, extra["frozen"] / 2**20, "MiB"),
        figure("peft", memory, extra["peft"] / 2**20, "MiB"),
        figure(
            "sparkrl",
            memory,
            extra["sparkrl"] / 2**20,
            "MiB",
            ratio=extra["sparkrl"] / extra["peft"],
            meaning="sparkrl's / PEFT's",
            at_most=_MEMORY_SHARE,
        ),
    ]


def work(variant: str, orders: IO[str], answers: IO[str]) -> None:
    """Make one variant's model and take a step for every line of `orders`, which is a number of tokens."""
    step = _make(variant)
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    for line in orders:
        if release is not None:
            release(0)  # what earlier steps freed would hide this step's demand
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status("VmRSS")
        began = time.perf_counter()
        step(int(line))
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "extra_bytes": _status("VmHWM") - before}), file=answers, flush=True)


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _make(variant: str) -> Any:
    import peft
    import torch
    from transformers import MuseSparkTextConfig

    from sparkrl.config.schema import LoraConfig
    from sparkrl.lora.targets import add_adapter, resolve_targets
    from sparkrl.models.registry import family_of

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    family = family_of("muse_spark_text")
    model = family.build(MuseSparkTextConfig(**SHAPE), torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    lora = LoraConfig()
    targets = resolve_targets(lora.targets if variant == "sparkrl" else ["attention", "latent"], family, model)
    if variant == "peft":
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=list(targets.linear),
            target_parameters=list(family.expert_parameters),
            task_type="CAUSAL_LM",
        )
        adapted = peft.get_peft_model(model, config)
    else:
        adapted = add_adapter(model, lora, targets, family)
    adapted.train()

    def step(tokens: int) -> None:
        ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens + 1), generator=torch.Generator().manual_seed(tokens))
        positions = torch.arange(tokens)[None] % SEQUENCE
        out = adapted(input_ids=ids[:, :-1], position_ids=positions, targets=ids[:, 1:])
        (-out.log_probs.mean()).backward()
        adapted.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    work(sys.argv[1], sys.stdin, sys.stdout)
