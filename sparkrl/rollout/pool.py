"""The pool of rollout servers, as the loop sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sparkrl.config.schema import Config, Device
from sparkrl.errors import AdapterError, DataError, SparkrlError, WorkerError
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.rollout.engine import RolloutServer
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Adapter, AdapterPart, Group, Problem, Sampling, SharedAdapter

T = TypeVar("T")

SERVER_CPUS = 1
"""Processors of a server, by Ray's count."""


class RolloutPool:
    """Servers that all hold the same adapter. Start with `await RolloutPool.start(cfg)`; Ray must be initialized."""

    def __init__(self, cfg: Config, actors: Sequence[Any]) -> None:
        self._cfg = cfg
        self._actors: dict[int, Any] = dict(enumerate(actors))
        self.lost: dict[int, str] = {}
        """Replicas that were taken out, and why."""
        self._warnings: list[str] = []
        self.info: dict[str, Any] = {}
        """Figures of the start: seconds, model bytes, versions, proofs; one entry a replica under `replicas`."""
        self.version: int | None = None
        """Version of the adapter every replica has acknowledged."""

    @classmethod
    async def start(cls, cfg: Config, *, placement: PlacementGroup | None = None) -> RolloutPool:
        """Bring up `rollout.num_replicas` servers and prove each of them.

        Args:
            placement: what Ray has set aside, a bundle for each server; None lets Ray find room as they start.
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
        actor_classes = [
            ray.remote(RolloutServer).options(
                num_cpus=SERVER_CPUS,
                num_gpus=spec.tensor_parallel_size * spec.gpu_share if on_gpu else 0,
                max_restarts=0,
                runtime_env={"env_vars": spec.environment()},
                scheduling_strategy=_strategy(placement, replica),
            )
            for replica in range(cfg.rollout.num_replicas)
        ]
        pool = cls(cfg, [actor_class.remote(spec) for actor_class in actor_classes])
        try:
            replicas = await pool._all("start", cfg.rollout.start_timeout_s, lambda actor, _: actor.start.remote())
        except BaseException:
            await pool.stop()
            raise
        pool.info = {
            "rollout/start_s": max(replica["start_s"] for replica in replicas),
            "rollout/model_bytes": replicas[0]["model_bytes"],
            "rollout/adapter_slot_bytes": replicas[0]["adapter_slot_bytes"],
            "rollout/vllm": replicas[0]["vllm"],
            "rollout/proofs": replicas[0]["proofs"],
            "rollout/replicas": replicas,
        }
        return pool

    async def load_adapter(self, adapter: Adapter | SharedAdapter) -> None:
        """Serve this adapter everywhere; returns once every replica has acknowledged its version and checksum.

        A replica that does not is taken out (see `lost`), and the others go on.

        Raises:
            AdapterError, WorkerError: no replica is left; the first one's error.
        """
        self.version = None
        shared = ray.put(adapter)
        limit_s = self._cfg.rollout.request_timeout_s

        async def load(replica: int, actor: Any) -> SparkrlError | None:
            try:
                answer = tuple(await _named(actor.load_adapter.remote(shared), replica, "load adapter", limit_s))
                if answer != (adapter.version, adapter.checksum):
                    raise AdapterError(
                        f"replica {replica} acknowledged version {answer[0]} with checksum {answer[1]}, expected "
                        f"{adapter.version} with {adapter.checksum}"
                    )
            except SparkrlError as error:
                return error
            return None

        found = await asyncio.gather(*(load(replica, actor) for replica, actor in self._actors.items()))
        errors = {replica: error for replica, error in zip(self._actors, found, strict=True) if error is not None}
        if len(errors) == len(self._actors):
            raise next(iter(errors.values()))
        for replica, error in errors.items():
            self.lost[replica] = error.message
            await _end(self._actors.pop(replica), limit_s=2.0)
            self._warnings.append(
                f"replica {replica} did not take adapter version {adapter.version} and is out: {error.message}; "
                f"{len(self._actors)} of {len(self._actors) + len(self.lost)} go on"
            )
        self.version = adapter.version

    async def try_on_device(self, parts: Sequence[AdapterPart]) -> str | None:
        """Whether every server can read what trainer ranks left on their GPUs; returns why not."""
        limit_s = self._cfg.rollout.request_timeout_s
        answers = await self._all("try memory", limit_s, lambda actor, _: actor.try_on_device.remote(list(parts)))
        return next((why for why in answers if why is not None), None)

    def take_warnings(self) -> list[str]:
        """What happened to replicas since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def metrics(self) -> dict[str, float]:
        """Servers that answer, and servers that were taken out."""
        return {"rollout/replicas": float(len(self._actors)), "rollout/replicas_lost": float(len(self.lost))}

    async def sample(self, problems: Sequence[Problem], sampling: Sampling) -> tuple[Group, ...]:
        """Responses to each problem, by the newest adapter.

        Args:
            problems: spread over the replicas, a problem's whole group on one.
            sampling: the same for all of them.
        Returns:
            One group a problem, in the order given.
        Raises:
            DataError: a prompt leaves no room for a response; names the problem.
            AdapterError: no adapter is loaded, or the responses are not all of one version.
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
        expected, num = self.version, len(self._actors)
        shares = {replica: list(problems[at::num]) for at, replica in enumerate(self._actors)}
        busy = [replica for replica, share in shares.items() if share]
        # The actor keeps the limit itself; the margin is for what lies between.
        timeout_s = self._cfg.rollout.request_timeout_s + 30.0
        answers = await self._all(
            "sample",
            timeout_s,
            lambda actor, replica: actor.sample.remote(shares[replica], sampling),
            replicas=busy,
        )
        groups = tuple(answers[position % num][position // num] for position in range(len(problems)))
        # a call that waited for an adapter in the middle of being loaded is answered by that one
        for response in (response for group in groups for response in group.responses):
            expected = response.policy_version if expected is None else expected
            if response.policy_version != expected:
                raise AdapterError(
                    f"response `{response.uid}` was sampled by version {response.policy_version}, expected {expected}"
                )
        return groups

    async def stop(self) -> None:
        """Stop every server and its processes; safe to call twice, and after a server died."""
        actors, self._actors = list(self._actors.values()), {}
        self.version = None
        # An actor that is still inside vLLM's start-up cannot answer; its processes end with it.
        limit_s = 30.0 if self.info else 2.0
        await asyncio.gather(*(_end(actor, limit_s=limit_s) for actor in actors))

    async def _all(self, what: str, timeout_s: float, call: Any, *, replicas: Sequence[int] | None = None) -> list[Any]:
        """Call all (or some) replicas side by side; the first failure is raised with the replica's number."""
        chosen = list(self._actors) if replicas is None else replicas
        return list(
            await asyncio.gather(
                *(_named(call(self._actors[replica], replica), replica, what, timeout_s) for replica in chosen)
            )
        )


def _strategy(placement: PlacementGroup | None, replica: int) -> Any:
    if placement is None:
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(placement_group=placement, placement_group_bundle_index=replica)


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


async def _end(actor: Any, *, limit_s: float) -> None:
    """A server that cannot be asked to stop any more has its processes ended by their own watch."""
    with contextlib.suppress(RayActorError, RayTaskError, TimeoutError):
        await _bounded(actor.stop.remote(), limit_s)
    ray.kill(actor, no_restart=True)
