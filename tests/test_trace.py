"""hg.trace: what it keeps, under which names."""

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


def test_a_wrong_name_is_answered_with_near_ones() -> None:
    model = make_model()
    trace = hg.trace(model, *make_batch(model, [4]))
    with pytest.raises(KeyError, match=r"blocks\.0\.delta_raw"):
        trace["block.0.delta_raw"]
    assert "blocks.0.delta_raw" in repr(trace)


def test_without_a_recorder_nothing_is_kept() -> None:
    model = make_model()
    tokens, targets = make_batch(model, [4])
    before = set(vars(model)) | set(vars(model.blocks[0]))
    model.loss_and_grads(tokens, targets)
    assert set(vars(model)) | set(vars(model.blocks[0])) == before


def test_a_notebook_shows_depth_by_tokens() -> None:
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


@pytest.mark.parametrize("targets_of_adapters", ["all-linear", "h.1.mlp.c_proj", "lm_head"])
def test_adapters_hide_nothing(targets_of_adapters: str) -> None:
    """Whatever is frozen, every activation and signal of every block is kept, and equal to what it was."""
    model = make_model(n_blocks=2)
    batch = make_batch(model, [5, 3])
    before = hg.trace(model, *batch, [5, 3])
    hg.lora.inject(model, 2, targets=targets_of_adapters)
    after = hg.trace(model, *batch, [5, 3])
    assert "blocks.0.rho" in after and "blocks.0.delta_raw" in after
    assert {name for name in after if "grad_" not in name} == {name for name in before if "grad_" not in name}
    for name in after:
        if "grad_" not in name:
            assert torch.allclose(after[name], before[name], atol=1e-13, rtol=1e-12), name
    assert all(p.grad is None for p in model.parameters())
