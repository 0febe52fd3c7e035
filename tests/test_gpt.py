"""The whole network: against autograd and finite differences through `verify`, against paper/, and with bad input."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import handgrad as hg
from conftest import TOLERANCE, make_batch, make_model
from handgrad.adapters.lora import LoRA
from handgrad.model.trace import gradients
from handgrad.ops import attention
from handgrad.optim import OptimizerInBackward
from handgrad.paper import transformer
from handgrad.proof.oracles import relative_error
from handgrad.proof.reference import network_of, options_of

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
    "relu": {"activation": "relu"},
    "gelu": {"activation": "gelu"},
    "relu2": {"activation": "relu2"},
    "large ε": {"eps": 0.1},
}
LENGTHS = {"one token": [1], "one sequence": [8], "uneven": [5, 1, 9], "equal": [6, 6]}


# Every shape on sequences of uneven length; every kind of lengths on the shapes that attention treats differently.
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [(s, "uneven") for s in SHAPES]
    + [(s, n) for s in ("one block", "d_ρ ≠ d_h", "not causal") for n in LENGTHS if n != "uneven"],
)
def test_every_signal_and_gradient(shape: str, lengths: str) -> None:
    """float64 ≤ 1e-10 against autograd, finite differences, and the same weights in float32 ≤ 1e-4"""
    model = make_model(dtype=torch.float32, **SHAPES[shape])
    tokens, targets = make_batch(model, LENGTHS[lengths])
    report = hg.verify(model, tokens, targets, LENGTHS[lengths])
    assert report.passed, str(report.summary())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", ["one token", "uneven"])
def test_equal_to_the_paper(shape: str, lengths: str) -> None:
    """paper/ and ops/ agree ≤ 1e-12 on every intermediate they share"""
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
        for i, (down, up) in enumerate(zip(f.blocks, b.blocks, strict=True)):
            for k in range(1, 11):
                expected[f"blocks.{i}.a_{k}"] = getattr(down, f"a_{k}")
                signals[f"blocks.{i}.delta_{k}"] = getattr(up, f"delta_{k}")
            for name, norm in (("1", down.norm_1), ("5", down.norm_5)):
                expected[f"blocks.{i}.a_bar_{name}"] = norm.a_bar
            for name in ("q", "k", "v", "rho"):
                expected[f"blocks.{i}.{name}"] = torch.stack([getattr(h, name) for h in down.heads])
            for name in ("delta_causal", "delta_raw"):
                signals[f"blocks.{i}.{name}"] = torch.stack([getattr(h, name) for h in up.heads])
        for name, x in {**expected, **{k: v / n_targets for k, v in signals.items()}}.items():
            ours = found[name]
            ours = ours[:, rows, rows] if ours.shape[-2:] == (len(tokens),) * 2 and x.ndim == 3 else ours[..., rows, :]
            assert relative_error(ours, x, floor=1e-3) <= 1e-12, name
            compared += 1
        start += length
    assert compared == len(LENGTHS[lengths]) * (6 + model.config.n_blocks * 28)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_to_the_paper(shape: str) -> None:
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


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
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


def test_batch_and_packed_are_one() -> None:
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [6, 6, 6])
    loss = model.loss_and_grads(tokens, targets, [6, 6, 6])
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert model.loss_and_grads(tokens.view(3, 6), targets.view(3, 6)) == pytest.approx(loss, rel=1e-14)
    for p, grad in zip(model.parameters(), packed, strict=True):
        assert relative_error(p.grad, grad) <= 1e-12
    logits = model.logits(tokens.view(3, 6))
    assert logits.shape == (3, 6, 11)
    assert relative_error(logits.view(18, 11), model.logits(tokens, [6, 6, 6])) <= 1e-12


def test_sequences_do_not_see_each_other() -> None:
    model = make_model(n_blocks=2)
    tokens, _ = make_batch(model, [5, 7])
    alone = torch.cat([model.logits(tokens[:5]), model.logits(tokens[5:])])
    assert relative_error(model.logits(tokens, [5, 7]), alone) <= 1e-12


def test_loss_alone_is_the_same_loss() -> None:
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [5, 7])
    assert model.loss(tokens, targets, [5, 7]) == pytest.approx(
        model.loss_and_grads(tokens, targets, [5, 7]), rel=1e-13
    )


def test_uneven_accumulation_is_one_big_batch() -> None:
    model = make_model(n_blocks=2)
    lengths = [9, 2, 13, 5]
    tokens, targets = make_batch(model, lengths, ignored=0.5)
    n_targets = int((targets != -100).sum())
    whole = model.loss_and_grads(tokens, targets, lengths)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = start = 0
    for n in lengths:
        part = slice(start, start + n)
        start += n
        if (targets[part] != -100).any():
            total += model.loss_and_grads(tokens[part], targets[part], n_targets=n_targets)
    assert total == pytest.approx(whole, rel=1e-13)
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert relative_error(p.grad, grad) <= 1e-12


def test_head_in_chunks_is_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    tokens, targets = make_batch(model, [13])
    loss = model.loss_and_grads(tokens, targets)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr("handgrad.model.readout.LOGITS_AT_ONCE", 3 * 11)
    assert model.loss_and_grads(tokens, targets) == pytest.approx(loss, rel=1e-14)
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert relative_error(p.grad, grad) <= 1e-12


def test_key_bias_changes_nothing_and_has_no_gradient() -> None:
    model = make_model()
    tokens, targets = make_batch(model, [9])
    bias = model.transformer.h[0].attn.c_attn.bias
    model.loss_and_grads(tokens, targets)
    assert (bias.grad[12:24] == 0).all() and (bias.grad[:12] != 0).all() and (bias.grad[24:] != 0).all()
    before = model.logits(tokens)
    with torch.no_grad():
        bias[12:24] += 1.7
    assert relative_error(model.logits(tokens), before) <= 1e-12


def test_frozen_means_not_computed_and_the_rest_is_the_same() -> None:
    model = make_model(n_blocks=3, tied=False)
    tokens, targets = make_batch(model, [9])
    model.loss_and_grads(tokens, targets)
    everything = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for name, p in model.named_parameters():
        p.requires_grad_("h.1.mlp" in name or "h.2.ln_1" in name)
    model.loss_and_grads(tokens, targets)
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert relative_error(p.grad, everything[name]) <= 1e-12
        else:
            assert p.grad is None, name


def test_frozen_weights_do_not_move() -> None:
    """README's sequence: a full backward pass, then adapters, then a step over all parameters."""
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


