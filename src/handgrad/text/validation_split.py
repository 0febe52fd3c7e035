"""Hold out a part of the fine-tuning examples for validation, so that no example is on both sides."""

import numpy as np

from ..errors import HandgradError, option
from .batches import shuffled_index
from .examples import Examples


def split(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples | None]:
    """Training and validation examples: about `share` of the records, at least one, is held out.

    Records that have an example in common form a group that stays on one side; groups are held out in an order drawn from
    the seed. If there are too few records for that, the last examples are held out. Validation is None if `share` is 0 or
    all records form a single group."""
    if not 0 <= share < 1:
        raise HandgradError(
            f"cannot hold out a share of {share:g} for validation: give {option('val_share')} from 0 to below 1"
        )
    n = examples.per_epoch
    if not share:
        return examples, None
    if n < 2:
        raise HandgradError(
            f"{n} example cannot be split into training and validation: give more, or {option('val_share', 0)}"
        )
    distinct, record_of = np.unique(examples.record_numbers, return_inverse=True)
    n_records = len(distinct)
    if n_records * share < 1 and n > n_records:
        held_out = np.arange(n) >= n - max(1, round(n * share))
    else:
        group_of = _groups(record_of, examples.content_ids, n_records)
        sizes = np.bincount(group_of)
        if len(sizes) == 1:
            return examples, None
        budget = min(max(1, round(n_records * share)), n_records - 1)
        held_out = _choose_groups(sizes, budget, seed)[group_of][record_of]
    return examples.part(np.flatnonzero(~held_out)), examples.part(np.flatnonzero(held_out))


def count_shared(training: Examples, validation: Examples) -> int:
    """The number of validation examples that are also in the training examples."""
    known = set(training.digests())
    return sum(digest in known for digest in validation.digests())


def _groups(record_of: np.ndarray, content_ids: np.ndarray, n_records: int) -> np.ndarray:
    """The group of each record, numbered from 0 in the order of the records (union-find): records with an equal example
    are in one group. `record_of` and `content_ids` are given for each example."""
    parent = list(range(n_records))

    def root(record: int) -> int:
        while parent[record] != record:
            parent[record] = record = parent[parent[record]]
        return record

    first: dict[int, int] = {}
    for record, content in zip(record_of.tolist(), content_ids.tolist(), strict=True):
        a, b = root(first.setdefault(content, record)), root(record)
        parent[max(a, b)] = min(a, b)
    return np.unique([root(record) for record in range(n_records)], return_inverse=True)[1]


def _choose_groups(sizes: np.ndarray, budget: int, seed: int) -> np.ndarray:
    """Which groups to hold out: in shuffled order, every group that still fits into `budget` records; if none fits, the
    first of the smallest."""
    n = len(sizes)
    order = [shuffled_index(i, n, seed, -1) for i in range(n)]  # epoch −1: independent of the order of every epoch
    chosen = np.zeros(n, bool)
    for group in order:
        if sizes[group] <= budget:
            chosen[group], budget = True, budget - sizes[group]
        if not budget:
            break
    if not chosen.any():
        chosen[min(order, key=sizes.__getitem__)] = True
    return chosen
