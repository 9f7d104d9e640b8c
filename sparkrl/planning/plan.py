"""From a configuration to a plan: what it needs, whether it fits, what binds, and which other layouts would fit."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from sparkrl.config.schema import Config, Device
from sparkrl.models.tensor_parallel import check_tensor_parallel, divides
from sparkrl.planning.adapter import adapted_weights
from sparkrl.planning.facts import ModelFacts, read_facts
from sparkrl.planning.memory import FP32, Layout, element_bytes, server_bytes, trainer_bytes, whole_layers

USABLE = 0.92
"""Share of a GPU that a plan hands out; the rest is for CUDA contexts, graphs, NCCL and fragmentation."""
_LONG_CONTEXT = 2**20
_RUNS = "yes"
_NVFP4_BLOCK = 16
_UINT8_EXPERTS = 256
"""Experts whose ids fit one byte; beyond it they travel as two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One layout against the memory of a GPU."""

    layout: Layout
    server_bytes: int
    """On each GPU of a server."""
    trainer_bytes: int
    """On each trainer rank; 0 where there is none."""
    fits: bool | None
    """None where the memory of a GPU is unknown."""
    side: str
    """Which of the two is nearer to its limit."""
    largest: str
    """What takes most of it."""
    binds: str
    """Both in words, with the share of the limit."""
    runs: str
    """`yes`, or why this version cannot run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything `sparkrl plan` prints."""

    recipe: str
    facts: ModelFacts
    parameters: dict[str, int]
    active_parameters: int
    checkpoint_bytes: int
    chosen: Fit
    server: dict[str, int]
    trainer: dict[str, int]
    trainer_floor_bytes: int
    """Part of a trainer rank that more ranks do not shrink."""
    responses: int
    """Of one step, or of one call of an evaluation."""
    kv: dict[str, float]
    adapter: dict[str, int]
    replay: dict[str, int]
    layouts: tuple[Fit, ...]
    usable_bytes: int | None
    """Bytes of one GPU that are handed out."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; all sizes in bytes."""
        total = sum(self.parameters.values())
        return {**asdict(self), "total_parameters": total, "fits": self.chosen.fits, "binds": self.chosen.binds}


def make_plan(config: Config) -> Plan:
    """Work out a plan; nothing is started and no weight is read.

    Without training data (`data.path` is empty) it is an evaluation's: servers and no trainer.

    Raises:
        ConfigError, CheckpointError: the model's shape or the adapter's targets cannot be read, or servers cannot
            divide the model as they are asked to.
    """
    facts = read_facts(config)
    rollout, trainer = config.rollout, config.trainer
    check_tensor_parallel(rollout.tensor_parallel_size, **_divided(facts))
    usable = round(config.cluster.gpu_memory_gb * 1e9 * USABLE) or None
    layout = Layout(
        tensor_parallel=rollout.tensor_parallel_size,
        num_replicas=rollout.num_replicas,
        num_ranks=trainer.num_workers if config.data.path else 0,
        colocated=config.cluster.colocate,
    )
    return Plan(
        recipe=config.recipe_name,
        facts=facts,
        parameters=facts.parameters(),
        active_parameters=facts.active_parameters(),
        checkpoint_bytes=facts.checkpoint_bytes(),
        chosen=_fit(config, facts, layout, usable),
        server=server_bytes(config, facts, layout),
        trainer=trainer_bytes(config, facts, layout),
        trainer_floor_bytes=whole_layers(config, facts, layout),
        responses=_responses(config),
        kv=_kv(config, facts),
        adapter=_adapter(config, facts),
        replay=_replay(config, facts),
        layouts=_layouts(config, facts, usable),
        usable_bytes=usable,
    )


