"""The page in a notebook: the exported file in an iframe, offline, in Jupyter, Colab, VS Code and marimo."""

from html import escape
from pathlib import Path

from ..files.atomic import check_writable, write_text
from ..inference.model_text import model_text
from ..model.gpt import GPT
from ..text.tokenizer import Tokenizer
from .export import export
from .session.session import Session

HEIGHT = 720  # pixels


class Page:
    """The page of one sentence. A notebook displays it; `save` writes it as one file."""

    def __init__(self, html: str, height: int = HEIGHT):
        self.html, self.height = html, height

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.html)}" title="handgrad explain" sandbox="allow-scripts allow-downloads"'
            f' style="width:100%;height:{self.height}px;border:1px solid #8888"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page of {len(self.html.encode()):,} bytes: display it in a notebook, or .save('page.html')"

    def save(self, path: str | Path) -> None:
        """Write the page as one file that needs no server."""
        check_writable(Path(path))
        write_text(Path(path), self.html)


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
