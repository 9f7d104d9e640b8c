"""The driver's side of the trainer: starts the ranks, plans each step, and reports."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from sparkrl.config.schema import COLOCATED_SHARE, Config, Device, OldLogProbs, Transport
from sparkrl.errors import AdapterError, DataError, SparkrlError, WorkerError
from sparkrl.lora.wire import gather_parts
from sparkrl.models.registry import RoutingShape, load_config
from sparkrl.models.routes import validate_routes
from sparkrl.threads import openmp_environment
from sparkrl.trainer.batch import Row, Totals, num_fed, plan
from sparkrl.trainer.correction import correction_metrics
from sparkrl.trainer.handover import NEXT
from sparkrl.trainer.metrics import agreement, ratio
from sparkrl.trainer.worker import RankResult, TrainerWorker
from sparkrl.types import AdapterPart, SharedAdapter, TrainBatch, TrainResult, TrainSequence

_COMPILER = ("torch._dynamo", "torch._inductor")
"""Modules whose errors are those of torch.compile."""
_GRACE_S = 3.0
"""After a rank fails, how long to wait for other ranks' errors before deciding which one is the cause."""
_STOP_WAIT_S = 10.0
"""A rank that is asked to end may be in the middle of a step, or compiling."""
_MAX_SKIPPED = 3
"""Updates in a row that may be skipped for a gradient that is not finite."""


