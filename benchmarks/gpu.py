"""Muse Spark on one GPU: agreement of served log-probs, adapter swap, speed. `python -m benchmarks.gpu --out FILE`.

The server is the one that training runs use (`sparkrl.rollout.engine`), without Ray around it. Figures are printed and
written as JSON with the device and the versions they were taken on.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_model
from sparkrl.rollout.engine import RolloutServer
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Adapter, Group, Problem, Sampling, TrainSequence

TOKENIZER = Path(__file__).parent.parent / "recipes/quickstart/checkpoint"
PROMPT, NEW, SEQUENCES = 64, 64, 64
SPEED_SEQUENCES, SPEED_NEW = 256, 256


def spec(folder: Path, *, max_num_seqs: int = SPEED_SEQUENCES) -> ServerSpec:
    """A server for this checkpoint on one GPU."""
    return ServerSpec(
        model_path=str(folder),
        dtype="bfloat16",
        max_tokens=PROMPT + SPEED_NEW,
        tensor_parallel_size=1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16384,
        kv_cache_bytes=4 << 30,
        num_threads=4,
        lora_rank=32,
        lora_alpha=64,
        request_timeout_s=300.0,
        seed=0,
        device="cuda",
    )


def agreement(reference: gpu_model.Reference, groups: list[Group]) -> dict[str, float]:
    """k3 and size of the difference between served and reference log-probs, nats, with and without replayed routes.

    Sequences that stopped early are left out.
    """
    pairs = [(group.problem, group.responses[0]) for group in groups if len(group.responses[0].token_ids) == NEW]
    ids = torch.tensor(np.stack([np.concatenate([problem.prompt_ids, r.token_ids]) for problem, r in pairs])).long()
    routes = torch.tensor(np.stack([response.routed_experts for _, response in pairs]))
    served = torch.tensor(np.stack([response.log_probs for _, response in pairs]))
    out: dict[str, float] = {"tokens": float(served.numel())}
    for name, replayed in (("", routes), ("_no_replay", None)):
        figures = gpu_model.gap(reference.score(ids, PROMPT, replayed), served)
        out |= {f"{key}{name}": value for key, value in figures.items()}
    return out


async def sample(server: RolloutServer, problems: list[Problem], num_tokens: int) -> list[Group]:
    """One response to each problem from whatever the server has loaded, the base model included."""
    return await server._sample(problems, Sampling(max_tokens=num_tokens))


async def swap_times(server: RolloutServer, adapters: list[Adapter]) -> dict[str, float]:
    """Milliseconds to serve another version: the whole call, and the part inside the worker, medians."""
    whole, inside = [], []
    for adapter in adapters * 4:
        began = time.perf_counter()
        await server.load_adapter(adapter)
        whole.append(time.perf_counter() - began)
        inside.append((await server._rpc("sparkrl_report"))[0]["swap_s"])
    return {
        "adapter_mib": adapters[0].buffer.nbytes / 2**20,
        "tensors": float(len(adapters[0].manifest)),
        "call_ms": 1e3 * statistics.median(whole[1:]),
        "into_buffers_ms": 1e3 * statistics.median(inside[1:]),
    }


def device_copy_ms(num_bytes: int) -> float:
    """Median milliseconds of a copy of so many bytes within GPU memory."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[5:])


