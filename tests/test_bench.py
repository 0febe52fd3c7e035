"""Every scenario of handgrad bench at its tiny size, peers included: it runs, compares results before timing, and reports
the load of the machine. The figures themselves are not tested."""

import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from bench import SCENARIOS, __main__, compete, finetune, machine, precision, process, scenarios, shared, supervise
from bench.attempts import Attempts
from bench.bridge import REPLACED
from bench.cases import CASES
from bench.machine import Machine
from bench.products import MatmulsOnly
from bench.row import Row, is_rounded
from bench.show import Watch, show
from bench.sizes import SIZES, TINY
from torch.utils.flop_counter import FlopCounterMode

import handgrad as hg
from conftest import need_chromium, save_with_bytes
from forked_bench import run_forked
from handgrad.cli.bench import bench as bench_command
from handgrad.model.precision import why_not_mixed

ROOT = Path(__file__).parent.parent
CONTENDERS = {
    "train": {
        "handgrad",
        "eager autograd",
        "handgrad train",
        "matmuls only",
        "handgrad, mixed",
        "eager autograd, autocast",
    },
    "memory": {"handgrad", "eager autograd", "handgrad, least memory", "handgrad, mixed", "eager autograd, autocast"},
    "lora": {"handgrad", "transformers + peft", "matmuls only", "handgrad, mixed", "transformers + peft, autocast"},
    "sft": {"handgrad", "transformers + peft", "handgrad, mixed", "transformers + peft, autocast"},
    "bridge": {
        "handgrad, replaced",
        "transformers",
        "handgrad, wrapped",
        "handgrad, replaced, mixed",
        "transformers, autocast",
        "handgrad, wrapped, mixed",
    },
    "finetune": {"handgrad finetune", "transformers + peft", "… --precision mixed", "transformers + peft, autocast"},
    "generate": {
        "handgrad",
        "transformers",
        "handgrad, float32",
        "handgrad, without a cache",
        "bandwidth bound",
        "torch, float32",
        "torch, linear_dynamic",
        "torch, int8pack, bfloat16",
        "torch, int8pack, float32",
        "torch, int4pack, bfloat16",
        "torch, int4pack, float32",
    },
    "attention": {"handgrad", "library kernel"},
    "products": {
        "as written",
        "transposed",
        "handgrad, mixed",
        "handgrad, bfloat16 operands, mixed",
        "handgrad, float32",
        "torch, bfloat16",
        "torch, float32",
    },
    "examples": {"handgrad, norms of examples", "handgrad"},
    "shared": {"handgrad", "torch's default threads"},
}
OF_INSTRUCTIONS = {
    "batches of 8": [
        "handgrad finetune",
        "transformers + peft",
        "… --precision mixed",
        "transformers + peft, autocast",
    ],
    "sorted by length": [
        "handgrad finetune",
        "transformers + peft, checkpointing",
        "… --precision mixed",
        "transformers + peft, checkpointing, autocast",
    ],
    f"≤ {TINY.packed_tokens} tokens per step": [
        "… --packed",
        "handgrad finetune",
        "… --packed --recompute blocks",
        "… --packed --precision mixed",
        "transformers + peft, checkpointing, weights in bfloat16",
    ],
}
WITH_MEMORY = {"memory", "finetune"}


def possible(contenders: Iterable[str]) -> list[str]:
    """Those that this machine has."""
    return [name for name in contenders if why_not_mixed() is None or not is_rounded(name)]


def bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str, status: int = 0
) -> tuple[dict[str, Any], str]:
    """The JSON on stdout, and the text on stderr."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes it starts
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with pytest.raises(SystemExit) as ended:
        __main__.main([*arguments, "--tiny", "--json", "-"])
    shown = capsys.readouterr()
    assert ended.value.code == status, shown.err
    return json.loads(shown.out), shown.err


@pytest.mark.filterwarnings("ignore")  # of the peers
@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.some_cases(2)
def test_scenario_compares_results_and_times(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (shared, compete, finetune, process):
        monkeypatch.setattr(module, "run_alone", run_forked)
    found, shown = bench(capsys, monkeypatch, name, "--plot", str(tmp_path / "plot.svg"))
    rows, machine = found["rows"], found["machine"]
    assert found["size"] == "tiny" and {row["scenario"] for row in rows} == {name}
    if name != "products" or why_not_mixed() is None:
        assert {row["contender"] for row in rows} == set(possible(CONTENDERS[name]))
    for row in rows:
        assert row["seconds"] > 0 and row["median"] >= row["seconds"], row
        assert math.isfinite(row["ratio"]) and row["ratio"] > 0 and row["problem"] == "", row
    for case in {row["case"] for row in rows}:
        ours, reference = [row for row in rows if row["case"] == case][:2]
        assert reference["ratio"] == 1
        if name not in ("finetune", "shared", "generate"):  # finetune compares losses, generate tokens
            if reference["contender"] == "torch, bfloat16":  # only its result is rounded
                assert ours["gradient_error"] < 1e-5 < reference["gradient_error"] < 1e-2 and ours["gflops"] > 0
            elif "bfloat16" in case:  # both are compared with float32
                assert 0 < ours["gradient_error"] <= 2 * reference["gradient_error"] < 0.2
            else:
                assert ours["gradient_error"] < 1e-4 and reference["gradient_error"] == 0
    mine = [row for row in rows if row["contender"] in ("handgrad", "handgrad finetune")]
    if name in ("train", "memory", "lora", "finetune"):
        assert all(row["predicted_seconds"] > 0 and row["predicted_memory"] > 0 for row in mine)
    if name in WITH_MEMORY:
        measured = [row for row in rows if row["contender"] != "matmuls only"]
        assert all(row["memory"] > 0 and math.isfinite(row["memory_ratio"]) for row in measured)
    if name in ("train", "lora"):
        assert all(row["mfu"] > 0 for row in mine if "Llama" not in row["case"])
    if name in ("train", "lora", "sft"):
        rounded = [row for row in rows if is_rounded(row["contender"])]
        assert all(0 < row["gradient_error"] < 0.06 and row["cosine"] > 0.999 for row in rounded)
        for row in rounded:
            assert f"{row['contender']}: relative error of all gradients {row['gradient_error']:.1e}, cosine " in shown
    if name == "generate":
        decoded = [row for row in mine if "decode" in row["case"]]
        assert len(decoded) == 3 * 2 * 2 and all(row["of_bound"] > 0 for row in decoded)
    if name == "shared":
        assert [row["of_idle"] for row in rows[:2]] == [1, 1] and all(row["of_idle"] > 0 for row in rows)
    assert machine["load"] >= 0 and machine["cores"] == os.cpu_count()
    assert machine["busy"] == (max(machine["load"], machine["others"]) > 0.3 * machine["cores"])
    assert f"load {machine['load']:.2f} on {machine['cores']} core" in shown and SCENARIOS[name] in shown
    plot = "".join(ElementTree.parse(tmp_path / "plot.svg").getroot().itertext())
    assert "times as fast as the reference" in plot and f"load {machine['load']:.2f}" in plot


@pytest.mark.filterwarnings("ignore")  # of the peers
@pytest.mark.parametrize("model", ["", "smollm2"])
def test_errors_of_rounded_gradients_are_compared(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(__main__.err, "width", 400)
    found, shown = bench(capsys, monkeypatch, "precision", *(["--model", model] if model else []))
    ours, theirs, narrow = rows = found["rows"]
    assert [row["contender"] for row in rows] == [precision.OURS, precision.THEIRS, precision.NARROW]
    assert all(0 < row["gradient_error"] < row["worst"] < 0.3 and 0.99 < row["cosine"] < 1 for row in (theirs, narrow))
    if why_not_mixed() is not None:
        assert ours["problem"].startswith("missing: ") and ours["gradient_error"] is None
        return
    assert 0 < ours["gradient_error"] < theirs["gradient_error"] < narrow["gradient_error"]
    assert re.match(r"nearer than autocast in \d+ of \d+ tensors, in single texts in \d+ to \d+", ours["note"])
    assert ours["note"] in shown and f"{ours['worst']:.2e}" in shown and f"{ours['cosine']:.5f}" in shown


def test_tensors_in_which_autocast_is_nearer_are_named() -> None:
    """Of two tensors in two examples: one is nearer in both, the other further in one and in the sum."""
    exact = {"a": torch.zeros(2), "b": torch.ones(2)}
    exact["a"][0] = 1
    ours, theirs = precision.Errors(), precision.Errors()
    for errors, by in ((ours, (0.1, 0.4)), (theirs, (0.2, 0.3))):
        for at in (0, 1):
            off = {"a": exact["a"] + by[0], "b": exact["b"] + (by[1] if at else 0.1)}
            errors.add(lambda example, off=off: off, (exact["a"], exact["a"]), exact)  # type: ignore[misc]
    assert precision.beside(ours, theirs) == (
        "nearer than autocast in 1 of 2 tensors, in single texts in 1 to 1; not in b (1.30×)"
    )
    assert ours.error == pytest.approx(math.sqrt((2 * 0.02 + 0.02 + 0.32) / 6))
    assert max(ours.of_tensors().values()) == pytest.approx(math.sqrt(0.34 / 4))
    with pytest.raises(
        hg.HandgradError, match=r"relative error 2.5e-01 of all gradients, cosine 0.99200: not rounding"
    ):
        ours.check()


@pytest.mark.filterwarnings("ignore")  # of the peers
@pytest.mark.long
def test_named_model_is_finetuned_on_instructions_and_on_longer_and_longer_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tiny Llama with packed weights stands for the model."""
    for module in (process, finetune):
        monkeypatch.setattr(module, "run_alone", run_forked)
    found, shown = bench(capsys, monkeypatch, "--model", "smollm2", "--plot", str(tmp_path / "plot.svg"))
    assert found["model"] == "smollm2" and f"load {found['machine']['load']:.2f}" in shown
    rows = [row for row in found["rows"] if row["scenario"] == "finetune"]
    for case, contenders in OF_INSTRUCTIONS.items():
        ours = [row for row in rows if row["case"] == case]
        assert [row["contender"] for row in ours] == possible(contenders)
        assert all(row["seconds"] > 0 and row["ratio"] > 0 and row["memory"] and row["above_torch"] for row in ours)
        assert len({row["tokens"] for row in ours}) == 1 and ours[1]["ratio"] == ours[1]["above_torch_ratio"] == 1
    assert rows[-1]["tokens"] <= TINY.packed_tokens < 1.2 * rows[-1]["tokens"]
    for case in OF_INSTRUCTIONS:
        row = next(row for row in rows if row["case"] == case)
        assert re.search(rf"{case}: tiny Llama, .* examples of \d+ to \d+ tokens", row["note"])
    rows = [row for row in found["rows"] if row["scenario"] == "context"]
    contenders = possible(["handgrad finetune", "… --packed --recompute blocks", "… --precision mixed"])
    assert [(row["tokens"], row["contender"]) for row in rows] == list(itertools.product(TINY.context, contenders))
    assert all((row["bytes_per_token"] is None) == (row["tokens"] == TINY.context[0]) for row in rows)
    plot = "".join(ElementTree.parse(tmp_path / "plot.svg").getroot().itertext())
    for text in ("Seconds of a LoRA step on one example", "Peak memory of the process", "handgrad finetune: slope "):
        assert text in plot


