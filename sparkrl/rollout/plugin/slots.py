"""Where an adapter's tensors go in vLLM's stacked LoRA buffers, on CPU and on CUDA alike.

vLLM's own way keeps a second copy of every adapter and takes experts apart one by one. Here each LoRA module is asked,
once, which rows and columns of a factor it holds (its own slicing, run on indices, so that every kind of tensor and
expert parallelism is vLLM's to define); from then on a swap is a list of strided copies from the adapter's memory into
the buffers. vLLM's manager gets a name without tensors, which fails loudly if it is ever asked for them.

Legend: E experts, R rank, O output rows, I input width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.utils import parse_fine_tuned_lora_name

from sparkrl.errors import AdapterError
from sparkrl.lora.plan import Piece, Window, pieces
from sparkrl.types import TensorSpec

Ratio = Callable[[Any], "Tensor | None"]
"""float32 [E] of an experts module: the up half is divided by it and down's `lora_A` multiplied; see `cuda.experts`."""


class BufferedAdapter(LoRAModel):
    """Stands for an adapter that lives in the buffers alone."""

    def get_lora(self, module_name: str) -> Any:
        raise AdapterError(
            f"vLLM let go of adapter {self.id} and asks for `{module_name}` again; it has to be sent anew"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One tensor of an adapter, wherever its rows lie."""

    module: str
    """Module in vLLM's names."""
    is_a: bool
    specs: tuple[tuple[int, TensorSpec], ...]
    """Part and the rows there."""
    scale: float
    """Factor that its numbers still lack."""

    @property
    def name(self) -> str:
        """PEFT's."""
        return self.specs[0][1].name

    def shape(self, *, num_experts: int | None) -> tuple[int, ...]:
        """Of the whole tensor; experts in front where the module has experts.

        Raises:
            AdapterError: rows are missing or held twice, or do not divide among the experts.
        """
        first = self.specs[0][1]
        total = first.shape[0] if first.num_rows is None else first.num_rows
        rows = sorted((spec.first_row, spec.first_row + spec.shape[0]) for _, spec in self.specs if spec.shape[0])
        if [0, *(end for _, end in rows)] != [*(begin for begin, _ in rows), total]:
            raise AdapterError(f"the parts of the adapter hold rows {rows} of the {total} of `{first.name}`")
        whole = (total, *first.shape[1:])
        if num_experts is None or len(whole) == 3:
            return whole
        packed = whole[0] if self.is_a else whole[1]
        if packed % num_experts:
            raise AdapterError(f"`{first.name}` has shape {whole}, which {num_experts} experts cannot share")
        rank = packed // num_experts
        return (num_experts, rank, whole[1]) if self.is_a else (num_experts, whole[0], rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One copy from a part's tensor into a buffer."""

    part: int
    spec: TensorSpec
    num_experts: int | None
    """Set where the tensor is in PEFT's 2D layout of experts, and is viewed with the expert in front."""
    is_a: bool
    source: tuple[slice, ...]
    order: Tensor | None
    """Rows of `source` in the order that `rows` of the target want them; None keeps theirs."""
    rows: Tensor | None
    target: Tensor
    scale: float
    ratio_E: Tensor | None
    divide: bool

    @property
    def is_plain(self) -> bool:
        """Whether a copy is all there is to do."""
        return self.order is None and self.scale == 1.0 and self.ratio_E is None

    def view(self, tensor: Tensor, *, skipped_rows: int = 0) -> Tensor:
        """What is read, in its own place.

        Args:
            tensor: the part's tensor, `skipped_rows` left out at its beginning.
        """
        if self.num_experts is not None:
            if self.is_a:
                tensor = tensor.unflatten(0, (self.num_experts, -1))
            else:
                tensor = tensor.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        first, *rest = self.source
        return tensor[slice(first.start - skipped_rows, first.stop - skipped_rows), *rest]

    def prepare(self, tensor: Tensor, *, skipped_rows: int = 0) -> Callable[[], Any]:
        """The copy as a call, which reads what the tensor holds by then; see `view`."""
        value, target = self.view(tensor, skipped_rows=skipped_rows), self.target
        ratio_E11 = None if self.ratio_E is None else self.ratio_E[:, None, None]
        order = self.order
        if order is None and ratio_E11 is not None and self.scale == 1.0:  # one kernel, which rounds once
            return partial(torch.div if self.divide else torch.mul, value, ratio_E11, out=target)
        fits = target.dtype == value.dtype and target.is_contiguous() and self.rows is None
        if order is not None and ratio_E11 is None and self.scale == 1.0 and fits:
            return partial(torch.index_select, value, 0, order, out=target)

        def compute() -> None:
            found = value if order is None else value.index_select(0, order)
            if self.scale != 1.0 or ratio_E11 is not None:
                found = found.float()  # the buffer's type rounds once
            if self.scale != 1.0:
                found = found * self.scale
            if ratio_E11 is not None:
                found = found / ratio_E11 if self.divide else found * ratio_E11
            if self.rows is None:
                target.copy_(found)
            else:
                target.index_copy_(0, self.rows, found.to(target.dtype))

        return compute


def sources(
    manifests: Iterable[Sequence[TensorSpec]], mapper: Any, scale_of: Callable[[str], float]
) -> dict[tuple[str, bool], Source]:
    """The adapter's tensors by module (vLLM's names) and factor.

    Args:
        manifests: of each part.
        mapper: from checkpoint names to vLLM's, or None.
        scale_of: factor that a tensor's numbers still lack, by its name.
    Raises:
        AdapterError: a module has only one of its two factors.
    """
    found: dict[tuple[str, bool], list[tuple[int, TensorSpec]]] = {}
    for part, manifest in enumerate(manifests):
        for spec in manifest:
            found.setdefault(parse_fine_tuned_lora_name(spec.name, mapper), []).append((part, spec))
    lone = sorted(module for module, is_a in found if (module, not is_a) not in found)
    if lone:
        raise AdapterError(f"the adapter has only one of the two factors of `{lone[0]}`")
    return {
        (module, is_a): Source(module=module, is_a=is_a, specs=tuple(specs), scale=scale_of(specs[0][1].name))
        for (module, is_a), specs in found.items()
    }


def parts_of(name: str, packed: Mapping[str, list[str]]) -> list[str]:
    """Names of the adapter's modules that one module of vLLM holds."""
    parent, _, last = name.rpartition(".")
    if last == "experts":
        return [f"{name}.base_layer", name]
    return [f"{parent}.{part}" for part in packed[last]] if last in packed else [name]


def plan_moves(
    manager: Any, slot: int, found: dict[tuple[str, bool], Source], ratio_of: Ratio
) -> tuple[list[Move], list[Any], list[str]]:
    """Every copy that puts an adapter into a slot.

    Returns:
        The copies; the modules that the adapter leaves alone; names of its modules that the served model lacks.
    Raises:
        AdapterError: a tensor does not fit its module.
    """
    moves: list[Move] = []
    untouched, claimed = [], set()
    for name, module in manager.modules.items():
        parts = parts_of(name, manager.packed_modules_mapping)
        claimed.update(parts)
        if not any((part, True) in found for part in parts):
            untouched.append(module)
        elif isinstance(module, FusedMoEWithLoRA):
            moves += _experts(module, slot, name, parts, found, ratio_of)
        else:
            moves += _linear(module, slot, parts, found)
    return moves, untouched, sorted({module for module, _ in found} - claimed)


def _linear(module: Any, slot: int, parts: list[str], found: dict[tuple[str, bool], Source]) -> list[Move]:
    moves = []
    for is_a, buffers in ((True, module.lora_a_stacked), (False, module.lora_b_stacked)):
        given = [found.get((part, is_a)) for part in parts]
        indices: Any = [None if source is None else _rows_or_columns(source) for source in given]
        reorder = getattr(module, "reorder_rows", None)
        if reorder is not None and not is_a:
            indices = [None if index is None else reorder(i, index) for i, index in enumerate(indices)]
        if module.tp_size > 1:
            cut = module.slice_lora_a if is_a else module.slice_lora_b
            indices = cut(indices) if len(parts) > 1 else [cut(indices[0])]
        for source, index, buffer in zip(given, indices, buffers, strict=True):
            if source is not None:
                moves += _place(source, index.flatten(), buffer[slot, 0])
    return moves


def _rows_or_columns(source: Source) -> Tensor:
    """Indices in the form of the factor: of columns for A, of rows for B."""
    shape = source.shape(num_experts=None)
    return torch.arange(shape[1])[None] if source.is_a else torch.arange(shape[0])[:, None]


def _place(source: Source, index: Tensor, buffer: Tensor) -> list[Move]:
    """Copies of a linear factor's rows (B) or columns (A) `index` into a buffer [R, I] or [O, R]."""
    rows, columns = source.shape(num_experts=None)
    rank, wide = (rows, len(index)) if source.is_a else (columns, len(index))
    fits = (
        buffer.shape[0] >= rank and buffer.shape[1] == wide
        if source.is_a
        else (buffer.shape[0] == wide and buffer.shape[1] >= rank)
    )
    if not fits:
        raise _misfit(source, (rows, columns), tuple(buffer.shape))
    buffer = buffer[:rank] if source.is_a else buffer[:, :rank]
    runs = _runs(index)
    if len(runs) > 2:  # rows in another order, as attention's on CUDA
        return list(_shuffled(source, index, buffer))
    moves = []
    for start, first, length in runs:
        window: Window = ((0, rank), (first, first + length)) if source.is_a else ((first, first + length), (0, rank))
        part = buffer[:, start : start + length] if source.is_a else buffer[start : start + length]
        moves += [_move(piece, source, part[piece.target]) for piece in pieces(window, source.specs)]
    return moves


def _runs(index: Tensor) -> list[tuple[int, int, int]]:
    """Stretches of consecutive numbers: where each starts, its first number, its length."""
    breaks = (index.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()] if len(index) else []
    ends = [*starts[1:], len(index)]
    return [(start, int(index[start]), end - start) for start, end in zip(starts, ends, strict=True)]


def _shuffled(source: Source, index: Tensor, buffer: Tensor) -> Iterable[Move]:
    """Copies of the rows `index` of a factor B, a part of the adapter at a time."""
    rows, rank = source.shape(num_experts=None)
    for piece in pieces(((0, rows), (0, rank)), source.specs):
        first, last = piece.target[0].start, piece.target[0].stop
        mine = ((index >= first) & (index < last)).nonzero().flatten()
        order = (index[mine] - first).to(buffer.device)
        yield _move(piece, source, buffer, order=order, rows=None if len(mine) == len(index) else mine)


def _experts(
    module: Any, slot: int, name: str, parts: list[str], found: dict[tuple[str, bool], Source], ratio_of: Ratio
) -> list[Move]:
    if not all((part, is_a) in found for part in parts for is_a in (True, False)):
        raise AdapterError(f"the adapter of `{name}` needs factors for both gate_up_proj and down_proj")
    if module.fully_sharded:
        raise AdapterError("adapters that vLLM shards by rank (`fully_sharded_loras`) cannot be loaded from memory")
    (up_a, up_b), (down_a, down_b) = (tuple(found[part, is_a] for is_a in (True, False)) for part in parts)
    total = module.global_num_experts
    first = module.ep_rank * module.local_num_experts if module.use_ep else 0
    local = (first, first + module.local_num_experts)
    (_, up_rank, width), (_, rows, _) = up_a.shape(num_experts=total), up_b.shape(num_experts=total)
    (_, down_rank, inner), (_, out, _) = down_a.shape(num_experts=total), down_b.shape(num_experts=total)
    if rows != 2 * inner or width != out:
        raise AdapterError(
            f"the adapter of `{name}` is for experts of {width} to {rows} and {inner} to {out}, which no gated pair has"
        )
    here = module.intermediate_size_per_partition
    if inner != here * module.tp_size:
        raise _misfit(down_a, down_a.shape(num_experts=total), tuple(module.w2_lora_a_stacked[0][slot].shape))
    start = module.tp_rank * here if module.tp_size > 1 else 0
    mine = (start, start + here)
    ratio_E = ratio_of(module)
    moves: list[Move] = []

    def add(source: Source, buffer: Tensor, middle: tuple[int, int], last: tuple[int, int], **ratio: Any) -> None:
        window = (local, middle, last)
        shape = source.shape(num_experts=total)
        wanted = tuple(end - begin for begin, end in window)
        rank_dim = 1 if source.is_a else 2
        inside = shape[0] == total and all(end <= whole for (_, end), whole in zip(window, shape, strict=True))
        fits = inside and all(
            has >= want if dim == rank_dim else has == want
            for dim, (has, want) in enumerate(zip(buffer.shape, wanted, strict=True))
        )
        if not fits:
            raise _misfit(source, shape, tuple(buffer.shape))
        buffer = buffer[tuple(slice(0, want) for want in wanted)]
        fused = source.specs[0][1]
        if len(fused.shape) == 2:  # PEFT's layout: never in parts
            moves.append(
                Move(
                    part=source.specs[0][0],
                    spec=fused,
                    num_experts=total,
                    is_a=source.is_a,
                    source=tuple(slice(*limits) for limits in window),
                    order=None,
                    rows=None,
                    target=buffer,
                    scale=source.scale,
                    ratio_E=ratio.get("ratio_E"),
                    divide=ratio.get("divide", False),
                )
            )
            return
        for piece in pieces(window, source.specs):
            moves.append(_move(piece, source, buffer[piece.target], experts=piece.target[0], **ratio))

    for buffer in module.w13_lora_a_stacked:
        add(up_a, buffer[slot], (0, up_rank), (0, width))
    stacked = [buffer[slot] for buffer in module.w13_lora_b_stacked]
    if len(stacked) == 1 and ratio_E is None and module.tp_size == 1:
        add(up_b, stacked[0], (0, rows), (0, up_rank))
    else:  # gate and up lie apart in the adapter, or are treated differently
        halves = [stacked[0][:, :here], stacked[0][:, here:]] if len(stacked) == 1 else stacked
        for half, buffer in enumerate(halves):
            limits = (half * inner + mine[0], half * inner + mine[1])
            add(up_b, buffer, limits, (0, up_rank), **(_ratio(ratio_E, divide=True) if half else {}))
    add(down_a, module.w2_lora_a_stacked[0][slot], (0, down_rank), mine, **_ratio(ratio_E, divide=False))
    add(down_b, module.w2_lora_b_stacked[0][slot], (0, out), (0, down_rank))
    return moves


def _ratio(ratio_E: Tensor | None, *, divide: bool) -> dict[str, Any]:
    return {} if ratio_E is None else {"ratio_E": ratio_E, "divide": divide}


def _move(
    piece: Piece,
    source: Source,
    target: Tensor,
    *,
    order: Tensor | None = None,
    rows: Tensor | None = None,
    experts: slice | None = None,
    ratio_E: Tensor | None = None,
    divide: bool = False,
) -> Move:
    return Move(
        part=piece.part,
        spec=piece.spec,
        num_experts=None,
        is_a=source.is_a,
        source=piece.source,
        order=order,
        rows=None if rows is None else rows.to(target.device),
        target=target,
        scale=source.scale,
        ratio_E=None if ratio_E is None else ratio_E[experts].to(target.device),
        divide=divide,
    )


def _misfit(source: Source, shape: tuple[int, ...], buffer: tuple[int, ...]) -> AdapterError:
    return AdapterError(
        f"`{source.name}` has shape {shape}, which does not fit the served `{source.module}` (its buffer: {buffer})",
        hint="trainer and server must load the same checkpoint, and `lora.rank` must not exceed the server's",
    )


def begin(manager: Any, slot: int) -> None:
    """Take whatever adapter is in a slot away: from here on nothing can be answered from it."""
    held = manager.lora_index_to_id[slot]
    if held is not None:
        manager.remove_adapter(held)


def enable(manager: Any, slot: int, lora_id: int, rank: int, untouched: Sequence[Any]) -> None:
    """Tell vLLM that a slot holds adapter `lora_id`."""
    for module in manager.modules.values():
        if hasattr(module, "adapter_enabled"):
            module.adapter_enabled[slot] = int(all(module is not other for other in untouched))
    manager._registered_adapters[lora_id] = BufferedAdapter(lora_id, rank, {})
    manager._active_adapters[lora_id] = None
    manager.lora_index_to_id[slot] = lora_id
    manager._last_mapping = None  # the wrappers' tables of slots are made anew for the next batch
