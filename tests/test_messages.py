"""How messages name options: `--batch-tokens` on the command line, `batch_tokens` in Python, one message for both."""

import ast
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

import handgrad as hg
from conftest import handgrad
from handgrad.cli.app import app
from handgrad.errors import (
    MAX_MESSAGE,
    HandgradError,
    HandgradWarning,
    NonFiniteError,
    for_command_line,
    for_python,
    option,
)
from handgrad.inference.sampling import Sampling
from handgrad.model.storage.quantize import check_bits
from test_rules import FILES, SOURCE, package_of, tree_of

ABOVE = ("cli", "__main__", "__init__")  # of these, cli is the command line itself
SHOW_COMMANDS = ("learn/course.py", "display/course_tables.py", "text/downloads.py")  # lines to type
EVERY_PROGRAMS = {"--help", "--version"}


@pytest.mark.parametrize(
    ("given", "flag", "argument"),
    [
        (option("batch_tokens"), "--batch-tokens", "batch_tokens"),
        (option("val_share", 0), "--val-share 0", "val_share=0"),
        (option("format", "raw"), "--format raw", "format='raw'"),
        (option("data", "folder/*.txt"), "--data 'folder/*.txt'", "data='folder/*.txt'"),
        (option("resume", True), "--resume", "resume=True"),
    ],
)
def test_an_option_has_a_name_for_each_reader(given: str, flag: str, argument: str) -> None:
    message = f"{given} is wrong: leave {given} out"
    for kind in (HandgradError, NonFiniteError, HandgradWarning):
        assert for_command_line(kind(message)) == f"{flag} is wrong: leave {flag} out"
        assert str(kind(message)) == for_python(kind(message)) == f"{argument} is wrong: leave {argument} out"
        assert repr(kind(message)) == f"{kind.__name__}({f'{argument} is wrong: leave {argument} out'!r})"
    assert for_command_line(message) == f"{flag} is wrong: leave {flag} out"  # also a line that is no error


def test_an_error_in_another_one_keeps_its_options() -> None:
    inner = HandgradError(f"{option('lr')} is negative")
    outer = HandgradError(f"recipe.toml: {inner.message}; see {option('config')}")
    copied = pickle.loads(pickle.dumps(outer))
    assert type(copied) is HandgradError
    for error in (outer, copied):
        assert str(error) == "recipe.toml: lr is negative; see config"
        assert for_command_line(error) == "recipe.toml: --lr is negative; see --config"


def test_a_long_message_is_cut_between_options() -> None:
    for before in range(MAX_MESSAGE - 300, MAX_MESSAGE + 50, 7):
        error = HandgradError("x" * before + f" {option('batch_tokens')} " + "y" * 400)
        for text in (str(error), for_command_line(error)):
            rest = text.replace("--batch-tokens", "").replace("batch_tokens", "").replace(" ", "")
            assert set(rest) <= {"x", "…", "y"} and rest.endswith("y" * 200) and text.isprintable()


