"""GPT against autograd and finite differences (`verify`) and against paper/; freezing, dtypes and seeds."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import handgrad as hg
from conftest import OTHER_ACTIVATIONS, TOLERANCE, make_batch, make_model
from handgrad.lora.layer import LoRA
from handgrad.ops import attention
from handgrad.optim import OptimizerInBackward
from handgrad.paper import transformer
from handgrad.proof.oracles import relative_error
from paper_form import network_of, options_of

SHAPES = {
    "one block": {},
    "three blocks": {"n_blocks": 3},
    "twelve blocks": {"n_blocks": 12},
    "one head": {"n_heads": 1},
    "prime widths": {"d_model": 7, "n_heads": 7, "d_hidden": 13},
    "d_ρ ≠ d_h": {"d_rho": 3, "d_head": 5},
    "d_ρ ≠ d_h, width not divisible": {"d_model": 7, "n_heads": 2, "d_rho": 1, "d_head": 4},
    "vocabulary of two": {"n_vocab": 2},
    "untied": {"tied": False},
    "untied with bias": {"tied": False, "logits_bias": True},
    "tied with bias": {"logits_bias": True},
    "no b_k": {"key_bias": False},
    "not causal": {"causal": False},
    **{name: {"activation": name} for name in OTHER_ACTIVATIONS},
    "large ε": {"eps": 0.1},
}
LENGTHS = {"one token": [1], "one sequence": [8], "uneven": [5, 1, 9], "equal": [6, 6]}


def take_grads(model: hg.GPT) -> list[torch.Tensor]:
    """Return the gradients of all parameters and reset them."""
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return grads


def assert_grads_equal(model: hg.GPT, expected: list[torch.Tensor]) -> None:
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert relative_error(p.grad, grad) <= 1e-12


# Every shape with uneven lengths; all lengths with the shapes that attention handles differently.
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [(s, "uneven") for s in SHAPES]
    + [(s, n) for s in ("one block", "d_ρ ≠ d_h", "not causal") for n in LENGTHS if n != "uneven"],
)
@pytest.mark.some_cases(6)
def test_signals_and_gradients_match_autograd_and_finite_differences(shape: str, lengths: str) -> None:
    """In float64 within 1e-10 of autograd; the same weights in float32 within 1e-4."""
    model = make_model(dtype=torch.float32, **SHAPES[shape])
    tokens, targets = make_batch(model, LENGTHS[lengths])
    report = hg.verify(model, tokens, targets, LENGTHS[lengths])
    assert report.passed, str(report.summary())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", ["one token", "uneven"])
def test_signals_match_paper(shape: str, lengths: str) -> None:
    """paper/ and ops/ agree within 1e-12 on every shared intermediate."""
    model = make_model(**SHAPES[shape])
    tokens, targets = make_batch(model, LENGTHS[lengths])
    found = hg.trace(model, tokens, targets, LENGTHS[lengths])
    with torch.no_grad():
        p, o = network_of(model), options_of(model.config)
    n_targets = int((targets != -100).sum())
    start = compared = 0
    for length in LENGTHS[lengths]:
        rows = slice(start, start + length)
        f = transformer.forward(tokens[rows], p, o)
        b = transformer.backward(targets[rows], p, f, o)
        expected = {"a_11": f.a_11, "a_12": f.a_12, "y_pred": f.y_pred, "a_bar_10": f.norm_10.a_bar}
        signals = {"delta_11": b.delta_11, "delta_12": b.delta_12}
        for i, (forward, backward) in enumerate(zip(f.blocks, b.blocks, strict=True)):
            for k in range(1, 11):
                expected[f"blocks.{i}.a_{k}"] = getattr(forward, f"a_{k}")
                signals[f"blocks.{i}.delta_{k}"] = getattr(backward, f"delta_{k}")
            for name, norm in (("1", forward.norm_1), ("5", forward.norm_5)):
                expected[f"blocks.{i}.a_bar_{name}"] = norm.a_bar
            for name in ("q", "k", "v", "rho"):
                expected[f"blocks.{i}.{name}"] = torch.stack([getattr(h, name) for h in forward.heads])
            for name in ("delta_causal", "delta_raw"):
                signals[f"blocks.{i}.{name}"] = torch.stack([getattr(h, name) for h in backward.heads])
        for name, x in {**expected, **{k: v / n_targets for k, v in signals.items()}}.items():
            ours = found[name]
            ours = ours[:, rows, rows] if ours.shape[-2:] == (len(tokens),) * 2 and x.ndim == 3 else ours[..., rows, :]
            assert relative_error(ours, x, floor=1e-3) <= 1e-12, name
            compared += 1
        start += length
    assert compared == len(LENGTHS[lengths]) * (6 + model.config.n_blocks * 28)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_match_paper(shape: str) -> None:
    model = make_model(**SHAPES[shape])
    tokens, targets = make_batch(model, [8])
    found = hg.trace(model, tokens, targets)
    with torch.no_grad():
        p, o = network_of(model), options_of(model.config)
    grads = transformer.backward(targets, p, transformer.forward(tokens, p, o), o).grads
    n_targets = int((targets != -100).sum())
    expected = {"grad_w_tok": grads.w_tok, "grad_w_pos": grads.w_pos, "grad_w_10": grads.w_10, "grad_b_10": grads.b_10}
    expected |= {f"grad_{k}_11": x for k, x in (("w", grads.w_11), ("b", grads.b_11)) if x is not None}
    for i, block in enumerate(grads.blocks):
        for name in ("w_1", "b_1", "w_3", "b_3", "w_5", "b_5", "w_6", "b_6", "w_8", "b_8"):
            expected[f"blocks.{i}.grad_{name}"] = getattr(block, name)
        for name in ("w_q", "b_q", "w_k", "b_k", "w_v", "b_v"):
            parts = [getattr(head, name) for head in block.heads]
            if parts[0] is not None:
                expected[f"blocks.{i}.grad_{name}"] = torch.cat(parts, -1)
    assert set(expected) == {name for name in found if "grad_" in name}
    for name, x in expected.items():
        assert relative_error(found[name], x / n_targets, floor=1e-3) <= 1e-12, name


@settings(max_examples=int(os.environ.get("HANDGRAD_SHAPES", "10")), deadline=None)  # make long: 200
@given(st.data())
def test_random_shapes_pass_verify(data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 4))
    model = make_model(
        seed=data.draw(st.integers(0, 999)), n_heads=heads, d_model=heads * data.draw(st.integers(1, 4)) + heads,
        n_blocks=data.draw(st.integers(1, 2)), n_vocab=data.draw(st.integers(2, 13)), tied=data.draw(st.booleans()),
        causal=data.draw(st.booleans()), key_bias=data.draw(st.booleans()), d_hidden=data.draw(st.integers(1, 9)),
    )  # fmt: skip
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=4))
    tokens, targets = make_batch(model, lengths, ignored=data.draw(st.sampled_from([0.0, 0.5, 0.9])))
    report = hg.verify(model, tokens, targets, lengths)
    assert report.passed, [(c.id, c.error) for c in report.failed] or report.summary()


def test_batched_and_packed_input_give_equal_results() -> None:
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [6, 6, 6])
    loss = model.loss_and_grads(tokens, targets, [6, 6, 6])
    packed = take_grads(model)
    assert model.loss_and_grads(tokens.view(3, 6), targets.view(3, 6)) == pytest.approx(loss, rel=1e-14)
    assert_grads_equal(model, packed)
    logits = model.logits(tokens.view(3, 6))
    assert logits.shape == (3, 6, 11)
    assert relative_error(logits.view(18, 11), model.logits(tokens, [6, 6, 6])) <= 1e-12


def test_packed_sequences_are_independent() -> None:
    model = make_model(n_blocks=2)
    tokens, _ = make_batch(model, [5, 7])
    alone = torch.cat([model.logits(tokens[:5]), model.logits(tokens[5:])])
    assert relative_error(model.logits(tokens, [5, 7]), alone) <= 1e-12


def test_loss_equals_loss_and_grads() -> None:
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [5, 7])
    assert model.loss(tokens, targets, [5, 7]) == pytest.approx(
        model.loss_and_grads(tokens, targets, [5, 7]), rel=1e-13
    )


def test_uneven_accumulation_equals_one_batch() -> None:
    model = make_model(n_blocks=2)
    lengths = [9, 2, 13, 5]
    tokens, targets = make_batch(model, lengths, ignored=0.5)
    n_targets = int((targets != -100).sum())
    total_loss = model.loss_and_grads(tokens, targets, lengths)
    expected = take_grads(model)
    total = start = 0
    for n in lengths:
        part = slice(start, start + n)
        start += n
        if (targets[part] != -100).any():
            total += model.loss_and_grads(tokens[part], targets[part], n_targets=n_targets)
    assert total == pytest.approx(total_loss, rel=1e-13)
    assert_grads_equal(model, expected)


def test_chunked_logits_give_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    tokens, targets = make_batch(model, [13])
    loss = model.loss_and_grads(tokens, targets)
    expected = take_grads(model)
    monkeypatch.setattr("handgrad.model.passes.readout.LOGITS_AT_ONCE", 3 * 11)
    assert model.loss_and_grads(tokens, targets) == pytest.approx(loss, rel=1e-14)
    assert_grads_equal(model, expected)


def test_key_bias_has_zero_gradient_and_no_effect() -> None:
    model = make_model()
    tokens, targets = make_batch(model, [9])
    bias = model.transformer.h[0].attn.c_attn.bias
    model.loss_and_grads(tokens, targets)
    assert (bias.grad[12:24] == 0).all() and (bias.grad[:12] != 0).all() and (bias.grad[24:] != 0).all()
    before = model.logits(tokens)
    with torch.no_grad():
        bias[12:24] += 1.7
    assert relative_error(model.logits(tokens), before) <= 1e-12


def test_frozen_parameters_get_no_gradient_and_others_are_unchanged() -> None:
    model = make_model(n_blocks=3, tied=False)
    tokens, targets = make_batch(model, [9])
    model.loss_and_grads(tokens, targets)
    all_grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for name, p in model.named_parameters():
        p.requires_grad_("h.1.mlp" in name or "h.2.ln_1" in name)
    model.loss_and_grads(tokens, targets)
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert relative_error(p.grad, all_grads[name]) <= 1e-12
        else:
            assert p.grad is None, name


def test_step_after_inject_leaves_frozen_weights_unchanged() -> None:
    """As in README: backward over all parameters, then inject, then a step of an optimizer over all parameters."""
    model = make_model(n_blocks=2)
    batch = make_batch(model, [9])
    model.loss_and_grads(*batch)
    hg.lora.inject(model, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.loss_and_grads(*batch)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, name
        else:
            assert p.grad is None and torch.equal(p, before[name]), name


@pytest.mark.parametrize("how", ["model", "module", "parameter"])
def test_frozen_block_is_not_updated(how: str) -> None:
    model = make_model(n_blocks=2)
    batch = make_batch(model, [9])
    model.loss_and_grads(*batch)
    if how == "model":
        assert model.requires_grad_(False) is model and all(p.grad is None for p in model.parameters())
        model.blocks[1].requires_grad_(True)
    elif how == "module":
        model.blocks[0].requires_grad_(False)
    else:
        for p in model.blocks[0].parameters():
            p.requires_grad = False
    before = [p.detach().clone() for p in model.blocks[0].parameters()]
    model.loss_and_grads(*batch)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=1.0)).step(*batch)
    assert all(torch.equal(p, q) for p, q in zip(model.blocks[0].parameters(), before, strict=True))
    assert all(p.grad is None for p in model.blocks[0].parameters())


def test_tie_and_untie_discard_the_shared_gradient() -> None:
    model = make_model()
    model.loss_and_grads(*make_batch(model, [9]))
    model.untie()
    assert model.transformer.wte.weight.grad is None and model.lm_head.weight.grad is None
    model.loss_and_grads(*make_batch(model, [9]))
    model.tie()
    assert model.transformer.wte.weight.grad is None


def test_backward_stops_at_lowest_trainable_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(n_blocks=3)
    for name, p in model.named_parameters():
        p.requires_grad_("h.2." in name)
    blocks_run = []
    for i, block in enumerate(model.blocks):
        original = block.backward
        monkeypatch.setattr(block, "backward", lambda *a, i=i, f=original: blocks_run.append(i) or f(*a))
    model.loss_and_grads(*make_batch(model, [9]))
    assert blocks_run == [2]


def test_adapters_on_every_frozen_linear_layer_pass_verify() -> None:
    """Gradients of the factors, and Δ through the frozen base (R3)."""
    model = make_model(n_blocks=2)
    for p in model.parameters():
        p.requires_grad_(False)
    for block in model.blocks:
        block.attn.c_attn = LoRA(block.attn.c_attn, 2, 0.5)
        block.attn.c_proj = LoRA(block.attn.c_proj, 3, 0.7)
        block.mlp.c_fc = LoRA(block.mlp.c_fc, 1, 1.5)
        block.mlp.c_proj = LoRA(block.mlp.c_proj, 2, 0.1)
    model.lm_head = LoRA(model.lm_head, 2, 0.9)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("up"):
                p.copy_(0.3 * torch.randn(p.shape))
    tokens, targets = make_batch(model, [9, 4])
    report = hg.verify(model, tokens, targets, [9, 4])
    assert report.passed, report.summary()
    assert sum(c.section == "Parameter gradients" for c in report) == 18
    names = set(hg.trace(model, tokens, targets, [9, 4]))
    assert {"grad_d_11", "grad_u_11", "blocks.1.grad_d_8", "blocks.0.grad_u_2"} <= names
    assert not any(name.startswith("grad_w") for name in names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_in_each_dtype_match_float64(dtype: torch.dtype) -> None:
    """Compared with the same weights in float64, in the Frobenius norm."""
    model = make_model(seed=3, n_blocks=3, d_model=24, dtype=dtype)
    exact = make_model(seed=3, n_blocks=3, d_model=24)
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    tokens, targets = make_batch(model, [16, 7])
    loss = model.loss_and_grads(tokens, targets, [16, 7])
    assert loss == pytest.approx(exact.loss_and_grads(tokens, targets, [16, 7]), rel=TOLERANCE[dtype])
    assert model.logits(tokens, [16, 7]).dtype == dtype
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype == dtype
        assert (p.grad.double() - q.grad).norm() <= TOLERANCE[dtype] * q.grad.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saturated_attention_keeps_error_signal(dtype: torch.dtype) -> None:
    """With c_attn so large that softmax is almost one-hot, the small remaining error signal is still accurate."""
    model = hg.GPT(hg.preset("nano", n_blocks=1), seed=1, dtype=dtype)
    with torch.no_grad():
        model.blocks[0].attn.c_attn.weight *= 1e3
    trace = hg.trace(model, *make_batch(model, [64]))
    q, k, v = (trace[f"blocks.0.{name}"].transpose(0, 1).double().contiguous() for name in "qkv")
    delta = trace["blocks.0.delta_3"].double().view_as(v)
    _, saved = attention.forward(q, k, v, attention.spans_of((64,)))
    rho, signal, _ = attention.maps(delta, saved, (64,))
    assert relative_error(trace["blocks.0.rho"], rho) <= TOLERANCE[dtype]
    floor = torch.finfo(torch.float32).eps * (delta.abs().max() * v.abs().max()).item()
    assert relative_error(trace["blocks.0.delta_causal"], signal, floor) <= TOLERANCE[dtype]


def test_parameter_names_and_shapes_match_gpt2() -> None:
    model = hg.GPT(hg.preset("gpt2"), device="meta")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert len(shapes) == 2 + 12 * 12 + 2
    assert shapes["transformer.wte.weight"] == (50257, 768)
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (768, 2304)
    assert shapes["transformer.h.11.mlp.c_proj.weight"] == (3072, 768)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_same_seed_gives_same_weights() -> None:
    one, two, other = (hg.GPT(hg.preset("nano"), seed=s) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.transformer.wte.weight, other.transformer.wte.weight)


def test_forty_steps_overfit_one_sentence() -> None:
    """Forty steps of AdamW on one sentence reduce its loss from above 5 to below 0.3."""
    model = hg.GPT(hg.preset("nano", n_blocks=2), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(b"every gradient derived by hand, every one with a proof"))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(model.loss_and_grads(text[:-1], text[1:]))
        optimizer.step()
    assert losses[0] > 5 and losses[-1] < 0.3
