"""A packed adapter from another process's memory into vLLM's buffers, inside vLLM's worker.

On CPU threads take the adapter a stretch at a time, copy it and sum it up while it lies in the processor's cache; an
adapter counts as loaded once all of it has been copied and found right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from vllm.lora.peft_helper import PEFTHelper

from sparkrl.errors import AdapterError
from sparkrl.lora.peft_format import rank_and_scale
from sparkrl.lora.plan import blocks_of
from sparkrl.lora.shared_memory import Inbox
from sparkrl.lora.threads import one_core_each, thread_count, working
from sparkrl.lora.wire import BLOCK_BYTES, block_checksum, view
from sparkrl.rollout.plugin import slots
from sparkrl.types import AdapterPart

T = TypeVar("T")
_SLOTS = 2
"""Adapter slots that a server has at most."""
Block = tuple[int, int]
"""Number of a part, and of a block in it."""


class Intake(Protocol):
    """How an adapter's bytes get into the buffers on this platform."""

    def open(self, parts: Sequence[AdapterPart]) -> None:
        """Reach the parts' memory, and let go of any other.

        Raises:
            AdapterError: it cannot be reached.
        """

    def take(self, moves: Sequence[slots.Move], parts: Sequence[AdapterPart], own: Sequence[Block]) -> list[Block]:
        """Make every move, and wait until the buffers hold the adapter.

        Args:
            own: blocks to verify.
        Returns:
            Those of them that are not as they were sent.
        """


class AdapterLoader:
    """Loads adapters into the slots of one worker.

    Args:
        manager: vLLM's adapter manager.
        worker, num_workers: this worker's number among those of its server; each verifies its share of the blocks.
        intake: how bytes get into the buffers on this platform.
        ratio_of: see `slots.Ratio`.
    """

    def __init__(
        self,
        manager: Any,
        *,
        worker: int,
        num_workers: int,
        intake: Intake,
        ratio_of: slots.Ratio = lambda module: None,
    ) -> None:
        self._manager, self._worker, self._num_workers = manager, worker, num_workers
        self._intake, self._ratio_of = intake, ratio_of
        self._planned: dict[int, tuple[Any, list[slots.Move], list[Any]]] = {}
        self._loaded: dict[int, int] = {}
        self.loaded_bytes = 0
        """Bytes of this worker's buffers that the last adapter filled."""

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
        self._intake.open(parts)
        moves, untouched = self._plan(slot, parts, config, scaled=scaled)
        slots.begin(manager, slot)
        damaged = self._intake.take(moves, parts, self._own_blocks(parts))
        if damaged:
            part, block = min(damaged)
            raise AdapterError(
                f"the adapter's bytes changed on the way: wrong checksum of block {block} in part {part}"
            )
        slots.enable(manager, slot, lora_id, helper.r, untouched)
        self._loaded[slot] = lora_id
        self.loaded_bytes = sum(move.target.nbytes for move in moves)

    def try_parts(self, parts: Sequence[AdapterPart]) -> None:
        """Read the first block of each part, touch no slot, and let go of the memory again.

        Raises:
            AdapterError: the memory cannot be reached, or holds something else.
        """
        first = [(number, 0) for number, part in enumerate(parts) if part.checksums]
        try:
            self._intake.open(parts)
            if self._intake.take([], parts, first):
                raise AdapterError("what can be read of the adapter's memory is not what was written there")
        finally:
            self._intake.open([])

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

    def _own_blocks(self, parts: Sequence[AdapterPart]) -> list[Block]:
        """Blocks that this worker verifies."""
        blocks = [(number, block) for number, part in enumerate(parts) for block in range(len(part.checksums))]
        return [blocks[at] for at in blocks_of(len(blocks), self._worker, self._num_workers)]


_SCALING = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")


def is_as_sent(part: AdapterPart, memory: np.ndarray, block: int) -> bool:
    """Whether a block in this machine's memory has the checksum that it was sent with."""
    start, end = block * part.block_bytes, min((block + 1) * part.block_bytes, part.num_bytes)
    return block_checksum(memory[start:end]) == part.checksums[block]