@pytest.mark.filterwarnings("ignore")  # of the peers
@pytest.mark.long
def test_memory_of_a_replaced_model_is_measured_without_that_of_libraries() -> None:
    case = CASES["bridge"](TINY)[1].name
    assert 0 < compete._peak_in_own_process("bridge", case, REPLACED, TINY) < 50e6  # transformers alone is larger


def test_different_losses_are_not_reported(tmp_path: Path) -> None:
    def claim(loss: float) -> finetune.Run:
        return lambda work, round_: finetune.Found([2.5, loss], [0.1, 0.1], 10**9)

    work = finetune.Work("case", Any, tmp_path, 8, 2, {"handgrad finetune": claim(2.0), "peer": claim(2.0001)})
    attempts = Attempts()
    work.take_turns(2, attempts)
    assert attempts.problems == {}
    work.contenders["handgrad finetune"] = claim(2.001)
    work.take_turns(1, attempts)
    assert list(attempts.problems) == ["handgrad finetune"]
    assert attempts.problems["handgrad finetune"].startswith(
        "wrong: handgrad finetune: the losses of step 2 differ: 2.001 and 2.0001"
    )


def test_memory_of_a_process_is_its_own() -> None:
    """It does not begin at that of the process that starts it."""
    ballast = bytearray(300_000_000)
    ballast[::4096] = b"x" * len(ballast[::4096])
    shown, peak = process.run_alone("test", "import sys; x = bytearray(50_000_000); print(sys.argv[1:])", [1, "b"])
    assert shown == "['1', 'b']\n" and 50e6 < peak < 120e6
    with pytest.raises(hg.HandgradError, match=r"^test failed: ValueError: why$"):
        process.run_alone("test", "raise ValueError('why')")
    with pytest.raises(hg.HandgradError, match=r"^test failed: ended by signal 9, perhaps for lack of memory$"):
        process.run_alone("test", "import os; os.kill(os.getpid(), 9)")
    free = "import bench.peft_peer, sys; print([name for name in sys.modules if name.startswith('handgrad')])"
    assert process.run_alone("the peer", free)[0] == "[]\n", "the peer's process has nothing of handgrad"


