"""handgrad finetune, merge and convert as a user meets them; peft and transformers open what comes out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

import handgrad as hg
from conftest import group
from handgrad import adapters
from handgrad.adapters import merged_files
from handgrad.cli.app import app
from handgrad.files.manifest import FILE
from handgrad.proof.oracles import relative_error
from handgrad.text import tokenizer
from handgrad.training import finetune
from handgrad.training.config import FinetuneOptions
from handgrad.training.distributed import Ranks
from handgrad.training.loop import take_step
from handgrad.training.run import Run

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUICK = ["--batch-examples", 5, "--sample-tokens", 4, "--rank", 2]


def handgrad(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model and its data, in which commands are run."""
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = hg.GPT(hg.preset("nano", n_context=48, d_model=16, n_heads=2, n_blocks=2))
    hg.save(model, tmp_path / "base")
    tokenizer.make("bytes", []).write(tmp_path / "base")
    write("data.jsonl", *({"prompt": f"{i}+{i}=", "completion": f"{2 * i} bottles"[: 4 + i % 6]} for i in range(40)))
    return tmp_path


def write(name: str, *lines: object) -> None:
    Path(name).write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))


def adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def config(**options: Any) -> FinetuneOptions:
    given = {"model": "base", "data": ("data.jsonl",), "rank": 2, "steps": 10, "batch_examples": 5}
    return FinetuneOptions.parse(given | options)


