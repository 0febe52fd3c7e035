"""The data of the attribution view: which tokens a chosen word depends on, estimated twice and measured."""

import math

from ...errors import HandgradError
from ...inference.attribution import Attribution, attribute
from ...model.passes.objective import LogitDifference
from ..json_types.common import Word
from ..json_types.questions import Attribution as Shown
from ..json_types.questions import AttributionRow
from ..presentation.captions import quote
from ..presentation.chances import losses_of
from ..presentation.notation import percent, typeset
from ..session.objectives import token_id
from ..session.session import Session, TracedSentence

STEPS, MAX_STEPS = 32, 256
REMOVED = 24  # most tokens that are removed one at a time
CONTEXT = 3  # tokens before the word that is explained by default, if the sentence is long enough


def attribution(
    session: Session,
    sentence: TracedSentence,
    position: int | None = None,
    word: int | None = None,  # token ids
    against: int | None = None,
    steps: int = STEPS,
) -> Shown:
    """Explain the token after `position`: the target there unless another `word` is given; with `against`, its logit minus
    that token's. The default position is that of the objective, or of the target with the least probability, apart from the
    first ones; where the objective is a difference of logits, that difference is explained."""
    ids, targets, o = sentence.ids, sentence.targets[0].tolist(), sentence.objective
    if isinstance(o, LogitDifference) and position in (None, o.position) and word is None and against is None:
        position, word, against = o.position, o.token, o.against
    position = _chosen(session, sentence) if position is None else position
    if not 0 <= position < len(ids):
        raise HandgradError(f"the sentence has {len(ids)} tokens: there is no position {position}")
    if not 1 <= steps <= MAX_STEPS:
        raise HandgradError(f"steps must be between 1 and {MAX_STEPS}, not {steps}")
    if word is None and targets[position] < 0:
        raise HandgradError("the last token has no target: choose the word that could follow it")
    chosen = targets[position] if word is None else token_id(session, word)
    rival = None if against is None else token_id(session, against)
    prompt = [*ids[: position + 1], chosen]
    with session.model_at(sentence.version) as model:
        found = attribute(model, prompt, against=rival, steps=steps, remove=REMOVED)
    assert found.integrated is not None and found.removed is not None and found.gap is not None
    labels = [session.token_text(id) for id in prompt]
    rows: list[AttributionRow] = [
        {
            "id": prompt[t], "label": labels[t], "score": found.scores[t].item(), "integrated": found.integrated[t].item(),
            "removed": None if math.isnan(found.removed[t].item()) else found.removed[t].item(),
        }
        for t in range(position + 1)
    ]  # fmt: skip
    versus: Word | None = None if rival is None else {"id": rival, "word": session.token_text(rival)}
    more = "" if rival is None else f", against={rival}"
    return {
        "position": position, "word": {"id": chosen, "word": labels[-1]}, "against": versus,
        "value": found.logprob, "after": labels[-2], "steps": steps, "gap": found.gap,
        "total": sum(row["integrated"] for row in rows), "rows": rows,
        "caption": _caption(found, labels, rows, versus["word"] if versus else None),
        "python": f"hg.attribute(model, {prompt}{more}, steps={steps}, remove={REMOVED})",
    }  # fmt: skip


def _chosen(session: Session, sentence: TracedSentence) -> int:
    position = getattr(sentence.objective, "position", None)
    if position is not None:
        return int(position)
    losses = losses_of(session.logits(sentence)[:-1], sentence.targets[0, :-1])
    first = CONTEXT if len(losses) > 2 * CONTEXT else 0  # a word at the beginning depends on almost nothing
    return max(range(first, len(losses)), key=lambda t: losses[t])


def _caption(found: Attribution, labels: list[str], rows: list[AttributionRow], versus: str | None) -> str:
    measured = {t: row["removed"] for t, row in enumerate(rows) if row["removed"] is not None}
    word = quote(labels[-1])
    total = sum(row["integrated"] for row in rows)
    assert found.gap is not None
    text = f"Completeness gap of the integrated gradients: {typeset(found.gap)}"
    text += f", {percent(abs(found.gap) / abs(total))} of their sum." if total else "."
    if not measured:
        return f"No token can be removed here. {text}"
    t = max(measured, key=lambda t: abs(measured[t]))
    if not measured[t]:
        return f"Removing any one of the {len(measured)} tokens that were removed changes nothing. {text}"
    verb = "falls" if measured[t] > 0 else "rises"
    what = f"the logit of {word} minus that of {quote(versus)}" if versus else f"the log-probability of {word}"
    path = [t for t in measured if t]  # the baseline of integrated gradients keeps the first token
    score = sum(rows[t]["score"] * measured[t] > 0 for t in measured)
    integrated = sum(rows[t]["integrated"] * measured[t] > 0 for t in path)
    return (
        f"Of the {len(measured)} tokens that were removed one at a time, {quote(labels[t])} (position {t + 1}) matters"
        f" most: without it, {what} {verb} by {typeset(abs(measured[t]))}. The sign of gradient × input agrees with the"
        f" measurement for {score} of {len(measured)} tokens, that of integrated gradients, which keep the first token, for"
        f" {integrated} of {len(path)}. {text}"
    )
