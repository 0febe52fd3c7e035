"""hg.generate: forms of prompts and results, seeds, stops, log-probabilities, full contexts and invalid input."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

import handgrad as hg
from conftest import make_model, perturb, save_with_bytes
from handgrad.inference.engine import Engine, Options
from handgrad.text import tokenizer

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1], [2, 2]]


@pytest.fixture
def talking(tmp_path: Path) -> hg.GPT:
    """A model of bytes that was loaded from a folder, with the newline as its end of text."""
    save_with_bytes(make_model(n_vocab=256, n_context=64, d_model=24), tmp_path / "m")
    return hg.load(tmp_path / "m")


def test_stream_equals_batch_and_seed_and_top_k_take_effect() -> None:
    model = make_model()
    tokens = torch.tensor([[1, 2, 3]])
    options = {"temperature": 1.0, "seed": 5}
    new = hg.generate(model, tokens, 12, **options)
    assert torch.equal(torch.stack(list(hg.generate(model, tokens, 12, stream=True, **options)), 1), new)
    assert torch.equal(hg.generate(model, tokens, 12, temperature=1.0, top_k=1), hg.generate(model, tokens, 12))
    assert not torch.equal(hg.generate(model, tokens, 12, temperature=1.0, seed=6), new)


def test_full_context_restarts_from_its_second_half() -> None:
    model = make_model(n_context=8)
    tokens = torch.randint(11, (1, 20))
    new = hg.generate(model, tokens, 30, context_full="slide")
    assert torch.equal(hg.generate(model, tokens, 30, context_full="slide", cache=False), new)
    sequence, window = torch.cat([tokens, new], 1), 8
    for i in range(30):
        seen = sequence[:, 20 + i - window : 20 + i]
        assert torch.equal(model.logits(seen)[:, -1].argmax(1), new[:, i]), i
        window = window + 1 if window < 8 else 4
    model = make_model(n_context=1)
    new = hg.generate(model, tokens, 5, context_full="slide")
    before = torch.cat([tokens[:, -1:], new[:, :-1]], 1)
    assert torch.equal(torch.stack([model.logits(x[None])[0, -1].argmax() for x in before.T]), new[0])


def test_full_context_ends_a_sequence() -> None:
    model = make_model(n_context=8)
    long = hg.generate(make_model(n_context=8), PROMPTS, 30, context_full="slide")
    found = hg.generate(model, PROMPTS, 30, details=True)
    assert [len(x.ids) for x in found] == [8 - len(prompt) + 1 for prompt in PROMPTS]  # the last needs no place
    assert {x.finish for x in found} == {"context"}
    assert all(x.ids == ids[: len(x.ids)] for x, ids in zip(found, long, strict=True))
    assert hg.generate(model, [1] * 8, 1) and hg.generate(model, torch.ones(2, 8, dtype=torch.int64), 9).shape == (2, 1)
    with pytest.raises(
        hg.HandgradError, match=r"has 9 tokens, and the context 8: shorten it, or.*context_full='slide'"
    ):
        hg.generate(model, [1] * 9, 1)


def test_forms_of_ids() -> None:
    model = make_model()
    expected = [hg.generate(model, torch.tensor([prompt]), 5)[0].tolist() for prompt in PROMPTS]
    assert hg.generate(model, PROMPTS, 5) == expected
    assert hg.generate(model, [torch.tensor(prompt) for prompt in PROMPTS], 5) == expected
    assert [hg.generate(model, prompt, 5) for prompt in PROMPTS] == expected
    assert list(hg.generate(model, PROMPTS[0], 5, stream=True)) == expected[0]
    pieces: list[list[int]] = [[] for _ in PROMPTS]
    for i, piece in hg.generate(model, PROMPTS, 5, stream=True):
        pieces[i].append(piece)
    assert pieces == expected
    found = hg.generate(model, PROMPTS[0], 5, details=True)
    assert (found.ids, found.text, found.finish, found.prompt) == (expected[0], None, "length", PROMPTS[0])


def test_stop_ids_end_rows_early() -> None:
    model = make_model()
    ids = hg.generate(model, PROMPTS, 8)
    stop = ids[0][2]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in ids]
    assert hg.generate(model, PROMPTS, 8, stop=stop) == cut and len(set(map(len, cut))) > 1
    found = hg.generate(model, PROMPTS, 8, stop=[stop], details=True)
    assert [x.finish for x in found] == ["stop" if stop in row else "length" for row in cut]
    tensor = torch.tensor([PROMPTS[0], [1, 1, 1]])
    rows = hg.generate(model, tensor, 8)
    stop = int(rows[0, 1])
    found = hg.generate(model, tensor, 8, stop=stop)
    streamed = torch.stack(list(hg.generate(model, tensor, 8, stop=stop, stream=True)), 1)
    assert torch.equal(found, streamed)
    for row, full in zip(found.tolist(), rows.tolist(), strict=True):
        n = full.index(stop) + 1 if stop in full else 8
        assert row == full[:n] + [-1] * (found.shape[1] - n)


@pytest.mark.parametrize("family", ["nano", "nano-llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8, "repetition_penalty": 1.2}, {"min_p": 0.1}])
@pytest.mark.some_cases(6)
def test_same_seed_same_tokens_alone_and_in_a_batch(family: str, dtype: torch.dtype, options: dict[str, float]) -> None:
    torch.manual_seed(1)
    shape = {"n_vocab": 97, "n_context": 64, "d_model": 24, "n_heads": 4, "n_blocks": 2}
    model = hg.GPT(hg.preset(family, **shape), dtype=dtype)
    perturb(model, scale=0.1)
    prompts = [torch.randint(97, (n,)).tolist() for n in (3, 17, 1, 9, 17)]
    seeds = [7, 1, 5, 5, 0]
    options = {"temperature": 0.9, **options}
    alone = [hg.generate(model, p, 30, seed=s, **options) for p, s in zip(prompts, seeds, strict=True)]
    assert hg.generate(model, prompts, 30, seed=seeds, **options) == alone
    assert hg.generate(model, prompts, 30, seed=seeds, cache=False, **options) == alone
    assert hg.generate(model, prompts[:2], 30, seed=6, **options) == [
        hg.generate(model, prompts[i], 30, seed=6 + i, **options) for i in range(2)
    ]
    many = hg.generate(model, [prompts[0]] * 5, 30, seed=0, **options)
    assert len({tuple(ids) for ids in many}) == 5, "prompts of a batch have different seeds"


def test_text_in_text_out(talking: hg.GPT) -> None:
    made = tokenizer.make("bytes", [])
    ids = hg.generate(talking, made.encode("Où "), 12)
    text = hg.generate(talking, "Où ", 12)
    assert text == "".join(hg.generate(talking, "Où ", 12, stream=True))
    assert isinstance(text, str) and text.rstrip("\ufffd") == made.decode(ids).rstrip("\ufffd")
    assert hg.generate(talking, ["Où ", "a"], 12) == [text, hg.generate(talking, "a", 12)]
    assert hg.generate(make_model(n_vocab=256), "a", 3, tokenizer=made) is not None
    found = hg.generate(talking, "Où ", 12, details=True)
    assert (found.ids, found.text, found.finish) == (ids, text, "length")


def test_stop_strings_and_end_of_text(talking: hg.GPT) -> None:
    full = hg.generate(talking, "ab", 24, temperature=1.0, seed=3)
    stop = full[4:6]
    at = full.index(stop)
    found = hg.generate(talking, "ab", 24, temperature=1.0, seed=3, stop=[stop, "never"], details=True)
    assert found.text == full[:at] and found.finish == "stop" and len(found.ids) < 24
    assert "".join(hg.generate(talking, "ab", 24, temperature=1.0, seed=3, stop=stop, stream=True)) == full[:at]
    ids = hg.generate(talking, [97, 98], 24, temperature=1.0, seed=3)
    Path(talking.source, "generation_config.json").write_text(f'{{"eos_token_id": [9999, {ids[3]}]}}')
    again = hg.load(talking.source)
    found = hg.generate(again, "ab", 24, temperature=1.0, seed=3, details=True)
    assert found.ids == ids[: ids.index(ids[3]) + 1] and found.finish == "stop"
    assert hg.generate(again, [97, 98], 24, temperature=1.0, seed=3) == ids
    assert hg.generate(again, [97, 98], 24, temperature=1.0, seed=3, stop_at_end=True) == found.ids
    assert hg.generate(again, "ab", 24, temperature=1.0, seed=3, stop_at_end=False) == full


def test_logprobs_are_those_of_the_model() -> None:
    model = make_model(n_blocks=2)
    options = {"temperature": 0.7, "top_k": 4, "seed": 1, "logprobs": 3, "prompt_logprobs": True, "details": True}
    for cache in (True, False):
        for found in hg.generate(model, PROMPTS, 6, cache=cache, **options):
            expected = torch.log_softmax(model.logits(torch.tensor(found.prompt + found.ids)), 1)[:-1]
            given = found.prompt_logprobs + found.logprobs
            assert [x.id for x in given] == (found.prompt + found.ids)[1:]
            own = expected[torch.arange(len(expected)), [x.id for x in given]]
            assert torch.allclose(torch.tensor([x.logprob for x in given]).double(), own, atol=1e-6)
            best = expected.topk(3)
            assert [[i for i, _ in x.top] for x in given] == best.indices.tolist()
            assert torch.allclose(torch.tensor([[p for _, p in x.top] for x in given]).double(), best.values, atol=1e-6)
    only = hg.generate(model, PROMPTS[2], 0, prompt_logprobs=True, details=True)
    assert only.ids == [] and only.finish == "length" and len(only.prompt_logprobs) == 6
    pieces = Engine(model, tokens_at_once=2)  # a prompt in several pieces
    found = pieces.add(PROMPTS[2], Options(1, prompt_logprobs=True))
    while pieces.busy:
        pieces.step()
    expected = [x.logprob for x in only.prompt_logprobs]
    assert [x.logprob for x in found.prompt_logprobs] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k must be an integer of at least 1"),
        ({"top_p": 1.5}, "top_p must be a number from 0 to 1"),
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"seed": [1, 2]}, "seed has 2 numbers for 1 prompts"),
        ({"stop": 11}, "stop id 11 is outside the vocabulary: ids go from 0 to 10"),
        ({"stop": [""]}, "strings that are not empty"),
        ({"stop": "x"}, "this model has no tokenizer"),
        ({"logprobs": 3}, "give details=True too"),
        ({"logprobs": 12, "details": True}, "logprobs must be a number of tokens from 0 to 11"),
        ({"context_full": "wrap"}, "context_full must be 'stop' or 'slide'"),
        ({"stream": True, "details": True}, "choose one"),
        ({"logit_bias": {11: 1.0}}, "logit_bias: id 11 is outside the vocabulary"),
        ({"logit_bias": {1: math.nan}}, "give finite numbers by token id"),
        ({"logit_bias": {"1": 1.0}}, "give finite numbers by token id"),
        ({"frequency_penalty": math.inf}, "frequency_penalty must be"),
        ({"presence_penalty": "x"}, "presence_penalty must be"),
    ],
)
def test_invalid_options_are_rejected(change: dict[str, float], message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        hg.generate(make_model(), torch.tensor([[1]]), **change)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.tensor([[99]]), "token id 99 is outside the vocabulary"),
        ([[1], [99]], "token id 99 is outside the vocabulary"),
        (torch.tensor([1]), r"must be \(B, T\) and not empty"),
        (torch.tensor([[1.5]]), "tokens must be integers"),
        ([[1], []], "the prompt is empty"),
        ([], "there is no prompt"),
        ([[1], "text"], "like the others"),
        ([1.5], "must be a list of ids"),
        (5, "not a int"),
        ("Once", "this model has no tokenizer, because it was not loaded"),
    ],
)
def test_invalid_prompts_are_rejected(prompt: object, message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        hg.generate(make_model(), prompt)


def test_an_empty_text_is_rejected(talking: hg.GPT) -> None:
    with pytest.raises(hg.HandgradError, match="the prompt is empty: give at least one character"):
        hg.generate(talking, ["a", ""])


def test_broken_weights_are_named() -> None:
    model = make_model()
    model.final_norm.weight.data[0] = float("nan")
    with pytest.raises(hg.NonFiniteError, match=r"NaN or infinity in transformer\.ln_f\.weight"):
        hg.generate(model, [1])


def test_generate_function_does_not_shadow_its_module() -> None:
    """`import handgrad.x as m` binds the package's attribute x, which must be the module."""
    import handgrad.inference.generate as module

    assert module.generate is hg.generate and module.Engine is Engine
    assert importlib.util.find_spec("handgrad.generate") is None


def test_json_of_a_schema(talking: hg.GPT) -> None:
    schema = {
        "type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a", "b"], "additionalProperties": False,
    }  # fmt: skip
    for text in hg.generate(
        talking, ["Give: ", "x"] * 3, 56, temperature=1.0, seed=1, logit_bias={10: -9}, json_schema=schema
    ):
        found = json.loads(text)
        assert found["a"] in ("x", "y") and found["b"] in range(10)
    details = hg.generate(talking, list(b"ab"), 60, json_schema={"const": 7}, details=True)
    assert (details.ids, details.finish) == (list(b"7"), "stop")
    with pytest.raises(hg.HandgradError, match="Invalid type: foo"):
        hg.generate(talking, "a", json_schema={"type": "foo"})
    with pytest.raises(hg.HandgradError, match="no tokenizer"):
        hg.generate(make_model(), [1], json_schema={"type": "object"})