class Quiet:
    def __getattr__(self, name: str) -> Any:
        return lambda *a: lambda n: None


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_comes_out_that_peft_opens(place: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done = handgrad("finetune", "--model", "base", "--data", "data.jsonl", "--out", "run", "--lr", 0.05, *QUICK)
    assert done.exit_code == 0, done.exception
    for said in ("examples", "learned", "0+0=«0 bo»", "adapter run/adapter", "report  run/report.html"):
        assert said in done.stdout, said
    run = Run(place / "run")
    losses = [r["val_loss"] for r in run.records() if "val_loss" in r]
    assert losses[-1] < losses[0] - 0.1
    assert {f.name for f in (place / "run" / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", FILE
    }  # fmt: skip
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "run/adapter").eval()
    ours = hg.load("run/adapter")
    tokens = torch.randint(256, (2, 9))
    assert relative_error(ours.logits(tokens), theirs(input_ids=tokens).logits) < 1e-5
    assert torch.equal(hg.load("run").logits(tokens), ours.logits(tokens)), "the run's best is the adapter delivered"
    shown = handgrad("generate", "--model", "run", "--prompt", "3+3=", "--tokens", 4)
    assert shown.exit_code == 0 and shown.stdout.startswith("3+3=")


@pytest.mark.parametrize(
    "options",
    [[], ["--dora", "--dropout", 0.2], ["--full"], ["--update-inside", "--dropout", 0.2], ["--targets", "lm_head"]],
    ids=lambda options: " ".join(map(str, options)) or "plain",
)
def test_resuming_is_exact(place: Path, options: list[object]) -> None:
    quick = ["--batch-examples", 5, "--sample-tokens", 0, "--steps", 9, "--save-every", 4, *options]
    for name in "ab":
        done = handgrad("finetune", "--model", "base", "--data", "data.jsonl", "--out", name, *quick)
        assert done.exit_code == 0, done.exception
    (place / "b" / "checkpoints" / "step-00000009" / FILE).write_text("{")
    again = handgrad("finetune", "--resume", "--out", "b")
    assert again.exit_code == 0 and "from step 8" in again.stdout, again.exception
    file = "model.safetensors" if "--full" in options else "adapter_model.safetensors"
    a, b = (load_file(place / name / "checkpoints" / "step-00000009" / file) for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.filterwarnings("ignore")
def test_all_weights_train_and_transformers_opens_them(place: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = handgrad("finetune", "--model", "base", "--data", "data.jsonl", "--out", "run", "--full", "--epochs", 1)
    assert done.exit_code == 0 and "model   run/model" in done.stdout, done.exception
    theirs = AutoModelForCausalLM.from_pretrained("run/model")
    tokens = AutoTokenizer.from_pretrained("run/model")("3+3=", return_tensors="pt")["input_ids"]
    ours, base = hg.load("run/model"), hg.load("base")
    assert relative_error(ours.logits(tokens), theirs(tokens).logits) < 1e-5
    assert all(not torch.equal(p, q) for p, q in zip(ours.parameters(), base.parameters(), strict=True) if p.ndim > 1)


def test_it_ends_early_and_keeps_the_best(place: Path) -> None:
    done = handgrad(
        "finetune", "--model", "base", "--data", "data.jsonl", "--out", "run", "--lr", 5, "--clip", 0, "--steps", 60,
        "--eval-every", 2, "--patience", 3, "--schedule", "constant", "--warmup", 0, *QUICK,
    )  # fmt: skip
    assert done.exit_code == 0 and "no longer fell" in done.stdout, done.exception
    losses = {r["step"]: r["val_loss"] for r in Run(place / "run").records() if "val_loss" in r}
    best = min(losses, key=losses.__getitem__)
    assert max(losses) == best + 6 < 60
    again = handgrad("finetune", "--resume", "--out", "run")
    assert again.exit_code == 0 and "no longer fell" in again.stdout
    assert "--patience" in str(handgrad("finetune", "--resume", "--out", "run", "--patience", 2).exception)
    tokens, targets, lengths = finetune.prepare(config(), Ranks(), Quiet()).validation.batch(0, 4, shuffle=False)
    assert hg.load("run/adapter").loss(tokens, targets, lengths) == pytest.approx(losses[best], rel=1e-5)


def test_training_goes_on_with_an_adapter(place: Path) -> None:
    assert handgrad("finetune", "--model", "base", "--data", "data.jsonl", "--out", "one", *QUICK).exit_code == 0
    more = handgrad("finetune", "--model", "one", "--data", "data.jsonl", "--out", "two", "--epochs", 1)
    assert more.exit_code == 0, more.exception
    one, two = adapter_weights(place / "one" / "adapter"), adapter_weights(place / "two" / "adapter")
    assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in two.items()}
    assert any(not torch.equal(one[n], two[n]) for n in one)
    wrong = handgrad("finetune", "--model", "one", "--data", "data.jsonl", "--out", "three", "--rank", 4)
    assert "is an adapter" in str(wrong.exception) and not (place / "three").exists()
    wrong = handgrad("train", "--model", "one", "--data", "data.jsonl", "--out", "three")
    assert "merge it first" in str(wrong.exception) and not (place / "three").exists()


def test_conversations_by_a_template_that_stays_with_the_result(place: Path) -> None:
    Path("chat.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    write("chats.jsonl", *({"messages": turns} for _ in range(8)))
    arguments = ["finetune", "--model", "base", "--data", "chats.jsonl", "--steps", 2, *QUICK]
    without = handgrad(*arguments, "--out", "no")
    assert "chats.jsonl, line 1" in str(without.exception) and "--chat-template" in str(without.exception)
    assert not (place / "no").exists()
    done = handgrad(*arguments, "--out", "run", "--chat-template", "chat.jinja")
    assert done.exit_code == 0 and "<user>hi<assistant>«hello⏎" in done.stdout, done.stdout
    assert (place / "run" / "adapter" / "chat_template.jinja").read_text() == TEMPLATE
    # the folder is enough to go on: the template comes with it
    assert handgrad("finetune", "--model", "run", "--data", "chats.jsonl", "--steps", 1, "--out", "on").exit_code == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a"', "line 3 is not valid JSON"),
        ({"prompt": "a", "completion": ""}, "line 3: the completion is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"question": "a"}, "line 3: the record has question"),
        ({"prompt": 3, "completion": "x"}, "line 3: prompt is"),
    ],
)
def test_a_broken_line_is_named_and_nothing_is_left(place: Path, line: object, says: str) -> None:
    Path("chat.jinja").write_text(TEMPLATE)
    write("bad.jsonl", *[{"text": "good"}] * 2, line)
    done = handgrad(
        "finetune", "--model", "base", "--data", "bad.jsonl", "--out", "run", "--chat-template", "chat.jinja"
    )
    assert isinstance(done.exception, hg.HandgradError)
    assert says in str(done.exception) and "bad.jsonl" in str(done.exception)
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model is missing"), (["--model", "base"], "--data is missing"),
        (["--model", "nowhere/at/all", "--data", "data.jsonl"], "not a directory"),
        (["--model", "base", "--data", "data.jsonl", "--targets", "q_proj"], "q_proj"),
        (["--model", "base", "--data", "data.jsonl", "--rank", "0"], "rank"),
        (["--model", "base", "--data", "data.jsonl", "--full", "--rank", "8"], "--full"),
        (["--model", "base", "--data", "data.jsonl", "--loss-on", "x"], "--loss-on"),
        (["--model", "base", "--data", "data.jsonl", "--batch-examples", "0"], "--batch-examples"),
        (["--model", "base", "--data", "none.jsonl"], "none.jsonl"),
        (["--model", "base", "--data", "data.jsonl", "--chat-template", "none"], "none"),
        (["--model", "base", "--data", "data.jsonl", "--val-share", "0", "--patience", "1"], "--patience"),
        (["--resume"], "no run to resume"),
    ],
)  # fmt: skip
def test_mistakes_are_named(place: Path, arguments: list[str], says: str) -> None:
    done = handgrad("finetune", *arguments)
    assert isinstance(done.exception, hg.HandgradError) and says in str(done.exception), done.exception
    assert not (place / "runs").exists()


