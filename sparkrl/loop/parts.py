"""Builds the parts of a run, and takes them down in reverse order whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkrl.config.schema import Config
from sparkrl.data import ProblemStream, load_problems, load_tokenizer
from sparkrl.errors import CheckpointError
from sparkrl.evals import evaluate
from sparkrl.loop.cluster import ray_cluster
from sparkrl.reward import Rewarder
from sparkrl.rollout import RolloutPool
from sparkrl.telemetry import RunFolder, Telemetry
from sparkrl.trainer import TrainerGroup
from sparkrl.types import Problem

LOOP_STATE = "loop_state.json"
# Evaluations draw the same noise every time, and never that of a training step.
EVAL_SEED_OFFSET = 1_000_003


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything one run works with."""

    config: Config
    data: ProblemStream
    eval_problems: tuple[Problem, ...]
    rollout: RolloutPool
    rewarder: Rewarder
    trainer: TrainerGroup
    telemetry: Telemetry
    run: RunFolder
    first_step: int
    """Steps already made by the run that is gone on with; 0 for a new one."""

    def sampling_seed(self, step: int) -> int:
        """Seed of the responses of one training step; the same whether or not the run was resumed before it."""
        return self.config.seed * 1_000_000 + step

    async def evaluate(self, step: int) -> None:
        """Evaluate the policy that is being served, if the config names an evaluation set."""
        if not self.eval_problems:
            return
        with self.telemetry.stage("eval"):
            result, scored = await evaluate(
                self.rollout,
                self.rewarder,
                self.eval_problems,
                self.config.eval,
                step=step,
                max_tokens=self.config.rollout.max_response_tokens,
                seed=self.config.seed + EVAL_SEED_OFFSET,
            )
        self.telemetry.log_eval(result, scored)

    async def save(self, step: int) -> Path:
        """Write a checkpoint: PEFT adapter, optimizer state, position in the data."""
        with self.telemetry.stage("save"), self.run.new_checkpoint(step) as folder:
            await self.trainer.save(folder)
            state = {"step": step, "data": self.data.state()}
            (folder / LOOP_STATE).write_text(json.dumps(state, indent=1) + "\n")
        self.run.prune_checkpoints(self.config.loop.keep_checkpoints)
        return self.run.checkpoint(step)

    async def on_schedule(self, step: int) -> None:
        """Save and evaluate where the config asks for it; the last step does both."""
        last = step == self.config.loop.num_steps
        if last or step % self.config.loop.save_every == 0:
            await self.save(step)
        if last or step % self.config.eval.every == 0:
            await self.evaluate(step)


@asynccontextmanager
async def build_parts(config: Config) -> AsyncIterator[Parts]:
    """Start Ray, server, trainer and reward workers; stop them at the end, also after an error or a cancellation."""
    async with AsyncExitStack() as stack:
        run = RunFolder.open(Path(config.loop.resume)) if config.loop.resume else RunFolder.create(config)
        telemetry = stack.enter_context(Telemetry(config, run))
        with telemetry.stage("data"):
            data, eval_problems = _load_data(config, telemetry)
        with telemetry.stage("ray"):
            stack.enter_context(ray_cluster(config))
        rewarder = Rewarder.start(config.reward)
        stack.push_async_callback(rewarder.stop)
        with telemetry.stage("server and trainer"):
            rollout, trainer = await _start_both(config, stack)
        first_step = 0
        if config.loop.resume:
            first_step = await _restore(run, data, trainer)
        with telemetry.stage("first adapter"):
            await rollout.load_adapter(await trainer.adapter(first_step))
        telemetry.log_setup({**rollout.info, **trainer.info})
        yield Parts(
            config=config,
            data=data,
            eval_problems=eval_problems,
            rollout=rollout,
            rewarder=rewarder,
            trainer=trainer,
            telemetry=telemetry,
            run=run,
            first_step=first_step,
        )


def _load_data(config: Config, telemetry: Telemetry) -> tuple[ProblemStream, tuple[Problem, ...]]:
    tokenizer = load_tokenizer(config.model.path)
    loaded = load_problems(config.data.path, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens)
    telemetry.say(f"training data: {loaded.describe()}")
    stream = ProblemStream(loaded.problems, seed=config.seed, shuffle=config.data.shuffle)
    if config.eval.path is None:
        return stream, ()
    held_out = load_problems(config.eval.path, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens)
    telemetry.say(f"evaluation data: {held_out.describe()}")
    return stream, held_out.problems


async def _start_both(config: Config, stack: AsyncExitStack) -> tuple[RolloutPool, TrainerGroup]:
    """Server and trainer come up side by side; when one fails the other is still taken down."""

    async def start_rollout() -> RolloutPool:
        pool = await RolloutPool.start(config)
        stack.push_async_callback(pool.stop)
        return pool

    async def start_trainer() -> TrainerGroup:
        group = await TrainerGroup.start(config, run_seed=config.seed)
        stack.push_async_callback(group.stop)
        return group

    tasks = asyncio.create_task(start_rollout()), asyncio.create_task(start_trainer())
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _restore(run: RunFolder, data: ProblemStream, trainer: TrainerGroup) -> int:
    folder = run.latest_checkpoint()
    if folder is None:
        raise CheckpointError(f"there is no complete checkpoint to resume from in {run.path}")
    try:
        state = json.loads((folder / LOOP_STATE).read_text())
        step, position = int(state["step"]), state["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{os.fspath(folder / LOOP_STATE)} is missing or damaged: {error}") from error
    data.restore(position)
    await trainer.load(folder)
    run.drop_rows_after(step)
    return step
