"""safetensors files: headers checked byte for byte, rows read with `pread`, tensors written in pieces.

Nothing is mapped: mapped pages count as resident memory, hide how much was read, and turn a file that shrinks into
a crash. Everything here is safe to call from several threads.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkrl.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000
"""The format's own limit, bytes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a file holds it."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """First byte within the file."""

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Shard:
    """One safetensors file, open for reading.

    Args:
        path: the file.
        name: what the index calls it, if it lies in a folder of its own; None is the file's own name.
    Raises:
        CheckpointError: the file cannot be opened, is truncated, longer than its header says, or has a header that
            cannot be true.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path, self._name = path, name or path.name
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from None
        try:
            self.tensors: dict[str, Stored] = self._header()
        except BaseException:
            os.close(self._fd)
            raise

    def __del__(self) -> None:
        if hasattr(self, "tensors"):
            os.close(self._fd)

    def read(self, name: str, start: int, stop: int, *, out: Tensor | None = None) -> Tensor:
        """Rows [start, stop) along dimension 0, in memory of their own; a scalar is read whole.

        Args:
            out: contiguous tensor of the stored type to read into.
        """
        stored = self.tensors[name]
        if out is None:
            out = torch.empty((stop - start, *stored.shape[1:]) if stored.shape else (), dtype=stored.dtype)
        row = stored.dtype.itemsize * torch.Size(stored.shape[1:]).numel()
        view, offset = _bytes(out), stored.offset + (row * start if stored.shape else 0)
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done : done + (1 << 30)]], offset + done)
            except OSError as error:
                raise CheckpointError(f"`{name}` in {self.path} cannot be read: {error.strerror}") from None
            if not got:
                raise CheckpointError(f"`{name}` in {self.path} ends early: the file was shortened while it was read")
            done += got
        return out

    def _header(self) -> dict[str, Stored]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or 8 + length > size:
            raise self._damaged(size, "its header is cut off")
        if length > _MAX_HEADER:
            raise self._damaged(size, f"its header claims {length} bytes")
        try:
            content = json.loads(os.pread(self._fd, length, 8))
        except ValueError:
            raise self._damaged(size, "its header is not JSON") from None
        tensors, spans = {}, []
        for name, entry in content.items() if isinstance(content, dict) else ():
            if name == "__metadata__":
                continue
            try:
                code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            except (TypeError, KeyError, ValueError):
                raise self._damaged(size, f"its header does not describe `{name}`") from None
            if not isinstance(code, str) or any(type(number) is not int for number in (*shape, begin, end)):
                raise self._damaged(size, f"its header does not describe `{name}`")
            if code not in DTYPES:
                raise CheckpointError(f"`{name}` in {self.path} has the unsupported type {code}")
            nbytes = DTYPES[code].itemsize * math.prod(shape)
            if min(shape, default=0) < 0 or end - begin != nbytes:
                raise self._damaged(size, f"its header gives `{name}` {end - begin} bytes, its shape {nbytes}")
            tensors[name] = Stored(self._name, shape, DTYPES[code], 8 + length + begin)
            spans.append((begin, end))
        at = 0
        for begin, end in sorted(spans):
            if begin != at:
                raise self._damaged(size, "tensors overlap or leave a hole")
            at = end
        if 8 + length + at != size:
            raise self._damaged(size, f"its header asks for {8 + length + at} bytes")
        return tensors

    def _damaged(self, size: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged or truncated ({size} bytes): {why}", hint="download this file again"
        )


class ShardWriter:
    """Writes one safetensors file in pieces, in any order; the header comes first, from the shapes.

    Args:
        path: file to write; replaced if it exists.
        tensors: type and shape by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.path, self.tensors = path, tensors
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        # Widest types first keeps every tensor aligned to its own width, as the library itself does.
        offset, begins = 0, {}
        for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
            dtype, shape = tensors[name]
            begins[name], end = offset, offset + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = {name: 8 + len(text) + begin for name, begin in begins.items()}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._reserve(8 + len(text) + offset)
            self._write(memoryview(len(text).to_bytes(8, "little") + text), 0)
        except BaseException:
            self.abort()
            raise

    def put(self, name: str, value: Tensor, *, start: int = 0) -> None:
        """Write rows from `start` on along dimension 0 (a scalar whole)."""
        dtype, shape = self.tensors[name]
        assert value.dtype == dtype and value.shape[1:] == shape[1:], (name, value.dtype, value.shape)
        row = dtype.itemsize * torch.Size(shape[1:]).numel()
        self._write(_bytes(value.contiguous()), self._start[name] + start * row)

    def close(self) -> None:
        """Flush to the disk, so that a file that has its final name is whole even after a power cut."""
        os.fsync(self._fd)
        os.close(self._fd)

    def abort(self) -> None:
        """Close and remove the file."""
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def _reserve(self, size: int) -> None:
        # A full disk is found here, before the work; file systems without reservation find it while writing.
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done : done + (1 << 30)], offset + done)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