def test_a_config_file_may_hold_the_adapters_options(place: Path) -> None:
    Path("c.toml").write_text(
        'model = "base"\ndata = "data.jsonl"\ntargets = ["c_attn", "lm_head"]\nrank = 3\nsteps = 2\n'
    )
    done = handgrad("finetune", "--config", "c.toml", "--out", "run", "--rank", 1)
    assert done.exit_code == 0, done.exception
    written = json.loads((place / "run" / "adapter" / "adapter_config.json").read_text())
    assert written["r"] == 1 and written["target_modules"] == ["c_attn", "lm_head"]


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore")
def test_the_curve_is_that_of_peft(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same examples, in the same order, from the same factors: ten steps of the loop and ten of peft, padded."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    job = finetune.prepare(config(dtype="float64", dora=True, clip=0.0, lr=0.01), Ranks(), Quiet())
    adapters.save(job.model, "start")
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
        answers = pad(targets.split(lengths), batch_first=True, padding_value=-100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ours = take_step(job, Ranks()).loss
        job.step += 1
        assert ours == pytest.approx(loss.item(), rel=1e-9), step
    theirs.save_pretrained("theirs")
    adapters.save(job.model, "ours")
    a, b = adapter_weights(place / "ours"), adapter_weights(place / "theirs")
    assert all(relative_error(a[name], b[name]) < 1e-8 for name in a)


def test_two_processes_train_the_same(place: Path) -> None:
    arguments = ["finetune", "--model", "base", "--data", "data.jsonl", "--steps", "4", "--dtype", "float64"]
    arguments += ["--batch-examples", "5", "--sample-tokens", "0"]
    assert handgrad(*arguments, "--out", "one").exit_code == 0
    two = group(2, *arguments, "--out", "two")
    assert two.returncode == 0, two.stderr
    a, b = adapter_weights(place / "one" / "adapter"), adapter_weights(place / "two" / "adapter")
    assert set(a) == set(b) and all(a[name].norm() > 0 for name in a), "every factor has learned"
    assert all(relative_error(a[name], b[name]) < 1e-10 for name in a)


# ── merge and convert ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"targets": ("lm_head", "c_attn")}, {"targets": ("lm_head",), "dora": True}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_and_unmerging(place: Path, options: dict[str, Any], dtype: str) -> None:
    base = hg.load("base")
    hg.save(base, "stored", dtype=getattr(torch, dtype))
    model = hg.load("stored", dtype=torch.float32)
    adapters.inject(model, 2, **options)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape))
    adapters.save(model, "adapter")
    done = handgrad("merge", "adapter", "--out", "merged")
    assert done.exit_code == 0, done.exception
    merged, tokens = hg.load("merged"), torch.randint(256, (2, 9))
    assert merged.transformer.wte.weight.dtype == getattr(torch, dtype)
    assert torch.equal(merged.transformer.wte.weight, hg.load("stored").transformer.wte.weight)
    assert merged.config.tied == ("targets" not in options)
    if dtype == "float32":
        assert relative_error(merged.logits(tokens), model.logits(tokens)) < 1e-5
        back = handgrad("merge", "adapter", "--model", "merged", "--undo", "--out", "back")
        assert back.exit_code == 0, back.exception
        assert relative_error(hg.load("back").logits(tokens), base.logits(tokens)) < 1e-4
        assert hg.load("back").config.tied
    if options.get("dora"):
        (place / "merged" / merged_files.FILE).unlink()
        lost = handgrad("merge", "adapter", "--model", "merged", "--undo", "--out", "lost")
        assert merged_files.FILE in str(lost.exception)


