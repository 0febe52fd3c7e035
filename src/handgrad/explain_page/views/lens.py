"""The data of the lens: what the residual stream at one station would predict, and where the error pushes it."""

import torch
from torch import Tensor

from ...errors import HandgradError
from ...model.gpt import GPT
from ...ops import linear
from ..follow.tensors import frozen
from ..json_types.station import Lens, LensRow, Pushed
from ..presentation import captions
from ..presentation.chances import chance, log_chances, predicted
from ..session.session import Session, TracedSentence
from ..stations.table import Station


@torch.no_grad()
def read_stream(model: GPT, a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Read rows of the residual stream through the last norm and the head: the logits of the next token, and how a
    step along −Δ changes the logits, to first order. That is −Δ through the derivative of the norm, which is its backward
    pass with the gain on the other side, and then through the head."""
    norm = model.final_norm
    a_11, saved = norm.forward(a)
    unit = frozen(norm)
    unit.weight.fill_(1 - norm.offset)
    change = unit.backward(-delta, norm.rebuild_output(saved)[0], saved) * norm.gain
    push = linear.forward(change, model.head.effective_weight(), None)
    logits = model.logit_map.forward(model.head.forward(a_11))
    return logits, model.logit_map.backward(push, logits.clone())


def lens(session: Session, sentence: TracedSentence, station: Station, *, top: int = 5) -> Lens:
    """Return for each row of the stream the tokens that the model would predict here, and those that −Δ makes more and
    less likely."""
    if not station.stream:
        raise HandgradError("the lens reads the residual stream only: choose the embedding or a skip connection")
    names = station.a[0], station.incoming[0]
    with session.model_at(sentence.version) as model:
        logits, push = read_stream(model, *(sentence.trace[name] for name in names))
    rows: list[LensRow] = []
    targets = sentence.targets[0].tolist()
    labels = session.labels(sentence)
    known = min(session.tokenizer.n_vocab, logits.shape[1])
    for t, target in enumerate(targets):
        log_p = log_chances(logits[t])
        best = predicted(session, log_p[:known], top)
        up, down = (torch.topk(sign * push[t, :known], min(top, known)) for sign in (1, -1))
        word = session.token_text(target) if target >= 0 else None
        share = chance(log_p[target]) if target >= 0 else None
        rows.append({
            "predictions": best, "target": word, "share": share,
            "towards": _pushed(session, up, 1), "away": _pushed(session, down, -1),
            "caption": captions.about_lens(labels[t], best[0]["word"], best[0]["p"], word, share or 0.0),
        })  # fmt: skip
    python = (
        "from handgrad.explain_page.views.lens import read_stream\n"
        f"logits, push = read_stream(model, trace[{names[0]!r}], trace[{names[1]!r}])"
    )
    return {"station": station.id, "rows": rows, "python": python}


def _pushed(session: Session, found: torch.return_types.topk, sign: int) -> list[Pushed]:
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [{"word": session.token_text(i), "change": sign * x} for i, x in pairs if x > 0]
