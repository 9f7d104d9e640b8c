"""Which of the ranks' errors a user is shown, and what is said to do."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import ObjectStoreFullError, RayTaskError
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from sparkrl.config.schema import Transport
from sparkrl.errors import AdapterError, CheckpointError
from sparkrl.lora.peft_format import load_adapter
from sparkrl.trainer.group import _root_cause
from sparkrl.trainer.handover import memory_errors
from sparkrl.trainer.worker import TrainerWorker


def failed(cause: Exception) -> RayTaskError:
    return RayTaskError("score", "Traceback ...", cause)


def test_error_of_the_compiler_names_the_key_that_does_without_it():
    shown = _root_cause([None, failed(InductorError(InvalidCxxCompiler(), None))])
    assert shown.message.startswith("trainer rank 1 failed: InductorError: InvalidCxxCompiler: No working C++ compiler")
    assert shown.hint == "set `trainer.compile=never` to do without torch.compile"


def test_another_error_has_no_hint_and_a_users_mistake_comes_first():
    shown = _root_cause([failed(ZeroDivisionError("by zero"))])
    assert (shown.message, shown.hint) == ("trainer rank 0 failed: ZeroDivisionError: by zero", None)
    mistake = CheckpointError("model.safetensors is cut off", hint="download it again")
    shown = _root_cause([failed(ZeroDivisionError("by zero")), failed(mistake)])
    assert (type(shown), shown.message, shown.hint) == (CheckpointError, mistake.message, mistake.hint)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB."), "OutOfMemoryError: CUDA out of"),
        (OSError(errno.ENOSPC, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (RuntimeError("unable to open shared memory object </torch_7> in read-write mode"), "shared memory object"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"), "you tried"),
        (MemoryError(), "MemoryError"),
        (ObjectStoreFullError("the store is full"), "ObjectStoreFullError: "),
    ],
)
def test_want_of_memory_for_the_adapter_is_our_error_and_names_another_way(error, words):
    with pytest.raises(AdapterError) as caught, memory_errors(Transport.shared_memory):
        raise error
    assert caught.value.message.startswith("no memory to hand the adapter over through shared_memory: ")
    assert words in caught.value.message and "\n" not in caught.value.message
    assert "`rollout.adapter_transport=object_store`" in caught.value.hint


def test_right_that_lacks_to_hand_the_adapter_over_is_not_called_want_of_memory():
    with pytest.raises(AdapterError) as caught, memory_errors(Transport.shared_memory):
        raise PermissionError(errno.EPERM, "Operation not permitted")
    message = "the system does not allow to hand the adapter over through shared_memory: PermissionError: [Errno 1] "
    assert caught.value.message == message + "Operation not permitted"
    assert caught.value.hint == "choose `rollout.adapter_transport=object_store`"


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("no"), AdapterError("ours", hint="kept")])
def test_another_error_of_handing_over_passes_as_it_is(error):
    with pytest.raises(type(error)) as caught, memory_errors(Transport.cuda_ipc):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("transport", "in_use", "closed"),
    [
        # the version on the GPU is mapped until servers have loaded one that came another way
        (Transport.shared_memory, Transport.cuda_ipc, []),
        (Transport.object_store, Transport.cuda_ipc, ["host"]),
        (Transport.shared_memory, Transport.shared_memory, ["device"]),
        (Transport.object_store, Transport.shared_memory, ["device"]),
        (Transport.object_store, Transport.object_store, ["device", "host"]),
        (Transport.cuda_ipc, Transport.cuda_ipc, ["host"]),
        (Transport.shared_memory, None, ["device"]),
    ],
)
def test_memory_of_ways_not_in_use_is_given_back_and_no_other(transport, in_use, closed):
    found: list[str] = []

    class Box:
        def __init__(self, name):
            self.close = lambda: found.append(name)

        def room(self, num_bytes):
            raise MemoryError

    def write(*args, **options):
        raise MemoryError

    worker = object.__new__(TrainerWorker)
    worker._writer = SimpleNamespace(num_bytes=8, write=write)
    worker._outbox, worker._device_outbox = Box("host"), Box("device")
    error = worker.publish(transport, in_use=in_use)
    assert isinstance(error, AdapterError) and error.message.startswith("no memory to hand the adapter over")
    assert found == closed


def test_adapter_that_may_not_be_read_is_not_called_missing(tmp_path, monkeypatch):
    def denied(path):  # what safetensors raises for a file without permission; root would be let in
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr("sparkrl.lora.peft_format.load_file", denied)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing, which is part of the adapter"):
        load_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be opened: Permission denied, which"):
        load_adapter(tmp_path)
