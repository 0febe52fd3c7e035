"""A plan as tables and as JSON."""

import json
from typing import Any

from rich import box
from rich.table import Table

from ..formatting import duration, flop, percent, plural, size
from ..plan.estimate import Plan
from ..plan.packing import unpacked_kinds
from ..plan.parameters import parameters, times
from ..plan.timing import Forecast


def to_json(plan: Plan) -> str:
    c = plan.config
    rows = [
        {"layer": p.layer, "symbol": p.symbol, "name": p.name, "shape": p.shape, "count": p.count,
         "times": times(c, p)}
        for p in parameters(c)
    ]  # fmt: skip
    plain = {k: v for k, v in vars(plan).items() if k not in ("config", "ranks", "kinds", "mixed")}
    plain["precision"] = plan.precision
    plain["packed"] = sorted(set(plan.kinds.values()))
    config = {**vars(c), "rope_scaling": c.rope_scaling._asdict()}
    return json.dumps({"config": config, **plain, "bytes_peak": plan.bytes_peak, "parameters": rows}, indent=1)


def tables(plan: Plan, forecast: Forecast, name: str, width: int) -> list[Table]:
    """Two tables, at most `width` columns wide: the parameters of the model, and the cost of a step."""
    return [_parameters(plan, name, width), step_table(plan, forecast, width)]


def _parameters(plan: Plan, name: str, width: int) -> Table:
    c = plan.config
    table = Table(box=box.SIMPLE_HEAD, title=f"[bold]Parameters of {name}", title_justify="left", pad_edge=False)
    wide = width >= 60
    for column in ("layer", "symbol"):
        table.add_column(column, no_wrap=wide)
    named = width >= 88  # a narrow terminal has no room for names
    if named:
        table.add_column("name in the file", no_wrap=True)
    table.add_column("shape", justify="right", no_wrap=wide)
    table.add_column("parameters", justify="right", min_width=13 if wide else 9, overflow="fold")
    listed = parameters(c)
    totals = {
        layer: sum(p.count for p in listed if p.layer == layer) for layer in dict.fromkeys(p.layer for p in listed)
    }
    totals.setdefault("logits", 0)
    between = [""] * (3 if named else 2)
    for layer, subtotal in totals.items():
        for p in listed:
            if p.layer == layer:
                shape = " × ".join(f"{n:,}" for n in p.shape)
                table.add_row(layer, p.symbol, *([p.name] if named else []), shape, f"{p.count:,}")
        if layer == "logits" and c.tied:
            table.add_row(layer, "w_11", *([f"tied to {c.table.names['embed']}.weight"] if named else []), "tied", "0")
        label = f"one {layer}" if layer.endswith("block") else layer
        table.add_row(f"[bold]{label}", *between, f"[bold]{subtotal:,}", end_section=True)
    if c.n_blocks > 1:
        table.add_row(f"[bold]{plural(c.n_blocks, 'block')}", *between, f"[bold]{plan.blocks:,}")
    table.add_row("[bold]total", *between, f"[bold]{plan.total:,}")
    if plan.active < plan.total:
        table.add_row("used by a token", *between, f"{plan.active:,}")
    return table


def step_table(plan: Plan, forecast: Forecast, width: int) -> Table:
    """FLOP, bytes and seconds of a step."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    how = "mixed precision" if plan.mixed else plan.dtype
    table.title = f"[bold]A step of {plan.batch:,} × {plural(plan.tokens, 'token')} in {how}"
    table.add_column("quantity", no_wrap=True, min_width=20)
    table.add_column("amount", justify="right", no_wrap=True, min_width=14)
    if width >= 72:
        table.add_column("meaning", style="dim")

    def row(*cells: str, **options: Any) -> None:
        table.add_row(*cells[: len(table.columns)], **options)

    what = f"rank {plan.rank} on {', '.join(plan.targets)}" if plan.rank else "all weights"
    row(
        "trainable parameters",
        f"{plan.trainable:,}",
        f"{percent(plan.trainable / plan.total)} of {plan.total:,}: {what}",
    )
    row("forward", flop(plan.forward_flop), "matrix products; a multiply-add counts as two")
    row("backward", flop(plan.backward_flop), "error signals and gradients", end_section=not plan.update_flop)
    if plan.update_flop:
        row(
            "update",
            flop(plan.update_flop),
            f"{plan.optimizer}'s matrix products, whatever the batch",
            end_section=True,
        )
    kinds = ", ".join(sorted(set(plan.kinds.values())))
    row("weights", size(plan.bytes_weights), f"matrices packed as {kinds}" if kinds else "")
    row("gradients", size(plan.bytes_gradients), "")
    wide = plan.dtype == "bfloat16"
    row("optimizer state", size(plan.bytes_optimizer), f"of {plan.optimizer}{', in float32' if wide else ''}")
    row("saved activations", size(plan.bytes_saved), "for the backward pass")
    unpacked = ", with its weights unpacked" if unpacked_kinds(plan.kinds, plan.mixed) else ""
    more = unpacked + (", or an update in float32" if wide else "")
    row("temporary buffers", size(plan.bytes_temporary), f"of the logits, or a block's backward pass{more}")
    row("[bold]tensors at the peak", f"[bold]{size(plan.bytes_peak)}", "sum of the above")
    row("process at the peak", size(plan.bytes_peak + forecast.runtime_bytes),
        f"including {size(forecast.runtime_bytes)} for Python and libraries", end_section=True)  # fmt: skip
    how = (
        "FLOP ÷ the rate of matrix products measured now: too large to time"
        if forecast.from_rate
        else "extrapolated from smaller steps timed now"
    )
    row("time of a step", duration(forecast.step_seconds), how, end_section=True)
    row("KV cache per token", size(plan.bytes_cache_per_token), "for generation")
    return table
