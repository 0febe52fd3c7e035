"""The summary of fine-tuning data shown before training: counts, lengths, what was skipped and why, and the first example
with its targets marked."""

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, groupby, takewhile
from operator import itemgetter

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..errors import option
from ..formatting import number, percent, plural
from ..text.examples import Examples, Summary
from ..text.tokenizer import Tokenizer

ORANGE = "dark_orange3"
EIGHTHS = " ▏▎▍▌▋▊▉"
MAX_BARS = 10  # of the histogram
FEW = 30  # distinct examples below which a validation loss means little
LINES = 12  # approximate length of the first example as shown

_FORMATS = {"chat": "in the model's chat template", "raw": "as they are, without a chat template"}

Pieces = list[tuple[str, bool]]  # text, and whether its tokens are targets


def report(
    summary: Summary, examples: Examples, tokenizer: Tokenizer, width: int, named: Callable[[str], str]
) -> list[RenderableType]:
    """The parts of the summary, top to bottom, each at most `width` columns wide. `named` writes the names of options."""
    return [
        _facts(summary),
        Text("\ntokens per example", style="dim"),
        *_histogram(summary, width),
        *_paragraph(map(named, _warnings(summary)), "bold"),
        *_paragraph(map(named, _skipped(summary))),
        Text("\nfirst example, with its targets marked", style="dim"),
        MarkedText(_first(examples, tokenizer, width)),
    ]


@dataclass
class MarkedText:
    """Targets in bold orange, or between « and » where there are no colors."""

    pieces: Pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        colored = console.color_system is not None and not console.no_color
        text = Text(overflow="fold")
        for piece, is_target in self.pieces:
            if colored:
                text.append(piece, style=f"bold {ORANGE}" if is_target else "dim")
            elif is_target:
                line = piece.removesuffix("\n")  # put » before the line break
                text.append(f"«{line}»{piece[len(line) :]}")
            else:
                text.append(piece)
        yield text


def _facts(summary: Summary) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    kinds = [f"{count:,} {kind}" for kind, count in summary.kinds.items() if count]
    table.add_row("examples", f"{summary.examples:,}", f"from lines: {', '.join(kinds)}")
    table.add_row("format", summary.format, _FORMATS[summary.format])
    if summary.distinct < summary.examples:
        repeated = plural(summary.examples - summary.distinct, "example")
        table.add_row("distinct", f"{summary.distinct:,}", f"{repeated} equal to an earlier one")
    table.add_row("tokens", f"{summary.tokens:,}", "")
    table.add_row("targets", f"{summary.targets:,}", f"{percent(summary.targets / summary.tokens)} of the tokens")
    table.add_row("mean length", number(summary.tokens / summary.examples), "")
    table.add_row("longest", f"{len(summary.lengths) - 1:,}", f"the context is {summary.n_context:,}")
    return table


def _histogram(summary: Summary, width: int) -> list[Text]:
    """One bar per range of lengths; all ranges have the same round width."""
    shortest, longest = int(summary.lengths.nonzero()[0][0]), len(summary.lengths) - 1
    size = next(s for k in range(20) for s in (10**k, 2 * 10**k, 5 * 10**k) if longest // s - shortest // s < MAX_BARS)
    ranges = [(low * size, low * size + size - 1) for low in range(shortest // size, longest // size + 1)]
    counts = [int(summary.lengths[low : high + 1].sum()) for low, high in ranges]
    ends = [(max(low, shortest), min(high, longest)) for low, high in ranges]
    names = [f"{low:,}–{high:,}" if low < high else f"{low:,}" for low, high in ends]
    name_width, digits = max(map(len, names)), len(f"{max(counts):,}")
    room = max(8, min(60, width - name_width - digits - 3))
    lines = []
    for name, count in zip(names, counts, strict=True):
        line = Text(f"{name:>{name_width}}  ", no_wrap=True)
        line.append(_bar(count / max(counts), room), style=ORANGE)
        lines.append(line.append(f" {count:,}" if count else "0"))
    return lines


def _bar(share: float, room: int) -> str:
    """A bar of full blocks and eighths, at least one eighth if `share` is not 0."""
    eighths = max(round(share * room * 8), 1 if share else 0)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _paragraph(lines: Iterable[str], style: str = "") -> list[Text]:
    return [Text(("\n" if i == 0 else "") + line, style=style, overflow="fold") for i, line in enumerate(lines)]


def _warnings(summary: Summary) -> list[str]:
    """Reasons to distrust the validation loss."""
    lines = []
    if summary.distinct < summary.examples:
        lines.append("Equal examples are all in the training split or all in the validation split.")
    if summary.distinct < min(FEW, summary.examples):
        lines.append(
            f"Only {summary.distinct:,} of {summary.examples:,} examples are distinct: too few for a meaningful validation"
            " loss."
        )
    if summary.shared:
        examples = plural(summary.shared, "example")
        lines.append(
            f"{examples} of {option('val_data')} are also in {option('data')}: the validation loss on them is"
            " meaningless."
        )
    return lines


def _skipped(summary: Summary) -> list[str]:
    lines = []
    if summary.split:
        lines.append(f"{plural(summary.split, 'text')} longer than the context, split into several examples")
    if summary.cut:
        examples, tokens = plural(summary.cut, "example"), plural(summary.cut_tokens, "token")
        lines.append(f"{examples} longer than the context, truncated: {tokens} dropped")
    if summary.bad:
        lines.append(f"{plural(summary.bad, 'invalid line')} skipped ({option('skip_bad', True)}):")
        lines += [f"  {mistake}" for mistake in summary.mistakes]
    for reason, dropped in summary.dropped.items():
        first = f"{dropped.first.file}:{dropped.first.line}"
        lines.append(f"{dropped.count:,} skipped, {reason}; first: {first}")
    return lines


def _first(examples: Examples, tokenizer: Tokenizer, width: int) -> Pieces:
    """The first example, shortened in the middle if it takes more than about LINES lines."""
    ids, targets = examples.example(0)
    characters: Pieces = []
    for is_target, run in groupby(zip(ids.tolist(), targets.tolist(), strict=True), key=itemgetter(1)):
        characters += [(_visible(c), is_target) for c in tokenizer.decode([i for i, _ in run])]
    half = LINES * width // 2
    begin, end = _fitting(characters, half, width), _fitting(characters[::-1], half, width)
    omitted = len(characters) - begin - end
    if omitted <= 0:
        return _joined(characters)
    return [
        *_joined(characters[:begin]),
        (f"\n… {omitted:,} characters …\n", False),
        *_joined(characters[len(characters) - end :]),
    ]


def _fitting(characters: Pieces, room: int, width: int) -> int:
    """Number of characters that fit into `room` columns; a line break counts as half a line."""
    taken = accumulate(width // 2 if c.endswith("\n") else len(c) for c, _ in characters)
    return sum(1 for _ in takewhile(lambda so_far: so_far <= room, taken))


def _joined(characters: Pieces) -> Pieces:
    return [("".join(c for c, _ in run), is_target) for is_target, run in groupby(characters, key=itemgetter(1))]


def _visible(c: str) -> str:
    """Make a control character visible, and write one that would change the display of others as its code point."""
    if c == "\n":
        return "⏎\n"
    if c == "\t":
        return "⇥\t"
    if c < " ":
        return chr(0x2400 + ord(c))
    # zero-width joiners are part of letters and emoji
    if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in "\u200c\u200d":
        return f"<U+{ord(c):04X}>"
    return c
