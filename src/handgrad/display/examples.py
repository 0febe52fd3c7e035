"""What fine-tuning data looks like, shown before training: how much there is, how long it is, what was left out and why,
and the first example with what is learned of it."""

import unicodedata
from dataclasses import dataclass
from itertools import accumulate, groupby, takewhile
from operator import itemgetter

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..formatting import percent
from ..text.examples import Examples, Summary
from ..text.tokenizer import Tokenizer

ORANGE = "dark_orange3"
EIGHTHS = " ▏▎▍▌▋▊▉"
BARS = 10  # at most, in the histogram
FEW = 30  # distinct examples: with fewer, validation means little
LINES = 12  # about, of the first example

Pieces = list[tuple[str, bool]]  # True: learned


def report(summary: Summary, examples: Examples, tokenizer: Tokenizer, width: int) -> list[RenderableType]:
    """The parts, one below the other, none wider than `width`."""
    return [
        _facts(summary),
        Text("\ntokens in an example", style="dim"),
        *_histogram(summary, width),
        *_warnings(summary),
        *_left_out(summary),
        Text("\nthe first example, and what is learned of it", style="dim"),
        Masked(_first(examples, tokenizer, width)),
    ]


@dataclass
class Masked:
    """What is learned is bold and orange; where there are no colours it stands between « and »."""

    pieces: Pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = console.color_system is not None and not console.no_color
        text = Text(overflow="fold")
        for piece, learned in self.pieces:
            if coloured:
                text.append(piece, style=f"bold {ORANGE}" if learned else "dim")
            elif learned:
                line = piece.removesuffix("\n")  # the mark closes the line it belongs to
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
    if summary.distinct < summary.examples:
        equal = _count(summary.examples - summary.distinct, "example")
        table.add_row("distinct", f"{summary.distinct:,}", f"{equal} equal to an earlier one")
    table.add_row("tokens", f"{summary.tokens:,}", "")
    table.add_row("learned", f"{summary.targets:,}", f"{percent(summary.targets / summary.tokens)} of the tokens")
    table.add_row("mean length", f"{summary.tokens / summary.examples:,.1f}", "")
    table.add_row("longest", f"{len(summary.lengths) - 1:,}", f"the context is {summary.n_context:,}")
    return table


def _histogram(summary: Summary, width: int) -> list[Text]:
    """A bar for each range of lengths; the ranges are equally wide and their width is a round number."""
    shortest, longest = int(summary.lengths.nonzero()[0][0]), len(summary.lengths) - 1
    size = next(s for k in range(20) for s in (10**k, 2 * 10**k, 5 * 10**k) if longest // s - shortest // s < BARS)
    ranges = [(low * size, low * size + size - 1) for low in range(shortest // size, longest // size + 1)]
    counts = [int(summary.lengths[low : high + 1].sum()) for low, high in ranges]
    ends = [(max(low, shortest), min(high, longest)) for low, high in ranges]
    names = [f"{low:,}–{high:,}" if low < high else f"{low:,}" for low, high in ends]
    wide, digits = max(map(len, names)), len(f"{max(counts):,}")
    room = max(8, min(60, width - wide - digits - 3))
    lines = []
    for name, count in zip(names, counts, strict=True):
        line = Text(f"{name:>{wide}}  ", no_wrap=True)
        line.append(_bar(count / max(counts), room), style=ORANGE)
        lines.append(line.append(f" {count:,}" if count else "0"))
    return lines


def _bar(share: float, room: int) -> str:
    """Whole blocks and eighths; something is never drawn as nothing."""
    eighths = max(round(share * room * 8), 1 if share else 0)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _warnings(summary: Summary) -> list[Text]:
    """What makes a validation loss mean less than it seems to."""
    lines = []
    if summary.distinct < summary.examples:
        lines.append("Equal examples are kept on one side of the validation split.")
    if summary.distinct < min(FEW, summary.examples):
        lines.append(
            f"There are hardly any distinct examples, {summary.distinct:,} of {summary.examples:,}: a validation loss on so"
            " few says little."
        )
    if summary.shared:
        examples = _count(summary.shared, "example")
        lines.append(f"{examples} of --val-data also in --data: on these the validation loss says nothing.")
    return [Text(("\n" if i == 0 else "") + line, style="bold", overflow="fold") for i, line in enumerate(lines)]


def _left_out(summary: Summary) -> list[Text]:
    lines = []
    if summary.split:
        lines.append(f"{_count(summary.split, 'text')} longer than the context, divided into several examples")
    if summary.cut:
        examples, tokens = _count(summary.cut, "example"), _count(summary.cut_tokens, "token")
        lines.append(f"{examples} longer than the context, cut at the end: {tokens} lost")
    if summary.bad:
        lines.append(f"{_count(summary.bad, 'line')} left out, not usable (--skip-bad):")
        lines += [f"  {mistake}" for mistake in summary.mistakes]
    for reason, dropped in summary.dropped.items():
        first = f"{dropped.first.file}:{dropped.first.line}"
        lines.append(f"{dropped.count:,} left out, {reason}; the first is {first}")
    return [Text(("\n" if i == 0 else "") + line, overflow="fold") for i, line in enumerate(lines)]


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _first(examples: Examples, tokenizer: Tokenizer, width: int) -> Pieces:
    """The first example, with its middle left out if it would take more than about LINES lines."""
    ids, learn = examples.example(0)
    signs: Pieces = []
    for learned, run in groupby(zip(ids.tolist(), learn.tolist(), strict=True), key=itemgetter(1)):
        signs += [(_sign(c), learned) for c in tokenizer.decode([i for i, _ in run])]
    half = LINES * width // 2
    begin, end = _fitting(signs, half, width), _fitting(signs[::-1], half, width)
    left_out = len(signs) - begin - end
    if left_out <= 0:
        return _joined(signs)
    return [
        *_joined(signs[:begin]),
        (f"\n… {left_out:,} characters …\n", False),
        *_joined(signs[len(signs) - end :]),
    ]


def _fitting(signs: Pieces, room: int, width: int) -> int:
    """How many of the signs there is room for; a line that ends is half empty on average."""
    taken = accumulate(width // 2 if sign.endswith("\n") else len(sign) for sign, _ in signs)
    return sum(1 for _ in takewhile(lambda so_far: so_far <= room, taken))


def _joined(signs: Pieces) -> Pieces:
    return [("".join(sign for sign, _ in run), learned) for learned, run in groupby(signs, key=itemgetter(1))]


def _sign(c: str) -> str:
    """A control character by its sign, and what would change how the rest is shown by its number."""
    if c == "\n":
        return "⏎\n"
    if c == "\t":
        return "⇥\t"
    if c < " ":
        return chr(0x2400 + ord(c))
    # joiners hold letters and emoji together; they are harmless
    if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in "\u200c\u200d":
        return f"<U+{ord(c):04X}>"
    return c
