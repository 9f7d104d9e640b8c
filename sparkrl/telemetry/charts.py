"""Charts as inline SVG. Colours and fonts come from the page's style sheet; hovering is done by report.js, which reads
the values of every step from the chart's `data-points`. Nothing here needs a browser or a network.

Lengths are in SVG user units; the drawing scales to its card.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 420.0, 230.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 54.0, 12.0, 12.0, 26.0
_MARKERS_UP_TO = 40
"""Lines of at most so many points show each of them."""
_MAX_POINTS = 1000
"""Longer runs are thinned, or the page would grow without limit."""

Point = tuple[int, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named line: (step, value) in step order; None is a gap."""

    name: str
    points: Sequence[Point]
    bars: Sequence[tuple[float, float] | None] | None = None
    """Lower and upper bound of each point, drawn as an error bar."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps steps and values to the drawing."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float
    log: bool

    def x(self, step: float) -> float:
        span = self.x_max - self.x_min
        share = (step - self.x_min) / span if span else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.y_min, self.y_max, value))
        return _HEIGHT - _BOTTOM - (at - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def line_chart(
    title: str, series: Sequence[Series], *, log: bool = False, limit: float | None = None, low: float | None = None
) -> str:
    """A card with one line a series.

    Args:
        log: logarithmic value axis; values <= 0 are gaps on it.
        limit: horizontal dashed line, drawn when given.
        low: a value that the axis holds at its lower end, unless the figures go below it.
    """
    series = [_thinned(one) for one in series]
    values = [v for one in series for _, v in one.points if v is not None and _drawable(v, log)]
    values += [b for one in series for pair in one.bars or () if pair for b in pair if _drawable(b, log)]
    if not values:
        return _card(title, [one.name for one in series], '<p class="empty">nothing recorded</p>')
    values += [value for value in (limit, low) if value is not None]
    steps = [float(step) for one in series for step, _ in one.points]
    ticks, frame = _frame(steps, values, log, low)
    parts = [_axes(frame, ticks)]
    if limit is not None:
        y = frame.y(limit)
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label_y = y - 4 if y > _TOP + 12 else y + 13  # under the line where there is no room above it
        parts.append(f'<text class="limit-label" x="{_WIDTH - _RIGHT - 2}" y="{label_y:.1f}">limit {limit:g}</text>')
    for index, one in enumerate(series):
        parts.append(_line(one, frame, index))
    return _card(title, [one.name for one in series], _svg(title, parts, _hover(series, frame, format_value)))


def stacked_chart(title: str, series: Sequence[Series]) -> str:
    """A card with one bar a step, the series stacked from the bottom up; values must not be negative."""
    series = [_thinned(one) for one in series]
    by_step: dict[int, list[float]] = {}
    for index, one in enumerate(series):
        for step, value in one.points:
            by_step.setdefault(step, [0.0] * len(series))[index] = value or 0.0
    if not any(any(values) for values in by_step.values()):
        return _card(title, [one.name for one in series], '<p class="empty">nothing recorded</p>')
    steps = sorted(by_step)
    ticks, frame = _frame([steps[0] - 0.5, steps[-1] + 0.5], [0.0, *(sum(v) for v in by_step.values())], log=False)
    parts = [_axes(frame, ticks)]
    width = max((frame.x(1.0) - frame.x(0.0)) * 0.86 * min(1.0, (steps[-1] - steps[0] + 1) / len(steps)), 0.4)
    width = min(width, 60.0)
    for step in steps:
        base = 0.0
        for index, value in enumerate(by_step[step]):
            top, bottom = frame.y(base + value), frame.y(base)
            x = frame.x(step) - width / 2
            parts.append(
                f'<rect class="fill-{index}" x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" '
                f'height="{max(bottom - top, 0.0):.2f}"/>'
            )
            base += value
    total = Series(name="total", points=[(step, sum(by_step[step])) for step in steps])
    hover = _hover([*series, total], frame, lambda value: f"{value:.2f} s")
    return _card(title, [one.name for one in series], _svg(title, parts, hover))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One named histogram."""

    name: str
    counts: Sequence[int]


