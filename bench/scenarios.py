"""The scenarios, each a list of parts that run alone: a case and all contenders on it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from handgrad.model.precision import why_not_mixed
from handgrad.ops import linear

from . import SCENARIOS, attention, context, examples, finetune, generate, precision, shared
from . import explain as page
from .attempts import Attempts
from .cases import CASES
from .compete import compare, compete
from .machine import Machine
from .measure import take_turns, timed_rows
from .row import MIXED, Row
from .sizes import Size

Measure = Callable[[Attempts], list[Row]]
LAYERS = ("c_attn", "c_proj", "c_fc", "mlp.c_proj", "head")
PRODUCTS = ("a w", "Δ wᵗ", "aᵗ Δ")
TORCH_BFLOAT16, TORCH_FLOAT32 = "torch, bfloat16", "torch, float32"


@dataclass(frozen=True)
class Part:
    """A case of a scenario, which can be measured alone."""

    scenario: str
    case: str
    measure: Measure


def parts(scenario: str, size: Size) -> list[Part]:
    """The parts of a scenario, described before any model exists."""
    if scenario in CASES:
        found = {case.name: partial(compete, scenario, case, size) for case in CASES[scenario](size)}
        return [Part(scenario, name, run) for name, run in found.items()]
    return [Part(scenario, name, run) for name, run in OTHERS[scenario](size).items()]


# ── matrix products ─────────────────────────────────────────────────────────────────────────────────────────────────


def products(size: Size) -> dict[str, Measure]:
    found: dict[str, Measure] = {
        f"{layer}: {what}": partial(one_product, layer, what, size)
        for layer in LAYERS
        if layer in size.products
        for what in PRODUCTS
    }
    if why_not_mixed() is None:
        for what in PRODUCTS:
            found |= {f"c_fc: {what}, {n} rows": partial(product_types, what, n, size) for n in size.product_rows}
    return found


def one_product(layer: str, what: str, size: Size, attempts: Attempts) -> list[Row]:
    d, v = size.model.d_model, size.model.n_vocab
    f_in, f_out = dict(zip(LAYERS, ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d), (d, v)), strict=True))[layer]
    head = layer == "head"
    tokens = size.product_tokens // 2 if head else size.product_tokens
    a, delta = torch.randn(tokens, f_in), torch.randn(tokens, f_out)
    w = torch.randn(v, d).t() if head else torch.randn(f_in, f_out)
    last = (delta.t(), a) if head else (a.t(), delta)  # the head's gradient has the embedding's orientation
    x, y = dict(zip(PRODUCTS, ((a, w), (delta, w.t()), last), strict=True))[what]
    as_is, transposed = torch.empty(x.shape[0], y.shape[1]), torch.empty(y.shape[1], x.shape[0])
    runs: dict[str, Callable[[], object]] = {
        "as written": partial(torch.mm, x, y, out=as_is),
        "transposed": partial(torch.mm, y.t(), x.t(), out=transposed),
    }
    for name, run in runs.items():
        attempts(name, run)
    error = attempts("as written", lambda: compare(as_is, transposed.t(), what))
    timings = take_turns(runs, min(size.rounds, 8), attempts)
    errors = {"as written": error, "transposed": 0.0}
    return timed_rows("products", f"{layer}: {what}", tokens, runs, timings, "transposed", attempts, errors)


def product_types(what: str, rows: int, size: Size, attempts: Attempts) -> list[Row]:
    """A product of operands rounded to bfloat16 with a result in float32, against torch's with a result in bfloat16 and both
    in float32."""
    d = size.model.d_model
    a, w, delta = torch.randn(rows, d), torch.randn(d, 4 * d), torch.randn(rows, 4 * d)
    x, y = dict(zip(PRODUCTS, ((a, w), (delta, w.t()), (a.t(), delta)), strict=True))[what]
    low_x, low_y = x.bfloat16(), y.bfloat16()  # by rows or by columns, as x and y
    out, low = torch.empty(x.shape[0], y.shape[1]), torch.empty(x.shape[0], y.shape[1], dtype=torch.bfloat16)
    exact, rounded = torch.mm(x, y), torch.mm(low_x.float(), low_y.float())
    runs: dict[str, Callable[[], Tensor]] = {
        f"handgrad, {MIXED}": lambda: linear.product(x, y, out, rounded=True),
        TORCH_BFLOAT16: lambda: torch.mm(low_x, low_y, out=low),
        f"handgrad, bfloat16 operands, {MIXED}": lambda: linear.product(low_x, low_y, out),
        "handgrad, float32": lambda: linear.product(x, y, out),
        TORCH_FLOAT32: lambda: torch.mm(x, y, out=out),
    }

    def error_of(name: str) -> float:
        most = 1e-2 if name == TORCH_BFLOAT16 else 1e-5  # its result is rounded
        return compare(runs[name](), exact if name.endswith("float32") else rounded, name, most)

    errors = {name: attempts(name, partial(error_of, name)) for name in runs}
    timings = take_turns(runs, min(size.rounds, 8), attempts, in_a_row=3)
    case = f"c_fc: {what}, {rows} rows"
    found = timed_rows("products", case, rows, runs, timings, TORCH_BFLOAT16, attempts, errors)
    for row in found:
        row.gflops = 2 * rows * w.numel() / row.seconds / 1e9
        row.note = "rows: ratio against torch's bfloat16 product, whose result is rounded to bfloat16"
    return found


# ── the explain page ────────────────────────────────────────────────────────────────────────────────────────────────


def explain(size: Size) -> dict[str, Measure]:
    return {"the page": partial(explain_page, size)}


def explain_page(size: Size, attempts: Attempts) -> list[Row]:
    name = "handgrad explain"
    result = attempts(name, partial(page.measure, *size.explain))
    if result is None:
        return [Row("explain", "the page", name, problem=attempts.problems[name])]
    tokens, found = result
    rows = []
    for what, seconds, peak in found:
        row = Row("explain", what, name, tokens, seconds, seconds, memory=peak)
        row.note = f"{size.explain[0]}, random weights, {tokens} tokens; memory of the process"
        rows.append(row)
    return rows


OTHERS: dict[str, Callable[[Size], dict[str, Measure]]] = {
    "finetune": finetune.cases,
    "context": context.cases,
    "generate": generate.cases,
    "attention": attention.cases,
    "products": products,
    "shared": shared.cases,
    "precision": precision.cases,
    "examples": examples.cases,
    "explain": explain,
}
assert set(SCENARIOS) == {*CASES, *OTHERS}


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def completed(rows: list[Row]) -> list[Row]:
    """The rows of a scenario with the figures that compare its cases."""
    return shared.of_idle(context.with_growth(rows))


def as_json(rows: list[Row], machine: Machine, size: Size, command: str, made: dict[str, Any]) -> str:
    """All figures and what they depend on, `made` by machine.origin(); NaN is null."""
    figures = [{k: (None if v != v else v) for k, v in asdict(row).items()} for row in rows]
    state = asdict(replace(machine, started=None)) | {"busy": machine.busy}
    del state["started"]
    of = {"size": size.name, "model": size.base or size.label}
    found = {"command": command, **made, **of, "machine": state, "rows": figures}
    return json.dumps(found, indent=1, ensure_ascii=False)
