"""The plan's bytes against those that a real server and real trainer ranks hold."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import ray

from sparkrl.config.load import load
from sparkrl.config.schema import Config
from sparkrl.planning import Plan, make_plan
from sparkrl.rollout import RolloutPool
from sparkrl.trainer.batch import Row, Totals
from sparkrl.trainer.worker import TrainerWorker
from sparkrl.types import TrainSequence

WITHIN = 0.05


@pytest.fixture(scope="module")
def cluster():
    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def config(*overrides: str) -> Config:
    return load(["recipe=quickstart", "rollout.kv_cache_gib=0.1", "trainer.num_threads=1", *overrides])


def rows() -> list[Row]:
    rng = np.random.default_rng(0)
    sequences = [
        TrainSequence(
            uid=str(i),
            prompt_ids=rng.integers(5, 500, 6).astype(np.int32),
            response_ids=rng.integers(5, 500, 9).astype(np.int32),
            rollout_log_probs=np.full(9, -1.0, np.float32),
            routed_experts=np.tile(np.array([3, 7], np.uint8), (14, 8, 1)),
            advantages=np.full(9, 1.0, np.float32),
        )
        for i in range(2)
    ]
    return [Row(index=i, sequence=one, old_log_probs=one.rollout_log_probs) for i, one in enumerate(sequences)]


def measured_class() -> Any:
    """Defined in a function, so that Ray sends the class itself to workers that cannot import this file."""

    def local(tensor: Any) -> int:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return own.numel() * own.element_size()

    class Measured(TrainerWorker):
        def start(self, *args: Any) -> dict[str, Any]:
            facts = super().start(*args)
            self.engine.optimizer.register_step_pre_hook(self._see_gradients)
            return facts

        def _see_gradients(self, *args: Any) -> None:
            self.gradients = sum(local(p.grad) for p in self.engine.module.parameters() if p.requires_grad)

        def held(self) -> dict[str, int]:
            """Bytes of this rank's own tensors; gradients as they were before the optimizer's step."""
            module = self.engine.module
            trainable = [p for p in module.parameters() if p.requires_grad]
            state = [v for p in trainable for v in self.engine.optimizer.state[p].values() if hasattr(v, "numel")]
            return {
                "base": sum(local(p) for p in module.parameters() if not p.requires_grad)
                + sum(local(b) for name, b in module.named_buffers() if not name.endswith("inv_freq")),
                "adapter": sum(map(local, trainable)),
                "gradients and AdamW": self.gradients + sum(map(local, state)),
            }

    return Measured


def measure_trainer(cfg: Config) -> list[dict[str, int]]:
    """What each rank holds after one optimizer step."""
    num = cfg.trainer.num_workers
    actor = ray.remote(measured_class()).options(num_cpus=1, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    ranks = [actor.remote(rank, num, cfg) for rank in range(num)]
    try:
        address = ray.get(ranks[0].open_store.remote())
        ray.get([rank.start.remote(*address, cfg.model.path, 0) for rank in ranks])
        parts = [rows()] if num == 1 else [[row] for row in rows()]
        totals = Totals(num_tokens=18, num_sequences=2, num_ranks=num)
        ray.get(
            [
                rank.update.remote([part], totals, temperature=1.0, pin=True)
                for rank, part in zip(ranks, parts, strict=True)
            ]
        )
        return ray.get([rank.held.remote() for rank in ranks])
    finally:
        for rank in ranks:
            ray.kill(rank)


def check_trainer(plan: Plan, held: list[dict[str, int]]) -> None:
    fullest = {name: max(rank[name] for rank in held) for name in held[0]}
    assert plan.trainer["base shard"] == pytest.approx(fullest["base"], rel=WITHIN)
    assert plan.trainer["adapter"] == pytest.approx(fullest["adapter"], rel=WITHIN)
    assert plan.trainer["gradients and AdamW"] == pytest.approx(fullest["gradients and AdamW"], rel=WITHIN)


@pytest.mark.parametrize(
    "overrides",
    [(), ("trainer.num_workers=2",), ("trainer.num_workers=2", "trainer.base=packed", "lora=attention_only")],
    ids=["one rank", "two ranks", "packed"],
)
def test_trainer_bytes_are_those_that_its_ranks_hold(cluster, overrides: tuple[str, ...]) -> None:
    cfg = config(*overrides)
    check_trainer(make_plan(cfg), measure_trainer(cfg))


def test_server_bytes_are_those_that_vllm_holds(cluster) -> None:
    cfg = config()
    plan = make_plan(cfg)

    async def start() -> dict[str, Any]:
        pool = await RolloutPool.start(cfg)
        await pool.stop()
        return pool.info

    info = asyncio.run(start())
    assert plan.server["adapter slot"] == pytest.approx(info["rollout/adapter_slot_bytes"], rel=WITHIN)
    # on CPU vLLM keeps linear layers in a packed copy of its kernel library that is no tensor of torch
    linear = 4 * (plan.parameters["attention"] + plan.parameters["latent"])
    weights = plan.server["weights: experts"] + plan.server["weights: rest"]
    assert weights == pytest.approx(info["rollout/model_bytes"] + linear, rel=WITHIN)
