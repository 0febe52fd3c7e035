"""Every example in the README, the documentation and --help runs and prints what the page shows.

The shell and Python blocks of a page run in order, in one folder with the files they mention, at tiny size. Commands in
running text and benchmarks are only parsed.
"""

import ast
import contextlib
import importlib
import inspect
import io
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from bench.__main__ import parse as parse_bench
from typer.testing import CliRunner

import handgrad as hg
import tiny_gguf
from conftest import save_with_bytes, use_empty_cache
from handgrad.cli.app import app
from handgrad.learn.course import COURSE
from handgrad.learn.progress import Entry
from handgrad.learn.result_file import result_text
from handgrad.model import config
from handgrad.plan import timing
from handgrad.text import downloads
from handgrad.web.connection import BackgroundServer
from tiny_chat import write_chat_model

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TINY = {"n_context": 48, "d_model": 16, "n_heads": 2, "n_blocks": 2}
QUICK = ["--steps", "2", "--eval-batches", "1", "--sample-tokens", "4"]


def words_of(line: str) -> list[str]:
    """The words that bash passes to a command: quotes and $'…' resolved, comments removed."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def commands_in(block: str) -> list[list[str]]:
    """The arguments of every handgrad command in a shell block, without a preceding pipe or torchrun."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        if match := re.match(r"(?:.*\| |torchrun [^#]*-m |\$\(BIN\)/)?handgrad (.*)", line.strip()):
            found.append(words_of(match[1]))
    return found


def help_of(name: str) -> str:
    return CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100"}).stdout


def examples_of_help(name: str) -> list[list[str]]:
    return commands_in("\n".join(line for line in help_of(name).splitlines() if line.startswith("  handgrad ")))


def check_parses(arguments: list[str]) -> None:
    name, *rest = arguments
    assert name in COMMANDS, f"there is no command {name}"
    COMMANDS[name].make_context(name, list(rest))
    if name == "bench":
        parse_bench(rest)  # the command passes its options on
    assert not any("\\n" in word for word in rest), f"{rest}: bash passes a backslash; write $'…'"


def stop_at_once(server: BackgroundServer) -> None:
    """In the place of `BackgroundServer.run`: the server listens and is ready, and ends."""
    with server:
        pass


class Folder:
    """The folder in which the commands of a page run. Models and runs are created when first mentioned."""

    def __init__(self, path: Path):
        text = "ROMEO: Once\n" + "".join(
            f"{n} green bottles hanging on wall {n * 7919 % 1013}, and {n % 7} fall\n" for n in range(2000)
        )
        for name in ("book.txt", "corpus.txt", "notes/a.txt", "cache/material/shakespeare/input.txt"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
        (path / "logs").mkdir()
        (path / "results").mkdir()
        (path / "results/ada.json").write_text(result_text("Ada", dict.fromkeys(COURSE, Entry())))
        (path / "logs/a.jsonl").write_text(json.dumps({"text": text}) + "\n")
        lines = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i} bottles"} for i in range(30)]
        demos = [f"build/{name}/{part}" for name in ("finetune-demo", "coder-demo") for part in ("train", "validation")]
        for name in ("examples", "questions", *demos):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (path / "prompts.txt").write_text("ROMEO:\nJULIET:\n")
        (path / "recipe.toml").write_text('data = ["book.txt"]\nschedule = "linear"\n')
        save_with_bytes(hg.GPT(hg.preset("nano", **TINY)), path / "path/to/gpt2")

    def run(self, *arguments: str) -> str:
        """Run a command, scaled down: fewer steps, a server that ends at once."""
        words = self._small(list(arguments))
        for made in self._after(words, "--out") if "--resume" not in words else ():
            shutil.rmtree(made, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BackgroundServer, "run", stop_at_once)
            if words[0] != "plan" and (words[0] != "verify" or "--model" in words):  # these two need the real sizes
                for name in ("gpt2", "nano"):
                    patch.setitem(config.PRESETS, name, hg.preset("nano", **TINY))
            lines = 500 if words[0] == "train" else 1  # a text, or a prompt
            done = CliRunner().invoke(app, words, input="more bottles\n" * lines)
        assert done.exit_code == 0, f"handgrad {' '.join(words)}: {done.exception or done.output}"
        return done.output

    def _small(self, words: list[str]) -> list[str]:
        name = words[0]
        for used in (*self._after(words, "--model"), *(words[1:2] if name in ("merge", "convert", "audit") else [])):
            self._make(used)
        if name in ("generate", "explain") and "--model" not in words:
            self._make("runs/newest")
        if name == "train" and "--resume" in words:
            for used in self._after(words, "--out"):
                self._make(used)
        for option in ("--steps", "--epochs", "--minutes"):
            if option in words:
                del words[words.index(option) : words.index(option) + 2]
        if "--resume" in words:
            return [*words, "--steps", "9"]
        if name in ("train", "finetune"):
            bytes_only = ["--tokenizer", "bytes"] if self._after(words, "--model") == ["gpt2"] else []
            return [*words, *QUICK, *bytes_only]
        if name == "serve":
            for _, used in (adapter.split("=") for adapter in self._after(words, "--adapter")):
                self._make(used)
            return [*words, "--port", "0"]
        if name == "explain" and "--html" not in words:
            return [*words, "--no-open"]
        if name in ("generate", "chat"):
            return [*words, "--max-new-tokens", "3"]
        return words

    def _make(self, name: str) -> None:
        if Path(name).exists() or name in config.PRESETS or name in downloads.models():
            return
        if name == "path/to/chat-model":
            write_chat_model(Path(name), steps=1)
        elif name == "merged":
            self.run("merge", "runs/mine", "--out", "merged")
        elif name == "runs/mine":
            self.run(
                "finetune", "--model", "path/to/gpt2", "--data", "examples.jsonl", "--out", "runs/mine", "--rank", "2"
            )
        else:
            self.run("train", "--data", "book.txt", "--out", name)

    @staticmethod
    def _after(words: list[str], option: str) -> list[str]:
        return [value for name, value in pairwise(words) if name == option]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(timing, "predict", lambda plan: 1.0)  # tests/plan measures
    use_empty_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("HANDGRAD_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    tiny_gguf.put_in_cache(monkeypatch)
    return Folder(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
@pytest.mark.some_cases(3)
def test_page_runs_as_printed(page: Path, folder: Folder) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)
    names: dict[str, object] = {}
    for i, (language, code) in enumerate(blocks):
        if language in ("sh", "console"):  # console: commands to paste, or what one prints
            for arguments in commands_in(code):
                check_parses(arguments)
                if arguments[0] != "bench":
                    folder.run(*arguments)
        elif language == "python" and (outlined := re.match(r"# (\w+/\w+)\.py", code)):
            check_outline(code, outlined[1])
        elif language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"{page.name} example {i}", "exec"), names)
            shown = blocks[i + 1] if i + 1 < len(blocks) else ("", "")
            if shown[0] in ("text", "") and page.name != "README.md":
                numbers = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
                found = [float(x) for x in numbers.findall(printed.getvalue())]
                expected = [float(x) for x in numbers.findall(shown[1])]
                assert len(found) == len(expected), f"{page.name} example {i}"
                assert found == pytest.approx(expected, rel=1e-3, abs=1e-12), f"{page.name} example {i}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_in_blocks_parse(page: Path) -> None:
    """Those of every page, also of one that make test does not run."""
    for block in re.findall(r"^```(?:sh|console)\n(.*?)^```", page.read_text(), re.S | re.M):
        for arguments in commands_in(block):
            check_parses(arguments)


@pytest.mark.parametrize("notebook", sorted((ROOT / "docs" / "notebooks").glob("*.py")), ids=lambda p: p.stem)
def test_notebook_runs(notebook: Path, folder: Folder) -> None:
    """Every cell of code, in order; SmolLM2 is a tiny model with its interface."""
    _, *parts = re.split(r"^# %%( \[markdown\])?\n", notebook.read_text(), flags=re.M)
    names: dict[str, object] = {}
    cells = list(zip(parts[::2], parts[1::2], strict=True))
    assert sum(kind is None for kind, _ in cells) >= 4 and cells[0][0], (
        "a notebook begins with text and has several cells"
    )
    for i, (kind, code) in enumerate(cells):
        if kind is None:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, f"{notebook.name} cell {i}", "exec"), names)
        else:
            assert all(line.startswith("#") for line in code.splitlines() if line.strip()), f"{notebook.name} cell {i}"


