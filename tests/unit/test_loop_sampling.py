"""Dynamic sampling of a policy whose verdicts are known, over the real problem stream; overlong shaping by hand."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from sparkrl.config.load import load
from sparkrl.config.schema import Advantage, Config, RewardConfig
from sparkrl.data import ProblemStream
from sparkrl.errors import ConfigError, DataError
from sparkrl.loop.batch import build_batch, rollout_metrics
from sparkrl.loop.sampling import Sampled, is_mixed, sample_step
from sparkrl.reward.shaping import overlong_penalty, shape
from sparkrl.types import FinishReason, Group, Problem, Response, Sampling, Score, ScoredGroup

GROUP = 4


def problems(num: int) -> tuple[Problem, ...]:
    return tuple(
        Problem(uid=f"p{i}", messages=(), answer="1", data_source="d", prompt_ids=np.zeros(1, np.int32))
        for i in range(num)
    )


def group(problem: Problem, num: int, *, version: int = 0, length: int = 2, finish=FinishReason.STOP) -> Group:
    responses = tuple(
        Response(
            uid=f"{problem.uid}/{i}",
            token_ids=np.zeros(length, np.int32),
            log_probs=np.zeros(length, np.float32),
            routed_experts=np.zeros((length, 1, 1), np.uint8),
            policy_version=version,
            finish_reason=finish,
            text="",
        )
        for i in range(num)
    )
    return Group(problem=problem, responses=responses)


class Policy:
    """Right answers of each problem come from a fixed draw: a third all wrong, a third all right, a third mixed."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def sample(self, chosen, sampling: Sampling) -> tuple[Group, ...]:
        self.asked.append([problem.uid for problem in chosen])
        return tuple(group(problem, sampling.num_responses) for problem in chosen)


class Scorer:
    def __init__(self, mixed_every: int = 3) -> None:
        self.mixed_every = mixed_every

    async def score(self, groups) -> tuple[ScoredGroup, ...]:
        return tuple(self._score(item) for item in groups)

    def _score(self, item: Group) -> ScoredGroup:
        kind = int(item.problem.uid[1:]) % self.mixed_every if self.mixed_every else 1
        right = [kind == 1 or (kind == 0 and i % 2 == 0) for i in range(len(item.responses))]
        scores = tuple(Score(reward=1.0 if r else -1.0, correct=r, extracted="1") for r in right)
        return ScoredGroup(group=item, scores=scores)

    def metrics(self) -> dict[str, float]:
        return {"rollout/extraction_failures": 0.25, "reward/timeouts": 1.0, "reward/crashes": 0.0}


class Stages:
    def stage(self, name: str):
        return nullcontext()


@dataclass
class Loop:
    """What `sample_step` sees of a run's parts."""

    config: Config
    data: ProblemStream
    rollout: Policy = field(default_factory=Policy)
    rewarder: Scorer = field(default_factory=Scorer)
    telemetry: Stages = field(default_factory=Stages)

    def sampling_seed(self, step: int) -> int:
        return step

    def step(self, number: int) -> Sampled:
        return asyncio.run(sample_step(self, number))  # type: ignore[arg-type]


@functools.cache
def configuration(*overrides: str) -> Config:
    base = ["recipe=quickstart", "loop.num_prompts=6", f"loop.group_size={GROUP}", "algorithm.dynamic_sampling=true"]
    return load([*base, *overrides])


def make_loop(num_problems: int, *overrides: str, seed: int = 0, shuffle: bool = True, mixed_every: int = 3) -> Loop:
    config = configuration(*overrides)
    data = ProblemStream(problems(num_problems), seed=seed, shuffle=shuffle)
    return Loop(config=config, data=data, rewarder=Scorer(mixed_every))


def uids(groups) -> list[str]:
    return [item.group.problem.uid for item in groups]


def test_step_is_refilled_until_it_has_enough_mixed_groups() -> None:
    loop = make_loop(300, "algorithm.max_refills=50", shuffle=False)
    sampled = loop.step(0)
    # in file order every third problem is mixed: p0, p3, ... of 6 two are, of the next 4 missing one or two, and so on
    assert uids(sampled.kept) == ["p0", "p3", "p6", "p9", "p12", "p15"]
    assert loop.rollout.asked[:3] == [[f"p{i}" for i in range(6)], ["p6", "p7", "p8", "p9"], ["p10", "p11"]]
    assert sampled.metrics["rollout/refills"] == len(loop.rollout.asked) - 1
    assert sampled.metrics["rollout/kept_groups"] == 6.0
    assert all(is_mixed(item) for item in sampled.kept)


