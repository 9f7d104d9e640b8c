"""Losses of the presets and the rollout correction, against float64 arithmetic that knows nothing of verl."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkrl.config.load import load
from sparkrl.config.schema import (
    Aggregation,
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionWeights,
    PolicyLoss,
    Rejection,
)
from sparkrl.errors import ConfigError
from sparkrl.trainer import platform
from sparkrl.trainer.batch import Row, Totals, collate
from sparkrl.types import TrainSequence

BUDGET = 16
LENGTHS = (5, 1, 9, 3)


@pytest.fixture(scope="module")
def loss_class():
    platform.install("cpu")
    from sparkrl.trainer.losses import Loss

    return Loss


class Case:
    """Four responses whose new, old and server log-probs all differ."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.server = [rng.normal(-1.5, 0.5, n).astype(np.float32) for n in LENGTHS]
        self.trainer = [(s + rng.normal(0, 0.5, len(s))).astype(np.float32) for s in self.server]
        self.new = [(t + rng.normal(0, 0.2, len(t))).astype(np.float32) for t in self.trainer]
        self.advantages = [1.2, -0.7, -1.5, 0.4]

    def rows(self, *, several_mini_batches: bool = True) -> list[Row]:
        return [
            Row(
                index=i,
                sequence=TrainSequence(
                    uid=str(i),
                    prompt_ids=np.array([1, 2], np.int32),
                    response_ids=np.arange(n, dtype=np.int32),
                    rollout_log_probs=self.server[i],
                    routed_experts=np.zeros((n + 1, 1, 2), np.uint8),
                    advantages=np.full(n, self.advantages[i], np.float32),
                ),
                old_log_probs=self.trainer[i],
                trainer_log_probs=self.trainer[i] if several_mini_batches else None,
            )
            for i, n in enumerate(LENGTHS)
        ]

    def value_and_gradients(self, loss, rows=None) -> tuple[float, list[np.ndarray]]:
        rows = rows or self.rows()
        new = [torch.tensor(values, requires_grad=True) for values in self.new]
        padded_BM = torch.nn.utils.rnn.pad_sequence(new, batch_first=True)
        totals = Totals(num_tokens=sum(LENGTHS), num_sequences=len(LENGTHS), num_ranks=1)
        value = loss(padded_BM, None, collate(rows, "cpu"), totals)
        value.backward()
        return float(value.detach()), [leaf.grad.numpy() for leaf in new]


def by_hand(case: Case, algorithm: AlgorithmConfig) -> tuple[float, list[np.ndarray]]:
    """Loss and its gradient with regard to each new log-prob, float64, from the papers' formulas."""
    new, old, server = ([v.astype(np.float64) for v in values] for values in (case.new, case.trainer, case.server))
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    correction = algorithm.correction
    total, gradients = 0.0, []
    for i, n in enumerate(LENGTHS):
        a = case.advantages[i]
        distance = old[i] - server[i]
        k3 = np.exp(distance) - 1 - distance
        keep = np.ones(n)
        if correction.reject is Rejection.token:
            keep = (k3 <= correction.max_k3).astype(float)
        elif correction.reject is not Rejection.none:
            of = {Rejection.sequence_mean: np.mean, Rejection.sequence_sum: np.sum, Rejection.sequence_max: np.max}
            keep = np.full(n, float(of[correction.reject](k3) <= correction.max_k3))
        weight = np.ones(n)
        if correction.weights is not CorrectionWeights.none:
            by_sequence = correction.weights is CorrectionWeights.sequence
            weight = np.exp(np.full(n, distance.sum()) if by_sequence else distance)
            if correction.min_weight:
                weight = np.where((weight < correction.min_weight) | (weight > correction.max_weight), 0.0, weight)
            else:
                weight = np.minimum(weight, correction.max_weight)
        ratio = np.exp(new[i] - old[i])
        if algorithm.loss is PolicyLoss.gspo:
            kept = keep.astype(bool)
            ratio = np.full(n, np.exp((new[i] - old[i])[kept].mean()) if kept.any() else 1.0)
        if algorithm.loss is PolicyLoss.cispo:
            clipped = np.clip(ratio, low, high)
            losses, slopes = -clipped * a * new[i], -clipped * a
        else:
            plain, cut = -a * ratio, -a * np.clip(ratio, low, high)
            losses = np.maximum(plain, cut)
            slopes = np.where(plain >= cut, plain, 0.0)
            if a < 0 and algorithm.loss is PolicyLoss.vanilla:
                slopes = np.where(losses > -a * algorithm.clip_dual, 0.0, slopes)
                losses = np.minimum(losses, -a * algorithm.clip_dual)
        share = {
            Aggregation.token_mean: 1 / sum(LENGTHS),
            Aggregation.seq_mean_token_mean: 1 / len(LENGTHS) / max(keep.sum(), 1),
            Aggregation.seq_mean_token_sum: 1 / len(LENGTHS),
            Aggregation.seq_mean_token_sum_norm: 1 / len(LENGTHS) / BUDGET,
        }[algorithm.aggregation]
        total += float((losses * weight * keep).sum() * share)
        gradients.append(slopes * weight * keep * share)
    return total, gradients


