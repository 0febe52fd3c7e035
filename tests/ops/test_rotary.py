"""ops.rotary against paper.rotary, autograd, finite differences and transformers."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from conftest import ROUNDING, SCALES, rounded
from handgrad.ops import rotary as fast
from handgrad.paper import rotary as plain
from handgrad.proof.oracles import differentiate, directional_error, relative_error
from handgrad.tolerances import FINITE_DIFFERENCE_TOLERANCE, IDENTITY_TOLERANCE, TOLERANCE

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, odd factor": {"rope_type": "linear", "factor": 2.7},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "llama3, odd factor": {
        "rope_type": "llama3",
        **LLAMA3,
        "factor": 5.3,
        "low_freq_factor": 1.5,
        "high_freq_factor": 6.5,
    },
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn, odd factor": {"rope_type": "yarn", **YARN, "factor": 40.3, "beta_fast": 24.0, "beta_slow": 2.0},
    "yarn, mscale": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, one mscale": {"rope_type": "yarn", **YARN, "mscale": 0.7},
    "yarn, attention factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.7},
    "yarn, not truncated": {"rope_type": "yarn", **YARN, "truncate": False},
    "yarn, short context": {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 16},
    "yarn, very short context": {
        "rope_type": "yarn",
        **YARN,
        "original_max_position_embeddings": 6,
    },  # a ramp of width 0
    "yarn, one plane": {"rope_type": "yarn", **YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, factor below 1": {"rope_type": "yarn", **YARN, "factor": 0.5},
}
EXACT = ("default", "linear", "linear, odd factor", "llama3", "yarn")  # factors that are powers of 2 round nothing


def make(n: int, h: int, d_rho: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, Δ (n, h, d_ρ), positions (n) as in packed sequences, and θ, all float64"""
    positions = torch.arange(n) % 5 + torch.arange(n) // 5 * 100
    return *torch.randn(2, n, h, d_rho).double(), positions, plain.frequencies(d_rho, 500.0)


def llama_config(d_rho: int, base: float, scaling: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=3 * d_rho, num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=131072,
        rope_parameters={"rope_theta": base, **scaling},
    )  # fmt: skip


# ── the rotation ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("n", "h", "d_rho", "m"), [(1, 1, 2, 1.0), (7, 3, 10, 1.0), (13, 2, 6, 1.3)])
def test_equal_to_the_paper(n: int, h: int, d_rho: int, m: float) -> None:
    x, delta, positions, theta = make(n, h, d_rho)
    before = x.clone(), delta.clone()
    cos, sin = fast.angles(positions, theta, m)
    tables = cos.clone(), sin.clone()
    y, back = fast.forward(x, cos, sin), fast.backward(delta, cos, sin)
    for head in range(h):
        expected = plain.forward(x[:, head], positions, theta, False, m)
        assert relative_error(y[:, head], expected) <= IDENTITY_TOLERANCE
        expected = plain.delta_prev(delta[:, head], positions, theta, False, m)
        assert relative_error(back[:, head], expected) <= IDENTITY_TOLERANCE
    assert torch.equal(x, before[0]) and torch.equal(delta, before[1])
    assert torch.equal(cos, tables[0]) and torch.equal(sin, tables[1])


