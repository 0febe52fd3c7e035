"""A chat in the terminal: answers wrapped between words while they arrive, and the words that an answer depended on."""

import sys
from typing import TextIO

from rich.cells import cell_len
from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ..inference.conversation import Why, WordScore

LISTED = 8  # words in the ranked list
BAR = 16  # columns of the longest bar
FAINTEST = 0.15  # strength below which a word has no color, as a share of the strongest
NAMES = {"user": "you", "assistant": "model", "system": "system"}
# what a terminal would execute instead of showing
_CONTROLS: dict[int, str | None] = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}
_CONTROLS[ord("\r")] = None


def visible(text: str) -> str:
    """Text with control characters escaped, line feeds and tabs excepted."""
    return text.translate(_CONTROLS)


class Wrapped:
    """Writes text that arrives in pieces and breaks lines between words. A word is held back until it is complete.
    Without a width the text is written as it comes."""

    def __init__(self, width: int | None, out: TextIO | None = None):
        self.width, self.out = width, out or sys.stdout
        self._column, self._space, self._word = 0, "", ""

    def write(self, piece: str) -> None:
        if self.width is None:
            self.out.write(piece)
        else:
            for c in visible(piece):
                self._add(c)
        self.out.flush()

    def end(self) -> None:
        """Write what was held back, and end the line."""
        self._flush()
        self.out.write("\n")
        self.out.flush()

    def _add(self, c: str) -> None:
        if not c.isspace():
            self._word += c
            if self.width is not None and cell_len(self._word) >= self.width:
                self._flush()  # no line can hold it
            return
        self._flush()
        if c == "\n":
            self.out.write("\n")
            self._column, self._space = 0, ""
        else:
            self._space += c

    def _flush(self) -> None:
        if not self._word:
            return
        size = cell_len(self._space) + cell_len(self._word)
        if self._space and self.width is not None and self._column + size > self.width:
            self.out.write("\n" + self._word)
            self._column = cell_len(self._word)
        else:
            self.out.write(self._space + self._word)
            self._column += size
        self._space = self._word = ""


def explanation(why: Why, own: bool) -> Group:
    """The conversation with its words shaded by strength, the strongest words, and the shares of what is not shown; `own`:
    the answer's words are shaded as well."""
    last = len(why.messages) - 1
    ranked = why.ranked(own)
    strongest = ranked[0].strength if ranked else 1.0
    lines = []
    for i, message in enumerate(why.messages[: last + own]):
        name = NAMES.get(message["role"], message["role"])
        words = [x for x in why.words if x.message == i]
        lines.append(Text.assemble((f"{name:>6} › ", "bold"), _shaded(message["content"].strip(), words, strongest)))
    table = Table(box=None, pad_edge=False, show_header=False)
    for x in ranked[:LISTED]:
        bar = "█" * max(1, round(BAR * x.strength / strongest))
        name = NAMES.get(why.messages[x.message]["role"], "")
        table.add_row(f"{x.strength:8.2f}", bar, Text(visible(x.word.text)), f"{x.score:+.2f}", Text(name, "dim"))
    before, answer, rest = why.shares()
    note = (
        f"log-probability {why.logprob:.2f}; it depends to {before:.0%} on the conversation, to {answer:.0%} on the answer's"
        f" own words, to {rest:.0%} on the chat template\nstrength: norm of the gradient; ±: the word made the answer more"
        " or less probable"
    )
    return Group(*lines, "", table, Text(note, "dim"))


def _shaded(content: str, words: list[WordScore], strongest: float) -> Text:
    """The message with a background behind each word that grows with its strength."""
    text = Text(visible(content))
    if visible(content) != content or not words:  # positions have moved
        return text
    start = words[0].word.start  # the message begins with it
    for x in words:
        share = min(1.0, x.strength / strongest)
        if share >= FAINTEST:
            at = x.word.start - start
            text.stylize(_shade(share), at, at + len(x.word.text))
    return text


def _shade(share: float) -> Style:
    """From pale yellow to deep orange, with black letters: readable on dark and light terminals."""
    red, green, blue = 255, round(245 - 105 * share), round(205 - 205 * share)
    return Style(color="black", bgcolor=f"#{red:02x}{green:02x}{blue:02x}", bold=share > 0.75)