def check_outline(code: str, module: str) -> None:
    """Compare the fields and parameters in an outline, with ... for bodies, with those of the module."""
    real = importlib.import_module(f"handgrad.{module.replace('/', '.')}")
    for node in ast.parse(code).body:
        if isinstance(node, ast.ClassDef):
            fields = [line.target.id for line in node.body if isinstance(line, ast.AnnAssign)]  # type: ignore[union-attr]
            assert tuple(fields) == getattr(real, node.name)._fields
        if isinstance(node, ast.FunctionDef):
            assert [a.arg for a in node.args.args] == list(inspect.signature(getattr(real, node.name)).parameters)


def test_wrong_outline_fails() -> None:
    with pytest.raises(AssertionError):
        check_outline("def grad_b(delta, a, into): ...", "ops/layernorm")
    with pytest.raises(AssertionError):
        check_outline("class Saved(NamedTuple):\n    a: int", "ops/layernorm")


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.some_cases(2)
def test_help_examples_run(name: str, folder: Folder) -> None:
    found = examples_of_help(name)
    assert found, f"handgrad {name} --help has no example"
    for arguments in found:
        assert arguments[0] == name
        check_parses(arguments)
        if name != "bench":
            folder.run(*arguments)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "Makefile"], ids=lambda p: p.name)
