"""GRPO, one line a stage."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sparkrl.config.schema import Config
from sparkrl.loop.batch import build_batch, rollout_metrics
from sparkrl.loop.interrupt import Interrupt
from sparkrl.loop.parts import Parts, build_parts


async def train(config: Config) -> Path:
    """Run a recipe to its end.

    Returns:
        The run folder, with checkpoints, metrics, `summary.json` and `report.html`.
    """
    task = asyncio.current_task()
    assert task is not None
    with Interrupt(task).installed() as interrupt:
        async with build_parts(config) as parts:
            await run_loop(parts, config, interrupt)
            return parts.run.path


async def run_loop(parts: Parts, cfg: Config, interrupt: Interrupt) -> None:
    """Sample, score, train, swap; evaluate and save on schedule."""
    telemetry = parts.telemetry
    if parts.first_step == 0:
        await parts.evaluate(step=0)
    for step in range(parts.first_step, cfg.loop.num_steps):
        with interrupt.step():
            problems = parts.data.take(cfg.loop.num_prompts)
            with telemetry.stage("rollout"):
                groups = await parts.rollout.sample(
                    problems,
                    num_responses=cfg.loop.group_size,
                    temperature=cfg.rollout.temperature,
                    top_p=cfg.rollout.top_p,
                    max_tokens=cfg.rollout.max_response_tokens,
                    seed=parts.sampling_seed(step),
                )
            with telemetry.stage("reward"):
                scored = await parts.rewarder.score(groups)
            with telemetry.stage("train"):
                batch = build_batch(
                    scored,
                    policy_version=step,
                    temperature=cfg.rollout.temperature,
                    advantage=cfg.algorithm.advantage,
                )
                result = await parts.trainer.step(batch)
            with telemetry.stage("swap"):
                await parts.rollout.load_adapter(await parts.trainer.adapter(step + 1))
            metrics = rollout_metrics(scored) | parts.rewarder.metrics() | result.metrics
            telemetry.log_step(step + 1, metrics, dlogp=result.dlogp, samples=scored)
        if interrupt.requested:
            parts.interrupted = True
            await parts.save(step + 1)
            return
        await parts.on_schedule(step + 1)
