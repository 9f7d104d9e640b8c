"""One training step through the trainer's own interface: one and two ranks, fp32 and bf16, with and without replay.

The sequences are random tokens with random routes, which spread the tokens evenly over the experts. A step is all of
`TrainerGroup.step`: packing, Ray, forward, loss, backward, optimizer.
"""

from __future__ import annotations

import asyncio
import statistics

import numpy as np

from benchmarks.figures import Figure
from benchmarks.server import config
from sparkrl.config.schema import Config
from sparkrl.loop.cluster import ray_cluster
from sparkrl.models.registry import RoutingShape, load_config
from sparkrl.trainer.group import TrainerGroup
from sparkrl.types import TrainBatch, TrainSequence

NAME = "train_step"
SEQUENCES, PROMPT, RESPONSE = 256, 40, 40
CORES, REPEATS = 2, 2
SIZES = (
    f"the quickstart's model, {SEQUENCES} sequences of {PROMPT} + {RESPONSE} tokens, rank-32 adapter on everything, "
    f"{CORES} threads in all"
)
RANKS = ((1, "float32"), (2, "float32"), (1, "bfloat16"), (2, "bfloat16"))


def run() -> list[Figure]:
    """One group of ranks after the other; with and without replay take turns on the same group."""
    speed: dict[tuple[int, str, bool], float] = {}
    with ray_cluster(config("trainer.num_workers=2")):
        for ranks, dtype in RANKS:
            cfg = config(
                f"trainer.num_workers={ranks}",
                f"trainer.dtype={dtype}",
                f"trainer.num_threads={CORES // ranks}",
                "trainer.compare_without_replay_every=0",
            )
            with_replay, without = asyncio.run(_measure(cfg))
            speed[ranks, dtype, True], speed[ranks, dtype, False] = with_replay, without
    figures = []
    for (ranks, dtype, replay), value in speed.items():
        free = speed[ranks, dtype, False]
        case = f"{ranks} rank{'s' if ranks > 1 else ''}, {dtype}, {'replay' if replay else 'live routes'}"
        ratio, meaning = (None, "")
        if replay:
            ratio, meaning = value / free, "its speed / that with live routes"
        elif ranks > 1:
            ratio, meaning = value / speed[1, dtype, False], "its speed / one rank's"
        figures.append(Figure(benchmark=NAME, case=case, value=value, unit="tok/s", ratio=ratio, meaning=meaning))
    return figures


async def _measure(cfg: Config) -> tuple[float, float]:
    """Tokens a second with replay and without."""
    family, text_config = load_config(cfg.model.path)
    batch = _batch(family.routing(text_config), text_config.vocab_size)
    group = await TrainerGroup.start(cfg, run_seed=0)
    found: dict[bool, list[float]] = {True: [], False: []}
    try:
        for _ in range(1 + REPEATS):
            for replay, values in found.items():
                cfg.trainer.replay = replay  # read anew by every step
                values.append((await group.step(batch)).metrics["perf/train_tokens_per_s"])
    finally:
        await group.stop()
    return statistics.median(found[True][1:]), statistics.median(found[False][1:])


def _batch(shape: RoutingShape, vocab_size: int) -> TrainBatch:
    rng = np.random.default_rng(0)
    sequences = []
    for i in range(SEQUENCES):
        tokens = rng.integers(2, vocab_size, PROMPT + RESPONSE).astype(np.int32)
        order = rng.random((PROMPT + RESPONSE - 1, shape.num_layers, shape.num_experts)).argsort(-1)
        sequences.append(
            TrainSequence(
                uid=f"s{i}",
                prompt_ids=tokens[:PROMPT],
                response_ids=tokens[PROMPT:],
                rollout_log_probs=np.full(RESPONSE, -np.log(vocab_size), np.float32),
                routed_experts=np.ascontiguousarray(order[..., : shape.top_k]).astype(np.uint8),
                advantages=np.full(RESPONSE, rng.standard_normal(), np.float32),
            )
        )
    return TrainBatch(sequences=tuple(sequences), policy_version=0, temperature=1.0)