def _responses(config: Config) -> int:
    """Responses that are asked for at once: a step's, or those of one call of an evaluation."""
    if config.data.path:
        return config.loop.num_prompts * config.loop.group_size
    fills = 2 * config.rollout.max_num_seqs * config.rollout.num_replicas
    return (config.eval.problems_at_once or max(fills // config.eval.k, 1)) * config.eval.k


def _kv(config: Config, facts: ModelFacts) -> dict[str, float]:
    rollout = config.rollout
    context, width = config.model.max_tokens, element_bytes(rollout.dtype)
    one = facts.kv_bytes(context, element_bytes=width, num_gpus=rollout.tensor_parallel_size)
    responses = -(-_responses(config) // rollout.num_replicas)
    concurrency = min(rollout.max_num_seqs, responses)
    per_sequence = sum(one.values())
    given = rollout.kv_cache_gib * 2**30
    return {
        "context_tokens": context,
        "concurrency": concurrency,
        "full_layers_bytes_per_sequence": one["full"],
        "sliding_layers_bytes_per_sequence": one["sliding"],
        "needed_bytes": per_sequence * concurrency,
        "given_bytes": given,
        "longest_sequences_held": int(given // per_sequence),
        "share_of_all_full_at_context": facts.kv_share(context),
        "share_of_all_full_at_1m": facts.kv_share(_LONG_CONTEXT),
    }


def _adapter(config: Config, facts: ModelFacts) -> dict[str, int]:
    adapted = adapted_weights(config, facts)
    parts: dict[str, int] = {}
    for item in adapted:
        parts[item.weight.part] = parts.get(item.weight.part, 0) + item.parameters
    total = sum(parts.values())
    return {
        **{f"parameters: {part}": number for part, number in parts.items()},
        "parameters": total,
        "bytes_per_swap": total * element_bytes(config.rollout.adapter_dtype),
        "checkpoint_bytes": total * 3 * FP32,
    }


def _replay(config: Config, facts: ModelFacts) -> dict[str, int]:
    per_token = facts.sparse_layers * facts.top_k * (1 if facts.num_experts <= _UINT8_EXPERTS else 2)
    tokens = _responses(config) * config.model.max_tokens
    return {"bytes_per_token": per_token, "bytes_per_step_at_most": per_token * tokens}


def _layouts(config: Config, facts: ModelFacts, usable: int | None) -> tuple[Fit, ...]:
    """Every division of the run's GPUs that the model's shape allows: those that fit and that this version runs first.

    A server's GPUs are tensor (TP), pipeline (PP) and expert parallel (EP), servers share out the prompts (data
    parallel), and the trainer is one FSDP2 group over the rest; an evaluation's servers take them all.
    """
    gpus, trains = config.cluster.num_gpus, bool(config.data.path)
    if config.cluster.device is Device.cpu or config.cluster.colocate or usable is None:
        return ()
    found = []
    sizes = [2**i for i in range(gpus.bit_length())]
    for tensor, stages, expert in itertools.product(sizes, sizes, (False, True)):
        size = tensor * stages
        if size > gpus - trains or not _divides(facts, tensor, expert) or stages > facts.num_layers:
            continue
        if not trains and gpus % size:
            continue
        for replicas in range(1, (gpus - 1) // size + 1) if trains else (gpus // size,):
            layout = Layout(
                tensor_parallel=tensor,
                pipeline_parallel=stages,
                num_replicas=replicas,
                num_ranks=gpus - size * replicas,
                expert_parallel=expert,
            )
            found.append(_fit(config, facts, layout, usable))
    return tuple(
        sorted(found, key=lambda fit: (not fit.fits, fit.runs != _RUNS, max(fit.server_bytes, fit.trainer_bytes)))
    )


def _divides(facts: ModelFacts, size: int, expert_parallel: bool) -> bool:
    shape = _divided(facts)
    if expert_parallel:
        heads = divides(size, **shape | {"width": 0})
        return heads and size > 1 and facts.num_experts > 0 and facts.num_experts % size == 0
    block = _NVFP4_BLOCK if facts.quantized_layers else 1
    return shape["width"] % block == 0 and divides(size, **shape | {"width": shape["width"] // block})


def _divided(facts: ModelFacts) -> dict[str, int]:
    """What tensor parallelism divides."""
    width = facts.moe_intermediate_size or facts.intermediate_size
    return {"num_heads": facts.num_heads, "num_kv_heads": facts.num_kv_heads, "width": width}


def _fit(config: Config, facts: ModelFacts, layout: Layout, usable: int | None) -> Fit:
    parts = {
        "server": server_bytes(config, facts, layout),
        "trainer": trainer_bytes(config, facts, layout),
    }
    totals = {side: sum(content.values()) for side, content in parts.items()}
    side = max(totals, key=lambda name: totals[name])
    largest = max(parts[side], key=lambda name: parts[side][name])
    needed = sum(totals.values()) if layout.colocated else totals[side]
    where = "server and trainer on one GPU" if layout.colocated else side
    share = "" if usable is None else f" at {needed / usable:.0%} of what is usable"
    return Fit(
        layout=layout,
        server_bytes=totals["server"],
        trainer_bytes=totals["trainer"],
        fits=None if usable is None else needed <= usable,
        side=side,
        largest=largest,
        binds=f"{where}{share}, most of it {largest}",
        runs=_runs(layout),
    )


def _runs(layout: Layout) -> str:
    if layout.pipeline_parallel > 1:
        return "no: servers are not started with pipeline parallelism"
    return "no: servers are not started with expert parallelism" if layout.expert_parallel else _RUNS
