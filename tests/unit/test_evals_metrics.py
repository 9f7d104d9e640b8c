"""Accuracy figures against tables, brute force and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sparkrl.errors import DataError
from sparkrl.evals import maj_at_k, mean_at_k, paired_gain, pass_at_k, t_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (100, 1.9840), (1000, 1.9623)],
)
def test_t_quantile_two_sided_95_equals_published_table(degrees, expected):
    assert t_quantile(0.975, degrees=degrees) == pytest.approx(expected, abs=6e-5)


def test_t_quantile_99_at_4_degrees_equals_published_table():
    assert t_quantile(0.995, degrees=4) == pytest.approx(4.6041, abs=6e-5)


def test_mean_at_k_of_a_worked_example_equals_hand_computation():
    # Per-problem means 0, 0.25, 0.5, 1: mean 0.4375, sample variance 0.182292, so n = 0.246094 * 4 / 0.182292 = 5.4.
    correct_PK = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=bool)
    t, n, p = 3.182446, 5.4, 0.4375
    centre = (p + t**2 / (2 * n)) / (1 + t**2 / n)
    half = t / (1 + t**2 / n) * math.sqrt(p * (1 - p) / n + t**2 / (4 * n**2))
    interval = mean_at_k(correct_PK)
    assert interval.mean == 0.4375
    assert interval.low == pytest.approx(centre - half, abs=1e-6)
    assert interval.high == pytest.approx(centre + half, abs=1e-6)


def test_mean_at_k_of_many_problems_equals_plain_t_interval():
    rng = np.random.default_rng(0)
    correct_PK = rng.random((2000, 8)) < rng.beta(2, 2, size=(2000, 1))
    means = correct_PK.mean(axis=1)
    half = 1.9612 * means.std(ddof=1) / math.sqrt(2000)
    interval = mean_at_k(correct_PK)
    assert interval.low == pytest.approx(means.mean() - half, abs=1e-4)
    assert interval.high == pytest.approx(means.mean() + half, abs=1e-4)


@pytest.mark.parametrize(
    ("num_problems", "k", "shape"), [(100, 8, (1, 1)), (30, 8, (0.5, 0.5)), (60, 4, (0.3, 3)), (200, 1, (1, 1))]
)
def test_mean_at_k_intervals_in_simulation_cover_at_their_confidence(num_problems, k, shape):
    """Problems with difficulties from a Beta distribution: the true mean is known, 95 % of intervals must hold it."""
    rng = np.random.default_rng(1)
    truth = shape[0] / (shape[0] + shape[1])
    hits = 0
    for _ in range(1500):
        correct_PK = rng.random((num_problems, k)) < rng.beta(*shape, size=(num_problems, 1))
        interval = mean_at_k(correct_PK)
        hits += interval.low <= truth <= interval.high
    assert 0.93 <= hits / 1500 <= 0.975  # the standard error of the estimate itself is 0.006


@pytest.mark.parametrize("value", [False, True])
def test_mean_at_k_when_every_verdict_is_the_same_keeps_a_one_sided_interval(value):
    interval = mean_at_k(np.full((10, 8), value))
    # Wilson at 0 of 10 with t(9) = 2.2622: t^2 / (n + t^2) = 0.3385
    assert interval.mean == float(value)
    assert (interval.low, interval.high) == pytest.approx((0.6615, 1.0) if value else (0.0, 0.3385), abs=1e-4)


def test_mean_at_k_of_one_problem_is_nearly_uninformative():
    interval = mean_at_k(np.array([[True, False]]))
    assert interval.mean == 0.5
    assert interval.low < 0.01 and interval.high > 0.99


def test_mean_at_k_without_problems_raises():
    with pytest.raises(DataError, match="at least one problem"):
        mean_at_k(np.zeros((0, 8), dtype=bool))


def test_pass_at_k_equals_brute_force_over_all_subsets():
    correct_PK = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 1]], dtype=bool)
    for k in range(1, 7):
        expected = np.mean(
            [[any(row[list(pick)]) for pick in itertools.combinations(range(6), k)] for row in correct_PK]
        )
        assert pass_at_k(correct_PK, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_with_too_few_responses_raises():
    with pytest.raises(DataError, match="pass@3"):
        pass_at_k(np.ones((2, 2), dtype=bool), 3)


def test_maj_at_k_counts_majorities_ties_and_silence_by_hand():
    extracted = [["7", "7", "8", None], ["1", "2", "2", "2"], ["3", "4", None, None], [None, None, None, None]]
    correct = [[True, True, False, False], [True, False, False, False], [True, False, False, False], [False] * 4]
    # right; wrong (2 outvotes 1); a tie of which one half is right; no answer
    assert maj_at_k(extracted, correct) == pytest.approx((1 + 0 + 0.5 + 0) / 4)


def test_pass_at_k_of_random_verdicts_equals_every_choice_of_k_responses():
    rng = np.random.default_rng(3)
    for _ in range(40):
        num_problems, num_responses = rng.integers(1, 5), rng.integers(1, 8)
        correct_PN = rng.random((num_problems, num_responses)) < rng.random()
        for k in range(1, num_responses + 1):
            chosen = list(itertools.combinations(range(num_responses), k))
            brute = np.mean([[row[list(subset)].any() for subset in chosen] for row in correct_PN])
            assert pass_at_k(correct_PN, k) == pytest.approx(brute, abs=1e-12)


def test_maj_at_k_of_random_votes_equals_every_way_to_break_ties():
    rng = np.random.default_rng(4)
    for _ in range(60):
        k = int(rng.integers(1, 6))
        votes = [None if rng.random() < 0.2 else str(rng.integers(3)) for _ in range(k)]
        # Over all orders of the votes, the winner is the first of the most frequent answers.
        orders = list(itertools.permutations(vote for vote in votes if vote is not None))
        brute = float(np.mean([max(order, key=order.count, default=None) == "0" for order in orders]))
        assert maj_at_k([votes], [[vote == "0" for vote in votes]]) == pytest.approx(brute, abs=1e-12)


def test_paired_gain_of_a_worked_example_equals_hand_computation():
    # Differences 0.75, 0.25, 0, -0.25 and mean 0.1875; their sample variance is 0.182292, more than the sampling noise.
    ours = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=bool)
    base = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=bool)
    half = 3.182446 * math.sqrt(0.182292 / 4)
    gain = paired_gain(ours, base)
    assert gain.mean == 0.1875
    assert (gain.low, gain.high) == (pytest.approx(0.1875 - half, abs=1e-5), pytest.approx(0.1875 + half, abs=1e-5))


def test_paired_gain_of_equal_verdicts_is_as_wide_as_sampling_alone():
    # Every problem: q = 8.5 / 9 on both sides, so the variance is 2 * q (1 - q) / 8; t(29) = 2.04523.
    verdicts = np.ones((30, 8), dtype=bool)
    half = 2.04523 * math.sqrt(2 * (8.5 / 9) * (0.5 / 9) / 8 / 30)
    gain = paired_gain(verdicts, verdicts)
    assert (gain.mean, gain.low, gain.high) == (0.0, pytest.approx(-half, abs=1e-6), pytest.approx(half, abs=1e-6))


def test_paired_gain_changes_sign_with_its_sides_and_takes_other_numbers_of_responses():
    rng = np.random.default_rng(5)
    for _ in range(50):
        ours, base = rng.random((6, 8)) < rng.random((6, 1)), rng.random((6, 3)) < rng.random((6, 1))
        there, back = paired_gain(ours, base), paired_gain(base, ours)
        assert there.mean == pytest.approx(ours.mean() - base.mean(), abs=1e-12)
        assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low), abs=1e-12)
        assert -1.0 <= there.low <= there.mean <= there.high <= 1.0


@pytest.mark.parametrize(("num_problems", "k", "lift"), [(30, 8, 0.0), (30, 8, 0.2), (128, 8, 0.3), (30, 2, 0.1)])
def test_paired_gain_intervals_in_simulation_cover_at_their_confidence(num_problems, k, lift):
    """Difficulties from a Beta distribution, lifted towards 1 by a known mean gain: 95 % of intervals must hold it."""
    rng = np.random.default_rng(6)
    hits = 0
    for _ in range(1500):
        chance = rng.beta(1, 1, size=(num_problems, 1))
        lifted = chance + lift * 2 * (1 - chance) * rng.random((num_problems, 1))
        gain = paired_gain(rng.random((num_problems, k)) < lifted, rng.random((num_problems, k)) < chance)
        # mean of 2 lift (1 - chance) u with uniform chance and u
        hits += gain.low <= lift / 2 <= gain.high
    assert 0.93 <= hits / 1500 <= 0.99  # the noise floor may only make it wider


def test_paired_gain_over_other_problems_raises():
    with pytest.raises(DataError, match="the same problems on both sides, got: 3 and 2"):
        paired_gain(np.ones((3, 2), dtype=bool), np.ones((2, 2), dtype=bool))