def test_the_same_mistake_at_both_edges(tmp_path: Path) -> None:
    mistakes = [
        ({"batch_tokens": 0}, ["--batch-tokens", 0], "{batch_tokens} must be an integer of at least 1, not 0"),
        ({"schedule": "sinus"}, ["--schedule", "sinus"], "{schedule} must be cosine, linear or constant, not 'sinus'"),
        ({"steps": 3, "epochs": 1.0}, ["--steps", 3, "--epochs", 1], "give one of {steps}, {epochs} or {minutes}"),
        ({"tokenizer": "bpe:9"}, ["--tokenizer", "bpe:9"], "{tokenizer=bpe:9}: give bpe:N with N of at least 257"),
        ({"n_heads": 0}, ["--n-heads", 0], "{n_heads} must be an integer of at least 1, not 0"),
        (
            {"d_model": 30, "n_heads": 4},
            ["--d-model", 30, "--n-heads", 4],
            "{d_model=30} is not divisible by {n_heads=4}: choose",
        ),
        ({"d_model": 1, "n_heads": 1}, ["--d-model", 1, "--n-heads", 1], "{d_model} must be at least 2"),
        ({"steps": 1}, ["--steps", 1], "exists: choose another {out}, or continue it with {resume=True}"),
    ]
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("to be, or not to be\n" * 100)
    hg.train(text, steps=1, n_blocks=1, d_model=8, n_heads=1, n_context=8, out=run, quiet=True, sample_tokens=0)
    for given, words, message in mistakes:
        out = run if "exists" in message else tmp_path / "new"
        with pytest.raises(HandgradError) as raised:
            hg.train(text, out=out, quiet=True, **given)
        python = re.sub(r"{(\w+)(?:=([^}]*))?}", lambda m: m[1] + _python_value(m[2]), message)
        assert python in str(raised.value)
        done = handgrad("train", "--data", text, "--out", out, *words)
        flags = re.sub(r"{(\w+)(?:=([^}]*))?}", lambda m: f"--{m[1].replace('_', '-')}" + _flag_value(m[2]), message)
        assert done.returncode == 1 and flags in " ".join(done.stderr.split())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_bits(3), "--bits must be 8 or 4, not 3"),
        (lambda: Sampling(repetition_penalty=0), "--repetition-penalty must be a number above 0, not 0"),
        (lambda: Sampling(seed=-1), "--seed must be an integer of at least 0, not -1"),
    ],
)
def test_single_values_are_named_as_options(check: Callable[[], object], message: str) -> None:
    with pytest.raises(HandgradError) as raised:
        check()
    assert for_command_line(raised.value).startswith(message)


def _python_value(value: str | None) -> str:
    return "" if value is None else f"={value if value.isalnum() else repr(value)}"


def _flag_value(value: str | None) -> str:
    return "" if value in (None, "True") else f" {value}"


def test_lines_of_a_run_name_options_for_their_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("to be, or not to be\n" * 100)
    small = {"n_blocks": 1, "d_model": 8, "n_heads": 1, "n_context": 8, "sample_tokens": 0}
    for _ in range(2):
        hg.train(tmp_path / "text.txt", steps=1, out=tmp_path / "run", resume=True, **small)
    assert "is complete: extend it with steps, epochs or minutes" in " ".join(capsys.readouterr().out.split())
    done = handgrad("train", "--data", tmp_path / "text.txt", "--out", tmp_path / "run", "--resume")
    assert "is complete: extend it with --steps, --epochs or --minutes" in " ".join(done.stdout.split())


# ── the source ────────────────────────────────────────────────────────────────────────────────────────────────────────


def own_flags() -> set[str]:
    """Every option of every command."""
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    return {flag for command in commands for p in command.params for flag in p.opts if flag.startswith("--")}


def texts(tree: ast.Module) -> Iterator[str]:
    """The strings of a file that are not its documentation."""
    notes = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            yield node.value


def flags_in(tree: ast.Module, own: set[str]) -> list[str]:
    """Options that a file names itself: as written, or put together behind two dashes."""
    return [
        flag
        for text in texts(tree)
        for flag in re.findall(r"(?<![\w-])--(?:[a-z][a-z-]*|$)", text)
        if flag in own | {"--"}
    ]


def test_only_the_command_line_writes_flags() -> None:
    own = own_flags() - EVERY_PROGRAMS
    assert {"--batch-tokens", "--resume", "--chat-template"} <= own
    for file in FILES:
        name = file.relative_to(SOURCE).as_posix()
        if package_of(file) not in (*ABOVE, "errors") and name not in SHOW_COMMANDS:
            found = flags_in(tree_of(file), own)
            assert not found, f"{name} names {found}: write option('{found[0][2:].replace('-', '_')}') instead"


def test_flags_in_messages_are_found() -> None:
    for code in ('raise E("give --lr")', 'raise E(f"{x} and --lr 3")', 'say("--" + name)', 'what = f"--{name}"'):
        assert flags_in(ast.parse(code), {"--lr"})
    assert not flags_in(ast.parse('"""Parse --lr."""\nrun("pip", "--quiet")\nstyle = "color:var(--lr-x)"'), {"--lr"})
