"""A page of HTML that a notebook displays in a frame, without requests, and that can be written as one file."""

from html import escape
from pathlib import Path

from .atomic import check_writable, write_text


class Framed:
    """An HTML page. Jupyter, Colab, VS Code and marimo display it in a sandbox, in which its own scripts run."""

    title = "handgrad"
    sandbox = "allow-scripts"

    def __init__(self, html: str, height: int):
        self.html, self.height = html, height

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.html)}" title="{escape(self.title)}" sandbox="{self.sandbox}"'
            f' style="width:100%;height:{self.height}px;border:1px solid #8888"></iframe>'
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self.html.encode()):,} bytes: display it in a notebook, or .save('page.html')"

    def save(self, path: str | Path) -> None:
        """Write the page as one file that needs no server."""
        check_writable(Path(path))
        write_text(Path(path), self.html)
