"""Sampling at 256 sequences: base model, with the adapter, and with vLLM's own LoRA of linear layers.

Base and adapter take turns on the same server. vLLM's own LoRA ("stock punica") wants adapter and activations in one
type, and the trainer's adapter is fp32, so it is measured in fp32 alone; the experts' adapter, which stock vLLM does
not have on CPU, is the package's in both cases.
"""

from __future__ import annotations

import statistics

import ray

from benchmarks.figures import Figure
from benchmarks.server import StockPunicaSpec, config, measured_server, problems, random_adapter
from sparkrl.loop.cluster import ray_cluster
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Sampling

NAME = "rollout"
PROMPTS, GROUP, MAX_TOKENS = 32, 8, 32
REPEATS = 2
SIZES = (
    f"the quickstart's model, {PROMPTS} prompts of about 40 tokens, {GROUP} responses each of at most {MAX_TOKENS} "
    "tokens, rank-32 adapter on everything"
)
COMPARED = ("float32", 2)
"""Compute type and threads of the servers that differ in the LoRA of linear layers."""
SERVERS = (
    ("float32", 1, ServerSpec),
    (*COMPARED, ServerSpec),
    (*COMPARED, StockPunicaSpec),
    ("bfloat16", 1, ServerSpec),
    ("bfloat16", 2, ServerSpec),
)


def run() -> list[Figure]:
    """One server after the other."""
    figures = []
    adapted: dict[type[ServerSpec], float] = {}
    with ray_cluster(config()):
        for dtype, threads, spec_class in SERVERS:
            case = f"{dtype}, {threads} thread{'s' if threads > 1 else ''}"
            if spec_class is StockPunicaSpec:
                case += ", stock punica"
            base, adapter = _measure(dtype, threads, spec_class)
            if (dtype, threads) == COMPARED:
                adapted[spec_class] = adapter
            figures += [
                Figure(benchmark=NAME, case=f"{case}: base", value=base, unit="tok/s"),
                Figure(
                    benchmark=NAME,
                    case=f"{case}: adapter",
                    value=adapter,
                    unit="tok/s",
                    ratio=adapter / base,
                    meaning="its speed / base's on the same server",
                ),
            ]
    ours, stock = adapted[ServerSpec], adapted[StockPunicaSpec]
    return [
        *figures,
        Figure(
            benchmark=NAME,
            case=f"{COMPARED[0]}, {COMPARED[1]} threads: adapter",
            value=ours,
            unit="tok/s",
            ratio=ours / stock,
            meaning="its speed / stock punica's",
        ),
    ]


def _measure(dtype: str, threads: int, spec_class: type[ServerSpec]) -> tuple[float, float]:
    """Tokens a second of the base model and with the adapter."""
    cfg = config(f"rollout.dtype={dtype}", f"rollout.num_threads={threads}")
    sampling = Sampling(num_responses=GROUP, max_tokens=MAX_TOKENS)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    with measured_server(cfg, spec_class=spec_class) as server:
        ray.get(server.load_adapter.remote(random_adapter(cfg)))
        prompts = ray.put(problems(cfg, PROMPTS))
        for _ in range(1 + REPEATS):
            for adapter, values in speeds.items():
                tokens, seconds = ray.get(server.timed_sample.remote(prompts, sampling, adapter=adapter))
                values.append(tokens / seconds)
    return statistics.median(speeds[False][1:]), statistics.median(speeds[True][1:])
