"""A training step of expert LoRA: sparkrl's (activation side), PEFT's `target_parameters` (builds W + BA), and none.

All three run the same Muse Spark model with the same rank-32 adapter on attention and latent projections; what differs
is the adapter on the routed experts. Each lives in a process of its own, so that its memory can be told apart, and the
processes take turns step by step, so that a busy moment of the machine hits all of them. A step is forward, backward
and dropping the gradients, fp32, sequences of 128 tokens packed into one row.

Memory of a step is its peak above the resident size before it, when model and adapter are loaded and no gradient is;
the extra memory of LoRA on the experts is what a step takes above the step without it.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from benchmarks.figures import Figure

NAME = "expert_lora"
THREADS = 2
TOKENS = (256, 4096)
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
SIZES = (
    f"{LAYERS * EXPERTS * 3 * LATENT * INNER / 1e6:.0f}M expert parameters ({LAYERS} layers of {EXPERTS} experts, top "
    f"{TOP_K}, latent {LATENT}, width {INNER}), rank 32, fp32, {THREADS} threads; "
    + " and ".join(f"{tokens} tokens are {tokens * TOP_K // EXPERTS} rows an expert" for tokens in TOKENS)
)
_FASTER, _MEMORY_SHARE, _SLOWDOWN = 3.0, 1 / 3, 1.5


def run() -> list[Figure]:
    """Measure the three variants at each number of tokens: times first, then memory in processes of their own."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(THREADS),
        "OMP_WAIT_POLICY": "PASSIVE",  # those that wait for their turn must not spin
        "TRANSFORMERS_VERBOSITY": "error",
    }
    with _workers(environment) as workers:
        seconds = {tokens: _medians(workers, tokens, "seconds", turns=REPEATS) for tokens in TOKENS}
    # every larger block is mapped and unmapped on its own, so that a fragmented heap does not count as demand; this
    # costs time, hence the separate processes
    with _workers(environment | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}) as workers:
        memory = {tokens: _medians(workers, tokens, "bytes", turns=1) for tokens in TOKENS}
    return [figure for tokens in TOKENS for figure in _figures(tokens, seconds[tokens], memory[tokens])]


@contextmanager
def _workers(environment: dict[str, str]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each variant, under the variant's name."""
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
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def _medians(workers: dict[str, subprocess.Popen[str]], tokens: int, what: str, *, turns: int) -> dict[str, float]:
    """Median of one figure for each variant, after one turn to warm up."""
    found = [{variant: _one_step(worker, tokens) for variant, worker in workers.items()} for _ in range(1 + turns)]
    return {variant: statistics.median(turn[variant][what] for turn in found[1:]) for variant in workers}


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


def _figures(tokens: int, seconds: dict[str, float], memory: dict[str, float]) -> list[Figure]:
    extra = {variant: memory[variant] - memory["frozen"] for variant in ("sparkrl", "peft")}
    size = f"{tokens} tokens"

    def step(case: str, variant: str, **more: Any) -> Figure:
        return Figure(benchmark=NAME, case=f"step, {size}: {case}", value=1e3 * seconds[variant], unit="ms", **more)

    def extra_memory(case: str, variant: str, **more: Any) -> Figure:
        case = f"memory, {size}: {case}"
        return Figure(benchmark=NAME, case=case, value=extra[variant] / 2**20, unit="MiB extra", **more)

    faster = {"ratio": seconds["peft"] / seconds["sparkrl"], "meaning": "PEFT's time / sparkrl's"}
    slower = {"ratio": seconds["sparkrl"] / seconds["frozen"], "meaning": "sparkrl's time / that of no LoRA there"}
    share = {"ratio": extra["sparkrl"] / extra["peft"], "meaning": "sparkrl's extra / PEFT's"}
    return [
        step("no LoRA on experts", "frozen"),
        step("PEFT target_parameters", "peft"),
        step("sparkrl", "sparkrl", at_least=_FASTER, **faster),
        step("sparkrl", "sparkrl", at_most=_SLOWDOWN, **slower),
        Figure(
            benchmark=NAME,
            case=f"memory, {size}: no LoRA on experts",
            value=memory["frozen"] / 2**20,
            unit="MiB in all",
        ),
        extra_memory("PEFT target_parameters", "peft"),
        extra_memory("sparkrl", "sparkrl", at_most=_MEMORY_SHARE, **share),
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
        print(json.dumps({"seconds": seconds, "bytes": _status("VmHWM") - before}), file=answers, flush=True)


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
    adapted: peft.PeftModel
    if variant == "peft":
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=list(targets.linear),
            target_parameters=list(family.expert_parameters),
            task_type="CAUSAL_LM",
        )
        adapted = cast(peft.PeftModel, peft.get_peft_model(model, config))
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
