"""What the page is told about a look, as plain data: numbers as they are in the trace, pictures made small."""

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import HandgradError
from ..model.gpt import GPT
from ..ops import layernorm, linear
from . import words
from .pictures import picture, statistics
from .session import Look, Session
from .stations import ERRATA, Formula, Parameter, Station, mathml, source
from .steps import OPTIMIZERS

LARGE = 5_000_000  # parameters from which the proof is made only for what is looked at


def table(session: Session) -> dict[str, Any]:
    """What does not depend on the sentence: the model and its stations."""
    c = session.model.config
    trains = sum(p.numel() for p in session.model.parameters() if p.requires_grad)
    codes = sorted({name for station in session.stations for _, name in station.sources})
    used = sorted({id for station in session.stations for id in station.errata}, key=lambda id: int(id[1:]))
    return {
        "name": session.name, "note": session.note, "text": session.text, "most_tokens": session.most_tokens,
        "parameters": session.size, "trains": trains, "blocks": c.n_blocks, "heads": c.n_heads, "d": c.d_model,
        "vocabulary": c.n_vocab, "hidden": c.hidden_width, "optimizers": OPTIMIZERS, "lora": trains < session.size,
        "large": session.size > LARGE, "errata": {id: ERRATA[id] for id in used},
        "code": {name: source(name) for name in codes},
        "stations": [_in_table(station) for station in session.stations],
    }  # fmt: skip


def _in_table(station: Station) -> dict[str, Any]:
    def shown(formulas: tuple[Formula, ...]) -> list[dict[str, Any]]:
        """Formulas that share a line are single ones on the page, so that they can stand below each other."""
        parts = [(f.latex.split(r"\qquad"), f.equation) for f in formulas]
        return [
            {"math": [{"mathml": mathml(x), "latex": x.strip()} for x in line], "equation": equation}
            for line, equation in parts
        ]

    return {
        "id": station.id, "index": station.index, "block": station.block, "title": station.title,
        "words": station.words, "forward": shown(station.forward), "backward": shown(station.backward),
        "errata": station.errata, "sources": station.sources, "stream": station.stream,
        "leaves": [name.rpartition(".")[2] for name in station.leaves],
    }  # fmt: skip


# ── the whole ───────────────────────────────────────────────────────────────────────────────────────────────────────


def overview(session: Session, look: Look) -> dict[str, Any]:
    """The sentence, what flows through every station, and whom the loss blames."""
    t = look.trace
    labels = labels_of(session, look)
    y_pred = t["y_pred"]
    losses = [-math.log(max(y_pred[i, x].item(), 1e-45)) for i, x in enumerate(look.targets[0, :-1].tolist())]
    flows, rows = [], []
    for station in session.stations:
        a = t[station.a].norm(dim=1).tolist() if station.a and station.id != "loss" else None
        delta = _arriving(session, look, station)
        flows.append({"id": station.id, "a": a, "delta": None if delta is None else delta.norm(dim=1).tolist()})
        if delta is not None and station.index not in (0, 12):
            rows.append((_name(station), delta.norm(dim=1)))
    groups, sizes = _groups(session, look)
    return {
        "id": look.id, "text": look.text, "version": look.version, "steps": session.version(look.version).steps,
        "tokens": [{"id": id, "label": label} for id, label in zip(look.ids, labels, strict=True)],
        "loss": t.loss, "losses": losses, "flows": flows,
        "flow_words": words.about_flow(torch.stack([norm for _, norm in rows]), [name for name, _ in rows], labels),
        "groups": groups, "groups_words": words.about_groups(sizes),
    }  # fmt: skip


def _groups(session: Session, look: Look) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The length of every parameter's gradient, layer by layer."""
    groups: list[dict[str, Any]] = []
    sizes: dict[str, float] = {}
    for station in session.stations:
        layer = _layer(station)
        for parameter in station.parameters:
            grad = _gradient(look, station, parameter)
            if grad is None or (session.model.config.tied and station.id == "a_12" and parameter.symbol != "b_11"):
                continue
            norm = grad.norm().item()
            groups.append({"layer": layer, "station": station.id, "symbol": parameter.symbol, "norm": norm})
            sizes[f"{parameter.symbol} in {layer}"] = norm
    return groups, sizes


def _layer(station: Station) -> str:
    if station.block is not None:
        return f"block {station.block + 1}"
    return "embedding" if station.index <= 1 else "head"


def _name(station: Station) -> str:
    where = "" if station.block is None else f" of block {station.block + 1}"
    return f"Δ{_low(station.index)}{where}"


def _low(i: int) -> str:
    return "".join("₀₁₂₃₄₅₆₇₈₉"[int(c)] for c in str(i))


