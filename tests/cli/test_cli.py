"""The command line: output, help, errors, and which model each command uses."""

import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import handgrad as hg
from conftest import error_of, handgrad, make_model, plan_of, run_processes, save_with_bytes, succeed, use_empty_cache
from handgrad import formatting, machine
from handgrad.cli import console, explain
from handgrad.files.reading import read_text
from handgrad.formats.run_folder import RunFolder
from handgrad.paper import layernorm
from handgrad.plan import timing
from handgrad.text import tokenizer


def test_verify_writes_json_to_stdout() -> None:
    done = handgrad("verify", "--json", "-", "--seed", "5")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["failed"] == 0 and report["passed"] == len(report["checks"])
    assert sum(c["section"] != "Beyond the paper" for c in report["checks"]) == 226


def test_verify_exits_with_1_if_anything_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layernorm, "grad_b", lambda delta: -delta.sum(0))
    done = handgrad("verify", "--only", "E-ln-*", "--json", tmp_path / "r.json")
    assert done.returncode == 1
    assert "1 of 7 checks FAILED" in done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert [c["id"] for c in report["checks"] if not c["passed"]] == ["E-ln-db"]


def test_verify_a_model_directory(tmp_path: Path) -> None:
    hg.save(make_model(dtype=torch.float32), tmp_path / "m")
    done = succeed("verify", "--model", str(tmp_path / "m"), "--json", "-")
    assert {"blocks.0.delta_raw", "transformer.wte.weight"} <= {c["id"] for c in json.loads(done.stdout)["checks"]}


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "predict", lambda plan, **options: 1.0)


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_verify_table_is_not_truncated(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "out", Console(emoji=False, width=width))
    done = handgrad("verify", "--only", "E-ln-*,P-softmax-shift,T2-D1,R*")
    lines = done.stdout.splitlines()
    names = lines[1].split()
    assert {"check", "error", "limit"} <= set(names), "the columns have headings"
    assert "5 · LayerNorm" in done.stdout and "Errata" in done.stdout
    rows = [line for line in lines if line.startswith("✔")]
    assert len(rows) == 30 and "all 30 checks passed" in "\n".join(lines[-2:])
    for row in rows:
        cells = dict(zip(reversed(names), reversed(row.split()), strict=False))
        assert cells["limit"] in ("0", "1.0e-12", "1.0e-10"), row
        assert 0 <= float(cells["error"]) <= float(cells["limit"]), row
    assert all(len(line) <= width for line in lines) and "…" not in done.stdout
    words = " ".join(done.stdout.split())
    assert "exact for ε > 0 too" in words, "the end of a long statement"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_plan_tables_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch, no_timing: None) -> None:
    monkeypatch.setattr(console, "out", Console(width=width))
    done = handgrad("plan", "--rank", 16, "--targets", "paper")
    assert "85,120,849" in done.stdout and "38,597,376" in done.stdout and "GFLOP" in done.stdout
    assert " MB" in done.stdout and "MiB" not in done.stdout
    for name in ("quantity", "amount", "process at the peak", "time of a step"):
        assert name in done.stdout
    assert all(len(line) <= width for line in done.stdout.splitlines()) and "…" not in done.stdout
    if width >= 80:
        words = " ".join(done.stdout.split())
        assert "meaning" in words and "a multiply-add counts as two" in words.replace("  ", " ")


def test_verify_shows_both_errors_of_a_misprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "out", Console(emoji=False, width=160))
    (row,) = [line for line in handgrad("verify", "--only", "R1").stdout.splitlines() if "R1" in line]
    assert "printed" in row and "right" in row


BAD_CONFIGS = [
    ("[]", "must contain a JSON object"),
    (
        '{"model_type": "gpt2", "n_positions": null, "vocab_size": 9, "n_embd": 4, "n_head": 2, "n_layer": 1}',
        "n_positions",
    ),
    ('{"model_type": "gpt2", "activation_function": ["x"]}', "activation_function"),
    ('{"model_type": "gpt2", "scale_attn_weights": false}', "scale_attn_weights"),
    (
        '{"model_type": "gpt2", "vocab_size": 9, "n_embd": 4, "n_head": 2, "n_layer": 1, "layer_norm_epsilon": "x"}',
        "eps",
    ),
    ('{"model_type": "gpt2", "handgrad": {"nonsense": 1}}', "nonsense"),
]


