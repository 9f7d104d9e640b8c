"""`sparkrl eval`: score an adapter against the model under a zero adapter, both on the path that training uses."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from sparkrl.config.schema import Config
from sparkrl.data import load_problems, load_tokenizer
from sparkrl.errors import ConfigError, SparkrlError
from sparkrl.evals import Evaluation, evaluate, evaluation_of, with_gain
from sparkrl.loop.cluster import ray_cluster
from sparkrl.loop.parts import eval_problems_at_once, eval_seed
from sparkrl.loop.placement import own_placement
from sparkrl.loop.preflight import check_adapter, check_model
from sparkrl.lora.peft_format import load_adapter, pack
from sparkrl.lora.zero import zero_adapter
from sparkrl.reward import Rewarder
from sparkrl.rollout import RolloutPool
from sparkrl.telemetry import (
    ADAPTER,
    BASELINE,
    EvalFolder,
    ProblemRow,
    adapter_folder,
    build_eval_report,
    figures_of,
    figures_table,
    gain_text,
    installed_versions,
    only_writer,
    problem_rows,
    problem_table,
    publish_evaluation,
    write_problems,
)
from sparkrl.types import Adapter, Answer, EvalResult, Problem

NAMES = {BASELINE: "base model", ADAPTER: "adapter"}
_STEP = re.compile(r"step-(\d+)")


async def evaluate_adapter(config: Config, adapter: Path | None, *, console: Console | None = None) -> EvalResult:
    """Sample and score the recipe's evaluation set under a zero adapter and under the adapter, and write down both.

    Args:
        config: the recipe; `eval` says what is asked and how often.
        adapter: PEFT adapter folder, or a run folder (its newest checkpoint); None evaluates the base model alone.
    Returns:
        The adapter's figures, with `gain`, `gain_low` and `gain_high` over the base model; or the base model's.
    Raises:
        ConfigError: the recipe has no evaluation set, or the folder is neither an adapter's nor a run's.
        AdapterError: the adapter is of another model, or not of the rank and targets that the config names.
    """
    console = console or Console()
    if config.eval.path is None:
        raise ConfigError("this recipe has no evaluation set", hint="set `eval.path` to a parquet or JSON-lines file")
    check_model(config)
    policies = {BASELINE: zero_adapter(config.model.path, config.lora)}
    if adapter is not None:
        policies[ADAPTER] = read_adapter(adapter)
        check_adapter(policies[ADAPTER], policies[BASELINE], config, adapter)
    loaded = load_problems(
        config.eval.path, load_tokenizer(config.model.path), max_prompt_tokens=config.data.max_prompt_tokens
    )
    problems = loaded.problems[: config.eval.num_problems]
    about = _about(config, adapter, policies, problems)
    folder = EvalFolder.open(config.eval.resume, about) if config.eval.resume else EvalFolder.create(config, about)
    asked = f", the first {len(problems)} asked" if len(problems) < len(loaded.problems) else ""
    console.print(f"{config.eval.name}: {loaded.describe()}{asked}; {folder.path}", soft_wrap=True, highlight=False)
    began_s = time.perf_counter()
    with only_writer(folder.path):
        try:
            done = await _answer(config, policies, problems, folder, console)
        except BaseException:
            num = sum(len(folder.answers(policy)) for policy in policies)
            console.print(
                f"answers to {num} of {len(problems) * len(policies)} problems are saved; "
                f"to go on: eval.resume={folder.path}",
                soft_wrap=True,
                highlight=False,
            )
            with suppress(SparkrlError):
                build_eval_report(folder.path)
            raise
        baseline = done[BASELINE]
        if ADAPTER in done:
            done[ADAPTER] = with_gain(done[ADAPTER], baseline.answers, config.eval)
        last = done.get(ADAPTER, baseline)
        rows = problem_rows(last.answers, baseline.answers if ADAPTER in done else ())
        _write(config, folder, done, rows, about, seconds=time.perf_counter() - began_s)
    _show(done, folder, rows, console)
    return last.result


async def _answer(
    config: Config, policies: dict[str, Adapter], problems: Sequence[Problem], folder: EvalFolder, console: Console
) -> dict[str, Evaluation]:
    """The evaluation of every policy; starts Ray and servers only when something is left to ask."""
    kept = {policy: {row[0].problem_uid: row for row in folder.answers(policy)} for policy in policies}
    complete = all(
        len(kept[policy].get(problem.uid, ())) == config.eval.k for policy in policies for problem in problems
    )
    if complete:
        rows = {policy: [kept[policy][problem.uid] for problem in problems] for policy in policies}
        return {
            policy: evaluation_of(rows[policy], config.eval, step=adapter.version)
            for policy, adapter in policies.items()
        }
    async with AsyncExitStack() as stack:
        with console.status("starting Ray and the server"):
            stack.enter_context(ray_cluster(config))
            placement = await stack.enter_async_context(own_placement(config, console))
            rewarder = Rewarder.start(config.reward)
            stack.push_async_callback(rewarder.stop)
            rollout = await RolloutPool.start(config, placement=placement)
            stack.push_async_callback(rollout.stop)
        done = {}
        for policy, adapter in policies.items():
            await rollout.load_adapter(adapter)
            with console.status(f"asking the {NAMES[policy]}") as status:

                def keep(answers: Sequence[Answer], policy: str = policy, status: Status = status) -> None:
                    folder.append(policy, answers)
                    num_answered = len(folder.answers(policy))
                    status.update(f"asking the {NAMES[policy]}: {num_answered} of {len(problems)} problems answered")

                done[policy] = await evaluate(
                    rollout,
                    rewarder,
                    problems,
                    config.eval,
                    step=adapter.version,
                    max_tokens=config.rollout.max_response_tokens,
                    seed=eval_seed(config),
                    problems_at_once=eval_problems_at_once(config),
                    answered=kept[policy],
                    keep=keep,
                )
        return done


def _write(
    config: Config,
    folder: EvalFolder,
    done: dict[str, Evaluation],
    rows: Sequence[ProblemRow],
    about: dict[str, Any],
    *,
    seconds: float,
) -> None:
    """Figures, the table of problems, the report, W&B and TensorBoard."""
    figures = {policy: figures_of(evaluation.result) for policy, evaluation in done.items()}
    folder.write_record({"about": about, **figures, "seconds": seconds, "versions": installed_versions()})
    write_problems(folder.path / "problems.parquet", rows)
    build_eval_report(folder.path)
    publish_evaluation(config, folder, done.get(ADAPTER, done[BASELINE]).result, rows)


def _show(done: dict[str, Evaluation], folder: EvalFolder, rows: Sequence[ProblemRow], console: Console) -> None:
    last = done.get(ADAPTER, done[BASELINE])
    console.print(problem_table(rows, width=console.width))
    console.print()
    console.print(figures_table([(NAMES[policy], figures_of(one.result)) for policy, one in done.items()]))
    gain = gain_text(figures_of(last.result))
    if gain is not None:
        console.print(f"gain {gain}, paired over {last.result.num_problems} problems", highlight=False, soft_wrap=True)
    console.print(f"finished: {folder.path / 'report.html'}", highlight=False, soft_wrap=True)


def _about(
    config: Config, adapter: Path | None, policies: dict[str, Adapter], problems: Sequence[Problem]
) -> dict[str, Any]:
    """What decides the answers."""
    uids = " ".join(problem.uid for problem in problems)
    trained = policies.get(ADAPTER)
    return {
        "evaluation": config.eval.name,
        "model": config.model.path,
        "adapter": None if adapter is None else str(adapter.resolve()),
        "adapter_checksum": None if trained is None else trained.checksum,
        "adapter_step": None if trained is None else trained.version,
        "data": config.eval.path,
        "num_problems": len(problems),
        "problems": hashlib.sha256(uids.encode()).hexdigest()[:16],
        "k": config.eval.k,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
        "max_response_tokens": config.eval.max_response_tokens or config.rollout.max_response_tokens,
        "seed": config.seed,
        "rule": config.reward.rule.value,
        "dtype": config.rollout.dtype.value,
    }


def read_adapter(folder: Path) -> Adapter:
    """A PEFT adapter from disk, packed for the server; its version is the step it was saved after, 0 where unknown.

    Args:
        folder: an adapter's folder, or a run's (its newest checkpoint is taken).
    """
    folder = adapter_folder(folder)
    tensors, adapter_config = load_adapter(folder)
    step = _STEP.match(folder.resolve().name)
    return pack(tensors, adapter_config, version=int(step[1]) if step else 0)