@pytest.mark.filterwarnings("ignore")
def test_a_head_adapter_of_peft_can_be_taken_out_again(place: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained("base")
    theirs = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM", use_dora=True))
    with torch.no_grad():
        theirs.base_model.model.lm_head.lora_B["default"].weight.normal_()
    theirs.save_pretrained("adapter")
    assert handgrad("merge", "adapter", "--model", "base", "--out", "merged").exit_code == 0
    back = handgrad("merge", "adapter", "--model", "merged", "--undo", "--out", "back")
    assert back.exit_code == 0, back.exception
    tokens = torch.randint(256, (2, 9))
    assert relative_error(hg.load("back").logits(tokens), hg.load("base").logits(tokens)) < 1e-5
    never = handgrad("merge", "adapter", "--model", "base", "--undo", "--out", "never")
    assert "no adapter was merged into it" in str(never.exception)
    assert handgrad("finetune", "--model", "base", "--data", "data.jsonl", "--out", "run", "--steps", 1).exit_code == 0
    other = handgrad("merge", "run", "--model", "merged", "--undo", "--out", "never")
    assert "is not the adapter that was merged into" in str(other.exception) and not (place / "never").exists()


def test_other_data_for_validation_is_noticed_on_resuming(place: Path) -> None:
    write("val.jsonl", {"prompt": "1+1=", "completion": "2"})
    done = handgrad("finetune", "--model", "base", "--data", "data.jsonl", "--val-data", "val.jsonl", "--out", "run",
                    "--steps", 2)  # fmt: skip
    assert done.exit_code == 0, done.exception
    write("val.jsonl", {"prompt": "1+1=", "completion": "3"})
    again = handgrad("finetune", "--resume", "--out", "run", "--steps", 4)
    assert "validation data differs from what" in str(again.exception)


def test_a_merge_that_changes_the_logits_writes_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert handgrad("finetune", "--model", "base", "--data", "data.jsonl", "--out", "run", *QUICK).exit_code == 0
    monkeypatch.setattr(
        "handgrad.adapters.merging._sum", lambda adapter: 1.01 * adapter.base.effective_weight().double()
    )
    done = handgrad("merge", "run", "--out", "merged")
    assert "the logits differ by" in str(done.exception) and not (place / "merged").exists()


def test_mistakes_of_merge_and_convert(place: Path) -> None:
    assert handgrad("finetune", "--model", "base", "--data", "data.jsonl", "--out", "run", "--steps", 1).exit_code == 0
    for arguments, says in (
        (["merge", "base", "--out", "x"], "not an adapter"),
        (["merge", "run", "--out", "base"], "exists already"),
        (["merge", "run", "--out", "x", "--undo"], "--model"),
        (["merge", "run", "--out", "x", "--dtype", "int8"], "--dtype"),
        (["convert", "run", "--out", "x"], "handgrad merge"),
        (["convert", "base", "--out", "run"], "exists already"),
        (["convert", "base", "--out", "x", "--shard-size", "big"], "--shard-size"),
    ):
        done = handgrad(*arguments)
        assert isinstance(done.exception, hg.HandgradError) and says in str(done.exception), done.exception
        assert not (place / "x").exists()
    hg.save(hg.GPT(hg.preset("nano", d_model=24, n_heads=2, n_blocks=2)), "other")
    wrong = handgrad("merge", "run", "--model", "other", "--out", "x")
    assert "belongs to another model" in str(wrong.exception) and not (place / "x").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.filterwarnings("ignore")
def test_a_converted_model_opens_in_transformers(place: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    done = handgrad("convert", "base", "--out", "new", "--dtype", dtype, "--shard-size", "20KB")
    assert done.exit_code == 0 and len(list((place / "new").glob("model-*.safetensors"))) > 1, done.exception
    theirs = AutoModelForCausalLM.from_pretrained("new", dtype=torch.float32)
    tokens = torch.randint(256, (2, 9))
    assert relative_error(hg.load("new", dtype=torch.float32).logits(tokens), theirs(tokens).logits) < 1e-5
    assert (place / "new" / "tokenizer.json").exists()


def test_what_a_directory_says_beyond_the_shape_comes_along(place: Path) -> None:
    (place / "base" / FILE).unlink()  # as if another tool had written it
    file = place / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 7, "resid_pdrop": 0.3}))
    (place / "base" / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert handgrad("convert", "base", "--out", "new", "--dtype", "float16").exit_code == 0
    said = json.loads((place / "new" / "config.json").read_text())
    assert said["eos_token_id"] == 7 and said["resid_pdrop"] == 0.3 and said["dtype"] == "float16"
    assert json.loads((place / "new" / "generation_config.json").read_text()) == {"eos_token_id": 7}