@pytest.mark.parametrize(("text", "message"), BAD_CONFIGS)
def test_bad_config_json_is_reported(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    for command in ("verify", "plan"):
        assert message in error_of(command, "--model", tmp_path)


def test_version() -> None:
    assert hg.__version__ in handgrad("--version").stdout
    assert handgrad("no-such-command").returncode == 2


# ── help ────────────────────────────────────────────────────────────────────────────────────────────────────────────

HELP = """
import json, sys
from typer.testing import CliRunner
from handgrad.cli.app import app, typer
texts = {}
for width in ("60", "80", "200"):
    for name in ("", *typer.main.get_command(app).commands):
        flag = "-h" if width == "60" else "--help"
        done = CliRunner().invoke(app, [name, flag] if name else [flag], env={"COLUMNS": width})
        assert done.exit_code == 0, done.output
        texts[f"{name} {width}"] = done.stdout
print(json.dumps({"texts": texts, "modules": list(sys.modules)}))
"""


@pytest.fixture(scope="module")
def help_texts() -> dict[str, Any]:
    """The help of every command at three widths, and the modules imported for it."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_help_does_not_import_torch(help_texts: dict[str, Any]) -> None:
    heavy = {
        "torch",
        "numpy",
        "tokenizers",
        "safetensors",
        "fastapi",
        "jinja2",
        "handgrad.model.gpt",
        "handgrad.training.loop",
    }
    assert not heavy & set(help_texts["modules"])


def test_help_fits_the_terminal_and_is_not_truncated(help_texts: dict[str, Any]) -> None:
    for key, text in help_texts["texts"].items():
        name, _, width = key.partition(" ")
        assert text.startswith(f"Usage: handgrad {name}".rstrip()), key
        assert max(len(line) for line in text.splitlines()) <= min(int(width), 100), key
        assert not re.search(r"\w…|<\w+>|\bNone\b|\de-0\d|\[default: \]", text), key
    for name in ("plan", "train", "finetune"):  # the same words at every width, in the same order
        one, *others = ([*help_texts["texts"][f"{name} {width}"].split()] for width in (200, 80, 60))
        assert all(sorted(one) == sorted(other) for other in others), name
    plan, tune = (" ".join(help_texts["texts"][f"{name} 80"].split()) for name in ("plan", "finetune"))
    assert "--rank N" in plan and "--rank N" in tune and "--targets TEXT" in plan and "--targets TEXT" in tune
    assert "[default: 0.0005, with --full 0.00005]" in tune


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, handgrad as hg; assert 'torch' not in sys.modules, 'eager'; assert 'GPT' in dir(hg)\n"
        "import handgrad.model.inspect.trace as module, handgrad.proof.verify, inspect\n"
        "assert module.trace is hg.trace and module.Trace is hg.Trace\n"
        "assert list(inspect.signature(hg.generate).parameters)[:2] == ['model', 'tokens']\n"
        "model = hg.GPT(hg.preset('nano', n_blocks=1)); import torch; tokens = torch.zeros(1, 4, dtype=torch.int64)\n"
        "assert hg.generate(model, tokens, 2).shape[-1] and 'a_0' in hg.trace(model, tokens, tokens)\n"
        "from handgrad import *; assert lora.inject and verify and load and save\n"
        "from handgrad.lora import inject; assert inject is lora.inject\n"
        "try: hg.nonsense\nexcept AttributeError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "has no attribute 'nonsense'" in done.stdout


# ── which model ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with text, and a model called nano."""
    monkeypatch.chdir(tmp_path)
    use_empty_cache(monkeypatch, tmp_path / "cache")
    Path("text.txt").write_text("ten green bottles hanging on the wall\n" * 100)
    save_with_bytes(hg.GPT(hg.preset("nano", n_blocks=1, d_model=8, n_heads=2)), Path("nano"))
    return tmp_path


TINY = ["--data", "text.txt", "--steps", 2, "--sample-tokens", 0, "--eval-batches", 1]
ONE_BLOCK = 8 * 256 + 8 * 64 + 12 * 64 + 13 * 8 + 2 * 8  # of the model in the folder


def test_preset_takes_precedence_over_a_folder(folder: Path, no_timing: None) -> None:
    note = "nano is the preset here; for the folder of that name write ./nano"
    done = handgrad("train", *TINY, "--n-blocks", 1, "--out", "a")
    assert done.returncode == 0 and note in done.stdout and "239,488 parameters" in done.stdout
    done = handgrad("train", *TINY, "--model", "./nano", "--out", "b")
    assert done.returncode == 0 and note not in done.stdout and f"{ONE_BLOCK:,} parameters" in done.stdout
    for given, count in (("nano", 834_304), ("./nano", ONE_BLOCK), ("nano/", ONE_BLOCK), (folder / "nano", ONE_BLOCK)):
        done = handgrad("plan", "--model", given, "--json", "-")
        assert json.loads(done.stdout)["total"] == count
        assert (note in done.stderr) == (given == "nano")
    assert "./nano: " in handgrad("verify", "--model", "./nano").stdout
    for command in (
        ["generate", "--model", "nano"],
        ["finetune", "--model", "nano", "--data", "text.txt"],
        ["merge", "nano", "--out", "c"],
        ["convert", "nano", "--out", "c"],
    ):
        assert "write ./nano" in error_of(*command), command
    succeed("generate", "--model", "./nano", "--max-new-tokens", 2)
    succeed("convert", "./nano", "--out", "c")
    network, _, name, note, _ = explain.choose("./nano")
    assert (name, note, network.config.d_model) == ("nano", "from ./nano", 8)
    assert "write ./nano" in explain.choose("nano")[3]


def test_a_misspelled_model_is_guessed(folder: Path) -> None:
    Path("my-run").mkdir()
    for wrong, right in (("gtp2", "gpt2"), ("smolm2", "smollm2"), ("myrun", "my-run")):
        assert f"Did you mean {right}?" in handgrad("plan", "--model", wrong).stderr
    assert "Did you mean" not in handgrad("plan", "--model", "qqqqq").stderr


def test_unknown_model_has_the_same_message_everywhere(folder: Path) -> None:
    for command in (
        ["verify", "--model", "gpt5"],
        ["plan", "--model", "gpt5"],
        ["train", "--model", "gpt5", *TINY],
        ["finetune", "--model", "gpt5", "--data", "text.txt"],
        ["generate", "--model", "gpt5"],
        ["explain", "--model", "gpt5", "--html", "x.html"],
        ["merge", "gpt5", "--out", "x"],
        ["convert", "gpt5", "--out", "x"],
    ):
        assert "'gpt5' is neither a preset (paper, gpt2" in error_of(*command), command


def test_plan_and_verify_a_run_of_finetune(folder: Path, no_timing: None) -> None:
    done = handgrad(
        "finetune", "--model", "./nano", "--rank", 2, "--targets", "c_attn,lm_head", "--out", "runs/ft", *TINY
    )
    assert done.returncode == 0, done.stderr
    adapters = 2 * (8 + 24) + 2 * (8 + 256)
    for given in ("runs/ft", "runs/ft/adapter"):
        plan = plan_of("--model", given)
        assert (plan["total"], plan["trainable"], plan["rank"]) == (ONE_BLOCK, adapters, 2)
        assert plan["targets"] == ["c_attn", "lm_head"]
    succeed("verify", "--model", "runs/ft")
    done = handgrad("plan", "--model", "runs/ft", "--rank", 4)
    assert "is an adapter, and the plan is for training it" in done.stderr
    assert "--n-blocks needs a preset" in handgrad("plan", "--model", "runs/ft", "--n-blocks", 4).stderr
    same = handgrad("finetune", "--model", "./nano", "--rank", 2, "--targets", "c_attn", "--targets", "lm_head",
                  "--out", "runs/two", *TINY)  # fmt: skip
    assert same.returncode == 0 and f"{adapters:,} trainable in the adapter" in same.stdout


def test_generate_uses_the_newest_run(folder: Path) -> None:
    assert "no run with a checkpoint in runs/" in error_of("generate", "--max-new-tokens", 2)
    succeed("train", *TINY, "--model", "./nano", "--out", "runs/one")
    done = handgrad("generate", "--max-new-tokens", 2, "--prompt", "a\\n", "--seed", 1)
    assert done.returncode == 0 and "from runs/one/checkpoints/step-00000002" in done.stderr
    assert done.stdout.startswith("a\\n"), "the prompt is used as given"
    succeed("train", *TINY, "--model", "./nano", "--out", "runs/two")
    os.utime("runs/one/run.json", (1, 1))
    assert "from runs/two" in handgrad("generate", "--max-new-tokens", 2).stderr


def test_generate_answers_a_message_through_the_chat_template(folder: Path) -> None:
    model, message = hg.load("nano"), "Why é?"
    (folder / "nano" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    )
    made = tokenizer.read(folder / "nano")
    ids = hg.generate(model, torch.tensor([made.encode(f"<user>{message}<answer>")]), 6)[0].tolist()
    asked = ("generate", "--model", "./nano", "--max-new-tokens", 6, "--temperature", 0)
    done = handgrad(*asked, "--chat", message)
    assert done.returncode == 0 and done.stdout == made.decode(ids).rstrip("\ufffd") + "\n"
    assert handgrad(*asked, "--prompt", message).stdout == done.stdout  # the model has a template
    raw = handgrad(*asked, "--prompt", f"<user>{message}<answer>", "--format", "raw")
    assert raw.stdout == f"<user>{message}<answer>{done.stdout}"
    assert "--prompt, a text to continue, or --chat" in error_of(*asked, "--chat", "a", "--prompt", "b")
    (folder / "nano" / "chat_template.jinja").unlink()
    assert "nano has no chat template, which --format chat needs" in handgrad(*asked, "--chat", "a").stderr


# ── number formatting ───────────────────────────────────────────────────────────────────────────────────────────────


def test_printed_numbers_are_rounded(folder: Path) -> None:
    done = handgrad(
        "train", *TINY[:3], 1, *TINY[4:], "--model", "./nano", "--out", "a", "--lr", 0.00390625, "--log-every", 1
    )
    assert done.returncode == 0, done.stderr
    assert "training: 1 step of" in done.stdout and "1 block of" in done.stdout
    assert "AdamW, lr 0.00391," in done.stdout and "0.00390625" not in done.stdout
    assert "of matmul peak" in done.stdout and re.search(r"\d [MG]B", done.stdout)
    (record,) = [r for r in map(json.loads, Path("a/metrics.jsonl").read_text().splitlines()) if "loss" in r]
    assert 0 < record["mfu"] <= 1
    page = Path("a/report.html").read_text()
    assert "1 step in" in page and "1 steps" not in page and "of matmul peak" in page and "0.00390625" not in page


def test_mfu_of_fine_tuning_counts_only_computed_flop(folder: Path) -> None:
    """Examples of different lengths, prompts without targets, frozen weights: MFU stays at most 1."""
    lines = [{"prompt": "ten green bottles " * (i % 3), "completion": " fall"} for i in range(12)]
    Path("data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = handgrad(
        "finetune",
        "--model",
        "./nano",
        "--data",
        "data.jsonl",
        "--steps",
        4,
        "--log-every",
        1,
        "--out",
        "ft",
        "--rank",
        2,
    )
    assert done.returncode == 0, done.stderr
    records = [r for r in map(json.loads, Path("ft/metrics.jsonl").read_text().splitlines()) if "loss" in r]
    assert len(records) == 4 and all(0 < r["mfu"] <= 1 for r in records)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (formatting.plural(1, "step"), "1 step"),
        (formatting.plural(2000, "step"), "2,000 steps"),
        (formatting.plural(0, "step"), "0 steps"),
        (formatting.plural(0.5, "minute"), "0.5 minutes"),
        (formatting.plural(1, "box", "boxes") + formatting.plural(2, "box", "boxes"), "1 box2 boxes"),
        (formatting.number(0.00390625), "0.00391"),
        (formatting.number(0.004), "0.004"),
        (formatting.number(5e-5), "5e-5"),
        (formatting.number(0), "0"),
        (formatting.number(1.0), "1"),
        (formatting.number(100.0), "100"),
        (formatting.number(12345.6), "12,346"),
        (formatting.number(-0.25), "-0.25"),
        (formatting.number(1.23456e9), "1.23e9"),
        (formatting.size(999), "999 B"),
        (formatting.size(1500), "1.50 kB"),
        (formatting.size(497_759_232), "498 MB"),
        (formatting.size(999_600_000), "1.00 GB"),
        (formatting.size(1_170_000_000), "1.17 GB"),
        (formatting.duration(0.036), "36.0 ms"),
        (formatting.duration(1.14), "1.14 s"),
        (formatting.duration(119.6), "120 s"),
        (formatting.duration(120), "2 min"),
        (formatting.duration(1020.4), "17 min"),
        (formatting.duration(7900), "2.2 h"),
        (formatting.duration(52_251_994), "605 days"),
        (formatting.duration(1e9), "32 years"),
        (formatting.duration(0.99996), "1.00 s"),
        (formatting.clock(7), "0:07"),
        (formatting.clock(3723), "1:02:03"),
        (formatting.percent(0.45), "45 %"),
        (formatting.percent(0.0019), "0.19 %"),
        (formatting.percent(1), "100 %"),
        (formatting.loss(1.40137), "1.4014"),
        (formatting.count(12345.6), "12,346"),
        (formatting.flop(129_300_000), "129 MFLOP"),
        (formatting.flop(999_600_000), "1.00 GFLOP"),
        (formatting.flop(1_314_000_000_000), "1,314 GFLOP"),
    ],
)
def test_units(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--only", "nonsense"], "no check matches 'nonsense'"),
        (["verify", "--model", "gpt5"], "'gpt5' is neither a preset (paper, gpt2"),
        (["verify", "--only", "R1,nope"], "no check matches 'nope'"),
        (["verify", "--json", "."], "it is a folder"),
        (["verify", "--model", "./broken"], "NaN or infinity in transformer.wte.weight"),
        (["verify", "--model", "nano", "--only", "R1"], "--only selects the paper's checks"),
        (["verify", "--only", "R1", "--json", "no/such/folder/r.json"], "does not exist"),
        (["plan", "--model", "gpt5"], "'gpt5' is neither a preset"),
        (["plan", "--d-model", "10", "--n-heads", "3"], "--d-model 10 is not divisible by --n-heads 3"),
        (["plan", "--tokens", "5000"], "do not fit into a context of 1024"),
        (["plan", "--dtype", "float7"], "unknown dtype 'float7'"),
        (
            ["plan", "--rank", "4", "--targets", "nothing"],
            "no linear layer matches nothing; available: transformer.h.*",
        ),
        (["generate", "--model", "gpt2"], "gpt2 is a preset, a shape without weights"),
        (["generate", "--model", "./nano", "--seed", "9" * 20], "seed must be an integer of at most"),
        (["verify", "--model", "nano-llama", "--seed", "9" * 20], "seed must be an integer of at most"),
        (["train", "--data", ""], "--data is empty"),
        (["generate", "--model", ""], "the name of the model is empty"),
        (
            ["train", "--data", "text.txt", "--model", "gpt2", "--tokenizer", "bytes", "--n-heads", "5"],
            "--d-model 768 is not divisible by --n-heads 5",
        ),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, folder: Path) -> None:
    broken = make_model(dtype=torch.float32)
    broken.transformer.wte.weight.data[0, 0] = float("nan")
    hg.save(broken, folder / "broken")
    done = handgrad(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_tiny_temperature_and_a_huge_plan_work(folder: Path) -> None:
    succeed("generate", "--model", "./nano", "--max-new-tokens", 2, "--temperature", 1e-40)
    succeed("plan", "--model", "nano", "--batch", 10**12, "--json", "-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'? see handgrad --help"),
        (
            ["train", "--stepz", "3"],
            "unknown option --stepz (Possible options: --keep, --seed, --steps); see handgrad train",
        ),
        (["train", "--steps", "x"], "--steps must be a valid integer; see handgrad train --help"),
        (
            ["generate", "--temperature", "-1"],
            "--temperature must be greater than or equal to 0; see handgrad generate",
        ),
        (["merge"], "missing argument 'adapter'; see handgrad merge --help"),
    ],
)
def test_a_wrong_call_has_one_line_like_every_other_mistake(words: list[str], message: str) -> None:
    done = handgrad(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"handgrad: {message}") and done.stderr.count("\n") == 1


