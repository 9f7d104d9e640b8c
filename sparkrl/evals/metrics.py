"""Accuracy figures over problems and samples.

Shape legend: P problems, K responses a problem, B responses a problem of the baseline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparkrl.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and its confidence bounds: 0..1 for an accuracy, -1..1 for a difference of two."""

    mean: float
    low: float
    high: float


def mean_at_k(correct_PK: np.ndarray, *, confidence: float = 0.95) -> Interval:
    """Mean accuracy with an interval over problems and samples.

    The responses to one problem share its difficulty, so they are one cluster, and the spread of the per-problem
    means holds both sources of noise: its expectation is (variance between problems + sampling variance / K). The
    standard error is therefore that spread over sqrt(P); no variance component has to be estimated apart, and treating
    all P * K responses as independent would make the interval too short. The interval itself is Wilson's, at the
    effective sample size n = mean * (1 - mean) / standard_error^2 and with Student's t for P - 1 degrees of freedom:
    in the middle it is the plain t interval, near 0 and 1 it stays inside 0..1 and does not shrink to nothing when
    every response is wrong. n is at most P * K (no cluster effect) and is P when every response has the same verdict.

    Args:
        correct_PK: bool [P, K].
        confidence: coverage, for example 0.95.
    Raises:
        DataError: no problem or no response.
    Source: E. L. Korn and B. I. Graubard, Survey Methodology 24 (1998) 193-201, with Wilson's interval in place of
        Clopper-Pearson's; N. Dean and M. Pagano, J. Survey Statistics and Methodology 3 (2015) 484-503.
    """
    _check(correct_PK)
    num_problems, k = correct_PK.shape
    means_P = correct_PK.mean(axis=1)
    mean = float(means_P.mean())
    spread = float(means_P.var(ddof=1)) if num_problems > 1 else 0.0
    binomial = mean * (1.0 - mean)
    if binomial == 0.0 or num_problems == 1:
        size = float(num_problems)
    else:
        size = min(binomial * num_problems / spread, num_problems * k) if spread > 0.0 else float(num_problems * k)
    t = t_quantile(0.5 + confidence / 2.0, degrees=max(num_problems - 1, 1))
    centre = (mean + t * t / (2.0 * size)) / (1.0 + t * t / size)
    half = t / (1.0 + t * t / size) * math.sqrt(binomial / size + t * t / (4.0 * size * size))
    return Interval(mean=mean, low=max(0.0, min(centre - half, mean)), high=min(1.0, max(centre + half, mean)))


def paired_gain(correct_PK: np.ndarray, baseline_PB: np.ndarray, *, confidence: float = 0.95) -> Interval:
    """Difference of two mean accuracies over the same problems, with an interval over problems and samples.

    The differences of the per-problem means leave the problems' difficulty out, so they spread far less than the two
    accuracies do. Their spread over sqrt(P) is the standard error, and the interval is Student's t with P - 1 degrees
    of freedom. It is never taken to be less than the noise of sampling alone, which per problem and side is
    q (1 - q) / K with q = (right + 1/2) / (K + 1): when hardly any problem changed, the spread of the others says
    nothing about what more samples would show.

    Args:
        correct_PK: bool [P, K].
        baseline_PB: bool [P, B], the same problems in the same order.
        confidence: coverage, for example 0.95.
    Raises:
        DataError: no problem or no response, or other problems.
    Source: E. Miller, Adding Error Bars to Evals, arXiv:2411.00640, section 4 (paired differences, clustered).
    """
    _check(correct_PK)
    _check(baseline_PB)
    num_problems = len(correct_PK)
    if num_problems != len(baseline_PB):
        raise DataError(f"a gain needs the same problems on both sides, got: {num_problems} and {len(baseline_PB)}")
    differences_P = correct_PK.mean(axis=1) - baseline_PB.mean(axis=1)
    mean = float(differences_P.mean())
    spread = float(differences_P.var(ddof=1)) if num_problems > 1 else 1.0
    noise = float((_sampling_variance(correct_PK) + _sampling_variance(baseline_PB)).mean())
    error = math.sqrt(max(spread, noise) / num_problems)
    half = t_quantile(0.5 + confidence / 2.0, degrees=max(num_problems - 1, 1)) * error
    return Interval(mean=mean, low=max(-1.0, mean - half), high=min(1.0, mean + half))


def _sampling_variance(correct_PK: np.ndarray) -> np.ndarray:
    """Variance of each problem's mean accuracy by sampling alone, float64 [P]; positive also where all agree."""
    k = correct_PK.shape[1]
    chance_P = (correct_PK.sum(axis=1) + 0.5) / (k + 1.0)
    return chance_P * (1.0 - chance_P) / k


def pass_at_k(correct_PK: np.ndarray, k: int) -> float:
    """Chance that at least one of k responses to a problem is right, unbiased, averaged over problems.

    Args:
        correct_PK: bool [P, N], N >= k responses a problem.
    Source: Chen et al., arXiv:2107.03374: 1 - C(N - right, k) / C(N, k).
    """
    _check(correct_PK)
    num_responses = correct_PK.shape[1]
    if not 1 <= k <= num_responses:
        raise DataError(f"pass@{k} needs at least {k} responses a problem, got: {num_responses}")
    total = math.comb(num_responses, k)
    return float(np.mean([1.0 - math.comb(num_responses - int(c), k) / total for c in correct_PK.sum(axis=1)]))


def maj_at_k(extracted: Sequence[Sequence[str | None]], correct: Sequence[Sequence[bool]]) -> float:
    """Accuracy of the most frequent answer of each problem.

    Responses without an answer do not vote. Of a tie, each winner counts by its share, which is the expectation of
    breaking it at random. A problem without any answer is wrong.

    Args:
        extracted: answers read out of the responses, K for each problem.
        correct: whether each is right, same layout.
    """
    if not extracted:
        raise DataError("maj@k needs at least one problem, got none")
    points = []
    for answers, verdicts in zip(extracted, correct, strict=True):
        votes = Counter(answer for answer in answers if answer is not None)
        right = {answer for answer, verdict in zip(answers, verdicts, strict=True) if verdict}
        most = max(votes.values(), default=0)
        winners = [answer for answer, count in votes.items() if count == most]
        points.append(sum(answer in right for answer in winners) / len(winners) if winners else 0.0)
    return float(np.mean(points))


def t_quantile(probability: float, *, degrees: int) -> float:
    """Quantile of Student's t distribution, by bisection on its exact distribution function.

    Args:
        probability: 0.5 < probability < 1.
        degrees: degrees of freedom, >= 1.
    """
    assert 0.5 < probability < 1.0 and degrees >= 1
    low, high = 0.0, 1.0
    while _t_central(high, degrees) < 2.0 * probability - 1.0:
        high *= 2.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        if _t_central(middle, degrees) < 2.0 * probability - 1.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _t_central(t: float, degrees: int) -> float:
    """Probability of |T| <= t: the finite series of Abramowitz and Stegun, 26.7.3 (odd degrees) and 26.7.4 (even)."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = degrees % 2 == 1
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for i in range(3 if odd else 2, degrees, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    return 2.0 / math.pi * (theta + sine * total) if odd else sine * total


def _check(correct_PK: np.ndarray) -> None:
    if correct_PK.ndim != 2 or 0 in correct_PK.shape:
        raise DataError(f"accuracy needs at least one problem and one response, got shape: {correct_PK.shape}")
