"""The objective of a traced sentence: from a request of the page, and in words."""

from ...errors import HandgradError
from ...model.passes.objective import TEXT_LOSS, LogitDifference, Objective, PositionLoss
from ..json_types.model import Objective as Described
from ..presentation.captions import quote
from .session import Session, TracedSentence

KINDS = ("sentence", "position", "difference")
Wanted = dict[str, int | str | None]  # what is to be differentiated, as a request says it


def objective_of(session: Session, text: str, version: int, wanted: Wanted) -> Objective:
    """The objective that a request means: {"kind": "sentence"}, {"kind": "position", "position": t} or {"kind":
    "difference", "position": t, "against": the word that could have come}. A token is an id or a text; the token of a
    difference is the most probable one unless it is given."""
    kind = wanted.get("kind", "sentence")
    if kind not in KINDS:
        raise HandgradError(f"unknown objective {str(kind)[:40]!r}: choose one of {', '.join(KINDS)}")
    if kind == "sentence":
        return TEXT_LOSS
    position = wanted.get("position")
    if type(position) is not int:
        raise HandgradError("the objective needs the position of a token, counted from 0")
    if kind == "position":
        return PositionLoss(position)
    if wanted.get("against") is None:
        raise HandgradError("a difference needs the word to compare with: against")
    against = token_id(session, wanted["against"])
    if wanted.get("token") is not None:
        return LogitDifference(position, token_id(session, wanted["token"]), against)
    logits = session.sentence(text, version).trace["a_12"]
    if not 0 <= position < len(logits):
        raise HandgradError(f"the sentence has {len(logits)} tokens: there is no position {position}")
    best = logits[position].topk(2).indices.tolist()
    return LogitDifference(position, next(id for id in best if id != against), against)


def token_id(session: Session, token: object) -> int:
    """The id of a token that is given as an id, or as a text whose first token is meant."""
    if type(token) is int:
        if not 0 <= token < session.model.config.n_vocab:
            raise HandgradError(f"token id {token} is outside the vocabulary of {session.model.config.n_vocab:,}")
        return token
    if not isinstance(token, str) or not token or len(token) > 200:
        raise HandgradError("a token is given as its id or as a text of at most 200 characters")
    ids = session.tokenizer.encode(token)
    if not ids:
        raise HandgradError(f"the tokenizer finds no token in {token!r}")
    return ids[0]


def describe(session: Session, sentence: TracedSentence) -> Described:
    """The objective as the page shows it, with its value."""
    o, text = sentence.objective, session.token_text
    found: Described = {
        "kind": "sentence", "position": None, "token": None, "against": None, "value": sentence.trace.loss,
        "label": "the mean loss of the sentence", "python": "hg.trace(model, tokens, targets)",
    }  # fmt: skip
    if isinstance(o, LogitDifference):
        found["kind"], found["position"] = "difference", o.position
        found["token"] = {"id": o.token, "word": text(o.token)}
        found["against"] = {"id": o.against, "word": text(o.against)}
        words = f"the logit of {quote(text(o.token))} minus that of {quote(text(o.against))}"
        found["label"] = f"{words}, {_place(session, sentence, o.position)}"
    elif isinstance(o, PositionLoss):
        found["kind"], found["position"] = "position", o.position
        target = text(int(sentence.targets[0, o.position]))
        found["label"] = f"the loss of {quote(target)}, {_place(session, sentence, o.position)}"
    if found["kind"] != "sentence" or session.model.config.router_losses:
        found["python"] = f"hg.trace(model, tokens, targets, objective=hg.{o})"
    return found


def _place(session: Session, sentence: TracedSentence, position: int) -> str:
    return f"after {quote(session.token_text(sentence.ids[position]))} (position {position + 1})"


def rows_after(sentence: TracedSentence) -> int:
    """The first row that the objective does not depend on, in a causal model."""
    position = getattr(sentence.objective, "position", None)
    return len(sentence.ids) - 1 if position is None else position + 1


def about_rows_after(sentence: TracedSentence) -> str:
    """Why the error signal of these rows is 0."""
    if sentence.objective == TEXT_LOSS:
        return "the last row is 0, because the last token has no target"
    return f"the rows after position {rows_after(sentence)} are 0: the objective does not depend on them"
