"""Parts of HTML pages: examples with outlying gradients, and the examples that pushed each answer. No scripts: an answer
opens by <details>."""

from html import escape
from typing import Any

from ..formatting import number, plural
from .inputs import Shown
from .outliers import FINDS, Outlying
from .ranking import Influence

SHORT = 280  # characters shown of a text
STYLE = """
.examples th{font-weight:500;color:var(--soft);text-align:right;padding:2px 16px 6px 0}
.examples td{border-top:1px solid var(--line)}
.examples td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;color:var(--ink);padding:6px 16px 6px 0}
.examples td.text{padding:6px 0;width:100%;overflow-wrap:anywhere}.examples th:last-child{text-align:left}
.prompt{color:var(--soft);white-space:pre-wrap}.answer{white-space:pre-wrap}.prompt:empty{display:none}
.answer.pick{font-weight:500}tr.far td.n{font-weight:700}
details.query{background:var(--card);border-radius:8px;padding:8px 14px;margin:8px 0}
details.query>summary{cursor:pointer;overflow-wrap:anywhere}details.query[open]>summary{margin-bottom:8px}
details.query h3{font-size:.95rem;margin:14px 0 4px}summary:focus-visible{outline:2px solid currentColor;outline-offset:2px}
.bar{display:inline-block;height:8px;border-radius:2px;background:#2563a8;vertical-align:middle}.bar.against{background:#c2570c}
.none{color:var(--soft)}
@media(max-width:560px){.examples tr{display:flex;flex-wrap:wrap;border-top:1px solid var(--line)}.examples td{border:0}
.examples th,.examples td.n{flex:1 1 0;min-width:0;padding-right:10px}.examples th:last-child{display:none}
.examples td.text{flex:1 0 100%;padding-top:0}.bar{max-width:100%}}
"""


def outliers(found: Outlying) -> str:
    """A table of the examples that fit the others least."""
    cells = "".join(
        f'<tr{" class=far" if outlier.outlying else ""}><td class="n">{shown.record:,}</td>'
        f'<td class="n">{outlier.score:.1f}</td><td class="n">{outlier.loss:.2f}</td>'
        f'<td class="n">{outlier.excess:+.2f}</td>'
        f'<td class="n">{number(outlier.norm)}</td><td class="n">{outlier.times:.1f} ×</td>'
        f'<td class="n">{shown.targets:,}</td><td class="text">{_texts(shown)}</td></tr>'
        for outlier, shown in found.rows
    )
    return (
        "<h2>Examples that fit the others least</h2>"
        f"<p class=lead>{_summary(found)} Loss is the mean over the example’s targets, norm that of its gradient, over the"
        " weights that train; + and × compare them with what is typical for that number of targets. The score adds the two,"
        f" in robust standard deviations. {FINDS}</p>"
        '<table class="examples"><tr><th>record<th>score<th>loss<th>+<th>norm<th>×<th>targets<th>example</tr>'
        f"{cells}</table>"
    )


def _summary(found: Outlying) -> str:
    total, far = plural(found.total, "example"), found.far
    if not far:
        return f"None of {total} is far from the others. These are the furthest."
    listed = f" These are the furthest {len(found.rows)}." if far > len(found.rows) else ""
    return f"{far:,} of {total} {'is' if far == 1 else 'are'} far from the others: look at their texts.{listed}"


def influence(data: dict[str, Any]) -> str:
    """Answers that open to the examples that pushed them, from `as_data`."""
    answers = "".join(_query(query, data["by"]) for query in data["queries"])
    return (
        "<h2>What pushed these answers</h2>"
        f"<p class=lead>Open an answer to see which of {plural(data['examples'], 'training example')} pushed it, ranked by"
        f" {data['by']}. The score is the product of the example’s gradient and the answer’s: a small step on an example"
        " with a positive score makes the answer more probable. The cosine compares their directions alone.</p>"
        + answers
    )


def as_data(found: Influence, count: int = 8, by: str = "score") -> dict[str, Any]:
    """The part of an influence that a page shows, as JSON's types."""

    def listed(rows: list[tuple[int, float]], k: int) -> list[dict[str, Any]]:
        return [
            {"score": score, "cosine": float(found.cosines[i, k]), **found.example(i)._asdict()} for i, score in rows
        ]

    queries = [
        {
            **found.query(k)._asdict(),
            "helped": listed(found.helped(k, count, by), k),
            "hindered": listed(found.hindered(k, count, by), k),
        }
        for k in range(found.scores.shape[1])
    ]
    return {"examples": len(found.scores), "by": by, "queries": queries}


def _query(query: dict[str, Any], by: str) -> str:
    most = max((abs(row[by]) for row in query["helped"] + query["hindered"]), default=1.0)
    parts = [f"<h3>{name} by</h3>{_listed(query[name], by, most, name)}" for name in ("helped", "hindered")]
    return (
        f'<details class="query" name="answer"><summary><span class="prompt">{_short(query["prompt"])}</span> '
        f'<span class="answer pick">{_short(query["answer"])}</span></summary>{"".join(parts)}</details>'
    )


def _listed(rows: list[dict[str, Any]], by: str, most: float, name: str) -> str:
    if not rows:
        return '<p class="none">none</p>'
    against = " against" if name == "hindered" else ""
    cells = "".join(
        f'<tr><td class="n">{row["record"]:,}</td><td class="n"><span class="bar{against}"'
        f' style="width:{max(2, round(80 * abs(row[by]) / most))}px"></span></td>'
        f'<td class="n">{number(row["score"])}</td><td class="n">{row["cosine"]:+.2f}</td>'
        f'<td class="text">{_texts(Shown(row["record"], row["prompt"], row["answer"], row["targets"]))}</td></tr>'
        for row in rows
    )
    return f'<table class="examples"><tr><th>record<th><th>score<th>cosine<th>example</tr>{cells}</table>'


def _texts(shown: Shown) -> str:
    return f'<div class="prompt">{_short(shown.prompt)}</div><div class="answer">{_short(shown.answer)}</div>'


def _short(text: str) -> str:
    """Escaped; of a long text the beginning and the end."""
    if len(text) > SHORT:
        text = f"{text[: SHORT - 80].rstrip()} … {text[-70:].lstrip()}"
    return escape(text)
