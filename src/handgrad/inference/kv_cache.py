"""The KV cache: keys and values of all tokens so far, of many sequences, so that a new token costs one row of every product
(Section 3, the new rows of (18)).

    slot = cache.add()                  a place for a sequence; it takes no memory yet
    cache.reserve(slot, 300)            make room for 300 tokens
    step = cache.step([(slot, 7), …])   the next pass has 7 new tokens of this sequence, then those of others
    Pass(cache=step.block(i))           block i stores their keys and values, and attends to all so far
    step.finish()                       the new tokens count from now on
    cache.free(slot)

Blocks with a short convolution store the last rows of its input instead (`conv_state.py`), in the slot of each sequence.
Slots of equal capacity (256, 512, 1024 … tokens) are neighbors in one tensor, a pool. A sequence that outgrows its slot
moves to the next pool. Kernels read keys and values where they are, of single new tokens of all sequences in one call.
Without kernels torch reads those of neighbors in one call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import HandgradError
from ..kernels import calls, token_calls
from ..kernels.calls import Scores
from ..model.gpt import GPT
from ..ops import attention
from ..ops.attention import Saved
from .conv_state import STRIDE, ConvState
from .slots import Pool, Slot, copy

How = tuple[Scores, Tensor | None]  # how scores are computed, and the heads' sinks
FIRST_CAPACITY = 256  # tokens of the smallest slots
WASTED_TOKENS = 64  # without a kernel, sequences attend in one call if each reads at most this many keys in vain


class Cache:
    """Keys and values of every block, of many sequences. It grows and shrinks with their tokens."""

    def __init__(self, model: GPT):
        self.config = model.config
        self._like = next(model.parameters()).detach()
        self.pools: dict[int, Pool] = {}  # by capacity
        conv = [i in self.config.conv_blocks for i in range(self.config.n_blocks)]
        self.places = [conv[:i].count(kind) for i, kind in enumerate(conv)]  # of a block among those of its kind

    @property
    def nbytes(self) -> int:
        states = (slot.conv for pool in self.pools.values() for slot in pool.slots)
        return sum(pool.nbytes for pool in self.pools.values()) + sum(x.nbytes for x in states if x is not None)

    def add(self) -> Slot:
        """A place for a new sequence."""
        return Slot()

    def free(self, slot: Slot) -> None:
        """Discard the sequence; its memory is used by others, or returned."""
        pool = slot.pool
        if pool is not None:
            pool.remove(slot)
            if not pool.slots:
                del self.pools[pool.capacity]
        slot.length, slot.conv = 0, None

    def reserve(self, slot: Slot, length: int) -> None:
        """Make room for this many tokens, those in the slot included."""
        c = self.config
        if length > c.n_context:
            raise HandgradError(f"{length} tokens do not fit into a context of {c.n_context}")
        capacity = min(FIRST_CAPACITY, c.n_context)
        while capacity < length:
            capacity = min(2 * capacity, c.n_context)
        if slot.pool is not None and slot.pool.capacity >= capacity:
            return
        if capacity not in self.pools:
            shape = (c.n_blocks - len(c.conv_blocks), c.kv_heads, capacity)
            self.pools[capacity] = Pool(self._like, shape, (c.query_width, c.value_width))
        moved = Slot()
        self.pools[capacity].add(moved)
        if slot.pool is not None:
            copy(slot, moved, slot.length)
            kept = slot.length, slot.conv
            self.free(slot)
            slot.length, slot.conv = kept
        slot.pool, slot.row = moved.pool, moved.row
        self.pools[capacity].slots[slot.row] = slot

    def shared(self, length: int, of: int) -> int:
        """How many of the first `length` tokens, `of` those in a slot, another sequence can copy."""
        return length if length == of or not self.config.conv_blocks else length - length % STRIDE

    def share(self, source: Slot, target: Slot, length: int) -> None:
        """Copy the first `length` tokens of a slot to a new one."""
        self.reserve(target, length)
        copy(source, target, length)
        target.length = length
        if source.conv is not None:
            target.conv = source.conv.cut(length, source.length)

    def order(self, slots: Sequence[Slot]) -> list[int]:
        """The order in which `step` should get sequences with one new token each: neighbors attend together."""
        return sorted(range(len(slots)), key=lambda i: (slots[i].capacity, slots[i].row))

    def step(self, new: Sequence[tuple[Slot, int]]) -> "Step":
        """Prepare a pass with these numbers of new tokens, packed end to end in this order. Sequences with one token in an
        occupied slot come first."""
        c = self.config
        for slot, count in new:
            self.reserve(slot, slot.length + count)
            if c.conv_blocks and slot.conv is None:
                slot.conv = ConvState(self._like, (len(c.conv_blocks), c.conv_taps - 1, c.d_model))
        return Step(new, self._like.device, self.places)


class Step:
    """One pass of new tokens: where their keys and values go, and which keys each of them sees."""

    def __init__(self, new: Sequence[tuple[Slot, int]], device: torch.device, block_places: Sequence[int]):
        self.new, self.block_places = new, block_places
        starts = [0]
        for _, count in new:
            starts.append(starts[-1] + count)
        self.n = starts[-1]
        self.positions = torch.tensor(
            [p for slot, count in new for p in range(slot.length, slot.length + count)], device=device
        )
        self.parts: list[_Part] = []
        i = 0
        while i < len(new):
            slot, count = new[i]
            stop = i + 1
            if slot.length == 0:
                while stop < len(new) and new[stop][0].length == 0:
                    stop += 1
                part: _Part = _Prompts(new[i:stop], starts[i])
            elif count == 1 and slot.has_kernels:
                while stop < len(new) and new[stop][1] == 1 and new[stop][0].length:
                    stop += 1
                part = _Tokens([slot for slot, _ in new[i:stop]], starts[i])
            elif count == 1:
                while stop < len(new) and _neighbors(new[i : stop + 1]):
                    stop += 1
                part = _Neighbors([slot for slot, _ in new[i:stop]], starts[i], device)
            else:
                part = _Continued(slot, count, starts[i])
            self.parts.append(part)
            i = stop

    @property
    def places(self) -> token_calls.Places | None:
        """Where the keys and values of single new tokens belong; None if the pass has others."""
        part = self.parts[0]
        return part.places if len(self.parts) == 1 and isinstance(part, _Tokens) else None

    def block(self, i: int) -> "BlockCache":
        """The cache of block i, as the block sees it."""
        return BlockCache(self, self.block_places[i])

    def finish(self) -> None:
        """Count the new tokens: all blocks have stored them."""
        for slot, count in self.new:
            slot.length += count
            if slot.conv is not None:
                slot.conv.finish()


class BlockCache:
    """The cache of one block in one pass, number i of its kind."""

    def __init__(self, step: Step, i: int):
        self.step, self.i = step, i

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None = None) -> Saved:
        """(n, h, width) each: store new keys and values, and let the new queries attend to all keys so far."""
        parts, how = self.step.parts, (scores, None if sinks is None else sinks.detach())
        if len(parts) == 1:
            a = parts[0].attend(self.i, q, k, v, how)
        else:
            a = torch.cat([part.attend(self.i, q[x], k[x], v[x], how) for part in parts for x in (part.rows,)])
        return Saved(q, k, v, a, a)  # without a backward pass there is no log-sum-exp

    def continued(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z (n, d) → the rows before each sequence's new ones, and those; the places of the new ones"""
        found: list[Tensor] = []
        new: list[Tensor] = []
        start = end = 0
        for slot, count in self.step.new:
            assert slot.conv is not None
            found.append(slot.conv.extend(self.i, slot.length, z[start : start + count]))
            start, end = start + count, end + len(found[-1])
            new.append(torch.arange(end - count, end, device=z.device))
        return torch.cat(found), torch.cat(new)