class TrainerGroup:
    """All ranks of the trainer. Make one with `start`; it cannot be used after an error of a rank."""

    def __init__(self, cfg: Config, workers: list[Any]) -> None:
        self._cfg = cfg
        self._workers = workers
        self._num_steps = 0
        self._skipped = 0
        self._failure: SparkrlError | None = None
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self.auto_transport = Transport.shared_memory if len(nodes) == 1 else Transport.object_store
        """What `rollout.adapter_transport=auto` means here."""
        self._in_use: Transport | None = None
        """Way of the version that servers have."""
        self._warnings: list[str] = []
        self._routing: RoutingShape
        self.info: dict[str, Any] = {}
        """Facts about the group: ranks, trainable parameters, bytes read, seconds to start, adapter config."""

    @classmethod
    async def start(cls, cfg: Config, *, run_seed: int) -> TrainerGroup:
        """Start one actor a rank, read the base and make the adapter. Ray must be up.

        Args:
            run_seed: seeds the adapter's initial values, the same for any number of ranks.
        Raises:
            CheckpointError, ConfigError: the checkpoint or `lora.targets` are unusable.
            WorkerError: a rank died or the group did not come up in `trainer.start_timeout_s`.
        """
        started = time.perf_counter()
        family, text_config = load_config(cfg.model.path)
        trainer = cfg.trainer
        actor = ray.remote(TrainerWorker).options(
            num_cpus=1,
            num_gpus=_gpus_of_a_rank(cfg),
            max_restarts=0,
            runtime_env={
                "env_vars": {
                    **openmp_environment(trainer.num_threads),
                    "TOKENIZERS_PARALLELISM": "false",
                    "PYTHONWARNINGS": "ignore",
                    "VERL_LOGGING_LEVEL": "WARN",
                }
            },
        )
        ranks = range(trainer.num_workers)
        group = cls(cfg, [actor.remote(rank, trainer.num_workers, cfg) for rank in ranks])
        group._routing = family.routing(text_config)
        limit = trainer.start_timeout_s
        (address,) = await group._call("open_store", [()], limit)
        seed_args = (*address, os.path.abspath(cfg.model.path), run_seed)
        facts = await group._call("start", [seed_args for _ in ranks], limit)
        group.info = {
            "num_workers": trainer.num_workers,
            "trainable_parameters": facts[0]["trainable_parameters"],
            "base_bytes_read": [fact["base_bytes_read"] for fact in facts],
            "pids": [fact["pid"] for fact in facts],
            "adapter_config": facts[0]["adapter_config"],
            "routing_layers": facts[0]["routing_layers"],
            "compiles": facts[0]["compiles"],
            "replay": _replay_state(trainer.replay, group._routing),
            "start_s": time.perf_counter() - started,
        }
        return group

    async def step(self, batch: TrainBatch) -> TrainResult:
        """Train on one batch: log-probs under the rollout's routes, loss, backward, adapter step.

        Raises:
            RoutingError: routes that cannot be replayed; nothing has been trained then.
            DataError: the batch is empty or a sequence is inconsistent; likewise.
            WorkerError: a rank failed, or several updates in a row had a gradient that is not finite.
        """
        started = time.perf_counter()
        sequences, algorithm, trainer = batch.sequences, self._cfg.algorithm, self._cfg.trainer
        self._check(sequences, with_routes=True)
        # log-probs of the whole batch are only known after the one forward pass when that pass covers the whole batch
        metrics: dict[str, float] = {}
        rows = [Row(index=i, sequence=sequence) for i, sequence in enumerate(sequences)]
        before: list[np.ndarray] | None = None
        if trainer.num_mini_batches > 1:
            begun = time.perf_counter()
            before = await self.score(sequences, replay=trainer.replay, temperature=batch.temperature)
            metrics["time/train_old_log_probs_s"] = time.perf_counter() - begun
        if algorithm.kl_coef:
            begun = time.perf_counter()
            results = await self._score(rows, temperature=batch.temperature, pin=trainer.replay, adapter=False)
            base = _merge(results, "log_probs")
            for row in rows:
                row.base_log_probs = base[row.index]
            metrics["time/train_base_log_probs_s"] = time.perf_counter() - begun
        every = trainer.compare_without_replay_every
        if every and self._num_steps % every == 0 and self._routing.layers:
            begun = time.perf_counter()
            free = await self.score(sequences, replay=False, temperature=batch.temperature)
            free_dlogp = agreement(_dlogp(free, sequences), suffix="_no_replay")
            metrics |= {name: free_dlogp[name] for name in ("agree/k3_no_replay", "agree/dlogp_p999_no_replay")}
            metrics["time/train_compare_s"] = time.perf_counter() - begun
        use_rollout = trainer.old_log_probs is OldLogProbs.rollout
        for row in rows:
            old = row.sequence.rollout_log_probs if use_rollout else None if before is None else before[row.index]
            row.old_log_probs = old
            row.trainer_log_probs = None if before is None else before[row.index]

        outcomes = []
        for part in np.array_split(np.arange(len(rows)), min(trainer.num_mini_batches, len(rows))):
            outcomes.append(await self._update([rows[i] for i in part], batch.temperature))
        first_rows, first = rows[: len(_merge(outcomes[0], "log_probs"))], outcomes[0]
        log_probs = {i: value for results in outcomes for i, value in _merge(results, "log_probs").items()}
        current = before if before is not None else [log_probs[row.index] for row in rows]
        dlogp = _dlogp(current, sequences)
        first_log_probs = [log_probs[row.index] for row in first_rows]
        old_log_probs = [
            row.old_log_probs if row.old_log_probs is not None else log_probs[row.index] for row in first_rows
        ]
        entropy = np.concatenate(list(_merge(first, "entropy").values()))
        flat = [result for results in outcomes for result in results]
        seen = sum(result.routes_seen for result in first)
        num_tokens = sum(map(num_fed, sequences))
        wall_s = time.perf_counter() - started
        metrics |= {
            "train/loss": float(np.mean([_mean(results, "loss") for results in outcomes])),
            "train/grad_norm": float(np.mean([results[0].figures["grad_norm"] for results in outcomes])),
            "train/lr": first[0].figures["lr"],
            "train/entropy": float(entropy.mean()),
            "train/skipped_updates": float(sum(not _finite(results) for results in outcomes)),
            **ratio(first_log_probs, old_log_probs, [row.sequence for row in first_rows], algorithm),
            **agreement(dlogp),
            **correction_metrics(current, sequences, algorithm.correction),
            "agree/route_agreement": sum(result.routes_same for result in first) / seen if seen else float("nan"),
            "perf/train_tokens": float(num_tokens),
            "perf/train_tokens_per_s": num_tokens / wall_s,
            "perf/train_peak_mem_gib": max(result.peak_mem_gib for result in flat),
            "time/train_s": wall_s,
        }
        for name in ("forward", "backward", "optimizer"):
            metrics[f"time/train_{name}_s"] = sum(
                max(result.figures[f"{name}_s"] for result in results) for results in outcomes
            )
        self._num_steps += 1
        self._count_skipped(outcomes)
        return TrainResult(metrics=metrics, dlogp=dlogp.astype(np.float32))

    async def score(self, sequences: Sequence[TrainSequence], *, replay: bool, temperature: float) -> list[np.ndarray]:
        """Log-probs of each sequence's response under the current adapter, float32 [T] each, nats.

        Args:
            replay: route as the server did; False routes live and needs no routes.
        """
        self._check(sequences, with_routes=replay)
        rows = [Row(index=i, sequence=sequence) for i, sequence in enumerate(sequences)]
        merged = _merge(await self._score(rows, temperature=temperature, pin=replay), "log_probs")
        return [merged[i] for i in range(len(sequences))]

    async def publish(self, version: int) -> SharedAdapter:
        """The current adapter for the servers, each rank's part from where it lies; no rank ever holds all of it.

        Valid until the next call: the ranks use the memory again. Where `rollout.adapter_transport=auto` finds no
        memory on its way, all ranks take the next one from here on, and `take_warnings` says so.

        Raises:
            AdapterError: a machine does not have the memory.
        """
        asked = self._cfg.rollout.adapter_transport
        while True:
            transport = self.auto_transport if asked is Transport.auto else asked
            parts, why = await self._publish(transport)
            if why is None:
                self._in_use = transport
                return gather_parts(parts, self.info["adapter_config"], version)
            if asked is not Transport.auto or transport not in NEXT:
                raise why
            self.auto_transport = NEXT[transport]
            self._warnings.append(
                f"adapters travel through {self.auto_transport.value} from here on, not {transport.value}: "
                f"{why.message}"
            )

    async def offer_on_device(self) -> list[AdapterPart] | AdapterError:
        """What each rank leaves on its GPU for servers to try, or why one cannot; valid until `publish`."""
        parts, why = await self._publish(Transport.cuda_ipc)
        return why or parts

    def take_warnings(self) -> list[str]:
        """What happened since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    async def _publish(self, transport: Transport) -> tuple[list[AdapterPart], AdapterError | None]:
        """Each rank's part, and the error of the first one that has none."""
        limit = self._cfg.trainer.step_timeout_s
        found = await self._call("publish", self._everywhere(transport), limit, in_use=self._in_use)
        parts = [part for part in found if not isinstance(part, AdapterError)]
        return parts, next((part for part in found if isinstance(part, AdapterError)), None)

    async def save(self, folder: str | os.PathLike[str]) -> None:
        """Write stock PEFT files and the optimizer's state into `folder`; files appear complete or not at all."""
        counters = {"num_steps": self._num_steps}
        args = self._everywhere(os.path.abspath(folder), counters)
        await self._call("save", args, self._cfg.trainer.step_timeout_s)

    async def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote; the number of ranks may differ.

        Raises:
            CheckpointError: a file is missing or damaged, or belongs to another model or adapter.
        """
        args = self._everywhere(os.path.abspath(folder))
        counters = await self._call("load", args, self._cfg.trainer.start_timeout_s)
        self._num_steps = counters[0]["num_steps"]

    async def stop(self) -> None:
        """End every rank's process; safe to call twice and after an error."""
        workers, self._workers = self._workers, []
        stopping = [asyncio.ensure_future(_settle(w.stop.remote())) for w in workers if self._failure is None]
        # a rank that cannot stop by itself is killed; what its call raises concerns nobody, and asyncio would print it
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*stopping, return_exceptions=True), _STOP_WAIT_S)
        for worker in workers:
            ray.kill(worker, no_restart=True)

    def _check(self, sequences: Sequence[TrainSequence], *, with_routes: bool) -> None:
        if not sequences:
            raise DataError("the batch holds no sequence, so there is nothing to train on")
        shape = self._routing
        for sequence in sequences:
            num = len(sequence.response_ids)
            if not len(sequence.prompt_ids) or not num:
                raise DataError(f"sequence `{sequence.uid}` has an empty prompt or response")
            for name in ("rollout_log_probs", "advantages"):
                if len(getattr(sequence, name)) != num:
                    found = len(getattr(sequence, name))
                    raise DataError(f"sequence `{sequence.uid}` has {num} response tokens but {found} {name}")
            if not np.isfinite(sequence.advantages).all():
                raise DataError(f"sequence `{sequence.uid}` has an advantage that is not finite")
            if with_routes:
                validate_routes(
                    sequence.routed_experts,
                    num_prompt=len(sequence.prompt_ids),
                    num_response=num,
                    num_layers=shape.num_layers,
                    top_k=shape.top_k,
                    num_experts=shape.num_experts,
                    uid=sequence.uid,
                )

    def _plan(self, rows: list[Row]) -> list[list[list[Row]]]:
        trainer = self._cfg.trainer
        lengths = [num_fed(row.sequence) for row in rows]
        shortest = rows[int(np.argmin(lengths))]
        filler = Row(
            index=-1,
            sequence=shortest.sequence,
            old_log_probs=shortest.old_log_probs,
            trainer_log_probs=shortest.trainer_log_probs,
            base_log_probs=shortest.base_log_probs,
            counted=False,
        )
        spread = plan(lengths, num_ranks=trainer.num_workers, max_tokens=trainer.max_tokens_per_micro_batch)
        return [[[rows[i] for i in part] or [filler] for part in parts] for parts in spread]

    async def _score(self, rows: list[Row], *, temperature: float, pin: bool, adapter: bool = True) -> list[RankResult]:
        args = [(parts,) for parts in self._plan(rows)]
        return await self._call(
            "score", args, self._cfg.trainer.step_timeout_s, temperature=temperature, pin=pin, adapter=adapter
        )

    async def _update(self, rows: list[Row], temperature: float) -> list[RankResult]:
        totals = Totals(
            num_tokens=sum(len(row.sequence.response_ids) for row in rows),
            num_sequences=len(rows),
            num_ranks=self._cfg.trainer.num_workers,
        )
        args = [(parts, totals) for parts in self._plan(rows)]
        limit = self._cfg.trainer.step_timeout_s
        return await self._call("update", args, limit, temperature=temperature, pin=self._cfg.trainer.replay)

    def _count_skipped(self, outcomes: list[list[RankResult]]) -> None:
        for results in outcomes:
            self._skipped = 0 if _finite(results) else self._skipped + 1
        if self._skipped >= _MAX_SKIPPED:
            raise WorkerError(
                f"{self._skipped} updates in a row had a gradient that is not finite and were skipped",
                hint="lower `trainer.optimizer.lr`, and look for nan in `agree/dlogp_max` and in the rewards; the last "
                "checkpoint is untouched",
            )

    def _everywhere(self, *args: Any) -> list[tuple[Any, ...]]:
        return [args for _ in self._workers]

    async def _call(self, method: str, args: list[tuple[Any, ...]], limit_s: float, **kwargs: Any) -> list[Any]:
        """Call a method on the first `len(args)` ranks and wait for all of them.

        Any rank's error ends the whole group: the others would wait for it in a collective until they time out.
        """
        if self._failure is not None:
            raise self._failure
        if not self._workers:
            raise WorkerError("the trainer has been stopped")
        calls = [
            asyncio.ensure_future(_settle(getattr(worker, method).remote(*arg, **kwargs)))
            for worker, arg in zip(self._workers, args, strict=False)
        ]
        try:
            done, pending = await asyncio.wait(calls, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            for call in calls:  # what they may still raise concerns nobody, and asyncio would print it
                call.cancel()
            raise
        failed = any(call.exception() for call in done)
        if not failed and not pending:
            return [call.result() for call in calls]
        if failed and pending:
            await asyncio.wait(pending, timeout=_GRACE_S)
        errors = [call.exception() if call.done() else None for call in calls]
        for call in calls:
            call.cancel()
        self._failure = _root_cause(errors) or WorkerError(
            f"the trainer did not finish `{method}` in {limit_s:g} s; ranks still busy: "
            f"{[rank for rank, call in enumerate(calls) if errors[rank] is None and not call.done()]}",
            hint="raise `trainer.step_timeout_s` or `trainer.start_timeout_s` if the machine is merely slow",
        )
        for worker in self._workers:
            ray.kill(worker, no_restart=True)
        raise self._failure


def _replay_state(wanted: bool, routing: RoutingShape) -> str:
    if not routing.layers:
        return "off: a dense model has no routes"
    return "on" if wanted else "off"


def _gpus_of_a_rank(cfg: Config) -> float:
    if cfg.cluster.device is Device.cpu:
        return 0
    return COLOCATED_SHARE if cfg.cluster.colocate else 1


async def _settle(ref: Any) -> Any:
    return await ref


def _root_cause(errors: Sequence[BaseException | None]) -> SparkrlError | None:
    """The error to show: a user's mistake first, then a dead process, then whatever a rank raised."""
    by_kind: list[list[SparkrlError]] = [[], [], []]
    for rank, error in enumerate(errors):
        cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
        if cause is None:
            continue
        if isinstance(cause, SparkrlError):
            by_kind[0].append(type(cause)(cause.message, hint=cause.hint))
        elif isinstance(error, RayActorError):
            text = f"trainer rank {rank} died: {str(error).strip()}"
            by_kind[1].append(WorkerError(text, hint="exit code 9 usually means out of memory; see the Ray logs"))
        else:
            of_compiler = type(cause).__module__.startswith(_COMPILER)
            hint = "set `trainer.compile=never` to do without torch.compile" if of_compiler else None
            by_kind[2].append(WorkerError(f"trainer rank {rank} failed: {type(cause).__name__}: {cause}", hint=hint))
    return next((kind[0] for kind in by_kind if kind), None)


def _merge(results: Sequence[RankResult], field: str) -> dict[int, np.ndarray]:
    return {i: value for result in results for i, value in sorted(getattr(result, field).items())}


def _dlogp(log_probs: Sequence[np.ndarray], sequences: Sequence[TrainSequence]) -> np.ndarray:
    pairs = zip(log_probs, sequences, strict=True)
    return np.concatenate([value - sequence.rollout_log_probs for value, sequence in pairs])


def _mean(results: Sequence[RankResult], name: str) -> float:
    return float(np.mean([result.figures[name] for result in results]))


def _finite(results: Sequence[RankResult]) -> bool:
    return bool(np.isfinite(results[0].figures["grad_norm"]))