def labels_of(session: Session, look: Look) -> list[str]:
    return [session.word(id) for id in look.ids]


def _arriving(session: Session, look: Look, station: Station) -> Tensor | None:
    return look.trace[station.arrives] if station.arrives is not None else None


# ── one station ─────────────────────────────────────────────────────────────────────────────────────────────────────


def find_station(session: Session, id: str) -> Station:
    if id not in session.by_id:
        raise HandgradError(f"there is no station {id!r}: stations are a_0, a_1, blocks.0.a_2 … a_12, loss")
    return session.by_id[id]


def at_station(session: Session, look: Look, station: Station, limit: int = 256) -> dict[str, Any]:
    labels = labels_of(session, look)
    view: dict[str, Any] = {"id": station.id, "maps": [], "parameters": []}
    tensors = [("a", station.a), ("delta", station.arrives)]
    if station.id == "loss":
        tensors = [("a", "y_pred"), ("delta", "delta_12")]
        view["positions"] = _positions(session, look)
        targets = [session.word(int(i)) for i in look.targets[0, :-1]]
        chances = [row["probability"] for row in view["positions"] if row["target"] is not None]
        view["loss_words"] = words.about_loss(labels, targets, chances)
    for kind, name in tensors:
        if name is not None:
            x = look.trace[name]
            if kind == "delta":
                said = words.about_error(x, labels)
            elif station.index >= 12:
                said = words.about_scores(x, labels, session.word)
            else:
                said = words.about_activations(x, labels)
            view["maps"].append(_map(x, kind, name, station, said, limit))
    if station.id == "a_0":
        view |= _swaps(session, look, labels, limit, station)
    norms: dict[str, float] = {}
    sizes: dict[str, float] = {}
    with session.at(look.version) as model:
        for parameter in station.parameters:
            shown = _parameter(model, look, station, parameter, limit)
            view["parameters"].append(shown)
            sizes[parameter.symbol] = shown["norm"]
            if shown["grad_norm"] is not None:
                norms[parameter.symbol] = shown["grad_norm"]
    view["parameters_words"] = words.about_gradients(norms, sizes) if station.parameters else ""
    return view


def _map(x: Tensor, kind: str, name: str, station: Station, said: str, limit: int) -> dict[str, Any]:
    symbol = ("a" if kind == "a" else "Δ") + _low(station.index)
    if station.id == "loss":
        symbol = "y_pred" if kind == "a" else "Δ₁₂"
    return {
        "kind": kind, "name": name, "symbol": symbol, "shape": list(x.shape), "picture": picture(x, limit=limit),
        "statistics": statistics(x), "lengths": x.norm(dim=1).tolist(), "words": said,
    }  # fmt: skip