@pytest.mark.parametrize("rank", [0, 16])
def test_the_matmuls_alone_are_those_of_a_step(rank: int) -> None:
    """All weights: three products each. Adapters: two of each frozen matrix but the lowest, and four of the factors besides
    those that are added to another result, which the counter does not see."""
    model, (b, t) = hg.GPT(TINY.model), (2, 64)
    with FlopCounterMode(display=False) as counted:
        MatmulsOnly(model, torch.zeros(b, t, dtype=torch.long), rank).gradients()
    n, d, blocks = b * t, TINY.model.d_model, TINY.model.n_blocks
    matrices, head = 12 * d * d * blocks, TINY.model.n_vocab * d
    expected = 3 * (matrices + head) if not rank else 2 * (matrices + head) - 3 * d * d + 32 * d * rank * blocks
    assert counted.get_flop_counts()["Global"][torch.ops.aten.mm] == 2 * n * expected


@pytest.mark.long
def test_explain_page_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_chromium()
    save_with_bytes(hg.GPT(hg.preset("nano", n_blocks=1)), tmp_path)
    monkeypatch.setitem(SIZES, "tiny", replace(TINY, explain=(str(tmp_path), 2)))
    rows = bench(capsys, monkeypatch, "explain")[0]["rows"]
    assert {"start to the first view", "another sentence", "more until a station was proven"} <= {
        row["case"] for row in rows
    }
    assert all(row["seconds"] > 0 for row in rows) and max(row["memory"] for row in rows) > 1e7


def test_every_scenario_is_tested_and_described() -> None:
    assert {*CONTENDERS, "context", "precision", "explain"} == set(SCENARIOS)
    assert f"Scenarios: {', '.join(SCENARIOS)};" in " ".join((bench_command.__doc__ or "").split())
    for size in SIZES.values():
        assert size.loop in size.train and {*size.compiled, *size.mixed_train} <= set(size.train)
        assert set(size.peaks) <= set(CASES)
        for name in SCENARIOS:
            cases = [part.case for part in scenarios.parts(name, size)]
            assert cases and len(set(cases)) == len(cases), name


@pytest.mark.parametrize(("load", "busy"), [(0.59, False), (0.61, True)])
def test_busy_machine_is_reported(
    load: float, busy: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "cpu_time", lambda: None)
    monkeypatch.setattr(__main__.err, "width", 400)
    found, shown = bench(capsys, monkeypatch, "attention", "--case", "forward")
    assert found["machine"]["load"] == load and found["machine"]["busy"] is busy
    assert f"load {load:.2f} on 2 cores at the start" in shown
    assert ("Ratios from a busy machine are biased in our favor: do not publish them" in shown) is busy


