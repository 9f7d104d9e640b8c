"""The quickstart's server for measurements: the one that training runs use, with its parts callable one by one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import xxhash

from sparkrl.config.load import load
from sparkrl.config.schema import Config
from sparkrl.data import load_problems, load_tokenizer
from sparkrl.lora.zero import zero_adapter
from sparkrl.rollout.engine import RolloutServer
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Adapter, Problem, Sampling


class MeasuredServer(RolloutServer):
    """Starts without the start-up proofs, which a server without the LoRA patch would not pass."""

    async def start(self) -> dict[str, Any]:
        self._make_engine()
        return (await self._rpc("sparkrl_report"))[0]

    async def worker_swap_s(self) -> float:
        """Seconds that the last adapter took inside vLLM's worker."""
        return (await self._rpc("sparkrl_report"))[0]["swap_s"]

    async def swap_from_disk(self, folder: str) -> float:
        """Seconds that vLLM itself takes to load and activate the PEFT adapter in `folder`."""
        from vllm.lora.request import LoRARequest

        self._num_loads += 1
        request = LoRARequest(f"disk-{self._num_loads}", self._num_loads, folder)
        began = time.perf_counter()
        added = await self._engine.add_lora(request)
        seconds = time.perf_counter() - began
        if not added:
            raise RuntimeError("vLLM did not load the adapter from disk")
        return seconds

    async def timed_sample(self, problems: list[Problem], sampling: Sampling, *, adapter: bool) -> tuple[int, float]:
        """Tokens sampled and the seconds it took; without `adapter` the base model answers on the same server."""
        kept = self._lora_request
        if not adapter:
            self._lora_request = None
        try:
            began = time.perf_counter()
            groups = await self._sample(problems, sampling)
            seconds = time.perf_counter() - began
        finally:
            self._lora_request = kept
        return sum(len(response.token_ids) for group in groups for response in group.responses), seconds


class StockPunicaSpec(ServerSpec):
    """A server that keeps vLLM's own LoRA of linear layers on CPU."""

    def engine_arguments(self) -> dict[str, Any]:
        extension = "benchmarks.stock_punica.StockPunicaWorker"
        return super().engine_arguments() | {"worker_extension_cls": extension}


def config(*overrides: str) -> Config:
    """The quickstart's configuration."""
    return load(["recipe=quickstart", *overrides])


def problems(cfg: Config, num: int) -> list[Problem]:
    """The first training problems."""
    found = load_problems(cfg.data.path, load_tokenizer(cfg.model.path), max_prompt_tokens=cfg.data.max_prompt_tokens)
    return list(found.problems[:num])


def random_adapter(cfg: Config) -> Adapter:
    """The quickstart's adapter with small random numbers in every factor: a fresh one has only zeros in B."""
    adapter = zero_adapter(cfg.model.path, cfg.lora)
    values = np.random.default_rng(0).standard_normal(adapter.buffer.size // 4, dtype=np.float32) * np.float32(0.02)
    buffer = values.view(np.uint8)
    return dataclasses.replace(adapter, buffer=buffer, checksum=xxhash.xxh3_64_hexdigest(buffer.data))


@contextmanager
def measured_server(cfg: Config, *, spec_class: type[ServerSpec] = ServerSpec) -> Iterator[Any]:
    """A running server as a Ray actor; the cluster must be up."""
    spec = spec_class.from_config(cfg, cfg.model.path)
    options = {"num_cpus": 1, "max_restarts": 0, "runtime_env": {"env_vars": spec.environment()}}
    actor: Any = ray.remote(MeasuredServer).options(**options).remote(spec)
    try:
        ray.get(actor.start.remote())
        yield actor
    finally:
        ray.get(actor.stop.remote())
        ray.kill(actor)
