"""The scenarios. Each returns rows with contender, seconds, ratio, memory and prediction."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from handgrad.ops import attention

from . import SCENARIOS
from . import explain as page
from .cases import CASES, Row
from .compete import compare, compete
from .context import context
from .finetune import finetune
from .measure import Machine, Watch, take_turns
from .sizes import Size

LIBRARY_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_backward(size: Size, watch: Watch) -> list[Row]:
    rows = []
    heads = (size.model.n_heads, size.model.query_width)
    for n in size.attention:
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(n, 3, *heads, generator=generator)
        q, k, v = qkv.unbind(1)
        delta = torch.randn(n, *heads, generator=generator)
        spans = attention.spans_of((n,))
        _, saved = attention.forward(q, k, v, spans, True)
        grads = torch.empty(n, 3, *heads)
        theirs = [x.transpose(0, 1)[None] for x in (delta, q, k, v, saved.a)]
        lse = saved.lse.t()[None].contiguous()

        ours = partial(attention.backward, delta, saved, spans, True, grads.unbind(1))
        library = partial(LIBRARY_KERNEL, *theirs, lse, 0.0, True)
        ours()
        error = max(
            compare(mine, other[0].transpose(0, 1), f"attention at {n} tokens")
            for mine, other in zip(grads.unbind(1), library(), strict=True)
        )
        runs = {"handgrad": ours, "library kernel": library}
        timings = take_turns(runs, min(size.rounds, 40 if n <= 1024 else 12), watch)
        for name, timing in timings.items():
            ratio = timings["library kernel"].best / timing.best
            rows.append(Row("attention", f"{n} tokens", name, n, timing.best, timing.median, ratio))
            rows[-1].gradient_error = error if name == "handgrad" else 0.0
            rows[-1].note = f"{heads[0]} heads of {heads[1]}"
    return rows


def products(size: Size, watch: Watch) -> list[Row]:
    rows = []
    n, d, v = size.product_tokens, size.model.d_model, size.model.n_vocab
    for name, f_in, f_out in (
        ("c_attn", d, 3 * d),
        ("c_proj", d, d),
        ("c_fc", d, 4 * d),
        ("mlp.c_proj", 4 * d, d),
        ("head", d, v),
    ):
        if name not in size.products:
            continue
        tokens = n // 2 if name == "head" else n
        a, delta = torch.randn(tokens, f_in), torch.randn(tokens, f_out)
        w = torch.randn(v, d).t() if name == "head" else torch.randn(f_in, f_out)
        for what, x, y in (("a w", a, w), ("Δ wᵗ", delta, w.t()), ("aᵗ Δ", a.t(), delta)):
            if name == "head" and what == "aᵗ Δ":
                x, y = delta.t(), a  # the gradient has the embedding's orientation
            as_is, transposed = torch.empty(x.shape[0], y.shape[1]), torch.empty(y.shape[1], x.shape[0])
            runs = {
                "as written": partial(torch.mm, x, y, out=as_is),
                "transposed": partial(torch.mm, y.t(), x.t(), out=transposed),
            }
            for run in runs.values():
                run()
            error = compare(as_is, transposed.t(), f"{name}, {what}")
            timings = take_turns(runs, min(size.rounds, 8), watch)
            for how, timing in timings.items():
                ratio = timings["transposed"].best / timing.best
                rows.append(Row("products", f"{name}: {what}", how, tokens, timing.best, timing.median, ratio))
                rows[-1].gradient_error = error if how == "as written" else 0.0
    return rows


def explain(size: Size, watch: Watch) -> list[Row]:
    rows = []
    tokens, found = page.measure(*size.explain)
    for what, seconds, peak in found:
        row = Row("explain", what, "handgrad explain", tokens, seconds, seconds, memory=peak)
        row.note = f"{size.explain[0]}, random weights, {tokens} tokens; memory of the process"
        rows.append(row)
    return rows


SELF_CONTAINED: dict[str, Callable[[Size, Watch], list[Row]]] = {
    "finetune": finetune,
    "context": context,
    "attention": attention_backward,
    "products": products,
    "explain": explain,
}
assert set(SCENARIOS) == {*CASES, *SELF_CONTAINED}


def run(scenario: str, size: Size, watch: Watch) -> list[Row]:
    """Measure a scenario."""
    if scenario in SELF_CONTAINED:
        return SELF_CONTAINED[scenario](size, watch)
    return [row for case in CASES[scenario](size) for row in compete(scenario, case, size, watch)]


def as_json(rows: list[Row], machine: Machine, size: Size) -> str:
    """All figures and the state of the machine; NaN is null."""
    figures = [{k: (None if v != v else v) for k, v in asdict(row).items()} for row in rows]
    state = asdict(machine) | {"busy": machine.busy}
    return json.dumps(
        {"size": size.name, "model": size.base or size.label, "machine": state, "rows": figures}, indent=1
    )
