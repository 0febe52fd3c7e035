"""Every reader of a model × every family: what is computed, shown, checked or counted of a block follows from its steps."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from members import TYPICAL, transformers_model
from torch import Tensor, nn

import handgrad as hg
from conftest import perturb
from handgrad.auditing.model.points import points_of
from handgrad.explain_page.follow.follow import follow
from handgrad.explain_page.proofs.prover import CheckResults, Prover
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.stations.network import NEURONS
from handgrad.explain_page.views import attention as attention_view
from handgrad.explain_page.views import lens as lens_view
from handgrad.explain_page.views import neurons as neurons_view
from handgrad.explain_page.views import overview as overview_view
from handgrad.explain_page.views import station as station_view
from handgrad.explain_page.views import what_if as what_if_view
from handgrad.model.inspect.trace import own_gradients
from handgrad.model.layers.linear import Linear
from handgrad.model.passes.example_gradients import ExampleNorms, ExamplePairs
from handgrad.model.precision import why_not_mixed
from handgrad.model.steps import signal
from handgrad.model.storage.packed import Packed
from handgrad.plan.estimate import make_plan
from handgrad.plan.flop import Work, flop
from handgrad.proof.oracles import relative_error
from handgrad.text import tokenizer

LENGTHS = [5, 8]
N_VOCAB = 256  # bytes, of which the page has a tokenizer
TEXT = "to be!"


class Case(NamedTuple):
    """A small model of a family, in float64, and its trace of a batch."""

    theirs: Any
    folder: Path
    model: hg.GPT
    tokens: Tensor
    targets: Tensor
    trace: hg.Trace

    def again(self, **options: Any) -> hg.Trace:
        return hg.trace(self.model, self.tokens, self.targets, LENGTHS, **options)

    def loaded(self, dtype: str = "float64") -> hg.GPT:
        return hg.load(self.folder, dtype=dtype)

    @property
    def sparse(self) -> bool:
        return self.model.config.n_experts is not None


@pytest.fixture(scope="module", params=TYPICAL)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with TemporaryDirectory() as folder:
        theirs = transformers_model(request.param, vocab_size=N_VOCAB)
        theirs.save_pretrained(folder)
        model = hg.load(folder, dtype="float64")
        generator = torch.Generator().manual_seed(1)
        tokens, targets = torch.randint(N_VOCAB, (2, sum(LENGTHS)), generator=generator)
        targets[[1, 7, -1]] = -100
        yield Case(theirs, Path(folder), model, tokens, targets, hg.trace(model, tokens, targets, LENGTHS))


def gradients(model: hg.GPT, *given: Any, **options: Any) -> dict[str, Tensor]:
    with own_gradients(model.parameters()):
        model.loss_and_grads(*given, **options)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: Any, expected: Any, limit: float = 1e-9) -> None:
    largest = max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        assert relative_error(found[name], x, floor=1e-6 * largest) <= limit, name


def test_an_edit_that_changes_nothing(case: Case) -> None:
    edited = case.again(edit={"blocks.0.a_4": lambda a: a})
    assert edited.loss == pytest.approx(case.trace.loss, rel=1e-12)
    assert_close(edited, {n: x for n, x in case.trace.items() if x.is_floating_point()})


@pytest.mark.some_cases(3)
def test_edits_change_the_loss_as_the_error_signals_say(case: Case) -> None:
    for name in ("a_1", *(name for step in case.model.blocks[1].steps() for name in step.outputs)):
        name = f"blocks.1.{name}"
        if name not in case.trace:
            continue
        direction = torch.randn(case.trace[name].shape, dtype=torch.float64)
        up, down = (case.again(edit={name: lambda a, x=e * direction: a + x}).loss for e in (1e-6, -1e-6))
        slope = (case.trace[signal(name)] * direction).sum().item()
        assert (up - down) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-7), name
    stopped = case.again(edit={"delta_11": torch.zeros_like})
    assert stopped["blocks.0.delta_1"].abs().max() == 0


def test_the_loss_without_gradients(case: Case) -> None:
    logits = case.model.logits(case.tokens, LENGTHS)
    expected = nn.functional.cross_entropy(logits.as_subclass(Tensor), case.targets).item()
    assert case.model.loss(case.tokens, case.targets, LENGTHS) == pytest.approx(expected, rel=1e-12)
    assert case.trace.loss == pytest.approx(expected, rel=1e-12)


def test_recomputed_blocks(case: Case) -> None:
    given = case.tokens, case.targets, LENGTHS
    assert_close(gradients(case.model, *given, recompute="blocks"), gradients(case.model, *given))


def test_gradients_of_examples(case: Case) -> None:
    given = zip(case.tokens.split(LENGTHS), case.targets.split(LENGTHS), LENGTHS, strict=True)
    alone = [gradients(case.model, t, y, [n]) for t, y, n in given]
    flat = torch.stack([torch.cat([x.flatten() for x in grads.values()]) for grads in alone])
    norms, pairs = ExampleNorms(), ExamplePairs()
    for examples in (norms, pairs):
        case.model.loss_and_grads(case.tokens, case.targets, LENGTHS, examples=examples)
    assert relative_error(norms.result(), flat.norm(dim=1)) <= 1e-9
    assert relative_error(pairs.result(), flat @ flat.T) <= 1e-9
    weights = torch.tensor([(y >= 0).sum() for y in case.targets.split(LENGTHS)]).double()
    whole = gradients(case.model, case.tokens, case.targets, LENGTHS)
    summed = (flat * (weights / weights.sum())[:, None]).sum(0)
    assert relative_error(torch.cat([x.flatten() for x in whole.values()]), summed) <= 1e-9


def test_a_step_of_adapters(case: Case) -> None:
    """Gradients of adapters by differences along a random direction."""
    model = case.loaded()
    hg.lora.inject(model, rank=1)
    perturb(model, scale=0.1)
    found = gradients(model, case.tokens, case.targets, LENGTHS)
    assert found and all("down" in name or "up" in name for name in found)
    generator = torch.Generator().manual_seed(5)
    directions = {n: torch.randn(x.shape, dtype=x.dtype, generator=generator) for n, x in found.items()}
    slope = sum((x * directions[n]).sum().item() for n, x in found.items())
    losses = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for name, x in directions.items():
                model.get_parameter(name).add_(x, alpha=step)
        losses.append(model.loss(case.tokens, case.targets, LENGTHS))
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-4)


def test_packed_weights(case: Case) -> None:
    """Matrices in bfloat16 bytes: logits and gradients of adapters are those of the same weights as parameters."""
    found = []
    for pack in (True, False):
        model = case.loaded()
        with torch.no_grad():
            for layer in (x for block in model.blocks for x in block.modules() if isinstance(x, Linear)):
                assert layer.weight is not None
                if pack:
                    layer.pack(Packed.of(layer.weight.detach().bfloat16()), torch.float64)
                else:
                    layer.weight.copy_(layer.weight.bfloat16())
        hg.lora.inject(model, rank=1)
        perturb(model, scale=0.0)
        found.append(gradients(model, case.tokens, case.targets, LENGTHS))
        found[-1]["logits"] = model.logits(case.tokens, LENGTHS)
    assert_close(*found)


@pytest.mark.skipif(why_not_mixed() is not None, reason=f"no mixed precision: {why_not_mixed()}")
def test_mixed_precision(case: Case) -> None:
    model = case.loaded("float32")
    expected = model.loss(case.tokens, case.targets, LENGTHS)
    model.precision = "mixed"
    assert model.loss(case.tokens, case.targets, LENGTHS) == pytest.approx(expected, rel=0.05)
    assert gradients(model, case.tokens, case.targets, LENGTHS)


def test_generation_equals_full_passes(case: Case) -> None:
    prompts = torch.randint(N_VOCAB, (2, 5), generator=torch.Generator().manual_seed(4))
    found = hg.generate(case.model, prompts, max_new_tokens=8)
    rows = prompts
    for _ in range(8):
        rows = torch.cat([rows, case.model.logits(rows)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, rows[:, 5:])


def test_attribution(case: Case) -> None:
    """The gradient by differences of a_1; integrated gradients add up to the difference from the baseline."""
    ids = case.tokens[:6]
    found = hg.attribute(case.model, ids, steps=200)
    expected = torch.log_softmax(case.model.logits(ids[None])[0, -2], 0)[ids[-1]].item()
    assert found.logprob == pytest.approx(expected, rel=1e-9)
    targets = torch.full((5,), -100)
    targets[-1] = ids[-1]
    delta_1 = hg.trace(case.model, ids[:5], targets, [5])["blocks.0.delta_1"]
    assert relative_error(found.gradient[:5], -delta_1) <= 1e-9
    assert case.sparse or abs(found.gap) <= 0.05 * max(1, abs(found.integrated.sum()))  # routers jump along the line


def session_of(case: Case) -> Session:
    return Session(case.loaded(), tokenizer.make("bytes", ()), "small", "for a test", TEXT)


@pytest.mark.some_cases(3)
def test_the_explain_page(case: Case) -> None:
    """Every station and view; in every tensor a number, followed to its terms, is their sum."""
    session = session_of(case)
    assert len(session.by_id) == len(session.stations)
    sentence = session.sentence(TEXT)
    overview_view.table(session)
    overview_view.overview(session, sentence)
    for block in range(2):
        kinds = [step.kind for step in session.network.blocks[block]]
        if "attention" not in kinds:
            continue
        step = session.network.find(block, "attention")
        attention_view.at_head(session, sentence, block, 1)
        if len(session.network.readers(step.inputs[0])) == 1:  # all heads together send back Δ of what they read
            heads = range(case.model.config.n_heads)
            found = [attention_view._head(session.model, sentence.trace, step, h).branches for h in heads]
            sent = sum(x for branches in found for x in branches)
            assert relative_error(sent, sentence.trace[signal(step.inputs[0])]) <= 1e-9
    for block in session.network.having(*NEURONS):
        neurons_view.neurons(session, sentence, block)
    what_if_view.effects(session, sentence)
    chances = sentence.trace["y_pred"][0, int(sentence.targets[0, 0])]
    assert overview_view.overview(session, sentence)["losses"][0] == pytest.approx(-chances.log().item(), rel=1e-6)
    for station in session.stations:
        station_view.at_station(session, sentence, station)
        if station.stream:
            lens_view.lens(session, sentence, station)
    for name, x in sentence.trace.items():
        if not x.is_floating_point() or x.ndim not in (1, 2, 3) or "raw" in name:
            continue
        row, column = (min(2, n - 1) for n in (x if x.ndim > 1 else x[None]).shape[-2:])
        given = follow(session, sentence, name, 1 if x.ndim == 3 else None, row, column)
        assert given["sum"] == pytest.approx(given["value"], rel=1e-8, abs=1e-12), name


@pytest.mark.some_cases(3)
def test_the_proofs(case: Case) -> None:
    session = session_of(case)
    prover, results = Prover(session), CheckResults()
    for i, station in enumerate(session.stations):
        prover.check_now(session.sentence(TEXT), results, station, differences=i < 2)
    failed = [(id, c) for id, checks in results.checks.items() for c in checks if not c["passed"]]
    assert failed == []


@pytest.mark.some_cases(6)
def test_the_audit(case: Case) -> None:
    tokens = case.tokens[:10].view(2, 5)
    report = hg.audit(case.theirs, {"input_ids": tokens, "labels": tokens}, setup=False)
    assert report.passed, str(report)
    assert not report.notes
    assert sum(x.kind == "gradient" for x in report.compared) == sum(p.requires_grad for p in case.model.parameters())
    assert sum(x.kind == "activation" for x in report.compared) == len(points_of(case.model))


def test_a_wrapped_model(case: Case) -> None:
    """The loss, logits and hidden states carry the gradients of the model."""
    tokens = case.tokens[:10].view(2, 5)
    wrapped = hg.nn.wrap(case.loaded())
    wrapped(tokens, labels=tokens).loss.backward()
    expected = {name: p.grad.clone() for name, p in wrapped.named_parameters() if p.grad is not None}
    wrapped.zero_grad()
    logits = wrapped(tokens).logits[:, :-1].flatten(0, 1)
    nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
    assert_close({name: p.grad for name, p in wrapped.named_parameters()}, expected)


def test_the_plan(case: Case) -> None:
    config, model = case.model.config, case.model
    plan = make_plan(config, 1, 8)
    frozen = sum(p.numel() for name, p in model.named_parameters() if name.endswith("e_score_correction_bias"))
    assert plan.total == model.size - frozen  # what chooses experts, and is not trained
    assert flop(config, Work.of(8, config), {})[0] > 0


def test_saved_and_loaded(case: Case, tmp_path: Path) -> None:
    hg.save(case.model, tmp_path / "saved")
    again = hg.load(tmp_path / "saved", dtype="float64")
    assert again.config == case.model.config
    assert torch.equal(again.logits(case.tokens, LENGTHS), case.model.logits(case.tokens, LENGTHS))