def log_histogram(title: str, edges: Sequence[float], bars: Sequence[Bars]) -> str:
    """A card with one outline a histogram, as fractions of its counts.

    Args:
        edges: log10 of the bins' edges, one more than each histogram has counts.
    """
    filled = [n for n in range(len(edges) - 1) if any(one.counts[n] for one in bars)]
    if not filled:
        return _card(title, [one.name for one in bars], '<p class="empty">nothing recorded</p>')
    first, last = filled[0], filled[-1] + 1
    shares = [[count / sum(one.counts) for count in one.counts] for one in bars]
    ticks, frame = _frame([edges[first], edges[last]], [0.0, *(max(share) for share in shares)], log=False, least=0.0)
    parts = [_value_axis(frame, ticks)]
    decades = [tick for tick in range(math.ceil(frame.x_min), math.floor(frame.x_max) + 1)]
    for tick in decades[:: -(-len(decades) // 6) or 1]:
        anchor = "end" if tick == frame.x_max else "middle"
        parts.append(f'<text class="tick {anchor}" x="{frame.x(tick):.1f}" y="{_HEIGHT - 8}">1e{tick}</text>')
    for index, share in enumerate(shares):
        path = f"M{frame.x(edges[first]):.1f} {frame.y(0.0):.1f}"
        for n in range(first, last):
            path += f"V{frame.y(share[n]):.1f}H{frame.x(edges[n + 1]):.1f}"
        parts.append(f'<path class="line-{index}" d="{path}V{frame.y(0.0):.1f}"/>')
    points = [
        [
            round(frame.x((edges[n] + edges[n + 1]) / 2), 1),
            f"1e{edges[n]:g} to 1e{edges[n + 1]:g}",
            [[one.name, f"{share[n]:.2%}"] for one, share in zip(bars, shares, strict=True)],
        ]
        for n in range(first, last)
    ]
    return _card(title, [one.name for one in bars], _svg(title, parts, _attribute(points)))


def format_value(value: float) -> str:
    """A figure for people: four significant digits, scientific when very small or large."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _thinned(series: Series) -> Series:
    stride = -(-len(series.points) // _MAX_POINTS)
    if stride <= 1:
        return series
    bars = series.bars[::stride] if series.bars is not None else None
    return Series(name=series.name, points=series.points[::stride], bars=bars)


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def _frame(
    steps: Sequence[float], values: Sequence[float], log: bool, least: float | None = None
) -> tuple[list[float], _Frame]:
    low, high = min(values), max(values)
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        stride = -(-(last - first) // 6)
        ticks = [10.0**power for power in range(first, last + 1, stride)]
        return ticks, _Frame(min(steps), max(steps), 10.0**first, 10.0**last, True)
    if high - low < 1e-12 * max(abs(high), 1.0):  # one value: centre it on an axis of its own magnitude
        margin = abs(high) * 0.1 or 1.0
        low, high = (low if low == least else low - margin), high + margin
    step = _nice((high - low) / 4)
    first_tick, last_tick = math.floor(low / step), math.ceil(high / step)
    ticks = [n * step for n in range(first_tick, last_tick + 1)]
    return ticks, _Frame(min(steps), max(steps), ticks[0], ticks[-1], False)


def _nice(raw: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * 0.999)


def _axes(frame: _Frame, ticks: Sequence[float]) -> str:
    parts = [_value_axis(frame, ticks)]
    first, last = math.ceil(frame.x_min), math.floor(frame.x_max)
    step = max(1, round(_nice(max(last - first, 1) / 5)))
    for tick in range(-(-first // step) * step, last + 1, step):
        parts.append(f'<text class="tick middle" x="{frame.x(tick):.1f}" y="{_HEIGHT - 8}">{tick}</text>')
    return "".join(parts)


def _value_axis(frame: _Frame, ticks: Sequence[float]) -> str:
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        label = f"1e{round(math.log10(tick))}" if frame.log else f"{tick:.6g}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{y + 4:.1f}">{label}</text>')
    return "".join(parts)


def _line(series: Series, frame: _Frame, index: int) -> str:
    path, pen_down, marks = [], False, []
    for number, (step, value) in enumerate(series.points):
        if not _drawable(value, frame.log):
            pen_down = False
            continue
        assert value is not None
        x, y = frame.x(step), frame.y(value)
        path.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = True
        if len(series.points) <= _MARKERS_UP_TO:
            marks.append(f'<circle class="dot-{index}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>')
        if series.bars is not None and (bounds := series.bars[number]) is not None:
            low, high = (frame.y(bound) for bound in bounds)
            marks.append(
                f'<path class="line-{index} bar" d="M{x:.1f} {low:.1f}V{high:.1f}'
                f'M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8"/>'
            )
    return f'<path class="line-{index}" d="{"".join(path)}"/>{"".join(marks)}'


def _hover(series: Sequence[Series], frame: _Frame, form: Callable[[float], str]) -> str:
    """JSON list of [x, step or heading, [[series name, text], ...]], as attribute text."""
    found: dict[int, list[list[str]]] = {}
    for one in series:
        for number, (step, value) in enumerate(one.points):
            if value is None or not math.isfinite(value):
                continue
            text = form(value)
            if one.bars is not None and (bounds := one.bars[number]) is not None:
                text += f" [{form(bounds[0])}, {form(bounds[1])}]"
            found.setdefault(step, []).append([one.name, text])
    return _attribute([[round(frame.x(step), 1), step, found[step]] for step in sorted(found)])


def _attribute(points: Sequence[Sequence[Any]]) -> str:
    return escape(json.dumps(points, separators=(",", ":")), quote=True)


def _svg(title: str, parts: Sequence[str], hover: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title, quote=True)}" '
        f'tabindex="0" data-points="{hover}">{"".join(parts)}'
        f'<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/></svg>'
    )


def _card(title: str, names: Sequence[str], body: str) -> str:
    legend = ""
    if len(names) > 1:
        keys = "".join(f'<span><i class="key-{index}"></i>{escape(name)}</span>' for index, name in enumerate(names))
        legend = f'<p class="legend">{keys}</p>'
    return f'<figure class="card"><figcaption>{escape(title)}</figcaption>{legend}{body}</figure>'
