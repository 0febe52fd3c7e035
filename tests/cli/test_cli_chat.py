"""`handgrad chat`: messages and commands through pipes, what is refused, and a terminal with Ctrl-C and Ctrl-D."""

import codecs
import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import handgrad as hg
from conftest import save_adapter
from handgrad.cli.app import app
from handgrad.cli.chat import _lines
from handgrad.display.chat_output import Wrapped, explanation, visible
from handgrad.errors import for_command_line
from handgrad.inference.conversation import Why, WordScore
from handgrad.text.words import words_of
from tiny_chat import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "m"
    write_chat_model(folder)
    save_adapter(hg.load(folder), folder.parent / "adapter", scale=0.2)
    write_chat_model(folder.parent / "other", 1, steps=0)
    save_adapter(hg.load(folder.parent / "other"), folder.parent / "stranger")
    return folder


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def talk(model: Path, *lines: str, options: tuple[str, ...] = ()) -> tuple[list[str], str, int]:
    """Lines of standard output, standard error, exit status."""
    words = ["chat", "--model", str(model), "--temperature", "0", "--max-new-tokens", "24", *options]
    done = CliRunner().invoke(app, words, input="".join(line + "\n" for line in lines))
    error = done.stderr + (for_command_line(done.exception) if done.exception else "")
    return done.stdout.splitlines(), error, done.exit_code


def test_lines_of_a_pipe(model: Path) -> None:
    out, notes, status = talk(model, "hello", "", "and now?", "/exit", "hello")
    assert len(out) == 2 and "🙂" in out[0] and status == 0 and notes == ""
    assert talk(model, "hello", "/reset", "hello", " hello")[0][:2] == [out[0], out[0]]
    assert talk(model)[0] == []


def test_low_bit_weights(model: Path) -> None:
    adapter = f"/adapter {model.parent / 'adapter'}"
    out, _, status = talk(model, "hello", "/why", adapter, "/base", "/reset", "hello", options=("--bits", "8"))
    assert status == 0 and "🙂" in out[0] and out[-1] == out[0]
    assert "bits must be 8 or 4, not 5" in talk(model, "hello", options=("--bits", "5"))[1]


def test_save_never_overwrites(model: Path) -> None:
    out, notes, _ = talk(model, "/system be brief", "/system", "hello", "/save 'my talk.jsonl'")
    assert out[0] == "be brief" and "wrote 3 messages to my talk.jsonl" in notes
    saved = json.loads(Path("my talk.jsonl").read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["messages"][2]["content"] == out[1]
    before = Path("my talk.jsonl").read_bytes()
    _, notes, status = talk(model, "hello", '/save "my talk.jsonl"', "hello")
    assert status == 1 and "my talk.jsonl exists: choose another name" in notes
    assert Path("my talk.jsonl").read_bytes() == before


def test_adapters_at_run_time(model: Path) -> None:
    adapter = model.parent / "adapter"
    lines = ("hello", f"/adapter {adapter}", "/reset", "hello", "/base", "/reset", "hello", "/base")
    out, notes, status = talk(model, *lines)
    assert status == 0 and out[0] == out[2] != out[1]
    assert f"adapter {adapter}, in 14 layers" in notes and "is off" in notes and "No adapter is in use" in notes
    assert talk(adapter, "hello", "/base", "/reset", "hello")[0] == [out[1], out[0]]
    for wrong, message in ((model.parent / "stranger", "is an adapter of"), (model, "is not an adapter")):
        assert message in talk(model, f"/adapter {wrong}")[1]
    assert "which one?" in talk(model, "/adapter")[1]


def test_why_lists_words(model: Path) -> None:
    out, _, status = talk(model, "hello", "/why")
    assert status == 0 and any(" hello " in line and "█" in line and "you" in line for line in out)
    assert any("you › hello" in line for line in out) and not any("model ›" in line for line in out)
    word = out[0].split()[-1]
    assert any("model ›" in line for line in talk(model, "hello", f"/why {word}")[0])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["/nonsense"], "there is no command /nonsense: /help lists them"),
        (["/why"], "ask something first"),
        (["hello", "/why nothing"], "the last answer has no word 'nothing'"),
        (["/save x"], "nothing to save yet"),
        (["hello", "/save no/such/folder/x"], "no/such/folder"),
        (["/temp warm"], "/temp needs a number"),
        (["/temp -1"], "temperature must be a finite number of at least 0"),
        (["/temp nan"], "temperature must be a finite number of at least 0"),
        (["x" * 200], "the message has 218 tokens, and the context 128"),
    ],
)
def test_mistakes_end_a_pipe(model: Path, lines: list[str], message: str) -> None:
    _, notes, status = talk(model, *lines)
    assert status == 1 and message in notes


