"""hg.nn.replace on models that users change: every change keeps its effect, before and after, and what is left is listed.

HANDGRAD_CHANGES sets the number of random combinations (default 60)."""

import copy
import os
import random
import warnings
from typing import Any

import pytest
import torch
from changes import CHANGES, KINDS, Change, batch_of, model_of, surroundings, with_adapter
from torch import Tensor

import handgrad as hg
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import NORM_FLOOR, TOLERANCE

COUNT = int(os.environ.get("HANDGRAD_CHANGES", "60"))
FIRST = int(os.environ.get("HANDGRAD_CHANGES_FIRST", "0"))
IDS = torch.randint(35, (2, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}


def outcome(model: Any, batch: dict[str, Any], seed: int) -> dict[str, Tensor] | str:
    """Loss, logits if there are any, and gradients; or the kind of error."""
    model.zero_grad()
    torch.manual_seed(seed)
    try:
        out = model(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.items()})
        loss = out[0] if isinstance(out, tuple) else out.loss
        loss.backward()
    except Exception as error:
        return type(error).__name__
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_equal(found: Any, expected: Any, dtype: torch.dtype = torch.float32, where: str = "") -> None:
    if isinstance(expected, str):
        assert isinstance(found, str), f"{where}: {expected} was raised before"
        return
    assert not isinstance(found, str) and set(found) == set(expected), (
        f"{where}: {found if isinstance(found, str) else ''}"
    )
    largest = max(
        (x.abs().max().item() for name, x in expected.items() if name != "loss" and x.isfinite().all()), default=0
    )
    for name, x in expected.items():
        if x.isnan().any():
            assert found[name].isnan().any(), f"{where}: {name}"
            continue
        error = relative_error(found[name], x, floor=NORM_FLOOR * largest)
        assert error <= TOLERANCE[dtype], f"{where}: {name} differs by {error:.1e}"


def pair(kind: str, seed: int = 0) -> tuple[Any, Any]:
    model = model_of(kind, seed)
    return model, copy.deepcopy(model)


def change_both(change: Change, plain: Any, model: Any, seed: float) -> None:
    """Two changes may exclude each other; then they do in both models."""
    errors = []
    for x in (plain, model):
        try:
            change(x, random.Random(seed))
        except Exception as error:
            errors.append(type(error))
    assert len(errors) != 1, f"{change.__name__}: {errors}"


@pytest.mark.parametrize("part", range(4))
def test_random_changes_keep_their_effect(part: int) -> None:
    for seed in range(FIRST + part, FIRST + COUNT, 4):
        rng = random.Random(seed)
        kind = rng.choice(sorted(KINDS))
        plain, model = pair(kind, seed)
        if rng.random() < 0.25:
            plain, model = (with_adapter(x, seed) for x in (plain, model))
        before, after = ([rng.choice(CHANGES) for _ in range(rng.choice([0, 0, 1, 2]))] for _ in range(2))
        seeds = [rng.random() for _ in (*before, *after)]
        batch, loss = batch_of(rng), rng.random() < 0.5
        log = [c.__name__ for c in before], [c.__name__ for c in after]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i, change in enumerate(before):
                change_both(change, plain, model, seeds[i])
            patched = random.Random(seeds[0] if seeds else 0)
            early = rng.random() < 0.5
            if not early:
                result = hg.nn.replace(model, loss=loss)
            with surroundings(patched, [plain]):
                if early:
                    result = hg.nn.replace(model, loss=loss)
                for i, change in enumerate(after, len(before)):
                    change_both(change, plain, model, seeds[i])
                low = torch.is_autocast_enabled("cpu")
                expected, found = outcome(plain, batch, seed), outcome(model, batch, seed)
            where = f"seed {seed}, {kind}, {log}, loss={loss}, {list(batch)}, {result.fallbacks}"
            assert_equal(found, expected, torch.bfloat16 if low else torch.float32, where)