class Remembered(Generic[T]):
    """What was worked out for the moves of each slot, as long as they and what they read from stay where they are."""

    def __init__(self) -> None:
        self._known: list[tuple[Sequence[slots.Move], Any, T]] = []

    def __call__(self, moves: Sequence[slots.Move], key: Any, make: Callable[[], T]) -> T:
        """What `make` returned for these moves and this key, or returns now; what goes with another key is let go of,
        and with it the memory that it keeps mapped."""
        self._known = [entry for entry in self._known if entry[1] == key]
        for known_moves, _, found in self._known:
            if known_moves is moves:
                return found
        found = make()
        self._known = [(moves, key, found), *self._known[: _SLOTS - 1]]
        return found


class HostIntake:
    """Strided copies straight from shared memory; remembers the views it has made."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._memories: list[np.ndarray] = []
        self._known = Remembered[list["_Stretch"]]()

    def open(self, parts: Sequence[AdapterPart]) -> None:
        """See `Intake`."""
        self._memories = self._inbox.open_all(parts)

    def take(self, moves: Sequence[slots.Move], parts: Sequence[AdapterPart], own: Sequence[Block]) -> list[Block]:
        """See `Intake`."""
        places = [memory.ctypes.data for memory in self._memories]
        stretches = self._known(moves, (places, own), lambda: self._cut(moves, parts, own))
        damaged: list[Block] = []

        def take(stretch: _Stretch) -> None:
            for number, block in stretch.blocks:
                if not is_as_sent(parts[number], self._memories[number], block):
                    damaged.append((number, block))
            if stretch.targets:
                torch._foreach_copy_(stretch.targets, stretch.values)
            for move in stretch.others:
                move()

        threads = thread_count(sum(part.num_bytes for part in parts))
        with one_core_each(), working(stretches, take, num_threads=threads):
            pass
        return damaged

    def _cut(self, moves: Sequence[slots.Move], parts: Sequence[AdapterPart], own: Sequence[Block]) -> list[_Stretch]:
        """What each stretch of each part's memory is needed for."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the memory cannot be written to
            raws = [torch.from_numpy(memory) for memory in self._memories]
        stretches: dict[tuple[int, int], _Stretch] = {}

        def at(part: int, byte: int) -> _Stretch:
            return stretches.setdefault((part, byte // BLOCK_BYTES), _Stretch())

        for number, block in own:
            at(number, block * parts[number].block_bytes).blocks.append((number, block))
        for move in moves:
            raw, tensor = raws[move.part], view(raws[move.part], move.spec)
            if not move.is_plain:
                at(move.part, move.spec.offset).others.append(move.prepare(tensor))
                continue
            for target, value in _within(move.target, move.view(tensor), raw):
                stretch = at(move.part, value.data_ptr() - raw.data_ptr())
                stretch.targets.append(target)
                stretch.values.append(value)
        return [stretches[key] for key in sorted(stretches)]


@dataclass(slots=True)
class _Stretch:
    """As many bytes of a part as fit into the processor's cache, and what one thread does with them."""

    blocks: list[Block] = field(default_factory=list)
    """To verify."""
    targets: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    others: list[Callable[[], Any]] = field(default_factory=list)
    """Moves that do more than to copy."""


def _within(target: Tensor, value: Tensor, raw: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """A copy in pieces that lie within a stretch each, or begin in it where they have gaps."""
    if target.is_contiguous() and value.is_contiguous():
        target, value = target.view(-1), value.view(-1)
    begin = 0
    while begin < len(value):
        offset = value[begin:].data_ptr() - raw.data_ptr()
        row_bytes = max(value.stride(0) * value.element_size(), 1)
        end = begin + max((BLOCK_BYTES - offset % BLOCK_BYTES) // row_bytes, 1)
        yield target[begin:end], value[begin:end]
        begin = end
