"""A step of the command `handgrad finetune` on one example, for examples of increasing length: time, and memory per further
token. Every length runs in its own process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from handgrad.model.precision import why_not_mixed

from .attempts import Attempts
from .bases import Base, long_base
from .finetune import IN_MIXED, PACKED, RECOMPUTE, Ours, Run, Work, memory_note, name_of
from .in_transformers import RANK
from .row import NAN, Row
from .sizes import Size

STEPS = 2  # the first is not timed


def cases(size: Size) -> dict[str, Callable[[Attempts], list[Row]]]:
    return {f"{n:,} tokens": partial(measure, n, size) for n in size.context}


def measure(n: int, size: Size, attempts: Attempts) -> list[Row]:
    base = long_base(size, max(size.context))
    if n > base.n_context:
        return []
    least = PACKED | RECOMPUTE if base.is_packed else RECOMPUTE
    contenders: dict[str, Run] = {"handgrad finetune": Ours(), name_of(least): Ours(least)}
    if "context" in size.mixed and why_not_mixed() is None:
        contenders[name_of(IN_MIXED)] = Ours(IN_MIXED)
    work = Work(f"{n:,} tokens", base, one_example(base, n), 1, STEPS, contenders)
    work.take_turns(size.process_rounds, attempts)
    note = (
        f"{base.name}, LoRA r={RANK} on all linear layers, loss on all tokens; best: of a step; {memory_note()};"
        " per token: growth since the length before"
    )
    rows = work.rows("context", note, attempts, size.measure_seconds)
    for row in rows:  # there is no reference: the contenders are both ours
        row.ratio = row.memory_ratio = row.above_torch_ratio = NAN
    return rows


def one_example(base: Base, n: int) -> Path:
    """Write a text of n tokens, or of a few less if no end of the text gives n."""
    start = base.text[: 8 * n]
    text = base.tokenizer.decode(base.tokenizer.encode(start)[:n])
    while True:
        path = base.write([{"text": text}], f"{n}")
        data = base.read(path)
        if data.per_epoch == 1 and data.size(0, 1)[0] <= n:
            return path
        text = text[:-1]


def with_growth(rows: list[Row]) -> list[Row]:
    """Fill in the memory of a further token."""
    before: dict[str, Row] = {}
    for row in rows:
        if row.scenario != "context" or not row.memory:
            continue
        last = before.get(row.contender)
        if last is not None:
            row.bytes_per_token = (row.memory - last.memory) / (row.tokens - last.tokens)
        before[row.contender] = row
    return rows
