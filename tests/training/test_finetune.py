"""handgrad finetune, merge and convert from the command line; results are loaded by peft and transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import handgrad as hg
from conftest import error_of, handgrad, perturb, run_processes, save_with_bytes, succeed, use_empty_cache
from handgrad import lora, optim
from handgrad.display.run_progress import Silent
from handgrad.files.manifest import FILE
from handgrad.lora import merge_record
from handgrad.proof.oracles import relative_error
from handgrad.text.tokenizer import FORMAT
from handgrad.training import finetune
from handgrad.training.config import FinetuneOptions
from handgrad.training.distributed import Ranks
from handgrad.training.loop import take_step
from handgrad.training.run import Run
from handgrad.training.run_plan import plan_job

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BASE = ["--model", "base", "--data", "data.jsonl"]
FINETUNE = ["finetune", *BASE]
QUICK = ["--batch-examples", 5, "--sample-tokens", 4, "--rank", 2]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a small model in base/ and data.jsonl."""
    use_empty_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    save_with_bytes(hg.GPT(hg.preset("nano", n_context=48, d_model=16, n_heads=2, n_blocks=2)), tmp_path / "base")
    write_lines(
        "data.jsonl", *({"prompt": f"{i}+{i}=", "completion": f"{2 * i} bottles"[: 4 + i % 6]} for i in range(40))
    )
    return tmp_path


def write_lines(name: str, *lines: object) -> None:
    Path(name).write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))


def adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def finetune_options(**options: Any) -> FinetuneOptions:
    given = {"model": "base", "data": ("data.jsonl",), "rank": 2, "steps": 10, "batch_examples": 5}
    return FinetuneOptions.parse(given | options)


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore")
def test_finetune_writes_an_adapter_that_peft_loads(workdir: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done = succeed(*FINETUNE, "--out", "run", "--lr", 0.05, *QUICK)
    for text in ("examples", "targets", "0+0=«0 bo»", "adapter run/adapter", "report  run/report.html"):
        assert text in done.stdout, text
    run = Run(workdir / "run")
    evaluations = [r for r in run.records() if "val_loss" in r]
    losses = [r["val_loss"] for r in evaluations]
    assert losses[-1] < losses[0] - 0.1
    assert [r["step"] for r in evaluations] == [0, 5, 10, 15, 20, 22], "not after every step of a short run"
    assert all(r["sample"].startswith(r["prompt"]) and r["prompt"].endswith("=") for r in evaluations)
    assert "prompt ▸ continuation" in done.stdout and f"{evaluations[0]['prompt']}▸" in done.stdout
    assert f"{evaluations[0]['prompt']}▸" in (workdir / "run" / "report.html").read_text()
    assert {f.name for f in (workdir / "run" / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", FILE, FORMAT
    }  # fmt: skip
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "run/adapter").eval()
    ours = hg.load("run/adapter")
    tokens = torch.randint(256, (2, 9))
    assert relative_error(ours.logits(tokens), theirs(input_ids=tokens).logits) < 1e-5
    assert torch.equal(hg.load("run").logits(tokens), ours.logits(tokens)), (
        "run/adapter must be the best checkpoint of the run"
    )
    shown = handgrad("generate", "--model", "run", "--prompt", "3+3=", "--max-new-tokens", 4)
    assert shown.returncode == 0 and shown.stdout.startswith("3+3=")


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--dora", "--dropout", 0.2],
        ["--full"],
        ["--full", "--dtype", "float64"],
        ["--update-inside", "--dropout", 0.2, "--bias", "all"],
        ["--targets", "lm_head"],
        ["--optimizer", "muon", "--dora"],
    ],
    ids=lambda options: " ".join(map(str, options)) or "plain",
)
@pytest.mark.some_cases(4)
def test_resume_is_bit_identical(workdir: Path, options: list[object]) -> None:
    quick = ["--batch-examples", 5, "--sample-tokens", 0, "--steps", 9, "--save-every", 4, *options]
    for name in "ab":
        succeed(*FINETUNE, "--out", name, *quick)
    (workdir / "b" / "checkpoints" / "step-00000009" / FILE).write_text("{")
    resumed = handgrad("finetune", "--resume", "--out", "b")
    assert resumed.returncode == 0 and "from step 8" in resumed.stdout, resumed.stderr
    file = "model.safetensors" if "--full" in options else "adapter_model.safetensors"
    a, b = (load_file(workdir / name / "checkpoints" / "step-00000009" / file) for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


SYSTEM = [
    {"prompt": f"Answer briefly and well. {i}+{i}=", "completion": f"{2 * i} bottles"[: 4 + i % 6]} for i in range(20)
]


def test_what_examples_have_in_common_is_computed_once(workdir: Path) -> None:
    """The weights are those of a run that does not share, up to rounding; one that was begun without sharing, by a version
    that did not know it, goes on without."""
    write_lines("data.jsonl", *SYSTEM)
    quick = ["--dtype", "float64", "--batch-examples", 5, "--sample-tokens", 0, "--steps", 3, "--rank", 2]
    once = succeed(*FINETUNE, "--out", "once", *quick)
    alone = succeed(*FINETUNE, "--out", "alone", "--no-share-prefixes", *quick)
    said = re.search(r"data: (\d+) % of the tokens are prefixes that examples of a batch have in common", once.stdout)
    assert said is not None and "in common" not in alone.stdout
    runs = {name: json.loads(Path(name, "run.json").read_text()) for name in ("once", "alone")}
    assert [run["training"]["share_prefixes"] for run in runs.values()] == [True, False]
    found = finetune.prepare(finetune_options(dtype="float64"), Ranks(), Silent(Console()), None)
    sequences = [found.training.batch(i, 5) for i in range(0, found.training.per_epoch - 4, 5)]
    saved = 1 - sum(sum(len(p.ids) for p in found.pieces(*x)) for x in sequences) / sum(len(x[0]) for x in sequences)
    assert runs["once"]["shared_tokens"] == saved > 0.4 and int(said[1]) == round(100 * saved)
    assert "tokens in common prefixes, computed once" in Path("once/report.html").read_text()
    weights = [adapter_weights(Path(name, "adapter")) for name in runs]
    assert max(relative_error(weights[0][name], x) for name, x in weights[1].items()) < 1e-9
    others = finetune.prepare(finetune_options(dtype="float64", share_prefixes=False), Ranks(), Silent(Console()), None)
    plans = plan_job(found), plan_job(others)
    assert plans[0].forward_flop < 0.7 * plans[1].forward_flop and plans[0].bytes_saved < plans[1].bytes_saved
    del runs["alone"]["training"]["share_prefixes"]
    Path("alone/run.json").write_text(json.dumps(runs["alone"]))
    succeed("finetune", "--resume", "--out", "alone", "--steps", 4)
    assert json.loads(Path("alone/run.json").read_text())["training"]["share_prefixes"] is False
    message = error_of("finetune", "--resume", "--out", "alone", "--share-prefixes", "--steps", 5)
    assert "cannot change when a run is resumed" in message


def test_nothing_is_shared_with_dropout(workdir: Path) -> None:
    """A row that stands for several examples would have one mask for all of them."""
    write_lines("data.jsonl", *SYSTEM)
    job = finetune.prepare(finetune_options(dropout=0.1), Ranks(), Silent(Console()), None)
    assert not job.options.share_prefixes and job.sharing is None


def test_muon_is_named_and_planned(workdir: Path) -> None:
    """Of the adapters' factors the state has one copy, of their magnitudes and of layers trained in full two."""
    muon = ["--optimizer", "muon", "--dora", "--modules-to-save", "mlp.c_proj,ln_f", "--targets", "c_attn"]
    succeed(*FINETUNE, "--out", "run", "--steps", 3, "--sample-tokens", 0, *muon)
    assert json.loads(Path("run/run.json").read_text())["training"]["optimizer"] == "muon"
    assert "<td>optimizer</td><td>muon</td>" in Path("run/report.html").read_text()
    options = finetune_options(optimizer="muon", dora=True, modules_to_save=("mlp.c_proj", "ln_f"), targets=("c_attn",))
    job = finetune.prepare(options, Ranks(), Silent(Console()), None)
    take_step(job, Ranks())
    stored = sum(x.nbytes for x in optim.state_of(job.optimizer, job.names).values() if x.ndim)
    assert plan_job(job).bytes_optimizer == stored


def test_muon_without_matrices_is_refused(workdir: Path) -> None:
    message = error_of(*FINETUNE, "--out", "run", "--steps", 3, "--optimizer", "muon", "--targets", "lm_head")
    assert "none of them trains here: choose AdamW" in message and not Path("run").exists()


@pytest.mark.filterwarnings("ignore")
def test_full_finetune_trains_all_weights_and_loads_in_transformers(workdir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = handgrad(*FINETUNE, "--out", "run", "--full", "--epochs", 1)
    assert done.returncode == 0 and "model   run/model" in done.stdout, done.stderr
    theirs = AutoModelForCausalLM.from_pretrained("run/model")
    tokens = AutoTokenizer.from_pretrained("run/model")("3+3=", return_tensors="pt")["input_ids"]
    ours, base = hg.load("run/model"), hg.load("base")
    assert relative_error(ours.logits(tokens), theirs(tokens).logits) < 1e-5
    assert all(not torch.equal(p, q) for p, q in zip(ours.parameters(), base.parameters(), strict=True) if p.ndim > 1)


def test_early_stopping_keeps_the_best_step(workdir: Path) -> None:
    done = handgrad(
        *FINETUNE, "--out", "run", "--lr", 5, "--clip", 0, "--steps", 60,
        "--eval-every", 2, "--patience", 3, "--schedule", "constant", "--warmup", 0, *QUICK,
    )  # fmt: skip
    assert done.returncode == 0 and "no longer fell" in done.stdout, done.stderr
    losses = {r["step"]: r["val_loss"] for r in Run(workdir / "run").records() if "val_loss" in r}
    best = min(losses, key=losses.__getitem__)
    assert max(losses) == best + 6 < 60
    resumed = handgrad("finetune", "--resume", "--out", "run")
    assert resumed.returncode == 0 and "no longer fell" in resumed.stdout
    assert "--patience" in handgrad("finetune", "--resume", "--out", "run", "--patience", 2).stderr
    job = finetune.prepare(finetune_options(), Ranks(), Silent(Console()))
    tokens, targets, lengths = job.validation.batch(0, 4, shuffle=False)
    assert hg.load("run/adapter").loss(tokens, targets, lengths) == pytest.approx(losses[best], rel=1e-5)


def test_finetune_continues_from_an_adapter(workdir: Path) -> None:
    succeed(*FINETUNE, "--out", "one", *QUICK)
    succeed("finetune", "--model", "one", "--data", "data.jsonl", "--out", "two", "--epochs", 1)
    one, two = adapter_weights(workdir / "one" / "adapter"), adapter_weights(workdir / "two" / "adapter")
    assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in two.items()}
    assert any(not torch.equal(one[n], two[n]) for n in one)
    wrong = handgrad("finetune", "--model", "one", "--data", "data.jsonl", "--out", "three", "--rank", 4)
    assert "is an adapter" in wrong.stderr and not (workdir / "three").exists()
    wrong = handgrad("train", "--model", "one", "--data", "data.jsonl", "--out", "three")
    assert "merge it first" in wrong.stderr and not (workdir / "three").exists()


def test_chat_template_is_used_and_saved_with_the_adapter(workdir: Path) -> None:
    Path("chat.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    write_lines("chats.jsonl", *({"messages": turns} for _ in range(8)))
    arguments = ["finetune", "--model", "base", "--data", "chats.jsonl", "--steps", 2, *QUICK]
    without = handgrad(*arguments, "--out", "no")
    assert "chats.jsonl, line 1" in without.stderr and "--chat-template" in without.stderr
    Path("bytes.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    assert "bytes.jinja is not UTF-8" in error_of(*arguments, "--out", "no", "--chat-template", "bytes.jinja")
    assert not (workdir / "no").exists()
    done = handgrad(*arguments, "--out", "run", "--chat-template", "chat.jinja")
    assert done.returncode == 0 and "<user>hi<assistant>«hello⏎" in done.stdout, done.stdout
    assert (workdir / "run" / "adapter" / "chat_template.jinja").read_text() == TEMPLATE
    # continuing from the run needs no --chat-template: it is saved there
    succeed("finetune", "--model", "run", "--data", "chats.jsonl", "--steps", 1, "--out", "continued")


def test_broken_data_line_is_named_and_nothing_is_written(workdir: Path) -> None:
    """tests/text/test_records.py has every kind of them."""
    write_lines("bad.jsonl", *[{"text": "good"}] * 2, {"prompt": 3, "completion": "x"})
    done = handgrad("finetune", "--model", "base", "--data", "bad.jsonl", "--out", "run")
    assert done.returncode == 1 and "bad.jsonl, line 3: prompt is" in done.stderr
    assert not (workdir / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing"), (["--model", "base"], "--data is missing"),
        (["--model", "nowhere/at/all", "--data", "data.jsonl"], "not a directory"),
        ([*BASE, "--targets", "q_proj"], "q_proj"),
        ([*BASE, "--rank", "0"], "--rank must be an integer of at least 1"),
        ([*BASE, "--alpha", "-1"], "--alpha must be a number above 0"),
        ([*BASE, "--full", "--rank", "8"], "--full"),
        ([*BASE, "--loss-on", "x"], "--loss-on"),
        ([*BASE, "--batch-examples", "0"], "--batch-examples"),
        (["--model", "base", "--data", "none.jsonl"], "none.jsonl"),
        ([*BASE, "--chat-template", "none"], "none"),
        ([*BASE, "--val-share", "0", "--patience", "1"], "--patience"),
        (["--resume"], "no run to resume"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_rejected(workdir: Path, arguments: list[str], message: str) -> None:
    assert message in error_of("finetune", *arguments)
    assert not (workdir / "runs").exists()


def test_an_adapter_is_not_merged_twice(workdir: Path) -> None:
    succeed(*FINETUNE, "--out", "run", "--steps", 1, *QUICK)
    succeed("merge", "run", "--out", "merged")
    done = handgrad("merge", "run", "--model", "merged", "--out", "twice")
    assert "already contains" in done.stderr and not (workdir / "twice").exists()


def test_options_of_pretraining_are_unknown_to_finetune(workdir: Path) -> None:
    for name, value in {"n_blocks": 3, "tokenizer": "gpt2", "batch_tokens": 64, "text_field": "x"}.items():
        with pytest.raises(hg.HandgradError, match=f"unknown option '{name}'; available: ") as error:
            hg.finetune("base", "data.jsonl", **{name: value})
        assert name not in str(error.value).partition("available")[2]
        Path("c.toml").write_text(f"{name} = {json.dumps(value)}\n")
        assert f"unknown option '{name}'" in error_of(*FINETUNE, "--config", "c.toml")
    with pytest.raises(hg.HandgradError, match=r"^steps must be an integer of at least 1"):
        hg.finetune("base", "data.jsonl", steps=0)
    with pytest.raises(hg.HandgradError, match="give paths of files, not 3"):
        hg.finetune("base", 3)  # type: ignore[arg-type]


def test_a_tokenizer_with_too_many_ids_is_rejected_before_data_is_read(workdir: Path) -> None:
    shape = {"n_vocab": 100, "n_context": 48, "d_model": 16, "n_heads": 2, "n_blocks": 1}
    save_with_bytes(hg.GPT(hg.preset("nano", **shape)), workdir / "small")
    for command in ("finetune", "train"):
        done = handgrad(command, "--model", "./small", "--data", "data.jsonl")
        assert "do not belong together" in done.stderr and done.stdout == "", done.stdout


def test_config_file_sets_adapter_options(workdir: Path) -> None:
    Path("c.toml").write_text(
        'model = "base"\ndata = "data.jsonl"\ntargets = ["c_attn", "lm_head"]\nrank = 3\nsteps = 2\n'
    )
    succeed("finetune", "--config", "c.toml", "--out", "run", "--rank", 1)
    written = json.loads((workdir / "run" / "adapter" / "adapter_config.json").read_text())
    assert written["r"] == 1 and written["target_modules"] == ["c_attn", "lm_head"]


# ── loss curve and several processes ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore")
def test_loss_curve_matches_peft(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps on packed batches equal ten steps of peft on padded batches, from equal factors and examples."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    job = finetune.prepare(finetune_options(dtype="float64", dora=True, clip=0.0, lr=0.01), Ranks(), Silent(Console()))
    lora.save(job.model, "start")
    base = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float64)
    theirs = PeftModel.from_pretrained(base, "start", is_trainable=True).double().eval()
    optimizer = torch.optim.AdamW(
        [p for p in theirs.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0, betas=(0.9, 0.99)
    )
    for step in range(10):
        for options in (*job.optimizer.param_groups, *optimizer.param_groups):
            options["lr"] = 0.01
        tokens, targets, lengths = job.training.batch(step * job.batch, job.batch)
        pad = torch.nn.utils.rnn.pad_sequence
        logits = theirs(
            input_ids=pad(tokens.split(lengths), batch_first=True),
            attention_mask=pad([torch.ones(n) for n in lengths], batch_first=True),
        ).logits
        padded_targets = pad(targets.split(lengths), batch_first=True, padding_value=-100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), padded_targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ours = take_step(job, Ranks()).loss
        job.step += 1
        assert ours == pytest.approx(loss.item(), rel=1e-9), step
    theirs.save_pretrained("theirs")
    lora.save(job.model, "ours")
    a, b = adapter_weights(workdir / "ours"), adapter_weights(workdir / "theirs")
    assert all(relative_error(a[name], b[name]) < 1e-8 for name in a)


def test_two_processes_train_the_same_weights(workdir: Path) -> None:
    arguments = [*FINETUNE, "--steps", "4", "--dtype", "float64"]
    arguments += ["--batch-examples", "5", "--sample-tokens", "0"]
    succeed(*arguments, "--out", "one")
    two = run_processes(2, *arguments, "--out", "two")
    assert two.returncode == 0, two.stderr
    a, b = adapter_weights(workdir / "one" / "adapter"), adapter_weights(workdir / "two" / "adapter")
    assert set(a) == set(b) and all(a[name].norm() > 0 for name in a), "a factor was not trained"
    assert all(relative_error(a[name], b[name]) < 1e-10 for name in a)


# ── merge and convert ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"targets": ("lm_head", "c_attn")}, {"targets": ("lm_head",), "dora": True}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.some_cases(3)
def test_merge_and_undo(workdir: Path, options: dict[str, Any], dtype: str) -> None:
    base = hg.load("base")
    hg.save(base, "stored", dtype=getattr(torch, dtype))
    model = hg.load("stored", dtype=torch.float32)
    lora.inject(model, 2, **options)
    perturb(model, scale=0.1)
    lora.save(model, "adapter")
    succeed("merge", "adapter", "--out", "merged")
    merged, tokens = hg.load("merged"), torch.randint(256, (2, 9))
    assert merged.transformer.wte.weight.dtype == getattr(torch, dtype)
    assert torch.equal(merged.transformer.wte.weight, hg.load("stored").transformer.wte.weight)
    assert merged.config.tied == ("targets" not in options)
    if dtype == "float32":
        assert relative_error(merged.logits(tokens), model.logits(tokens)) < 1e-5
        succeed("merge", "adapter", "--model", "merged", "--undo", "--out", "back")
        assert relative_error(hg.load("back").logits(tokens), base.logits(tokens)) < 1e-4
        assert hg.load("back").config.tied
    if options.get("dora"):
        (workdir / "merged" / merge_record.FILE).unlink()
        assert merge_record.FILE in error_of("merge", "adapter", "--model", "merged", "--undo", "--out", "lost")


@pytest.mark.filterwarnings("ignore")
def test_merged_peft_head_adapter_can_be_undone(workdir: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained("base")
    theirs = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM", use_dora=True))
    with torch.no_grad():
        theirs.base_model.model.lm_head.lora_B["default"].weight.normal_()
    theirs.save_pretrained("adapter")
    succeed("merge", "adapter", "--model", "base", "--out", "merged")
    succeed("merge", "adapter", "--model", "merged", "--undo", "--out", "back")
    tokens = torch.randint(256, (2, 9))
    assert relative_error(hg.load("back").logits(tokens), hg.load("base").logits(tokens)) < 1e-5
    not_merged = handgrad("merge", "adapter", "--model", "base", "--undo", "--out", "never")
    assert "no adapter was merged into it" in not_merged.stderr
    succeed(*FINETUNE, "--out", "run", "--steps", 1)
    other = handgrad("merge", "run", "--model", "merged", "--undo", "--out", "never")
    assert "is not the adapter that was merged into" in other.stderr and not (workdir / "never").exists()


def test_resume_rejects_changed_validation_data(workdir: Path) -> None:
    write_lines("val.jsonl", {"prompt": "1+1=", "completion": "2"})
    succeed(*FINETUNE, "--val-data", "val.jsonl", "--out", "run", "--steps", 2)
    write_lines("val.jsonl", {"prompt": "1+1=", "completion": "3"})
    assert "validation data differs from what" in error_of("finetune", "--resume", "--out", "run", "--steps", 4)


def test_merge_that_changes_the_logits_writes_nothing(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    succeed(*FINETUNE, "--out", "run", *QUICK)
    monkeypatch.setattr("handgrad.lora.merging._sum", lambda adapter: 1.01 * adapter.base.effective_weight().double())
    assert "the logits differ by" in error_of("merge", "run", "--out", "merged") and not (workdir / "merged").exists()


def test_invalid_merge_and_convert_arguments_are_rejected(workdir: Path) -> None:
    succeed(*FINETUNE, "--out", "run", "--steps", 1)
    for arguments, message in (
        (["merge", "base", "--out", "x"], "not an adapter"),
        (["merge", "run", "--out", "base"], "exists already"),
        (["merge", "run", "--out", "x", "--undo"], "--model"),
        (["merge", "run", "--out", "x", "--dtype", "int8"], "--dtype"),
        (["convert", "run", "--out", "x"], "handgrad merge"),
        (["convert", "base", "--out", "run"], "exists already"),
        (["convert", "base", "--out", "x", "--shard-size", "big"], "--shard-size"),
    ):
        assert message in error_of(*arguments)
        assert not (workdir / "x").exists()
    hg.save(hg.GPT(hg.preset("nano", d_model=24, n_heads=2, n_blocks=2)), "other")
    wrong = handgrad("merge", "run", "--model", "other", "--out", "x")
    assert "belongs to another model" in wrong.stderr and not (workdir / "x").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_converted_model(workdir: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    done = handgrad("convert", "base", "--out", "new", "--dtype", dtype, "--shard-size", "20KB")
    assert done.returncode == 0 and len(list((workdir / "new").glob("model-*.safetensors"))) > 1, done.stderr
    theirs = AutoModelForCausalLM.from_pretrained("new", dtype=torch.float32)
    tokens = torch.randint(256, (2, 9))
    assert relative_error(hg.load("new", dtype=torch.float32).logits(tokens), theirs(tokens).logits) < 1e-5
    assert (workdir / "new" / "tokenizer.json").exists()


def test_convert_keeps_extra_config_fields(workdir: Path) -> None:
    (workdir / "base" / FILE).unlink()  # as a model written by another tool
    file = workdir / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 7, "resid_pdrop": 0.3}))
    (workdir / "base" / "generation_config.json").write_text('{"eos_token_id": 7}')
    succeed("convert", "base", "--out", "new", "--dtype", "float16")
    config = json.loads((workdir / "new" / "config.json").read_text())
    assert config["eos_token_id"] == 7 and config["resid_pdrop"] == 0.3 and config["dtype"] == "float16"
    assert json.loads((workdir / "new" / "generation_config.json").read_text()) == {"eos_token_id": 7}
