"""Shared prefixes: branches stand for the sequences, and the pass through them equals that of the sequences."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import perturb
from handgrad import lora
from handgrad.errors import HandgradError
from handgrad.kernels import library
from handgrad.model.passes import prefixes
from handgrad.model.passes.batch import Piece
from handgrad.model.passes.example_gradients import ExampleNorms
from handgrad.model.passes.options import PassOptions
from handgrad.model.precision import why_not_mixed
from handgrad.model.storage.quantize import quantize
from handgrad.optim import OptimizerInBackward
from handgrad.proof.oracles import relative_error

LLAMA: dict[str, Any] = {"preset": "nano-llama", "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "d_hidden": 20}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "grouped queries": LLAMA,
    "windows": {**LLAMA, "window": 5},
    "sinks and caps": {**LLAMA, "attention_scale": 0.4, "score_cap": 2.0, "sinks": True},
}
Batch = tuple[Tensor, Tensor, list[int]]


def nested_batch(n_vocab: int, seed: int = 0) -> Batch:
    """Sequences with prefixes within prefixes, one that is another's prefix, two that are equal, and one alone; their
    targets begin at different places, also inside what is shared."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return [int(x) for x in rng.integers(0, n_vocab, n)]

    system, question = ids(11), ids(9)
    sequences = [
        system + question + ids(4),
        system + question + ids(1),
        system + ids(7),
        system + question,
        ids(5),
        system + question + ids(6),
    ]
    sequences.append(sequences[0])
    tokens = [s[:-1] for s in sequences]
    targets = [
        [-100] * min(8 + 3 * i, len(s) - 2) + s[1 + min(8 + 3 * i, len(s) - 2) :] for i, s in enumerate(sequences)
    ]
    ids_of, targets_of = (torch.tensor([*chain.from_iterable(x)]) for x in (tokens, targets))
    return ids_of, targets_of, [len(s) for s in tokens]


def make(name: str, adapter: str = "", dtype: torch.dtype = torch.float64, **changes: Any) -> hg.GPT:
    shape = {"n_vocab": 13, "n_context": 40, "d_model": 12, "n_heads": 3, "n_blocks": 2, **MODELS[name], **changes}
    model = hg.GPT(hg.preset(shape.pop("preset", "nano"), **shape), seed=0, dtype=dtype)
    if adapter:
        lora.inject(model, 2, targets=("all-linear", "lm_head"), dora=adapter == "DoRA")
    perturb(model)
    return model


def gradients(model: hg.GPT, batch: Batch, **options: Any) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model.loss_and_grads(*batch, **options)
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def pieces_of(model: hg.GPT, batch: Batch, **options: Any) -> list[Piece]:
    return model.prepare(model.pack(batch[0], batch[2]), batch[1], options=PassOptions(**options)).pieces


