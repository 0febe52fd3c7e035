"""report.html of a run: one self-contained page with curves, samples and the configuration."""

import re
from html import escape
from math import log10
from typing import Any

from ..formatting import count, duration, loss, number, percent, plural, size
from ..ops.rope_scaling import UNSCALED, Scaling
from ..per_example import page
from ..web.document import document
from .loop import Sample
from .run import Run

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 240, 64, 16, 14, 30
COLORS = ("#c2570c", "#2563a8", "#4d7c3a", "#7a4fa3", "#a8324a", "#0f766e", "#8a6d1d", "#475569")
TREND = 3  # points from which on a curve is drawn; fewer are dots
Curve = list[tuple[float, float]]


def report(run: Run, examples: str = "") -> str:
    """The HTML page; `examples` is its part about examples."""
    records = run.records()
    steps = [r for r in records if "loss" in r]
    evaluations = [r for r in records if "val_loss" in r]
    settings = run.settings()
    charts = [
        ("Loss", {"training": _curve(steps, "loss"), "validation": _curve(evaluations, "val_loss")}, False),
        ("Balance loss of the routers", {"balance loss": _curve(steps, "balance_loss")}, False),
        ("z-loss of the routers", {"z-loss": _curve(steps, "z_loss")}, False),
        ("Learning rate", {"learning rate": _curve(steps, "lr")}, False),
        ("Gradient norm by layer (log scale)", _by_layer(steps), True),
        ("Throughput, tokens per second", {"tokens per second": _curve(steps, "tokens_per_second")}, False),
    ]
    body = [
        f"<h1>{escape(run.folder.name)}</h1>",
        f'<p class="lead">{_lead(steps, evaluations)}</p>',
        _facts(steps, evaluations, settings.get("shared_tokens", 0.0)),
    ]
    for title, curves, log in charts:
        drawn = {name: curve for name, curve in curves.items() if curve}
        if drawn:
            body.append(f"<h2>{escape(title)}</h2>{chart(drawn, log)}")
    body.append(examples)
    samples = [r for r in evaluations if r.get("sample")]
    if samples:
        body.append("<h2>Samples</h2>")
        every = max(1, len(samples) // 6)
        chosen = samples[::every]
        if chosen[-1] is not samples[-1]:
            chosen.append(samples[-1])
        body += [
            f"<p>after {plural(r['step'], 'step')}: prompt ▸ continuation</p>"
            f"<pre>{escape(Sample(r['sample'], r['prompt']).marked())}</pre>"
            for r in chosen
        ]
    options = {name: value for name, value in settings["training"].items() if name != "clock"}  # not an option
    for title, part in (("Configuration", options), ("Model", settings["model"])):
        rows = "".join(
            f"<tr><td>{escape(k)}</td><td>{escape(_setting(k, v))}</td></tr>" for k, v in part.items() if v is not None
        )
        body.append(f"<h2>{title}</h2><table>{rows}</table>")
    return document(run.folder.name, "".join(body), page.STYLE if examples else "")


def _curve(records: list[dict[str, Any]], key: str) -> Curve:
    return [(r["step"], r[key]) for r in records if key in r]


def _by_layer(steps: list[dict[str, Any]]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for r in steps:
        for layer, norm in r.get("grad_norms", {}).items():
            if norm > 0:
                curves.setdefault(_counted(layer), []).append((r["step"], norm))
    return curves


def _counted(layer: str) -> str:
    """A layer of the metrics, which count blocks from 0 as the tensors do, as every page names it: counted from 1."""
    return re.sub(r"\d+$", lambda found: str(int(found[0]) + 1), layer)


def _lead(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    if not steps:
        return "No step has been logged yet."
    text = f"{plural(steps[-1]['step'], 'step')} in {duration(steps[-1]['seconds'])}."
    if evaluations:
        trained = [r for r in evaluations if r["step"] > 0] or evaluations
        best = min(trained, key=lambda r: r["val_loss"])
        text += f" Best validation loss {loss(best['val_loss'])}, after {plural(best['step'], 'step')}."
        if evaluations[0]["step"] == 0 and evaluations[0]["val_loss"] < best["val_loss"]:
            text += f" The model was better before training: {loss(evaluations[0]['val_loss'])}."
    return text


def _facts(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], shared: float) -> str:
    """Figures in a row; `shared` is the share of the tokens that are common prefixes, computed once."""
    if not steps:
        return ""
    last = steps[-1]
    cells = [("training loss", loss(last["loss"]))]
    if evaluations:
        cells.append(("validation loss", loss(evaluations[-1]["val_loss"])))
    cells += [
        ("tokens per second", count(last["tokens"] / last["seconds"])),
        ("of matmul peak", percent(sum(r.get("mfu") or 0 for r in steps) / len(steps))),
        ("peak memory", size(last["memory"])),
        *([("tokens in common prefixes, computed once", percent(shared))] if shared else []),
    ]
    return '<div class="facts">' + "".join(f"<div><b>{v}</b><span>{k}</span></div>" for k, v in cells) + "</div>"


def chart(curves: dict[str, Curve], log: bool = False) -> str:
    """An SVG line chart over steps, with labels at both ends and the middle of each axis."""
    flat = [(x, log10(y) if log else y) for curve in curves.values() for x, y in curve]
    left, right = min(x for x, _ in flat), max(x for x, _ in flat)
    low, high = min(y for _, y in flat), max(y for _, y in flat)
    if high == low:
        low, high = low - abs(low) / 10 - 1e-12, high + abs(high) / 10 + 1e-12
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> str:
        px = LEFT + wide * ((x - left) / (right - left) if right > left else 0.5)
        return f"{px:.1f},{TOP + tall * (high - y) / (high - low):.1f}"

    parts = [f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{TOP + tall}H{WIDTH - RIGHT}"/>']
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        y = low + share * (high - low)
        label = number(10**y if log else y)
        parts.append(f'<text x="{LEFT - 8}" y="{TOP + tall * (1 - share) + 4:.0f}" text-anchor="end">{label}</text>')
        if right > left or share == 0.5:
            parts.append(
                f'<text x="{LEFT + wide * share:.0f}" y="{HEIGHT - 8}" text-anchor="{anchor}">'
                f"{count(left + share * (right - left))}</text>"
            )
    key = []
    for i, (name, curve) in enumerate(curves.items()):
        color = COLORS[i % len(COLORS)]
        points = [at(x, log10(y) if log else y) for x, y in curve]
        if len(curve) < TREND:
            places = (point.split(",") for point in points)
            parts += [f'<circle cx="{across}" cy="{down}" r="3" fill="{color}"/>' for across, down in places]
        else:
            line = " ".join(points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        key.append(f'<span><i style="background:{color}"></i>{escape(name)}</span>')
    label = escape(", ".join(curves))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f'<div class="key">{"".join(key)}</div>'
    )


def _setting(name: str, value: object) -> str:
    """A setting; of a scaled rotation the fields by name that are not the usual ones."""
    if name != "rope_scaling" or not isinstance(value, list):
        return _value(value)
    fields = zip(Scaling._fields, value, UNSCALED, strict=False)
    return ", ".join(f"{field} {_value(x)}" for field, x, usual in fields if x != usual) or "none"


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return ", ".join(" ".join(map(_value, pair)) for pair in value)  # the shape: names and values
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value) or "–"
    return number(value) if isinstance(value, float) else str(value)
