"""Folders and files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparkrl.errors import CheckpointError


@contextlib.contextmanager
def appearing(dst: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A scratch folder that becomes `dst` when the block ends well, and vanishes when it does not."""
    dst = dst.absolute()
    if not overwrite:
        refuse_existing(dst)
    dst.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", dir=dst.parent))
    try:
        made = scratch / "new"
        made.mkdir()
        yield made
        if dst.exists():
            dst.rename(scratch / "old")
        made.rename(dst)
    finally:
        if (scratch / "old").exists() and not dst.exists():
            (scratch / "old").rename(dst)
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_existing(dst: Path) -> None:
    """A result never takes the place of anything, a link that leads nowhere included."""
    if os.path.lexists(dst):
        raise CheckpointError(f"{dst} exists already", hint="remove it or choose another folder")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a small file so that it has the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