@pytest.mark.parametrize("adapter", ["", "LoRA", "DoRA"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some_cases(2)
def test_the_pass_through_branches_is_that_of_the_sequences(name: str, adapter: str) -> None:
    model = make(name, adapter)
    batch = nested_batch(model.config.n_vocab)
    loss, expected = gradients(model, batch)
    for options in ({}, {"recompute": "blocks"}, {"tokens_at_once": 40}):
        pieces = pieces_of(model, batch, share=True, **options)
        assert sum(len(piece.ids) for piece in pieces) < len(batch[0]) and any(max(p.parents) > 0 for p in pieces)
        found, grads = gradients(model, batch, share=True, **options)
        assert abs(found - loss) <= 1e-12
        for key, grad in expected.items():
            assert relative_error(grads[key], grad) <= 1e-12, key


def test_without_kernels_too() -> None:
    model = make("windows")
    batch = nested_batch(model.config.n_vocab)
    _, expected = gradients(model, batch)
    with library.disabled():
        _, grads = gradients(model, batch, share=True)
    assert max(relative_error(grads[key], grad) for key, grad in expected.items()) <= 1e-12


WIDE: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_hidden": 64, "window": 9}


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_are_packed(bits: int) -> None:
    model = quantize(make("grouped queries", dtype=torch.float32, **WIDE), bits).double()
    lora.inject(model, 2)
    perturb(model)
    batch = nested_batch(13)
    for recompute in ("none", "blocks"):
        (loss, expected), (found, grads) = (
            gradients(model, batch, share=share, recompute=recompute) for share in (False, True)
        )
        assert abs(found - loss) <= 1e-12
        assert max(relative_error(grads[name], x) for name, x in expected.items()) <= 1e-12


@pytest.mark.skipif(why_not_mixed() is not None, reason=f"no mixed precision: {why_not_mixed()}")
@pytest.mark.parametrize("adapter", ["", "LoRA", "DoRA"])
def test_mixed_precision_up_to_what_it_rounds(adapter: str) -> None:
    """A branch rounds sums over the sequences where these round their parts: both are as far from float32."""
    model = make("grouped queries", adapter, torch.float32, **WIDE)
    batch = nested_batch(13)
    _, exact = gradients(model, batch)
    model.precision = "mixed"
    alone, shared = (gradients(model, batch, share=share)[1] for share in (False, True))
    largest = max(x.norm() for x in exact.values())

    def error(grads: dict[str, Tensor]) -> float:
        return max(float((grads[name] - x).norm() / x.norm().clamp(min=1e-3 * largest)) for name, x in exact.items())

    assert 0 < error(shared) <= 2 * error(alone)


def test_dropout_has_one_mask_for_a_row_that_is_shared() -> None:
    """Two equal sequences have one loss whichever of them has the targets; alone they have different masks."""
    model = make("gpt2").train()
    lora.inject(model, 2, targets=["c_attn", "mlp.c_fc"], dropout=0.4)
    perturb(model)
    ids, none = torch.arange(12), torch.full((12,), -100)
    tokens, lengths = ids.repeat(2), [12, 12]
    first, second = torch.cat([ids, none]), torch.cat([none, ids])
    for share in (True, False):
        one, two = (gradients(model, (tokens, x, lengths), share=share, seed=3)[0] for x in (first, second))
        assert (one == two) == share
    _, grads = gradients(model, (tokens, second, lengths), share=True, seed=3)
    p = model.transformer.h[0].attn.c_attn.down
    u = torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype)
    losses = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            p += step * u
            losses.append(gradients(model, (tokens, second, lengths), share=True, seed=3)[0])
            p -= step * u
    name = next(name for name, q in model.named_parameters() if q is p)
    assert (grads[name] * u).sum().item() == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-6)


def test_log_probabilities_are_those_of_the_sequences() -> None:
    model = make("gpt2")
    tokens, targets, lengths = nested_batch(model.config.n_vocab)
    shared, flat = (model.log_probabilities(tokens, targets, lengths, share=share) for share in (True, False))
    assert relative_error(shared, flat) <= 1e-12
    assert torch.equal(shared == 0, targets == -100)
    n = int((targets != -100).sum())
    assert model.loss(tokens, targets, lengths) == pytest.approx(-flat.sum().item() / n, rel=1e-12)