def _neighbors(new: Sequence[tuple[Slot, int]]) -> bool:
    """Whether the last sequence can attend in one call with those before it: one new token each, next to each other in a
    pool, and of similar length."""
    (before, _), (slot, count) = new[-2:]
    if count != 1 or slot.length == 0 or slot.pool is not before.pool or slot.row != before.row + 1:
        return False
    lengths = [other.length for other, _ in new]
    return max(lengths) * len(lengths) - sum(lengths) <= WASTED_TOKENS * len(lengths)


def _store(slot: Slot, i: int, start: int, k: Tensor, v: Tensor) -> None:
    """Write keys and values (t, h, width) of block i behind the first `start` tokens of a slot."""
    assert slot.pool is not None
    stop = start + len(k)
    slot.pool.k[i, slot.row, :, start:stop] = k.transpose(0, 1)
    slot.pool.v[i, slot.row, :, start:stop] = v.transpose(0, 1)


def _mask(own: Tensor, keys: range, window: int | None, q: Tensor) -> Tensor:
    """(queries, keys): 0 where a key is visible to the query of position `own`, −∞ elsewhere"""
    positions, own = torch.arange(keys.start, keys.stop, device=q.device), own[:, None]
    hidden = positions > own if window is None else (positions > own) | (positions <= own - window)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)


class _Prompts:
    """The first tokens of some sequences: nothing is cached yet, and attention is that of training."""

    def __init__(self, new: Sequence[tuple[Slot, int]], start: int):
        self.new = new
        lengths = tuple(count for _, count in new)
        self.rows = slice(start, start + sum(lengths))
        self.spans = attention.spans_of(lengths)

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        start = 0
        for slot, count in self.new:
            _store(slot, i, 0, k[start : start + count], v[start : start + count])
            start += count
        return attention.forward(q, k, v, self.spans, *how)[0]


