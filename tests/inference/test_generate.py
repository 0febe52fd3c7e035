"""Generation: the KV cache, sampling options, full contexts and invalid input."""

import importlib.util

import pytest
import torch

import handgrad as hg
from conftest import make_model
from handgrad.inference.kv_cache import Cache, advance


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 1, 3], [2, 5]])
def test_kv_cache_gives_same_logits(pieces: list[int]) -> None:
    model = make_model(n_blocks=3)
    tokens = torch.randint(11, (2, 7))
    cache = Cache(model, 2)
    start = 0
    for size in pieces:
        logits = advance(model, tokens[:, start : start + size], cache)
        start += size
        expected = model.logits(tokens[:, :start])[:, -1]
        assert torch.allclose(logits, expected, atol=1e-12, rtol=1e-12)


def test_greedy_picks_the_most_probable_token() -> None:
    model = make_model()
    tokens = torch.randint(11, (3, 4))
    new = hg.generate(model, tokens, 6)
    sequence = torch.cat([tokens, new], 1)
    for i in range(6):
        assert torch.equal(model.logits(sequence[:, : 4 + i])[:, -1].argmax(1), new[:, i])


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
    new = hg.generate(model, tokens, 30)
    sequence, window = torch.cat([tokens, new], 1), 8
    for i in range(30):
        seen = sequence[:, 20 + i - window : 20 + i]
        assert torch.equal(model.logits(seen)[:, -1].argmax(1), new[:, i]), i
        window = window + 1 if window < 8 else 4
    model = make_model(n_context=1)
    new = hg.generate(model, tokens, 5)
    before = torch.cat([tokens[:, -1:], new[:, :-1]], 1)
    assert torch.equal(torch.stack([model.logits(x[None])[0, -1].argmax() for x in before.T]), new[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_invalid_options_and_tokens_are_rejected(change: dict[str, float], message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        hg.generate(make_model(), torch.tensor([[1]]), **change)
    with pytest.raises(hg.HandgradError, match="outside the vocabulary"):
        hg.generate(make_model(), torch.tensor([[99]]))


def test_text_and_lists_are_rejected() -> None:
    with pytest.raises(
        hg.HandgradError, match=r'takes token ids, not the text "Once": encode it first.*tokenizer\.encode'
    ):
        hg.generate(make_model(), "Once")
    with pytest.raises(hg.HandgradError, match=r"must be a \(B, T\) tensor of ids, not a list"):
        hg.generate(make_model(), [[1, 2]])


def test_generate_function_does_not_shadow_its_module() -> None:
    """`import handgrad.x as m` binds the package's attribute x, which must be the module."""
    import handgrad.inference.generate as module

    assert module.generate is hg.generate and module.Cache is Cache
    assert importlib.util.find_spec("handgrad.generate") is None
