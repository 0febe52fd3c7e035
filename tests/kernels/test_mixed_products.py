"""Who multiplies rounded operands: torch only if it really rounds them, and then the faster one, or as the user says."""

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from handgrad.kernels import calls, library, mixed_products
from handgrad.kernels.mixed_products import NARROW, OWN, TORCH, VARIABLE
from handgrad.machine import AMX_VARIABLE, amx_is_doubtful
from handgrad.ops import linear
from mixed_by_torch import Switch, forget, use_switch

if library.why_not(torch.bfloat16) is not None:
    pytest.skip(f"no mixed precision: {library.why_not(torch.bfloat16)}", allow_module_level=True)

BF16, FLOAT = torch.bfloat16, torch.float32
SETTING: Any = torch.backends.mkldnn.matmul


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As in a new process whose cache has the kernels and no choice; products to be timed are small."""
    (tmp_path / "kernels").mkdir()
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(mixed_products, "TIMED", (64, 65, 66))
    library._path.cache_clear()
    forget()
    yield monkeypatch
    monkeypatch.undo()
    library._path.cache_clear()
    forget()


def stored() -> Path:
    return library.path_beside(BF16, f".torch-{torch.__version__}")


# ── torch is a candidate only if it rounds ────────────────────────────────────────────────────────────────────────────


def test_what_torch_computes_decides_whether_it_is_a_candidate() -> None:
    """On the machine at hand, whatever it does under the switch."""
    if amx_is_doubtful() and AMX_VARIABLE not in os.environ:
        assert not mixed_products.torch_rounds()
        pytest.skip("in this virtual machine the attempt could end the process")
    a, b = torch.randn(150, 300), torch.randn(300, 170)
    with mixed_products.switched():
        found = torch.mm(a, b).double()
    rounded, exact = a.to(BF16).double() @ b.to(BF16).double(), a.double() @ b.double()
    to_rounded, to_exact = ((found - x).norm() for x in (rounded, exact))
    assert max(to_rounded, to_exact) > 100 * min(to_rounded, to_exact), "neither rounded operands nor float32"
    assert mixed_products.torch_rounds() is bool(to_rounded < to_exact)


class Truncating(Switch):
    def multiply(self, out: Tensor, a: Tensor, b: Tensor, beta: int) -> Tensor:
        a, b = ((x.contiguous().view(torch.int32) & -65536).view(FLOAT) for x in (a, b))
        return out.addmm_(a, b, beta=beta)


class RoundingResults(Switch):
    def multiply(self, out: Tensor, a: Tensor, b: Tensor, beta: int) -> Tensor:
        return out.copy_(super().multiply(out, a, b, beta).to(BF16))


class RoundingOne(Switch):
    def multiply(self, out: Tensor, a: Tensor, b: Tensor, beta: int) -> Tensor:
        return out.addmm_(a, b.to(BF16).float(), beta=beta)


class NotAdding(Switch):
    def multiply(self, out: Tensor, a: Tensor, b: Tensor, beta: int) -> Tensor:
        return out.addmm_(a, b, beta=1) if beta else super().multiply(out, a, b, beta)


class NotByColumns(Switch):
    def multiply(self, out: Tensor, a: Tensor, b: Tensor, beta: int) -> Tensor:
        return super().multiply(out, a, b, beta) if b.is_contiguous() else out.addmm_(a, b, beta=beta)


class NotSmall(Switch):
    def multiply(self, out: Tensor, a: Tensor, b: Tensor, beta: int) -> Tensor:
        return super().multiply(out, a, b, beta) if len(out) > NARROW else out.addmm_(a, b, beta=beta)


WRONG = [contextlib.nullcontext, Truncating, RoundingResults, RoundingOne, NotAdding, NotByColumns, NotSmall]


def test_a_torch_that_rounds_is_a_candidate(fresh: pytest.MonkeyPatch) -> None:
    use_switch(fresh)
    assert mixed_products.torch_rounds()


@pytest.mark.parametrize("switch", WRONG)
def test_a_torch_that_computes_something_else_is_not(fresh: pytest.MonkeyPatch, switch: Any) -> None:
    use_switch(fresh, switch)
    assert not mixed_products.torch_rounds() and mixed_products.choice() == OWN
    assert not stored().exists(), "nothing was measured"


def test_not_tried_where_amx_may_end_the_process(fresh: pytest.MonkeyPatch) -> None:
    use_switch(fresh)
    fresh.setattr(mixed_products, "amx_is_doubtful", lambda: True)
    fresh.delenv(AMX_VARIABLE)
    before = Switch.products
    assert not mixed_products.torch_rounds() and Switch.products == before
    fresh.setenv(AMX_VARIABLE, "AVX512_CORE_AMX")  # the user says that it works
    forget()
    assert mixed_products.torch_rounds()


# ── the switch ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("found", ["none", "ieee"])
def test_the_switch_is_restored_after_errors(found: str) -> None:
    before = SETTING.fp32_precision
    try:
        SETTING.fp32_precision = found
        with pytest.raises(ZeroDivisionError), mixed_products.switched():
            assert SETTING.fp32_precision == "bf16"
            _ = 1 / 0
        assert SETTING.fp32_precision == found
        with pytest.raises(RuntimeError, match="shape"):
            mixed_products._by_torch(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3))
        assert SETTING.fp32_precision == found
    finally:
        SETTING.fp32_precision = before


def test_threads_switch_one_after_the_other() -> None:
    """Otherwise one could restore what the other one had switched on."""
    before, seen = SETTING.fp32_precision, []

    def other() -> None:
        with mixed_products.switched():
            seen.append(SETTING.fp32_precision)

    thread = threading.Thread(target=other)
    with mixed_products.switched():
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not seen
    thread.join()
    assert seen == ["bf16"] and SETTING.fp32_precision == before


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("by_rows", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FLOAT), (FLOAT, FLOAT)])
@pytest.mark.parametrize("switch", ["stand-in", "real"])
@pytest.mark.some_cases(6)
def test_products_by_torch(
    fresh: pytest.MonkeyPatch, switch: str, dtypes: tuple[torch.dtype, torch.dtype], by_rows: tuple[bool, bool]
) -> None:
    """The real switch gets numbers of bfloat16, so that the result is known, whether or not it rounds on this machine."""
    if switch == "stand-in":
        use_switch(fresh)
    elif amx_is_doubtful() and AMX_VARIABLE not in os.environ:
        pytest.skip("in this virtual machine the attempt could end the process")
    m, n, w = 70, calls.DEEPEST_ROUNDED + 30, 65
    x, y = (torch.randn(s) if r else torch.randn(s[::-1]).t() for s, r in zip(((m, n), (n, w)), by_rows, strict=True))
    x, y = ((z if switch == "stand-in" else z.to(BF16).float()).to(t) for z, t in zip((x, y), dtypes, strict=True))
    bias, before = torch.randn(w), torch.randn(m, w)
    exact, size = x.to(BF16).double() @ y.to(BF16).double(), x.double().abs() @ y.double().abs()
    count = Switch.products

    def right(found: Tensor, expected: Tensor) -> bool:
        step = 2.0**-8 * expected.abs() if found.dtype == BF16 else 0.0
        return bool(((found.double() - expected).abs() <= 1e-6 * size + 1.001 * step).all())

    with mixed_products.using(TORCH):
        assert right(linear.product(x, y, dtype=FLOAT, rounded=True), exact)
        assert right(linear.product(x, y, dtype=FLOAT, bias=bias, rounded=True), exact + bias)
        out = before.clone()
        assert linear.product(x, y, out, add=True, rounded=True) is out and right(out, exact + before)
        assert right(linear.product(x, y, dtype=BF16, rounded=True), exact)
        assert right(linear.product(x[:, :NARROW], y[:NARROW], dtype=BF16, bias=bias, rounded=True), short(x, y) + bias)
        h, v = torch.randn(m, 5), torch.randn(5, w)
        assert right(
            linear.product(x, y, dtype=FLOAT, rounded=True, branch=(h, v)),
            exact + h.to(BF16).double() @ v.to(BF16).double(),
        )
        wide = torch.full((m, w + 3), math.nan)
        linear.product(x, y, wide[:, 1 : w + 1], rounded=True)  # a part of a larger matrix, and nothing beside it
        assert right(wide[:, 1 : w + 1], exact) and wide[:, [0, w + 1, w + 2]].isnan().all()
    assert Switch.products - count == (7 if switch == "stand-in" else 0), "torch computed all of them"


def short(x: Tensor, y: Tensor) -> Tensor:
    return x[:, :NARROW].to(BF16).double() @ y[:NARROW].to(BF16).double()


@pytest.mark.parametrize("shape", [(NARROW - 1, 200, 200), (200, NARROW - 1, 200), (200, 200, NARROW - 1)])
def test_narrow_products_are_ours(fresh: pytest.MonkeyPatch, shape: tuple[int, int, int]) -> None:
    use_switch(fresh)
    (m, n, w), count = shape, Switch.products
    x, y = torch.randn(m, n), torch.randn(n, w)
    found = []
    for chosen in (TORCH, OWN):
        with mixed_products.using(chosen):
            found.append(linear.product(x, y, rounded=True))
    assert torch.equal(*found) and Switch.products == count


# ── the choice ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("faster", [OWN, TORCH])
def test_the_faster_one_is_chosen_and_stored(fresh: pytest.MonkeyPatch, faster: str) -> None:
    use_switch(fresh)
    assert mixed_products.torch_rounds()
    module, name = (mixed_products, "_by_torch") if faster == OWN else (calls, "mixed_product")
    fresh.setattr(module, name, lambda *_, **__: time.sleep(0.02))
    assert mixed_products.choice() == faster and stored().read_text() == faster


@pytest.mark.parametrize("content", [OWN, TORCH])
def test_what_is_stored_is_kept(fresh: pytest.MonkeyPatch, content: str) -> None:
    use_switch(fresh)
    stored().write_text(content)
    fresh.setattr(mixed_products, "_faster", lambda: pytest.fail("measured again"))
    assert mixed_products.choice() == content
    use_switch(
        fresh, contextlib.nullcontext
    )  # as with ONEDNN_MAX_CPU_ISA: the same processor, and torch no longer rounds
    assert mixed_products.choice() == OWN


@pytest.mark.parametrize("content", [b"", b"ow", b"own\n", b"\xff\xfe", b"torch" * 1000, None])
def test_damaged_choices_are_made_again(fresh: pytest.MonkeyPatch, content: bytes | None) -> None:
    use_switch(fresh)
    if content is None:
        stored().mkdir()  # cannot be read, nor replaced
    else:
        stored().write_bytes(content)
    assert mixed_products.choice() in (OWN, TORCH)
    assert content is None or stored().read_text() == mixed_products.choice()
    assert [x.name for x in stored().parent.iterdir()] == [stored().name], "nothing is left beside it"


def test_the_user_decides(fresh: pytest.MonkeyPatch) -> None:
    use_switch(fresh)
    for given in (OWN, TORCH):
        fresh.setenv(VARIABLE, given)
        forget()
        assert mixed_products.choice() == given and not stored().exists()
    for given, switch, message in (
        ("both", Switch, 'HANDGRAD_MIXED_PRODUCTS must be own or torch, not "both"'),
        (TORCH, contextlib.nullcontext, "HANDGRAD_MIXED_PRODUCTS=torch needs products of rounded operands"),
    ):
        fresh.setenv(VARIABLE, given)
        use_switch(fresh, switch)
        with pytest.raises(hg.HandgradError, match=message):
            linear.product(torch.randn(9, 9), torch.randn(9, 9), rounded=True)
