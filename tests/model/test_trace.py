"""hg.trace: which tensors it records and under which names; a recorder changes nothing."""

import pytest
import torch

import handgrad as hg
from conftest import make_batch, make_model


def test_names_and_shapes() -> None:
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [5, 3])
    trace = hg.trace(model, tokens, targets, [5, 3])
    assert trace.lengths == (5, 3)
    assert trace.loss == pytest.approx(model.loss(tokens, targets, [5, 3]))
    assert torch.equal(trace["a_0"], tokens)
    assert trace["blocks.1.a_7"].shape == (8, 48)
    assert trace["blocks.0.q"].shape == (3, 8, 4)
    assert trace["blocks.0.delta_raw"].shape == (3, 8, 8)
    assert trace["delta_12"].shape == (8, 11)
    assert trace["blocks.1.grad_w_q"].shape == (12, 12)
    assert torch.equal(trace["blocks.0.a_10"], trace["blocks.1.a_1"])


def test_invariants_of_the_paper_hold_in_a_trace() -> None:
    model = make_model(n_blocks=2, tied=False)
    tokens, _ = make_batch(model, [9])
    targets = torch.cat([tokens[1:], torch.tensor([-100])])
    trace = hg.trace(model, tokens, targets)
    for name, x in trace.items():
        if name.split(".")[-1] in ("delta_causal", "delta_raw", "delta_12", "delta_1", "delta_5", "delta_10"):
            assert x.sum(-1).abs().max() < 1e-14, name
        if name.split(".")[-1].startswith("delta_") and x.ndim == 2:
            assert (x[-1] == 0).all(), f"row without a target in {name}"
    assert (trace["blocks.0.rho"].triu(1) == 0).all()
    assert (trace["blocks.0.grad_b_k"] == 0).all()


def test_a_wrong_name_suggests_similar_ones() -> None:
    model = make_model()
    trace = hg.trace(model, *make_batch(model, [4]))
    with pytest.raises(KeyError, match=r"blocks\.0\.delta_raw"):
        trace["block.0.delta_raw"]
    assert "blocks.0.delta_raw" in repr(trace)


def test_without_a_recorder_nothing_is_stored() -> None:
    model = make_model()
    tokens, targets = make_batch(model, [4])
    before = set(vars(model)) | set(vars(model.blocks[0]))
    model.loss_and_grads(tokens, targets)
    assert set(vars(model)) | set(vars(model.blocks[0])) == before


def test_html_shows_depth_by_tokens() -> None:
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [6])
    trace = hg.trace(model, tokens, targets)
    html = trace._repr_html_()
    assert f"loss {trace.loss:.6f}" in html
    rows = [name for name in trace if name.split(".")[-1] in {f"delta_{i}" for i in range(1, 13)}]
    assert html.count("<td title=") == 6 * len(rows)
    largest = trace["blocks.1.delta_5"].norm(dim=1).max()
    assert f'title="{largest:.6g}"' in html
    assert html.index("blocks.0.delta_1<") < html.index("blocks.1.delta_10<") < html.index("delta_12<")


@pytest.mark.parametrize("adapter_targets", ["all-linear", "h.1.mlp.c_proj", "lm_head"])
def test_a_trace_with_adapters_is_complete(adapter_targets: str) -> None:
    """Every activation and signal of every block is recorded and unchanged, frozen or not."""
    model = make_model(n_blocks=2)
    batch = make_batch(model, [5, 3])
    before = hg.trace(model, *batch, [5, 3])
    hg.lora.inject(model, 2, targets=adapter_targets)
    after = hg.trace(model, *batch, [5, 3])
    assert "blocks.0.rho" in after and "blocks.0.delta_raw" in after
    assert {name for name in after if "grad_" not in name} == {name for name in before if "grad_" not in name}
    for name in after:
        if "grad_" not in name:
            assert torch.allclose(after[name], before[name], atol=1e-13, rtol=1e-12), name
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("tokens_at_once", [1, 1024])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_recorder_changes_no_bit(recompute: str, tokens_at_once: int, adapters: bool) -> None:
    """Loss and gradients with and without a recorder, with dropout, ignored targets and several pieces."""
    model, lengths = make_model(n_blocks=2), [9, 4, 6]
    if adapters:
        hg.lora.inject(model, 2, targets="all-linear", dropout=0.3)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p += 0.1 * torch.randn(p.shape, dtype=p.dtype)
    tokens, targets = make_batch(model.train(), lengths)
    assert (targets == -100).any() and (targets != -100).any()
    recorded: list[str] = []

    def compute(**options: object) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = model.loss_and_grads(
            tokens, targets, lengths, seed=7, recompute=recompute, tokens_at_once=tokens_at_once, **options
        )
        return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    loss, grads = compute()
    with_recorder, grads_with_recorder = compute(record=lambda name, value: recorded.append(name))
    assert loss == with_recorder
    assert grads.keys() == grads_with_recorder.keys() and grads
    assert all(torch.equal(grads[name], grads_with_recorder[name]) for name in grads)
    n_pieces = len(lengths) if tokens_at_once == 1 else 1
    for name in ("a_0", "blocks.0.a_5", "blocks.1.a_10", "blocks.0.delta_5", "blocks.1.delta_10"):
        assert recorded.count(name) == n_pieces, name
