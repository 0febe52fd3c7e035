"""The engine: uneven sequences that join and leave, equal to the model's own logits and to transformers; bytes and work."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

import handgrad as hg
from conftest import make_model, perturb, save_adapter
from families.members import TYPICAL, family_of, transformers_model
from handgrad import optim
from handgrad.inference import kv_cache
from handgrad.inference.engine import Engine, Options, Sampling, Sequence
from handgrad.kernels import library
from handgrad.lora.named import load_named, weights_of
from handgrad.model.gpt import GPT
from handgrad.ops.rope_scaling import Scaling
from handgrad.plan.estimate import make_plan
from handgrad.proof.oracles import count_multiply_adds

LENGTHS = [5, 1, 13, 8, 13, 2]


def prompts_of(n_vocab: int, lengths: list[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(n_vocab, (n,), generator=generator).tolist() for n in lengths]


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def greedy(model: GPT, prompt: list[int], n: int) -> list[int]:
    """By the model's logits alone."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model.logits(torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", [*TYPICAL, "llama, yarn with options", "smollm3, every fourth layer unrotated"])
@pytest.mark.some_cases(6)
def test_uneven_prompts_equal_transformers(name: str, tmp_path: Path) -> None:
    """Cached, uncached, in pieces, batched with others and by transformers, one prompt at a time."""
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "m")
    ours = hg.load(tmp_path / "m", dtype="float64")
    prompts = prompts_of(29)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        new = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False, pad_token_id=0
        )
        expected.append(new[0, len(prompt) :].tolist())
    assert hg.generate(ours, prompts, 14) == expected
    assert hg.generate(ours, prompts, 14, cache=False) == expected
    with library.disabled():
        assert hg.generate(ours, prompts, 14) == expected
    engine = Engine(ours, tokens_at_once=4)
    found = [engine.add(prompt, Options(14)) for prompt in prompts]
    run(engine)
    assert [x.new for x in found] == expected
    assert family_of(name) == ours.config.family


def test_repetition_penalty_equals_transformers(tmp_path: Path) -> None:
    theirs = transformers_model("llama, 3 queries to a key")
    theirs.save_pretrained(tmp_path / "m")
    ours = hg.load(tmp_path / "m", dtype="float64")
    ids = torch.tensor(prompts_of(29)[:1])
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.5}
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 5:]
    assert torch.equal(hg.generate(ours, ids, 14, repetition_penalty=1.5), expected)
    assert not torch.equal(hg.generate(ours, ids, 14), expected)


@pytest.mark.parametrize("shape", [{}, {"n_context": 700}])
def test_sequences_join_and_leave_at_any_step(shape: dict[str, int]) -> None:
    model = make_model(n_blocks=2, **{"n_context": 40, **shape})
    prompts = prompts_of(11, [5, 1, 13, 8, 300 if shape else 13, 2, 9])
    wanted = [9, 20, 3, 11, 6, 15, 1]
    engine = Engine(model, tokens_at_once=64)
    sequences: list[Sequence] = []
    for prompt, n in zip(prompts, wanted, strict=True):  # one joins every other step
        sequences.append(engine.add(prompt, Options(n)))
        engine.step()
        engine.step()
    leaving = engine.add(prompts[2], Options(20))
    engine.step()
    engine.cancel(leaving)
    engine.cancel(leaving)
    assert leaving.finish == "cancelled"
    run(engine)
    for sequence, prompt, n in zip(sequences, prompts, wanted, strict=True):
        assert sequence.new == greedy(model, prompt, n) and sequence.finish == "length"
    assert leaving.new == greedy(model, prompts[2], len(leaving.new)) and len(leaving.new) < 20
    assert engine.cache.nbytes == 0, "all memory is returned"


def test_a_step_has_one_token_of_each_sequence_and_pieces_of_prompts() -> None:
    model = make_model(n_context=64)
    engine = Engine(model, tokens_at_once=10)
    first, long = engine.add([1, 2], Options(8)), engine.add(list(range(10)) * 3, Options(2))
    sizes = []
    while engine.busy:
        before = first.slot.length + long.slot.length
        engine.step()
        sizes.append(first.slot.length + long.slot.length - before if long.finish is None else 0)
    assert sizes[:4] == [10, 10, 10, 5]
    assert first.new == greedy(model, [1, 2], 8) and long.new == greedy(model, list(range(10)) * 3, 2)


