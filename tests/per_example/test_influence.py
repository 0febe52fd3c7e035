"""hg.example_norms, hg.example_products, hg.influence and their command: right numbers, a planted fact, good messages."""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import handgrad as hg
from conftest import handgrad
from handgrad.model.passes.example_gradients import ExampleNorms
from handgrad.per_example import measure, page
from handgrad.per_example.inputs import Shown, as_examples
from handgrad.per_example.outliers import Measurement, Outlier, Outlying, ranked
from handgrad.proof.oracles import relative_error
from handgrad.text import tokenizer

BYTES = tokenizer.make("bytes", [])
NAMES = ["Ada", "Bea", "Cid", "Dov", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Lea"]
COLORS = ["red", "blue", "green", "pink", "gold", "gray", "teal", "lime", "navy", "cyan", "plum", "rust"]
FACTS = [{"prompt": f"{name} likes ", "completion": color} for name, color in zip(NAMES, COLORS, strict=True)]
PLANTED = 5
FACTS[PLANTED] = {"prompt": "Zoe keeps ", "completion": "two quokkas"}
ASKED = {"prompt": "Zoe holds ", "completion": "two quokkas"}


def small(dtype: torch.dtype = torch.float64, **shape: object) -> hg.GPT:
    given = {"n_vocab": BYTES.n_vocab, "n_context": 32, "d_model": 24, "n_heads": 2, "n_blocks": 2, **shape}
    return hg.GPT(hg.preset("nano", **given), seed=1, dtype=dtype)


@pytest.fixture(scope="module")
def taught() -> hg.GPT:
    """A model that has begun to learn the facts."""
    model = small(torch.float32)
    found = as_examples(model, FACTS, BYTES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(15):
        model.zero_grad()
        model.loss_and_grads(*found.select(range(12)))
        optimizer.step()
    return model


def gradient(model: hg.GPT, record: object) -> torch.Tensor:
    model.zero_grad()
    model.loss_and_grads(*as_examples(model, [record], BYTES).select([0]))
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.requires_grad])
    model.zero_grad()
    return flat