@pytest.mark.parametrize("how", ["whole model", "module", "parameter"])
def test_however_it_was_frozen_it_does_not_move(how: str) -> None:
    model = make_model(n_blocks=2)
    batch = make_batch(model, [9])
    model.loss_and_grads(*batch)
    if how == "whole model":
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


def test_tying_and_untying_discards_the_gradient_of_what_was_shared() -> None:
    model = make_model()
    model.loss_and_grads(*make_batch(model, [9]))
    model.untie()
    assert model.transformer.wte.weight.grad is None and model.lm_head.weight.grad is None
    model.loss_and_grads(*make_batch(model, [9]))
    model.tie()
    assert model.transformer.wte.weight.grad is None


def test_nothing_below_the_lowest_trainable_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(n_blocks=3)
    for name, p in model.named_parameters():
        p.requires_grad_("h.2." in name)
    ran = []
    for i, block in enumerate(model.blocks):
        original = block.backward
        monkeypatch.setattr(block, "backward", lambda *a, i=i, f=original: ran.append(i) or f(*a))
    model.loss_and_grads(*make_batch(model, [9]))
    assert ran == [2]


def test_adapters_beside_frozen_layers() -> None:
    """Every linear layer with an adapter, the base frozen: gradients of the factors and the frozen path of Δ (R3)."""
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
def test_dtypes(dtype: torch.dtype) -> None:
    """The same weights in each dtype against the float64 truth, in the Frobenius norm"""
    model = make_model(seed=3, n_blocks=3, d_model=24, dtype=dtype)
    truth = make_model(seed=3, n_blocks=3, d_model=24)
    truth.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    tokens, targets = make_batch(model, [16, 7])
    loss = model.loss_and_grads(tokens, targets, [16, 7])
    assert loss == pytest.approx(truth.loss_and_grads(tokens, targets, [16, 7]), rel=TOLERANCE[dtype])
    assert model.logits(tokens, [16, 7]).dtype == dtype
    for (name, p), q in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert p.grad.dtype == dtype
        assert (p.grad.double() - q.grad).norm() <= TOLERANCE[dtype] * q.grad.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saturated_attention(dtype: torch.dtype) -> None:
    """c_attn so large that softmax decides for one key: what is left of its error signal is still right."""
    model = hg.GPT(hg.preset("nano", n_blocks=1), seed=1, dtype=dtype)
    with torch.no_grad():
        model.blocks[0].attn.c_attn.weight *= 1e3
    trace = hg.trace(model, *make_batch(model, [64]))
    q, k, v = (trace[f"blocks.0.{name}"].transpose(0, 1).double().contiguous() for name in "qkv")
    delta = trace["blocks.0.delta_3"].double().view_as(v)
    _, saved = attention.forward(q, k, v, attention.spans_of((64,)), True)
    rho, signal = attention.maps(delta, saved, (64,), True)
    assert relative_error(trace["blocks.0.rho"], rho) <= TOLERANCE[dtype]
    floor = torch.finfo(torch.float32).eps * (delta.abs().max() * v.abs().max()).item()
    assert relative_error(trace["blocks.0.delta_causal"], signal, floor) <= TOLERANCE[dtype]