def _parameter(model: GPT, look: Look, station: Station, parameter: Parameter, limit: int) -> dict[str, Any]:
    whole = model.get_parameter(parameter.names[0])
    value = whole.data if parameter.columns is None else whole.data[..., slice(*parameter.columns)]
    grad = _gradient(look, station, parameter) if whole.requires_grad else None
    return {
        "symbol": parameter.symbol, "shape": list(value.shape), "frozen": not whole.requires_grad,
        "norm": value.norm().item(), "name": gradient_name(station, parameter),
        "grad_norm": None if grad is None else grad.norm().item(),
        "picture": None if grad is None else picture(grad, limit=limit // 2),
    }  # fmt: skip


def gradient_name(station: Station, parameter: Parameter) -> str:
    """What the trace calls a parameter's gradient."""
    symbol = parameter.symbol.split(" = ")[-1].removesuffix("ᵗ")
    return (f"blocks.{station.block}." if station.block is not None else "") + f"grad_{symbol}"


def _gradient(look: Look, station: Station, parameter: Parameter) -> Tensor | None:
    name = gradient_name(station, parameter)
    return look.trace.get(name)


def _swaps(session: Session, look: Look, labels: list[str], limit: int, station: Station) -> dict[str, Any]:
    """Δ_0 = Δ_1 w_tokᵗ: what another word in a token's place would do to the loss, to first order (Section 2)."""
    with session.at(look.version) as model, torch.no_grad():
        delta_0 = linear.backward(look.trace["blocks.0.delta_1"], model.transformer.wte.weight)
    delta_0 = delta_0[:, : session.tokenizer.n_vocab]
    rows: list[dict[str, Any]] = []
    for t, id in enumerate(look.ids):
        change = delta_0[t] - delta_0[t, id]
        best = torch.topk(-change, min(4, len(change))).indices.tolist()
        swaps = [{"word": session.word(i), "change": change[i].item()} for i in best if change[i] < 0]
        rows.append({"id": id, "swaps": swaps})
    told = [t for t in range(len(rows)) if rows[t]["swaps"]]
    said = "No other word would change the loss."
    if told:
        t = min(told, key=lambda t: rows[t]["swaps"][0]["change"])
        said = words.about_swaps(labels[t], rows[t]["swaps"][0]["word"], rows[t]["swaps"][0]["change"])
    made = _map(delta_0, "delta", "delta_0", station, said, limit)
    return {"maps": [made], "swaps": rows, "swaps_words": said}


def _positions(session: Session, look: Look, top: int = 5, bars: int = 6) -> list[dict[str, Any]]:
    """For every place: the target, the first choices, and Δ_12 where it is largest."""
    y_pred, delta = look.trace["y_pred"], look.trace["delta_12"]
    labels = labels_of(session, look)
    targets = look.targets[0].tolist()
    rows = []
    for t, target in enumerate(targets):
        best = torch.topk(y_pred[t], min(top, y_pred.shape[1]))
        first = int(best.indices[0])
        row: dict[str, Any] = {
            "token": labels[t], "target": None, "probability": None, "rank": None, "push": [], "words": "",
            "top": _chances(session, best),
        }  # fmt: skip
        if target >= 0:
            p = y_pred[t, target].item()
            strongest = torch.topk(delta[t].abs(), min(bars, y_pred.shape[1])).indices.tolist()
            row |= {
                "target": session.word(target), "probability": p, "rank": int((y_pred[t] > y_pred[t, target]).sum()) + 1,
                "push": [{"word": session.word(i), "delta": delta[t, i].item(), "target": i == target} for i in strongest],
                "words": words.about_push(
                    labels[t], session.word(target), p, session.word(first), best.values[0].item()
                ),
            }  # fmt: skip
        rows.append(row)
    return rows


# ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────


def at_head(session: Session, look: Look, block: int, head: int) -> dict[str, Any]:
    """One head: who looks at whom, and the error that goes back from each token to each other."""
    config = session.model.config
    if not 0 <= block < config.n_blocks or not 0 <= head < config.n_heads:
        raise HandgradError(f"there are {config.n_blocks} blocks of {config.n_heads} heads, counted from 0")
    t, here = look.trace, f"blocks.{block}."
    rho, raw, delta_3 = (_wide(t[here + name]) for name in ("rho", "delta_raw", "delta_3"))
    rho, raw = rho[head], raw[head]
    q, k, v = (_wide(t[here + letter][head]) for letter in "qkv")
    width = config.value_width
    with session.at(look.version) as model, torch.no_grad():
        w_q, w_k, w_v = _weights_of_heads(model, block)
    signal = delta_3[:, head * width : (head + 1) * width]
    value = linear.backward(rho.t() @ signal, w_v[head])  # (22)
    query, key = linear.backward(raw @ k, w_q[head]), linear.backward(raw.t() @ q, w_k[head])  # (30)
    # What token t sends to token s: ρ_ts Δ_t w_vᵗ + Δ_raw,ts q_t w_kᵗ. Of a sum of two vectors only lengths are wanted.
    along_v, along_k = linear.backward(signal, w_v[head]), linear.backward(q, w_k[head])
    both = (along_v * along_k).sum(1, keepdim=True)
    squares = rho**2 * along_v.square().sum(1, keepdim=True) + 2 * rho * raw * both
    sent = (squares + raw**2 * along_k.square().sum(1, keepdim=True)).clamp(min=0).sqrt()
    labels = labels_of(session, look)
    norms = {"value": value.norm().item(), "query": query.norm().item(), "key": key.norm().item()}
    signals = delta_3.view(len(delta_3), config.n_heads, width)
    maps = {"rho": rho, "delta_raw": raw, "sent": sent}
    return {
        "block": block, "head": head, "branches": norms, "arrives": signal.norm().item(),
        "joined": (value + query + key).norm().item(), "all_heads": t[f"{here}delta_2"].norm().item(),
        "heads": [
            {"arrives": signals[:, h].norm().item(), "own": t[f"{here}rho"][h].diagonal().mean().item(),
             "first": t[f"{here}rho"][h][1:, 0].mean().item()}
            for h in range(config.n_heads)
        ],
        "maps": {
            name: {"picture": picture(x, whole_range=name == "rho"), "name": here + name} for name, x in maps.items()
        },
        "vectors": {name: {"picture": picture(x), "name": here + name} for name, x in (("q", q), ("k", k), ("v", v))},
        "words": words.about_attention(rho, sent, labels),
        "branches_words": words.about_branches(norms["value"], norms["query"], norms["key"]),
    }  # fmt: skip


def _weights_of_heads(model: GPT, block: int) -> list[tuple[Tensor, ...]]:
    attn = model.blocks[block].attn
    widths = [attn.queries, attn.queries, attn.values]
    weight = _wide(attn.c_attn.effective_weight().detach())
    return [part.chunk(attn.n_heads, 1) for part in torch.split(weight, widths, 1)]


def _wide(x: Tensor) -> Tensor:
    """At least float32, to compute with."""
    return x.float() if x.dtype == torch.bfloat16 else x


# ── the lens ────────────────────────────────────────────────────────────────────────────────────────────────────────


def lens(session: Session, look: Look, station: Station, top: int = 5) -> dict[str, Any]:
    """Every row of the stream here, read through the last norm and the head: what the model would say already, and which
    words the correction −Δ pushes towards and away from. The push is the change of the logits along −Δ: the norm's own
    derivative, which is (40) with the gain on the other side, and then the head."""
    if not station.stream:
        raise HandgradError("the lens reads rows of the stream: embedding and skip connections")
    assert station.a is not None and station.arrives is not None
    a, delta = look.trace[station.a], look.trace[station.arrives]
    with session.at(look.version) as model, torch.no_grad():
        norm = model.transformer.ln_f
        a_11, saved = norm.forward(a)
        said = torch.softmax(model.lm_head.forward(a_11), 1)
        change = layernorm.backward(-delta, layernorm.normalized(saved), saved.inv_sigma, torch.ones_like(norm.weight))
        push = _without_bias(model, change * norm.weight)
    rows = []
    targets = look.targets[0].tolist()
    labels = labels_of(session, look)
    known = min(session.tokenizer.n_vocab, said.shape[1])
    for t, target in enumerate(targets):
        best = torch.topk(said[t, :known], min(top, known))
        first, chance = int(best.indices[0]), best.values[0].item()
        up, down = (torch.topk(sign * push[t, :known], min(top, known)) for sign in (1, -1))
        told = target >= 0
        rows.append({
            "says": _chances(session, best),
            "target": session.word(target) if told else None, "share": said[t, target].item() if told else None,
            "towards": _pushed(session, up, 1), "away": _pushed(session, down, -1),
            "words": words.about_lens(labels[t], session.word(first), chance, session.word(target) if told else None,
                                      said[t, target].item() if told else 0.0),
        })  # fmt: skip
    return {"station": station.id, "rows": rows}


def _without_bias(model: GPT, change: Tensor) -> Tensor:
    return linear.forward(change, model.lm_head.effective_weight(), None)


def _chances(session: Session, best: Any) -> list[dict[str, Any]]:
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"word": session.word(i), "p": p} for i, p in pairs]


