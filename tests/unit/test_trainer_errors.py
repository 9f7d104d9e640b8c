"""Which of the ranks' errors a user is shown, and what is said to do."""

from __future__ import annotations

from ray.exceptions import RayTaskError
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from sparkrl.errors import CheckpointError
from sparkrl.trainer.group import _root_cause


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