async def speed(server: RolloutServer, problems: list[Problem]) -> dict[str, float]:
    """Sampled tokens a second at `SPEED_SEQUENCES` sequences; routes and log-probs are returned, as in training."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        groups = await sample(server, problems, SPEED_NEW)
        times.append(time.perf_counter() - began)
    tokens = sum(len(group.responses[0].token_ids) for group in groups)
    return {"tokens_per_s": tokens / statistics.median(times), "seconds": statistics.median(times)}


async def measure(folder: Path, fields: dict[str, Any], *, with_speed: bool) -> dict[str, Any]:
    """All figures of one checkpoint."""
    adapters = [gpu_model.adapter(fields, version=v, seed=v) for v in (1, 2)]
    server = RolloutServer(spec(folder))
    out: dict[str, Any] = {"start": await server.start()}
    try:
        few, many = (gpu_model.prompts(n, fields["vocab_size"], length=PROMPT) for n in (SEQUENCES, SPEED_SEQUENCES))
        base = await sample(server, few, NEW)
        await server.load_adapter(adapters[0])
        adapted = await sample(server, few, NEW)
        out["swap"] = await swap_times(server, adapters[::-1])
        again = await sample(server, few, NEW)
        if with_speed:
            out["speed_adapter"] = await speed(server, many)
            await server.unload_adapter()
            out["speed_base"] = await speed(server, many)
    finally:
        await server.stop()
    base_reference = gpu_model.Reference(folder, fields, None)
    out["base_vs_base"] = agreement(base_reference, base)
    out["adapter_vs_base"] = agreement(base_reference, adapted)
    del base_reference
    merged_reference = gpu_model.Reference(folder, fields, adapters[0])
    out["adapter_vs_merged"] = agreement(merged_reference, adapted)
    out["after_swaps_vs_merged"] = agreement(merged_reference, again)
    del merged_reference
    out["trainer"] = train(folder, adapted, adapters[0])
    out["swap"]["device_copy_ms"] = device_copy_ms(adapters[0].buffer.nbytes // 2)
    out["swap"]["ratio_to_device_copy"] = out["swap"]["into_buffers_ms"] / out["swap"]["device_copy_ms"]
    return out


def train(folder: Path, groups: list[Group], adapter: Adapter, *settings: str) -> dict[str, float]:
    """One trainer rank over served responses: agreement in bfloat16 and speed of an optimizer step.

    Args:
        settings: of the run's config, on top of the quickstart's.
    """
    # here, because vLLM's own process imports this module again
    from sparkrl.config.load import load
    from sparkrl.lora.peft_format import from_peft, unpack
    from sparkrl.trainer.batch import Row, Totals, num_fed, plan
    from sparkrl.trainer.metrics import agreement as trainer_agreement
    from sparkrl.trainer.worker import TrainerWorker

    overrides = [f"model.path={folder}", f"model.max_tokens={PROMPT + SPEED_NEW}", "data.max_prompt_tokens=64"]
    # no learning, so that every timed step does the same: soon all tokens would be clipped and nothing left to learn
    overrides.append("trainer.optimizer.lr=0")
    cfg = load(["recipe=quickstart", "cluster=gpu1", *overrides, "trainer.max_tokens_per_micro_batch=8192", *settings])
    worker = TrainerWorker(0, 1, cfg)
    worker.start(*worker.open_store(), str(folder), 0)
    parameters = worker.engine.trainable()
    for name, value in from_peft(unpack(adapter), rank=cfg.lora.rank).items():
        parameters[name].to_local().data.copy_(value)  # type: ignore[operator]
    random = np.random.default_rng(0)
    sequences = [
        TrainSequence(
            uid=response.uid,
            prompt_ids=group.problem.prompt_ids,
            response_ids=response.token_ids,
            rollout_log_probs=response.log_probs,
            routed_experts=response.routed_experts,
            advantages=np.full(len(response.token_ids), random.choice([-1.0, 1.0]), dtype=np.float32),
        )
        for group in groups
        for response in group.responses
    ]
    rows = [Row(index=i, sequence=s, old_log_probs=s.rollout_log_probs) for i, s in enumerate(sequences)]
    lengths = [num_fed(s) for s in sequences]
    parts = [[rows[i] for i in part] for part in plan(lengths, num_ranks=1, max_tokens=8192)[0]]
    totals = Totals(num_tokens=sum(len(s.response_ids) for s in sequences), num_sequences=len(sequences), num_ranks=1)
    out: dict[str, float] = {}
    for name, pin in (("", True), ("_no_replay", False)):
        found = worker.score(parts, temperature=1.0, pin=pin).log_probs
        gap = np.concatenate([found[i] - s.rollout_log_probs for i, s in enumerate(sequences)])
        out |= {key.removeprefix("agree/"): value for key, value in trainer_agreement(gap, suffix=name).items()}
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = worker.update(parts, totals, temperature=1.0, pin=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    worker.stop()
    step_s = statistics.median(seconds[2:])
    return out | {
        "step_s": step_s,
        "tokens_per_s": sum(lengths) / step_s,
        "peak_mem_gib": result.peak_mem_gib,
        "grad_norm": result.figures["grad_norm"],
    }


def main() -> None:
    """Measure and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench_gpu.json"))
    parser.add_argument("--forms", default="nvfp4,bf16", help="which forms of the experts to serve")
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args()
    fields = gpu_model.shape()
    for name, value in spec(Path()).environment().items():
        os.environ.setdefault(name, value)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in ("vllm", "transformers", "verl", "ray")},
        "model": fields,
    }
    for form in args.forms.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = gpu_model.build(Path(scratch) / form, fields, tokenizer=TOKENIZER, nvfp4=form == "nvfp4")
            result[form] = asyncio.run(measure(folder, fields, with_speed=not args.no_speed))
        args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
        print(json.dumps(result[form], default=str), flush=True)


if __name__ == "__main__":
    main()