def test_the_bare_command_prints_the_help() -> None:
    done = subprocess.run([sys.executable, "-m", "handgrad"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Usage: handgrad [OPTIONS] COMMAND") and "finetune" in done.stdout
    assert "\033" not in done.stdout and done.stdout.endswith("\n")


def test_long_work_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=written))
    with console.working("comparing gradients"):
        assert written.getvalue() == ""
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=True, width=60))
    with console.working("comparing gradients"):
        pass
    assert "comparing gradients" in written.getvalue() and "0:00:00" in written.getvalue()


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.some_cases(3)
def test_closed_streams_end_without_a_traceback(tmp_path: Path, closed: str) -> None:
    """Nor does a file that the command opens get the number of a closed stream."""
    save_with_bytes(make_model(n_vocab=256, n_context=48, d_model=24), tmp_path / "m")
    before = {file: file.read_bytes() for file in (tmp_path / "m").iterdir()}
    command = f"{sys.executable} -m handgrad generate --model m --prompt é --max-new-tokens 4 {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert {file: file.read_bytes() for file in (tmp_path / "m").iterdir()} == before


@pytest.mark.parametrize("locale", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}])
@pytest.mark.some_cases(3)
def test_output_that_the_locale_cannot_express(locale: dict[str, str]) -> None:
    """Tables, and errors."""
    code = """
import sys
from handgrad.cli.app import main
for name in ("nano", "\\u6771"):
    sys.argv[1:] = ["plan", "--model", name]
    try:
        main()
    except SystemExit as ended:
        print("exit", ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **locale}
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert " ? " in done.stdout and done.stdout.endswith("exit 1\n") and "'?' is neither a preset" in done.stderr


LIMITED = """
import resource, sys
from handgrad.cli.app import main
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv.pop(1)),) * 2)
main()
"""


def limited(folder: Path, megabytes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `handgrad ARGUMENTS` with so much memory above that of Python and its libraries."""
    (folder / "limited.py").write_text(LIMITED)
    return run_processes(1, folder / "limited.py", megabytes * 1_000_000, *arguments)