def agree(case: Case, algorithm: AlgorithmConfig, loss_class) -> None:
    value, gradients = case.value_and_gradients(loss_class(algorithm, response_budget=BUDGET))
    expected, slopes = by_hand(case, algorithm)
    assert value == pytest.approx(expected, rel=2e-5, abs=1e-6)
    for found, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(found, slope, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_preset_loss_and_gradient_equal_the_papers_formula(preset, loss_class):
    config = load(["recipe=quickstart", f"algorithm={preset}"])
    for seed in range(5):
        agree(Case(seed), config.algorithm, loss_class)


def test_presets_bring_what_belongs_to_each():
    found = {
        name: load(["recipe=quickstart", f"algorithm={name}"]) for name in ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
    }
    facts = {
        name: (c.algorithm.advantage.name, c.algorithm.loss.name, c.algorithm.aggregation.name,
               c.algorithm.clip_low, c.algorithm.clip_high, c.trainer.old_log_probs.name)
        for name, c in found.items()
    }  # fmt: skip
    assert facts == {
        "grpo": ("grpo", "vanilla", "seq_mean_token_mean", 0.2, 0.2, "rollout"),
        "dapo": ("grpo", "vanilla", "token_mean", 0.2, 0.28, "rollout"),
        "dr_grpo": ("dr_grpo", "vanilla", "seq_mean_token_sum_norm", 0.2, 0.2, "rollout"),
        "gspo": ("grpo", "gspo", "seq_mean_token_mean", 3e-4, 4e-4, "trainer"),
        "cispo": ("grpo", "cispo", "token_mean", 1.0, 0.2, "rollout"),
    }
    dapo = found["dapo"]
    assert dapo.algorithm.dynamic_sampling and dapo.algorithm.overlong_filtering
    assert dapo.reward.overlong_buffer == 0.2
    assert load(["recipe=quickstart", "algorithm=gspo", "algorithm.clip_high=0.1"]).algorithm.clip_high == 0.1


CORRECTIONS = [
    CorrectionConfig(weights=CorrectionWeights.token, max_weight=1.3),
    CorrectionConfig(weights=CorrectionWeights.sequence, max_weight=1.3),
    CorrectionConfig(weights=CorrectionWeights.token, min_weight=0.7, max_weight=1.4),
    CorrectionConfig(weights=CorrectionWeights.sequence, min_weight=0.5, max_weight=2.0),
    CorrectionConfig(reject=Rejection.token, max_k3=0.1),
    CorrectionConfig(reject=Rejection.sequence_mean, max_k3=0.08),
    CorrectionConfig(reject=Rejection.sequence_sum, max_k3=0.4),
    CorrectionConfig(reject=Rejection.sequence_max, max_k3=0.15),
    CorrectionConfig(weights=CorrectionWeights.token, max_weight=1.3, reject=Rejection.token, max_k3=0.1),
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.weights.name}-{c.min_weight}-{c.reject.name}")
@pytest.mark.parametrize("loss", list(PolicyLoss))
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_correction_in_every_loss_equals_float64(correction, loss, aggregation, loss_class):
    algorithm = AlgorithmConfig(loss=loss, aggregation=aggregation, correction=correction)
    for seed in range(3):
        agree(Case(seed), algorithm, loss_class)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.weights.name}-{c.min_weight}-{c.reject.name}")
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_corrected_loss_adds_up_over_micro_batches_and_ranks(correction, aggregation, loss_class):
    case = Case(1)
    loss = loss_class(AlgorithmConfig(aggregation=aggregation, correction=correction), response_budget=BUDGET)
    whole, _ = case.value_and_gradients(loss)
    rows = case.rows()
    totals = Totals(num_tokens=sum(LENGTHS), num_sequences=len(LENGTHS), num_ranks=2)
    parts = [
        loss(torch.tensor(case.new[i])[None], None, collate([rows[i]], "cpu"), totals) for i in range(len(LENGTHS))
    ]
    filler = Row(**{**{name: getattr(rows[0], name) for name in rows[0].__slots__}, "index": -1, "counted": False})
    parts.append(loss(torch.tensor(case.new[0])[None], None, collate([filler], "cpu"), totals))
    assert float(sum(parts)) / 2 == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_one_mini_batch_corrects_by_the_pass_it_makes(loss_class):
    case = Case(2)
    case.new = case.trainer  # the first update: what the trainer computes is its policy before it
    algorithm = AlgorithmConfig(correction=CORRECTIONS[0])
    loss = loss_class(algorithm, response_budget=BUDGET)
    with_old, gradients = case.value_and_gradients(loss)
    rows = case.rows(several_mini_batches=False)
    for row in rows:
        row.old_log_probs = None
    without, same = case.value_and_gradients(loss, rows)
    assert without == with_old
    for ours, theirs in zip(gradients, same, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_weights_all_zero_leave_a_loss_of_zero_and_its_figures(loss_class):
    from sparkrl.trainer.correction import correction_metrics

    correction = CorrectionConfig(weights=CorrectionWeights.token, min_weight=0.5, max_weight=2.0)
    case = Case(0)
    case.server = [values - 5 for values in case.trainer]
    loss = loss_class(AlgorithmConfig(correction=correction), response_budget=BUDGET)
    value, gradients = case.value_and_gradients(loss)
    assert value == 0 and not any(gradient.any() for gradient in gradients)
    found = correction_metrics(case.trainer, [row.sequence for row in case.rows()], correction)
    assert found == {
        "correct/weight_mean": 0.0, "correct/weight_max": 0.0, "correct/weights_cut": 1.0,
        "correct/effective_samples": 0.0,
    }  # fmt: skip


def test_everything_rejected_leaves_a_loss_of_zero(loss_class):
    algorithm = AlgorithmConfig(correction=CorrectionConfig(reject=Rejection.token, max_k3=1e-12))
    value, gradients = Case(0).value_and_gradients(loss_class(algorithm, response_budget=BUDGET))
    assert value == 0 and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.weights.name}-{c.min_weight}-{c.reject.name}")
