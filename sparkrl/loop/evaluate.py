"""`sparkrl eval`: score an adapter, or the base model under a zero adapter, through the same server as training."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from sparkrl.config.schema import Config
from sparkrl.data import load_problems, load_tokenizer
from sparkrl.errors import ConfigError
from sparkrl.evals import evaluate
from sparkrl.loop.cluster import ray_cluster
from sparkrl.loop.parts import eval_seed
from sparkrl.loop.preflight import check_model
from sparkrl.lora.peft_format import load_adapter, pack
from sparkrl.lora.zero import zero_adapter
from sparkrl.reward import Rewarder
from sparkrl.rollout import RolloutPool
from sparkrl.telemetry import RunFolder
from sparkrl.types import Adapter, EvalResult


async def evaluate_adapter(config: Config, adapter: Path | None, *, console: Console | None = None) -> EvalResult:
    """Sample and score the recipe's evaluation set, and print mean@k with its interval.

    Args:
        config: the recipe; `eval` says what is asked and how often.
        adapter: PEFT adapter folder, or a run folder (its newest checkpoint); None evaluates the base model.
    Raises:
        ConfigError: the recipe has no evaluation set, or the folder is neither an adapter's nor a run's.
    """
    console = console or Console()
    if config.eval.path is None:
        raise ConfigError("this recipe has no evaluation set", hint="set `eval.path` to a parquet or JSON-lines file")
    check_model(config)
    packed = zero_adapter(config.model.path, config.lora) if adapter is None else read_adapter(adapter)
    problems = load_problems(
        config.eval.path, load_tokenizer(config.model.path), max_prompt_tokens=config.data.max_prompt_tokens
    )
    console.print(f"{config.eval.name}: {problems.describe()}")
    async with AsyncExitStack() as stack:
        with console.status("starting Ray and the server"):
            stack.enter_context(ray_cluster(config))
            rewarder = Rewarder.start(config.reward)
            stack.push_async_callback(rewarder.stop)
            rollout = await RolloutPool.start(config)
            stack.push_async_callback(rollout.stop)
            await rollout.load_adapter(packed)
        with console.status("sampling"):
            result, _ = await evaluate(
                rollout,
                rewarder,
                problems.problems,
                config.eval,
                step=packed.version,
                max_tokens=config.rollout.max_response_tokens,
                seed=eval_seed(config),
            )
    console.print(
        f"mean@{result.k} {result.mean:.3f}  [{result.low:.3f}, {result.high:.3f}] at {config.eval.confidence:.0%}, "
        f"pass@{result.k} {result.pass_at_k:.3f}, {result.num_problems} problems, "
        f"{result.mean_tokens:.0f} tokens a response, {result.truncated:.1%} truncated",
        soft_wrap=True,
    )
    return result


def read_adapter(folder: Path) -> Adapter:
    """A PEFT adapter from disk, packed for the server.

    Args:
        folder: an adapter's folder, or a run's (its newest checkpoint is taken).
    """
    step = 0
    if (folder / "config.yaml").is_file():
        step, folder = RunFolder.open(folder).latest_checkpoint()
    elif not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} is neither a PEFT adapter nor a run folder",
            hint="an adapter's folder holds adapter_config.json, a run's holds config.yaml",
        )
    tensors, adapter_config = load_adapter(folder)
    return pack(tensors, adapter_config, version=step)
