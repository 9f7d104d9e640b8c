"""A GPU's memory that one process fills and others on the same machine read, without a copy (CUDA IPC).

The memory is taken from the CUDA runtime itself, not from torch's allocator: a handle then means exactly this memory
(the allocator shares whole segments, and none of its expandable ones), and it is given back and unmapped when we say
so. A handle is 64 bytes of plain data. Order between the processes is the caller's: the writer waits for its GPU before
it hands a handle on, and a reader for its own before it answers.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkrl.errors import AdapterError
from sparkrl.types import DeviceMemory

_PAGE = 2 << 20
"""What the driver shares at once, bytes; smaller pieces would share a page with something else."""
_HANDLE_BYTES = 64
_PEER_ACCESS = 1
"""`cudaIpcMemLazyEnablePeerAccess`, the only flag there is."""
_FROM_ANYWHERE = 4
"""`cudaMemcpyDefault`: the driver sees from the addresses which devices they belong to."""


class _Handle(ctypes.Structure):
    _fields_ = [("content", ctypes.c_ubyte * _HANDLE_BYTES)]


class DeviceOutbox:
    """The writing side; grows when it has to.

    Args:
        device: the GPU the adapter is trained on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._address, self._num_bytes = 0, 0
        self._handle = ""

    def room(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] on the device to write into, zero at first. Readers of an earlier version must be done.

        Raises:
            AdapterError: the GPU does not have that much memory, or cannot share it.
        """
        if num_bytes > self._num_bytes:
            self.close()
            self._allocate(-(-num_bytes // _PAGE) * _PAGE)
        return _tensor(self._address, num_bytes, self._device)

    def handle(self) -> DeviceMemory:
        """What a reader needs to map the memory."""
        return DeviceMemory(
            **_writer(os.getpid()),
            pid=os.getpid(),
            device=device_name(self._device),
            handle=self._handle,
            num_bytes=self._num_bytes,
        )

    def close(self) -> None:
        """Give it back. Readers must have let go of it (see `DeviceInbox.keep`)."""
        if self._address:
            torch.cuda.synchronize(self._device)
            _runtime().cudaFree(ctypes.c_void_p(self._address))
        self._address, self._num_bytes, self._handle = 0, 0, ""

    def _allocate(self, num_bytes: int) -> None:
        runtime, address, handle = _runtime(), ctypes.c_void_p(), _Handle()
        torch.cuda.empty_cache()  # what torch keeps for later is not free for the runtime
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            if why := _failure(runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(num_bytes))):
                raise AdapterError(
                    f"no memory to hand the adapter over: it takes {num_bytes / 2**30:.2f} GiB of the GPU beside what "
                    f"is trained ({why})",
                    hint="choose `rollout.adapter_transport=shared_memory`, or halve it with "
                    "`rollout.adapter_dtype=bfloat16`",
                )
            self._address, self._num_bytes = int(address.value or 0), num_bytes
            if why := _failure(runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address)):
                self.close()
                raise AdapterError(
                    f"the GPU's memory cannot be shared with the server: {why}",
                    hint="choose `rollout.adapter_transport=shared_memory`",
                )
        self._handle = bytes(handle.content).hex()
        _tensor(self._address, num_bytes, self._device).zero_()  # gaps between tensors are never written


class DeviceInbox:
    """The reading side; remembers what it has mapped.

    Args:
        device: the GPU that the adapter is read on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[DeviceMemory, int] = {}

    def open(self, memory: DeviceMemory) -> RemoteMemory:
        """The memory, mapped once.

        Raises:
            AdapterError: the writer is gone or on another machine, or its GPU cannot be reached from here.
        """
        check_writer(memory)
        if memory not in self._mapped:
            handle, address = _Handle(), ctypes.c_void_p()
            ctypes.memmove(ctypes.byref(handle), bytes.fromhex(memory.handle), _HANDLE_BYTES)
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                found = _runtime().cudaIpcOpenMemHandle(ctypes.byref(address), handle, ctypes.c_uint(_PEER_ACCESS))
            if why := _failure(found):
                raise AdapterError(
                    f"the memory of GPU {memory.device} in process {memory.pid} cannot be mapped on GPU "
                    f"{device_name(self._device)}: {why}",
                    hint="choose `rollout.adapter_transport=shared_memory`",
                )
            self._mapped[memory] = int(address.value or 0)
        return RemoteMemory(self._mapped[memory], memory, self._device)

    def keep(self, memories: Iterable[DeviceMemory]) -> bool:
        """Unmap every other memory, which nothing may read any more; tells whether there was any."""
        others = set(self._mapped) - set(memories)
        for memory in others:
            torch.cuda.synchronize(self._device)
            _failure(_runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(self._mapped.pop(memory))))
        return bool(others)


