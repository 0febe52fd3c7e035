"""Attribution against autograd and finite differences, and what it leaves untouched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
import tiny_gguf
from conftest import make_model, perturb
from families.members import transformers_model
from handgrad.inference import attribution
from handgrad.model.gpt import GPT
from handgrad.model.inspect.trace import record_pass
from handgrad.proof.oracles import differentiate, finite_difference, relative_error

LIMIT = 1e-10
IDS = [3, 17, 5, 28, 0, 11, 5, 9, 22, 14]
TARGETS = [[9], [6, 7, 8], range(1, 10), [1]]


def their_embeddings(theirs: Any, ids: Tensor) -> Tensor:
    """a_1 of a transformers model."""
    a_1: Tensor = theirs.get_input_embeddings()(ids)
    if hasattr(theirs, "transformer"):
        a_1 = a_1 + theirs.transformer.wpe(torch.arange(len(ids)))
    return a_1.detach()


def their_logprob(theirs: Any, ids: Tensor, targets: list[int], a_1: Tensor) -> Tensor:
    """Σ_t log p(id_t | …), with a_1 in the place of the embeddings."""
    if hasattr(theirs, "transformer"):  # it adds the positions itself
        a_1 = a_1 - theirs.transformer.wpe(torch.arange(len(ids))).detach()
    logprobs = theirs(inputs_embeds=a_1[None], use_cache=False).logits[0].double().log_softmax(1)
    return logprobs[[t - 1 for t in targets], ids[targets]].sum()


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("name", ["gpt2, tied", "llama, 3 queries to a key"])
def test_equals_autograd_and_finite_differences(name: str, targets: list[int], tmp_path: Path) -> None:
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "m")
    ours = hg.load(tmp_path / "m", dtype="float64")
    ids, where = torch.tensor(IDS), list(targets)
    a_1 = their_embeddings(theirs, ids)
    (expected,) = differentiate(lambda a: their_logprob(theirs, ids, where, a), a_1)

    found = hg.attribute(ours, IDS, targets)
    assert found.targets == where and found.ids == IDS
    assert found.logprob == pytest.approx(their_logprob(theirs, ids, where, a_1).item(), rel=LIMIT)
    assert relative_error(found.gradient, expected) <= LIMIT
    assert relative_error(found.scores, (expected * a_1).sum(1)) <= LIMIT
    assert relative_error(found.norms, expected.norm(dim=1)) <= LIMIT
    assert not found.scores[max(where) :].any() and not found.norms[max(where) :].any()

    direction = torch.zeros_like(a_1)  # scale one token's embedding: the derivative is its score
    strongest = int(found.scores.abs().argmax())
    direction[strongest] = a_1[strongest]
    slope = finite_difference(lambda a: their_logprob(theirs, ids, where, a).item(), a_1, direction)
    assert found.scores[strongest].item() == pytest.approx(slope, rel=1e-7)


def test_the_loss_of_these_targets_has_the_same_signal() -> None:
    model = make_model(n_blocks=2)
    ids = torch.tensor([1, 5, 2, 9, 10, 3])
    targets = torch.tensor([-100, -100, 9, 10, -100])
    recorded: dict[str, Tensor] = {}
    loss = record_pass(model, ids[:-1], targets, [5], record=recorded.__setitem__)
    found = hg.attribute(model, ids, [4, 3])
    assert found.logprob == pytest.approx(-2 * loss, rel=1e-12)
    assert relative_error(found.gradient[:5], -2 * recorded["blocks.0.delta_1"]) <= LIMIT


def test_a_long_text_recomputes_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(n_blocks=3)
    expected = hg.attribute(model, [1, 5, 2, 9, 10, 3], [2, 5])
    monkeypatch.setattr(attribution, "TOKENS_AT_ONCE", 4)
    assert torch.equal(hg.attribute(model, [1, 5, 2, 9, 10, 3], [2, 5]).gradient, expected.gradient)


def adapted() -> GPT:
    model = make_model(n_blocks=2)
    hg.lora.inject(model, rank=2, dropout=0.5, dora=True, modules_to_save=["ln_f"])
    perturb(model)
    return model


@pytest.mark.parametrize("make", [lambda: make_model(n_blocks=2), adapted], ids=["plain", "adapters"])
def test_parameters_gradients_and_flags_stay(make: Any) -> None:
    model = make()
    model.train()
    first = next(p for p in model.parameters() if p.requires_grad)
    first.grad = torch.ones_like(first)
    before = [(p, p.clone(), p.requires_grad, p.grad) for p in model.parameters()]
    found = hg.attribute(model, [1, 5, 2, 9], [2, 3])
    for p, value, trains, grad in before:
        assert torch.equal(p, value) and p.requires_grad == trains and p.grad is grad
    assert bool((first.grad == 1).all())
    assert torch.equal(hg.attribute(model, [1, 5, 2, 9], [2, 3]).scores, found.scores)  # no dropout
    logprobs = model.logits(torch.tensor([1, 5, 2])).log_softmax(1)
    assert found.logprob == pytest.approx((logprobs[1, 2] + logprobs[2, 9]).item(), rel=1e-12)


def test_flags_come_back_after_an_error() -> None:
    model = make_model()
    with torch.no_grad():
        model.head.plain().w.fill_(float("nan"))
    with pytest.raises(hg.NonFiniteError):
        hg.attribute(model, [1, 2, 3])
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_packed_weights_give_the_same(tmp_path: Path) -> None:
    tiny_gguf.write_tiny_smollm2(tmp_path / "m.gguf")
    ids = [257, 72, 101, 108, 108, 111, 32, 256, 101]
    packed = hg.attribute(hg.load(tmp_path / "m.gguf", packed=True), ids, [5, 8])
    plain = hg.attribute(hg.load(tmp_path / "m.gguf"), ids, [5, 8])
    assert relative_error(packed.gradient, plain.gradient) <= 1e-5
    assert float(plain.norms[:8].min()) > 0


@pytest.mark.parametrize(
    ("ids", "targets", "message"),
    [
        ([1, 2, 3], [0], "positions go from 1 to 2"),
        ([1, 2, 3], [3], "positions go from 1 to 2"),
        ([1, 2, 3], [True], "positions go from 1 to 2"),
        ([1, 2, 3], [], "targets is empty"),
        ([1], None, "at least two tokens"),
        ([1, 99], None, "outside the vocabulary"),
        ([99, 1], None, "outside the vocabulary"),
        ([[1, 2]], None, "1-D tensor"),
        ([0.5, 2.0], None, "1-D tensor"),
        ("text", None, "list of token ids"),
        ([1] * 18, None, "does not fit into a context of 16"),
    ],
)
def test_bad_input_is_refused(ids: Any, targets: Any, message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        hg.attribute(make_model(), ids, targets)


def test_a_full_context_and_its_next_token_are_allowed() -> None:
    found = hg.attribute(make_model(), [1] * 17)
    assert len(found.scores) == 17 and found.targets == [16]
    assert "of 1 of 17 tokens" in repr(found)
    with pytest.raises(hg.HandgradError, match="causal"):
        hg.attribute(make_model(causal=False), [1, 2])


# ── integrated gradients, differences of logits, removed tokens ─────────────────────────────────────────────────────


@pytest.mark.parametrize("against", [None, 7])
@pytest.mark.parametrize("name", ["gpt2, tied", "llama, 3 queries to a key"])
def test_integrated_gradients_equal_autograd_and_are_complete(name: str, against: int | None, tmp_path: Path) -> None:
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "m")
    ours = hg.load(tmp_path / "m", dtype="float64")
    ids = torch.tensor(IDS)
    a_1 = their_embeddings(theirs, ids)
    table = theirs.get_input_embeddings().weight.detach()
    baseline = a_1 - table[ids] + table.mean(0)
    baseline[0] = a_1[0]

    def value(a: Tensor) -> Tensor:
        if against is None:
            return their_logprob(theirs, ids, [6, 9], a)
        shifted = a - theirs.transformer.wpe(torch.arange(len(ids))).detach() if hasattr(theirs, "transformer") else a
        row = theirs(inputs_embeds=shifted[None], use_cache=False).logits[0, 8]
        return row[ids[9]] - row[against]

    targets = [6, 9] if against is None else [9]
    expected = torch.zeros(len(ids), dtype=torch.float64)
    for k in range(5):
        (grad,) = differentiate(value, baseline + (k + 0.5) / 5 * (a_1 - baseline))
        expected += (grad * (a_1 - baseline)).sum(1) / 5
    found = hg.attribute(ours, IDS, targets, against=against, steps=5)
    assert found.integrated is not None and found.gap is not None
    assert relative_error(found.integrated, expected) <= LIMIT
    assert found.logprob == pytest.approx(value(a_1).item(), rel=LIMIT)
    change = (value(a_1) - value(baseline)).item()
    assert found.gap == pytest.approx(expected.sum().item() - change, rel=1e-7)
    gaps = [abs(hg.attribute(ours, IDS, targets, against=against, steps=n).gap or 0) for n in (5, 40, 320)]
    assert gaps[0] > 4 * gaps[1] > 16 * gaps[2] > 0, gaps
    assert f"gap {found.gap:.3g}" in repr(found)


def test_many_steps_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(n_blocks=2)
    expected = hg.attribute(model, [1, 5, 2, 9, 10, 3], [2, 5], steps=7).integrated
    monkeypatch.setattr(attribution, "TOKENS_AT_ONCE", 11)
    found = hg.attribute(model, [1, 5, 2, 9, 10, 3], [2, 5], steps=7).integrated
    assert expected is not None and found is not None and relative_error(found, expected) <= LIMIT


@pytest.mark.parametrize("against", [None, 4])
def test_removed_tokens_are_measured(against: int | None) -> None:
    model = make_model(n_blocks=2)
    ids = [1, 5, 2, 9, 10, 3]

    def value(ids: list[int]) -> float:
        row = model.logits(torch.tensor(ids[:-1]))[-1]
        return (row.log_softmax(0)[3] if against is None else row[3] - row[against]).item()

    found = hg.attribute(model, ids, against=against, remove=2)
    assert found.removed is not None
    measured = (~found.removed.isnan()).nonzero().flatten().tolist()
    assert sorted(found.scores.abs().argsort(descending=True)[:2].tolist()) == measured
    for t in measured:
        assert found.removed[t].item() == pytest.approx(value(ids) - value(ids[:t] + ids[t + 1 :]), rel=1e-9)
    everything = hg.attribute(model, ids, [1, 3], remove=9).removed
    assert everything is not None
    assert (~everything.isnan()).nonzero().flatten().tolist() == [2]  # 0 comes before a target, 1 and 3 are targets


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": -1}, "steps must be a number of at least 0"),
        ({"remove": 1.5}, "remove must be"),
        ({"against": 3}, "choose two tokens"),
        ({"against": 4, "targets": [2, 3]}, "give one target, not 2"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        hg.attribute(make_model(), [1, 5, 2, 3], **options)


def test_scaled_embeddings_are_those_of_a_scaled_table() -> None:
    shape = {"n_vocab": 29, "n_heads": 3, "n_kv_heads": 3, "d_model": 12, "n_blocks": 1, "d_hidden": 8, "tied": False}
    found = []
    for scale in (1.0, 3.0):
        model = hg.GPT(hg.preset("nano-llama", **shape, embedding_scale=scale), dtype="float64", seed=3)
        perturb(model, scale=0.3)
        with torch.no_grad():
            model.embed.weight *= 3 / scale
        found.append(hg.attribute(model, IDS, steps=4))
    for name in ("scores", "integrated", "gradient"):
        one, other = (getattr(x, name) for x in found)
        assert relative_error(one, other) <= LIMIT
