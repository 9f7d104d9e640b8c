"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from sparkrl.planning.plan import USABLE, Plan

_NUM_LAYOUTS = 8


def render(plan: Plan, console: Console) -> None:
    """Print a plan."""
    facts, total = plan.facts, sum(plan.parameters.values())
    tables = plan.parameters.get("embedding", 0) + plan.parameters.get("head", 0)
    console.print(f"[bold]{plan.recipe}[/bold]: {facts.source}")
    parts = _table("Parameters", "part", "parameters")
    for name, number in sorted(plan.parameters.items(), key=lambda item: -item[1]):
        parts.add_row(name, f"{number:,}")
    parts.add_row("all", f"{total:,}  ({_count(total)}; {_count(total - tables)} without embedding and head)")
    parts.add_row("active per token", f"{plan.active_parameters:,}  ({_count(plan.active_parameters)})")
    parts.add_row("checkpoint on disk", size(plan.checkpoint_bytes))
    console.print(parts)

    layout = plan.chosen.layout
    shape = f"{layout.num_replicas} x TP {layout.tensor_parallel}"
    console.print(_bytes_table(f"Server, each GPU ({shape})", plan.server, plan.usable_bytes))
    console.print(_bytes_table(f"Trainer, each rank (FSDP {layout.num_ranks})", plan.trainer, plan.usable_bytes))

    kv = plan.kv
    rest = _table("KV cache, adapter, routes", "what", "value")
    rest.add_row(
        f"KV of one sequence of {kv['context_tokens']:,} tokens, on each GPU",
        f"{size(kv['full_layers_bytes_per_sequence'])} in {facts.full_layers} full layers + "
        f"{size(kv['sliding_layers_bytes_per_sequence'])} in {facts.sliding_layers} sliding layers",
    )
    rest.add_row(
        f"KV for {kv['concurrency']} such sequences at once",
        f"{size(kv['needed_bytes'])}; {size(kv['given_bytes'])} given hold {kv['longest_sequences_held']}",
    )
    rest.add_row(
        "KV over all layers full",
        f"{kv['share_of_all_full_at_context']:.2f} at this context, {kv['share_of_all_full_at_1m']:.2f} at 1M tokens",
    )
    rest.add_row("adapter", f"{plan.adapter['parameters']:,} parameters ({_count(plan.adapter['parameters'])})")
    rest.add_row("adapter bytes per swap (float32)", size(plan.adapter["bytes_per_swap"]))
    rest.add_row("checkpoint of adapter and AdamW", size(plan.adapter["checkpoint_bytes"]))
    rest.add_row("routes", f"{plan.replay['bytes_per_token']:,} bytes a token")
    rest.add_row("routes of one step, at most", size(plan.replay["bytes_per_step_at_most"]))
    console.print(rest)

    if plan.layouts:
        layouts = _table(
            "Layouts of the same GPUs", "server", "trainer", "server GPU", "trainer GPU", "fits", "runs here"
        )
        for fit in plan.layouts[:_NUM_LAYOUTS]:
            kind = "TP+EP" if fit.layout.expert_parallel else "TP"
            name = f"{fit.layout.num_replicas} x {kind} {fit.layout.tensor_parallel}"
            mark = " <- chosen" if fit.layout == layout else ""
            layouts.add_row(
                name + mark,
                f"FSDP {fit.layout.num_ranks}",
                size(fit.server_bytes),
                size(fit.trainer_bytes),
                "yes" if fit.fits else "no",
                fit.runs,
            )
        num_fitting = sum(bool(fit.fits) for fit in plan.layouts)
        console.print(layouts)
        console.print(f"{num_fitting} of {len(plan.layouts)} layouts fit.")
    verdict = {
        True: "[green]fits[/green]",
        False: "[red]does not fit[/red]",
        None: "not judged, `cluster.gpu_memory_gb` is 0",
    }
    console.print(f"Plan: {verdict[plan.chosen.fits]}. Binding: {plan.chosen.binds}.")


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits, powers of ten as on a data sheet."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=False)
    for column in columns:
        table.add_column(column)
    return table


def _bytes_table(title: str, parts: Mapping[str, int], usable: int | None) -> Table:
    table = _table(title, "what", "bytes")
    for name, value in parts.items():
        table.add_row(name, size(value))
    total = sum(parts.values())
    table.add_row("all", size(total))
    if usable is not None:
        table.add_row(f"usable ({USABLE:.0%} of the GPU)", size(usable))
    return table
