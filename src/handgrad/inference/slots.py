"""Where the KV cache has the keys and values of a sequence: a slot is a row of a pool, whose slots have equal capacity."""

from torch import Tensor

from ..kernels import calls
from .conv_state import ConvState


class Slot:
    """The place of one sequence: `row` of a pool, with `length` tokens in it."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.row = self.length = 0
        self.conv: ConvState | None = None  # of a model with short convolutions

    @property
    def capacity(self) -> int:
        return 0 if self.pool is None else self.pool.capacity

    @property
    def has_kernels(self) -> bool:
        """Whether kernels can read its keys and values."""
        return self.pool is not None and calls.fits(self.pool.k, self.pool.v)


class Pool:
    """Slots of one capacity: k and v (blocks with attention, rows, key heads, capacity, width). The first rows are used."""

    def __init__(self, like: Tensor, shape: tuple[int, ...], widths: tuple[int, int]):
        self.like, self.shape, self.widths = like, shape, widths  # shape: blocks, key heads, capacity
        self.slots: list[Slot] = []
        self.k, self.v = (self._empty(0, width) for width in widths)

    @property
    def capacity(self) -> int:
        return self.shape[2]

    @property
    def rows(self) -> int:
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def _empty(self, rows: int, width: int) -> Tensor:
        blocks, heads, capacity = self.shape
        return self.like.new_zeros(blocks, rows, heads, capacity, width)  # masked keys are multiplied by 0: no NaN

    def add(self, slot: Slot) -> None:
        """Give the slot a row."""
        if len(self.slots) == self.rows:
            self._resize(max(1, 2 * self.rows))
        slot.pool, slot.row = self, len(self.slots)
        self.slots.append(slot)

    def remove(self, slot: Slot) -> None:
        """Free the slot's row; the last one takes its place."""
        last = self.slots.pop()
        self._clear(slot)
        if last is not slot:
            copy(last, slot, last.length)
            self._clear(last)
            self.slots[slot.row], last.row = last, slot.row
        slot.pool = None
        if 4 * len(self.slots) <= self.rows:
            self._resize(2 * len(self.slots))

    def _clear(self, slot: Slot) -> None:
        """Torch multiplies masked keys and values by 0: those of a broken sequence, NaN, must go. Kernels skip them."""
        if not slot.has_kernels:
            for x in (self.k, self.v):
                x[:, slot.row, :, : slot.length] = 0

    def _resize(self, rows: int) -> None:
        length = max((slot.length for slot in self.slots), default=0)
        used = len(self.slots)
        for name, width in zip(("k", "v"), self.widths, strict=True):
            new = self._empty(rows, width)
            new[:, :used, :, :length] = getattr(self, name)[:, :used, :, :length]
            setattr(self, name, new)


def copy(source: Slot, target: Slot, length: int) -> None:
    """Copy the keys and values of the first `length` tokens. The slots may be in different pools."""
    assert source.pool is not None and target.pool is not None
    for name in ("k", "v"):
        old, new = getattr(source.pool, name), getattr(target.pool, name)
        new[:, target.row, :, :length] = old[:, source.row, :, :length]
