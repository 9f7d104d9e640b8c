"""What a failed process said last, for messages."""

from __future__ import annotations

import os
import re
import sys

_ERROR_LINE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (.+)$")
_TAIL_BYTES = 64 << 10


def last_words(error: BaseException) -> str:
    """The most telling line about `error`.

    vLLM raises a general error in this process while the cause was printed by its child, whose error output is this
    process's own. So the newest `SomeError: ...` line of that output is preferred, when the output is a file.
    """
    own = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "EngineDeadError":  # its text points at a trace that a killed process did not leave
        own = "vLLM's engine process died without a message, as one does that is killed; perhaps memory ran out"
    try:
        sys.stderr.flush()
        path = os.readlink("/proc/self/fd/2")
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return own
    found = [match for line in lines if (match := _ERROR_LINE.search(line))]
    causes = [match for match in found if "Engine core" not in match[2] and "EngineDead" not in match[1]]
    if not causes:
        return own
    return f"{causes[-1][1].rsplit('.', 1)[-1]}: {causes[-1][2]}"
