"""A packed adapter from shared memory into vLLM's buffers, inside vLLM's worker.

While one thread copies, another sums up the blocks that were sent; an adapter counts as loaded once both are done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.lora.peft_helper import PEFTHelper

from sparkrl.errors import AdapterError
from sparkrl.lora.peft_format import rank_and_scale
from sparkrl.lora.plan import blocks_of
from sparkrl.lora.shared_memory import Inbox
from sparkrl.lora.wire import block_checksum, summing_pool, view
from sparkrl.rollout.plugin import slots
from sparkrl.types import AdapterPart

Copy = Callable[[Sequence[slots.Move], Sequence[Tensor], Callable[[int, int], None]], None]
"""Makes every move out of the parts' bytes, and says now and then up to which byte of which part it has come."""
_GROUP_BYTES = 8 << 20
"""Bytes copied between two such reports; a few of them fit into the processor's cache."""


class AdapterLoader:
    """Loads adapters into the slots of one worker.

    Args:
        manager: vLLM's adapter manager.
        worker, num_workers: this worker's number among those of its server; each verifies its share of the blocks.
        copy: how bytes get into the buffers on this platform.
        ratio_of: see `slots.Ratio`.
        inbox: where the adapter's memory is mapped.
        num_threads: threads that sum up, beside the one that copies.
    """

    def __init__(
        self,
        manager: Any,
        *,
        worker: int,
        num_workers: int,
        copy: Copy,
        ratio_of: slots.Ratio = lambda module: None,
        inbox: Inbox | None = None,
        num_threads: int = 1,
    ) -> None:
        self._manager, self._worker, self._num_workers = manager, worker, num_workers
        self._copy, self._ratio_of = copy, ratio_of
        self._inbox = Inbox() if inbox is None else inbox
        self._num_threads = num_threads
        self._planned: dict[int, tuple[Any, list[slots.Move], list[Any]]] = {}
        self._loaded: dict[int, int] = {}

    def load(
        self, slot: int, lora_id: int, parts: Sequence[AdapterPart], config: Mapping[str, Any], *, scaled: bool
    ) -> None:
        """Replace what a slot holds; on an error nothing answers from the slot any more.

        Args:
            lora_id: id of the new adapter, above 0 and never used before.
            config: content of adapter_config.json.
            scaled: whether `lora_B` is already multiplied by alpha / rank.
        Raises:
            AdapterError: the bytes are not those that were sent, or do not fit the served model.
            ValueError: vLLM's own checks of the config.
        """
        manager = self._manager
        helper = PEFTHelper.from_dict(dict(config))
        helper.validate_legal(manager.lora_config)
        handles = [part.memory for part in parts if part.memory is not None]
        self._inbox.keep(handles)
        memories = [self._inbox.open(handle) for handle in handles]
        moves, untouched = self._plan(slot, parts, config, scaled=scaled)
        slots.begin(manager, slot)
        blocks = self._own_blocks(parts)
        sums: list[Future[bool]] = []

        def sum_up(part: int, end: int) -> None:
            """Verify the blocks before byte `end` of a part, while they still lie in the processor's cache."""
            while len(sums) < len(blocks) and blocks[len(sums)] < (part, end // parts[part].block_bytes):
                number, block = blocks[len(sums)]
                sums.append(summing.submit(_is_as_sent, parts[number], memories[number], block))

        with summing_pool(sum(part.num_bytes for part in parts), self._num_threads) as summing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the memory cannot be written to
                raw = [torch.from_numpy(memory) for memory in memories]
            self._copy(moves, raw, sum_up)
            if parts:
                sum_up(len(parts) - 1, parts[-1].num_bytes + parts[-1].block_bytes)
            damaged = [at for at, future in zip(blocks, sums, strict=True) if not future.result()]
        if damaged:
            part, block = damaged[0]
            raise AdapterError(
                f"the adapter's bytes changed on the way: wrong checksum of block {block} in part {part}"
            )
        slots.enable(manager, slot, lora_id, helper.r, untouched)
        self._loaded[slot] = lora_id

    def _plan(
        self, slot: int, parts: Sequence[AdapterPart], config: Mapping[str, Any], *, scaled: bool
    ) -> tuple[list[slots.Move], list[Any]]:
        manifests = tuple(part.manifest for part in parts)
        key = (manifests, scaled, tuple(sorted((name, repr(config.get(name))) for name in _SCALING)))
        known = self._planned.get(slot)
        if known is not None and known[0] == key and self._loaded.get(slot) == self._manager.lora_index_to_id[slot]:
            return known[1], known[2]
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        found = slots.sources(
            manifests,
            mapper.get_rename_mapper() if mapper is not None else None,
            lambda name: rank_and_scale(config, name)[1] if not scaled and ".lora_B." in name else 1.0,
        )
        moves, untouched, stray = slots.plan_moves(self._manager, slot, found, self._ratio_of)
        if stray or not found:
            raise AdapterError(
                f"{len(stray)} of the adapter's {len(found) // 2} modules do not exist in the served model, "
                f"first: `{stray[0] if stray else 'none sent'}`",
                hint="trainer and server must load the same checkpoint",
            )
        slots.begin(self._manager, slot)
        for module in self._manager.modules.values():
            module.reset_lora(slot)  # what a smaller rank leaves free must be zero
        self._planned[slot] = (key, moves, untouched)
        return moves, untouched

    def _own_blocks(self, parts: Sequence[AdapterPart]) -> list[tuple[int, int]]:
        """Part and number of each block that this worker verifies."""
        blocks = [(number, block) for number, part in enumerate(parts) for block in range(len(part.checksums))]
        return [blocks[at] for at in blocks_of(len(blocks), self._worker, self._num_workers)]


def _is_as_sent(part: AdapterPart, memory: np.ndarray, block: int) -> bool:
    start, end = block * part.block_bytes, min((block + 1) * part.block_bytes, part.num_bytes)
    return block_checksum(memory[start:end]) == part.checksums[block]


_SCALING = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")


class HostCopier:
    """Strided copies straight from the shared memory; remembers the views it has made."""

    def __init__(self) -> None:
        self._known: tuple[Sequence[slots.Move], list[int]] = ([], [])
        self._groups: list[tuple[int, int, list[Tensor], list[Tensor]]] = []
        self._others: list[tuple[slots.Move, Tensor]] = []

    def __call__(
        self, moves: Sequence[slots.Move], bytes_of: Sequence[Tensor], reached: Callable[[int, int], None]
    ) -> None:
        """See `Copy`."""
        addresses = [raw.data_ptr() for raw in bytes_of]
        if self._known[0] is not moves or self._known[1] != addresses:
            self._known = (moves, addresses)
            self._look(moves, bytes_of)
        for part, end, targets, values in self._groups:
            torch._foreach_copy_(targets, values)
            reached(part, end)
        for move, tensor in self._others:
            move.write(tensor)

    def _look(self, moves: Sequence[slots.Move], bytes_of: Sequence[Tensor]) -> None:
        self._groups, self._others = [], []
        size = 0
        for move in sorted(moves, key=lambda move: (move.part, move.spec.offset)):
            tensor = view(bytes_of[move.part], move.spec)
            if not move.is_plain:
                self._others.append((move, tensor))
                continue
            if not self._groups or self._groups[-1][0] != move.part or size > _GROUP_BYTES:
                self._groups.append((move.part, 0, [], []))
                size = 0
            part, _, targets, values = self._groups[-1]
            targets.append(move.target)
            values.append(move.read(tensor))
            size += move.target.nbytes
            self._groups[-1] = (part, move.spec.offset, targets, values)
