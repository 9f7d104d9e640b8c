"""Rollout on one GPU: BF16 and NVFP4, adapters off and on, routes returned. `python -m benchmarks.gpu_rollout`.

Every case is a process with a server of its own. All start together, then take turns, so that each is measured alone.
The cases with everything on also bring back samples, which are scored by transformers in float32 afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_model, gpu_routes, gpu_yardstick
from benchmarks.gpu_worker import costliest
from sparkrl.rollout.engine import RolloutServer
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Adapter, Group, Problem, Sampling

TOKENIZER = Path(__file__).parent.parent / "recipes/quickstart/checkpoint"
PROMPT, NEW, SEQUENCES = 64, 256, 256
SAMPLED_NEW, SAMPLED = 64, 64
PROFILED_STEPS = 32
RANK = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case(ServerSpec):
    """A server with parts of a rollout switched off."""

    lora: str = "all"
    """Which modules carry the adapter: `none`, `attention`, `all`."""
    routes: bool = True
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Engine arguments to replace."""

    def engine_arguments(self) -> dict[str, Any]:
        settings = ServerSpec.engine_arguments(self) | {
            "worker_extension_cls": "benchmarks.gpu_worker.MeasuringExtension",
            "enable_return_routed_experts": self.routes,
        }
        if self.lora == "none":
            settings = {key: value for key, value in settings.items() if "lora" not in key}
        elif self.lora == "attention":
            settings["lora_target_modules"] = ["qkv_proj", "o_proj"]
        return settings | self.overrides


CASES: dict[str, dict[str, Any]] = {
    "plain": {"lora": "none", "routes": False},
    "routes": {"lora": "none"},
    "attention": {"lora": "attention", "routes": False},
    "all": {"routes": False},
    "all_routes": {},
    "all_routes_speed": {},
    "all_routes_no_async": {"overrides": {"async_scheduling": False}},
    "all_routes_no_graphs": {"overrides": {"enforce_eager": True, "compilation_config": {"mode": 0}}},
    "sleep": {"overrides": {"enable_sleep_mode": True}},
}
"""What differs from a server as training runs it (`all_routes`, which also samples, swaps and profiles the host)."""
DEFAULT_CASES = (
    *(f"bf16/{name}" for name in ("plain", "routes", "attention", "all", "all_routes")),
    *(f"nvfp4/{name}" for name in CASES if name not in ("routes", "all_routes_speed")),
)


def spec(folder: Path, **settings: Any) -> Case:
    """A server for this checkpoint on one GPU."""
    return Case(
        model_path=str(folder),
        dtype="bfloat16",
        max_tokens=PROMPT + NEW,
        tensor_parallel_size=1,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=SEQUENCES * PROMPT,
        kv_cache_bytes=2 << 30,
        num_threads=2,
        lora_rank=RANK,
        lora_alpha=2 * RANK,
        request_timeout_s=120.0,
        seed=0,
        device="cuda",
        **settings,
    )


def only_attention(adapter: Adapter) -> Adapter:
    """The part of an adapter that is on attention."""
    kept = tuple(spec for spec in adapter.manifest if ".self_attn." in spec.name)
    return dataclasses.replace(adapter, manifest=kept)


async def generate(server: RolloutServer, problems: list[Problem], num_tokens: int) -> list[Any]:
    """vLLM's own outputs for one response to each problem, from whatever the server has loaded."""
    return await server._generate(problems, Sampling(max_tokens=num_tokens), server._lora_request)


