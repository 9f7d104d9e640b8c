"""Builds the parts of a run, and takes them down in reverse order whatever happens."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter

from sparkrl.config.load import from_yaml
from sparkrl.config.rules import learning_rate_advice
from sparkrl.config.schema import Config
from sparkrl.data import ProblemStream, load_problems, load_tokenizer
from sparkrl.errors import CheckpointError, ConfigError, SparkrlError
from sparkrl.evals import evaluate, with_gain
from sparkrl.loop.cluster import ray_cluster
from sparkrl.loop.preflight import check_compiler, check_model
from sparkrl.loop.transport import settle_transport
from sparkrl.reward import Rewarder
from sparkrl.rollout import RolloutPool
from sparkrl.telemetry import RunFolder, RunStatus, Telemetry, only_writer
from sparkrl.trainer.group import TrainerGroup
from sparkrl.types import Problem

LOOP_STATE = "loop_state.json"
SAME_ON_RESUME = ("seed", "lora", "loop.num_prompts", "loop.group_size", "rollout.dtype", "trainer.dtype")
_SEEDS_A_RUN = 1_000_000


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
    interrupted: bool = False
    """Whether the run was asked to stop before its last step."""

    def sampling_seed(self, step: int) -> int:
        """Seed of the responses of one training step; the same whether or not the run was resumed before it."""
        return self.config.seed * _SEEDS_A_RUN + step

    async def evaluate_first(self) -> None:
        """Evaluate before the first step: always in a new run, and in a resumed one where the evaluation that goes with
        its checkpoint is missing because the run was stopped between the two."""
        evaluated = {row["step"] for row in self.run.rows("metrics") if row.get("kind") == "eval"}
        if self.first_step == 0 or (self._evaluates_at(self.first_step) and self.first_step not in evaluated):
            await self.evaluate(self.first_step)

    async def evaluate(self, step: int) -> None:
        """Evaluate the policy that is being served, if the config names an evaluation set."""
        if not self.eval_problems:
            return
        with self.telemetry.stage("eval"):
            evaluation = await evaluate(
                self.rollout,
                self.rewarder,
                self.eval_problems,
                self.config.eval,
                step=step,
                max_tokens=self.config.rollout.max_response_tokens,
                seed=eval_seed(self.config),
                problems_at_once=eval_problems_at_once(self.config),
            )
        # Before the first step the adapter changes nothing: that evaluation is the baseline of the later ones.
        baseline = self.run.answers(0) if step else ()
        evaluation = with_gain(evaluation, baseline, self.config.eval)
        self.telemetry.log_eval(evaluation.result, evaluation.answers, baseline)

    async def save(self, step: int) -> None:
        """Write a checkpoint: PEFT adapter, optimizer state, position in the data."""
        keep = self.config.loop.keep_checkpoints
        with self.telemetry.stage("save"), self.run.checkpoint(step, keep=keep) as folder:
            await self.trainer.save(folder)
            state = {"step": step, "data": self.data.state()}
            (folder / LOOP_STATE).write_text(json.dumps(state, indent=1) + "\n")

    async def save_if_due(self, step: int, *, stopping: bool) -> None:
        """Save where the config asks for it, before an evaluation (interrupting one costs no step), after the last step
        and when the run is about to stop."""
        if stopping or self._evaluates_at(step) or step % self.config.loop.save_every == 0:
            await self.save(step)

    async def evaluate_if_due(self, step: int) -> None:
        """Evaluate where the config asks for it, and after the last step."""
        if self._evaluates_at(step):
            await self.evaluate(step)

    def _evaluates_at(self, step: int) -> bool:
        return step == self.config.loop.num_steps or step % self.config.eval.every == 0


def eval_seed(config: Config) -> int:
    """Seed of every evaluation: they draw the same noise every time, and never that of a training step of the run."""
    return (config.seed + 1) * _SEEDS_A_RUN + 3


def eval_problems_at_once(config: Config) -> int:
    """Problems of one call to the servers: as the config says, else enough to fill every server twice, so that it is
    busy to the end of most of a call while a kill costs the answers of one call only."""
    fills = 2 * config.rollout.max_num_seqs * config.rollout.num_replicas
    return config.eval.problems_at_once or max(fills // config.eval.k, 1)


@asynccontextmanager
async def build_parts(config: Config) -> AsyncIterator[Parts]:
    """Start Ray, server, trainer and reward workers; stop them at the end, also after an error or a cancellation.

    The run's summary and report are written at the end in either case.
    """
    check_model(config)
    check_compiler(config)
    run = _open_to_resume(config, config.loop.resume) if config.loop.resume else RunFolder.create(config)
    with only_writer(run.path):
        telemetry = Telemetry(config, run)
        status = RunStatus.FAILED
        try:
            async with AsyncExitStack() as stack:
                parts = await _start(config, run, telemetry, stack)
                yield parts
                status = RunStatus.INTERRUPTED if parts.interrupted else RunStatus.FINISHED
        except asyncio.CancelledError:
            status = RunStatus.INTERRUPTED
            raise
        finally:
            error = sys.exception()
            try:
                telemetry.finish(status)
            except SparkrlError as also:
                if error is None:
                    raise
                error.add_note(f"besides, {also.message}")  # what ended the run is what the user has to see


async def _start(config: Config, run: RunFolder, telemetry: Telemetry, stack: AsyncExitStack) -> Parts:
    with telemetry.setup_stage("data", "reading data"):
        tokenizer = load_tokenizer(config.model.path)
        train = load_problems(config.data.path, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens)
        telemetry.note_setup(train_data=train.describe())
        eval_problems: tuple[Problem, ...] = ()
        if config.eval.path is not None:
            held_out = load_problems(config.eval.path, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens)
            telemetry.note_setup(eval_data=held_out.describe())
            eval_problems = held_out.problems
    data = ProblemStream(train.problems, seed=config.seed, shuffle=config.data.shuffle)
    data.require(config.loop.num_prompts)
    with telemetry.setup_stage("ray", "starting Ray"):
        stack.enter_context(ray_cluster(config))
    rewarder = Rewarder.start(config.reward)
    stack.push_async_callback(rewarder.stop)
    with telemetry.setup_stage("server_and_trainer", "starting server and trainer"):
        rollout, trainer = await _start_both(config, stack)
    telemetry.note_setup(rollout=rollout.info, trainer=trainer.info)
    if config.trainer.replay and not trainer.info["routing_layers"]:
        telemetry.warn("this model has no routed experts, so `trainer.replay` is off: there is nothing to replay")
    if trainer.info["compiles"]:
        telemetry.warn(
            "the trainer compiles its layers: its first step takes a minute or more longer "
            "(`trainer.compile=never` goes without)"
        )
    if advice := learning_rate_advice(config):
        telemetry.warn(advice)
    first_step = await _restore(run, data, trainer) if config.loop.resume else 0
    with telemetry.setup_stage("first_adapter", "loading the first adapter"):
        if warning := await settle_transport(config, rollout, trainer):
            telemetry.warn(warning)
        await rollout.load_adapter(await trainer.publish(first_step))
        for warning in trainer.take_warnings():
            telemetry.warn(warning)
    return Parts(
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


def _open_to_resume(config: Config, path: str) -> RunFolder:
    """The run to go on with, if it has a checkpoint and steps left to make, and was started with the same settings
    where it matters."""
    run = RunFolder.open(path)
    step, _ = run.latest_checkpoint()
    last = config.loop.num_steps
    if step > last or (step == last and (config.eval.path is None or step in run.eval_steps())):
        raise ConfigError(
            f"nothing is left to do: {run.path} has made {step} steps, and `loop.num_steps` is {last}",
            hint=f"to go on, set `loop.num_steps={max(2 * step, last + 1)}` or another number above {step}",
        )
    before = from_yaml(run.path / "config.yaml")
    for key in SAME_ON_RESUME:
        was, now = attrgetter(key)(before), attrgetter(key)(config)
        if was != now:
            raise ConfigError(
                f"cannot resume {run.path}: `{key}` is {now}, the run was started with {was}\n"
                "The rest of its curve would belong to another run.",
                hint=f"give the run's own value of `{key}`, or start a new run",
            )
    return run


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
    step, folder = run.latest_checkpoint()
    path = folder / LOOP_STATE
    try:
        position = json.loads(path.read_text())["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error
    data.restore(position)
    await trainer.load(folder)
    run.rewind(step)
    return step