@pytest.mark.parametrize("m", [1.0, 1.3])
def test_autograd_and_finite_differences(m: float) -> None:
    x, delta, positions, theta = make(7, 3, 10)
    cos, sin = fast.angles(positions, theta, m)
    ours = fast.backward(delta, cos, sin)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([plain.forward(x[:, i], positions, theta, False, m) for i in range(3)], 1)

    (expected,) = differentiate(f, x, upstream=delta)
    assert relative_error(ours, expected) <= TOLERANCE[torch.float64]
    error = directional_error(
        lambda x: (fast.forward(x, cos, sin) * delta).sum().item(),
        x,
        ours,
        torch.Generator().manual_seed(0),
    )
    assert error <= FINITE_DIFFERENCE_TOLERANCE


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [*SCALES, 1e6])
def test_every_dtype_and_scale(scale: float, dtype: torch.dtype) -> None:
    """Compared with the rotation by the same tables; bfloat16 rounds the result only, which is half a unit of it."""
    x, delta = rounded(40, 2, 6, dtype=dtype, scale=scale), rounded(40, 2, 6, dtype=dtype, scale=1e-3)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    theta, _ = fast.frequencies(6, 10_000.0, dtype=table)
    cos, sin = fast.angles(torch.arange(40), theta)
    assert cos.dtype == sin.dtype == table and cos.shape == sin.shape == (40, 3)
    y, back = (f(t.to(dtype), cos, sin) for f, t in ((fast.forward, x), (fast.backward, delta)))
    exact = fast.forward(x, cos.double(), sin.double())
    assert y.dtype == back.dtype == dtype
    assert relative_error(y, exact) <= ROUNDING[dtype]
    assert relative_error(back, fast.backward(delta, cos.double(), sin.double())) <= ROUNDING[dtype]
    if dtype == torch.bfloat16:
        length = x.norm(dim=2, keepdim=True)
        assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-8 + length * 1e-6).all()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_parts_and_views_give_the_same_as_one_call(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """q is a view of the rows of the projection; parts of several rows, the last one shorter"""
    x = torch.randn(11, 3 * 2 * 6).to(dtype)[:, 12:24].view(11, 2, 6)
    cos, sin = fast.angles(torch.arange(11), fast.frequencies(6, 500.0)[0])
    one_call = fast.forward(x.contiguous(), cos, sin)
    assert torch.equal(fast.forward(x, cos, sin), one_call)
    for entries in (1, 50):
        monkeypatch.setattr(fast, "ENTRIES_AT_ONCE", entries)
        assert relative_error(fast.forward(x, cos, sin), one_call) <= IDENTITY_TOLERANCE
    assert fast.forward(x[:0], cos[:0], sin[:0]).shape == (0, 2, 6)


# ── what a rotation keeps ───────────────────────────────────────────────────────────────────────────────────────────


def test_lengths_are_kept_and_backward_undoes_forward() -> None:
    x, delta, positions, theta = make(7, 3, 10)
    cos, sin = fast.angles(positions, theta)
    y = fast.forward(x, cos, sin)
    assert relative_error(y.norm(dim=2), x.norm(dim=2)) <= IDENTITY_TOLERANCE
    assert relative_error(fast.backward(y, cos, sin), x) <= IDENTITY_TOLERANCE
    back = fast.backward(delta, cos, sin)
    assert abs((delta * y).sum() - (back * x).sum()) <= IDENTITY_TOLERANCE * 100  # Δ·(R x) = (Rᵗ Δ)·x
    assert torch.equal(y[0], x[0])  # position 0


def test_scores_depend_on_the_difference_of_positions() -> None:
    q, k, positions, theta = make(7, 3, 10)

    def scores(shift_q: int, shift_k: int) -> torch.Tensor:
        rotated_q = fast.forward(q, *fast.angles(positions + shift_q, theta))
        rotated_k = fast.forward(k, *fast.angles(positions + shift_k, theta))
        return torch.einsum("shd,thd->hst", rotated_q, rotated_k)

    assert relative_error(scores(1000, 1000), scores(0, 0)) <= IDENTITY_TOLERANCE
    assert relative_error(scores(1, 0), scores(0, 0)) > 1e-2


def test_a_bias_of_the_keys_changes_the_attention_weights() -> None:
    """Without rotation it adds the same number to a row of scores, which softmax ignores."""
    q, k, positions, theta = make(7, 1, 10)
    bias = torch.randn(10).double()

    def weights(k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q_rotated, k_rotated = (fast.forward(x, *fast.angles(positions, theta))[:, 0] for x in (q, k))
        return (q_rotated @ k_rotated.t()).softmax(1)

    nowhere = torch.zeros_like(positions)
    assert relative_error(weights(k + bias, nowhere), weights(k, nowhere)) <= IDENTITY_TOLERANCE
    assert relative_error(weights(k + bias, positions), weights(k, positions)) > 1e-2


@pytest.mark.parametrize("d_rho", [2, 4, 10])
def test_the_two_forms_differ_by_a_permutation(d_rho: int) -> None:
    x, delta, positions, theta = make(7, 3, d_rho)
    order = torch.arange(d_rho).view(-1, 2).t().flatten()  # 0, 2, 4, … 1, 3, 5, …
    assert torch.equal(x[..., order], x @ plain.permutation(d_rho).t())
    assert torch.equal(order[order.argsort()], torch.arange(d_rho))
    cos, sin = fast.angles(positions, theta)
    for f, by_paper, t in ((fast.forward, plain.forward, x), (fast.backward, plain.delta_prev, delta)):
        interleaved = torch.stack([by_paper(t[:, i], positions, theta, True) for i in range(3)], 1)
        assert relative_error(f(t[..., order], cos, sin), interleaved[..., order]) <= IDENTITY_TOLERANCE


# ── frequencies, and transformers ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("d_rho", [6, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.some_cases(3)
def test_frequencies(name: str, d_rho: int, base: float) -> None:
    """Equal to transformers in float32, and to the paper package in float64"""
    scaling = SCALINGS[name]
    theta, m = fast.frequencies(d_rho, base, fast.Scaling(**scaling))
    config = llama_config(d_rho, base, dict(scaling))
    kind = scaling["rope_type"]
    init = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    expected, expected_m = init(config)
    assert theta.dtype == torch.float32 and m == pytest.approx(expected_m, rel=1e-15)
    if name in EXACT:
        assert torch.equal(theta, expected)
    assert ((theta - expected).abs() <= 2 * torch.finfo(torch.float32).eps * expected).all()

    wide, wide_m = fast.frequencies(d_rho, base, fast.Scaling(**scaling), torch.float64)
    literal, literal_m = by_the_paper(d_rho, base, **scaling)
    assert wide.dtype == torch.float64 and wide_m == pytest.approx(literal_m, rel=1e-15)
    assert relative_error(wide / literal, torch.ones_like(literal)) <= IDENTITY_TOLERANCE
    # a ramp s of 2e-7 from float32 is a large share of a scaled frequency where s is nearly 0
    assert relative_error(theta.double() / literal, torch.ones_like(literal)) <= 1e-4


def by_the_paper(d_rho: int, base: float, rope_type: str, **o: Any) -> tuple[torch.Tensor, float]:
    theta, n = plain.frequencies(d_rho, base), o.get("original_max_position_embeddings", 0)
    if rope_type == "default":
        return theta, 1.0
    if rope_type == "linear":
        return plain.linear(theta, o["factor"]), 1.0
    if rope_type == "llama3":
        share = plain.llama3_share(theta, o["low_freq_factor"], o["high_freq_factor"], n)
        return plain.blend(theta, o["factor"], share), 1.0
    share = plain.yarn_share(d_rho, base, o.get("beta_fast", 32), o.get("beta_slow", 1), n, o.get("truncate", True))
    m = o.get("attention_factor") or plain.yarn_attention_factor(o["factor"], o.get("mscale"), o.get("mscale_all_dim"))
    return plain.blend(theta, o["factor"], share), m


@pytest.mark.parametrize("name", EXACT)
def test_rotation_is_that_of_transformers(name: str) -> None:
    """q, k and the tables bit for bit in float32, at positions up to 131071"""
    n, h, d_rho, scaling = 9, 3, 64, SCALINGS[name]
    q, k = torch.randn(2, n, h, d_rho)
    positions = torch.tensor([0, 1, 2, 3, 100, 4095, 8192, 100_000, 131_071])
    module = LlamaRotaryEmbedding(llama_config(d_rho, 500_000.0, dict(scaling)))
    cos, sin = module(q, positions[None])
    ours = fast.angles(positions, *fast.frequencies(d_rho, 500_000.0, fast.Scaling(**scaling)))
    assert torch.equal(ours[0], cos[0, :, : d_rho // 2]) and torch.equal(ours[1], sin[0, :, : d_rho // 2])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for x, y in zip((q, k), expected, strict=True):
        assert relative_error(fast.forward(x, *ours), y[0].transpose(0, 1)) <= 2 * torch.finfo(torch.float32).eps


def test_yarn_scales_the_scores() -> None:
    """m multiplies queries and keys, so the scores are multiplied by m²"""
    q, k, positions, theta = make(7, 3, 10)
    m = fast.frequencies(10, 1e4, fast.Scaling(**SCALINGS["yarn"]))[1]
    assert m == pytest.approx(1 + math.log(4) / 10)
    plain_q, scaled_q, plain_k, scaled_k = (
        fast.forward(x, *fast.angles(positions, theta, factor)) for x in (q, k) for factor in (1.0, m)
    )
    expected = m**2 * torch.einsum("shd,thd->hst", plain_q, plain_k)
    assert relative_error(torch.einsum("shd,thd->hst", scaled_q, scaled_k), expected) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize(
    ("d_rho", "scaling", "message"),
    [
        (7, {}, "even width of queries and keys, not 7"),
        (0, {}, "even width of queries and keys, not 0"),
        (
            8,
            {"rope_type": "su"},
            "unknown rope_type 'su'; choose one of default, linear, dynamic, llama3, yarn, longrope",
        ),
        (
            8,
            {"rope_type": "longrope", "original_max_position_embeddings": 8},
            "longrope needs 4 short and long factors",
        ),
        (8, {"rope_type": "llama3"}, "'llama3' needs original_max_position_embeddings"),
        (8, {"rope_type": "yarn", "factor": 4.0}, "'yarn' needs original_max_position_embeddings"),
    ],
)
def test_wrong_arguments_are_refused(d_rho: int, scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fast.frequencies(d_rho, 10_000.0, fast.Scaling(**scaling))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_written_over_its_input(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are rotated where they are, in the product of which they are a part."""
    monkeypatch.setattr(fast, "ENTRIES_AT_ONCE", 40)
    _, _, positions, theta = make(11, 3, 4)
    cos, sin = fast.angles(positions, theta if dtype == torch.float64 else theta.float())
    stream = torch.randn(11, 20).to(dtype)
    x, rest = stream[:, :12].view(11, 3, 4), stream[:, 12:].clone()
    for rotate in (fast.forward, fast.backward):
        expected = rotate(x, cos, sin)
        rotate(x, cos, sin, into=stream[:, :12].view(11, 3, 4))
        assert torch.equal(x, expected) and torch.equal(stream[:, 12:], rest)
        other = torch.empty_like(expected)
        assert torch.equal(rotate(x, cos, sin, into=other), rotate(x, cos, sin))


# ── a part of a head, and neighboring features ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("neighbors", [False, True])
@pytest.mark.parametrize(("n", "h", "d_rho", "w"), [(1, 1, 3, 2), (7, 3, 10, 4), (13, 2, 7, 6), (5, 2, 8, 8)])
def test_a_part_of_a_head(n: int, h: int, d_rho: int, w: int, neighbors: bool) -> None:
    x, delta, positions, _ = make(n, h, d_rho)
    theta = plain.frequencies(w, 500.0)
    cos, sin = fast.angles(positions, theta)
    before = x.clone()
    y, back = fast.forward(x, cos, sin, neighbors=neighbors), fast.backward(delta, cos, sin, neighbors=neighbors)
    for head in range(h):
        expected = plain.forward_partial(x[:, head], positions, theta, neighbors)
        assert relative_error(y[:, head], expected) <= IDENTITY_TOLERANCE
        expected = plain.delta_prev_partial(delta[:, head], positions, theta, neighbors)
        assert relative_error(back[:, head], expected) <= IDENTITY_TOLERANCE
    by_heads = lambda x: torch.stack([plain.forward_partial(y, positions, theta, neighbors) for y in x.unbind(1)], 1)  # noqa: E731
    expected = differentiate(by_heads, x, upstream=delta)[0]
    assert relative_error(back, expected) <= TOLERANCE[torch.float64]
    assert torch.equal(y[..., w:], x[..., w:]) and torch.equal(back[..., w:], delta[..., w:])
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neighbors", [False, True])
@pytest.mark.parametrize("w", [4, 10])
@pytest.mark.parametrize("cut", ["contiguous", "columns", "heads first", "odd rows"])
@pytest.mark.some_cases(3)
def test_in_place_and_elsewhere_for_any_strides(cut: str, w: int, neighbors: bool, dtype: torch.dtype) -> None:
    """Written into itself, into another tensor, or anew, whatever the strides: the same bits as of a contiguous copy."""
    n, h, d_rho = 7, 3, 10
    views = {
        "contiguous": lambda: torch.randn(n, h, d_rho),
        "columns": lambda: torch.randn(n, 3 * h * d_rho).view(n, 3 * h, d_rho)[:, h : 2 * h],
        "heads first": lambda: torch.randn(h, n, d_rho).transpose(0, 1),
        "odd rows": lambda: torch.randn(n, h, d_rho + 1)[..., 1:],
    }
    dtype_of_tables = torch.float64 if dtype == torch.float64 else torch.float32
    theta, _ = fast.frequencies(w, 500.0, dtype=dtype_of_tables)
    cos, sin = fast.angles(torch.arange(n), theta)
    for rotate in (fast.forward, fast.backward):
        plain_x = views[cut]().to(dtype)
        x = views[cut]().to(dtype)
        x.copy_(plain_x)
        expected = rotate(plain_x.contiguous(), cos, sin, neighbors=neighbors)
        assert torch.equal(rotate(x, cos, sin, neighbors=neighbors), expected)
        other = torch.full_like(x, 7.0)
        assert rotate(x, cos, sin, into=other, neighbors=neighbors) is other and torch.equal(other, expected)
        assert torch.equal(x, plain_x)
        assert rotate(x, cos, sin, into=x, neighbors=neighbors) is x and torch.equal(x, expected)


@pytest.mark.parametrize("neighbors", [False, True])
def test_bfloat16_results_are_rounded_once(neighbors: bool) -> None:
    x = torch.randn(9, 2, 8).bfloat16()
    theta, _ = fast.frequencies(6, 500.0)
    cos, sin = fast.angles(torch.arange(9), theta)
    wide = fast.forward(x.float(), cos, sin, neighbors=neighbors)
    assert torch.equal(fast.forward(x, cos, sin, neighbors=neighbors), wide.bfloat16())
    operand = fast.forward(x.float(), cos, sin, dtype=torch.bfloat16, neighbors=neighbors)
    assert operand.dtype == torch.bfloat16 and torch.equal(operand, wide.bfloat16())