def test_figures_are_over_everything_that_was_sampled() -> None:
    loop = make_loop(300, "algorithm.max_refills=50", shuffle=False)
    sampled = loop.step(0)
    assert uids(sampled.all) == [f"p{i}" for i in range(16)]  # 6 mixed (half right), 5 all right, 5 all wrong
    assert sampled.metrics["rollout/accuracy"] == pytest.approx((6 * 0.5 + 5) / 16)
    assert sampled.metrics["rollout/mixed_groups"] == pytest.approx(6 / 16)
    assert sampled.metrics["reward/timeouts"] == len(loop.rollout.asked)  # counts add up, one a pass
    assert sampled.metrics["rollout/extraction_failures"] == pytest.approx(0.25)  # a fraction stays one


def test_refills_end_at_their_cap_and_the_step_goes_on_with_what_it_has() -> None:
    loop = make_loop(300, "algorithm.max_refills=1", shuffle=False)
    sampled = loop.step(0)
    assert uids(sampled.kept) == ["p0", "p3", "p6", "p9"]
    assert (sampled.metrics["rollout/refills"], sampled.metrics["rollout/kept_groups"]) == (1.0, 4.0)


def test_step_without_one_mixed_group_trains_on_advantages_of_zero() -> None:
    loop = make_loop(300, "algorithm.max_refills=2", mixed_every=0)
    sampled = loop.step(0)
    assert (len(sampled.kept), sampled.metrics["rollout/kept_groups"]) == (6, 0.0)
    batch = build_batch(sampled.kept, policy_version=0, temperature=1.0, advantage=Advantage.grpo)
    assert all(not sequence.advantages.any() for sequence in batch.sequences)


def test_without_dynamic_sampling_every_group_is_kept_and_nothing_is_added() -> None:
    loop = make_loop(300, "algorithm.dynamic_sampling=false", shuffle=False)
    sampled = loop.step(0)
    assert uids(sampled.kept) == uids(sampled.all) == [f"p{i}" for i in range(6)]
    assert "rollout/refills" not in sampled.metrics


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_refills", [0, 1, 7])
def test_no_problem_comes_twice_in_a_step_or_in_an_epoch(seed: int, max_refills: int) -> None:
    loop = make_loop(61, f"algorithm.max_refills={max_refills}", seed=seed)
    by_epoch: dict[int, list[str]] = {}
    for step in range(25):
        sampled = loop.step(step)
        taken = uids(sampled.all)
        assert len(set(taken)) == len(taken)
        by_epoch.setdefault(loop.data.epoch, []).extend(taken)
    for taken in by_epoch.values():
        assert len(set(taken)) == len(taken)
    # what an epoch leaves unserved is less than one step's prompts
    complete = sorted(by_epoch)[:-1]
    assert all(61 - len(by_epoch[epoch]) < 6 for epoch in complete)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stop_after", [1, 4, 9, 13])
def test_resumed_run_neither_loses_nor_repeats_a_prompt(seed: int, stop_after: int) -> None:
    whole = make_loop(61, seed=seed)
    expected = [uids(whole.step(step).all) for step in range(20)]
    first = make_loop(61, seed=seed)
    before = [uids(first.step(step).all) for step in range(stop_after)]
    state = json.loads(json.dumps(first.data.state()))
    first.step(stop_after)  # a step that was sampled and never saved
    second = make_loop(61, seed=seed)
    second.data.restore(state)
    after = [uids(second.step(step).all) for step in range(stop_after, 20)]
    assert before + after == expected


@pytest.mark.parametrize("seed", range(16))
def test_run_interrupted_at_random_serves_what_an_uninterrupted_one_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_problems, max_refills = int(rng.integers(6, 90)), int(rng.integers(0, 9))
    shuffle, mixed_every = bool(rng.integers(2)), int(rng.integers(0, 5))
    config = copy.deepcopy(configuration())
    config.algorithm.max_refills, config.algorithm.dynamic_sampling = max_refills, bool(rng.integers(4))

    def new() -> Loop:
        return replace(make_loop(num_problems, seed=seed, shuffle=shuffle, mixed_every=mixed_every), config=config)

    whole = new()
    expected = [(uids(sampled.all), uids(sampled.kept)) for sampled in (whole.step(step) for step in range(14))]
    loop, step, served = new(), 0, []
    while step < 14:
        steps = int(rng.integers(1, 6))
        for _ in range(min(steps, 14 - step)):
            sampled = loop.step(step)
            served.append((uids(sampled.all), uids(sampled.kept)))
            step += 1
        saved = json.dumps(loop.data.state())
        for lost in range(int(rng.integers(0, 3))):  # steps after the checkpoint, gone with the process
            loop.step(step + lost)
        loop = new()
        loop.data.restore(json.loads(saved))
    assert served == expected
    if shuffle:
        return
    order = [uid for taken, _ in served for uid in taken]
    assert order == [f"p{i % num_problems}" for i in range(len(order))]  # nothing skipped, nothing twice