def test_notes(model: Path) -> None:
    assert "/adapter DIR" in "\n".join(talk(model, "/help")[0])
    assert "temperature 0.7" in talk(model, "/temp 0.7")[1]
    assert "cut off at 3 tokens" in talk(model, "hello", options=("--max-new-tokens", "3"))[1]
    notes = talk(model, *["hello"] * 6)[1]
    assert "The context is full: the oldest turn dropped." in notes


def test_a_model_without_a_template_is_refused(model: Path, tmp_path: Path) -> None:
    network = hg.load(model)
    network.tokenizer = None
    hg.save(network, tmp_path / "plain")
    assert "no chat template, so it is no chat model" in talk(tmp_path / "plain", "hello")[1]


def test_a_terminal(model: Path) -> None:
    """Ctrl-C stops an answer that would not end by itself, a mistake is harmless, Ctrl-D leaves."""
    endless = model.parent / "endless"
    write_chat_model(endless, n_context=100_000)
    (endless / "generation_config.json").unlink()  # no token ends an answer
    command = [
        sys.executable,
        "-m",
        "handgrad",
        "chat",
        "--model",
        endless,
        "--max-new-tokens",
        "90000",
        "--temperature",
        "0",
    ]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "60"}
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen, decoder = "", codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character

    def wait_for(text: str) -> None:
        """Read until the text has come, and forget what is before its end."""
        nonlocal seen
        while text not in seen:
            seen += decoder.decode(os.read(ours, 4096))
        seen = seen[seen.index(text) + len(text) :]

    try:
        wait_for("you ›")
        os.write(ours, b"hello\n")
        wait_for("hello\r\n")
        wait_for("h")  # the answer has begun
        child.send_signal(signal.SIGINT)
        wait_for("Stopped.")
        wait_for("you ›")
        os.write(ours, b"/temp x\n")
        wait_for("/temp needs a number")
        wait_for("you ›")
        os.write(ours, b"\x04")
        assert child.wait() == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def test_ctrl_c_at_the_prompt_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter([KeyboardInterrupt(), "hello", EOFError()])

    def read(prompt: str) -> str:
        found = next(typed)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr("builtins.input", read)
    assert list(_lines(interactive=True)) == ["hello"]


def test_wrapping() -> None:
    def wrapped(*pieces: str, width: int | None = 10) -> str:
        out = io.StringIO()
        writer = Wrapped(width, out)
        for piece in pieces:
            writer.write(piece)
        writer.end()
        return out.getvalue()

    assert wrapped("one tw", "o thr", "ee four\n", "  five") == "one two\nthree four\n  five\n"
    assert wrapped("a" * 14, " b") == "a" * 14 + "\nb\n"
    assert wrapped("日本語 日本語") == "日本語\n日本語\n"  # two columns each
    assert wrapped("one two three four", width=None) == "one two three four\n"
    assert wrapped("x\x1b[2Jy\r\n") == "x\\x1b[2Jy\n\n"
    assert visible("tab\tline\n\x00\x9b👨‍👩‍👧") == "tab\tline\n\\x00\\x9b👨‍👩‍👧"


def test_words_are_shaded_by_strength() -> None:
    text = "strong weak none"
    strengths = (2.0, 0.5, 0.1)
    words = [WordScore(word, 0, x, -x) for word, x in zip(words_of(text), strengths, strict=True)]
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "so"}]
    out = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    out.print(explanation(Why(messages, words, 1.0, -3.0), own=False))
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "48;2;255;140;0mstrong" in shown and "mweak" in shown and "mnone" not in shown
    assert "-2.00" in shown and "log-probability -3.00" in shown
