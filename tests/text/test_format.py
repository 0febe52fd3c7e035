"""Chat or raw: one rule for fine-tuning, generation, chats, servers and influence; what was chosen is recorded."""

import io
import json
from pathlib import Path

import pytest
from example_files import BYTES, CHAT, CHATML, learned, lines, read

import handgrad as hg
from conftest import handgrad, succeed
from handgrad.errors import HandgradWarning
from handgrad.formats.models import tokenizer_of
from handgrad.per_example.inputs import as_examples, as_text
from handgrad.serve.served_models import open_models
from handgrad.text import format as text_format
from handgrad.text import tokenizer
from handgrad.text.chat_template import ChatTemplate
from tiny_chat import write_chat_model

RECORDS = [
    {"prompt": f"What is {i}?\n", "completion": f"It is {word}."}
    for i, word in enumerate(("zero", "one", "two", "three", "four", "five", "six", "seven"))
]
TUNE = ["--data", "data.jsonl", "--steps", 2, "--batch-examples", 4, "--sample-tokens", 0, "--val-share", 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "chatty"
    write_chat_model(folder)
    return folder


@pytest.fixture
def workdir(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path, *RECORDS, name="data.jsonl")
    (tmp_path / "chatty").symlink_to(model)
    return tmp_path


def with_files(**files: str) -> tokenizer.Tokenizer:
    named = {"chat_template.jinja": CHATML} if "template" in files else {}
    return tokenizer.Tokenizer(BYTES.inner, named | ({text_format.FORMAT: files["noted"]} if "noted" in files else {}))


@pytest.mark.parametrize(
    ("files", "given", "name"),
    [
        ({}, None, "raw"),
        ({"template": ""}, None, "chat"),
        ({"template": ""}, "raw", "raw"),
        ({"template": "", "noted": '{"format": "raw"}'}, None, "raw"),
        ({"template": "", "noted": '{"format": "raw"}'}, "chat", "chat"),
        ({"template": "", "noted": '{"format": "chat"}'}, None, "chat"),
        ({"noted": '{"format": "raw"}'}, None, "raw"),
    ],
)
def test_the_users_choice_then_the_record_then_the_template(files: dict[str, str], given: str, name: str) -> None:
    how = text_format.choose(with_files(**files), given)
    assert how.name == name and (how.template is not None) == (name == "chat")
    prompt = how.prompt(" Why?\n")
    assert prompt == (" Why?\n" if name == "raw" else "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert bool(how.disagreement("it", "this")) == (given == "chat" and "noted" in files)


def test_wrong_formats_are_named(workdir: Path) -> None:
    for call in (
        lambda: text_format.choose(with_files(), "html"),
        lambda: text_format.choose(with_files(noted='{"format": "html"}')),
        lambda: hg.generate(hg.load("chatty"), "a", format="html"),
        lambda: hg.example_norms(hg.load("chatty"), RECORDS, format="html"),
    ):
        with pytest.raises(hg.HandgradError, match='the format is "html"; allowed: chat or raw'):
            call()
    with pytest.raises(hg.HandgradError, match=r"the tokenizer has no chat template.*choose format='raw'"):
        text_format.choose(with_files(), "chat")
    for arguments, message in (
        (["finetune", "--model", "chatty", *TUNE, "--format", "html"], "--format must be chat or raw, not 'html'"),
        (["generate", "--model", "chatty", "--format", "html"], 'the format is "html"'),
        (["generate", "--model", "chatty", "--chat", "a", "--format", "raw"], "give --prompt with --format raw"),
        (["generate", "--model", "chatty", "--format", "chat"], "--format chat needs a message"),
        (["generate", "--model", "chatty", "--prompt", " "], "the prompt is empty"),
    ):
        failed = handgrad(*arguments)
        assert failed.returncode == 1 and message in " ".join(failed.stderr.split()), failed.stderr


def test_prompt_and_completion_are_messages_in_a_chat_template(tmp_path: Path) -> None:
    """Whitespace around the prompt, the separator of raw text, is not part of a message."""
    record = {"prompt": "Whither so\n", "completion": " fast?", "system": "Be kind."}
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Whither so"}]
    same = {"messages": [*asked, {"role": "assistant", "content": " fast?"}]}
    found, summary = read(lines(tmp_path, record, same, {"prompt": "", "completion": "ab"}))
    assert found.example(0)[0].tolist() == found.example(1)[0].tolist()
    assert found.example(0)[1].tolist() == found.example(1)[1].tolist()
    assert summary.kinds == {"messages": 1, "prompt and completion": 2, "text": 0} and summary.format == "chat"
    assert learned(found, 2) == [("<|im_start|>assistant\n", False), ("ab<|im_end|>\n", True)]
    assert as_text(found, CHAT, 0)[1:3] == ("user\nWhither so", "fast?<|im_end|>")  # not the system prompt
    assert read(lines(tmp_path, {"text": "a"}))[1].format == "raw"
    assert read(lines(tmp_path, record), template=None)[1].format == "raw"


@pytest.mark.parametrize("given", [None, "chat", "raw"])
def test_influence_formats_the_answer_like_the_examples(workdir: Path, given: str | None) -> None:
    """--prompt and --answer give what --queries gives, and an example that is asked for is its own best source."""
    lines(workdir, RECORDS[3], name="asked.jsonl")
    base = [
        "influence",
        "--model",
        "chatty",
        "--data",
        "data.jsonl",
        "--json",
        "-",
        *(["--format", given] if given else []),
    ]
    by_text = handgrad(*base, "--prompt", RECORDS[3]["prompt"], "--answer", RECORDS[3]["completion"], "--by", "cosine")
    by_file = handgrad(*base, "--queries", "asked.jsonl", "--by", "cosine")
    assert by_text.returncode == 0, by_text.stderr
    assert json.loads(by_text.stdout) == json.loads(by_file.stdout)
    first = json.loads(by_text.stdout)["queries"][0]["helped"][0]
    assert first["record"] == 4 and first["cosine"] == pytest.approx(1, rel=1e-3)
    found = as_examples(hg.load("chatty"), "data.jsonl", format=given)
    assert (BYTES.decode(found.example(0)[0].tolist())[:6] == "[user]") == (given != "raw")


def test_a_run_records_its_format_and_later_commands_use_it(workdir: Path) -> None:
    for given, asked, expected in (
        ([], "chat", "[user]What is 1?\n[assistant]"),
        (["--format", "raw"], "raw", "What is 1?\n"),
    ):
        done = handgrad("finetune", "--model", "chatty", *TUNE, *given, "--out", asked)
        assert done.returncode == 0 and f"format {asked}" in " ".join(done.stdout.split()), done.stderr
        assert json.loads(Path(asked, "run.json").read_text())["training"]["format"] == asked
        assert text_format.recorded(tokenizer_of(Path(asked, "adapter"))) == asked
        succeed("finetune", "--resume", "--out", asked, "--steps", 3)
        succeed("merge", asked, "--out", f"{asked}-merged")
        for name in (asked, f"{asked}-merged"):
            made = handgrad("generate", "--model", name, "--prompt", "What is 1?\n", "--max-new-tokens", 3, "--json")
            assert json.loads(made.stdout)["prompt"] == expected and made.stderr == ""
            network = hg.load(name)
            detailed = hg.generate(network, "What is 1?\n", 3, details=True)
            assert bytes(detailed.prompt).decode() == expected
            read_as = as_examples(network, RECORDS).example(1)[0].tolist()
            assert bytes(read_as).decode().startswith(expected)


def test_disagreements_are_named(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    succeed("finetune", "--model", "chatty", *TUNE, "--format", "raw", "--out", "raw")
    both = "was fine-tuned with --format raw, and {} uses --format chat"
    asked = handgrad("generate", "--model", "raw", "--chat", "What is 1?", "--max-new-tokens", 2)
    assert asked.returncode == 0 and asked.stderr.count(both.format("generate")) == 1, asked.stderr
    pushed = handgrad("influence", "--model", "raw", "--data", "data.jsonl", "--answer", "a", "--format", "chat")
    assert pushed.returncode == 0 and pushed.stderr.count(both.format("this call")) == 1, pushed.stderr
    tuned = handgrad("finetune", "--model", "raw", *TUNE, "--format", "chat", "--out", "more")
    assert tuned.returncode == 0 and both.format("this run") in " ".join(tuned.stdout.split())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is 1?\n")))
    talked = handgrad("chat", "--model", "raw", "--max-new-tokens", 2)
    assert talked.returncode == 0 and talked.stderr.count("a conversation (chat, /v1/chat/completions) uses") == 1
    with pytest.warns(HandgradWarning, match="a conversation .* uses format='chat'"):
        open_models(Path("chatty"), "chatty", {"mine": Path("raw/adapter")})
    with pytest.warns(HandgradWarning, match=r"and this call uses format='chat'"):
        hg.generate(hg.load("raw"), "What is 1?", 2, format="chat")
    lines(
        workdir,
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        name="talk.jsonl",
    )
    refused = handgrad("finetune", "--model", "raw", "--data", "talk.jsonl", "--out", "talk")
    assert refused.returncode == 1 and "choose --format chat" in " ".join(refused.stderr.split())


def test_texts_alone_are_raw_and_a_chat_model_is_told_so(workdir: Path) -> None:
    lines(workdir, *({"text": f"Once {i} upon a time."} for i in range(8)), name="data.jsonl")
    done = handgrad("finetune", "--model", "chatty", *TUNE, "--out", "run")
    shown = " ".join(done.stdout.split())
    assert done.returncode == 0 and "the data has texts alone" in shown and "chatty has a chat template" in shown
    assert text_format.recorded(tokenizer_of(Path("run/adapter"))) == "raw"
    succeed("finetune", "--resume", "--out", "run", "--steps", 3)


def test_ids_have_no_format(workdir: Path) -> None:
    with pytest.raises(hg.HandgradError, match="format is for text"):
        hg.generate(hg.load("chatty"), [[1, 2]], 2, format="raw")
    template = ChatTemplate(CHATML)
    assert template.render(text_format.turns("a")) == "<|im_start|>user\na<|im_end|>\n"