@pytest.mark.parametrize("width", [60, 80, 140])
def test_table_fits_the_terminal(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("train", "GPT-2 124M, 4×1024", name, 4096, 12.3, 12.4, 1.38, 1e-7, 11.1, 0.9, 10**9, 0.21, 9.9, 10**9)
        for name in ("handgrad", "eager autograd", "torch.compile")
    ]
    show(rows, "full", Machine(0.0, 2, 2), __main__.Console(width=width))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    for figure in ("12.30 s", "1.38×", "1,000 MB", "0.21"):
        assert sum(figure in line for line in lines) == len(rows), figure


def test_bar_shows_the_progress_of_the_whole_run() -> None:
    parts = scenarios.parts("attention", TINY)
    shown = io.StringIO()
    with Watch(parts, __main__.Console(file=shown, force_terminal=True, width=120)) as watch:
        watch.tell(1, "handgrad", 0.5)
    assert f"{100 * 1.5 / len(parts):.0f} %" in shown.getvalue() and "attention: backward, 4 heads" in shown.getvalue()


def test_interrupted_bench_writes_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(parts: list[scenarios.Part], *_: object) -> Iterator[tuple[scenarios.Part, list[Row]]]:
        yield parts[0], [Row(parts[0].scenario, parts[0].case, "handgrad", 8, 1.0, 1.0)]
        assert json.loads(file.read_text())["rows"], "written before the next part"
        raise KeyboardInterrupt

    def nothing(*_: object) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "found.json"
    for replaced in (measure, nothing):  # the second run measures nothing, and leaves the file of the first
        monkeypatch.setattr(supervise, "measure", replaced)
        with pytest.raises(SystemExit) as ended:
            __main__.main(["attention", "--tiny", "--json", str(file)])
        assert ended.value.code == 130
    shown = capsys.readouterr()
    assert f"Interrupted. 1 measurement was finished and written to {file}." in shown.err
    assert f"Interrupted. Nothing was measured, and {file} not written." in shown.err
    assert SCENARIOS["attention"] in shown.out and "1.00 s" in shown.out, "the finished case is shown"
    found = json.loads(file.read_text())
    assert len(found["rows"]) == 1 and found["command"] == "handgrad bench attention --tiny"
    assert found["versions"]["torch"] == torch.__version__ and re.fullmatch(r"[0-9a-f]{40}|", found["commit"])
    assert found["machine"]["cpu"] and found["machine"]["memory"] > 1e8 and found["machine"]["load_after"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]) and found["dirty"] in (True, False)


def test_json_path_is_relative_to_the_working_directory(tmp_path: Path) -> None:
    """Runs the real command from another folder."""
    done = subprocess.run(
        [sys.executable, "-m", "handgrad", "bench", "attention", "--tiny", "--json", "figures.json"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "library kernel" in done.stdout
    assert len(json.loads((tmp_path / "figures.json").read_text())["rows"]) == 4 * len(TINY.attention)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_fits_80_columns(option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        __main__.main([option])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(name in shown for name in (*SCENARIOS, "--case", "--model", "--quick", "--tiny", "--json", "--plot"))
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown scenario 'nonsense'; choose from train, memory, lora"),
        (["attention", "--quick", "--tiny"], "not allowed with"),
        (
            ["finetune", "train", "--model", "smollm2"],
            "--model is an option of finetune, context, generate, precision, not of train",
        ),
        (["context", "--quick", "--model", "no-such-model"], "'no-such-model' is neither a preset"),
        (["context", "--quick", "--model", "gpt2"], "gpt2 is a preset, a shape without weights"),
        (["attention", "--tiny", "--json", "no/such/folder/r.json"], "does not exist"),
        (["attention", "--tiny", "--plot", "."], "it is a folder"),
        (["attention", "--tiny", "--plot", "-"], "--plot needs a file name, not -"),
        (["attention", "--tiny", "--json", "x", "--plot", "./x"], "--json and --plot name the same file"),
        (["attention", "--tiny", "--case", "1x128", "--case", "9x9"], "no case contains '9x9'"),
        (["attention", "--tiny", "--case", "9x9"], "no case contains '9x9'; there are: backward, 2 heads of 16, 1×128"),
    ],
)
def test_bad_arguments_are_reported(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.main(arguments)
    shown = capsys.readouterr()
    assert ended.value.code and message in shown.err and shown.out == ""
