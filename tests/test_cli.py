"""The command line as a user meets it: in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import handgrad as hg
from conftest import make_model


def handgrad(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "handgrad", *arguments], capture_output=True, text=True, check=False)


def test_verify_writes_json_to_stdout() -> None:
    done = handgrad("verify", "--json", "-", "--seed", "5")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["failed"] == 0 and report["passed"] == len(report["checks"]) == 226


def test_verify_prints_a_table_and_a_closing_line() -> None:
    done = handgrad("verify", "--only", "E-ln-*,R8")
    assert done.returncode == 0
    assert "5 · LayerNorm" in done.stdout and "Errata" in done.stdout
    assert done.stdout.strip().splitlines()[-1].startswith("all 8 checks passed")


def test_verify_exits_with_1_if_anything_fails(tmp_path: Path) -> None:
    code = (
        "from handgrad.paper import layernorm; import sys; from handgrad.cli import main\n"
        "layernorm.grad_b = lambda delta: -delta.sum(0)\n"
        "sys.argv = ['handgrad', 'verify', '--only', 'E-ln-*', '--json', sys.argv[1]]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "1 of 7 checks FAILED" in done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert [c["id"] for c in report["checks"] if not c["passed"]] == ["E-ln-db"]


def test_verify_a_model_directory(tmp_path: Path) -> None:
    hg.save(make_model(dtype=torch.float32), tmp_path / "m")
    done = handgrad("verify", "--model", str(tmp_path / "m"), "--json", "-")
    assert done.returncode == 0, done.stderr
    assert {"blocks.0.delta_raw", "transformer.wte.weight"} <= {c["id"] for c in json.loads(done.stdout)["checks"]}


def test_plan() -> None:
    done = handgrad("plan", "--model", "paper")
    assert done.returncode == 0
    for count in ("7,087,872", "85,120,849", "38,647,633", "38,597,376", "786,432"):
        assert count in done.stdout
    plan = json.loads(
        handgrad("plan", "--n-blocks", "12", "--lora-rank", "16", "--lora-targets", "paper", "--json", "-").stdout
    )
    assert plan["total"] == 163_087_441 and plan["trainable"] == 3_470_608


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_number_is_ever_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = handgrad("verify", "--only", "E-ln-*,P-softmax-shift,T2-D1,R*")
    rows = [line for line in done.stdout.splitlines() if line.startswith("✔")]
    assert len(rows) == 30
    for row in rows:
        assert len(row) <= width
        assert row.split()[-1 if width < 80 else -2] in ("0", "1.0e-12", "1.0e-10") or width < 80, row
        assert "…" not in row[-20:], row
    plan = handgrad("plan", "--model", "paper")
    assert "85,120,849" in plan.stdout and "38,597,376" in plan.stdout and "191.1 GFLOP" in plan.stdout


def test_a_misprint_shows_both_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (row,) = [line for line in handgrad("verify", "--only", "R1").stdout.splitlines() if "R1" in line]
    assert "printed" in row and "right" in row


MISTAKES_IN_CONFIG = [
    ("[]", "must hold a JSON object"),
    (
        '{"model_type": "gpt2", "n_positions": null, "vocab_size": 9, "n_embd": 4, "n_head": 2, "n_layer": 1}',
        "n_context",
    ),
    ('{"model_type": "gpt2", "activation_function": ["x"]}', "activation_function"),
    ('{"model_type": "gpt2", "scale_attn_weights": false}', "scale_attn_weights"),
    (
        '{"model_type": "gpt2", "vocab_size": 9, "n_embd": 4, "n_head": 2, "n_layer": 1, "layer_norm_epsilon": "x"}',
        "eps",
    ),
    ('{"model_type": "gpt2", "handgrad": {"nonsense": 1}}', "nonsense"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES_IN_CONFIG)
def test_mistakes_in_a_model_directory(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    for command in ("verify", "plan"):
        done = handgrad(command, "--model", str(tmp_path))
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def broken_model(folder: Path) -> str:
    model = make_model(dtype=torch.float32)
    with torch.no_grad():
        model.transformer.wte.weight[0, 0] = float("nan")
    hg.save(model, folder / "nan")
    return str(folder / "nan")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--only", "nonsense"], "no check matches 'nonsense'"),
        (["verify", "--model", "gpt5"], "'gpt5' is neither a preset (paper, gpt2"),
        (["verify", "--only", "R1,nope"], "no check matches 'nope'"),
        (["verify", "--json", "."], "it is a folder"),
        (["verify", "--model", "NAN"], "NaN or infinity in transformer.wte.weight"),
        (["verify", "--model", "nano", "--only", "R1"], "--only chooses among the paper's checks"),
        (["verify", "--only", "R1", "--json", "no/such/folder/r.json"], "does not exist"),
        (["plan", "--model", "gpt5"], "'gpt5' is neither a preset"),
        (["plan", "--d-model", "10", "--n-heads", "3"], "a width of 10 cannot be shared by 3 heads"),
        (["plan", "--tokens", "5000"], "do not fit into a context of 1024"),
        (["plan", "--dtype", "float7"], "unknown dtype 'float7'"),
        (["plan", "--lora-rank", "4", "--lora-targets", "nothing"], "no linear layer is called 'nothing'"),
    ],
)
def test_mistakes_end_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    arguments = [broken_model(tmp_path) if x == "NAN" else x for x in arguments]
    done = handgrad(*arguments)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stdout == ""


def test_help_and_version() -> None:
    assert "verify" in handgrad("--help").stdout
    assert hg.__version__ in handgrad("--version").stdout
    assert handgrad("no-such-command").returncode == 2