def test_names_and_orientation_are_gpt2s() -> None:
    model = hg.GPT(hg.preset("gpt2"), device="meta")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert len(shapes) == 2 + 12 * 12 + 2
    assert shapes["transformer.wte.weight"] == (50257, 768)
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (768, 2304)
    assert shapes["transformer.h.11.mlp.c_proj.weight"] == (3072, 768)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_same_seed_same_model() -> None:
    one, two, other = (hg.GPT(hg.preset("nano"), seed=s) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.transformer.wte.weight, other.transformer.wte.weight)


def test_it_learns() -> None:
    """Forty steps of AdamW on one sentence bring its loss down to almost nothing."""
    model = hg.GPT(hg.preset("nano", n_blocks=2), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(b"every gradient derived by hand, every one with a proof"))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(model.loss_and_grads(text[:-1], text[1:]))
        optimizer.step()
    assert losses[0] > 5 and losses[-1] < 0.3


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────


def raises(message: str) -> pytest.RaisesExc[hg.HandgradError]:
    return pytest.raises(hg.HandgradError, match=message)


def test_bad_tokens() -> None:
    model = make_model()
    good = torch.zeros(4, dtype=torch.int64)
    with raises("token id 11 is outside the vocabulary: ids go from 0 to 10"):
        model.logits(torch.tensor([0, 11]))
    with raises("token id -1"):
        model.logits(torch.tensor([0, -1]))
    with raises("17 tokens does not fit into a context of 16"):
        model.logits(torch.zeros(17, dtype=torch.int64))
    with raises("must be integers"):
        model.logits(torch.zeros(4))
    with raises("not empty"):
        model.logits(torch.zeros(0, dtype=torch.int64))
    with raises("shape"):
        model.logits(torch.zeros(1, 1, 1, dtype=torch.int64))
    with raises("add up to the 4 tokens"):
        model.logits(good, [1, 2])
    with raises("at least 1"):
        model.logits(good, [4, 0])
    with raises("lengths go with"):
        model.logits(good.view(2, 2), [2, 2])


