"""Judging a whole checkpoint: every file, tensor and scale, against its own config and the model's parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sparkrl.errors import CheckpointError
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.form import is_ignored
from sparkrl.quant.layout import Finding, companions

_CHUNK_BYTES = 32 << 20
"""Bytes of a tensor held at once (but at least one row)."""
_TEXT = ("model.", "lm_head.")
_TOWERS = ("model.vision", "model.audio", "model.visual", "model.multi_modal")
"""Parts of multimodal models that a text model has no place for, and need not have."""


@dataclass(kw_only=True)
class Report:
    """What was looked at and what is wrong."""

    path: str
    form: str = "unknown"
    """The declared quantization scheme, or `plain`."""
    num_tensors: int = 0
    """Tensors as the model sees them."""
    num_quantized: int = 0
    bytes_read: int = 0
    coverage: str = "not checked"
    """Whether the tensors were compared with a model's parameters."""
    findings: list[Finding] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def verify_checkpoint(
    path: str | os.PathLike[str],
    expected: Mapping[str, tuple[int, ...]] | None = None,
    *,
    optional: Collection[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Read everything and collect what is wrong; nothing is raised for a bad checkpoint.

    Args:
        path: the folder.
        expected: shapes of the parameters of a model of this config, by name; None leaves coverage unchecked.
        optional: names that may be there as well (a head that is tied to the embedding).
        progress: told the file, the bytes checked so far, and the bytes in all.
    """
    report = Report(path=str(path))
    try:
        reader = CheckpointReader(path, lenient=True)
    except CheckpointError as error:
        report.findings.append(Finding(error.message, hint=error.hint))
        return report
    report.form = reader.scheme.title if reader.scheme else "plain"
    report.num_tensors = len(reader.names)
    report.num_quantized = sum(reader.is_quantized(name) for name in reader.names)
    report.findings += reader.findings
    if expected is not None:
        report.coverage = "checked"
        report.findings += _coverage(reader, expected, optional)
    total, done = sum(stored.nbytes for stored in reader.stored.values()), 0
    for name in reader.names_in_file_order():
        report.findings += _values(reader, name)
        done += _stored_bytes(reader, name)
        if progress:
            progress(reader.file(name), done, total)
    report.bytes_read = reader.bytes_read
    return report


def _coverage(
    reader: CheckpointReader, expected: Mapping[str, tuple[int, ...]], optional: Collection[str]
) -> Iterator[Finding]:
    """Parameters without a tensor, tensors without a parameter, and shapes that differ."""
    broken = {finding.tensor for finding in reader.findings}
    unread = None in broken  # what a file that cannot be read holds is not known to be absent
    hint = "config.json belongs to another model, or the checkpoint is incomplete"
    for name, shape in expected.items():
        if name not in reader.names:
            if name not in broken and not unread:
                yield Finding(f"`{name}` {shape} is absent", name, None, hint)
        elif reader.shape(name) != shape and name not in broken:
            problem = f"`{name}` in {reader.file(name)} has shape {reader.shape(name)}, the model asks for {shape}"
            yield Finding(problem, name, reader.file(name), hint)
    for name in reader.names:
        if name not in expected and name not in optional and name.startswith(_TEXT) and not name.startswith(_TOWERS):
            yield Finding(f"`{name}` in {reader.file(name)} has no place in the model", name, reader.file(name), hint)


def _values(reader: CheckpointReader, name: str) -> Iterator[Finding]:
    """Numbers that are not finite, scales that are not positive, types that hold no weights."""
    file, dtype, shape = reader.file(name), reader.dtype(name), reader.shape(name)
    first = reader.logical(name).first
    if reader.is_quantized(name) and reader.scheme and is_ignored(first.name, reader.scheme.ignore):
        yield Finding(f"`{name}` in {file} is quantized, but config.json lists it as ignored", name, file)
    if not dtype.is_floating_point:
        yield Finding(f"`{name}` in {file} has the type {dtype}, which is none for weights", name, file)
        return
    bad = 0
    row = dtype.itemsize * torch.Size(shape[1:]).numel()
    # of experts that are stored one by one, each that is wrong is named
    step = 1 if reader.logical(name).per_expert else max(1, _CHUNK_BYTES // max(1, row))
    for lo in range(0, shape[0] if shape else 1, step):
        hi = min(lo + step, shape[0]) if shape else 1
        try:
            if reader.is_quantized(name):
                yield from _extras(reader, name, lo, hi)
                reader.packed(name, lo, hi)  # checks the scales
            else:
                values = reader.rows(name, lo, hi) if shape else reader.read(name)
                bad += int((~torch.isfinite(values)).sum())
        except CheckpointError as error:
            yield Finding(error.message, name, file, error.hint)
    if bad:
        yield Finding(f"`{name}` in {file} holds {bad} values that are NaN or infinite", name, file)


def _extras(reader: CheckpointReader, name: str, lo: int, hi: int) -> Iterator[Finding]:
    """Input scales, which servers use though dequantization does not."""
    tensor = reader.logical(name)
    experts = tensor.experts[lo:hi] if tensor.per_expert else tensor.experts if lo == 0 else ()
    for matrix in (matrix for expert in experts for matrix in expert):
        assert matrix.names
        for extra in companions(matrix.name, reader.stored, matrix.names):
            stored = reader.stored[extra]
            if extra in (matrix.block, matrix.scale) or not stored.dtype.is_floating_point:
                continue
            values = reader.stored_rows(extra, 0, stored.shape[0] if stored.shape else 1).float()
            if not bool((torch.isfinite(values) & (values > 0)).all()):
                problem = f"`{extra}` in {stored.file} has scales that are not positive numbers"
                yield Finding(problem, name, stored.file)


def _stored_bytes(reader: CheckpointReader, name: str) -> int:
    """Bytes of a logical tensor on disk."""
    size = 0
    for matrix in (matrix for expert in reader.logical(name).experts for matrix in expert):
        names = [matrix.name, *(companions(matrix.name, reader.stored, matrix.names) if matrix.names else ())]
        size += sum(reader.stored[stored].nbytes for stored in names)
    return size
