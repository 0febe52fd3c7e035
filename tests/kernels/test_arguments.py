"""What kernels are given is compared with the tensors before an address is taken: wrong tables, positions and shapes are
refused, whatever the caller has done. Random masks: kernels, torch and the formula agree."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.inference.engine import Engine, Options
from handgrad.inference.kv_cache import Cache
from handgrad.inference.token_block import describe
from handgrad.kernels import calls, compiler, library, token_calls
from handgrad.ops import attention, layernorm, linear, loss, rotary
from kernels.random_masks import check_cases

if compiler.command() is None:
    pytest.skip("LEFT OUT: no C compiler, so there are no kernels to test", allow_module_level=True)

CASES = int(os.environ.get("HANDGRAD_MASKS", "100"))


def test_random_masks() -> None:
    """Padding on the left, on the right and both, holes, empty rows, several sequences in a row, windows, groups, gaps."""
    kinds = check_cases(CASES)
    assert {"left", "right", "both", "hole", "empty", "packed", "spans"} <= set(kinds)


def test_rows_that_see_no_key_shift_no_positions() -> None:
    """The first row of the first sequence sees nothing; all others attend as without it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 1, 4, dtype=torch.float64)
    spans = (
        attention.Span(slice(1, 3), slice(1, 3), 1, None),
        attention.Span(slice(3, 5), slice(3, 6), 1, [0, 1, 1]),
    )
    a, saved = attention.forward(q, k, v, spans)
    assert not a[0].any() and not saved.lse[0].any()
    weights = torch.softmax(q[4:, 0] @ k[3:5, 0].t() / 2, 1)
    torch.testing.assert_close(a[4:, 0], weights @ v[3:5, 0])
    into = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    attention.backward(torch.ones_like(a), saved, spans, into)
    assert (
        not into[0][0].any() and not any(x[[0, 5]].any() for x in into[1:]) and torch.isfinite(torch.stack(into)).all()
    )


