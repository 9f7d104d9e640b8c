"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from sparkrl.planning.memory import Layout
from sparkrl.planning.plan import USABLE, Plan

_NUM_LAYOUTS = 8


def render(plan: Plan, console: Console) -> None:
    """Print a plan."""
    facts, total = plan.facts, sum(plan.parameters.values())
    tables = plan.parameters.get("embedding", 0) + plan.parameters.get("head", 0)
    console.print(f"[bold]{plan.recipe}[/bold]: {facts.source}", soft_wrap=True)
    parts = _table("Parameters", "part", "parameters")
    for name, number in sorted(plan.parameters.items(), key=lambda item: -item[1]):
        parts.add_row(name, f"{number:,}")
    parts.add_row("all", f"{total:,}  ({_count(total)}; {_count(total - tables)} without embedding and head)")
    parts.add_row("active per token", f"{plan.active_parameters:,}  ({_count(plan.active_parameters)})")
    parts.add_row("checkpoint on disk", size(plan.checkpoint_bytes))
    console.print(parts)

    layout = plan.chosen.layout
    console.print(_bytes_table(f"Server, each GPU ({shape_of(layout)})", plan.server, plan.usable_bytes))
    if layout.num_ranks:
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
    rest.add_row("adapter bytes per swap (`rollout.adapter_dtype`)", size(plan.adapter["bytes_per_swap"]))
    if layout.num_ranks:
        rest.add_row("checkpoint of adapter and AdamW", size(plan.adapter["checkpoint_bytes"]))
    rest.add_row("routes", f"{plan.replay['bytes_per_token']:,} bytes a token")
    once = f"one {'step' if layout.num_ranks else 'call'} of {plan.responses} responses"
    rest.add_row(f"routes of {once}, at most", size(plan.replay["bytes_per_step_at_most"]))
    console.print(rest)

    if layout.num_ranks > 1:
        console.print(
            f"{size(plan.trainer_floor_bytes)} of a trainer rank stay however many ranks there are: FSDP2 gathers "
            f"whole layers ({facts.num_layers} in turn, three at once at worst) and divides no sequence. More ranks "
            f"shrink the other {size(plan.chosen.trainer_bytes - plan.trainer_floor_bytes)} alone.",
            soft_wrap=True,
        )
    if plan.layouts:
        console.print(_layout_table(plan))
        num_fitting = sum(bool(fit.fits) for fit in plan.layouts)
        num_running = sum(bool(fit.fits) and fit.runs == "yes" for fit in plan.layouts)
        console.print(f"{num_fitting} of {len(plan.layouts)} layouts fit, {num_running} of these run here.")
    verdict = {
        True: "[green]fits[/green]",
        False: "[red]does not fit[/red]",
        None: "not judged, `cluster.gpu_memory_gb` is 0",
    }
    console.print(f"Plan: {verdict[plan.chosen.fits]}. Binding: {plan.chosen.binds}.", soft_wrap=True)


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


def _layout_table(plan: Plan) -> Table:
    """The best layouts, and the chosen one wherever it stands."""
    table = _table(
        "Layouts of the same GPUs", "servers", "trainer", "server GPU", "trainer GPU", "fits", "binds", "runs"
    )
    shown = list(plan.layouts[:_NUM_LAYOUTS])
    chosen = next((fit for fit in plan.layouts if fit.layout == plan.chosen.layout), None)
    if chosen is not None and chosen not in shown:
        shown.append(chosen)
    for fit in shown:
        table.add_row(
            shape_of(fit.layout) + (" <- chosen" if fit is chosen else ""),
            f"FSDP {fit.layout.num_ranks}" if fit.layout.num_ranks else "none",
            size(fit.server_bytes),
            size(fit.trainer_bytes) if fit.layout.num_ranks else "-",
            "yes" if fit.fits else "no",
            f"{fit.side}: {fit.largest}",
            fit.runs.partition(":")[0],
        )
    return table


def shape_of(layout: Layout) -> str:
    """`2 x TP 4 PP 2 EP`: servers, and how each is divided."""
    words = [f"{layout.num_replicas} x TP {layout.tensor_parallel}"]
    if layout.pipeline_parallel > 1:
        words.append(f"PP {layout.pipeline_parallel}")
    if layout.expert_parallel:
        words.append("EP")
    return " ".join(words)
