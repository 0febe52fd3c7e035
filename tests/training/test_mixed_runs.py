"""Mixed precision through the commands: runs and resume, one line where a machine has none, adapters on a rounded base."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import handgrad as hg
from conftest import handgrad, make_model, run_processes, use_empty_cache
from handgrad.display.run_progress import Silent
from handgrad.errors import for_command_line
from handgrad.files.manifest import FILE
from handgrad.formats.models import find_model, open_to_generate
from handgrad.formatting import duration, size
from handgrad.inference.token_block import describe
from handgrad.kernels import library, mixed_products
from handgrad.model.layers.linear import Embedding, Linear
from handgrad.model.passes.example_gradients import ExampleNorms
from handgrad.model.precision import why_not_mixed
from handgrad.model.storage.rounded import round_frozen
from handgrad.optim import OptimizerInBackward
from handgrad.plan.estimate import plan_model
from handgrad.proof.oracles import relative_error
from handgrad.text import tokenizer
from handgrad.training import run_plan
from handgrad.training.config import FinetuneOptions
from handgrad.training.distributed import Ranks
from handgrad.training.finetune import prepare
from handgrad.training.lifecycle import Request, dry_run
from handgrad.training.run_plan import plan_job, saved_by_mixing
from mixed_by_torch import Switch, forget, use_switch
from runs import OFTEN, SMALL, TEXT, same_weights, weights

mixes = pytest.mark.skipif(why_not_mixed() is not None, reason=f"no mixed precision: {why_not_mixed()}")
REASON = "this processor does not multiply bfloat16"
LINE = f"mixed precision needs products of bfloat16, and {REASON}; computing in float32"
MIXED = ["--precision", "mixed"]
TUNE = ["--model", "base", "--data", "data.jsonl", "--batch-examples", 5, "--steps", 6]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with text.txt, data.jsonl and a small model in base/."""
    use_empty_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("text.txt").write_text(TEXT)
    lines = [json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i + 1}"}) for i in range(40)]
    Path("data.jsonl").write_text("\n".join(lines))
    hg.save(make_model(dtype=torch.float32, n_vocab=256, n_context=48, d_model=32, n_heads=2, n_blocks=2), "base")
    tokenizer.make("bytes", []).write(Path("base"))
    return tmp_path


@pytest.fixture
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_not", lambda dtype: REASON if dtype is torch.bfloat16 else None)


def train(*options: object) -> subprocess.CompletedProcess[str]:
    done = handgrad("train", "--data", "text.txt", "--steps", 6, *SMALL, *OFTEN, *options)
    assert done.returncode == 0, done.stderr
    return done


def finetune(*options: object) -> subprocess.CompletedProcess[str]:
    done = handgrad("finetune", *TUNE, *OFTEN, *options)
    assert done.returncode == 0, done.stderr
    return done


def settings(run: str) -> dict[str, Any]:
    return json.loads(Path(run, "run.json").read_text())  # type: ignore[no-any-return]


