"""Tables of examples for a terminal: those with outlying gradients, and those that pushed an answer."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..formatting import number, plural
from ..per_example.inputs import Shown
from ..per_example.outliers import FINDS, Outlying
from ..per_example.ranking import Influence

SHORT = 160  # characters of an example


def outliers_table(found: Outlying) -> RenderableType:
    """The examples that fit the others least; those far from the others are bold."""
    title = f"examples that fit the others least, of {found.total:,}:"
    listed = f", the furthest {len(found.rows)} of them listed" if found.far > len(found.rows) else ""
    title += f" {found.far:,} far from the others (bold){listed}" if found.far else " none is far from the others"
    table = _table("record", "score", "loss", "+", "norm", "×", "targets")
    for outlier, shown in found.rows:
        table.add_row(
            f"{shown.record:,}", f"{outlier.score:.1f}", f"{outlier.loss:.2f}", f"{outlier.excess:+.2f}",
            number(outlier.norm), f"{outlier.times:.1f}", f"{shown.targets:,}", _text(shown),
            style="bold" if outlier.outlying else "",
        )  # fmt: skip
    score = (
        "+: the loss above, ×: the gradient's norm relative to, what is typical for that number of targets. The score"
        " adds the two, in robust standard deviations."
    )
    return Group(Text(f"\n{title}"), table, Text(f"\n{score} {FINDS}", style="dim"))


def influence_tables(found: Influence, count: int, by: str = "score") -> RenderableType:
    """For each query the examples that helped and hindered it."""
    parts: list[RenderableType] = []
    for k in range(found.scores.shape[1]):
        parts.append(Text("\n") + _text(found.query(k)))
        for name, rows in (("helped", found.helped(k, count, by)), ("hindered", found.hindered(k, count, by))):
            table = _table("record", "score", "cosine")
            for i, score in rows:
                shown, cosine = found.example(i), float(found.cosines[i, k])
                table.add_row(f"{shown.record:,}", number(score), f"{cosine:+.2f}", _text(shown))
            parts += [Text(f"\n{name} by", style="bold"), table if rows else Text("none", style="dim")]
    of = plural(len(found.scores), "example")
    return Group(*parts, Text(f"\nscore: product of the gradients of {of} and of the answer", style="dim"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True, header_style="dim")
    table.add_column("example", overflow="fold", header_style="dim")
    return table


def _text(shown: Shown) -> Text:
    """Prompt and answer in one line."""
    text = Text(_short(shown.prompt) + (" → " if shown.prompt else ""), style="dim")
    return text.append(_short(shown.answer), style="not dim")


def _short(text: str) -> str:
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= SHORT else f"{text[: SHORT - 40].rstrip()} … {text[-30:].lstrip()}"
