"""One process at a time writes to a run's folder, and a killed one is no hindrance."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sparkrl.errors import ConfigError
from sparkrl.telemetry import only_writer

HOLDER = """
import sys, time, pathlib
from sparkrl.telemetry.lock import only_writer
with only_writer(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_folder_another_process_writes_to_is_refused(tmp_path, holder):
    with pytest.raises(ConfigError, match="another process is writing to") as caught, only_writer(tmp_path):
        pass
    assert str(tmp_path) in caught.value.message


def test_folder_of_a_killed_process_is_free_at_once(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with only_writer(tmp_path):
        pass
    with only_writer(tmp_path):  # and after one that ended well
        pass


def test_folder_that_cannot_be_written_to_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write to .*: No such file"), only_writer(tmp_path / "gone"):
        pass