@pytest.mark.parametrize("fewest", [1, 3, 8])
@pytest.mark.parametrize("seed", range(12))
def test_branches_stand_for_the_sequences(seed: int, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence is what its branches have, from the first one to the last, for random sequences of few ids."""
    monkeypatch.setattr(prefixes, "FEWEST_TOKENS", fewest)
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 3, 20)
    sequences = [
        np.concatenate([common[: rng.integers(0, 20)], rng.integers(0, 2, rng.integers(1, 9))]) for _ in range(8)
    ]
    sequences += [sequences[0], sequences[1][: len(sequences[1]) // 2 + 1]]
    ids = torch.from_numpy(np.concatenate(sequences))
    found = prefixes.branches_of(ids, tuple(map(len, sequences)))
    if found is None:
        shared = [prefixes.common(a, b) for i, a in enumerate(sequences) for b in sequences[:i]]
        assert max(shared) < fewest
        return
    assert torch.equal(ids[found.source][found.place], ids) and sum(found.lengths) <= len(ids)
    ends = np.cumsum(found.lengths)
    branch_of = np.searchsorted(ends, np.arange(ends[-1]), side="right")
    start = 0
    for sequence in sequences:
        rows = found.place[start : start + len(sequence)].numpy()
        chain = [int(branch_of[rows[-1]])]
        while found.parents[chain[0]] >= 0:
            chain.insert(0, found.parents[chain[0]])
        whole = np.concatenate([np.arange(ends[i] - found.lengths[i], ends[i]) for i in chain])
        assert np.array_equal(rows, whole)
        start += len(sequence)


def test_nothing_is_shared_where_the_result_would_differ() -> None:
    batch = nested_batch(13)
    shape: dict[str, Any] = {**LLAMA, "n_vocab": 13, "n_context": 40, "n_blocks": 2}
    with_conv = hg.GPT(hg.preset(shape.pop("preset"), **shape, family="lfm2", qk_norm=True, conv_blocks=(0,)), seed=0)
    assert not pieces_of(with_conv, batch, share=True)[0].parents
    norms = ExampleNorms(grads=True)
    model = make("gpt2")
    model.loss_and_grads(*batch, examples=norms)
    flat = norms.result()
    model.zero_grad()
    model.loss_and_grads(*batch, examples=norms, share=True)
    assert torch.equal(norms.result(), flat)


def test_a_batch_that_shares_is_divided_into_fewer_pieces() -> None:
    """Twice the new tokens at once, since each piece computes a prefix again; a batch that shares nothing has the pieces
    that it had, and so does one whose pieces were given."""
    model = make("gpt2")
    ids = torch.arange(30) % 13
    tails = torch.randint(13, (220, 10), generator=torch.Generator().manual_seed(1))
    alike = torch.cat([torch.cat([ids, tail]) for tail in tails])
    batch = alike, alike, [40] * 220
    assert [sum(p.numbers is not None for p in pieces_of(model, batch, share=share)) for share in (True, False)] == [
        1,
        0,
    ]
    assert len(pieces_of(model, batch)) == 9 and len(pieces_of(model, batch, share=True, tokens_at_once=1024)) == 2
    others = torch.randint(13, (8800,), generator=torch.Generator().manual_seed(2))
    apart = others, others, [40] * 220
    assert [x.lengths for x in pieces_of(model, apart, share=True)] == [x.lengths for x in pieces_of(model, apart)]


def test_prefixes_of_sequences_that_are_no_neighbors() -> None:
    """The batch is in a random order; a prefix counts as new where it is first."""
    a, b = torch.arange(10), torch.arange(10) + 20
    parts = [torch.cat([x, torch.tensor([50 + i, 60])]) for i, x in enumerate((a, b, a, b, a))]
    parts.append(parts[0][:9])
    assert prefixes.new_tokens(torch.cat(parts), tuple(map(len, parts))) == (12, 12, 2, 2, 2, 1)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_an_optimizer_inside_the_backward_pass(clip: float) -> None:
    found = []
    for share in (False, True):
        model = make("gpt2")
        optimizer = OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=0.1), clip, share=share)
        optimizer.step(*nested_batch(13))
        found.append(dict(model.named_parameters()))
    assert max(relative_error(found[1][name], p) for name, p in found[0].items()) <= 1e-12


def test_the_loss_without_gradients() -> None:
    model = make("gpt2")
    batch = nested_batch(13)
    assert model.loss(*batch, share=True) == pytest.approx(model.loss(*batch), rel=1e-12)


def test_share_is_a_bool() -> None:
    with pytest.raises(HandgradError, match="share must be True or False"):
        PassOptions(share="yes")  # type: ignore[arg-type]
