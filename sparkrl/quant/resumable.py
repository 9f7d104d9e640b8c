"""Writing a checkpoint of any size: shard by shard, resumable after a kill, visible only when it is complete.

While it is made the checkpoint lies in `.NAME.partial` beside its place. Each shard is written under a temporary name,
flushed, renamed, and entered into a small manifest with size and checksum; the index and config.json come last, so that
no loader takes the folder for a checkpoint before. A second run of the same conversion keeps the shards that still
agree with the manifest.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from sparkrl.errors import CheckpointError
from sparkrl.quant.checkpoint import INDEX, SINGLE, CheckpointReader
from sparkrl.quant.folder import refuse_existing, replace_file
from sparkrl.quant.form import read_json
from sparkrl.quant.shards import ShardWriter

_MANIFEST = ".progress.json"
_LOCK = ".lock"
_READ_BYTES = 4 << 20

Progress = Callable[[str, int, int], None]
"""Called with the shard's name, bytes done so far and bytes in all."""


@dataclass(frozen=True)
class Piece:
    """Tensors that are made together and lie in one shard."""

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """Type and shape by name."""
    produce: Callable[[], Iterator[tuple[str, int, Tensor]]]
    """Yields name, first row and rows; every row once."""

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors take on disk."""
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.tensors.values())


def write_resumably(
    dst: Path,
    pieces: Sequence[Piece],
    files: Mapping[str, str | bytes],
    *,
    identity: Mapping[str, Any],
    shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint, or finish one whose writing was interrupted.

    Args:
        dst: folder to make; must not exist yet.
        pieces: everything it holds, in order.
        files: the other files by name, config.json among them.
        identity: what the result depends on, as JSON; a start with another identity is not continued.
        shard_bytes: a shard takes pieces up to this size, and at least one.
        progress: told about every piece.
    Raises:
        CheckpointError: `dst` exists, another process writes it, the start of another conversion is in the way, a
            piece is unusable, or the disk is full.
    """
    dst = dst.absolute()
    refuse_existing(dst)
    work = dst.with_name(f".{dst.name}.partial")
    shards = _group(pieces, shard_bytes)
    try:
        work.mkdir(parents=True, exist_ok=True)
        with open(work / _LOCK, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"another process is writing {dst}", hint="wait for it, or stop it") from None
            try:
                # pieces come in a fixed order, so the counts say which of them are in which shard
                parts = {file: len(members) for file, members in shards.items()}
                _write_shards(work, shards, {**identity, "shards": parts}, progress)
                _write_files(work, shards, files)
                _remove_others(work, {*shards, *files, INDEX, _MANIFEST, _LOCK})
                CheckpointReader(work)  # its headers, as a loader would
            except BaseException:
                _remove_if_empty(work)
                raise
            (work / _LOCK).unlink()
            work.rename(dst)
            (dst / _MANIFEST).unlink()
    except OSError as error:
        kept = f"; shards that were finished are kept in {work}" if (work / _MANIFEST).is_file() else ""
        raise CheckpointError(
            f"{dst} cannot be written: {error.strerror or error}" + (f" ({error.filename})" if error.filename else ""),
            hint=f"mend that and run the same command again{kept}",
        ) from None


def _group(pieces: Sequence[Piece], shard_bytes: int) -> dict[str, list[Piece]]:
    """Pieces by shard, in order, with the shards' file names."""
    groups: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not groups or size + piece.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, start=1)}


def _write_shards(
    work: Path, shards: dict[str, list[Piece]], identity: dict[str, Any], progress: Progress | None
) -> None:
    manifest = _manifest(work, identity)
    done, total = 0, sum(piece.nbytes for members in shards.values() for piece in members)
    for file, members in shards.items():
        kept = manifest["finished"].get(file)
        if kept and _seal(work / file) == kept:
            done += sum(piece.nbytes for piece in members)
            if progress:
                progress(file, done, total)
            continue
        temporary = work / f"{file}.tmp"
        writer = ShardWriter(temporary, {name: spec for piece in members for name, spec in piece.tensors.items()})
        try:
            for piece in members:
                for name, start, rows in piece.produce():
                    writer.put(name, rows, start=start)
                done += piece.nbytes
                if progress:
                    progress(file, done, total)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        os.replace(temporary, work / file)
        manifest["finished"][file] = _seal(work / file)
        replace_file(work / _MANIFEST, json.dumps(manifest))


def _write_files(work: Path, shards: dict[str, list[Piece]], files: Mapping[str, str | bytes]) -> None:
    """The index and the rest, config.json last."""
    if len(shards) > 1:
        index = {name: file for file, members in shards.items() for piece in members for name in piece.tensors}
        total = sum(piece.nbytes for members in shards.values() for piece in members)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        replace_file(work / INDEX, json.dumps(content, indent=2) + "\n")
    for name, text in sorted(files.items(), key=lambda item: item[0] == "config.json"):
        replace_file(work / name, text)


def _remove_others(work: Path, wanted: set[str]) -> None:
    """Remove what a run with other shards left when it was killed before its first one was entered."""
    for entry in work.iterdir():
        if entry.name not in wanted:
            entry.unlink()


def _manifest(work: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """That of an earlier run of this conversion, or an empty one."""
    if not (work / _MANIFEST).exists():
        return {"identity": identity, "finished": {}}
    manifest = read_json(work / _MANIFEST)
    found = manifest.get("identity") or {}
    if found != identity:
        differing = ", ".join(sorted(key for key in identity if found.get(key) != identity[key]))
        raise CheckpointError(
            f"{work} holds the start of another conversion, which differs in: {differing}",
            hint="remove that folder, or run with the same source and options again",
        )
    return manifest


def _remove_if_empty(work: Path) -> None:
    """Leave nothing behind if there is nothing to resume from."""
    if not (work / _MANIFEST).exists():
        (work / _LOCK).unlink(missing_ok=True)
        if not any(work.iterdir()):
            work.rmdir()


def _seal(path: Path) -> dict[str, Any] | None:
    """Size and checksum of a file, or None if there is none."""
    if not path.is_file():
        return None
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return {"size": path.stat().st_size, "xxh3": digest.hexdigest()}
