"""make finetune-demo and coder-demo at tiny size: a random Llama as a GGUF file, with its real peer."""

import json
import os
import subprocess
import zipfile
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench import demo as finetune_demo
from bench.bases import tiny_llama
from bench.demo import OPTIONS, Demo, answers, compare, messages_of, tell
from bench.finetune import of_steps, step_records
from bench.house_style import records_of
from rich.console import Console

import handgrad as hg
from handgrad.text import tokenizer


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, str]:
    """The demo after its run, and all it printed."""
    folder = tmp_path_factory.mktemp("demo")
    base = tiny_llama(folder)
    records = [{**record, "input": "twice" if i % 2 else ""} for i, record in enumerate(base.records)] * 2
    quick = {**OPTIONS, "steps": 2, "batch_examples": 4, "eval_every": 1}
    demo = Demo(folder / "demo", str(base.path), records, quick, answer_tokens=5)
    out = Console(file=StringIO(), width=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune_demo, "QUESTIONS", 2)
        tell(demo, out)
    return demo, out.file.getvalue()  # type: ignore[attr-defined]


def test_loss_answers_and_files_are_reported(told: tuple[Demo, str]) -> None:
    demo, shown = told
    metrics = [json.loads(line) for line in (demo.run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["val_loss"] for record in metrics if "val_loss" in record]
    assert len(losses) == 3 and min(losses[1:]) < losses[0]
    assert f"{losses[0]:.4f} before, {min(losses[1:]):.4f} after" in shown
    assert f"handgrad finetune --model {demo.model} --data" in shown and "--packed" in shown
    assert f"handgrad generate --model {demo.run} --chat" in shown and f"handgrad merge {demo.run}" in shown
    for file in ("adapter/adapter_model.safetensors", "adapter.gguf", "report.html"):
        assert (demo.run / file).stat().st_size
    assert str(demo.run / "adapter.gguf") in shown and "the first 2 held-out instructions" in shown


def test_held_out_records_are_not_trained_on(told: tuple[Demo, str]) -> None:
    demo, _ = told
    training, held_out = (
        [json.loads(line) for line in (demo.folder / name).read_text().splitlines()]
        for name in ("train.jsonl", "validation.jsonl")
    )
    assert len(held_out) == 3 and not any(record in held_out for record in training)
    assert {json.dumps(r) for r in training + held_out} == {json.dumps(r) for r in demo.records}


def test_answers_are_those_of_the_base_model_and_of_the_adapter(told: tuple[Demo, str]) -> None:
    demo, _ = told
    question = messages_of(demo.held_out[1])
    assert demo.held_out[1]["instruction"] in question[-1]["content"] and len(question) == 1
    adapter = demo.run / "adapter"
    made = tokenizer.read(adapter)
    text = f"<|im_start|>user\n{question[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    for model in (hg.load(demo.model), hg.load(adapter)):
        ids = hg.generate(model, torch.tensor([made.encode(text)]), 40)[0].tolist()
        assert answers(model, adapter, [question], 40) == [made.decode(ids).strip() + " …"]


def compared(demo: Demo) -> str:
    """What the comparison with the peer prints."""
    out = Console(file=StringIO(), width=100)
    compare(demo, out)
    return out.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.long
def test_transformers_and_peft_take_the_same_steps(told: tuple[Demo, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    demo, _ = told
    shown = compared(demo)
    assert shown.count("loss") == 4 and "times as fast" in shown and "load 0.00" in shown
    assert {path.name for path in demo.folder.iterdir()} == {"train.jsonl", "validation.jsonl", "run"}


@pytest.mark.parametrize(("factor", "load"), [(1.0, 99.0), (1.001, 0.0)])
def test_no_ratio_from_a_busy_machine_or_of_other_losses(
    told: tuple[Demo, str], monkeypatch: pytest.MonkeyPatch, factor: float, load: float
) -> None:
    demo, _ = told
    steps = of_steps(step_records(demo.run), 10**9)
    peer = replace(steps, losses=[factor * loss for loss in steps.losses])
    monkeypatch.setattr(finetune_demo, "run_peer", lambda *_: peer)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    if factor == 1:
        shown = compared(demo)
        assert "THE MACHINE IS BUSY" in shown and "times as fast" not in shown
    else:
        with pytest.raises(hg.HandgradError, match="the losses of step 1 differ"):
            compared(demo)


def test_a_stopped_run_is_not_reported(told: tuple[Demo, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = replace(told[0], folder=tmp_path)
    stopped = SimpleNamespace(outcome=SimpleNamespace(finished=False), job=SimpleNamespace(step=1))
    monkeypatch.setattr(hg, "finetune", lambda *_, **__: stopped)
    with pytest.raises(hg.HandgradError, match="was stopped at step 1: run the command again"):
        tell(demo, Console(file=StringIO()))


def test_peer_needs_a_finished_run(told: tuple[Demo, str], tmp_path: Path) -> None:
    with pytest.raises(hg.HandgradError, match="holds no finished run: start with make finetune-demo"):
        compare(replace(told[0], folder=tmp_path), Console(file=StringIO()))


# ── the coder ────────────────────────────────────────────────────────────────────────────────────────────────────────

MODULE = '''
"""Two ways."""
from missing import nothing


def _helper(a): ...


def short(a): """No style."""


def twice(numbers: list[int], *, times: int = 2) -> list[int]:
    """Repeat a list,
    so to speak.

    Args:
        numbers: What to repeat.
    """
    return numbers * times


def twice_v2(numbers: list[int]) -> list[int]:
    """Args: the second way."""
'''


def test_records_are_the_first_functions_in_the_style_of_modules(tmp_path: Path) -> None:
    """Modules are read, not run: this one could not be imported."""
    with zipfile.ZipFile(tmp_path / "style.whl", "w") as wheel:
        wheel.writestr("style/b.py", MODULE)
        wheel.writestr("style/a.py", MODULE.replace("twice", "other").replace("return numbers", f"return {1600 * '1'}"))
        wheel.writestr("style/notes.txt", MODULE)
    (record,) = records_of(tmp_path / "style.whl")
    assert record["instruction"] == "Write the Python function twice(numbers): Repeat a list, so to speak."
    assert record["output"].startswith("```python\ndef twice(numbers: list[int], *, times: int = 2) -> list[int]:\n")
    assert record["output"].endswith("    return numbers * times\n```")


@pytest.mark.parametrize("written", [True, False])
def test_coder_demo_times_both_ways_and_writes_gguf(
    written: bool, told: tuple[Demo, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def convert(command: list[str], check: bool) -> SimpleNamespace:
        commands.append(command[3:])
        Path(command[command.index("--gguf") + 1]).write_bytes(b"GGUF")
        return SimpleNamespace(returncode=0 if written else 1)

    base = told[0]
    demo = replace(base, folder=tmp_path, options={**base.options, "steps": 1}, bits=8, prompt="Add.", exports=True)
    out = Console(file=StringIO(), width=150)
    monkeypatch.setattr(subprocess, "run", convert)
    if not written:
        with pytest.raises(hg.HandgradError, match=r"tuned\.gguf was not written"):
            tell(demo, out)
        return
    tell(demo, out)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert " s with --recompute blocks" in shown and "weights rounded to 8 bits" in shown and "--chat Add." in shown
    assert commands == [["convert", str(demo.run), "--gguf", str(tmp_path / "tuned.gguf"), "--type", "Q4_K"]]
    assert "tuned.gguf: 4 B, for llama.cpp and Ollama" in shown and "finetune-demo-peer" not in shown


def test_coder_demo_is_the_real_model_in_mixed_precision_where_the_processor_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_demo, "functions", lambda: [{"instruction": "Add.", "output": "1"}])
    for why, precision in (("no bfloat16", None), (None, "mixed")):
        monkeypatch.setattr(finetune_demo, "why_not_mixed", lambda why=why: why)
        demo = finetune_demo.DEMOS["coder-demo"](tmp_path)
        assert demo.model == "qwen-coder" and demo.options.get("precision") == precision and demo.exports