@mixes
@pytest.mark.parametrize(
    "options", [{"rank": 2}, {"rank": 2, "modules_to_save": ("wpe", "c_fc")}, {"full": True}], ids=str
)
def test_summary_says_what_mixed_precision_would_save(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The plan as if in mixed precision is that of such a run, and saves the bytes that its weights save; of the time,
    only that of products shrinks, here to a quarter."""
    given = {"model": "base", "data": ("data.jsonl",), "batch_examples": 5, "steps": 6, **options}
    job, mixed = (
        dry_run(Request(FinetuneOptions, prepare, given | {"precision": name}), Ranks(), Silent(Console()))
        for name in ("float32", "mixed")
    )
    plan, other = plan_job(job), plan_job(job, mixed=True)
    assert other == plan_job(mixed) and other.bytes_peak < plan.bytes_peak
    stored, rounded = (
        [*made.parameters(), *{x.packed for x in made.modules() if isinstance(x, Linear | Embedding) and x.packed}]
        for made in (job.model, mixed.model)
    )
    assert plan.bytes_weights - other.bytes_weights == sum(x.nbytes for x in stored) - sum(x.nbytes for x in rounded)
    if "modules_to_save" not in options:
        named = plan_model(find_model("base"), {}, options.get("rank", 0), (), precision="mixed", batch=5, tokens=9)
        assert named.bytes_weights == other.bytes_weights

    rates = {"float32": 1e6, "mixed": 4e6}
    monkeypatch.setattr(run_plan, "matmul_rate", rates.__getitem__)
    products = 6 * (plan.forward_flop + plan.backward_flop) / 1e6
    memory = size(plan.bytes_peak - other.bytes_peak)
    for seconds, less in ((2 * products, 0.75 * products), (0.5 * products, 0.375 * products)):
        line = for_command_line(saved_by_mixing(job, 6, seconds))
        assert line == (
            f"--precision mixed would take about {duration(less)} less of {duration(seconds)}, and {memory} less memory, on"
            " this machine"
        )
    assert saved_by_mixing(mixed, 6, products) == "" and saved_by_mixing(job, 6, 8 * products) == ""


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@mixes
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (train, []),
        (train, ["--update-inside"]),
        (finetune, []),
        (finetune, ["--dora", "--dropout", 0.2, "--recompute", "blocks"]),
        (finetune, ["--targets", "lm_head", "--modules-to-save", "ln_f,wte"]),
        (finetune, ["--full"]),
    ],
    ids=lambda x: x.__name__ if callable(x) else " ".join(map(str, x)) or "plain",
)
def test_resume_is_bit_identical(workdir: Path, command: Any, options: list[object]) -> None:
    for name in "ab":
        command(*MIXED, "--out", name, *options)
    assert (
        settings("a")["training"]["precision"] == "mixed" and settings("a")["mixed_products"] == mixed_products.choice()
    )
    (workdir / "b" / "checkpoints" / "step-00000006" / FILE).write_text("{")
    resumed = handgrad(command.__name__, "--resume", "--out", "b")
    assert resumed.returncode == 0 and "from step 4" in resumed.stdout, resumed.stderr
    assert same_weights(weights(workdir / "a", 6), weights(workdir / "b", 6))
    command("--out", "c", *options)
    assert not same_weights(weights(workdir / "a", 6), weights(workdir / "c", 6)), "nothing was rounded"


@mixes
def test_two_processes_train_almost_the_same_weights(workdir: Path) -> None:
    train(*MIXED, "--out", "1")
    done = run_processes(2, "train", "--data", "text.txt", "--steps", 6, *SMALL, *OFTEN, *MIXED, "--out", workdir / "2")
    assert done.returncode == 0, done.stderr
    assert settings("2")["mixed_products"] == settings("1")["mixed_products"]
    one, two = weights(workdir / "1", 6), weights(workdir / "2", 6)
    assert max(relative_error(two[name], one[name], 1e-2) for name in one) < 1e-2


@mixes
def test_bits_do_not_depend_on_threads() -> None:
    model = make_model(dtype=torch.float32, n_vocab=300, n_context=256, d_model=96, n_heads=3, n_blocks=2)
    model.precision = "mixed"
    tokens, targets = torch.randint(300, (2, 3, 256), generator=torch.Generator().manual_seed(0))
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            model.zero_grad()
            loss = model.loss_and_grads(tokens, targets)
            found.append([loss, *(p.grad for p in model.parameters())])
    finally:
        torch.set_num_threads(1)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))


@mixes
def test_the_optimizer_inside_the_backward_pass() -> None:
    outside, inside = (make_model(dtype=torch.float32, n_blocks=2) for _ in range(2))
    tokens, targets = torch.randint(11, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    for model in (outside, inside):
        model.precision = "mixed"
    optimizer = torch.optim.AdamW(outside.parameters(), lr=0.01)
    outside.loss_and_grads(tokens, targets, recompute="blocks")
    optimizer.step()
    OptimizerInBackward(inside, lambda p: torch.optim.AdamW(p, lr=0.01)).step(tokens, targets)
    assert all(torch.equal(a, b) for a, b in zip(outside.parameters(), inside.parameters(), strict=True))


@mixes
@pytest.mark.parametrize("adapted", [False, True])
def test_gradients_of_examples(workdir: Path, adapted: bool) -> None:
    model = hg.load("base", precision="mixed")
    if adapted:
        hg.lora.inject(model, 2, dora=True)
        round_frozen(model)
    examples = [{"prompt": f"{i}", "completion": "x" * (3 + 9 * i)} for i in range(4)]
    norms, products = hg.example_norms(model, examples), hg.example_products(model, examples)
    assert torch.diagonal(products).sqrt().tolist() == pytest.approx(
        norms.tolist(), rel=1e-3
    )  # Gram matrices round less
    tokens, targets = torch.randint(256, (2, 3, 40), generator=torch.Generator().manual_seed(0))
    measured = ExampleNorms(grads=True)
    model.loss_and_grads(tokens, targets, examples=measured)
    found = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    model.loss_and_grads(tokens, targets)
    for p, grad in zip((p for p in model.parameters() if p.requires_grad), found, strict=True):
        assert grad.dtype == torch.float32 and relative_error(grad, p.grad, 1e-3) < 1e-4
    for i, norm in enumerate(measured.result().tolist()):
        model.zero_grad()
        model.loss_and_grads(tokens[i : i + 1], targets[i : i + 1])
        own = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        assert norm == pytest.approx(own.norm().item(), rel=5e-3)
    options = ["--data", "data.jsonl", "--prompt", "1", "--answer", "x", *MIXED]
    done = handgrad("influence", "--model", "base", *options)
    assert done.returncode == 0, done.stderr


# ── a base in bfloat16 ────────────────────────────────────────────────────────────────────────────────────────────────


@mixes
def test_an_adapter_trains_on_a_rounded_base_and_belongs_to_the_original(workdir: Path) -> None:
    result = hg.finetune("base", "data.jsonl", precision="mixed", rank=2, steps=4, out="run", quiet=True)
    model = result.model
    assert model.packed and not model.unpacks and model.precision == "mixed" and not hasattr(model.embed.weight, "grad")
    held = {x.packed for x in model.modules() if isinstance(x, Linear) and x.packed is not None}
    full = sum(p.nbytes for p in hg.load("base").parameters() if p.ndim == 2)
    assert sum(x.nbytes for x in held | {model.positions.packed}) == full // 2, "a tied matrix is stored once"
    with pytest.raises(hg.HandgradError, match="packed"):
        hg.save(model, "rounded")
    with pytest.raises(hg.HandgradError, match="packed"):
        hg.lora.merge(model)
    done = handgrad("merge", "run", "--out", "merged")
    assert done.returncode == 0, done.stderr
    merged, base, adapted = load_file("merged/model.safetensors"), load_file("base/model.safetensors"), hg.load("run")
    name = next(n for n in base if n.endswith("wte.weight"))
    assert torch.equal(merged[name], base[name]), "the rounded embedding was saved"
    tokens = torch.randint(256, (2, 9))
    assert relative_error(hg.load("merged").logits(tokens), adapted.logits(tokens)) < 1e-5
    assert relative_error(model.logits(tokens), adapted.logits(tokens)) < 0.05


@mixes
@pytest.mark.parametrize("bits", [None, 8])
def test_generation_reads_matrices_in_bfloat16(workdir: Path, bits: int | None) -> None:
    model = open_to_generate(Path("base"), bits, "mixed")
    kinds = {x.packed.kind for x in model.modules() if getattr(x, "packed", None) not in (None, True)}
    assert kinds == {"BF16"} if bits is None else kinds == {"BF16", "Q8_0"}
    exact = hg.load("base", bits=bits)
    prompt = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(0))
    assert relative_error(model.logits(prompt), exact.logits(prompt)) < 0.05
    if bits is None:
        assert describe(model) is not None, "the kernel of single tokens reads them"
        with torch.no_grad():
            for p in exact.parameters():
                p.copy_(p.bfloat16() if p.ndim == 2 else p)
        few = prompt[:, :9]  # products of a few rows round no activation
        assert torch.equal(hg.generate(model, few, 12), hg.generate(exact, few, 12))
    shown = handgrad("generate", "--model", "base", "--prompt", "3 + 1 =", "--max-new-tokens", 4, *MIXED)
    assert shown.returncode == 0 and shown.stdout.startswith("3 + 1 ="), shown.stderr


@mixes
def test_only_frozen_matrices_are_rounded() -> None:
    model = make_model(dtype=torch.float32, n_blocks=2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert round_frozen(model) is model and not model.packed
    hg.lora.inject(model, 2, targets=("c_attn",), modules_to_save=("c_fc",))
    round_frozen(model)
    trained = [name for name, p in model.named_parameters() if name.endswith("c_fc.weight")]
    assert len(trained) == 2 and all(torch.equal(model.get_parameter(name), before[name]) for name in trained)
    assert {name for name, p in model.named_parameters() if p.ndim == 2 and not p.requires_grad} == set()


# ── machines without products of bfloat16 ─────────────────────────────────────────────────────────────────────────────


def test_every_command_says_one_line_and_computes_in_float32(workdir: Path, no_bfloat16: None) -> None:
    for run, command in (("train", train), ("tune", finetune)):
        done = command(*MIXED, "--out", run)
        assert done.stdout.count(LINE) == 1, done.stdout
        command("--out", f"{run}32")
        assert same_weights(weights(workdir / run, 6), weights(workdir / f"{run}32", 6))
        assert settings(run)["mixed_products"] == "float32"
    prompt = ["--model", "base", "--prompt", "3 + 1 =", "--max-new-tokens", 4]
    mixed = handgrad("generate", *prompt, *MIXED)
    assert mixed.returncode == 0 and mixed.stderr.count(LINE) == 1
    assert mixed.stdout == handgrad("generate", *prompt).stdout
    for command in (
        ["plan", "--model", "nano", "--json", "-"],
        ["influence", "--model", "base", "--data", "data.jsonl", "--prompt", "1", "--answer", "x"],
    ):
        done = handgrad(*command, *MIXED)
        assert done.returncode == 0 and done.stderr.count(LINE) == 1, done.stderr
    with pytest.warns(match=REASON):
        model = hg.load("base", precision="mixed")
    assert model.operand is None and model.precision == "mixed"


@mixes
def test_resuming_where_bits_differ(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finetune(*MIXED, "--out", "a")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(library, "why_not", lambda dtype: REASON if dtype is torch.bfloat16 else None)
        done = handgrad("finetune", "--resume", "--out", "a", "--steps", 8)
        assert done.returncode == 0 and done.stdout.count(f"{LINE}: the bits differ") == 1, done.stdout
        finetune(*MIXED, "--out", "b")
        assert handgrad("finetune", "--resume", "--out", "b", "--steps", 8).returncode == 0
        finetune(*MIXED, "--out", "c")
    done = handgrad("finetune", "--resume", "--out", "c", "--steps", 8, *MIXED)
    assert done.returncode == 0 and done.stdout.count("continues in float32") == 1, done.stderr
    assert same_weights(weights(workdir / "b", 8), weights(workdir / "c", 8))


@mixes
def test_a_resumed_run_multiplies_as_it_began(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a machine whose torch rounds operands (a stand-in), of one that prefers our kernel, and of one that has no
    other: a run keeps its bits wherever that is possible."""
    wide = ["--d-model", 64, "--n-context", 64, "--batch-tokens", 128]

    def on(machine: Any, products: str) -> None:
        use_switch(monkeypatch, machine)
        monkeypatch.setenv(mixed_products.VARIABLE, products)

    def resumed(run: str) -> str:
        (workdir / run / "checkpoints" / "step-00000006" / FILE).write_text("{")
        done = handgrad("train", "--resume", "--out", run)
        assert done.returncode == 0 and "from step 4" in done.stdout, done.stderr
        return done.stdout

    try:
        for products in ("torch", "own"):
            on(Switch, products)
            for copy in "ab":
                train(*MIXED, *wide, "--out", products + copy)
            assert settings(products + "a")["mixed_products"] == products
        assert not same_weights(weights(workdir / "torcha", 6), weights(workdir / "owna", 6)), (
            "one of both computed all"
        )
        for products, other in (("torch", "own"), ("own", "torch")):
            on(Switch, other)
            assert "bits differ" not in resumed(products + "b")
            assert same_weights(weights(workdir / f"{products}a", 6), weights(workdir / f"{products}b", 6))
        on(nullcontext, "own")
        assert resumed("torchb").count("this machine has only ours: the bits differ") == 1
        assert settings("torchb")["mixed_products"] == "torch", "it can return"
    finally:
        forget()


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ({"HANDGRAD_CFLAGS": "-mno-avx512bf16 -O0"}, "has no AVX512_BF16"),  # compiled in a quarter of the time
        ({"HANDGRAD_KERNELS": "0"}, "HANDGRAD_KERNELS=0 switches kernels off"),
    ],
)
def test_why_not(variable: dict[str, str], reason: str, tmp_path: Path) -> None:
    if "x86" not in os.uname().machine and "HANDGRAD_CFLAGS" in variable:
        pytest.skip("the flag is that of compilers for x86")
    script = "from handgrad.model.precision import without_mixing; print(without_mixing('mixed'))"
    environment = os.environ | variable | {"HANDGRAD_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mixed precision needs products of bfloat16, and ") and reason in done.stdout
    assert done.stdout.endswith("; computing in float32\n") and len(done.stdout) < 160


