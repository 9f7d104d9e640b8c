"""One rank of the trainer, as a Ray actor."""

from __future__ import annotations

import datetime
import os
import resource
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkrl.config.schema import Config, Device, Transport
from sparkrl.errors import AdapterError
from sparkrl.trainer.batch import MicroBatch, Row, Totals, collate
from sparkrl.trainer.handover import memory_errors
from sparkrl.types import AdapterPart

if TYPE_CHECKING:
    from torch import Tensor

    from sparkrl.lora.device_memory import DeviceOutbox
    from sparkrl.lora.shared_memory import Outbox
    from sparkrl.lora.wire import PartWriter


@dataclass(slots=True, kw_only=True)
class RankResult:
    """What a rank reports about its rows; fillers are left out."""

    log_probs: dict[int, np.ndarray]
    """Row index to float32 [T], nats."""
    entropy: dict[int, np.ndarray]
    """Row index to float32 [T], nats a token; empty without an update."""
    routes_same: int
    routes_seen: int
    """(token, layer) pairs that chose as the server did, and pairs compared."""
    peak_mem_gib: float
    figures: dict[str, float]
    """Loss, gradient norm, learning rate and times of an update."""


class TrainerWorker:
    """Holds one rank's engine. Heavy imports wait until the platform is chosen.

    Args:
        rank, num_ranks: place in the group.
        cfg: the run's configuration.
    """

    def __init__(self, rank: int, num_ranks: int, cfg: Config) -> None:
        self.rank, self.num_ranks, self.cfg = rank, num_ranks, cfg
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK="0")
        from sparkrl.trainer import platform

        platform.install(cfg.cluster.device.value)
        import torch

        torch.set_num_threads(cfg.trainer.num_threads)
        self.device = "cpu" if cfg.cluster.device is Device.cpu else "cuda:0"
        self._store: Any = None
        self._writer: PartWriter | None = None
        self._outbox: Outbox
        self._device_outbox: DeviceOutbox

    def open_store(self) -> tuple[str, int]:
        """On rank 0: open the rendezvous on a port the system chooses.

        Returns:
            Host and port that the other ranks connect to.
        """
        import ray
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        timeout = datetime.timedelta(seconds=self.cfg.trainer.start_timeout_s)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return host, self._store.port

    def start(self, host: str, port: int, path: str, seed: int) -> dict[str, Any]:
        """Join the group, build the engine and read this rank's rows.

        Returns:
            Facts about this rank.
        """
        import torch
        import torch.distributed as dist

        started = time.perf_counter()
        cpu = self.cfg.cluster.device is Device.cpu
        if not cpu:
            torch.cuda.set_device(0)
        limits = self.cfg.trainer
        if self._store is None:
            timeout = datetime.timedelta(seconds=limits.start_timeout_s)
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo" if cpu else "nccl",
            store=self._store,
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=datetime.timedelta(seconds=max(limits.start_timeout_s, limits.step_timeout_s)),
        )
        from sparkrl.lora.peft_format import adapter_config
        from sparkrl.trainer.engine import AdapterEngine

        self.engine = AdapterEngine(self.cfg, path=path, seed=seed)
        self.engine.initialize()
        self.num_updates = 0
        self.adapter_config = adapter_config(
            self.cfg.lora, self.engine.targets, self.engine.family, base_model=self.cfg.model.path
        )
        return {
            "base_bytes_read": self.engine.base_bytes_read,
            "trainable_parameters": sum(p.numel() for p in self.engine.trainable().values()),
            "routing_layers": self.engine.replay.num_layers,
            "adapter_config": self.adapter_config,
            "compiles": self.engine.compiles,
            "start_s": time.perf_counter() - started,
            "pid": os.getpid(),
        }

    def score(self, plan: list[list[Row]], *, temperature: float, pin: bool, adapter: bool = True) -> RankResult:
        """Log-probs of the rows' responses; `pin` replays their routes."""
        log_probs: dict[int, np.ndarray] = {}
        batches = (collate(rows, self.device) for rows in plan)
        for batch, log_probs_BM in self.engine.score(batches, temperature=temperature, pin=pin, adapter=adapter):
            log_probs |= _by_row(batch, log_probs_BM)
        return self._result(log_probs, {}, {})

    def update(self, plan: list[list[Row]], totals: Totals, *, temperature: float, pin: bool) -> RankResult:
        """One optimizer step over the rows; log-probs and entropies are those before it."""
        if self.cfg.lora.dropout:
            import torch

            # a resumed run draws what an uninterrupted one does
            torch.manual_seed((self.engine.seed + self.num_updates) * self.num_ranks + self.rank)
        batches = [collate(rows, self.device) for rows in plan]
        outputs, figures = self.engine.update(batches, totals, temperature=temperature, pin=pin)
        log_probs: dict[int, np.ndarray] = {}
        entropy: dict[int, np.ndarray] = {}
        for batch, (log_probs_BM, entropy_BM) in zip(batches, outputs, strict=True):
            log_probs |= _by_row(batch, log_probs_BM)
            entropy |= _by_row(batch, entropy_BM)
        self.num_updates += int(np.isfinite(figures["grad_norm"]))
        return self._result(log_probs, entropy, figures)

    def publish(self, transport: Transport, *, in_use: Transport | None = None) -> AdapterPart | AdapterError:
        """This rank's part of the adapter, for servers on this machine, or through Ray's object store.

        The memory is used again by the next call: every reader must be done with it by then.

        Args:
            in_use: the way of the version that servers have, None without one. Memory of any other way is given back.
        Returns:
            The part, or why there is not enough memory for it, or it cannot be shared: the other ranks are fine then,
            and all may try another way.
        """
        try:
            with memory_errors(transport):
                return self._publish(transport, in_use)
        except AdapterError as error:
            return error

    def _publish(self, transport: Transport, in_use: Transport | None) -> AdapterPart:
        import torch

        from sparkrl.lora.device_memory import DeviceOutbox
        from sparkrl.lora.shared_memory import Outbox
        from sparkrl.lora.wire import PartWriter
        from sparkrl.trainer.loading import local_rows

        if self._writer is None:
            parameters = self.engine.trainable()
            tensors = {name: (*local_rows(value), value.shape[0]) for name, value in parameters.items()}
            self._writer = PartWriter(tensors, self.adapter_config, self.cfg.rollout.adapter_dtype.value)
            self._outbox = Outbox(f"rank-{self.rank}", pinned=self.device != "cpu")
            self._device_outbox = DeviceOutbox(torch.device(self.device))
        if Transport.cuda_ipc not in (transport, in_use):
            self._device_outbox.close()  # not earlier: to free it while servers map it is undefined
        if Transport.shared_memory not in (transport, in_use):
            self._outbox.close()
        if transport is Transport.cuda_ipc:
            room = self._device_outbox.room(self._writer.num_bytes)
            return self._writer.write_on_device(room, memory=self._device_outbox.handle())
        if transport is Transport.object_store:
            import ray

            buffer = np.zeros(self._writer.num_bytes, dtype=np.uint8)
            part = self._writer.write(buffer, memory=None)
            return replace(part, buffer=ray.put(buffer))
        target = self._outbox.room(self._writer.num_bytes)
        return self._writer.write(target, memory=self._outbox.handle())

    def save(self, folder: str, counters: dict[str, int]) -> None:
        """Write adapter and optimizer state; rank 0 writes."""
        from sparkrl.trainer import checkpoint

        counters = counters | {"num_updates": self.num_updates}
        checkpoint.save(self.engine, folder, adapter_config=self.adapter_config, counters=counters)

    def load(self, folder: str) -> dict[str, int]:
        """Take over a saved state and return the group's counters."""
        from sparkrl.trainer import checkpoint

        counters = checkpoint.load(self.engine, folder)
        self.num_updates = counters["num_updates"]
        return counters

    def stop(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _result(
        self, log_probs: dict[int, np.ndarray], entropy: dict[int, np.ndarray], figures: dict[str, float]
    ) -> RankResult:
        same, seen = self.engine.replay.take_agreement()
        return RankResult(
            log_probs=log_probs,
            entropy=entropy,
            routes_same=same,
            routes_seen=seen,
            peak_mem_gib=self._peak_mem_gib(),
            figures=figures,
        )

    def _peak_mem_gib(self) -> float:
        import torch

        if self.cfg.cluster.device is Device.cpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # the kernel counts in KiB
        return torch.cuda.max_memory_allocated() / 2**30


def _by_row(batch: MicroBatch, values_BM: Tensor) -> dict[int, np.ndarray]:
    values = values_BM.float().cpu().numpy()
    return {
        row.index: value[:num].copy()
        for row, value, num in zip(batch.rows, values, batch.num_responses, strict=True)
        if row.counted
    }
