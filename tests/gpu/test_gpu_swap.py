"""An adapter from one process's GPU memory into another's buffers (CUDA IPC), against the factors and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import gpu_swap
from sparkrl.errors import AdapterError
from sparkrl.lora.device_memory import DeviceInbox, device_name
from sparkrl.lora.wire import BLOCK_BYTES, from_plain
from sparkrl.rollout.plugin.cuda.swap import GpuIntake
from sparkrl.rollout.plugin.loading import AdapterLoader
from sparkrl.types import DeviceMemory

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda:0")
WRITER = """
import json, sys, torch
from dataclasses import asdict
from benchmarks.gpu_swap import CONFIG, SMALL, make_factors
from sparkrl.lora.device_memory import DeviceOutbox
from sparkrl.lora.wire import PartWriter, to_plain
box = DeviceOutbox(torch.device("cuda:0"))
for line in sys.stdin:
    command, number = line.split()
    if command == "room":
        box.room(int(number)).fill_(int(number) % 251)
        torch.cuda.synchronize()
        found = asdict(box.handle())
    elif command == "publish":
        factors = make_factors(SMALL, "cuda", int(number))
        writer = PartWriter({name: (value, 0, len(value)) for name, value in factors.items()}, CONFIG, "bfloat16")
        found = to_plain([writer.write_on_device(box.room(writer.num_bytes), memory=box.handle())])
    else:
        box.close()
        found = None
    print(json.dumps(found), flush=True)
"""


class Writer:
    """A process that leaves things on the GPU."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": with_root()}
        self.process = subprocess.Popen([sys.executable, "-c", WRITER], **pipes)

    def __call__(self, command: str, number: int):
        self.process.stdin.write(f"{command} {number}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line[0] in "[{n":  # libraries print too
                return json.loads(line)
        raise RuntimeError("the writing process ended")


def with_root() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def writer():
    made = Writer()
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("swap") / "figures.json"
    # a process of its own: its trainers are forked before it touches the GPU
    command = [sys.executable, "-m", "benchmarks.gpu_swap", "--out", str(out)]
    subprocess.run(command, check=True, env=with_root(), cwd=ROOT, timeout=120)
    found = json.loads(out.read_text())
    print(json.dumps(found))
    return found


@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_buffers_hold_what_the_other_process_trained(figures: dict, dtype: str, transport: str) -> None:
    assert figures[f"{dtype} {transport}"]["wrong_buffers"] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_swap_on_the_device_is_quicker_than_over_the_bus(figures: dict, dtype: str) -> None:
    mapped, shared = figures[f"{dtype} cuda_ipc"], figures[f"{dtype} shared_memory"]
    assert mapped["load"] < shared["bus_copy"] and mapped["publish"] < shared["bus_copy"]


def test_device_memory_goes_with_its_writer_and_shared_memory_does_not(figures: dict) -> None:
    assert "is gone, and the adapter that it left on its GPU" in figures["bfloat16 cuda_ipc"]["dead_writer"]
    assert figures["bfloat16 shared_memory"]["dead_writer"] == "served"


def test_memory_that_grows_is_mapped_anew_and_all_of_it_is_given_back(writer: Writer) -> None:
    inbox, free = DeviceInbox(DEVICE), []
    for _ in range(3):
        for megabytes in (40, 40, 90):
            memory = DeviceMemory(**writer("room", megabytes << 20))
            inbox.keep([memory])
            remote = inbox.open(memory)
            assert remote.is_here and memory.device == device_name(DEVICE)
            assert remote.tensor()[: megabytes << 20].eq((megabytes << 20) % 251).all()
        inbox.keep([])
        assert writer("close", 0) is None
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert max(free) - min(free) < 20 << 20


def test_bytes_that_changed_after_they_were_sent_are_found_on_the_device(writer: Writer) -> None:
    manager = gpu_swap.make_manager(gpu_swap.SMALL, "cuda")
    loader = AdapterLoader(manager, worker=0, num_workers=1, intake=GpuIntake(DEVICE))
    parts = from_plain(writer("publish", 1))
    loader.try_parts(parts)
    loader.load(0, 1, parts, gpu_swap.CONFIG, scaled=True)
    inbox = DeviceInbox(DEVICE)
    inbox.open(parts[0].memory).tensor()[1000] ^= 1
    with pytest.raises(AdapterError, match="wrong checksum of block 0 in part 0"):
        loader.load(0, 2, parts, gpu_swap.CONFIG, scaled=True)
    with pytest.raises(AdapterError, match="not what was written there"):
        loader.try_parts(parts)
    inbox.keep([])
    parts = from_plain(writer("publish", 2))  # in the same memory
    loader.load(0, 3, parts, gpu_swap.CONFIG, scaled=True)
    assert len(parts[0].checksums) == -(-parts[0].num_bytes // BLOCK_BYTES)


def test_handle_that_means_nothing_is_refused_and_the_gpu_works_on(writer: Writer) -> None:
    memory = DeviceMemory(**writer("room", 1 << 20) | {"handle": "11" * 64})
    with pytest.raises(AdapterError, match=r"cannot be mapped on GPU .* \(CUDA error \d+\)"):
        DeviceInbox(DEVICE).open(memory)
    assert torch.ones(1000, device=DEVICE).sum().item() == 1000