async def seconds(call: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Seconds that a call takes, and its result."""
    began = time.perf_counter()
    result = await call()
    return time.perf_counter() - began, result


async def speed(server: RolloutServer, problems: list[Problem]) -> dict[str, Any]:
    """Tokens a second, and the wall and GPU time of one decode step with every sequence running."""
    await generate(server, problems, PROFILED_STEPS)
    first = [await seconds(lambda: generate(server, problems, 1)) for _ in range(2)]
    whole = [await seconds(lambda: generate(server, problems, NEW)) for _ in range(3)]
    tokens = sum(len(output.outputs[0].token_ids) for output in whole[0][1])
    first_s, whole_s = (statistics.median(s for s, _ in timed) for timed in (first, whole))
    busy = []
    for num_tokens in (1, 1 + PROFILED_STEPS):
        await server._rpc("bench_profile_start")
        await generate(server, problems, num_tokens)
        busy.append((await server._rpc("bench_profile_stop"))[0])
    few, many = busy
    per_step = {
        name: (value - few["kernels"].get(name, 0.0)) / PROFILED_STEPS for name, value in many["kernels"].items()
    }
    launches = {name: (n - few["counts"].get(name, 0)) / PROFILED_STEPS for name, n in many["counts"].items()}
    return {
        "tokens_per_s": tokens / whole_s,
        "tokens_per_s_all": [tokens / s for s, _ in whole],
        "prefill_s": first_s,
        "step_wall_ms": 1e3 * (whole_s - first_s) / (NEW - 1),
        "step_gpu_ms": (many["busy"] - few["busy"]) / PROFILED_STEPS / 1e3,
        "kernels_per_step": sum(launches.values()),
        "top_us_per_step": [
            [name[:90], round(per_step[name], 1), round(launches[name], 1)]
            for name in sorted(per_step, key=lambda name: -per_step[name])[:24]
        ],
    }


async def host_profile(server: RolloutServer, problems: list[Problem]) -> dict[str, Any]:
    """Where a decode step's Python time goes, in the engine's process and in this one; both run slower for it."""
    here = cProfile.Profile()
    await server._rpc("bench_host_profile_start")
    here.enable()
    took, _ = await seconds(lambda: generate(server, problems, PROFILED_STEPS))
    here.disable()
    engine = (await server._rpc("bench_host_profile_stop"))[0]
    return {"steps": PROFILED_STEPS, "seconds": took, "engine": engine, "front_end": costliest(here)}


async def streamed(server: RolloutServer, problems: list[Problem]) -> dict[str, Any]:
    """Speed with one message a token, as stock vLLM sends them."""
    await server._rpc("bench_patches", {"whole_outputs": False})
    found = await speed(server, problems)
    await server._rpc("bench_patches", {"whole_outputs": True})
    return {key: found[key] for key in ("tokens_per_s", "tokens_per_s_all", "step_wall_ms")}


async def samples(server: RolloutServer, problems: list[Problem], adapters: list[Adapter], out: Path) -> dict[str, Any]:
    """Samples of the base model, of an adapter, and of the same adapter after it was swapped for others; swap times."""

    async def sample() -> list[Group]:
        return await server._sample(problems, Sampling(max_tokens=SAMPLED_NEW))

    await server.unload_adapter()
    taken = {"base": await sample()}
    await server.load_adapter(adapters[0])
    taken["adapter"] = await sample()
    calls, inside = [], []
    for adapter in [*adapters[1:], adapters[0]] * 4:
        calls.append((await seconds(partial(server.load_adapter, adapter)))[0])
        inside.append((await server._rpc("sparkrl_report"))[0]["swap_s"])
    taken["after_swaps"] = await sample()
    arrays: dict[str, np.ndarray] = {}
    for name, groups in taken.items():
        pairs = [(g.problem, g.responses[0]) for g in groups if len(g.responses[0].token_ids) == SAMPLED_NEW]
        arrays[f"{name}.ids"] = np.stack([np.concatenate([p.prompt_ids, r.token_ids]) for p, r in pairs])
        arrays[f"{name}.routes"] = np.stack([r.routed_experts for _, r in pairs])
        arrays[f"{name}.log_probs"] = np.stack([r.log_probs for _, r in pairs])
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return {
        "adapter_mib": adapters[0].buffer.nbytes / 2**20,
        "tensors": len(adapters[0].manifest),
        "swaps": len(calls),
        "call_ms": 1e3 * statistics.median(calls[1:]),
        "into_buffers_ms": 1e3 * statistics.median(inside[1:]),
    }


async def sleep_and_wake(server: RolloutServer, problems: list[Problem]) -> dict[str, Any]:
    """Seconds of vLLM's sleep (level 1: weights to the host) and wake, and whether the same is served afterwards."""

    async def first_tokens() -> np.ndarray:
        groups = await server._sample(problems, Sampling(max_tokens=8))
        return np.array([(g.responses[0].token_ids[0], g.responses[0].log_probs[0]) for g in groups])

    before, again = await first_tokens(), await first_tokens()
    written = (await server._rpc("bench_adapter_sums"))[0]
    times = []
    for _ in range(3):
        asleep, _ = await seconds(lambda: server._engine.sleep(level=1))
        free, _ = torch.cuda.mem_get_info()
        awake, _ = await seconds(server._engine.wake_up)
        survived = float(np.mean(np.equal((await server._rpc("bench_adapter_sums"))[0], written)))
        times.append(
            {
                "sleep_s": asleep,
                "wake_s": awake,
                "free_while_asleep_gib": free / 2**30,
                "equal_adapter_buffers": survived,
            }
        )
    free_awake, _ = torch.cuda.mem_get_info()
    after = await first_tokens()
    return {
        "adapter_buffers": len(written),
        "same_tokens_awake": float((again[:, 0] == before[:, 0]).mean()),
        "same_tokens": float((after[:, 0] == before[:, 0]).mean()),
        "rounds": times,
        "free_awake_gib": free_awake / 2**30,
        "median_change": float(np.median(np.abs(after[:, 1] - before[:, 1]))),
    }


async def measure(name: str, folder: Path, fields: dict[str, Any], turn: Path) -> dict[str, Any]:
    """All figures of one case; waits for its turn once the server is up."""
    case = spec(folder, **CASES[name])
    began = time.perf_counter()
    versions = {"none": (), "attention": (1,), "all": (1, 2, 3) if name == "all_routes" else (1,)}[case.lora]
    adapters = [gpu_model.adapter(fields, rank=RANK, version=v, seed=v) for v in versions]
    if case.lora == "attention":
        adapters = [only_attention(adapter) for adapter in adapters]
    server = RolloutServer(case)
    try:
        server._make_engine()
        if adapters:
            await server._load(adapters[0])
        many = gpu_model.prompts(SEQUENCES, fields["vocab_size"], length=PROMPT)
        await generate(server, many[:8], 4)
        out: dict[str, Any] = {"start_s": time.perf_counter() - began}
        turn.with_suffix(".ready").touch()
        while not turn.with_suffix(".go").exists():
            await asyncio.sleep(0.1)
        out["memory"] = (await server._rpc("bench_memory"))[0]
        if name == "sleep":
            return out | {"sleep": await sleep_and_wake(server, many[:16])}
        out |= await speed(server, many)
        if name == "all_routes":
            whole = [await seconds(lambda: server._sample(many, Sampling(max_tokens=NEW))) for _ in range(3)]
            tokens = sum(len(group.responses[0].token_ids) for group in whole[0][1])
            out["sample_tokens_per_s"] = tokens / statistics.median(s for s, _ in whole)
            out["streamed"] = await streamed(server, many)
            out["patches"] = await gpu_routes.compare(server, many[:4])
            out["host"] = await host_profile(server, many)
            out["swap"] = await samples(server, many[:SAMPLED], adapters, turn.with_suffix(".npz"))
        out["memory"] = (await server._rpc("bench_memory"))[0]
        return out
    finally:
        await server.stop()


def agreement(folder: Path, fields: dict[str, Any], samples_at: Path) -> dict[str, dict[str, float]]:
    """Served log-probs against transformers in float32 over the dequantized weights, the adapter merged."""
    found = np.load(samples_at)
    out = {}
    for against, adapter in (("base", None), ("merged", gpu_model.adapter(fields, rank=RANK, version=1, seed=1))):
        reference = gpu_model.Reference(folder, fields, adapter)
        for served in ("base", "adapter", "after_swaps"):
            if (served, against) in (("base", "merged"), ("after_swaps", "base")):
                continue
            ids = torch.from_numpy(found[f"{served}.ids"]).long()
            routes = torch.from_numpy(found[f"{served}.routes"])
            log_probs = torch.from_numpy(found[f"{served}.log_probs"])
            figures = {"tokens": float(log_probs.numel())}
            for suffix, replayed in (("", routes), ("_no_replay", None)):
                gap = gpu_model.gap(reference.score(ids, PROMPT, replayed), log_probs)
                figures |= {f"{key}{suffix}": value for key, value in gap.items()}
            out[f"{served}_vs_{against}"] = figures
        del reference
    yardstick = out["base_vs_base"]["k3"]
    return out | {
        "ratios": {
            f"{name}_over_base": out[f"{name}_vs_merged"]["k3"] / yardstick for name in ("adapter", "after_swaps")
        }
    }


def yardstick(folder: Path, fields: dict[str, Any], samples_at: Path) -> dict[str, dict[str, float]]:
    """What each rounding to bfloat16 adds to the base model's distance, over the tokens and routes that were served."""
    found = np.load(samples_at)
    reference = gpu_yardstick.RoundingReference(folder, fields)
    return gpu_yardstick.table(
        reference,
        torch.from_numpy(found["base.ids"]).long(),
        PROMPT,
        torch.from_numpy(found["base.routes"]),
        torch.from_numpy(found["base.log_probs"]),
    )


def run_all(cases: list[str], folders: dict[str, Path], fields: dict[str, Any], out: Path, limit_s: float) -> dict:
    """Start every case, give each its turn, and collect what they wrote."""
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        workers = {}
        for case in cases:
            form, _, name = case.partition("/")
            turn = Path(scratch) / f"{form}_{name}"
            command = [sys.executable, "-m", "benchmarks.gpu_rollout", "--case", name, "--folder", str(folders[form])]
            log = (out.parent / f"{turn.name}.log").open("w")
            workers[case] = (turn, subprocess.Popen([*command, "--turn", str(turn)], stdout=log, stderr=log))
        for turn, worker in workers.values():
            while worker.poll() is None and not turn.with_suffix(".ready").exists():
                if time.monotonic() - began > limit_s:
                    worker.kill()
                time.sleep(0.2)
        print(f"all up after {time.monotonic() - began:.0f} s", flush=True)
        for case, (turn, worker) in workers.items():
            turn.with_suffix(".go").touch()
            try:
                worker.wait(max(10.0, limit_s - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                worker.kill()
            written = turn.with_suffix(".json")
            if not written.exists():
                tail = (out.parent / f"{turn.name}.log").read_text()[-1500:]
                result[case] = {"failed": tail}
                print(f"{case} FAILED: {tail}", flush=True)
                continue
            result[case] = json.loads(written.read_text())
            brief = {key: value for key, value in result[case].items() if isinstance(value, float)}
            print(case, json.dumps(brief), f"at {time.monotonic() - began:.0f} s", flush=True)
            out.write_text(json.dumps(result, indent=1) + "\n")
            if turn.with_suffix(".npz").exists():
                turn.with_suffix(".npz").replace(out.parent / f"{turn.name}.npz")
    return result


def main() -> None:
    """Measure, score, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench_gpu_rollout.json"))
    parser.add_argument("--models", type=Path, default=Path("bench_gpu_models"), help="folder of the checkpoints")
    parser.add_argument("--cases", default=",".join(DEFAULT_CASES), help="form/case, separated by commas")
    parser.add_argument("--limit-s", type=float, default=420.0, help="no case starts its turn after so many seconds")
    parser.add_argument("--yardstick", action="store_true", help="also what each rounding to bfloat16 adds (slow)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    fields = gpu_model.large()
    if args.case:
        for key, value in spec(args.folder).environment().items():
            os.environ.setdefault(key, value)
        figures = asyncio.run(measure(args.case, args.folder, fields, args.turn))
        args.turn.with_suffix(".json").write_text(json.dumps(figures) + "\n")
        return
    cases = args.cases.split(",")
    folders = {form: args.models / form for form in sorted({case.partition("/")[0] for case in cases})}
    for form, folder in folders.items():
        if not folder.exists():
            gpu_model.build(folder, fields, tokenizer=TOKENIZER, nvfp4=form == "nvfp4", device="cuda")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = run_all(cases, folders, fields, args.out, args.limit_s)
    for form, folder in folders.items():
        samples_at = args.out.parent / f"{form}_all_routes.npz"
        if samples_at.exists():
            result[f"{form}/agreement"] = agreement(folder, fields, samples_at)
            print(form, json.dumps(result[f"{form}/agreement"]), flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
            if args.yardstick:
                result[f"{form}/yardstick"] = yardstick(folder, fields, samples_at)
    result["model"] = fields | {f"parameters_{key}": n for key, n in gpu_model.num_parameters(fields).items()}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
