"""Every family in mixed precision: a step of training, adapters on a base in bfloat16, the same bits on every path."""

from pathlib import Path
from typing import Any

import pytest
import torch
from members import DISTINCT, LENGTHS, TYPICAL, batch, transformers_model

import handgrad as hg
from handgrad.model.precision import why_not_mixed
from handgrad.model.storage.rounded import round_frozen

pytestmark = pytest.mark.skipif(why_not_mixed() is not None, reason=f"no mixed precision: {why_not_mixed()}")


def gradients(model: hg.GPT, **options: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    tokens, targets = batch()
    model.loss_and_grads(tokens, targets, LENGTHS, **options)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def routes(model: hg.GPT) -> list[list[list[int]]]:
    """The experts of every token, in each block that has some."""
    tokens, targets = batch()
    trace = hg.trace(model, tokens, targets, LENGTHS)
    return [trace[x].sort()[0].tolist() for x in trace if x.endswith(".chosen")]


def cosine(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert list(ours) == list(theirs)
    x, y = (torch.cat([g.flatten() for g in grads.values()]).double() for grads in (ours, theirs))
    return torch.cosine_similarity(x, y, 0).item()


def load(name: str, folder: Path) -> hg.GPT:
    """The member with weights that bfloat16 represents: a base that is stored in it has the same."""
    transformers_model(name).save_pretrained(folder)
    model = hg.load(folder, dtype="float32")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.some_cases(8)
def test_a_step_is_that_of_float32_up_to_rounding(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path / "m")
    exact = gradients(model)
    routed = routes(model)
    model.precision = "mixed"
    found = gradients(model)
    routed_mixed = routes(model)
    model.precision = "float32"
    if routed_mixed != routed:
        pytest.skip("rounding has moved a token to another expert: the gradient is that of another choice")
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found.values())
    assert any(not torch.equal(found[x], exact[x]) for x in exact)
    # some random models amplify rounding: the whole model in bfloat16 shows by how much
    narrow = {x: g.float() for x, g in gradients(model.to(torch.bfloat16)).items()}
    explained = 1 - cosine(narrow, exact)
    if explained > 1e-2:
        pytest.skip("the model amplifies rounding so much that its gradients say nothing; verify proves every step")
    assert 1 - cosine(found, exact) < max(1e-3, 2 * explained)


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.parametrize(
    "adapter",
    [{}, {"dora": True}, {"dropout": 0.3}, {"rslora": True, "targets": ("all-linear", "lm_head")}],
    ids=str,
)
@pytest.mark.some_cases(8)
def test_adapters_on_a_base_in_bfloat16(name: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    model = load(name, tmp_path / "m")
    targets = [x.replace("lm_head", model.config.table.names["head"]) for x in adapter.get("targets", ("all-linear",))]
    hg.lora.inject(model, 2, **{**adapter, "targets": targets})
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    model.train()
    exact = gradients(model, seed=5)
    model.precision = "mixed"
    found = gradients(model, seed=5)
    assert cosine(found, exact) > 0.999
    round_frozen(model)
    assert model.packed and not model.unpacks
    assert not any(p.ndim == 2 and not p.requires_grad for p in model.parameters())
    stored = gradients(model, seed=5)
    assert all(torch.equal(stored[x], found[x]) for x in found), "products read the same numbers"
    again = gradients(model, seed=5, recompute="blocks")
    assert all(torch.equal(again[x], stored[x]) for x in stored)
    if not adapter.get("dropout"):  # its masks depend on the pieces
        assert cosine(gradients(model, tokens_at_once=8), stored) > 0.99999
