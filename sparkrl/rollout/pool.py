"""The pool of rollout servers, as the loop sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from sparkrl.config.schema import Config, Device
from sparkrl.errors import AdapterError, DataError, SparkrlError, WorkerError
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.rollout.engine import RolloutServer
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Adapter, Group, Problem

T = TypeVar("T")


class RolloutPool:
    """Servers that all hold the same adapter. Start with `await RolloutPool.start(cfg)`; Ray must be initialized."""

    def __init__(self, cfg: Config, actors: list[Any]) -> None:
        self._cfg = cfg
        self._actors = actors
        self.info: dict[str, Any] = {}
        """Figures of the start: seconds, model bytes, versions, proofs; one entry a replica under `replicas`."""
        self.version: int | None = None
        """Version of the adapter every replica has acknowledged."""

    @classmethod
    async def start(cls, cfg: Config) -> RolloutPool:
        """Bring up `rollout.num_replicas` servers and prove each of them.

        Raises:
            CheckpointError: the checkpoint is unusable; found before any server starts.
            AdapterError: a start-up proof failed.
            WorkerError: a server died, or took longer than `rollout.start_timeout_s`.
        """
        path = str(Path(cfg.model.path).resolve())
        load_config(path)
        CheckpointReader(path)
        spec = ServerSpec.from_config(cfg, path)
        on_gpu = cfg.cluster.device is Device.cuda
        actor_class = ray.remote(RolloutServer).options(
            num_cpus=1,
            num_gpus=spec.tensor_parallel_size * spec.gpu_share if on_gpu else 0,
            max_restarts=0,
            runtime_env={"env_vars": spec.environment()},
        )
        pool = cls(cfg, [actor_class.remote(spec) for _ in range(cfg.rollout.num_replicas)])
        try:
            replicas = await pool._all("start", cfg.rollout.start_timeout_s, lambda actor, _: actor.start.remote())
        except BaseException:
            await pool.stop()
            raise
        pool.info = {
            "rollout/start_s": max(replica["start_s"] for replica in replicas),
            "rollout/model_bytes": replicas[0]["model_bytes"],
            "rollout/vllm": replicas[0]["vllm"],
            "rollout/proofs": replicas[0]["proofs"],
            "rollout/replicas": replicas,
        }
        return pool

    async def load_adapter(self, adapter: Adapter) -> None:
        """Serve this adapter everywhere; returns once every replica has acknowledged its version and checksum.

        Raises:
            AdapterError: names the replica that did not.
            WorkerError: a replica died or did not answer.
        """
        self.version = None
        shared = ray.put(adapter)
        answers = await self._all(
            "load adapter", self._cfg.rollout.request_timeout_s, lambda actor, _: actor.load_adapter.remote(shared)
        )
        for replica, answer in enumerate(answers):
            if tuple(answer) != (adapter.version, adapter.checksum):
                raise AdapterError(
                    f"replica {replica} acknowledged version {answer[0]} with checksum {answer[1]}, expected "
                    f"{adapter.version} with {adapter.checksum}"
                )
        self.version = adapter.version

    async def sample(
        self,
        problems: Sequence[Problem],
        *,
        num_responses: int,
        temperature: float,
        top_p: float,
        max_tokens: int,
        seed: int,
    ) -> tuple[Group, ...]:
        """Responses to each problem, by the newest adapter.

        Args:
            problems: spread over the replicas, a problem's whole group on one.
            num_responses: responses a problem.
            temperature: of the distribution sampled from and of the log-probs returned; 0 is greedy.
            max_tokens: response budget; a response is cut there, or where the context ends, with `LENGTH`.
            seed: same seed, adapter and problems, same tokens and log-probs, bit for bit.
        Returns:
            One group a problem, in the order given.
        Raises:
            DataError: a prompt leaves no room for a response; names the problem.
            AdapterError: no adapter is loaded, or a response came from another version.
            RoutingError: routed experts that cannot be replayed.
            WorkerError: a replica died or did not answer.
        """
        limit = self._cfg.model.max_tokens
        for problem in problems:
            if not 0 < len(problem.prompt_ids) < limit:
                raise DataError(
                    f"problem `{problem.uid}` has a prompt of {len(problem.prompt_ids)} tokens; it must have 1 to "
                    f"{limit - 1} with `model.max_tokens={limit}`",
                    hint="raise `model.max_tokens` or lower `data.max_prompt_tokens`",
                )
        shares = [list(problems[replica :: len(self._actors)]) for replica in range(len(self._actors))]
        busy = [replica for replica, share in enumerate(shares) if share]
        # The actor keeps the limit itself; the margin is for what lies between.
        timeout_s = self._cfg.rollout.request_timeout_s + 30.0
        answers = await self._all(
            "sample",
            timeout_s,
            lambda actor, replica: actor.sample.remote(
                shares[replica],
                num_responses=num_responses,
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                seed=seed,
            ),
            replicas=busy,
        )
        by_replica = dict(zip(busy, answers, strict=True))
        num = len(self._actors)
        groups = tuple(by_replica[position % num][position // num] for position in range(len(problems)))
        for group in groups:
            for response in group.responses:
                if response.policy_version != self.version:
                    raise AdapterError(
                        f"response `{response.uid}` was sampled by version {response.policy_version}, the pool "
                        f"serves {self.version}"
                    )
        return groups

    async def stop(self) -> None:
        """Stop every server and its processes; safe to call twice, and after a server died."""
        actors, self._actors = self._actors, []
        self.version = None
        # An actor that is still inside vLLM's start-up cannot answer; its processes end with it.
        limit_s = 30.0 if self.info else 2.0
        stopping = [_quietly(_bounded(actor.stop.remote(), limit_s)) for actor in actors]
        await asyncio.gather(*stopping)
        for actor in actors:
            ray.kill(actor, no_restart=True)

    async def _all(self, what: str, timeout_s: float, call: Any, *, replicas: Sequence[int] | None = None) -> list[Any]:
        """Call all (or some) replicas side by side; the first failure is raised with the replica's number."""
        chosen = range(len(self._actors)) if replicas is None else replicas
        return list(
            await asyncio.gather(
                *(_named(call(self._actors[replica], replica), replica, what, timeout_s) for replica in chosen)
            )
        )


async def _named(reference: Any, replica: int, what: str, timeout_s: float) -> Any:
    """Wait for a replica's answer; errors of Ray become ours."""
    try:
        return await _bounded(reference, timeout_s)
    except TimeoutError:
        raise WorkerError(f"rollout replica {replica} did not answer `{what}` within {timeout_s:.0f} s") from None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SparkrlError):
            raise type(cause)(f"rollout replica {replica}: {cause.message}", hint=cause.hint) from None
        raise WorkerError(f"rollout replica {replica} failed at `{what}`: {type(cause).__name__}: {cause}") from None
    except RayActorError as error:
        raise WorkerError(
            f"rollout replica {replica} died at `{what}`: {str(error).strip().splitlines()[-1]}",
            hint="when memory ran out, lower `rollout.kv_cache_gib` or `rollout.max_num_seqs`",
        ) from None


async def _bounded(reference: Any, timeout_s: float) -> T:
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)


async def _quietly(waiting: Awaitable[Any]) -> None:
    """A server that cannot be asked to stop any more has its processes ended by their own watch."""
    try:
        await waiting
    except (RayActorError, RayTaskError, TimeoutError):
        return
