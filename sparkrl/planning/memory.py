"""Bytes on one GPU of a server and of a trainer rank.

Weights, adapter and optimizer are counted tensor by tensor. Activations and gathered layers are estimates from shapes
and from how FSDP2 works; they are named so, and were not measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkrl.config.schema import Base, Config, Device, Precision, Swap, Transport
from sparkrl.planning.adapter import AdaptedWeight, adapted_weights, server_rank
from sparkrl.planning.facts import ModelFacts
from sparkrl.planning.weights import Split, Stored, Weight

FP32 = 4
_VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this for each GPU."""
_ADAM_BYTES = 16
"""Bytes of an adapter parameter: value, gradient and AdamW's two moments, float32 each."""
_GATHERED, _ACTIVATIONS = "gathered layers (estimate)", "activations (estimate)"
_UNPACKED = "one layer unpacked"
_LEFT = "adapter left for the servers"
_GPUS_A_NODE = 8
_GATHERED_LAYERS = 3
"""Whole layers a rank holds at worst: the one it computes, and the next, whose gather buffer and unpacked copy exist
side by side for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How GPUs are divided between servers and the trainer."""

    tensor_parallel: int
    num_replicas: int
    """Servers, each with all of the data-parallel prompts it is given."""
    num_ranks: int
    """Of the trainer's FSDP2 group; 0 in an evaluation, which has none."""
    pipeline_parallel: int = 1
    """Stages that a server's layers are divided over."""
    expert_parallel: bool = False
    """Whole experts on each GPU of a server in place of a part of every expert."""
    colocated: bool = False
    """Each GPU holds a server and a trainer rank."""

    @property
    def num_gpus(self) -> int:
        servers = self.tensor_parallel * self.pipeline_parallel * self.num_replicas
        return max(servers, self.num_ranks) if self.colocated else servers + self.num_ranks


def element_bytes(precision: Precision) -> int:
    """Bytes of one value."""
    return 4 if precision is Precision.float32 else 2


def adapter_bytes(config: Config) -> int:
    """Bytes of one adapter value in a server's buffers."""
    on_cpu = config.cluster.device is Device.cpu
    return element_bytes(config.rollout.adapter_dtype if on_cpu else Precision.bfloat16)