@pytest.mark.long
def test_masked_instructions(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user masks them: one line, and the bits of float32."""
    if "x86" not in os.uname().machine:
        pytest.skip("the flag is that of compilers for x86")
    monkeypatch.setenv("HANDGRAD_CFLAGS", "-mno-avx512bf16 -O0")  # compiled in a quarter of the time
    commands: list[list[object]] = [
        ["train", "--data", "text.txt", "--steps", 2, *SMALL, *OFTEN],
        ["finetune", *TUNE, "--steps", 2, *OFTEN],
        ["generate", "--model", "base", "--prompt", "3 + 1 =", "--max-new-tokens", 4],
    ]
    for name, *options in commands:
        found = []
        for precision in ("mixed", "float32"):
            out = [] if name == "generate" else ["--out", f"{name}-{precision}"]
            done = run_processes(1, name, *options, *out, "--precision", precision)
            assert done.returncode == 0, done.stderr
            said = (done.stdout + done.stderr).splitlines()
            lines = [line for line in said if "bfloat16" in line]
            assert len(lines) == (precision == "mixed"), said
            assert all("it has no AVX512_BF16; computing in float32" in line for line in lines)
            found.append(weights(workdir / f"{name}-{precision}", 2) if out else {"": done.stdout})
        assert same_weights(*found) if out else found[0] == found[1]


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--precision", "half"], '--precision must be float32 or mixed, not "half"'),
        (
            ["train", *MIXED, "--dtype", "bfloat16"],
            "--precision mixed computes with weights in float32: leave out --dtype",
        ),
        (["finetune", *TUNE, *MIXED, "--dtype", "float64"], "leave out --dtype float64, or --precision"),
        (["plan", "--precision", "float32", "--dtype", "bfloat16"], "--precision float32 computes with weights in"),
        (["generate", "--model", "base", "--precision", "bfloat16"], "--precision must be float32 or mixed"),
        (["verify", *MIXED], "--precision is that of a model: give --model as well"),
    ],
    ids=str,
)
def test_refused(workdir: Path, arguments: list[object], message: str) -> None:
    done = handgrad(*arguments)
    assert done.returncode == 1 and message in done.stderr, done.stderr


def test_refused_in_python(workdir: Path) -> None:
    for wrong in ({"dtype": torch.bfloat16}, {"dtype": "float64"}):
        with pytest.raises(
            hg.HandgradError, match=r"precision='mixed' computes with weights in float32: leave out dtype"
        ):
            hg.load("base", precision="mixed", **wrong)  # type: ignore[arg-type]
        with pytest.raises(hg.HandgradError, match="computes with weights in float32"):
            hg.GPT(hg.preset("nano"), precision="mixed", **wrong)  # type: ignore[arg-type]
    model = hg.load("base", precision="mixed")
    with pytest.raises(hg.HandgradError, match="mixed precision needs a float32 model"):
        model.to(torch.float64)
    model.precision = "float32"
    assert model.double().precision == "float64"
