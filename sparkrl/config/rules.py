"""Rules that span fields and sections; checked once, before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from sparkrl.config.schema import Config, Device, Precision
from sparkrl.errors import ConfigError


def check(config: Config) -> None:
    """Refuse a configuration that cannot run or would train on biased numbers.

    Raises:
        ConfigError: names the first key that breaks a rule, its value, the reason and a way out.
    """
    _check_finite(config)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", config.recipe_name):
        raise _wrong("recipe_name", "must be letters, digits, `_`, `-` and `.`: it names a folder", config.recipe_name)
    _check_ranges(config)
    _check_sampling(config)
    _check_lengths(config)
    _check_devices(config)


def _check_finite(config: Config) -> None:
    """Every comparison with nan is false, so a rule that refuses what is too small or too large would let it pass."""
    for key, value in _leaves(config):
        numbers = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise _wrong(key, "must be finite", value)


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _check_ranges(config: Config) -> None:
    positive = {
        "model.max_tokens": config.model.max_tokens,
        "rollout.num_replicas": config.rollout.num_replicas,
        "rollout.tensor_parallel_size": config.rollout.tensor_parallel_size,
        "rollout.max_num_seqs": config.rollout.max_num_seqs,
        "rollout.max_num_batched_tokens": config.rollout.max_num_batched_tokens,
        "rollout.kv_cache_gib": config.rollout.kv_cache_gib,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "rollout.num_threads": config.rollout.num_threads,
        "rollout.start_timeout_s": config.rollout.start_timeout_s,
        "rollout.request_timeout_s": config.rollout.request_timeout_s,
        "trainer.num_workers": config.trainer.num_workers,
        "trainer.num_mini_batches": config.trainer.num_mini_batches,
        "trainer.max_tokens_per_micro_batch": config.trainer.max_tokens_per_micro_batch,
        "trainer.num_threads": config.trainer.num_threads,
        "trainer.start_timeout_s": config.trainer.start_timeout_s,
        "trainer.step_timeout_s": config.trainer.step_timeout_s,
        "trainer.optimizer.max_grad_norm": config.trainer.optimizer.max_grad_norm,
        "lora.rank": config.lora.rank,
        "lora.alpha": config.lora.alpha,
        "algorithm.clip_high": config.algorithm.clip_high,
        "reward.num_workers": config.reward.num_workers,
        "reward.timeout_s": config.reward.timeout_s,
        "data.max_prompt_tokens": config.data.max_prompt_tokens,
        "eval.k": config.eval.k,
        "eval.every": config.eval.every,
        "loop.num_prompts": config.loop.num_prompts,
        "loop.save_every": config.loop.save_every,
        "telemetry.k3_limit": config.telemetry.k3_limit,
        "cluster.object_store_gib": config.cluster.object_store_gib,
    }
    for key, value in positive.items():
        if not value > 0:
            raise _wrong(key, "must be positive", value)
    not_negative = {
        "seed": config.seed,
        "trainer.compare_without_replay_every": config.trainer.compare_without_replay_every,
        "trainer.optimizer.lr": config.trainer.optimizer.lr,
        "trainer.optimizer.weight_decay": config.trainer.optimizer.weight_decay,
        "trainer.optimizer.warmup_steps": config.trainer.optimizer.warmup_steps,
        "algorithm.kl_coef": config.algorithm.kl_coef,
        "algorithm.entropy_coef": config.algorithm.entropy_coef,
        "algorithm.max_refills": config.algorithm.max_refills,
        "reward.overlong_buffer_tokens": config.reward.overlong_buffer_tokens,
        "reward.overlong_penalty": config.reward.overlong_penalty,
        "loop.num_steps": config.loop.num_steps,
        "loop.keep_checkpoints": config.loop.keep_checkpoints,
        "telemetry.num_samples": config.telemetry.num_samples,
        "cluster.num_gpus": config.cluster.num_gpus,
        "cluster.gpu_memory_gb": config.cluster.gpu_memory_gb,
    }
    for key, value in not_negative.items():
        if not value >= 0:
            raise _wrong(key, "must not be negative", value)
    if not 0 < config.algorithm.clip_low < 1:
        raise _wrong("algorithm.clip_low", "must lie between 0 and 1", config.algorithm.clip_low)
    if config.algorithm.clip_dual <= 1:
        raise _wrong("algorithm.clip_dual", "must be above 1", config.algorithm.clip_dual)
    if not 0 < config.eval.confidence < 1:
        raise _wrong("eval.confidence", "must lie between 0 and 1", config.eval.confidence)
    optional = {
        "eval.num_problems": config.eval.num_problems,
        "eval.max_response_tokens": config.eval.max_response_tokens,
    }
    for key, number in optional.items():
        if number is not None and number < 1:
            raise _wrong(key, "must be positive or null", number)
    if config.seed >= 2**32:
        raise _wrong("seed", "must be below 2**32 (NumPy's generators take no more)", config.seed)
    betas = list(config.trainer.optimizer.betas)
    if len(betas) != 2 or any(not 0 <= beta < 1 for beta in betas):
        raise _wrong("trainer.optimizer.betas", "must be two numbers in [0, 1)", betas)
    if not config.lora.targets:
        raise ConfigError("`lora.targets` is empty", hint="set `lora.targets=[attention,latent,experts]`")


def _check_sampling(config: Config) -> None:
    if config.loop.group_size < 2:
        raise ConfigError(
            f"`loop.group_size` must be at least 2, got: {config.loop.group_size}\n"
            "Group advantages subtract the group's mean, so a single response always scores 0.",
            hint="set `loop.group_size=8`",
        )
    biased = "Log-probs of a truncated distribution bias the importance ratio, so training samples from all of it."
    if config.rollout.top_p != 1.0:
        raise ConfigError(
            f"`rollout.top_p` must be 1 while training, got: {config.rollout.top_p}\n{biased}",
            hint="for evaluation alone set `eval.top_p`",
        )
    if config.rollout.top_k != -1:
        raise ConfigError(f"`rollout.top_k` must be -1 (off) while training, got: {config.rollout.top_k}\n{biased}")
    if config.rollout.temperature <= 0:
        raise ConfigError(
            f"`rollout.temperature` must be above 0, got: {config.rollout.temperature}\n"
            "Greedy responses to one prompt are all the same, so their advantages are all 0.",
            hint="set `rollout.temperature=1`",
        )
    if config.eval.temperature < 0:
        raise _wrong("eval.temperature", "must not be negative", config.eval.temperature)
    if not 0 < config.eval.top_p <= 1:
        raise _wrong("eval.top_p", "must lie in (0, 1]", config.eval.top_p)
    sequences = config.loop.num_prompts * config.loop.group_size
    if config.trainer.num_mini_batches > sequences:
        raise _wrong(
            "trainer.num_mini_batches",
            f"must be at most the {sequences} responses of a step",
            config.trainer.num_mini_batches,
        )
    if config.trainer.num_workers > sequences // config.trainer.num_mini_batches:
        raise ConfigError(
            f"`trainer.num_workers` is {config.trainer.num_workers}, but a mini-batch has only "
            f"{sequences // config.trainer.num_mini_batches} responses\n"
            "A rank without a sequence has nothing to train on.",
            hint="raise `loop.num_prompts` or lower `trainer.num_workers`",
        )


def _check_lengths(config: Config) -> None:
    for key, budget in (
        ("rollout.max_response_tokens", config.rollout.max_response_tokens),
        ("eval.max_response_tokens", config.eval.max_response_tokens or config.rollout.max_response_tokens),
    ):
        longest = config.data.max_prompt_tokens + budget
        if longest > config.model.max_tokens:
            raise ConfigError(
                f"`data.max_prompt_tokens` ({config.data.max_prompt_tokens}) and `{key}` ({budget}) add up to "
                f"{longest} tokens, more than `model.max_tokens` ({config.model.max_tokens})",
                hint=f"set `model.max_tokens={longest}` or lower one of the two",
            )
    buffer, budget = config.reward.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer >= budget:
        raise ConfigError(
            f"`reward.overlong_buffer_tokens` ({buffer}) must be less than `rollout.max_response_tokens` ({budget})\n"
            "A buffer as long as the budget punishes every response for its length.",
            hint=f"set `reward.overlong_buffer_tokens={budget // 5}`",
        )
    if config.trainer.max_tokens_per_micro_batch < config.model.max_tokens:
        raise ConfigError(
            f"`trainer.max_tokens_per_micro_batch` must hold the longest sequence ({config.model.max_tokens} tokens), "
            f"got: {config.trainer.max_tokens_per_micro_batch}",
            hint=f"set `trainer.max_tokens_per_micro_batch={config.model.max_tokens}`",
        )


def _check_devices(config: Config) -> None:
    cluster, servers = config.cluster, config.rollout.num_replicas * config.rollout.tensor_parallel_size
    if cluster.device is Device.cpu:
        if cluster.num_gpus:
            raise ConfigError(
                f"`cluster.num_gpus` is {cluster.num_gpus}, but `cluster.device` is cpu",
                hint="set `cluster.device=cuda` or `cluster.num_gpus=0`",
            )
        if config.rollout.tensor_parallel_size > 1:
            raise _wrong("rollout.tensor_parallel_size", "must be 1 on CPU", config.rollout.tensor_parallel_size)
        if cluster.colocate:
            raise ConfigError("`cluster.colocate` shares GPUs, but `cluster.device` is cpu", hint="leave it out on CPU")
        return
    if cluster.colocate:
        _check_colocation(config, servers)
    elif cluster.num_gpus != (needed := servers + config.trainer.num_workers):
        raise ConfigError(
            f"`cluster.num_gpus` is {cluster.num_gpus}, but the run takes {needed}: "
            f"{config.rollout.num_replicas} servers of {config.rollout.tensor_parallel_size} GPUs and "
            f"{config.trainer.num_workers} trainer ranks",
            hint=f"set `cluster.num_gpus={needed}`, or other `rollout.num_replicas` or `trainer.num_workers`",
        )
    if config.rollout.dtype is not Precision.bfloat16 or config.trainer.dtype is not Precision.bfloat16:
        raise ConfigError(
            f"`rollout.dtype` ({config.rollout.dtype.value}) and `trainer.dtype` ({config.trainer.dtype.value}) must "
            "be bfloat16 on CUDA\nThe server's expert kernels and the trainer's grouped products are made for it.",
            hint="set `rollout.dtype=bfloat16 trainer.dtype=bfloat16`",
        )


def _check_colocation(config: Config, servers: int) -> None:
    ranks = config.trainer.num_workers
    if config.rollout.tensor_parallel_size > 1:
        raise ConfigError(
            "`cluster.colocate` puts a whole server on each GPU, but `rollout.tensor_parallel_size` is "
            f"{config.rollout.tensor_parallel_size}",
            hint="set `rollout.tensor_parallel_size=1`, or `cluster.colocate=false`",
        )
    if not servers == ranks == config.cluster.num_gpus:
        raise ConfigError(
            f"`cluster.colocate` puts one server and one trainer rank on each GPU, but there are {servers} servers, "
            f"{ranks} trainer ranks and {config.cluster.num_gpus} GPUs",
            hint="set `rollout.num_replicas`, `trainer.num_workers` and `cluster.num_gpus` to the same number",
        )


def _wrong(key: str, rule: str, value: Any) -> ConfigError:
    return ConfigError(f"`{key}` {rule}, got: {value}")