class RemoteMemory:
    """Another process's memory as this one sees it.

    Args:
        address: where it is mapped.
        memory: what it is.
        device: the GPU of the reader.
    """

    def __init__(self, address: int, memory: DeviceMemory, device: torch.device) -> None:
        self.address, self.num_bytes, self._device = address, memory.num_bytes, device
        self.is_here = memory.device == device_name(device)
        """Whether it lies on the reader's own GPU, so that kernels read it at full speed."""

    def tensor(self) -> Tensor:
        """uint8 [num_bytes], without a copy; only where `is_here`."""
        assert self.is_here
        return _tensor(self.address, self.num_bytes, self._device)

    def copy_to(self, target: Tensor, begin: int) -> None:
        """Bytes from `begin` on into uint8 `target`, in the order of the current stream.

        Raises:
            AdapterError: the GPUs cannot reach each other.
        """
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        source, size = ctypes.c_void_p(self.address + begin), ctypes.c_size_t(target.numel())
        into = ctypes.c_void_p(target.data_ptr())
        if why := _failure(_runtime().cudaMemcpyAsync(into, source, size, ctypes.c_int(_FROM_ANYWHERE), stream)):
            raise AdapterError(f"copying the adapter from another GPU failed: {why}")


def check_writer(memory: DeviceMemory) -> None:
    """That the process which wrote is on this machine and still lives.

    Raises:
        AdapterError: it is not, or does not.
    """
    try:
        found = _writer(memory.pid)
    except OSError:
        found = {}
    if _boot_id() != memory.host:
        raise AdapterError(
            "the adapter was left on a GPU of another machine",
            hint="choose `rollout.adapter_transport=object_store`",
        )
    if found.get("started") != memory.started:
        raise AdapterError(f"process {memory.pid} is gone, and the adapter that it left on its GPU with it")


def device_name(device: torch.device) -> str:
    """The GPU's own id, the same in every process whatever it is numbered there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _writer(pid: int) -> dict[str, Any]:
    """Machine and start of a process: its number may be used again."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    return {"host": _boot_id(), "started": int(after_name.split()[19])}


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@functools.cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded.

    Raises:
        AdapterError: torch has loaded none.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")
        if Path(path[2]).name.startswith("libcudart"):
            runtime = ctypes.CDLL("/" + path[2])
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            return runtime
    raise AdapterError(
        "torch has loaded no CUDA runtime of its own, so memory cannot be shared through it",
        hint="choose `rollout.adapter_transport=shared_memory`",
    )


def forget_error() -> None:
    """Take a failure that was dealt with from the runtime: torch would blame whatever it does next for it."""
    _runtime().cudaGetLastError()


def _failure(code: int) -> str | None:
    """What went wrong, in the runtime's words."""
    if code == 0:
        return None
    forget_error()
    return f"{_runtime().cudaGetErrorString(code).decode()} (CUDA error {code})"


class _Span:
    """Raw memory as torch accepts it without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _tensor(address: int, num_bytes: int, device: torch.device) -> Tensor:
    with torch.cuda.device(device):
        return torch.as_tensor(_Span(address, num_bytes), device=device)