def _pushed(session: Session, found: Any, sign: int) -> list[dict[str, Any]]:
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [{"word": session.word(i), "change": sign * x} for i, x in pairs if x > 0]


# ── single numbers ──────────────────────────────────────────────────────────────────────────────────────────────────


def matrix(session: Session, look: Look, name: str, head: int | None) -> Tensor:
    """A tensor of the trace as a matrix; of one with heads, one head."""
    if name == "delta_0":
        with session.at(look.version) as model, torch.no_grad():
            return linear.backward(look.trace["blocks.0.delta_1"], model.transformer.wte.weight)
    if name.endswith(".sent") or name not in look.trace:
        raise HandgradError(f"the trace has no matrix {name!r}")
    x = look.trace[name]
    if x.ndim == 3:
        if head is None or not 0 <= head < len(x):
            raise HandgradError(f"{name} has {len(x)} heads: say which")
        x = x[head]
    return x[None] if x.ndim == 1 else x


def slice_of(
    session: Session, look: Look, name: str, head: int | None, rows: tuple[int, int], columns: tuple[int, int]
) -> dict[str, Any]:
    """A part of a matrix, drawn anew: what zooming asks for."""
    x = matrix(session, look, name, head)
    for (low, high), size in ((rows, x.shape[0]), (columns, x.shape[1])):
        if not 0 <= low < high <= size:
            raise HandgradError(f"{name} is {x.shape[0]} × {x.shape[1]}; {low} to {high} is not a part of it")
    return picture(x, rows, columns)


def value_of(
    session: Session, look: Look, name: str, head: int | None, rows: tuple[int, int], columns: tuple[int, int]
) -> dict[str, Any]:
    """The exact value a cell shows: of the entries in it, the one furthest from 0, and where it is."""
    x = matrix(session, look, name, head)
    part = x[max(rows[0], 0) : rows[1], max(columns[0], 0) : columns[1]]
    if part.numel() == 0:
        raise HandgradError(f"{name} is {x.shape[0]} × {x.shape[1]}; there is nothing at this place")
    i, j = divmod(int(part.abs().argmax()), part.shape[1])
    return {"value": part[i, j].item(), "row": rows[0] + i, "column": columns[0] + j}
