"""finetune --example-norms and --influence: what is logged, listed and reported, also resumed and by two processes."""

import json
import re
from pathlib import Path

import pytest

import handgrad as hg
from conftest import handgrad, run_processes, save_with_bytes, succeed, use_empty_cache
from handgrad.training.run import Run

BASE = [
    "--model",
    "base",
    "--data",
    "data.jsonl",
    "--rank",
    2,
    "--lr",
    0.01,
    "--batch-examples",
    4,
    "--sample-tokens",
    0,
]
BASE += ["--epochs", 2, "--eval-every", 100, "--save-every", 7]
OPTIONS = [*BASE, "--example-norms", "--influence", 2]
WRONG = "{{#}}[[%%]]~~@@"


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that knows the form of the answers, and data with one broken answer."""
    use_empty_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    right = [{"prompt": f"{i} and 1 is ", "completion": f"{i + 1} green bottles"} for i in range(10, 34)]
    Path("right.jsonl").write_text("".join(json.dumps(r) + "\n" for r in right))
    save_with_bytes(hg.GPT(hg.preset("nano", n_context=48, d_model=16, n_heads=2, n_blocks=1)), tmp_path / "new")
    result = hg.finetune(
        "new",
        "right.jsonl",
        out="first",
        full=True,
        lr=0.01,
        steps=120,
        batch_examples=24,
        val_share=0.0,
        sample_tokens=0,
        quiet=True,
    )
    result.path.rename("base")
    right[9]["completion"] = WRONG
    Path("data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in right))
    return tmp_path


def norms_of(folder: str) -> list[list[float]]:
    return [r["example_norms"] for r in Run(Path(folder)).records() if "example_norms" in r]


def test_outlying_example_is_listed_and_answers_open_to_their_examples(workdir: Path) -> None:
    done = succeed("finetune", *OPTIONS, "--out", "run")
    assert "examples that fit the others least" in done.stdout and WRONG in done.stdout
    assert "It cannot find wrong answers that are as plausible as right ones" in " ".join(done.stdout.split())
    listed = re.split(r"record +score.*\n", done.stdout)[1].splitlines()[0]
    assert WRONG in listed and listed.split()[0] == "10"
    logged = norms_of("run")
    assert len(logged) == 11 and all(len(step) == 4 and min(step) > 0 for step in logged)
    text = Path("run/report.html").read_text()
    assert "Examples that fit the others least" in text and text.index(WRONG) < text.index("What pushed these answers")
    assert text.count('<details class="query"') == 2 and "default-src 'none'" in text and "<script" not in text
    # gradients and so the adapter are those of a run that measures nothing
    succeed("finetune", *BASE, "--out", "plain")
    losses = [[r["loss"] for r in Run(Path(name)).records() if "loss" in r] for name in ("run", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "Examples that fit" not in Path("plain/report.html").read_text()
    # a resumed run repeats nothing and keeps what it has measured
    again = handgrad("finetune", "--resume", "--out", "run", "--epochs", 3)
    assert again.returncode == 0 and len(norms_of("run")) == 17 and norms_of("run")[:11] == logged
    # two processes measure the same, and so does the optimizer inside the backward pass
    for name, more in (("two", []), ("inside", ["--update-inside"])):
        arguments = ["finetune", *BASE, "--example-norms", *more, "--out", name]
        done = run_processes(2, *arguments) if name == "two" else handgrad(*arguments)
        assert done.returncode == 0, done.stderr
        assert norms_of(name)[0] == pytest.approx(logged[0], rel=1e-4)


def test_influence_needs_answers(workdir: Path) -> None:
    failed = handgrad("finetune", *OPTIONS, "--val-share", 0, "--out", "run")
    assert failed.returncode == 1 and "--influence needs examples to validate on" in failed.stderr
    assert not Path("run").exists()
