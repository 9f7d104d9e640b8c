"""Threads that share work out, checksums of a GPU, and memory whose writer is gone or that was cut short."""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparkrl.config.load import load
from sparkrl.errors import AdapterError, ConfigError
from sparkrl.lora.device_memory import check_writer
from sparkrl.lora.device_sums import as_numbers, block_sums
from sparkrl.lora.shared_memory import Inbox, Outbox
from sparkrl.lora.threads import working
from sparkrl.lora.wire import BLOCK_BYTES, PartWriter, from_plain, to_plain
from sparkrl.types import DeviceMemory

BLOCK = 16 << 10
WORDS = BLOCK // 8


def sums(words, **place):
    return as_numbers(block_sums(torch.from_numpy(words).view(torch.uint8), BLOCK, **place))


def test_device_sums_are_weighted_sums_of_words_with_odd_weights():
    """The weights, read off by summing up one word at a time, then the whole by Python's own integers."""
    weights = []
    for at in range(WORDS):
        one = np.zeros(WORDS, dtype=np.int64)
        one[at] = 1
        weights.append(sums(one)[0])
    assert len(set(weights)) == WORDS and all(weight % 2 for weight in weights)
    words = np.random.default_rng(0).integers(-(1 << 63), 1 << 63, 2 * WORDS + 100, dtype=np.int64)
    expected = tuple(
        sum(int(word) * weight for word, weight in zip(words[at : at + WORDS], weights, strict=False)) % (1 << 64)
        for at in range(0, len(words), WORDS)
    )
    assert sums(words) == expected  # the last block is shorter
    assert sums(words[:100]) == (
        sum(int(w) * weight for w, weight in zip(words[:100], weights[:100], strict=True)) % (1 << 64),
    )
    for workers in (2, 3, 4):
        for worker in range(workers):
            assert sums(words, first=worker, step=workers) == expected[worker::workers]


def test_device_sums_see_any_bit_and_words_that_changed_places():
    random = np.random.default_rng(1)
    words = random.integers(-(1 << 63), 1 << 63, WORDS, dtype=np.int64)
    before = sums(words)
    for bit in range(64):
        changed = words.copy()
        changed[random.integers(WORDS)] ^= np.int64(1) << np.int64(bit)
        assert sums(changed) != before
    for _ in range(50):
        one, other = random.choice(WORDS, 2, replace=False)
        changed = words.copy()
        changed[[one, other]] = changed[[other, one]]
        assert sums(changed) != before


MEMORY = DeviceMemory(host="", pid=1, started=2, device="GPU-0", handle="00" * 64, num_bytes=1 << 30)
CONFIG = {"r": 4, "lora_alpha": 6, "peft_type": "LORA", "alpha_pattern": {"k_proj": 12}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_part_is_written_on_its_device_with_the_bits_that_shared_memory_gets(dtype):
    random = torch.Generator().manual_seed(0)
    values = {}
    for module in ("q_proj", "k_proj"):
        for factor, shape in (("A", (4, 90_000)), ("B", (90_001, 4))):
            name = f"base_model.model.model.layers.0.self_attn.{module}.lora_{factor}.default.weight"
            values[name] = torch.randn(shape, generator=random)
    made = PartWriter({name: (value, 0, len(value)) for name, value in values.items()}, CONFIG, dtype)
    box, target = Outbox("test"), torch.zeros(made.num_bytes, dtype=torch.uint8)
    for _ in range(2):  # the second version finds the first one's memory
        memory = box.room(made.num_bytes)
        made.write(memory, memory=box.handle())
        part = made.write_on_device(target, memory=MEMORY)
        assert np.array_equal(target.numpy(), memory)
        assert part.checksums == as_numbers(block_sums(target, BLOCK_BYTES)) and len(part.checksums) > 1
        assert part.memory == MEMORY and from_plain(to_plain([part])) == [part]
        for value in values.values():
            value.mul_(-1.5)
    box.close()


def test_writer_that_is_gone_or_elsewhere_is_told_from_one_that_lives():
    process = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
    process.start()
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        host = file.read().strip()
    with open(f"/proc/{process.pid}/stat", encoding="ascii") as file:
        started = int(file.read().split()[21])
    memory = replace(MEMORY, host=host, pid=process.pid, started=started)
    check_writer(memory)
    with pytest.raises(AdapterError, match="another machine") as caught:
        check_writer(replace(memory, host="elsewhere"))
    assert "object_store" in caught.value.hint
    with pytest.raises(AdapterError, match=rf"process {process.pid} is gone"):
        check_writer(replace(memory, started=started - 1))  # its number was used again
    process.kill()
    process.join()
    with pytest.raises(AdapterError, match=rf"process {process.pid} is gone, and the adapter that it left on its GPU"):
        check_writer(memory)


def _publish(connection):
    box = Outbox("test")
    box.room(5000)[:] = 7
    connection.send(box.handle())
    threading.Event().wait()


def test_shared_memory_whose_writer_died_before_it_was_read_is_refused_and_after_it_is_kept():
    handles, processes, inbox = [], [], Inbox()
    for _ in range(2):
        here, there = multiprocessing.Pipe()
        processes.append(multiprocessing.get_context("fork").Process(target=_publish, args=(there,), daemon=True))
        processes[-1].start()
        handles.append(here.recv())
    assert inbox.open(handles[0])[4999] == 7
    for process in processes:
        process.kill()
        process.join()
    assert inbox.open(handles[0])[4999] == 7
    with pytest.raises(AdapterError, match=rf"memory in process {processes[1].pid} cannot be opened"):
        inbox.open(handles[1])


def test_shared_memory_cannot_be_cut_short_and_a_handle_for_more_than_there_is_is_refused():
    box = Outbox("test")
    box.room(5000)
    handle = box.handle()
    for size in (100, 9000):
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{handle.fd}", size)
    with pytest.raises(AdapterError, match=r"has 5000 bytes, expected 5001"):
        Inbox().open(replace(handle, num_bytes=5001))


@pytest.mark.parametrize("num_threads", [1, 4])
def test_working_does_every_job_once_and_hands_the_first_error_on(num_threads):
    done, beside = [], []
    with working(range(100), done.append, num_threads=num_threads):
        beside.append(threading.current_thread())
    assert sorted(done) == list(range(100)) and beside == [threading.main_thread()]

    def fail(job):
        done.append(job)
        raise AdapterError(f"job {job}")

    done.clear()
    with pytest.raises(AdapterError, match="job"), working(range(100), fail, num_threads=num_threads):
        pass
    assert 1 <= len(done) <= num_threads
    with pytest.raises(KeyError, match="own"), working(range(3), done.append, num_threads=num_threads):
        raise KeyError("own")


def test_device_transport_on_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"`rollout.adapter_transport` is cuda_ipc, but `cluster.device` is cpu"):
        load(["recipe=quickstart", "rollout.adapter_transport=cuda_ipc"])
