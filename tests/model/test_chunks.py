"""Chunked passes, recompute and the finished hook: same gradients, each parameter reported once."""

import pytest
import torch

import handgrad as hg
from conftest import make_batch, make_model
from handgrad.model.inspect.trace import gradients
from handgrad.proof.oracles import relative_error


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("at_once", [1, 10, 1000])
@pytest.mark.parametrize("ignored", [0.0, 0.7])
def test_chunking_and_recompute_give_same_gradients(
    recompute: str, at_once: int, ignored: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(n_blocks=3)
    lengths = [9, 2, 13, 1, 5]
    tokens, targets = make_batch(model, lengths, ignored=ignored)
    recorded = hg.trace(model, tokens, targets, lengths)  # in one chunk, with the queries of every row
    loss = model.loss(tokens, targets, lengths)
    monkeypatch.setattr("handgrad.model.network.TOKENS_AT_ONCE", at_once)
    assert model.loss_and_grads(tokens, targets, lengths, recompute=recompute) == pytest.approx(
        recorded.loss, rel=1e-13
    )
    assert loss == pytest.approx(recorded.loss, rel=1e-13)
    for name, grad in gradients(model).items():
        assert relative_error(grad, recorded[name], floor=1e-3) <= 1e-12, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_finished_hook_gets_each_parameter_once_with_final_gradient(
    tied: bool, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handgrad.model.network.TOKENS_AT_ONCE", 8)
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


def test_last_feed_forward_runs_only_on_rows_with_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [16])
    targets[:] = -100
    targets[[3, 12]] = 5
    rows = []
    for block in model.blocks:
        original = block.mlp.c_fc.forward
        monkeypatch.setattr(block.mlp.c_fc, "forward", lambda a, *_, f=original, **__: rows.append(len(a)) or f(a))
    model.loss_and_grads(tokens, targets)
    assert rows == [16, 2]


def test_unknown_recompute_is_rejected() -> None:
    model = make_model()
    with pytest.raises(hg.HandgradError, match="recompute must be 'none' or 'blocks'"):
        model.loss_and_grads(*make_batch(model, [4]), recompute="all")