class _Continued:
    """Several new tokens of one sequence behind those in its slot."""

    def __init__(self, slot: Slot, count: int, start: int):
        self.slot, self.count = slot, count
        self.rows = slice(start, start + count)
        self.masks: dict[int | None, Tensor] = {}  # by window
        self.sequences: dict[int | None, calls.Sequences] = {}  # by window

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        slot, pool, old, window = self.slot, self.slot.pool, self.slot.length, how[0].window
        assert pool is not None
        _store(slot, i, old, k, v)
        stop = old + self.count
        first = 0 if window is None else max(0, old - window + 1)
        if slot.has_kernels:
            keys, values = (x[i, slot.row].transpose(0, 1) for x in (pool.k, pool.v))
            return self._by_kernel(range(first, stop), q, keys, values, how)
        if window not in self.masks:
            self.masks[window] = _mask(torch.arange(old, stop, device=q.device), range(first, stop), window, q)
        seen_k, seen_v = (x[i, slot.row : slot.row + 1, :, first:stop] for x in (pool.k, pool.v))
        scores, sinks = how
        rows = None if sinks is None else sinks[:, None]
        a = attention.attend_with_mask(q.transpose(0, 1)[None], seen_k, seen_v, self.masks[window], scores, rows)
        return a[0].transpose(0, 1)

    def _by_kernel(self, seen: range, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        """q (t, h, width), k, v (capacity, h_kv, width), of which the new queries see some, without a copy"""
        scores, sinks = how
        window = scores.window
        if window not in self.sequences:
            at = torch.arange(len(seen) - self.count, len(seen), dtype=torch.int32)
            rows = calls.table(((seen.start, seen.stop, 0, self.count),))
            self.sequences[window] = calls.Sequences(rows, at)
        a, lse = v.new_empty(*q.shape[:2], v.shape[2]), v.new_empty(q.shape[:2])
        calls.forward_attention(self.sequences[window], scores, q, k, v, sinks, a, lse)
        return a


class _Tokens:
    """One new token of each of some sequences, by a kernel."""

    def __init__(self, slots: Sequence[Slot], start: int):
        self.slots, self.rows = slots, slice(start, start + len(slots))
        pool = slots[0].pool
        assert pool is not None
        k, v = ((len(slots), pool.shape[1], width) for width in pool.widths)
        self.places = token_calls.Places(torch.tensor([_place(slot) for slot in slots]), pool.shape[0], k, v)

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        a = v.new_empty(*q.shape[:2], v.shape[2])
        token_calls.attend_tokens(self.places, i, how[0], q, k, v, how[1], a)
        return a


def _place(slot: Slot) -> list[int]:
    """Addresses of a sequence's keys and values in block 0, the numbers of a block of each, the capacity, the position."""
    assert slot.pool is not None
    k, v = slot.pool.k, slot.pool.v
    addresses = [x.data_ptr() + slot.row * x.stride(1) * x.element_size() for x in (k, v)]
    return [*addresses, k.stride(0), v.stride(0), slot.pool.capacity, slot.length]


class _Neighbors:
    """The same by torch, of neighbors in a pool. Queries that share a key are rows of one product."""

    def __init__(self, slots: Sequence[Slot], start: int, device: torch.device):
        assert slots[0].pool is not None
        self.pool, self.first = slots[0].pool, slots[0].row
        self.rows = slice(start, start + len(slots))
        self.lengths = [slot.length for slot in slots]
        self.longest = max(self.lengths)
        self.even = min(self.lengths) == self.longest
        self.masks: dict[int | None, Tensor] = {}  # by window
        if not self.even:
            self.places = torch.tensor(self.lengths, device=device)
            self.each = torch.arange(len(slots), device=device)

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        (n, heads, width), (scores, sinks) = q.shape, how
        window, end, shared = scores.window, self.longest + 1, k.shape[1]
        start = 0 if window is None else max(0, min(self.lengths) + 1 - window)
        keys, values = (x[i].narrow(0, self.first, n) for x in (self.pool.k, self.pool.v))
        if self.even:
            keys.select(2, self.longest).copy_(k)
            values.select(2, self.longest).copy_(v)
        else:
            keys.transpose(1, 2)[self.each, self.places] = k
            values.transpose(1, 2)[self.each, self.places] = v
            if window not in self.masks:
                self.masks[window] = _mask(self.places, range(start, end), window, q)[:, None, None]
        seen_k, seen_v = (x.narrow(2, start, end - start) for x in (keys, values))
        rows = None if sinks is None else sinks.view(shared, -1)
        queries, mask = q.reshape(n, shared, heads // shared, width), self.masks.get(window)
        return attention.attend_with_mask(queries, seen_k, seen_v, mask, scores, rows).reshape(n, heads, -1)


_Part = _Prompts | _Continued | _Tokens | _Neighbors