def test_waiting_sequences() -> None:
    model = make_model()
    engine = Engine(model, max_running=2)
    found = [engine.add([i], Options(3)) for i in range(5)]
    engine.step()
    assert [len(x.new) for x in found] == [1, 1, 0, 0, 0]
    run(engine)
    assert [x.new for x in found] == [greedy(model, [i], 3) for i in range(5)]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every pass."""
    found: list[int] = []
    embeddings = GPT.embeddings
    monkeypatch.setattr(GPT, "embeddings", lambda self, ids, at: found.append(len(ids)) or embeddings(self, ids, at))
    return found


def test_a_shared_beginning_is_computed_once(rows: list[int]) -> None:
    model = make_model(n_context=64, n_blocks=2)
    beginning = prompts_of(11, [30])[0]
    prompts = [[*beginning, i, 3] for i in range(4)] + [beginning, [4, 5, 6]]
    for n in (1, 5):  # also if the first sequence has left before the second begins
        rows.clear()
        engine = Engine(model)
        found = [engine.add(prompt, Options(n)) for prompt in prompts]
        run(engine)
        assert sum(rows) == 30 + 2 * 4 + 1 + 3 + 6 * (n - 1)
        assert [x.new for x in found] == [greedy(model, prompt, n) for prompt in prompts]
        assert not engine.kept and engine.cache.nbytes == 0
    engine = Engine(model, keep=1)
    first = engine.add(beginning, Options(5))
    run(engine)
    rows.clear()
    answer = engine.add([*first.ids, 7], Options(5))
    run(engine)
    assert sum(rows) == 1 + 1 + 4, "the last token of the answer was not in the cache yet"
    assert answer.new == greedy(model, [*first.ids, 7], 5)
    engine.close()
    assert engine.cache.nbytes == 0


def test_log_probabilities_of_a_shared_beginning_are_computed_once(rows: list[int]) -> None:
    """As an evaluation harness asks: one question, several answers. A prompt without log-probabilities has none to give."""
    model = make_model(n_context=64, n_blocks=2)
    question, *others = prompts_of(11, [30, 3, 4, 2, 3])
    answers = [question + other for other in others] + [question[:20]]
    engine = Engine(model, max_running=3)
    plain = engine.add(question, Options(9))
    engine.step()
    rows.clear()
    found = [engine.add(ids, Options(1, logprobs=2, prompt_logprobs=True)) for ids in answers]
    unlike = engine.add(answers[0], Options(1, logprobs=3, prompt_logprobs=True))
    run(engine)
    assert sum(rows) == len(plain.new) - 1 + 33 + (1 + 4) + (1 + 2) + (1 + 3) + 1 + 33
    for sequence in [*found, unlike]:
        expected = torch.log_softmax(model.logits(torch.tensor(sequence.prompt)), 1)
        top = sequence.options.logprobs
        assert [x.id for x in sequence.prompt_logprobs] == sequence.prompt[1:]
        for row, x in zip(expected, sequence.prompt_logprobs, strict=False):
            assert x.logprob == pytest.approx(row[x.id].item(), abs=1e-10)
            assert [p for _, p in x.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-10)
        assert sequence.new == greedy(model, sequence.prompt, 1)
    assert not engine.kept and engine.cache.nbytes == 0


def test_a_queue_that_never_empties_holds_no_finished_sequences() -> None:
    """All prompts begin alike, as chats do, and some always wait: only what they will copy is kept."""
    model = make_model(n_context=64)
    beginning = prompts_of(11, [20])[0]
    engine = Engine(model, max_running=2)
    kept = []
    for i in range(30):
        while len(engine.sequences) < 5:
            engine.add([*beginning, i % 11, len(engine.sequences)], Options(2))
        engine.step()
        kept.append(len(engine.kept))
    assert max(kept) <= 3
    for sequence in list(engine.sequences)[::-1]:
        engine.cancel(sequence)
    assert not engine.kept and engine.cache.nbytes == 0


@pytest.mark.parametrize("family", ["nano", "nano-llama"])
def test_bytes_of_the_cache(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plan says, for the tokens that have a place; a sequence never gets the whole context at once."""
    monkeypatch.setattr(kv_cache, "FIRST_CAPACITY", first := 16)
    shape = {"n_vocab": 11, "n_context": 4 * first, "d_model": 16, "n_heads": 4, "n_blocks": 2}
    model = hg.GPT(hg.preset(family, **shape))
    per_token = make_plan(model.config).bytes_cache_per_token
    engine = Engine(model)
    assert engine.cache.nbytes == 0
    sequences = [engine.add([1] * 5, Options(40, Sampling(1.0, seed=1)))]
    engine.step()
    assert engine.cache.nbytes == per_token * first
    sequences += [engine.add([i, 2], Options(40, Sampling(1.0, seed=1))) for i in range(2)]
    engine.step()
    assert engine.cache.nbytes == per_token * 4 * first, "slots are added by doubling"
    while sequences[0].slot.length <= first:
        engine.step()
    assert {pool.capacity: pool.rows for pool in engine.cache.pools.values()} == {
        first: 4, 2 * first: 1,
    }  # fmt: skip
    run(engine)
    assert engine.cache.nbytes == 0


