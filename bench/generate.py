"""Generating tokens, in float32 and with weights of 8 and 4 bits: the first token of a prompt (prefill), further tokens of a
batch (decode), a batch of uneven prompts, and the same tokens with and without a cache. `lowbit.py` adds single products.

A context of n tokens is that at the end: decoding 16 tokens in a context of 512 begins behind 496."""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

import handgrad as hg
from handgrad.model.storage.quantize import quantize

from . import generators, lowbit
from .attempts import Attempts
from .bases import Base, long_base
from .generators import Bound, Contender, Generator, Prompts, bytes_of_steps, check_same, llama, time_in_turns
from .measure import timed_rows
from .row import BOUND, Row
from .sizes import Size

PEER = "transformers"
FLOAT32 = "handgrad, float32"
UNCACHED = "handgrad, without a cache"
WITHOUT_CACHE = "with and without a cache"  # the end of the names of those cases
KINDS = {"float32": ("F32", None), "8 bits": ("Q8_0", 8), "4 bits": ("Q4_1", 4)}  # of llama.cpp, bits
SHORT_PROMPT = 4  # tokens
Makers = dict[str, Callable[[], Contender]]


def cases(size: Size) -> dict[str, Callable[[Attempts], list[Row]]]:
    found: dict[str, Callable[[Attempts], list[Row]]] = {}
    for kind in KINDS:
        for n in size.generate:
            found[f"prefill, {kind}, 1×{n}"] = partial(prefill, kind, n, size)
        for batch in size.generate_batches:
            for n in size.generate:
                found[f"decode, {kind}, {batch}×{n}"] = partial(decode, kind, batch, n, size)
    batch, longest = size.uneven
    found[f"{batch} uneven prompts of up to {longest} tokens"] = partial(uneven, size)
    for n in size.recomputed:
        found[f"{n} new tokens, {WITHOUT_CACHE}"] = partial(recomputed, n, size)
    return found | lowbit.cases(size)


# ── models and prompts ──────────────────────────────────────────────────────────────────────────────────────────────


def base_for(size: Size) -> Base:
    return long_base(size, max(size.generate))


@cache
def model_for(size: Size, bits: int | None = None) -> hg.GPT:
    if bits is None:
        return hg.load(base_for(size).path, dtype="float32")
    return quantize(copy.deepcopy(model_for(size)), bits)


@cache
def peer_for(size: Size) -> Any:
    folder = base_for(size).folder / "peer"
    hg.save(model_for(size), folder)
    return generators.peer(folder)


def prompts_for(size: Size, lengths: list[int]) -> Prompts:
    """Pieces of the text, as far apart as it allows."""
    base, most = base_for(size), max(lengths)
    ids = base.tokenizer.encode(base.text[: 8 * sum(lengths) + 64])
    apart = max(1, (len(ids) - most) // len(lengths))
    return [ids[i * apart : i * apart + n] for i, n in enumerate(lengths)]


# ── cases ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def prefill(kind: str, n: int, size: Size, attempts: Attempts) -> list[Row]:
    if n > base_for(size).n_context:
        return []
    prompts = prompts_for(size, [n])
    makers = contenders(kind, size, generators.ours, generators.theirs, prompts, 1)
    makers |= llama_for(kind, size, prompt=n)
    return compete(f"prefill, {kind}, 1×{n}", n, makers, size, attempts, prompts)


def decode(kind: str, batch: int, n: int, size: Size, attempts: Attempts) -> list[Row]:
    if n > base_for(size).n_context:
        return []
    new = size.new_tokens
    prompts = prompts_for(size, [n - new - 1] * batch)  # and the token that each of them gives
    makers = contenders(kind, size, generators.our_decoding, generators.their_decoding, prompts, new)
    if batch == 1:
        makers |= llama_for(kind, size, new=new, depth=n - new)
    makers[BOUND] = lambda: Bound(
        bytes_of_steps(model_for(size, KINDS[kind][1]), batch, n, new), size.numbers_in_memory
    )
    return compete(f"decode, {kind}, {batch}×{n}", batch * new, makers, size, attempts, prompts)


def uneven(size: Size, attempts: Attempts) -> list[Row]:
    batch, longest = size.uneven
    shortest = min(16, longest)
    lengths = [round(shortest * (longest / shortest) ** (i / (batch - 1))) for i in range(batch)]
    prompts, new = prompts_for(size, lengths), 4 * size.new_tokens
    makers = contenders("float32", size, generators.ours, generators.theirs, prompts, new)
    case = f"{batch} uneven prompts of up to {longest} tokens"
    return compete(case, batch * new, makers, size, attempts, prompts)


def recomputed(n: int, size: Size, attempts: Attempts) -> list[Row]:
    prompts = prompts_for(size, [SHORT_PROMPT])
    makers: Makers = {
        "handgrad": lambda: generators.ours(model_for(size), prompts, n),
        UNCACHED: lambda: generators.ours(model_for(size), prompts, n, cached=False),
    }
    return compete(f"{n} new tokens, {WITHOUT_CACHE}", n, makers, size, attempts, prompts, most_rounds=2)


def contenders(
    kind: str, size: Size, ours: Callable[..., Contender], theirs: Callable[..., Contender], prompts: Prompts, new: int
) -> Makers:
    """handgrad, and transformers; or handgrad in float32, because transformers has no such weights."""
    bits = KINDS[kind][1]
    makers: Makers = {"handgrad": lambda: ours(model_for(size, bits), prompts, new)}
    if bits is None:
        makers[PEER] = lambda: theirs(peer_for(size), prompts, new)
    else:
        makers[FLOAT32] = lambda: ours(model_for(size), prompts, new)
    return makers


def llama_for(kind: str, size: Size, **numbers: int) -> Makers:
    """llama.cpp, if the model is a file that it reads."""
    base, name = base_for(size), KINDS[kind][0]
    return {f"llama.cpp {name}": partial(llama, base.path, name, **numbers)} if base.is_packed else {}


# ── comparing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def compete(
    case: str, tokens: int, makers: Makers, size: Size, attempts: Attempts, prompts: Prompts, most_rounds: int = 100
) -> list[Row]:
    """Compare the tokens of the first two contenders if they have the same weights, and time all in turns."""
    made = attempts.collect(makers)
    first, second = list(makers)[:2]
    mine, other = made.get(first), made.get(second)
    if second != FLOAT32 and isinstance(mine, Generator) and isinstance(other, Generator):
        found, expected = attempts(first, mine.generate), attempts(second, other.generate)
        if found is not None and expected is not None:
            attempts(first, lambda: check_same(model_for(size), prompts, found, expected, second))
    timings = time_in_turns(made, min(size.generate_rounds, most_rounds), attempts)
    rows = timed_rows("generate", case, tokens, makers, timings, second, attempts)
    for row in rows:
        row.note = note_of(size)
        if BOUND in timings and row.contender not in (BOUND, FLOAT32):
            row.of_bound = timings[BOUND].best / row.seconds
    return rows


def note_of(size: Size) -> str:
    return (
        f"{base_for(size).name}, {torch.get_num_threads()} threads; tokens/s: of all sequences together; ratio: best time"
        " of the second contender ÷ that of this one; of bound: time in which memory delivers all weights, keys and values ÷"
        " best time"
    )