ROWS = (0, 4, 0, 4)  # first and end of the keys, and of the queries
WRONG: dict[str, tuple[list[tuple[int, int, int, int]], list[int] | None]] = {
    "keys end behind k": ([(0, 7, 0, 4)], None),
    "queries end behind q": ([(0, 6, 0, 7)], None),
    "keys before the first": ([(-1, 4, 0, 4)], None),
    "queries before the first": ([(0, 4, -1, 3)], None),
    "keys that end before they begin": ([(4, 2, 0, 0)], None),
    "more queries than keys": ([(0, 3, 0, 4)], None),
    "queries without keys": ([(2, 2, 0, 4)], None),
    "sequences with the same keys": ([(0, 4, 0, 4), (3, 6, 4, 6)], None),
    "sequences with the same queries": ([(0, 2, 0, 2), (2, 6, 1, 5)], None),
    "a position behind the keys": ([ROWS], [0, 1, 2, 4, 0, 0]),
    "a position before the keys": ([ROWS], [-1, 1, 2, 3, 0, 0]),
    "positions that go back": ([ROWS], [0, 2, 1, 3, 0, 0]),
    "too few positions": ([ROWS], [0, 1, 2, 3]),
    "too many positions": ([ROWS], [0, 1, 2, 3, 0, 0, 0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sequences_are_refused(name: str) -> None:
    rows, at = WRONG[name]
    sequences = calls.Sequences(calls.table(tuple(rows)), None if at is None else torch.tensor(at, dtype=torch.int32))
    q, k, v, a, delta = torch.randn(5, 6, 2, 4)
    lse = torch.zeros(6, 2)
    with pytest.raises(HandgradError):
        calls.forward_attention(sequences, calls.Scores(), q, k, v, None, a, lse)
    into = tuple(torch.zeros_like(q) for _ in range(3))
    with pytest.raises(HandgradError):
        calls.backward_attention(sequences, calls.Scores(), delta, q, k, v, a, lse, into)
    assert not any(x.any() for x in into)


def test_tables_of_another_type_are_refused() -> None:
    q, k, v, a = torch.randn(4, 4, 2, 4)
    lse = torch.zeros(4, 2)
    rows, at = calls.table((ROWS,)), torch.arange(4, dtype=torch.int32)
    for wrong in (
        calls.Sequences(rows.int(), at), calls.Sequences(rows, at.long()),
        calls.Sequences(rows, torch.arange(8, dtype=torch.int32)[::2]),
    ):  # fmt: skip
        with pytest.raises(HandgradError, match="where a layer needs"):
            calls.forward_attention(wrong, calls.Scores(), q, k, v, None, a, lse)


def test_positions_that_do_not_fit_their_rows_are_refused() -> None:
    q, k, v = torch.randn(3, 6, 1, 4)
    spans = (
        attention.Span(slice(0, 3), slice(0, 3), 1, [0, 1]),
        attention.Span(slice(3, 6), slice(3, 6), 1, [0, 1, 1, 2]),
    )
    with pytest.raises(HandgradError, match="3 rows of queries with 2 positions"):
        attention.forward(q, k, v, spans)


def test_shapes_and_dtypes_are_compared_at_every_call() -> None:
    x, d = torch.randn(20, 8), torch.randn(20, 16)
    w, b = torch.randn(8), torch.randn(8)
    _, saved = layernorm.forward(x, w, b, 1e-5)
    heads, cos, sin = torch.randn(20, 2, 4), torch.randn(20, 2), torch.randn(20, 2)
    whole, plain = calls.Sequences(calls.table(((0, 20, 0, 20),))), calls.Scores()
    attempts: dict[str, Callable[[], object]] = {
        "gain": lambda: layernorm.forward(x, w[:4], b, 1e-5),
        "no gain": lambda: layernorm.forward(x, w[:0], b, 1e-5),
        "bias": lambda: layernorm.rebuild(saved, w, b[:7]),
        "statistics": lambda: layernorm.backward(x, x, saved.inv_sigma[:10], w),
        "weight": lambda: linear.forward(x[:3], torch.randn(7, 16), None),
        "angles": lambda: rotary.forward(heads, cos[:10], sin[:10]),
        "target": lambda: loss.forward_and_delta(x, torch.full((20,), 8), 1.0),
        "negative target": lambda: loss.forward_and_delta(x, torch.full((20,), -100), 1.0),
        "products": lambda: calls.product(x, torch.randn(9, 4), None),
        "bias of a product": lambda: calls.product(x, torch.randn(8, 16), None, bias=w),
        "dtype of a bias": lambda: calls.product(x, torch.randn(8, 16), None, bias=d[0].double()),
        "result": lambda: calls.product(x, torch.randn(8, 16), d[:19]),
        "keys": lambda: calls.forward_attention(whole, plain, heads, heads[:10], heads[:10], None, heads, cos),
        "sinks": lambda: calls.forward_attention(whole, plain, heads, heads, heads, w, heads, cos),
        "dtype of sinks": lambda: calls.forward_attention(whole, plain, heads, heads, heads, w.double(), heads, cos),
        "packed bytes": lambda: calls.packed_product("Q8_0", torch.randn(1, 32), torch.zeros(4, 33, dtype=torch.uint8), d),
        "rounded": lambda: calls.rounded_product("Q8_0", d[:1], torch.zeros(4, 34, dtype=torch.uint8), torch.empty(1, 4)),
        "kind": lambda: calls.rounded_product("BF16", torch.randn(1, 32), torch.zeros(4, 64, dtype=torch.uint8), d[:1, :4]),
        "bytes to unpack": lambda: calls.packed_unpack("Q4_K", torch.zeros(143, dtype=torch.uint8), torch.empty(256)),
        "half a block": lambda: calls.packed_unpack("Q4_K", torch.zeros(144, dtype=torch.uint8), torch.empty(384)),
        "unpacked columns": lambda: calls.packed_unpack("Q8_0", torch.zeros(34, dtype=torch.uint8), torch.empty(64)[::2]),
        "unpacked dtype": lambda: calls.packed_unpack("Q8_0", torch.zeros(34, dtype=torch.uint8), torch.empty(32).half()),
    }  # fmt: skip
    for name, attempt in attempts.items():
        with pytest.raises(HandgradError):
            attempt()
            pytest.fail(name)


def halved(x: Tensor) -> Tensor:
    return x[: len(x) // 2]


@pytest.mark.parametrize("preset", ["nano", "nano-llama"])
@pytest.mark.parametrize(
    "change", [lambda x: x[:0], halved, lambda x: x[..., :-1]], ids=["empty", "halved", "narrower"]
)
def test_exchanged_data_of_a_parameter_is_an_error(preset: str, change: Callable[[Tensor], Tensor]) -> None:
    """Kernels once read behind the end of it: a segmentation fault, or another loss."""
    config = hg.preset(preset, n_vocab=11, n_context=16, d_model=16, n_heads=2, n_blocks=2)
    tokens = torch.arange(16)[None] % 11
    for name, _ in hg.GPT(config).named_parameters():
        model = hg.GPT(config)
        parameter = model.get_parameter(name)
        parameter.data = change(parameter.data)
        with pytest.raises((ValueError, RuntimeError, IndexError, ZeroDivisionError)):
            model.loss_and_grads(tokens, tokens)


def test_a_gradient_of_another_shape_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are added into it by a kernel."""
    monkeypatch.setattr(library, "multiplies", lambda: True)
    model = hg.GPT(hg.preset("nano", n_vocab=11, d_model=64, n_heads=2, n_blocks=1))
    tokens = torch.arange(64)[None] % 11
    weight = model.blocks[0].mlp.contract.plain().weight
    weight.grad = torch.zeros_like(weight)
    weight.grad.data = weight.grad.data[:1]
    with pytest.raises(HandgradError, match="where a layer needs"):
        model.loss_and_grads(tokens, tokens)


@pytest.mark.parametrize("preset", ["nano", "nano-llama"])
def test_a_running_engine_sees_exchanged_data(preset: str) -> None:
    """The kernel for single tokens holds addresses: it is described again, or the error is that of the blocks one by one."""
    config = hg.preset(preset, n_vocab=11, n_context=16, d_model=16, n_heads=2, n_blocks=2)
    for change, fails in ((lambda x: x + 1, False), (lambda x: x[:8], True)):
        found = []
        for own in (True, False):
            model = hg.GPT(config, dtype="float64")
            engine = Engine(model)
            sequence = engine.add([1, 2, 3], Options(max_new_tokens=6, logprobs=1))
            engine.step()
            engine.step()
            assert engine._blocks is not None
            if not own:
                engine._blocks = None
            gain = model.blocks[1].norm_2.weight
            gain.data = change(gain.data)
            torch.randn(1000, 1000)  # what was freed is used again
            if fails:
                with pytest.raises(HandgradError, match="where a layer needs"):
                    engine.step()
                continue
            while engine.busy:
                engine.step()
            found.append([x.logprob for x in sequence.logprobs])
        assert fails or found[0] == pytest.approx(found[1], rel=1e-9)


def test_a_layer_of_another_shape_has_no_description() -> None:
    model = hg.GPT(hg.preset("nano", n_vocab=11, d_model=16, n_heads=2, n_blocks=1))
    assert describe(model) is not None
    for name, p in model.blocks[0].named_parameters():
        whole = p.data
        p.data = halved(whole)
        assert describe(model) is None, name
        p.data = whole


def test_places_outside_of_the_cache_are_refused() -> None:
    config = hg.preset("nano-llama", n_vocab=11, n_context=16, d_model=16, n_heads=2, n_blocks=2)
    model = hg.GPT(config)
    cache = Cache(model)
    slot = cache.add()
    cache.reserve(slot, 3)
    slot.length = 3
    step = cache.step([(slot, 1)])
    places, blocks = step.places, describe(model)
    assert places is not None and blocks is not None
    a, (rotation,) = torch.randn(1, 16), model.rotations(step.positions, [1])
    heads = torch.randn(1, 2, 8)
    blocks.forward(a, places, rotation)
    for column, value in ((5, -1), (5, slot.capacity), (4, 3)):
        wrong = places._replace(table=places.table.clone())
        wrong.table[0, column] = value
        with pytest.raises(HandgradError, match="no place in the cache"):
            blocks.forward(a, wrong, rotation)
        with pytest.raises(HandgradError, match="no place in the cache"):
            token_calls.attend_tokens(wrong, 0, calls.Scores(), heads, heads, heads, None, torch.empty_like(heads))
    for bad in (places._replace(blocks=1), places._replace(k=(1, 2, 9)), places._replace(table=places.table[:0])):
        with pytest.raises(HandgradError, match="where a layer needs"):
            blocks.forward(a, bad, rotation)
    with pytest.raises(HandgradError, match="where a layer needs"):
        token_calls.attend_tokens(places, 2, calls.Scores(), heads, heads, heads, None, torch.empty_like(heads))