def test_work_per_token_is_linear_in_the_context() -> None:
    """Exactly: the products with weights, and per block q kᵗ and ρ v over all tokens so far."""
    model = make_model(n_blocks=3, n_context=64)
    engine = Engine(model)
    engine.add([1, 2, 3], Options(40))
    engine.step()
    c = model.config
    with library.disabled():  # torch's counter sees torch's products
        counts = [count_multiply_adds(engine.step, attention_kernel=True) for _ in range(30)]
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "wpe" not in name)
    weights = matrices - (0 if c.tied else c.n_vocab * c.d_model)  # an embedding is looked up
    per_key = c.n_blocks * c.n_heads * (c.query_width + c.value_width)
    assert counts == [weights + per_key * (4 + i) for i in range(30)]


def test_invalid_input_leaves_the_engine_as_it_was() -> None:
    engine = Engine(make_model())
    for prompt, options in (
        ([], Options()),
        ([99], Options()),
        ([1], Options(0)),
        ([1], Options(stop_ids=frozenset({11}))),
    ):
        with pytest.raises(hg.HandgradError):
            engine.add(prompt, options)
    assert not engine.busy and engine.step() == []
    with pytest.raises(hg.HandgradError, match="needs a causal model"):
        Engine(make_model(causal=False))


def _step(model: GPT) -> None:
    ids = torch.arange(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.loss_and_grads(ids[None], ids[None])
    optim.step(optimizer, 0.5)  # fused, with a factor


def _other_tensors(model: GPT) -> None:
    for p in model.parameters():
        p.data = p.data.flip(0)


def _adapter(model: GPT) -> None:
    hg.lora.inject(model, rank=2, targets=["all-linear"])
    perturb(model, scale=1)


@pytest.mark.parametrize("change", [_step, _other_tensors, _adapter])
def test_keys_of_other_weights_are_not_used(change: Callable[[GPT], None]) -> None:
    """Neither those of a kept sequence nor those of a running one."""
    model = make_model(n_vocab=29, n_context=64)
    prompt = prompts_of(29, [30])[0]
    engine = Engine(model, keep=1)
    engine.add(prompt, Options(2))
    run(engine)
    running = engine.add(prompt, Options(4, logprobs=0))
    engine.step()
    change(model)
    while running.finish is None:
        engine.step()
    ids = torch.tensor(running.ids)
    logits = model.logits(ids).log_softmax(1)
    expected = [float(logits[i - 1, ids[i]]) for i in range(31, 34)]
    assert [x.logprob for x in running.logprobs[1:]] == pytest.approx(expected)
    _step(model)
    found = engine.add(prompt, Options(6, logprobs=0))
    run(engine)
    expected = float(model.logits(torch.tensor(prompt)).log_softmax(1)[-1].max())
    assert found.logprobs[0].logprob == pytest.approx(expected)


def test_factors_of_a_named_adapter_count_as_weights(tmp_path: Path) -> None:
    save_adapter(make_model(n_vocab=29, n_context=64), tmp_path / "a")
    model = make_model(n_vocab=29, n_context=64)
    load_named(model, {"a": tmp_path / "a"})
    engine = Engine(model)
    assert not engine.weights.changed()
    with torch.no_grad():
        weights_of(model)[-1].mul_(2)
    assert engine.weights.changed()


@pytest.mark.parametrize("context_full", ["stop", "slide"])
def test_frequencies_that_change_with_the_length(context_full: Literal["stop", "slide"]) -> None:
    """A longrope model on both sides of its original context, and while it goes beyond: keys in the cache, and beginnings of
    other sequences, are those of a complete pass."""
    factors = {"short_factor": (1.0, 1.5, 2.0, 2.5), "long_factor": (3.0, 9.0, 20.0, 40.0)}
    scaling = Scaling("longrope", 4.0, original_max_position_embeddings=30, **factors)
    shape = {
        "n_vocab": 29,
        "n_context": 40,
        "d_model": 24,
        "n_heads": 3,
        "n_kv_heads": 3,
        "n_blocks": 2,
        "d_hidden": 20,
    }
    model = hg.GPT(hg.preset("nano-llama", **shape, family="phi3", rope_scaling=scaling), dtype="float64")
    perturb(model, scale=0.5)
    first = prompts_of(29, [33])[0]
    found = []
    for engine in (Engine(model, keep=4), Engine(model, keep=4, tokens_at_once=7), Engine(model, cache=False)):
        options = Options(24, logprobs=2, context_full=context_full)
        sequences = [engine.add(first[:n], options) for n in (27, 33, 5)]
        for _ in range(12):
            engine.step()
        sequences += [engine.add(first[:n], options) for n in (26, 31)]  # begin as others do, on either side
        run(engine)
        sequences.append(engine.add(sequences[0].ids[:29], options))
        run(engine)
        found.append(sequences)
    for cached in found[:-1]:
        for ours, complete in zip(cached, found[-1], strict=True):
            assert ours.new == complete.new
            assert [x.logprob for x in ours.logprobs] == pytest.approx([x.logprob for x in complete.logprobs], rel=1e-9)
