"""From a step's sequences to packed micro-batches, the same number on every rank.

A sequence of P prompt and T response tokens is fed as its first N = P + T - 1 tokens, exactly those that the server was
fed: token j predicts token j + 1, the last T positions predict the response, and every fed token has a route.

Legend: B row of a micro-batch, M longest response, T packed token, L layer, K routed slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparkrl.types import TrainSequence


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence on its way to a rank."""

    index: int
    """Position in the step's batch."""
    sequence: TrainSequence
    old_log_probs: np.ndarray | None = None
    """float32 [T], what the importance ratio divides by; None takes the trainer's own, before the update."""
    trainer_log_probs: np.ndarray | None = None
    """float32 [T], the trainer's own before the step's first update; None while this is the first."""
    base_log_probs: np.ndarray | None = None
    """float32 [T], of the base model without adapter, for a KL term."""
    counted: bool = True
    """False for a filler that keeps ranks in step; it has no part in loss or metrics."""


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Packed rows as tensors."""

    rows: list[Row]
    input_ids: Tensor
    """int64 [1, T]."""
    targets: Tensor
    """int64 [1, T], the next token."""
    position_ids: Tensor
    """int64 [1, T], restarting at 0 for every row."""
    routes: Tensor | None
    """uint8 or int16 [T, L, K]."""
    counted: Tensor
    """bool [T], False for fillers."""
    response_index: Tensor
    """int64 [B, M], packed position that predicts each response token; 0 where there is none."""
    response_mask: Tensor
    """bool [B, M], True where there is one and the row counts."""
    advantages: Tensor
    """float32 [B, M]."""
    rollout_log_probs: Tensor
    """float32 [B, M]."""
    old_log_probs: Tensor | None
    """float32 [B, M]."""
    trainer_log_probs: Tensor | None
    """float32 [B, M]."""
    base_log_probs: Tensor | None
    """float32 [B, M]."""
    num_responses: list[int] = field(default_factory=list)
    """Response tokens of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a mini-batch's losses are divided by; the same on every rank and for every micro-batch."""

    num_tokens: int
    """Response tokens of the mini-batch, all ranks."""
    num_sequences: int
    num_ranks: int


def num_fed(sequence: TrainSequence) -> int:
    """Tokens of a sequence that are fed to the model."""
    return len(sequence.prompt_ids) + len(sequence.response_ids) - 1


def plan(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Spread sequences over ranks and micro-batches, balanced by tokens.

    Args:
        lengths: tokens of each sequence.
        max_tokens: bound of one micro-batch; a longer sequence gets one of its own.
    Returns:
        [rank][micro-batch] -> positions in `lengths`. Every rank has equally many micro-batches; some may be empty when
        there are fewer sequences than bins.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(1, -(-sum(lengths) // (num_ranks * max_tokens)))
    while True:
        bins: list[list[int]] = [[] for _ in range(count * num_ranks)]
        load = [0] * len(bins)
        for i in order:
            least = load.index(min(load))
            bins[least].append(i)
            load[least] += lengths[i]
        if all(tokens <= max_tokens or len(content) == 1 for tokens, content in zip(load, bins, strict=True)):
            break
        count += 1
    # neighbours in load order go to different ranks
    ranked = sorted(range(len(bins)), key=lambda b: (-load[b], b))
    return [[sorted(bins[b]) for b in ranked[rank::num_ranks]] for rank in range(num_ranks)]


def collate(rows: list[Row], device: str) -> MicroBatch:
    """Pack rows into one micro-batch on a device."""
    ids, targets, positions, counted, starts = [], [], [], [], []
    offset = 0
    for row in rows:
        tokens = np.concatenate([row.sequence.prompt_ids, row.sequence.response_ids]).astype(np.int64)
        num = len(tokens) - 1
        ids.append(tokens[:-1])
        targets.append(tokens[1:])
        positions.append(np.arange(num))
        counted.append(np.full(num, row.counted))
        starts.append(offset + len(row.sequence.prompt_ids) - 1)
        offset += num
    num_responses = [len(row.sequence.response_ids) for row in rows]
    longest = max(num_responses)
    step = np.arange(longest)
    inside_BM = step[None] < np.array(num_responses)[:, None]
    index_BM = np.where(inside_BM, np.array(starts)[:, None] + step[None], 0)
    mask_BM = inside_BM & np.array([row.counted for row in rows])[:, None]

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    def padded(values: list[np.ndarray]) -> Tensor:
        out_BM = np.zeros((len(rows), longest), dtype=np.float32)
        for out, value in zip(out_BM, values, strict=True):
            out[: len(value)] = value
        return put(out_BM)

    def padded_if_all(values: list[np.ndarray | None]) -> Tensor | None:
        given = [value for value in values if value is not None]
        return padded(given) if len(given) == len(rows) else None

    routes = [row.sequence.routed_experts for row in rows]
    with_routes = all(len(route) == num_fed(row.sequence) for route, row in zip(routes, rows, strict=True))
    return MicroBatch(
        rows=rows,
        input_ids=put(np.concatenate(ids))[None],
        targets=put(np.concatenate(targets))[None],
        position_ids=put(np.concatenate(positions))[None],
        # torch indexes no uint16; 256 experts and more fit int16
        routes=put(np.concatenate([r if r.dtype == np.uint8 else r.astype(np.int16) for r in routes]))
        if with_routes
        else None,
        counted=put(np.concatenate(counted)),
        response_index=put(index_BM),
        response_mask=put(mask_BM),
        advantages=padded([row.sequence.advantages for row in rows]),
        rollout_log_probs=padded([row.sequence.rollout_log_probs for row in rows]),
        old_log_probs=padded_if_all([row.old_log_probs for row in rows]),
        trainer_log_probs=padded_if_all([row.trainer_log_probs for row in rows]),
        base_log_probs=padded_if_all([row.base_log_probs for row in rows]),
        num_responses=num_responses,
    )
