"""One rollout server: a Ray actor around vLLM's AsyncLLM.

Sampling is reproducible. Every response has a seed of its own, derived from the call's seed, the problem and the index,
and all requests of a call are queued while the scheduler is paused, so that the batches vLLM forms depend on nothing
but the call. A cache salt per call keeps answers of earlier calls and adapters out of the prefix cache.
"""

from __future__ import annotations

import asyncio
import os
import pkgutil
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import ray
import torch
import xxhash

from sparkrl.errors import AdapterError, SparkrlError, WorkerError
from sparkrl.lora.shared_memory import Outbox
from sparkrl.lora.wire import to_plain
from sparkrl.models.registry import load_config
from sparkrl.models.routes import validate_routes
from sparkrl.rollout import proofs
from sparkrl.rollout.last_words import last_words
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Adapter, AdapterPart, FinishReason, Group, Problem, Response, Sampling, SharedAdapter

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class RolloutServer:
    """Serves one model with the newest adapter. Methods are coroutines of a Ray actor.

    A call for responses is answered by the adapter that was the newest when it came in. With one slot (`rollout.swap`
    is `drain`) calls are answered one at a time, and a new adapter waits for those that came before it; with two
    (`in_flight`) calls overlap, and it only waits for those of the adapter before the one it replaces.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.version: int | None = None
        self._engine: Any = None
        self._tokenizer: Any = None
        served_family, text_config = load_config(spec.model_path)
        self._routing = served_family.routing(text_config)
        self._lora_request: Any = None
        self._num_loads = 0
        self._num_calls = 0
        self._slot = 0
        self._num_users = [0] * spec.num_adapter_slots
        self._freed = asyncio.Condition()
        self._admission = asyncio.Lock()
        self._turn: Any = asyncio.Lock() if spec.num_adapter_slots == 1 else nullcontext()
        self._outboxes: list[Outbox] = []

    async def start(self) -> dict[str, Any]:
        """Bring the engine up and prove that it does what a rollout needs.

        Returns:
            Figures: seconds to start, bytes of the model, process ids, the worker's report, the proofs.
        Raises:
            AdapterError: the plugin is not live in the worker, or an adapter has no effect (or too much).
            WorkerError: vLLM did not come up; carries its own last message.
        """
        began = time.perf_counter()
        try:
            self._make_engine()
            reports = await self._rpc("sparkrl_report")
            await self._rpc("sparkrl_watch", os.getpid())
        except SparkrlError:
            raise
        except Exception as error:  # border: whatever vLLM raises, the cause is in its own process's output
            raise WorkerError(f"the rollout server did not start: {last_words(error)}") from None
        proofs.check_reports(reports, self.spec)
        found = await proofs.check_adapters(self)
        return {
            "start_s": time.perf_counter() - began,
            "model_bytes": sum(report["model_bytes"] for report in reports),
            "adapter_slot_bytes": sum(report["adapter_slot_bytes"] for report in reports),
            "vllm": reports[0]["vllm"],
            "pid": os.getpid(),
            "engine_pids": [child.pid for child in psutil.Process().children(recursive=True)],
            "threads": reports[0]["threads"],
            "proofs": found,
        }

    def _make_engine(self) -> None:
        from vllm import AsyncEngineArgs, ModelRegistry
        from vllm.v1.engine.async_llm import AsyncLLM

        from sparkrl.rollout import plugin
        from sparkrl.rollout.plugin.hf_config import CPU_CLASSES, CUDA_CLASSES, adapt

        plugin.register()
        if plugin.report()["error"]:
            raise AdapterError(str(plugin.report()["error"]))
        # vLLM would start a Python process of its own to look at a class that is registered by name only.
        settings = self.spec.engine_arguments()
        on_cpu, family = self.spec.device == "cpu", self.spec.family
        architecture, served_class = (CPU_CLASSES if on_cpu else CUDA_CLASSES)[family]
        ModelRegistry.register_model(architecture, pkgutil.resolve_name(served_class))
        if on_cpu:
            # The adapter's product is computed in the adapter's type, whatever the model's.
            lora_dtype = getattr(torch, self.spec.adapter_dtype)
            settings |= {"lora_dtype": lora_dtype, "load_format": "sparkrl", "hf_overrides": adapt}
        elif family == "muse_spark":
            from sparkrl.rollout.plugin.cuda import form

            settings |= form.load_arguments(self.spec.model_path, self.spec.tensor_parallel_size)
        else:
            from sparkrl.rollout.plugin.cuda.qwen3 import LOAD_ARGUMENTS

            settings |= LOAD_ARGUMENTS
        arguments = AsyncEngineArgs(**settings)
        self._engine = AsyncLLM.from_engine_args(arguments)
        self._tokenizer = self._engine.renderer.tokenizer

    async def load_adapter(self, adapter: Adapter | SharedAdapter) -> tuple[int, str]:
        """Serve this adapter from now on; returns when it does.

        Returns:
            Version and checksum; vLLM's workers have found every byte as it was sent.
        Raises:
            AdapterError: damaged bytes, or a tensor that matches no module.
        """
        async with self._admission:
            return await self._load(adapter)

    async def _load(self, adapter: Adapter | SharedAdapter) -> tuple[int, str]:
        from vllm.lora.request import LoRARequest

        slot = (self._slot + 1) % len(self._num_users)
        async with self._freed:
            await self._freed.wait_for(lambda: not self._num_users[slot])
        # A new id, name and path for every load, also of a version seen before: vLLM's prefix cache knows adapters by
        # name and path only.
        self._num_loads += 1
        self._lora_request, self.version = None, None
        parts = to_plain(await self._in_memory(adapter))
        scaled = isinstance(adapter, SharedAdapter)
        answers = await self._rpc("sparkrl_load_adapter", slot, self._num_loads, parts, dict(adapter.config), scaled)
        for rank, (status, value) in enumerate(answers):
            if status != "loaded":
                raise AdapterError(f"rank {rank} of the server refused adapter version {adapter.version}: {value}")
            if value != self._num_loads:
                raise AdapterError(f"rank {rank} of the server acknowledged another adapter: {value}")
        name = f"policy-{adapter.version}-{self._num_loads}"
        self._lora_request = LoRARequest(name, self._num_loads, f"sparkrl://{name}")
        self._slot, self.version = slot, adapter.version
        return adapter.version, adapter.checksum

    async def _in_memory(self, adapter: Adapter | SharedAdapter) -> list[AdapterPart]:
        """The adapter's parts as vLLM's workers can read them: bytes that came with the call are laid out for them."""
        if isinstance(adapter, SharedAdapter):
            parts = list(adapter.parts)
        else:
            size = adapter.buffer.nbytes
            whole = AdapterPart(
                manifest=adapter.manifest,
                num_bytes=size,
                block_bytes=size,
                checksums=(int(adapter.checksum, 16),),
                memory=None,
                buffer=adapter.buffer,
            )
            parts = [whole]
        while len(self._outboxes) < len(parts):
            self._outboxes.append(Outbox(f"server-{len(self._outboxes)}"))
        found = []
        for part, outbox in zip(parts, self._outboxes, strict=False):
            if part.buffer is not None:
                buffer = await part.buffer if isinstance(part.buffer, ray.ObjectRef) else part.buffer
                np.copyto(outbox.room(part.num_bytes), buffer)
                part = replace(part, memory=outbox.handle(), buffer=None)
            found.append(part)
        return found

    async def try_on_device(self, parts: list[AdapterPart]) -> str | None:
        """Whether vLLM's workers can read what trainer ranks left on their GPUs; returns why not."""
        answers = await self._rpc("sparkrl_try_adapter", to_plain(parts))
        return next((why for status, why in answers if status != "readable"), None)

    async def unload_adapter(self) -> None:
        """Serve the base model again."""
        self._lora_request, self.version = None, None

    async def sample(self, problems: list[Problem], sampling: Sampling) -> list[Group]:
        """Responses to each problem under the loaded adapter.

        Raises:
            AdapterError: no adapter is loaded.
            RoutingError: a response's routes cannot be replayed.
            WorkerError: vLLM died, or did not answer within the spec's limit.
        """
        async with self._admission:
            if self.version is None:
                raise AdapterError(
                    "the server has no adapter, and would answer with the base model",
                    hint="load an adapter before sampling; a fresh one (B = 0) changes nothing",
                )
            slot, request, version = self._slot, self._lora_request, self.version
            self._num_users[slot] += 1
        try:
            async with self._turn:
                return await self._answer(problems, sampling, request=request, version=version)
        finally:
            self._num_users[slot] -= 1
            async with self._freed:
                self._freed.notify_all()

    async def _sample(self, problems: list[Problem], sampling: Sampling) -> list[Group]:
        """Responses under the newest adapter, or by the base model without one; nothing waits for anything."""
        version = -1 if self.version is None else self.version
        return await self._answer(problems, sampling, request=self._lora_request, version=version)

    async def _answer(self, problems: list[Problem], sampling: Sampling, *, request: Any, version: int) -> list[Group]:
        num = sampling.num_responses
        try:
            outputs = await asyncio.wait_for(
                self._generate(problems, sampling, request), timeout=self.spec.request_timeout_s
            )
        except TimeoutError:
            raise WorkerError(
                f"the rollout server gave no complete answer to {len(problems) * num} requests within "
                f"{self.spec.request_timeout_s:.0f} s",
                hint="raise `rollout.request_timeout_s` or lower `rollout.max_response_tokens`",
            ) from None
        except SparkrlError:
            raise
        except Exception as error:  # border: a dead engine raises vLLM's own types
            raise WorkerError(f"the rollout server failed while sampling: {last_words(error)}") from None
        groups = []
        for position, problem in enumerate(problems):
            mine = outputs[position * num : (position + 1) * num]
            responses = tuple(self._response(problem, index, output, version) for index, output in enumerate(mine))
            groups.append(Group(problem=problem, responses=responses))
        return groups

    async def _generate(self, problems: list[Problem], sampling: Sampling, request: Any) -> list[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._num_calls += 1
        salt = f"{self._num_calls}"
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        collectors = []
        try:
            for problem in problems:
                prompt = {"prompt_token_ids": problem.prompt_ids.tolist(), "cache_salt": salt}
                room = self.spec.max_tokens - len(problem.prompt_ids)
                for index in range(sampling.num_responses):
                    parameters = SamplingParams(
                        temperature=sampling.temperature,
                        top_p=sampling.top_p,
                        max_tokens=min(sampling.max_tokens, room),
                        seed=response_seed(sampling.seed, problem.uid, index),
                        logprobs=0,
                        flat_logprobs=True,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                    collectors.append(
                        await self._engine.add_request(
                            f"{salt}/{problem.uid}/{index}", prompt, parameters, lora_request=request
                        )
                    )
        finally:
            # Travels over the same socket as the requests, so the engine sees it after the last of them.
            await self._engine.resume_generation()
        try:
            return [await collector.get() for collector in collectors]
        except asyncio.CancelledError:
            for collector in collectors:
                await self._engine.abort(collector.request_id, internal=True)
            raise

    def _response(self, problem: Problem, index: int, output: Any, version: int) -> Response:
        completion = output.outputs[0]
        uid = f"{problem.uid}/{index}"
        tokens = np.asarray(completion.token_ids, dtype=np.int32)
        log_probs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
        if len(log_probs) != len(tokens):
            raise WorkerError(f"response `{uid}` has {len(tokens)} tokens but {len(log_probs)} log-probs")
        routes = completion.routed_experts
        if not self._routing.layers:
            routes = np.zeros((len(problem.prompt_ids) + len(tokens) - 1, 0, 0), dtype=np.uint8)
        elif isinstance(routes, np.ndarray) and routes.ndim == 3:
            # vLLM reserves a row for every layer; dense ones never write theirs.
            routes = np.ascontiguousarray(routes[:, list(self._routing.layers)])
        finish = _FINISH.get(completion.finish_reason, FinishReason.ABORT)
        if finish is not FinishReason.ABORT:
            validate_routes(
                routes,
                num_prompt=len(problem.prompt_ids),
                num_response=len(tokens),
                num_layers=self._routing.num_layers,
                top_k=self._routing.top_k,
                num_experts=self._routing.num_experts,
                uid=uid,
            )
        return Response(
            uid=uid,
            token_ids=tokens,
            log_probs=log_probs,
            routed_experts=routes,
            policy_version=version,
            finish_reason=finish,
            text=self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True),
        )

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        return await self._engine.collective_rpc(method, args=args)

    async def stop(self) -> None:
        """Shut vLLM down and wait until its processes are gone."""
        children = [child for child in psutil.Process().children(recursive=True) if not _is_tracker(child)]
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
        for child in alive:
            child.kill()


def _is_tracker(process: psutil.Process) -> bool:
    """Python's own resource tracker lives as long as this process, and goes with it."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def response_seed(seed: int, uid: str, index: int) -> int:
    """Seed of one response: depends on nothing but the call's seed, the problem and the index in its group."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{uid}/{index}".encode()) >> 1