def test_correction_metrics_are_the_fractions_and_means_by_hand(correction):
    from sparkrl.trainer.correction import correction_metrics

    case = Case(0)
    found = correction_metrics(case.trainer, [row.sequence for row in case.rows()], correction)
    distances = [t.astype(np.float64) - s for t, s in zip(case.trainer, case.server, strict=True)]
    if correction.weights is not CorrectionWeights.none:
        sequence = correction.weights is CorrectionWeights.sequence
        raw = np.exp(np.concatenate([np.full(len(d), d.sum()) if sequence else d for d in distances]))
        above, below = raw > correction.max_weight, raw < (correction.min_weight or 0)
        used = np.where(above | below, 0, raw) if correction.min_weight else np.minimum(raw, correction.max_weight)
        assert found["correct/weight_mean"] == pytest.approx(used.mean(), rel=1e-6)
        assert found["correct/effective_samples"] == pytest.approx(used.mean() ** 2 / (used**2).mean(), rel=1e-6)
        assert found["correct/weight_max"] == pytest.approx(used.max(), rel=1e-6)
        assert found["correct/weights_cut"] == pytest.approx((above | below).mean(), rel=1e-6)
    else:
        assert "correct/weight_mean" not in found
    if correction.reject is not Rejection.none:
        k3 = [np.exp(d) - 1 - d for d in distances]
        of = {Rejection.sequence_mean: np.mean, Rejection.sequence_sum: np.sum, Rejection.sequence_max: np.max}
        limit = correction.max_k3
        out = [
            values > limit if correction.reject is Rejection.token
            else np.full(len(values), of[correction.reject](values) > limit)
            for values in k3
        ]  # fmt: skip
        assert found["correct/rejected_tokens"] == pytest.approx(np.concatenate(out).mean(), rel=1e-6)
        assert found["correct/rejected_responses"] == pytest.approx(np.mean([o.any() for o in out]), rel=1e-6)
        assert 0 < found["correct/rejected_tokens"] < 1
    else:
        assert "correct/rejected_tokens" not in found


def test_without_correction_there_are_no_metrics_of_it():
    from sparkrl.trainer.correction import correction_metrics

    case = Case(0)
    assert correction_metrics(case.trainer, [row.sequence for row in case.rows()], CorrectionConfig()) == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.correction.weights=token"], "needs `trainer.old_log_probs=trainer`, got: rollout"),
        (["algorithm.correction.min_weight=1"], "must enclose 1, .* got: 1.0 and 2.0"),
        (["algorithm.correction.min_weight=-1"], "must enclose 1, .* got: -1.0 and 2.0"),
        (["algorithm.correction.max_weight=0.9"], "must enclose 1, .* got: 0.0 and 0.9"),
        (["algorithm.correction.max_k3=-1"], "`algorithm.correction.max_k3` must be positive"),
        (["algorithm.correction.reject=k3"], "`algorithm.correction.reject` must be one of none, token"),
        (["algorithm=grop"], "no algorithm named `grop`; there are: cispo, dapo, dr_grpo, grpo, gspo"),
        (["loop.k3_patience=-1"], "`loop.k3_patience` must not be negative"),
    ],
)
def test_correction_that_cannot_be_meant_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(["recipe=quickstart", *overrides])
