"""A self-contained HTML page and what stands on it. Everything that came from a model or a data set is escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def page(*, title: str, subtitle: str, body: str) -> str:
    """The whole page; needs no network and runs no script but its own."""
    fields = {
        "title": escape(title),
        "subtitle": escape(subtitle),
        "css": _asset("report.css"),
        "js": _asset("report.js"),
        "body": body,
    }
    # One pass over the template: a response that holds a placeholder is never expanded.
    return _PLACEHOLDER.sub(lambda match: fields[match[1]], _asset("report.html"))


def section(heading: str, body: str) -> str:
    """A part of the page with a heading."""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>\n"


def tile(label: str, value: str, note: str, *, wide: bool = False, style: str = "") -> str:
    """A headline figure; `style` is `good`, `bad` or nothing."""
    return (
        f'<div class="tile{" wide" if wide else ""}"><b>{escape(label)}</b>'
        f'<strong class="{style}">{escape(value)}</strong><span>{escape(note)}</span></div>'
    )


def tiles(parts: Sequence[str]) -> str:
    """A row of them."""
    return f'<section class="tiles">{"".join(parts)}</section>\n'


def grid_table(heads: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> str:
    """A table that scrolls sideways where the page is narrow.

    Args:
        rows: of each cell its text and its style (`good`, `bad` or nothing).
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(_cell(text, style) for text, style in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="grid-table"><tr>{head}</tr>{body}</table></div>'


def sample_cards(samples: Sequence[Mapping[str, Any]]) -> str:
    """Prompt, response and verdict of each."""
    return f'<div class="samples">{"".join(_card(sample) for sample in samples)}</div>'


def facts(title: str, values: Mapping[str, Any]) -> str:
    """Names and values; one level of nesting is flattened."""
    if not values:
        return ""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = value.items() if isinstance(value, dict) else ()
        flat.update({f"{name}: {key}": item for key, item in nested} if nested else {name: value})
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in flat.items()
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"


def how_it_was_run(tables: Sequence[str], config: str) -> str:
    """The last section: tables of facts and the configuration."""
    body = (
        f'<div class="facts">{"".join(tables)}</div>\n'
        f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>"
    )
    return section("How it was run", body)


def _cell(text: str, style: str) -> str:
    return f'<td class="{style}">{escape(text)}</td>' if style else f"<td>{escape(text)}</td>"


def _card(sample: Mapping[str, Any]) -> str:
    verdict, style = ("right", "good") if sample["correct"] else ("wrong", "bad")
    read = "none" if sample["extracted"] is None else sample["extracted"]
    head = f"answer {sample['answer']}, read {read}, {sample['tokens']} tokens, ended by {sample['finish_reason']}"
    return (
        f'<div class="sample"><p class="head"><b class="{style}">{verdict}</b>{escape(head)}</p>'
        f'<pre class="prompt">{escape(sample["prompt"])}</pre><pre>{escape(sample["response"])}</pre></div>'
    )


def _asset(name: str) -> str:
    return files("sparkrl.telemetry").joinpath(name).read_text(encoding="utf-8")