def test_commands_in_running_text_exist(page: Path) -> None:
    """A mention may omit required options, but every command and option in it must exist."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    if page.name == "Makefile":
        for arguments in commands_in(text):
            check_parses(arguments)
        return
    for line in re.findall(r"`handgrad ([^`]+)`", text):
        name, *words = words_of(line)
        assert name in COMMANDS or name.startswith("-"), f"{page.name}: handgrad {line}"
        if name == "bench":
            parse_bench(words)
        elif name in COMMANDS:
            known = {flag for p in COMMANDS[name].params for flag in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}
            assert {word for word in words if word.startswith("--")} <= known, f"{page.name}: handgrad {line}"


def test_commands_are_found_and_checked() -> None:
    assert commands_in("cat x | handgrad train --data - # no\ntorchrun -n 2 -m handgrad get\n") == [
        ["train", "--data", "-"],
        ["get"],
    ]
    assert commands_in("handgrad generate --prompt $'a\\nb' 'c d'") == [["generate", "--prompt", "a\nb", "c d"]]
    with pytest.raises(Exception, match=r"No such option"):
        check_parses(["plan", "--lora-rank", "3"])
    with pytest.raises(AssertionError):
        check_parses(words_of(r'generate --prompt "Q: why?\nA:"'))
    with pytest.raises(AssertionError):
        check_parses(["nonsense"])
    with pytest.raises(SystemExit):
        check_parses(["bench", "train", "--model", "smollm2"])


def test_files_that_pages_name_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.py")]
    for page in pages:
        for path in re.findall(r"(?<![\w/.])((?:tests|src)/[\w/-]+(?:\.\w+)?)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)} names {path}, which does not exist"


def test_python_page_has_every_public_name_and_a_page_that_explains_it() -> None:
    """Each name is in one row; the anchors it links to are headings of those pages."""
    page = ROOT / "docs" / "reference" / "python.md"
    rows = [line.split("|")[1:4] for line in page.read_text().splitlines() if line.startswith("| `hg.")]
    listed = [name for names, _, _ in rows for name in re.findall(r"`hg\.([\w.]+)`", names)]
    public = [n for n in hg.__all__ if n not in ("lora", "nn")]
    public += [f"{package}.{n}" for package in ("lora", "nn") for n in getattr(hg, package).__all__]
    assert sorted(listed) == sorted(public)
    for names, text, more in rows:
        assert text.strip(), names
        for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", more):
            headings = re.findall(r"^#+ (.+)$", (page.parent / target).read_text(), flags=re.M)
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_help_lists_the_counts_of_the_paper() -> None:
    """Each count in plan --help is the output of the command next to it."""
    text = " ".join(help_of("plan").split())
    keys = (*["total"] * 3, *["trainable"] * 2, "total", "trainable")
    for arguments, key in zip(examples_of_help("plan"), keys, strict=True):
        made: dict[str, Any] = json.loads(CliRunner().invoke(app, [*arguments, "--json", "-"]).stdout)
        assert f"{made[key]:,}" in text
