"""End-of-sequence ids: one or several, in JSON files or in a GGUF file."""

import json
from pathlib import Path

import pytest

import handgrad as hg
import tiny_gguf
from handgrad.inference.model_text import model_text
from handgrad.text import tokenizer
from handgrad.text.endings import end_ids


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 5]}, {"eos_token_id": 7}, {3, 5}),
        ({"eos_token_id": 3}, None, {3}),
        ({}, {"eos_token_id": 7}, {7}),
        ({"eos_token_id": [300, -1, "x", 4, True]}, None, {4}),
        (None, None, set()),
        (None, {"eos_token_id": None}, set()),
    ],
)
def test_ids_of_a_folder(
    generation: dict[str, object] | None, config: dict[str, object] | None, expected: set[int], tmp_path: Path
) -> None:
    for name, content in (("generation_config", generation), ("config", config)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert end_ids(tmp_path, tokenizer.make("bytes", [])) == expected
    made = tokenizer.make("bpe:260", ["some text"])
    assert end_ids(tmp_path, made) == {i for i in expected if i < made.n_vocab} | {made.end}


def test_ids_of_a_gguf_file(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 5}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", "llama", ids | {"tokenizer.ggml.tokens": ["a"]})
    assert end_ids(path, tokenizer.make("bytes", [])) == {3, 5}


def test_a_gguf_model_ends_its_answers(tmp_path: Path) -> None:
    tiny_gguf.write_tiny_smollm2(tmp_path / "m.gguf")
    model = hg.load(tmp_path / "m.gguf")
    assert model_text(model).ends == {258}
    assert model_text(model).tokenizer.decode([258]) == "<|im_end|>"
    assert isinstance(hg.generate(model, "the", 3), str)
