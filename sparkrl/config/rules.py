"""Rules that span fields and sections; checked once, before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from sparkrl.config.schema import Config, CorrectionWeights, Device, OldLogProbs, Precision, Transport
from sparkrl.errors import ConfigError


def check(config: Config, *, trains: bool = True) -> None:
    """Refuse a configuration that cannot run or would train on biased numbers.

    Args:
        trains: False for an evaluation, which has servers and no trainer.
    Raises:
        ConfigError: names the first key that breaks a rule, its value, the reason and a way out.
    """
    _check_finite(config)
    _check_text(config, trains)
    _check_ranges(config)
    _check_sampling(config)
    _check_correction(config)
    _check_lengths(config, trains)
    _check_devices(config, trains)
    _check_swap(config)


def learning_rate_advice(config: Config) -> str | None:
    """What to say about a learning rate that looks like full fine-tuning's; None where it does not.

    Full fine-tuning by reinforcement learning runs at about 1e-6 (DAPO, arXiv:2503.14476). LoRA's best learning rate
    is about ten times that of full fine-tuning, at any rank (Schulman and others, "LoRA Without Regret", Thinking
    Machines Lab, 2025). 0 is left alone: it is set on purpose, to see how trainer and server drift.
    """
    lr = config.trainer.optimizer.lr
    if not 0 < lr < 5e-6:
        return None
    return (
        f"`trainer.optimizer.lr` is {lr:g}, which looks like full fine-tuning's. An adapter wants about ten times as "
        f"much: try `trainer.optimizer.lr={10 * lr:g}` or more (the default is 1e-4)"
    )


def _check_finite(config: Config) -> None:
    """Every comparison with nan is false, so a rule that refuses what is too small or too large would let it pass."""
    for key, value in _leaves(config):
        numbers = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise _wrong(key, "must be finite", value)


def _check_text(config: Config, trains: bool) -> None:
    """Empty text (`run_dir=`, as a shell writes for an unset variable) would be taken for the working folder."""
    for key, text in (("recipe_name", config.recipe_name), ("eval.name", config.eval.name)):
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", text):
            raise _wrong(key, "must be letters, digits, `_`, `-` and `.`: it names a folder", text)
    for key, value in _leaves(config):
        if value == "" and (trains or key != "data.path"):
            raise ConfigError(f"`{key}` is empty", hint="leave it out, or give it a value; is a shell variable unset?")


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
        "lora.expert_rank": 1 if config.lora.expert_rank is None else config.lora.expert_rank,
        "algorithm.clip_high": config.algorithm.clip_high,
        "algorithm.correction.max_k3": config.algorithm.correction.max_k3,
        "reward.num_workers": config.reward.num_workers,
        "reward.timeout_s": config.reward.timeout_s,
        "data.max_prompt_tokens": config.data.max_prompt_tokens,
        "eval.k": config.eval.k,
        "eval.every": config.eval.every,
        "loop.num_prompts": config.loop.num_prompts,
        "loop.save_every": config.loop.save_every,
        "telemetry.k3_limit": config.telemetry.k3_limit,
        "telemetry.wandb_timeout_s": config.telemetry.wandb_timeout_s,
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
        "reward.overlong_penalty": config.reward.overlong_penalty,
        "loop.num_steps": config.loop.num_steps,
        "loop.keep_checkpoints": config.loop.keep_checkpoints,
        "loop.k3_patience": config.loop.k3_patience,
        "telemetry.num_samples": config.telemetry.num_samples,
        "cluster.num_gpus": config.cluster.num_gpus,
        "cluster.gpu_memory_gb": config.cluster.gpu_memory_gb,
    }
    for key, value in not_negative.items():
        if not value >= 0:
            raise _wrong(key, "must not be negative", value)
    if not 0 < config.algorithm.clip_low <= 1:
        raise _wrong(
            "algorithm.clip_low", "must lie above 0 and at most at 1 (no lower clip)", config.algorithm.clip_low
        )
    if config.algorithm.clip_dual <= 1:
        raise _wrong("algorithm.clip_dual", "must be above 1", config.algorithm.clip_dual)
    if not 0 <= config.reward.overlong_buffer < 1:
        raise ConfigError(
            f"`reward.overlong_buffer` must lie in [0, 1), a share of the response budget, "
            f"got: {config.reward.overlong_buffer}\n"
            "A buffer as long as the budget punishes every response for its length.",
            hint="DAPO takes `reward.overlong_buffer=0.2`",
        )
    if not 0 < config.eval.confidence < 1:
        raise _wrong("eval.confidence", "must lie between 0 and 1", config.eval.confidence)
    optional = {
        "eval.num_problems": config.eval.num_problems,
        "eval.max_response_tokens": config.eval.max_response_tokens,
        "eval.problems_at_once": config.eval.problems_at_once,
    }
    for key, number in optional.items():
        if number is not None and number < 1:
            raise _wrong(key, "must be positive or null", number)
    if config.seed >= 2**32:
        raise _wrong("seed", "must be below 2**32 (NumPy's generators take no more)", config.seed)
    betas = list(config.trainer.optimizer.betas)
    if len(betas) != 2 or any(not 0 <= beta < 1 for beta in betas):
        raise _wrong("trainer.optimizer.betas", "must be two numbers in [0, 1)", betas)
    _check_lora(config)


def _check_lora(config: Config) -> None:
    if not 0 <= config.lora.dropout < 1:
        raise _wrong("lora.dropout", "must lie in [0, 1)", config.lora.dropout)
    if config.lora.dropout and config.trainer.num_mini_batches == 1:
        raise ConfigError(
            f"`lora.dropout` is {config.lora.dropout}, but `trainer.num_mini_batches` is 1\n"
            "Then the pass of the loss is also the one whose log-probs are compared with the server's, which drops "
            "nothing: k3 and the importance ratio would measure the dropout.",
            hint="set `lora.dropout=0`, or `trainer.num_mini_batches=2`: a pass of its own gives the log-probs then",
        )
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
        raise ConfigError(
            f"`rollout.top_k` must be -1 (off) while training, got: {config.rollout.top_k}\n{biased}",
            hint="leave it out; evaluation samples without it too, and has `eval.top_p`",
        )
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


def _check_correction(config: Config) -> None:
    correction = config.algorithm.correction
    if not 0 <= correction.min_weight < 1 <= correction.max_weight:
        raise ConfigError(
            "`algorithm.correction.min_weight` and `max_weight` must enclose 1, the weight of a token on which both "
            f"sides agree, got: {correction.min_weight} and {correction.max_weight}",
            hint="0 turns the lower bound (IcePop) off; its paper takes 0.5 and 5",
        )
    weighted = correction.weights is not CorrectionWeights.none
    if weighted and config.trainer.old_log_probs is OldLogProbs.rollout:
        raise ConfigError(
            f"`algorithm.correction.weights={correction.weights.name}` needs `trainer.old_log_probs=trainer`, "
            "got: rollout\n"
            "The importance ratio would divide by the server's log-probs already, and the distance count twice.",
            hint="set `trainer.old_log_probs=trainer`: with one mini-batch a step it costs nothing",
        )


def _check_lengths(config: Config, trains: bool) -> None:
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
    if trains and config.trainer.max_tokens_per_micro_batch < config.model.max_tokens:
        raise ConfigError(
            f"`trainer.max_tokens_per_micro_batch` must hold the longest sequence ({config.model.max_tokens} tokens), "
            f"got: {config.trainer.max_tokens_per_micro_batch}",
            hint=f"set `trainer.max_tokens_per_micro_batch={config.model.max_tokens}`",
        )


def _check_swap(config: Config) -> None:
    rollout = config.rollout
    if rollout.adapter_dtype is Precision.bfloat16 and rollout.dtype is Precision.float32:
        raise ConfigError(
            "`rollout.adapter_dtype` is bfloat16, but `rollout.dtype` is float32\n"
            "The server would round activations to the adapter's type, and its log-probs with them.",
            hint="set `rollout.adapter_dtype=float32`",
        )
    if rollout.adapter_transport is Transport.cuda_ipc and config.cluster.device is Device.cpu:
        raise ConfigError(
            "`rollout.adapter_transport` is cuda_ipc, but `cluster.device` is cpu",
            hint="set `rollout.adapter_transport=auto`",
        )


def _check_devices(config: Config, trains: bool) -> None:
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
    elif trains and cluster.num_gpus != (needed := servers + config.trainer.num_workers):
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