def test_responses_cut_off_are_left_out_after_the_advantages() -> None:
    problem = problems(1)[0]
    cut = group(problem, 2, finish=FinishReason.LENGTH).responses
    whole = group(problem, 4).responses[2:]
    scores = tuple(Score(reward=r, correct=r > 0, extracted=None) for r in (1.0, -1.0, 1.0, -1.0))
    item = ScoredGroup(group=Group(problem=problem, responses=cut + whole), scores=scores)
    batch = build_batch([item], policy_version=0, temperature=1.0, advantage=Advantage.dr_grpo, overlong_filtering=True)
    assert [(s.uid, s.advantages[0]) for s in batch.sequences] == [("p0/2", 1.0), ("p0/3", -1.0)]
    assert len(build_batch([item], policy_version=0, temperature=1.0, advantage=Advantage.grpo).sequences) == 4
    only_cut = ScoredGroup(group=Group(problem=problem, responses=cut), scores=scores[:2])
    with pytest.raises(DataError, match="cut off, aborted or empty"):
        build_batch([only_cut], policy_version=0, temperature=1.0, advantage=Advantage.grpo, overlong_filtering=True)


@pytest.mark.parametrize(
    ("num_tokens", "cost"), [(0, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (100, -0.5), (101, -0.5)]
)
def test_overlong_penalty_grows_over_the_buffer(num_tokens: int, cost: float) -> None:
    assert overlong_penalty(num_tokens, budget=100, buffer=20, penalty=0.5) == pytest.approx(cost)
    assert overlong_penalty(num_tokens, budget=100, buffer=0, penalty=0.5) == 0.0


def test_shaping_changes_rewards_and_not_verdicts() -> None:
    right = Score(reward=1.0, correct=True, extracted="1", parts={"answer": 1.0})
    items = [ScoredGroup(group=group(problems(1)[0], 2, length=length), scores=(right, right)) for length in (80, 90)]
    cfg = RewardConfig(overlong_buffer=0.2, overlong_penalty=1.0)
    shaped, components = shape(items, cfg, max_response_tokens=100)
    assert [[score.reward for score in item.scores] for item in shaped] == [[1.0, 1.0], [0.5, 0.5]]
    assert all(score.correct for item in shaped for score in item.scores)
    assert [item.scores[0].parts for item in shaped] == [
        {"answer": 1.0, "overlong": 0.0}, {"answer": 1.0, "overlong": -0.5},
    ]  # fmt: skip
    assert components == {
        "reward/answer_mean": 1.0, "reward/overlong_mean": -0.25, "reward/overlong_responses": 0.5,
    }  # fmt: skip
    assert shape(items, RewardConfig(), max_response_tokens=100) == (tuple(items), {"reward/answer_mean": 1.0})


@pytest.mark.parametrize(("budget", "cost"), [(100, -0.5), (50, -1.0), (1000, 0.0)])
def test_overlong_buffer_scales_with_the_response_budget(budget: int, cost: float) -> None:
    right = Score(reward=1.0, correct=True, extracted="1", parts={"answer": 1.0})
    item = ScoredGroup(group=group(problems(1)[0], 1, length=90), scores=(right,))
    (shaped,), _ = shape([item], RewardConfig(overlong_buffer=0.2), max_response_tokens=budget)
    assert shaped.scores[0].parts["overlong"] == pytest.approx(cost)


def test_right_wrong_and_unreadable_answers_are_counted_apart() -> None:
    scores = tuple(
        Score(reward=1.0 if correct else -1.0, correct=correct, extracted=extracted)
        for correct, extracted in ((True, "1"), (False, "2"), (False, None), (False, "3"))
    )
    metrics = rollout_metrics([ScoredGroup(group=group(problems(1)[0], 4), scores=scores)])
    unreadable = 0.25  # what the rewarder reports as rollout/extraction_failures
    assert (metrics["rollout/accuracy"], metrics["rollout/wrong_answers"]) == (0.25, 0.5)
    assert metrics["rollout/accuracy"] + metrics["rollout/wrong_answers"] + unreadable == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.max_refills=-1", "`algorithm.max_refills` must not be negative"),
        ("reward.overlong_buffer=1", "`reward.overlong_buffer` must lie in"),
        ("reward.overlong_penalty=-1", "`reward.overlong_penalty` must not be negative"),
        ("cluster.gpu_memory_gb=-1", "`cluster.gpu_memory_gb` must not be negative"),
    ],
)
def test_settings_out_of_range_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(["recipe=quickstart", override])
