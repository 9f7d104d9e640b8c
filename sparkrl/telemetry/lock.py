"""One process at a time writes to the folder of a run or of an evaluation."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkrl.errors import ConfigError

_FILE = ".lock"


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from going on with the same folder while inside.

    The lock ends with the process, however that ends, so a killed run is gone on with at once.

    Raises:
        ConfigError: another process writes to the folder, or it cannot be written to.
    """
    try:
        file = (folder / _FILE).open("w")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}", hint="is it yours, and not on a read-only disk?"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing to {folder}\nTwo of them would mix their rows and checkpoints.",
                hint="wait for it or stop it (Ctrl-C finishes its step and saves), then resume",
            ) from None
        except OSError:  # a file system without locks: nothing can be told about others there
            pass
        yield
