"""`handgrad generate`: several prompts, files, standard input, stops, JSON, and errors of one line."""

import inspect
import io
import json
import sys
from pathlib import Path

import pytest

import handgrad as hg
from conftest import error_of, handgrad, make_model, save_with_bytes, succeed
from handgrad.cli import generate as generate_command
from handgrad.text import tokenizer

BYTES = tokenizer.make("bytes", [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_with_bytes(make_model(n_vocab=256, n_context=48, d_model=24), Path("m"))
    return tmp_path


def run(*arguments: object) -> str:
    done = succeed("generate", "--model", "./m", "--temperature", 0.8, "--top-k", 200, "--seed", 2, *arguments)
    return done.stdout


def test_several_prompts_are_printed_in_their_order(folder: Path) -> None:
    model = hg.load("m")
    texts = hg.generate(model, ["first", "é"], 9, temperature=0.8, top_k=200, seed=2)
    assert run("--prompt", "first", "--prompt", "é", "--max-new-tokens", 9) == f"first{texts[0]}\n\né{texts[1]}\n"
    Path("prompts.txt").write_text("first\r\n\né\n")
    assert run("--prompts-file", "prompts.txt", "--max-new-tokens", 9) == f"first{texts[0]}\n\né{texts[1]}\n"
    assert run("--prompt", "first", "--max-new-tokens", 9, "--no-cache") == f"first{texts[0]}\n"


def test_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("--prompt", "first", "--prompt", "b", "--max-new-tokens", 4)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"first\nb\n")))
    assert run("--prompts-file", "-", "--max-new-tokens", 4) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n")))
    assert "standard input is not UTF-8" in error_of("generate", "--model", "./m", "--prompts-file", "-")


def test_a_dash_is_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("--prompt", "two\nlines", "--prompt", "b", "--max-new-tokens", 4)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    assert run("--prompt", "-", "--prompt", "b", "--max-new-tokens", 4) == expected
    assert "--prompts-file -" in error_of("generate", "--model", "./m", "--prompt", "-", "--prompt", "-")


def test_command_and_python_have_the_same_names_and_defaults() -> None:
    command, python = (inspect.signature(f).parameters for f in (generate_command.generate, hg.generate))
    only = {"model", "no_cache", "stop_id", "as_json", "prompt", "chat", "prompts_file", "format", "bits", "cost"}
    only |= {"precision"}
    names = set(command) - only
    assert names <= set(python)
    for name in names - {"stop"}:  # a list there, anything empty here
        assert command[name].default == python[name].default, name


def test_json_lines(folder: Path) -> None:
    model = hg.load("m")
    lines = run("--prompt", "ab", "--prompt", "c", "--max-new-tokens", 5, "--json", "--logprobs", 2, "--temperature", 0)
    found = [json.loads(line) for line in lines.splitlines()]
    expected = hg.generate(model, ["ab", "c"], 5, details=True, logprobs=2, prompt_logprobs=True)
    for line, result, prompt in zip(found, expected, ("ab", "c"), strict=True):
        assert (line["prompt"], line["text"], line["ids"], line["finish"]) == (
            prompt,
            result.text,
            result.ids,
            "length",
        )
        assert [x["id"] for x in line["logprobs"]] == result.ids
        assert [x["logprob"] for x in line["logprobs"]] == [x.logprob for x in result.logprobs]
        assert [(y["id"], y["logprob"]) for x in line["logprobs"] for y in x["top"]] == [
            y for x in result.logprobs for y in x.top
        ]
        assert len(line["prompt_logprobs"]) == len(prompt) - 1
    assert "logprobs" not in json.loads(run("--prompt", "ab", "--max-new-tokens", 5, "--json"))


def test_stops_and_full_context(folder: Path) -> None:
    ids = hg.generate(hg.load("m"), BYTES.encode("ab"), 20, temperature=0.8, top_k=200, seed=2)
    line = json.loads(run("--prompt", "ab", "--max-new-tokens", 20, "--json", "--stop-id", ids[4]))
    assert line["ids"] == ids[: ids.index(ids[4]) + 1] and line["finish"] == "stop"
    full = json.loads(run("--prompt", "ab", "--max-new-tokens", 20, "--json"))["text"]
    assert run("--prompt", "ab", "--max-new-tokens", 20, "--stop", full[3]) == "ab" + full[: full.index(full[3])] + "\n"
    done = handgrad("generate", "--model", "./m", "--prompt", "x" * 40, "--max-new-tokens", 20, "--json")
    assert json.loads(done.stdout)["finish"] == "context" and len(json.loads(done.stdout)["ids"]) == 9
    assert "the context of 48 tokens is full: --context-full slide continues" in done.stderr
    done = handgrad(
        "generate", "--model", "./m", "--prompt", "x" * 60, "--max-new-tokens", 20, "--context-full", "slide", "--json"
    )
    assert len(json.loads(done.stdout)["ids"]) == 20 and "60 tokens; the model sees the last 48" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 60], "the prompt has 60 tokens, and the context 48: shorten it, or"),
        (["--stop-id", 256], "stop id 256 is outside the vocabulary"),
        (["--stop", ""], "--stop is empty"),
        (["--context-full", "wrap"], "--context-full must be stop or slide"),
        (["--logprobs", 1], "--logprobs needs --json"),
        (["--prompts-file", "none.txt"], "none.txt"),
        (["--prompts-file", "empty.txt"], "empty.txt has no prompt"),
        (["--prompt", "a", "--prompts-file", "empty.txt"], "one of them"),
        (["--repetition-penalty", 0], "--repetition-penalty must be a number above 0"),
        (["--temperature", "inf"], "temperature must be a finite number"),
    ],
)
def test_errors_are_one_line(arguments: list[object], message: str, folder: Path) -> None:
    Path("empty.txt").write_text("\n \n")
    done = handgrad("generate", "--model", "./m", *arguments)
    assert done.returncode == 1 and message in done.stderr and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
