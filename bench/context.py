"""A step of the command `handgrad finetune` on one example, for examples of increasing length: time, and memory per further
token. Every length runs in its own process."""

import tempfile
from pathlib import Path

from .bases import Base, base_of
from .cases import Row
from .finetune import PACKED, RECOMPUTE, Work, memory_note, options_of, ours
from .measure import Watch
from .peers import RANK
from .sizes import Size

STEPS = 2  # the first is not timed


def context(size: Size, watch: Watch) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        base = base_of(size, Path(scratch))
        least = PACKED + RECOMPUTE if base.is_packed else RECOMPUTE
        contenders = {"handgrad finetune": ours(), options_of(least): ours(*least)}
        note = (
            f"{base.name}, LoRA r={RANK} on all linear layers, loss on all tokens; best: of a step; {memory_note()};"
            " per token: growth since the length before"
        )
        rows: list[Row] = []
        for n in size.context:
            if n <= base.n_context:
                work = Work(f"{n:,} tokens", base, one_example(base, n), 1, STEPS, contenders)
                work.take_turns(size.process_rounds, watch)
                rows += work.rows("context", note)
        return with_growth(rows)


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
    """Fill in the memory of a further token. There is no reference: the contenders are both ours."""
    before: dict[str, Row] = {}
    for row in rows:
        row.ratio = row.memory_ratio = row.above_torch_ratio = float("nan")
        last = before.get(row.contender)
        if last is not None:
            row.bytes_per_token = (row.memory - last.memory) / (row.tokens - last.tokens)
        before[row.contender] = row
    return rows
