"""The page in a notebook: the exported file in an iframe, offline, in Jupyter, Colab, VS Code and marimo."""

from pathlib import Path

from ..files.framed import Framed
from ..inference.model_text import model_text
from ..model.gpt import GPT
from ..text.tokenizer import Tokenizer
from .export import export
from .session.session import Session

HEIGHT = 720  # pixels


class Page(Framed):
    """The page of one sentence. A notebook displays it; `save` writes it as one file."""

    title = "handgrad explain"
    sandbox = "allow-scripts allow-downloads"

    def __init__(self, html: str, height: int = HEIGHT):
        super().__init__(html, height)


def explain(model: GPT, text: str, *, tokenizer: Tokenizer | None = None, height: int = HEIGHT) -> Page:
    """Run the sentence forward and backward, check every layer, and return the page of `handgrad explain` for it. The
    tokenizer is the model's own unless another is given."""
    training = model.training
    name = Path(model.source).name if model.source else "model"
    session = Session(model, model_text(model, tokenizer).tokenizer, name, "from Python", text)
    try:
        return Page(export(session, text), height)
    finally:
        with session.model_at(0):  # the steps that the page shows were taken on other versions of the weights
            model.train(training)