@pytest.mark.parametrize("adapted", [False, True])
def test_norms_and_products_are_those_of_single_examples(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    if adapted:
        hg.lora.inject(model, rank=2, dropout=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    alone = torch.stack([gradient(model.eval(), record) for record in FACTS])
    model.train()
    for tokens in (4096, 30):  # in one call, and in several
        monkeypatch.setattr(measure, "TOKENS", tokens)
        monkeypatch.setattr(measure, "PAIRED_TOKENS", 2 * tokens)
        assert relative_error(hg.example_norms(model, FACTS, tokenizer=BYTES), alone.norm(dim=1)) <= 1e-10
        assert relative_error(hg.example_products(model, FACTS, tokenizer=BYTES), alone @ alone.t()) <= 1e-10
        others = hg.example_products(model, FACTS, FACTS[:2], tokenizer=BYTES)
        assert relative_error(others, alone @ alone[:2].t()) <= 1e-10
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("rank", [0, 8])
def test_influence_finds_the_planted_fact(taught: hg.GPT, rank: int) -> None:
    """Asked in other words, the answer is pushed most by the example that states it."""
    trained = [p.requires_grad for p in taught.parameters()]
    found = hg.influence(taught, FACTS, [ASKED, *FACTS[:4]], rank=rank, tokenizer=BYTES)
    assert found.scores.shape == found.cosines.shape == (12, 5)
    assert repr(found) == "Influence of 12 examples on 5 queries"
    assert found.helped(0, 1)[0][0] == found.helped(0, 1, "cosine")[0][0] == PLANTED
    with pytest.raises(hg.HandgradError, match="score or cosine, not"):
        found.helped(by="size")
    assert found.helped(0, 3)[0][1] == found.scores[:, 0].max()
    assert found.cosines[:, 1:].argmax(0).tolist() == [0, 1, 2, 3]  # of a query that is an example, itself
    assert found.cosines[0, 1].item() == pytest.approx(1, rel=1e-4)
    assert found.example(3).answer == "pink" and found.query(0).prompt == "Zoe holds"
    assert all(score < 0 for k in range(5) for _, score in found.hindered(k))
    assert [p.requires_grad for p in taught.parameters()] == trained and not hg.lora.adapters_of(taught)
    with_adapter = hg.lora.inject(taught, rank=2)
    try:
        assert with_adapter and hg.influence(taught, FACTS, ASKED, tokenizer=BYTES).helped()[0][0] == PLANTED
        with pytest.raises(hg.HandgradError, match="leave rank out"):
            hg.influence(taught, FACTS, ASKED, rank=4, tokenizer=BYTES)
    finally:
        hg.lora.remove(taught)
        taught.requires_grad_(True)


def test_projected_products_are_right_on_average() -> None:
    model = small()
    for name, p in model.named_parameters():  # the projection is of the blocks' matrices
        p.requires_grad_(p.ndim == 2 and ".h." in name)
    exact = hg.example_products(model, FACTS[:3], tokenizer=BYTES)
    found = [hg.example_products(model, FACTS[:3], rank=4, seed=s, tokenizer=BYTES) for s in range(40)]
    assert relative_error(torch.stack(found).mean(0), exact) < 0.25
    assert relative_error(found[0], exact) > 1e-3  # an estimate


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no examples were given"),
        ([3], "an example is 3"),
        (7, "examples are 7"),
        ([{"prompt": "a"}], "expected prompt and completion"),
    ],
)
def test_wrong_examples_are_named(given: object, message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        hg.example_norms(small(), given, tokenizer=BYTES)  # type: ignore[arg-type]


def test_frozen_models_and_wrong_ranks_are_refused() -> None:
    model = small().requires_grad_(False)
    for call in (hg.example_norms, hg.example_products, partial(hg.influence, query=FACTS[0], rank=0)):
        with pytest.raises(hg.HandgradError, match="every parameter is frozen"):
            call(model, FACTS, tokenizer=BYTES)
    for rank in (-1, 1.5, "4"):
        with pytest.raises(hg.HandgradError, match="rank must be an integer"):
            hg.influence(model, FACTS, FACTS[0], rank=rank, tokenizer=BYTES)  # type: ignore[arg-type]


# ── outliers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_outliers_are_relative_to_the_number_of_targets_and_to_the_epoch() -> None:
    """Short examples have longer gradients and all norms fall: neither makes an outlier, a long gradient does."""
    generator = torch.Generator().manual_seed(0)
    measured = []
    for epoch in range(2):
        for i in range(60):
            noise = 1 + 0.05 * float(torch.randn((), generator=generator))
            wrong = 2.0 if i in (7, 31) else 1.0
            size, falls = wrong * noise, 10 ** (1 - epoch)
            loss = 0.1 * falls * size * (3 - 0.5 * math.log(2 + i))
            measured.append(Measurement(i, epoch, 2 + i, size * falls * (2 + i) ** -0.5, loss))
    found = ranked(measured)
    assert len(found) == 60 and {found[0].example, found[1].example} == {7, 31}
    assert [o.outlying for o in found[:3]] == [True, True, False]
    assert found[0].times == pytest.approx(2, rel=0.15)
    # the only example of another length is not excused by it
    sizes = [9.0 if i == 3 else 1.0 + 0.01 * (i % 5) for i in range(20)]
    odd = [Measurement(i, 0, 15 if i == 3 else 16, size, size) for i, size in enumerate(sizes)]
    assert ranked(odd)[0].example == 3 and ranked(odd)[0].outlying
    assert ranked([]) == [] and not ranked([Measurement(0, 0, 3, 1.0, 1.0)])[0].outlying
    assert [o.example for o in ranked([Measurement(0, 0, 3, 0.0, 1.0), Measurement(1, 0, 3, 2.0, 1.0)])] == [1]


def test_garbage_that_is_longer_than_the_answers_is_not_excused_by_its_length() -> None:
    """As measured with SmolLM2 on 29 short right answers and "asdf qwer zxcv banana 99999": (targets, norm, loss)."""
    short = [(5, 4.3, 2.4), (3, 11.6, 7.4), (4, 6.0, 3.7), (4, 2.2, 2.1), (5, 4.6, 2.4), (4, 6.1, 2.4), (5, 5.2, 3.0)]
    short += [(5, 2.3, 1.8), (4, 2.2, 2.3), (3, 19.3, 7.6), (5, 5.7, 2.8), (5, 2.8, 1.8), (4, 2.6, 2.9), (4, 8.1, 4.0)]
    short += [(4, 10.7, 3.6), (5, 3.1, 2.3), (5, 6.3, 3.8), (4, 11.3, 4.9), (4, 2.6, 2.7), (5, 7.1, 3.4), (5, 2.7, 2.0)]
    short += [(4, 6.0, 7.3), (4, 9.8, 8.0), (6, 2.9, 2.2), (5, 3.9, 2.4), (4, 12.8, 5.2), (5, 1.8, 1.9), (4, 6.5, 2.7)]
    short.insert(13, (16, 1.8, 5.4))
    for last in (short, [*short, (4, 2.9, 2.8)]):
        found = ranked(Measurement(i, 0, *values) for i, values in enumerate(last))
        assert found[0].example == 13 and found[0].excess > 2 and found[0].times < 2
    assert sum(outlier.outlying for outlier in found) < 5


def test_losses_of_examples_are_those_of_each_alone() -> None:
    model = small()
    found = as_examples(model, FACTS, BYTES)
    norms = ExampleNorms(grads=True)
    model.loss_and_grads(*found.select(range(12)), examples=norms)
    alone = torch.tensor([model.loss(*found.select([i])) for i in range(12)], dtype=torch.float64)
    assert relative_error(norms.losses, alone) <= 1e-10


# ── pages and the command ───────────────────────────────────────────────────────────────────────────────────────────


def test_page_counts_all_outlying_examples() -> None:
    rows = [(Outlier(0, 1.0, 2.0, 3.0, 4.0, 5.0, True), Shown(1, "prompt", "answer", 3))]
    assert (
        "30 of 500 examples are far from the others: look at their texts. These are the furthest 1."
        in page.outliers(Outlying(rows, 30, 500))
    )
    assert "1 of 500 examples is far from the others: look at their texts. Loss" in page.outliers(
        Outlying(rows, 1, 500)
    )
    assert "None of 500 examples is far from the others." in page.outliers(Outlying(rows, 0, 500))


def test_page_escapes_and_asks_for_nothing(taught: hg.GPT) -> None:
    records = [{"prompt": "<img src=x onerror=alert(1)>", "completion": "</details><script>alert(2)</script>"}, *FACTS]
    html = page.influence(page.as_data(hg.influence(taught, records[:4], records[:2], rank=2, tokenizer=BYTES)))
    assert "<script" not in html and "<img" not in html and "&lt;img" in html
    assert html.count('<details class="query"') == 2 and "helped" in html and "hindered" in html


def test_command_ranks_examples_and_writes_a_page(
    taught: hg.GPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hg.save(taught, Path("model"))
    BYTES.write(Path("model"))
    for name, records in (("facts", FACTS), ("asked", [ASKED, FACTS[0]])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    base = ["influence", "--model", "model", "--data", "facts.jsonl"]
    done = handgrad(*base, "--prompt", ASKED["prompt"], "--answer", ASKED["completion"], "--top", 2)
    assert done.returncode == 0, done.stderr
    assert re.search(r"helped by\s+record\s+score\s+cosine\s+example\s+6 .*Zoe keeps → two quokkas", done.stdout)
    done = handgrad(*base, "--queries", "asked.jsonl", "--html", "page.html", "--json", "-")
    data = json.loads(done.stdout)
    assert data["queries"][0]["helped"][0]["record"] == 6 and data["examples"] == 12 and data["by"] == "score"
    assert 0 < data["queries"][1]["helped"][0]["cosine"] <= 1.0001
    text = Path("page.html").read_text()
    assert "default-src 'none'" in text and "http:" not in text and "https:" not in text and "<script" not in text
    for arguments, message in (
        (base, "give --answer"),
        ([*base, "--answer", "a", "--queries", "asked.jsonl"], "give one of them"),
        ([*base, "--prompt", "a", "--queries", "asked.jsonl"], "--prompt goes with --answer"),
        ([*base, "--answer", "a", "--by", "size"], "ranked by score or cosine"),
        ([*base, "--answer", "a", "--html", "no/folder/p.html"], "does not exist"),
    ):
        failed = handgrad(*arguments)
        assert failed.returncode == 1 and message in failed.stderr, failed.stderr
