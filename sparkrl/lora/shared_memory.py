"""Memory that one process fills and others on the same machine read, without a copy and without a name.

The memory belongs to an anonymous file (`memfd`) that others open through `/proc/<pid>/fd/<fd>`. It has no name in any
folder, so nothing is left behind however a process ends: the kernel frees it with the last mapping. It is not bounded
by the size of `/dev/shm` (64 MiB in a container by default), and it is kept from one version to the next: giving pages
back and taking fresh ones costs five times the copy itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from sparkrl.errors import AdapterError
from sparkrl.lora.device_memory import forget_error
from sparkrl.types import AdapterPart, SharedMemory

_SPARE_BYTES = 256 << 20
"""Memory that must be left on the machine beside the adapter."""


def pin(memory: np.ndarray) -> None:
    """Let a GPU reach memory directly; without that copies go through the driver's own staging."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)):
        forget_error()
        warnings.warn("the adapter's memory could not be pinned; swaps take longer", stacklevel=2)


def unpin(memory: np.ndarray) -> None:
    """Undo `pin`, before the memory is unmapped."""
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class Outbox:
    """The writing side; grows when it has to.

    Args:
        label: shown in the system's list of mappings.
        pinned: let a GPU write into it directly.
    """

    def __init__(self, label: str, *, pinned: bool = False) -> None:
        self._label, self._pinned = label, pinned
        self._fd = -1
        self._memory: np.ndarray = np.empty(0, dtype=np.uint8)

    def room(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes] to write into. Readers of an earlier version must be done.

        Raises:
            AdapterError: the machine does not have that much memory.
        """
        if num_bytes > len(self._memory):
            self.close()
            self._memory = self._allocate(num_bytes)
            if self._pinned:
                pin(self._memory)
        return self._memory[:num_bytes]

    def handle(self) -> SharedMemory:
        """What a reader needs to open the memory."""
        inode = os.fstat(self._fd).st_ino
        return SharedMemory(pid=os.getpid(), fd=self._fd, inode=inode, num_bytes=len(self._memory))

    def close(self) -> None:
        """Let go of it; readers keep what they have mapped."""
        if self._fd >= 0:
            if self._pinned and len(self._memory):
                unpin(self._memory)
            os.close(self._fd)
        self._fd, self._memory = -1, np.empty(0, dtype=np.uint8)

    def _allocate(self, num_bytes: int) -> np.ndarray:
        if not hasattr(os, "memfd_create"):
            raise AdapterError(
                f"shared memory without a name needs Linux, this is {sys.platform}", hint="run it in a Linux container"
            )
        found = available_bytes()
        if num_bytes + _SPARE_BYTES > found:
            raise _no_room(num_bytes, f"the machine has {found / 2**30:.2f} GiB left")
        self._fd = os.memfd_create(f"sparkrl-{self._label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # takes the pages now: later, a machine without memory would kill the process instead
            os.posix_fallocate(self._fd, 0, num_bytes)
            # nobody can cut it short: a reader that touched what is gone would be killed
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return np.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=np.uint8)
        except OSError as error:
            self.close()
            raise _no_room(num_bytes, str(error)) from None


class Inbox:
    """The reading side; remembers what it has mapped.

    Args:
        pinned: let a GPU read it directly. It is mapped for writing then, as the driver wants it.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._mapped: dict[tuple[int, int], np.ndarray] = {}

    def open(self, memory: SharedMemory) -> np.ndarray:
        """uint8 [num_bytes].

        Raises:
            AdapterError: the writer is gone, or has let go of the memory.
        """
        key = (memory.pid, memory.inode)
        if key not in self._mapped:
            access = mmap.ACCESS_WRITE if self._pinned else mmap.ACCESS_READ
            path = f"/proc/{memory.pid}/fd/{memory.fd}"
            try:
                fd = os.open(path, os.O_RDWR if self._pinned else os.O_RDONLY)
                try:
                    found = os.fstat(fd)
                    if found.st_ino != memory.inode:
                        raise AdapterError(f"process {memory.pid} let go of the adapter's memory before it was read")
                    if found.st_size < memory.num_bytes:
                        raise AdapterError(
                            f"the adapter's memory in process {memory.pid} has {found.st_size} bytes, expected "
                            f"{memory.num_bytes}"
                        )
                    mapping = mmap.mmap(fd, memory.num_bytes, access=access)
                finally:
                    os.close(fd)
            except OSError as error:
                raise AdapterError(
                    f"the adapter's memory in process {memory.pid} cannot be opened: {error}",
                    hint="if trainer and server run in containers of their own, set "
                    "`rollout.adapter_transport=object_store`",
                ) from None
            self._mapped[key] = np.frombuffer(mapping, dtype=np.uint8)
            if self._pinned:
                pin(self._mapped[key])
        return self._mapped[key]

    def open_all(self, parts: Iterable[AdapterPart]) -> list[np.ndarray]:
        """The memory of each part; every other one is forgotten.

        Raises:
            AdapterError: see `open`.
        """
        memories = []
        for part in parts:
            if not isinstance(part.memory, SharedMemory):
                raise AdapterError(
                    "the adapter was left on a GPU, which a server on CPU cannot read",
                    hint="choose `rollout.adapter_transport=shared_memory`",
                )
            memories.append(part.memory)
        self.keep(memories)
        return [self.open(memory) for memory in memories]

    def keep(self, memories: Iterable[SharedMemory]) -> None:
        """Forget every other memory, so that it is freed once its writer lets go of it too."""
        kept = {(memory.pid, memory.inode) for memory in memories}
        for key in set(self._mapped) - kept:
            if self._pinned:
                unpin(self._mapped[key])
            del self._mapped[key]


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can still be taken on this machine, or in this container where that is less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # pages of files that were read count as used, but give way: a checkpoint's fill the container up to its limit
        cache = int(stat["inactive_file"]) + int(stat["active_file"])
        return min(found, limit - used + cache)
    except (OSError, ValueError, KeyError):  # no container, or one without a limit (`max`)
        return found


def _no_room(num_bytes: int, found: str) -> AdapterError:
    return AdapterError(
        f"no memory to hand the adapter over: it takes {num_bytes / 2**30:.2f} GiB of shared memory, {found}",
        hint="halve it with `rollout.adapter_dtype=bfloat16`, spread it with more `trainer.num_workers`, or lower "
        "`lora.rank`",
    )
