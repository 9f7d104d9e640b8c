"""GRPO, one line a stage."""

from __future__ import annotations

import asyncio

from sparkrl.config.schema import Config
from sparkrl.loop.batch import build_batch
from sparkrl.loop.interrupt import Interrupt
from sparkrl.loop.parts import Parts, build_parts
from sparkrl.loop.sampling import sample_step
from sparkrl.loop.watch import AgreementWatch


async def train(config: Config) -> bool:
    """Run a recipe to its end, or until a signal asks it to stop.

    Returns:
        Whether every step was made.
    """
    task = asyncio.current_task()
    assert task is not None
    with Interrupt(task).installed() as interrupt:
        async with build_parts(config) as parts:
            await run_loop(parts, config, interrupt)
            return not parts.interrupted


async def run_loop(parts: Parts, cfg: Config, interrupt: Interrupt) -> None:
    """Sample, score, train, swap; evaluate and save on schedule."""
    telemetry, watch = parts.telemetry, AgreementWatch(cfg)
    await parts.evaluate_first()
    for step in range(parts.first_step, cfg.loop.num_steps):
        with interrupt.step():
            sampled = await sample_step(parts, step)
            with telemetry.stage("train"):
                batch = build_batch(
                    sampled.kept,
                    policy_version=step,
                    temperature=cfg.rollout.temperature,
                    advantage=cfg.algorithm.advantage,
                    overlong_filtering=cfg.algorithm.overlong_filtering,
                )
                result = await parts.trainer.step(batch)
            with telemetry.stage("swap"):
                await parts.rollout.load_adapter(await parts.trainer.publish(step + 1))
            for warning in (*parts.rollout.take_warnings(), *parts.trainer.take_warnings()):
                telemetry.warn(warning)
            metrics = sampled.metrics | result.metrics | parts.rollout.metrics()
            telemetry.log_step(step + 1, metrics, dlogp=result.dlogp, samples=sampled.all)
            watch.see(metrics["agree/k3"])
            # Inside the step: a signal lets the save finish, so a step that was made is never lost to it.
            await parts.save_if_due(step + 1, stopping=interrupt.requested or watch.exhausted)
            watch.check(step + 1)
        if interrupt.requested:
            parts.interrupted = True
            return
        await parts.evaluate_if_due(step + 1)