def server_bytes(config: Config, facts: ModelFacts, layout: Layout) -> dict[str, int]:
    """Bytes on one GPU of a server, by purpose: the fullest one where layers do not divide evenly over stages."""
    rollout, gpus = config.rollout, layout.tensor_parallel
    plain = element_bytes(rollout.dtype)
    parts: dict[str, float] = {"weights: experts": 0.0, "weights: rest": 0.0}
    stage = -(-facts.num_layers // layout.pipeline_parallel) / facts.num_layers
    tables = []
    for weight in facts.weights():
        stored = weight.stored
        if stored is Stored.nvfp4 and config.cluster.device is Device.cpu:
            stored = Stored.bf16  # no FP4 kernels: held in the compute type
        held = weight.bytes_as(stored, plain_bytes=plain) * _server_share(weight, facts, layout) * weight.count
        if weight.split is Split.vocab:
            tables.append(held)
        else:
            parts["weights: experts" if weight.part == "experts" else "weights: rest"] += held * stage
    # the first stage has the embedding, the last one the head
    parts["weights: rest"] += max(tables) if layout.pipeline_parallel > 1 else sum(tables)
    adapted = adapted_weights(config, facts)
    rank = server_rank(adapted)
    slot = sum(
        item.server_slot(rank=rank, num_gpus=gpus, expert_parallel=layout.expert_parallel) * stage for item in adapted
    )
    num_slots = 2 if rollout.swap is Swap.in_flight else 1
    parts["adapter slots" if num_slots > 1 else "adapter slot"] = slot * num_slots * adapter_bytes(config)
    parts["KV cache"] = rollout.kv_cache_gib * 2**30
    parts[_ACTIVATIONS] = _server_activations(config, facts, layout)
    return {name: round(value) for name, value in parts.items()}


def _server_share(weight: Weight, facts: ModelFacts, layout: Layout) -> float:
    gpus = layout.tensor_parallel
    if weight.split is Split.none:
        return 1.0
    if weight.split is Split.vocab:
        step = _VOCAB_PADDING * gpus
        return -(-weight.shape[0] // step) * step / weight.shape[0] / gpus if gpus > 1 else 1.0
    if weight.split is Split.experts and layout.expert_parallel:
        return -(-weight.shape[0] // gpus) / weight.shape[0]
    if weight.split is Split.kv_heads:
        return 1 / min(gpus, facts.num_kv_heads)
    return 1 / gpus


def _server_activations(config: Config, facts: ModelFacts, layout: Layout) -> float:
    """One batch of tokens through the widest layer, and every sequence's logits twice (before and after the cap)."""
    rollout, plain = config.rollout, element_bytes(config.rollout.dtype)
    tokens = rollout.max_num_batched_tokens
    inner = (
        facts.moe_intermediate_size if layout.expert_parallel else facts.moe_intermediate_size / layout.tensor_parallel
    )
    routed = tokens * facts.top_k * (3 * inner * plain + facts.expert_width * (plain + FP32))
    if facts.sparse_layers < facts.num_layers:
        routed = max(routed, tokens * 3 * facts.intermediate_size / layout.tensor_parallel * plain)
    stream = tokens * facts.hidden_size * (3 * FP32 + 2 * plain)
    logits = 2 * rollout.max_num_seqs * facts.vocab_size * FP32
    return routed + stream + logits


def trainer_bytes(config: Config, facts: ModelFacts, layout: Layout) -> dict[str, int]:
    """Bytes on one trainer rank, by purpose: the fullest rank where rows do not divide evenly; nothing without one."""
    if not layout.num_ranks:
        return {}
    plain, ranks = element_bytes(config.trainer.dtype), layout.num_ranks
    packed = config.trainer.base is Base.packed
    weights = facts.weights(untied=True)
    base = sum(
        _held(weight, plain, packed=packed) * _rank_share(weight.shape[0], ranks) * weight.count for weight in weights
    )
    adapted = adapted_weights(config, facts)
    adapter = sum(_factors_on_a_rank(item, ranks) for item in adapted)
    parts = {
        "base shard": base,
        "adapter": adapter * FP32,
        "gradients and AdamW": adapter * (_ADAM_BYTES - FP32),
        **({_LEFT: adapter * element_bytes(config.rollout.adapter_dtype)} if _leaves_on_device(config) else {}),
        _GATHERED: 0.0,
        _ACTIVATIONS: _trainer_activations(config, facts),
    }
    if packed and facts.quantized_layers:
        parts[_UNPACKED] = sum(_held(w, plain) for w in weights if w.stored is Stored.nvfp4)
    if ranks > 1:
        layer = sum(_held(w, plain, packed=packed) for w in weights if w.count > 1 and not _is_other_form(w, facts))
        layer += sum(
            item.parameters // item.weight.count * FP32 for item in adapted if not _is_other_form(item.weight, facts)
        )
        tables = sum(_held(w, plain) for w in weights if w.split is Split.vocab)
        parts[_GATHERED] = _GATHERED_LAYERS * layer + tables
    return {name: round(value) for name, value in parts.items()}


def _leaves_on_device(config: Config) -> bool:
    """Whether ranks leave the adapter on their GPUs for the servers, as `auto` does on one machine."""
    transport, cluster = config.rollout.adapter_transport, config.cluster
    one_node = transport is Transport.auto and cluster.num_gpus <= _GPUS_A_NODE
    return cluster.device is Device.cuda and (one_node or transport is Transport.cuda_ipc)


def whole_layers(config: Config, facts: ModelFacts, layout: Layout) -> int:
    """Bytes of a trainer rank that do not shrink with more ranks: FSDP2 gathers whole layers, however many ranks there
    are, and no sequence is divided."""
    parts = trainer_bytes(config, facts, layout)
    return sum(parts.get(name, 0) for name in (_GATHERED, _ACTIVATIONS, _UNPACKED))


def _held(weight: Weight, plain: int, *, packed: bool = False) -> float:
    """Bytes in one layer as the trainer holds it: NVFP4 is dequantized to the compute type unless it stays packed."""
    if packed and weight.stored is Stored.nvfp4:
        return weight.bytes_as(Stored.nvfp4)
    return weight.bytes_as(Stored.fp32 if weight.stored is Stored.fp32 else Stored.bf16, plain_bytes=plain)


def _is_other_form(weight: Weight, facts: ModelFacts) -> bool:
    """Whether a weight is the BF16 form of experts that most layers have as NVFP4: a layer has one of the two."""
    return weight.part == "experts" and weight.stored is Stored.bf16 and facts.quantized_layers > 0


def _rank_share(rows: int, ranks: int) -> float:
    """FSDP2 splits the first dimension; the first rank has the most rows."""
    return -(-rows // ranks) / rows


def _factors_on_a_rank(item: AdaptedWeight, ranks: int) -> float:
    if item.num_experts > 1:
        return item.parameters * _rank_share(item.num_experts, ranks)
    a = item.rank * item.width_in * _rank_share(item.rank, ranks)
    b = item.rank * item.width_out * _rank_share(item.width_out, ranks)
    return item.weight.count * (a + b)


def _trainer_activations(config: Config, facts: ModelFacts) -> float:
    """Forward and backward of one micro-batch.

    With gradient checkpointing every layer keeps its float32 input, and one layer's insides live at a time. The head
    works in chunks of tokens, so its logits do not count.
    """
    trainer, plain = config.trainer, element_bytes(config.trainer.dtype)
    tokens = trainer.max_tokens_per_micro_batch
    query, key_value = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    attention = tokens * (4 * query + 2 * key_value) * 2 * plain
    stream = tokens * facts.hidden_size * (4 * FP32 + 4 * plain)
    routed = (
        tokens * facts.top_k * (3 * facts.moe_intermediate_size * plain + facts.expert_width * (2 * plain + 2 * FP32))
    )
    if facts.sparse_layers < facts.num_layers:
        routed = max(routed, tokens * 3 * facts.intermediate_size * plain)
    inside = attention + stream + routed
    kept = facts.num_layers * tokens * facts.hidden_size * FP32
    return kept + inside if trainer.gradient_checkpointing else facts.num_layers * inside