def test_bad_targets() -> None:
    model = make_model()
    tokens = torch.zeros(4, dtype=torch.int64)
    with raises("every target is ignored"):
        model.loss_and_grads(tokens, torch.full((4,), -100))
    with raises("must have the shape"):
        model.loss_and_grads(tokens, tokens[:3])
    with raises("target 99 is outside"):
        model.loss_and_grads(tokens, torch.tensor([0, 1, 2, 99]))
    with raises("tokens must be a tensor"):
        model.loss_and_grads([1, 2], tokens)
    with raises("targets must be a tensor"):
        model.loss_and_grads(tokens, [1, 2, 3, 4])
    with raises("n_targets"):
        model.loss_and_grads(tokens, tokens, n_targets=0)
    with raises("targets must be integers"):
        model.loss_and_grads(tokens, torch.zeros(4))
    assert all(p.grad is None for p in model.parameters()), "a refused batch must leave nothing behind"


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_micro_batch_without_targets_adds_nothing(recompute: str, adapters: bool) -> None:
    model = make_model(n_blocks=2)
    if adapters:
        hg.lora.inject(model, 2, targets="h.1.mlp.c_fc")
    tokens, targets = make_batch(model, [9, 4])
    none = torch.full_like(targets, -100)
    announced: list[torch.nn.Parameter] = []
    options = {"n_targets": 7, "recompute": recompute, "finished": announced.extend}
    assert model.loss_and_grads(tokens, none, [9, 4], **options) == 0.0
    assert all((p.grad == 0).all() if p.requires_grad else p.grad is None for p in model.parameters())
    expected, announced[:] = list(announced), []
    model.zero_grad()
    model.loss_and_grads(tokens, targets, [9, 4], **options)
    assert [id(p) for p in announced] == [id(p) for p in expected], "processes would wait for each other"
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.loss_and_grads(tokens, none, [9, 4], **options)
    assert all(q is None or torch.equal(p.grad, q) for p, q in zip(model.parameters(), before, strict=True))
    with raises("every target is ignored"):
        model.loss(tokens, none, [9, 4])
    with raises("every target is ignored"):
        hg.trace(model, tokens, none, [9, 4])


def test_bad_weights() -> None:
    model = make_model()
    tokens, targets = make_batch(model, [9])
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("nan")
    for call in (model.logits, lambda t: model.loss_and_grads(t, targets), lambda t: hg.verify(model, t, targets)):
        with pytest.raises(hg.NonFiniteError, match=r"h\.0\.mlp\.c_fc\.weight"):
            call(tokens)


@pytest.mark.parametrize("tied", [True, False])
def test_bad_weights_in_the_head_leave_no_gradient(tied: bool) -> None:
    model = make_model(tied=tied)
    tokens, targets = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")  # a word that is neither in the input nor a target
    for call in (model.logits, lambda t: model.loss(t, targets), lambda t: model.loss_and_grads(t, targets)):
        with pytest.raises(hg.NonFiniteError, match="wte.weight" if tied else "lm_head.weight"):
            call(tokens)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_half_a_gradient_is_none(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.model.gpt.TOKENS_AT_ONCE", 8)
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [8, 8, 16], ignored=0)
    with torch.no_grad():
        model.transformer.wpe.weight[15] = float("nan")  # only the last piece meets it
    with pytest.raises(hg.NonFiniteError, match="wpe"):
        model.loss_and_grads(tokens, targets, [8, 8, 16], recompute=recompute)
    with pytest.raises(hg.NonFiniteError, match="wpe"):
        OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=1.0)).step(tokens, targets, [8, 8, 16])
    assert all(p.grad is None for p in model.parameters())


def test_overflow_is_told_from_bad_weights() -> None:
    model = make_model(dtype=torch.float32)
    with torch.no_grad():
        model.transformer.wte.weight.fill_(3e38)
        model.transformer.wpe.weight.fill_(3e38)
    with pytest.raises(hg.NonFiniteError, match="overflowed"):
        model.logits(torch.zeros(4, dtype=torch.int64))


