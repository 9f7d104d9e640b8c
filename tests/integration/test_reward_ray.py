"""The rewarder on real Ray workers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time

import numpy as np
import pytest
import ray

from sparkrl.config.schema import RewardConfig, RewardRule
from sparkrl.errors import WorkerError
from sparkrl.reward import Rewarder
from sparkrl.reward.rules import math_dapo
from sparkrl.types import FinishReason, Group, Problem, Response, Score


@pytest.fixture(scope="module")
def ray_cluster():
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    # The rules of this file run in the workers, which have to be able to import it.
    environment = {"env_vars": {"PYTHONPATH": os.path.dirname(__file__)}}
    ray.init(include_dashboard=False, num_cpus=8, _temp_dir=folder, runtime_env=environment)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def make_groups(texts, answers):
    """One group a row of `texts`."""
    groups = []
    for index, (row, answer) in enumerate(zip(texts, answers, strict=True)):
        problem = Problem(
            uid=str(index), messages=(), answer=answer, data_source="d", prompt_ids=np.zeros(4, dtype=np.int32)
        )
        responses = tuple(
            Response(
                uid=f"{index}/{n}",
                token_ids=np.zeros(8, dtype=np.int32),
                log_probs=np.zeros(8, dtype=np.float32),
                routed_experts=np.zeros((11, 2, 2), dtype=np.uint8),
                policy_version=0,
                finish_reason=FinishReason.LENGTH if n == 0 else FinishReason.STOP,
                text=text,
            )
            for n, text in enumerate(row)
        )
        groups.append(Group(problem=problem, responses=responses))
    return groups


def stuck_or_dapo(text, answer):
    if text == "hang":
        while True:
            pass
    if text == "take the worker down":
        os.kill(os.getpid(), signal.SIGKILL)
    return math_dapo(text, answer)


def test_rewarder_scores_a_quickstart_step_in_order_and_in_time(ray_cluster):
    async def run():
        rewarder = Rewarder.start(RewardConfig(num_workers=2))
        texts = [[f"{i}+{j}: so. Answer: {i + j % 2}" for j in range(8)] for i in range(32)]
        texts[0][2] = "no answer here"
        groups = make_groups(texts, [str(i) for i in range(32)])
        await rewarder.score(groups[:1])
        first = rewarder.metrics()
        assert first["rollout/extraction_failures"] == 1 / 8
        elapsed_s = []
        for _ in range(5):
            started_s = time.perf_counter()
            scored = await rewarder.score(groups)
            elapsed_s.append(time.perf_counter() - started_s)
        metrics = rewarder.metrics()
        await rewarder.stop()
        await rewarder.stop()
        with pytest.raises(WorkerError, match="stopped"):
            await rewarder.score(groups)
        return groups, scored, metrics, elapsed_s

    groups, scored, metrics, elapsed_s = asyncio.run(run())
    for index, group in enumerate(scored):
        assert group.group is groups[index]
        assert [s.correct for s in group.scores] == [(index, j) != (0, 2) and j % 2 == 0 for j in range(8)]
        assert [s.reward for s in group.scores] == [1.0 if s.correct else -1.0 for s in group.scores]
    assert scored[0].scores[2].extracted is None
    assert metrics == {"rollout/extraction_failures": 1 / 256, "reward/timeouts": 0.0, "reward/crashes": 0.0}
    assert min(elapsed_s) < 0.2


def test_rewarder_with_stuck_and_dying_scorers_counts_them_wrong_and_goes_on(ray_cluster):
    async def run():
        rewarder = Rewarder.start(RewardConfig(num_workers=1, timeout_s=0.5), rule=stuck_or_dapo)
        texts = [["Answer: 1", "hang", "Answer: 1"], ["take the worker down", "Answer: 2", "hang"]]
        scored = await rewarder.score(make_groups(texts, ["1", "2"]))
        metrics = rewarder.metrics()
        await rewarder.stop()
        return scored, metrics

    scored, metrics = asyncio.run(run())
    assert [[s.correct for s in group.scores] for group in scored] == [[True, False, True], [False, True, False]]
    assert [[s.reward for s in group.scores] for group in scored] == [[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]]
    assert metrics == {"rollout/extraction_failures": 0.0, "reward/timeouts": 2.0, "reward/crashes": 1.0}


@pytest.mark.parametrize("rule", list(RewardRule))
def test_rewarder_is_not_stalled_by_a_power_tower_or_a_megabyte_of_latex(ray_cluster, rule):
    async def run():
        rewarder = Rewarder.start(RewardConfig(rule=rule, num_workers=1, timeout_s=2.0))
        await rewarder.score(make_groups([["Answer: 3"]], ["3"]))  # imports do not count
        rewarder.metrics()
        nasty = ["Answer: $9^{9^{9^9}}$", "\\frac{1}{" * 110_000 + "\nAnswer: 4", "Answer: " + "x+" * 500_000]
        texts = [[text, "Answer: 3"] for text in nasty]
        started_s = time.perf_counter()
        scored = await rewarder.score(make_groups(texts, ["3"] * len(nasty)))
        elapsed_s = time.perf_counter() - started_s
        metrics = rewarder.metrics()
        await rewarder.stop()
        return scored, metrics, elapsed_s

    scored, metrics, elapsed_s = asyncio.run(run())
    assert [[s.correct for s in group.scores] for group in scored] == [[False, True]] * 3
    assert elapsed_s < 3 * (2.0 + 10.0)  # the limit, and a new process each time
    # a response is right, wrong, unreadable, or could not be scored
    wrong = sum(not s.correct and s.extracted is not None for group in scored for s in group.scores)
    unscored = metrics["reward/timeouts"] + metrics["reward/crashes"]
    assert 3 + wrong + 6 * metrics["rollout/extraction_failures"] + unscored == pytest.approx(6)


def cannot_load(text, answer):
    import no_such_package_anywhere  # noqa: F401


def test_rewarder_whose_rule_cannot_load_raises_a_worker_error_with_the_reason(ray_cluster):
    async def run():
        rewarder = Rewarder.start(RewardConfig(), rule=cannot_load)
        try:
            await rewarder.score(make_groups([["x"]], ["1"]))
        finally:
            await rewarder.stop()

    with pytest.raises(WorkerError, match="no_such_package_anywhere"):
        asyncio.run(run())


def test_rewarder_stopped_leaves_no_scoring_process(ray_cluster):
    async def run():
        rewarder = Rewarder.start(RewardConfig(timeout_s=0.5), rule=report_pid)
        scored = await rewarder.score(make_groups([["x"]], ["1"]))
        pid = int(scored[0].scores[0].extracted)
        os.kill(pid, 0)
        await rewarder.stop()
        return pid

    pid = asyncio.run(run())
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"scoring process {pid} is still alive")


def test_rewarder_stopped_in_mid_score_does_not_wait_for_the_batch(ray_cluster):
    async def run():
        rewarder = Rewarder.start(RewardConfig(timeout_s=3.0), rule=stuck_or_dapo)
        await rewarder.score(make_groups([["Answer: 1"]], ["1"]))
        scoring = asyncio.ensure_future(rewarder.score(make_groups([["hang"] * 20], ["1"])))
        await asyncio.sleep(0.5)
        started_s = time.perf_counter()
        await rewarder.stop()
        stopped_s = time.perf_counter() - started_s
        with pytest.raises(WorkerError, match="died"):
            await scoring
        return stopped_s

    assert asyncio.run(run()) < 15.0  # the batch would take 60 s


def report_pid(text, answer):
    return Score(reward=1.0, correct=True, extracted=str(os.getpid()))