@pytest.mark.long
def test_too_little_memory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was needed, what is there, which option helps; plan says it before."""
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "text.txt").write_text("some text " * 2000)
    shape = ("--n-blocks", 2, "--d-model", 1024, "--n-heads", 8, "--d-hidden", 8192)
    training = (
        "train",
        "--data",
        tmp_path / "text.txt",
        *shape,
        "--steps",
        2,
        "--out",
        tmp_path / "run",
        "--threads",
        1,
    )
    done = limited(tmp_path, 400, *training)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and re.search(
        r"not enough memory: .* needed, and .* of this process \(ulimit -v\) are free.*--update-inside", line
    )
    for command in (("plan", "--model", "nano", *shape), (*training[:-4], "--dry-run")):
        done = limited(tmp_path, 400, *command)
        assert done.returncode == 0, done.stderr
        assert re.search(r"does not fit: .* need .* MB, and .* \(ulimit -v\) are free.*--recompute", done.stderr)
    assert "does not fit" not in handgrad("plan", "--model", "nano").stderr


def test_memory_of_control_groups(tmp_path: Path) -> None:
    """Version 2: the group or one around it; version 1: a tree for memory; in a container only the root is here."""
    groups, root = tmp_path / "cgroup", tmp_path / "fs"

    def write(folder: str, **values: object) -> None:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (root / folder / f"memory.{name}").write_text(f"{value}\n")

    groups.write_text("0::/user/job\n")
    write("user/job", max="max", current=10)
    write("user", max=1000, current=300)
    assert list(machine._group_limits(groups, root)) == [700]
    groups.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    write("memory", limit_in_bytes=5000, usage_in_bytes=1000)
    assert list(machine._group_limits(groups, root)) == [4000]
    write("memory", limit_in_bytes=2**63 - 4096, usage_in_bytes=1000)
    assert list(machine._group_limits(groups, root)) == []


def test_metrics_are_not_read_up_front(tmp_path: Path) -> None:
    """Python's read(n) allocates n bytes: a gigabyte, where a folder may have a few lines."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val_loss": 2.0}\nhalf a li')
    tracemalloc.start()
    assert RunFolder(tmp_path).records() == [{"step": 1, "val_loss": 2.0}]
    assert read_text(tmp_path / "metrics.jsonl", 500_000_000).startswith("{")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000
