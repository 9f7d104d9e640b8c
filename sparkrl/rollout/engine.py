"""One rollout server: a Ray actor around vLLM's AsyncLLM.

Sampling is reproducible. Every response has a seed of its own, derived from the call's seed, the problem and the index,
and all requests of a call are queued while the scheduler is paused, so that the batches vLLM forms depend on nothing
but the call. A cache salt per call keeps answers of earlier calls and adapters out of the prefix cache.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np
import psutil
import torch
import xxhash

from sparkrl.errors import AdapterError, SparkrlError, WorkerError
from sparkrl.models.routes import validate_routes
from sparkrl.rollout import proofs
from sparkrl.rollout.last_words import last_words
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Adapter, FinishReason, Group, Problem, Response

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class RolloutServer:
    """Serves one model with the newest adapter. Methods are coroutines of a Ray actor; calls are made one at a time."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.version: int | None = None
        self._engine: Any = None
        self._tokenizer: Any = None
        self._config: Any = None
        self._layers: list[int] = []
        self._lora_request: Any = None
        self._num_loads = 0
        self._num_calls = 0
        self._lock = asyncio.Lock()

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
        from sparkrl.rollout.plugin.hf_config import ARCHITECTURE, adapt, sparse_layers

        plugin.register()
        if plugin.report()["error"]:
            raise AdapterError(str(plugin.report()["error"]))
        # vLLM would start a Python process of its own to look at a class that is registered by name only.
        settings = self.spec.engine_arguments()
        if self.spec.device == "cpu":
            from sparkrl.rollout.plugin.model import MuseSparkForCausalLM

            ModelRegistry.register_model(ARCHITECTURE, MuseSparkForCausalLM)
            # The trainer's adapter is float32 in either compute type, and so is its product here.
            settings |= {"lora_dtype": torch.float32, "load_format": "sparkrl", "hf_overrides": adapt}
        else:
            from sparkrl.rollout.plugin.cuda import form
            from sparkrl.rollout.plugin.cuda.model import MuseSparkTextForCausalLM

            ModelRegistry.register_model(ARCHITECTURE, MuseSparkTextForCausalLM)
            settings |= form.load_arguments(self.spec.model_path, self.spec.tensor_parallel_size)
        arguments = AsyncEngineArgs(**settings)
        self._engine = AsyncLLM.from_engine_args(arguments)
        self._config = self._engine.model_config.hf_config
        self._layers = sparse_layers(self._config)
        self._tokenizer = self._engine.renderer.tokenizer

    @property
    def config(self) -> Any:
        """The model's text config."""
        return self._config

    async def load_adapter(self, adapter: Adapter) -> tuple[int, str]:
        """Serve this adapter from now on; waits until responses in flight are complete.

        Returns:
            Version and checksum, the latter as computed from the bytes that reached vLLM's worker.
        Raises:
            AdapterError: damaged bytes, or a tensor that matches no module.
        """
        async with self._lock:
            return await self._load(adapter)

    async def _load(self, adapter: Adapter) -> tuple[int, str]:
        from vllm.lora.request import LoRARequest

        # A new id, name and path for every load, also of a version seen before: vLLM's prefix cache knows adapters by
        # name and path only.
        self._num_loads += 1
        self._lora_request, self.version = None, None
        manifest = [(spec.name, list(spec.shape), spec.dtype, spec.offset) for spec in adapter.manifest]
        answers = await self._rpc(
            "sparkrl_load_adapter",
            self._num_loads,
            adapter.buffer.tobytes(),
            manifest,
            dict(adapter.config),
            adapter.checksum,
        )
        for rank, (status, *values) in enumerate(answers):
            if status != "loaded":
                raise AdapterError(f"rank {rank} of the server refused adapter version {adapter.version}: {values[0]}")
            if values != [self._num_loads, adapter.checksum]:
                raise AdapterError(f"rank {rank} of the server acknowledged another adapter: {values}")
        name = f"policy-{adapter.version}-{self._num_loads}"
        self._lora_request = LoRARequest(name, self._num_loads, f"sparkrl://{name}")
        self.version = adapter.version
        return adapter.version, answers[0][2]

    async def unload_adapter(self) -> None:
        """Serve the base model again."""
        self._lora_request, self.version = None, None

    async def sample(
        self,
        problems: list[Problem],
        *,
        num_responses: int,
        temperature: float,
        top_p: float,
        max_tokens: int,
        seed: int,
    ) -> list[Group]:
        """Responses to each problem under the loaded adapter.

        Raises:
            AdapterError: no adapter is loaded.
            RoutingError: a response's routes cannot be replayed.
            WorkerError: vLLM died, or did not answer within the spec's limit.
        """
        async with self._lock:
            if self.version is None:
                raise AdapterError(
                    "the server has no adapter, and would answer with the base model",
                    hint="load an adapter before sampling; a fresh one (B = 0) changes nothing",
                )
            return await self._sample(problems, num_responses, temperature, top_p, max_tokens, seed)

    async def _sample(
        self,
        problems: list[Problem],
        num_responses: int,
        temperature: float,
        top_p: float,
        max_tokens: int,
        seed: int,
    ) -> list[Group]:
        try:
            outputs = await asyncio.wait_for(
                self._generate(problems, num_responses, temperature, top_p, max_tokens, seed),
                timeout=self.spec.request_timeout_s,
            )
        except TimeoutError:
            raise WorkerError(
                f"the rollout server gave no complete answer to {len(problems) * num_responses} requests within "
                f"{self.spec.request_timeout_s:.0f} s",
                hint="raise `rollout.request_timeout_s` or lower `rollout.max_response_tokens`",
            ) from None
        except SparkrlError:
            raise
        except Exception as error:  # border: a dead engine raises vLLM's own types
            raise WorkerError(f"the rollout server failed while sampling: {last_words(error)}") from None
        groups = []
        for position, problem in enumerate(problems):
            mine = outputs[position * num_responses : (position + 1) * num_responses]
            responses = tuple(self._response(problem, index, output) for index, output in enumerate(mine))
            groups.append(Group(problem=problem, responses=responses))
        return groups

    async def _generate(
        self,
        problems: list[Problem],
        num_responses: int,
        temperature: float,
        top_p: float,
        max_tokens: int,
        seed: int,
    ) -> list[Any]:
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
                for index in range(num_responses):
                    parameters = SamplingParams(
                        temperature=temperature,
                        top_p=top_p,
                        max_tokens=min(max_tokens, room),
                        seed=response_seed(seed, problem.uid, index),
                        logprobs=0,
                        flat_logprobs=True,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                    collectors.append(
                        await self._engine.add_request(
                            f"{salt}/{problem.uid}/{index}", prompt, parameters, lora_request=self._lora_request
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

    def _response(self, problem: Problem, index: int, output: Any) -> Response:
        completion = output.outputs[0]
        uid = f"{problem.uid}/{index}"
        tokens = np.asarray(completion.token_ids, dtype=np.int32)
        log_probs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
        if len(log_probs) != len(tokens):
            raise WorkerError(f"response `{uid}` has {len(tokens)} tokens but {len(log_probs)} log-probs")
        routes = completion.routed_experts
        if isinstance(routes, np.ndarray) and routes.ndim == 3:
            # vLLM reserves a row for every layer; dense ones never write theirs.
            routes = np.ascontiguousarray(routes[:, self._layers])
        finish = _FINISH.get(completion.finish_reason, FinishReason.ABORT)
        if finish is not FinishReason.ABORT:
            validate_routes(
                routes,
                num_prompt=len(problem.prompt_ids),
                num_response=len(tokens),
                num_layers=len(self._layers),
                top_k=self._config.num_experts_per_tok,
                num_experts=self._config.num_local_experts,
                uid=uid,
            )
        return Response(
            uid=uid,
            token_ids=tokens,
            log_probs=log_probs,
            routed_experts=routes,
            policy_version=-1 if self.version is None else self.version,
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
