"""A training step of expert LoRA: sparkrl's (activation side), PEFT's `target_parameters` (builds W + BA), and none.

All three run the same Muse Spark model with the same rank-32 adapter on attention and latent projections; what differs
is the adapter on the routed experts. Each lives in a process of its own, so that its memory can be told apart, and the
processes take turns step by step, so that a busy moment of the machine hits all of them. A step is forward, backward
and dropping the gradients, fp32, sequences of 128 tokens packed into one row.

Memory of a step is its peak above the resident size before it, when model and adapter are loaded and no gradient is;
the extra memory of LoRA on the experts is what a step takes above the step without it. Steps that are timed follow each
other as in training: the allocator keeps what the step before freed.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.figures import Figure
from sparkrl.threads import openmp_environment

NAME = "expert_lora"
THREADS = 2
SEQUENCE = 128
VARIANTS = ("frozen", "sparkrl", "peft")
# every larger block is mapped and unmapped on its own, so that a fragmented heap does not count as demand; this costs
# time, so memory is measured in processes that are not timed
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One model and what is run on it."""

    layers: int
    experts: int
    top_k: int
    width: int
    """Of the residual stream, of the experts' input and of their inner layer.

    The published model's last two are alike and its residual stream is twice as wide. What every variant computes alike
    outside of experts is so a smaller part of a step here than there.
    """
    tokens: tuple[int, ...]
    turns: int

    @property
    def name(self) -> str:
        return f"{self.layers * self.experts * 3 * self.width**2 / 1e6:.0f}M"

    @property
    def about(self) -> str:
        rows = " and ".join(f"{tokens * self.top_k // self.experts} at {tokens} tokens" for tokens in self.tokens)
        return (
            f"{self.name} expert parameters: {self.layers} layers of {self.experts} experts, top {self.top_k}, latent "
            f"and expert width {self.width}; rows an expert: {rows}"
        )

    @property
    def shape(self) -> dict[str, Any]:
        return {
            "vocab_size": 512,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 512,
            "moe_hidden_size": self.width,
            "moe_intermediate_size": self.width,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "sliding_window": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }


MODELS = {
    "25M": Size(layers=2, experts=64, top_k=8, width=256, tokens=(128, 2048), turns=5),
    "403M": Size(layers=2, experts=256, top_k=8, width=512, tokens=(512, 1024), turns=2),
}
SIZES = f"rank 32, fp32, {THREADS} threads. " + ". ".join(size.about for size in MODELS.values())
_FASTER, _MEMORY_SHARE, _SLOWDOWN = 3.0, 1 / 3, 1.5


def run() -> list[Figure]:
    """Measure the three variants at each size and number of tokens: times first, then memory in other processes."""
    figures = []
    for key, size in MODELS.items():
        with _workers(key, "seconds") as workers:
            seconds = {tokens: _medians(workers, tokens, turns=size.turns) for tokens in size.tokens}
        with _workers(key, "bytes") as workers:
            memory = {tokens: _medians(workers, tokens, turns=1) for tokens in size.tokens}
        for tokens in size.tokens:
            figures += _figures(f"{key}, {tokens} tokens", seconds[tokens], memory[tokens])
    return figures


def environment(what: str) -> dict[str, str]:
    """Environment of a process that measures `what`, "seconds" or "bytes"."""
    return (
        os.environ
        | openmp_environment(THREADS)
        | {"TRANSFORMERS_VERBOSITY": "error"}
        | (MEMORY_ENVIRONMENT if what == "bytes" else {})
    )


@contextmanager
def _workers(size: str, what: str) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each variant, under the variant's name."""
    workers = {
        variant: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.expert_lora", variant, size, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(what),
        )
        for variant in VARIANTS
    }
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def _medians(workers: dict[str, subprocess.Popen[str]], tokens: int, *, turns: int) -> dict[str, float]:
    """Median of each variant's figures, after a first turn that does not count."""
    found = [{variant: _one_step(worker, tokens) for variant, worker in workers.items()} for _ in range(1 + turns)]
    return {variant: statistics.median(turn[variant] for turn in found[1:]) for variant in workers}


def _one_step(worker: subprocess.Popen[str], tokens: int) -> float:
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


def _figures(size: str, seconds: dict[str, float], memory: dict[str, float]) -> list[Figure]:
    extra = {variant: memory[variant] - memory["frozen"] for variant in ("sparkrl", "peft")}

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


def measured(step: Callable[[], None], what: str) -> float:
    """The step's time in seconds, or its peak above the resident size before it in bytes, as `what` says."""
    if what == "seconds":
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)  # what earlier steps freed would hide this step's demand
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def work(variant: str, size: Size, what: str, orders: IO[str], answers: IO[str]) -> None:
    """Make one variant's model and take a step for every line of `orders`, which is a number of tokens."""
    step = _make(variant, size)
    for line in orders:
        print(json.dumps(measured(lambda tokens=int(line): step(tokens), what)), file=answers, flush=True)


def _make(variant: str, size: Size) -> Callable[[int], None]:
    import torch
    from transformers import MuseSparkTextConfig

    from sparkrl.models.registry import family_of

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    family = family_of("muse_spark_text")
    with torch.device("meta"):  # the values that transformers draws are not used
        model = family.build(MuseSparkTextConfig(**size.shape), torch.float32)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
        for buffer in model.buffers():
            buffer.zero_()
    adapted = add_variant(variant, model, family)
    adapted.train()

    def step(tokens: int) -> None:
        vocabulary = size.shape["vocab_size"]
        ids = torch.randint(0, vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(tokens))
        positions = torch.arange(tokens)[None] % SEQUENCE
        out = adapted(input_ids=ids[:, :-1], position_ids=positions, targets=ids[:, 1:])
        (-out.log_probs.mean()).backward()
        adapted.zero_grad(set_to_none=True)

    return step


def add_variant(variant: str, model: Any, family: Any) -> Any:
    """The model with the reference adapter on attention and latent projections, and the variant's on the experts."""
    import peft

    from sparkrl.config.schema import LoraConfig
    from sparkrl.lora.targets import add_adapter, resolve_targets

    lora = LoraConfig()
    targets = resolve_targets(lora.targets if variant == "sparkrl" else ["attention", "latent"], family, model)
    if variant != "peft":
        return add_adapter(model, lora, targets, family)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets.linear),
        target_parameters=list(family.expert_parameters),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


if __name__ == "__main__":
    work(sys.argv[1], MODELS[sys.argv[2]], sys.argv[3], sys.stdin, sys.stdout)
