"""Which of the ranks' errors a user is shown, and what is said to do."""

from __future__ import annotations

import errno

import pytest
import torch
from ray.exceptions import ObjectStoreFullError, RayTaskError
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from sparkrl.config.schema import Transport
from sparkrl.errors import AdapterError, CheckpointError
from sparkrl.trainer.group import _root_cause
from sparkrl.trainer.handover import memory_errors


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


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("no"), AdapterError("ours", hint="kept")])
def test_another_error_of_handing_over_passes_as_it_is(error):
    with pytest.raises(type(error)) as caught, memory_errors(Transport.cuda_ipc):
        raise error
    assert caught.value is error