def test_bad_configurations() -> None:
    with raises("a width of 10 cannot be shared by 3 heads"):
        hg.GPTConfig(d_model=10, n_heads=3)
    with raises("unknown preset 'gpt5'"):
        hg.preset("gpt5")
    with raises("a model has no 'n_layers'"):
        hg.preset("nano", n_layers=3)
    with raises("unknown activation 'swish'"):
        hg.GPTConfig(activation="swish")
    with raises("n_blocks must be an integer"):
        hg.GPTConfig(n_blocks=0)
    with raises("eps"):
        hg.GPTConfig(eps=-1.0)
    with raises("d_model must be an integer"):
        hg.preset("nano", d_model=None)
    with raises("d_model must be at least 2"):
        hg.preset("nano", d_model=1, n_heads=1)
    with raises("tied must be true or false"):
        hg.preset("nano", tied="no")
    if not torch.cuda.is_available():
        with raises("cannot use device cuda"):
            hg.GPT(hg.preset("nano"), device="cuda")
    with raises("dtype must be"):
        hg.GPT(hg.preset("nano"), dtype=torch.int32)


# ── habits from torch ───────────────────────────────────────────────────────────────────────────────────────────────


def test_device_and_dtype() -> None:
    for dtype in ("float64", "float32", "bfloat16"):
        model = hg.GPT(hg.preset("nano"), dtype=dtype)
        assert model.dtype == getattr(torch, dtype) == next(model.parameters()).dtype
        assert model.device == torch.device("cpu")
    assert hg.GPT(hg.preset("nano"), device="meta").device.type == "meta"
    for wrong in ("float16", "int32", "double precision", ""):
        with raises("dtype must be float64, float32 or bfloat16, not"):
            hg.GPT(hg.preset("nano"), dtype=wrong)


def test_a_dtype_by_its_name_in_files(tmp_path: Path) -> None:
    hg.save(make_model(), tmp_path / "model", dtype="bfloat16")
    assert hg.load(tmp_path / "model").dtype == torch.bfloat16
    assert hg.load(tmp_path / "model", dtype="float32").dtype == torch.float32
    with raises("dtype must be .* not single"):
        hg.load(tmp_path / "model", dtype="single")
    with raises("dtype must be float64, float32, bfloat16 or float16, not int8"):
        hg.save(make_model(), tmp_path / "other", dtype="int8")
    assert not (tmp_path / "other").exists()


def test_a_name_is_not_a_configuration() -> None:
    with raises(r'GPT takes a GPTConfig, not "nano": hg.GPT\(hg.preset\("nano"\)\)'):
        hg.GPT("nano")
    with raises("GPT takes a GPTConfig, not 3"):
        hg.GPT(3)


def test_backward_is_answered() -> None:
    model = make_model()
    tokens, targets = make_batch(model, [9], ignored=0)
    logits = model(tokens)
    cases = (
        logits.sum(), torch.nn.functional.cross_entropy(logits, targets), logits.log_softmax(-1)[0, 0],
    )  # fmt: skip
    for value in cases:
        with raises("no graph to differentiate: model.loss_and_grads"):
            value.backward()
    assert type(model.loss(tokens, targets)) is float, (
        "torch.load refuses a subclass, and a float says itself what it is"
    )
    weight = torch.ones(11, dtype=torch.float64, requires_grad=True)
    (logits * weight).sum().backward()  # another's graph goes through
    assert torch.equal(weight.grad, logits.sum(0))


