"""The lens of a feed-forward layer: the neurons with the largest blame, what they write, and what they should write.

Neuron j is row j of w_8: it adds a_8[t, j] times that row to the residual stream. To first order, its part of the objective
is Σ_t Δ_8[t, j] a_8[t, j]; that is its blame. −∂w_8[j] = −Σ_t a_8[t, j] Δ_9[t] is what the gradient would have it write
instead. Both rows are read as words of the vocabulary, through the last norm and the head. What makes the neuron fire
(a_7, or gate and up) is pushed token by token, by −Δ_7[t, j], or −Δ_gate and −Δ_up.
"""

import torch
from torch import Tensor

from ...errors import HandgradError
from ...model.gpt import GPT
from ...model.steps import signal
from ...ops import linear
from ..json_types.station import Neuron, NeuronInput, Neurons, NeuronWords
from ..presentation.captions import quote
from ..presentation.notation import percent, typeset
from ..session.session import Session, TracedSentence
from ..stations.network import letter_of

NEURONS, WORDS = 8, 6


def neurons(session: Session, sentence: TracedSentence, block: int, position: int | None = None) -> Neurons:
    """Return the neurons of a block with the largest blame, over all tokens or at one."""
    config, t = session.model.config, sentence.trace
    if not 0 <= block < config.n_blocks:
        raise HandgradError(f"there is no block {block}: blocks go from 0 to {config.n_blocks - 1}")
    if position is not None and not 0 <= position < len(sentence.ids):
        raise HandgradError(f"the sentence has {len(sentence.ids)} tokens: there is no position {position}")
    _, step, contract = session.network.neurons(block)
    a, signal_a, written = step.outputs[0], step.signals[0], contract.signals[0]
    a_8, delta_8, delta_9 = (t[name].double() for name in (a, signal_a, written))
    parts = a_8 * delta_8
    blame = parts.sum(0) if position is None else parts[position]
    chosen = blame.abs().argsort(descending=True, stable=True)[:NEURONS].tolist()  # equal ones by their numbers
    seen = slice(None) if position is None else slice(position, position + 1)
    with session.model_at(sentence.version) as model, torch.no_grad():
        ((_, layer, _),) = contract.products()
        rows = layer.effective_weight()[chosen].double()
        wanted = -(a_8[seen, chosen].t() @ delta_9[seen])
        writes, would = (_words(session, model, x) for x in (rows, wanted))
    labels = session.labels(sentence)
    found: list[Neuron] = []
    for i, j in enumerate(chosen):
        inputs: dict[str, NeuronInput] = {
            letter_of(name): {"values": t[name][:, j].tolist(), "push": (-t[signal(name)][:, j]).tolist()}
            for name in step.inputs
        }
        found.append({
            "neuron": j, "blame": blame[j].item(), "by_token": parts[:, j].tolist(), "values": a_8[:, j].tolist(),
            "inputs": inputs, "writes": writes[i], "would_write": would[i],
            "cosine": _cosine(rows[i], wanted[i]),
        })  # fmt: skip
    share = (blame[chosen].abs().sum() / blame.abs().sum()).item() if blame.any() else 0.0
    at = "" if position is None else f"[{position}]"
    return {
        "block": block, "position": position, "tokens": labels, "neurons": found,
        "count": len(blame), "share": share, "caption": _caption(found, labels, share, len(blame)),
        "python": f"(trace[{a!r}] * trace[{signal_a!r}]){at or '.sum(0)'}",
    }  # fmt: skip


def _words(session: Session, model: GPT, rows: Tensor) -> list[NeuronWords]:
    """The tokens that each row makes more and less likely, read through the last norm and the head."""
    known = min(session.tokenizer.n_vocab, model.config.n_vocab)
    norm, rows = model.final_norm, rows.to(model.dtype)
    scale = rows.norm(dim=1, keepdim=True).clamp(min=1e-30) / rows.shape[1] ** 0.5
    read = norm.forward(rows / scale)[0] - norm.forward(torch.zeros_like(rows))[0]  # without the bias; any length
    logits = model.logit_map.forward(linear.forward(read, model.head.effective_weight(), None))[:, :known]
    count = min(WORDS, known)
    found: list[NeuronWords] = []
    for row in logits.double():
        more, less = torch.topk(row, count), torch.topk(-row, count)
        found.append({
            "more": [{"word": session.token_text(int(i)), "logit": x.item()} for x, i in zip(*more, strict=True)],
            "less": [{"word": session.token_text(int(i)), "logit": -x.item()} for x, i in zip(*less, strict=True)],
        })  # fmt: skip
    return found


def _cosine(x: Tensor, y: Tensor) -> float:
    size = (x.norm() * y.norm()).item()
    return (x @ y).item() / size if size else 0.0


def _caption(found: list[Neuron], labels: list[str], share: float, count: int) -> str:
    first = found[0]
    if not first["blame"]:
        return "No error reaches the neurons of this block."
    t = max(range(len(labels)), key=lambda t: abs(first["by_token"][t]))
    verb = "raises" if first["blame"] > 0 else "lowers"
    return (
        f"{len(found)} of {count:,} neurons have {percent(share)} of the blame, summed without signs. Neuron"
        f" {first['neuron']} {verb} the objective most, by {typeset(abs(first['blame']))} to first order, mainly"
        f" at {quote(labels[t])} (position {t + 1}). It writes {quote(first['writes']['more'][0]['word'])}; the"
        f" gradient would have it write {quote(first['would_write']['more'][0]['word'])}."
    )