def test_what_a_model_returns_is_still_a_number_and_a_tensor(tmp_path: Path) -> None:
    model = make_model()
    tokens, targets = make_batch(model, [9])
    loss, logits = model.loss(tokens, targets), model.logits(tokens)
    assert (
        isinstance(loss, float) and json.loads(json.dumps({"loss": loss})) == {"loss": loss} and type(loss + 1) is float
    )
    assert (
        not logits.requires_grad and logits.numpy().shape == (9, 11) and torch.equal(logits.argmax(1), logits.max(1)[1])
    )
    torch.save({"loss": loss, "logits": logits}, tmp_path / "kept.pt")
    back = torch.load(tmp_path / "kept.pt", weights_only=True)
    assert back["loss"] == loss and torch.equal(back["logits"], logits)
    assert type(pickle.loads(pickle.dumps(logits))) is torch.Tensor and copy.deepcopy(logits).equal(logits)
    save_file({"logits": logits}, tmp_path / "kept.safetensors")


@pytest.mark.parametrize("call", ["logits", "loss", "loss_and_grads", "trace", "generate", "optimizer"])
def test_autocast_is_refused(call: str) -> None:
    model = make_model(dtype=torch.float32)
    tokens, targets = make_batch(model, [9])
    calls = {
        "logits": lambda: model.logits(tokens),
        "loss": lambda: model.loss(tokens, targets),
        "loss_and_grads": lambda: model.loss_and_grads(tokens, targets),
        "trace": lambda: hg.trace(model, tokens, targets),
        "generate": lambda: hg.generate(model, tokens[None]),
        "optimizer": lambda: OptimizerInBackward(model, torch.optim.SGD).step(tokens, targets),
    }
    with torch.autocast("cpu", torch.bfloat16), raises("torch.autocast is not supported: it changes"):
        calls[call]()
    assert all(p.grad is None for p in model.parameters())


# ── walking in pieces, computing again, and letting know ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("at_once", [1, 10, 1000])
@pytest.mark.parametrize("ignored", [0.0, 0.7])
def test_pieces_and_recomputation_change_nothing(
    recompute: str, at_once: int, ignored: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(n_blocks=3)
    lengths = [9, 2, 13, 1, 5]
    tokens, targets = make_batch(model, lengths, ignored=ignored)
    recorded = hg.trace(model, tokens, targets, lengths)  # walked whole, every row asking
    loss = model.loss(tokens, targets, lengths)
    monkeypatch.setattr("handgrad.model.gpt.TOKENS_AT_ONCE", at_once)
    assert model.loss_and_grads(tokens, targets, lengths, recompute=recompute) == pytest.approx(
        recorded.loss, rel=1e-13
    )
    assert loss == pytest.approx(recorded.loss, rel=1e-13)
    for name, grad in gradients(model).items():
        assert relative_error(grad, recorded[name], floor=1e-3) <= 1e-12, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_every_layer_is_announced_once_with_its_final_gradient(
    tied: bool, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handgrad.model.gpt.TOKENS_AT_ONCE", 8)
    model = make_model(n_blocks=3, tied=tied)
    tokens, targets = make_batch(model, [5, 6, 7])
    seen: dict[torch.nn.Parameter, torch.Tensor] = {}

    def finished(layer: list[torch.nn.Parameter]) -> None:
        for p in layer:
            assert p not in seen
            seen[p] = p.grad.clone()

    model.loss_and_grads(tokens, targets, [5, 6, 7], recompute=recompute, finished=finished)
    assert set(seen) == set(model.parameters()) == {p for layer in model.layers() for p in layer}
    assert all(torch.equal(p.grad, grad) for p, grad in seen.items())


def test_rows_without_a_target_cost_no_feed_forward_in_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [16])
    targets[:] = -100
    targets[[3, 12]] = 5
    rows = []
    for block in model.blocks:
        original = block.mlp.c_fc.forward
        monkeypatch.setattr(block.mlp.c_fc, "forward", lambda a, draw, f=original: rows.append(len(a)) or f(a))
    model.loss_and_grads(tokens, targets)
    assert rows == [16, 2]


def test_unknown_recompute() -> None:
    model = make_model()
    with raises("recompute must be 'none' or 'blocks'"):
        model.loss_and_grads(*make_batch(model, [4]), recompute="all")
