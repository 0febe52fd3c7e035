"""handgrad train from the command line: runs, resume, signals, errors, several processes, and its loss curve."""

import json
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bench.peers import EagerGPT, oriented
from safetensors.torch import load_file

import handgrad as hg
from conftest import handgrad, run_processes, succeed, use_empty_cache
from handgrad import optim
from handgrad.formats.run_folder import model_folder
from handgrad.training.config import TrainOptions
from handgrad.training.distributed import Ranks
from handgrad.training.loop import evaluate, take_step
from handgrad.training.option_file import read_option_file
from handgrad.training.run import Run
from runs import TEXT, same_weights, small_job, weights

SMALL = ["--n-blocks", "2", "--d-model", "16", "--n-heads", "2", "--n-context", "16", "--batch-tokens", "64"]
SMALL += ["--eval-every", "10", "--eval-batches", "2", "--save-every", "5", "--sample-tokens", "8", "--log-every", "5"]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_empty_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def train_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "handgrad", "train", *map(str, arguments)]


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_run_folder_has_records_report_and_checkpoints(text: Path, tmp_path: Path) -> None:
    done = succeed("train", "--data", text, "--out", tmp_path / "r", "--steps", 20, *SMALL)
    assert "finished after 20 steps, validation loss" in done.stdout
    run = Run(tmp_path / "r")
    records = run.records()
    losses = [r["loss"] for r in records if "loss" in r]
    assert losses[-1] < losses[0]
    assert {"lr", "grad_norm", "tokens_per_second", "mfu", "memory", "grad_norms"} <= set(records[1])
    assert [r["step"] for r in records if "val_loss" in r] == [0, 10, 20]
    page = (tmp_path / "r" / "report.html").read_text()
    assert "<svg" in page and "block 1" in page and "http" not in page.replace("http-equiv", "")
    assert json.loads((tmp_path / "r" / "run.json").read_text())["training"]["steps"] == 20
    checkpoints = sorted(p.name for p in run.checkpoints.iterdir() if p.is_dir())
    assert checkpoints == ["step-00000015", "step-00000020"]


@pytest.mark.long
def test_peak_memory_stays_flat(text: Path, tmp_path: Path) -> None:
    quiet = ["--eval-every", 100, "--save-every", 100]
    done = run_processes(1, "train", "--data", text, "--out", tmp_path / "r", "--steps", 900, *SMALL, *quiet)
    assert done.returncode == 0, done.stderr
    peaks = {r["step"]: r["memory"] for r in Run(tmp_path / "r").records() if "memory" in r}
    assert peaks[900] - peaks[300] < 4_000_000, "peak memory must stop growing"


def test_transformers_loads_a_checkpoint(text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    succeed("train", "--data", text, "--out", tmp_path / "r", "--steps", 6, "--tokenizer", "bpe:300", *SMALL)
    folder = model_folder(tmp_path / "r")
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("green bottles hanging", return_tensors="pt")["input_ids"]
    ours = hg.load(folder)
    assert torch.allclose(ours.logits(ids), theirs(ids).logits, atol=1e-5)
    assert theirs.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] == ids.shape[1] + 3
    shown = handgrad("generate", "--model", tmp_path / "r", "--prompt", "green", "--seed", 1)
    assert shown.returncode == 0 and shown.stdout.startswith("green"), shown.stderr


BFLOAT16 = ["--dtype", "bfloat16"]
MUON = ["--optimizer", "muon"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--update-inside"],
        ["--optimizer", "SGD"],
        MUON,
        BFLOAT16,
        [*BFLOAT16, "--update-inside"],
        [*BFLOAT16, "--update-inside", *MUON],
    ],
)
@pytest.mark.some_cases(4)
def test_resume_is_bit_identical(text: Path, tmp_path: Path, options: list[str]) -> None:
    for name in "ab":
        succeed("train", "--data", text, "--out", tmp_path / name, "--steps", 12, *SMALL, *options)
    # make the second run resume from its checkpoint of step 10
    for last in (tmp_path / "b" / "checkpoints").glob("step-00000012"):
        (last / "handgrad-manifest.json").write_text("{")
    resumed = succeed("train", "--resume", "--out", tmp_path / "b")
    assert "skipped: " in resumed.stdout and "from step 10" in resumed.stdout
    assert same_weights(weights(tmp_path / "a", 12), weights(tmp_path / "b", 12))
    steps = [(r["step"], "loss" in r) for r in Run(tmp_path / "b").records()]
    assert len(steps) == len(set(steps)), "a step was logged twice"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_a_checkpoint_and_exits_cleanly(text: Path, tmp_path: Path, number: int) -> None:
    arguments = train_command("--data", text, "--out", tmp_path / "r", "--steps", 100000, *SMALL)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "r" / "checkpoints" / "step-00000005").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "stopped after" in output and "--resume" in output
    step = int(output.split("stopped after ")[1].split(" ")[0].replace(",", ""))
    assert (tmp_path / "r" / "checkpoints" / f"step-{step:08d}").is_dir()


def test_diverging_loss_is_diagnosed(text: Path, tmp_path: Path) -> None:
    diverging = ["--lr", "1e18", "--warmup", "0", "--clip", "0", "--optimizer", "SGD", "--schedule", "constant"]
    done = handgrad(
        "train", "--data", text, "--out", tmp_path / "r", "--steps", 50, *SMALL, "--save-every", 1, *diverging
    )
    assert done.returncode == 1
    assert "first to become NaN or infinite" in done.stderr
    assert "try a smaller learning rate than 1e18 (--lr)" in done.stderr
    for checkpoint in Run(tmp_path / "r").usable():
        assert all(torch.isfinite(x).all() for x in load_file(checkpoint.folder / "model.safetensors").values())


def test_full_disk_leaves_no_partial_checkpoint(text: Path, tmp_path: Path) -> None:
    succeed("train", "--data", text, "--out", tmp_path / "q", "--steps", 1, *SMALL)
    (tmp_path / "limited.py").write_text(
        "import resource, runpy, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # limit on the size of a file\n"
        "runpy.run_module('handgrad', run_name='__main__')\n"
    )
    arguments = ["train", "--data", text, "--out", tmp_path / "r", "--steps", 20, *SMALL]
    done = run_processes(1, tmp_path / "limited.py", *arguments)
    assert done.returncode == 1, done.stdout
    assert "could not be saved" in done.stderr and "intact" in done.stderr
    assert not list((tmp_path / "r" / "checkpoints").iterdir()), "a partial checkpoint was left behind"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "5", "--epochs", "1"], "give one of --steps"),
        (["--optimizer", "Nonsense"], "torch.optim has no 'Nonsense'"),
        (["--schedule", "zigzag"], "--schedule must be"),
        (["--data", "no-such-file"], "no file, folder or pattern"),
        (["--model", "nope"], "neither a preset"),
        (["--config", "none.toml"], "there is no file"),
        (["--n-context", "100000"], "too few for a context"),
        (["--resume"], "no run to resume in runs/"),
        (["--resume", "--out", "."], "is not a run folder"),
        (["--lr", "-1"], "--lr must be a number above 0"),
        (["--lr", "nan"], "--lr must be a finite number"),
        (["--optimizer", "LBFGS"], "choose another optimizer"),
        (["--tokenizer", "bpe:100"], "--tokenizer bpe:100: give bpe:N"),
        (["--out", "text.txt/x"], "cannot write to"),
        (["--tensorboard"], "needs the package tensorboard"),
    ],
)
def test_invalid_arguments_are_rejected_and_write_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = arguments if "--data" in arguments or "--resume" in arguments else ["--data", str(text), *arguments]
    done = handgrad("train", *given)
    assert done.returncode == 1, done.stdout
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_locked_run_folder_is_rejected(text: Path, tmp_path: Path) -> None:
    succeed("train", "--data", text, "--out", tmp_path / "r", "--steps", 1, *SMALL)
    run = Run(tmp_path / "r")
    run.lock()
    done = handgrad("train", "--resume", "--out", tmp_path / "r", "--steps", 9)
    run.release()
    assert done.returncode == 1 and "another process is training" in done.stderr


def test_flags_override_the_config_file(text: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'data = "{text}"\nsteps = 3\nlr = 0.5\nn-blocks = 1\nd_model = 8\nn_heads = 1\n')
    succeed("train", "--config", tmp_path / "c.toml", "--lr", "0.001", "--out", tmp_path / "r", "--n-context", 16)
    settings = json.loads((tmp_path / "r" / "run.json").read_text())
    assert settings["training"]["lr"] == 0.001 and settings["training"]["steps"] == 3
    assert settings["model"]["d_model"] == 8 and settings["model"]["n_context"] == 16
    options = read_config(tmp_path, "d.yaml", "lr: 1e-3\nout: elsewhere\ndata: [a.txt, b/]\n")
    assert options["lr"] == 0.001 and options["out"] == Path("elsewhere") and options["data"] == ("a.txt", "b/")


def read_config(tmp_path: Path, name: str, text: str) -> dict:
    (tmp_path / name).write_text(text)
    return read_option_file(tmp_path / name, TrainOptions)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 3", "unknown option 'stepps'"),
        ('lr = "abc"', "c.toml: lr must be a finite number, not 'abc'"),
        ("lr = true", "lr must be a finite number"),
        ("steps = 1.5", "steps must be an integer"),
        ('update_inside = "no"', "update_inside must be true or false"),
        ("data = 5", "data must be a string"),
        ("model = 5", "model must be a string"),
        ('val_share = "x"', "val_share must be a finite number"),
        ("lr = nan", "lr must be a finite number"),
        ("][", "cannot be read"),
    ],
)
def test_invalid_config_files_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(hg.HandgradError, match=re.escape(message)):
        read_config(tmp_path, "c.toml", text)


def test_existing_model_keeps_its_shape(text: Path, tmp_path: Path) -> None:
    succeed("train", "--data", text, "--out", tmp_path / "a", "--steps", 1, *SMALL)
    done = handgrad("train", "--data", text, "--model", tmp_path / "a", "--d-model", 64, "--out", tmp_path / "b")
    assert done.returncode == 1 and "--d-model cannot change an existing model" in done.stderr
    succeed("train", "--data", text, "--model", tmp_path / "a", "--steps", 2, "--out", tmp_path / "b")
    assert json.loads((tmp_path / "b" / "run.json").read_text())["model"]["d_model"] == 16


# ── loss curve, optimizer and schedule ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-9), ("float32", 1e-3)])
def test_loss_curve_matches_autograd(text: Path, dtype: str, limit: float) -> None:
    job = small_job(text, dtype=dtype)
    reference = EagerGPT(job.model).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, p in job.model.named_parameters():
            reference.pairs[name].copy_(oriented(name, p))
    c = job.options
    optimizer = optim.maker(c.optimizer, job.recipe.lr, c.weight_decay, (c.beta1, c.beta2))(reference.parameters())
    for step in range(100):
        for options in (*job.optimizer.param_groups, *optimizer.param_groups):
            options["lr"] = job.learning_rate
        ours = take_step(job, Ranks()).loss
        optimizer.zero_grad()
        loss = reference(*job.training.batch(step * job.batch, job.batch)[:2])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), c.clip)
        optimizer.step()
        job.step += 1
        assert abs(ours - loss.item()) <= limit, step


def test_update_inside_gives_the_same_loss_curve(text: Path) -> None:
    plain, inside = small_job(text, dtype="float64"), small_job(text, dtype="float64", update_inside=True)
    ranks = Ranks()
    for _ in range(20):
        assert abs(take_step(plain, ranks)[0] - take_step(inside, ranks)[0]) < 1e-9
        plain.step += 1
        inside.step += 1
    assert abs(evaluate(plain, plain.validation, ranks) - evaluate(inside, inside.validation, ranks)) < 1e-9


def test_weight_decay_groups_and_learning_rate_schedule(text: Path) -> None:
    job = small_job(text)
    decayed, not_decayed = job.optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.ndim == 2 for p in decayed["params"])
    assert not_decayed["weight_decay"] == 0.0 and all(p.ndim == 1 for p in not_decayed["params"])
    learning_rate = lambda progress, step, kind: optim.learning_rate(progress, step, 1.0, 0.1, 4, kind)  # noqa: E731
    assert [learning_rate(0, s, "cosine") for s in range(4)] == [0.2, 0.4, 0.6, 0.8]
    points = [(0.5, 50, "cosine", 0.55), (1, 99, "cosine", 0.1), (0.5, 50, "linear", 0.55), (0.25, 50, "linear", 0.775)]
    for progress, step, kind, expected in points:
        assert learning_rate(progress, step, kind) == pytest.approx(expected)
    assert learning_rate(0.9, 50, "constant") == 1.0


# ── several processes ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("n", "options"), [(2, []), (4, ["--update-inside"]), (2, [*MUON, "--update-inside"])])
@pytest.mark.some_cases(5)
def test_several_processes_train_the_same_weights(text: Path, tmp_path: Path, n: int, options: list[str]) -> None:
    base = ["--data", text, "--steps", 10, *SMALL, "--dtype", "float64", "--keep", 5, *options]
    succeed("train", *base, "--out", tmp_path / "1")
    expected = weights(tmp_path / "1", 10)
    done = run_processes(n, "train", *base, "--out", tmp_path / str(n))
    assert done.returncode == 0, done.stderr
    found = weights(tmp_path / str(n), 10)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-9, rtol=0), (n, name)
    one = [r["loss"] for r in Run(tmp_path / "1").records() if "loss" in r]
    many = [r["loss"] for r in Run(tmp_path / str(n)).records() if "loss" in r]
    assert many == pytest.approx(one, abs=1e-12)


def test_run_of_two_processes_resumes_with_one(text: Path, tmp_path: Path) -> None:
    base = ["--data", text, *SMALL, "--dtype", "float64", "--lr", "1e-3", "--schedule", "constant", "--warmup", 0]
    succeed("train", *base, "--steps", 10, "--out", tmp_path / "a")
    done = run_processes(2, "train", *base, "--steps", 5, "--out", tmp_path / "b")  # test_run.py has torchrun itself
    assert done.returncode == 0, done.stderr
    succeed("train", "--resume", "--out", tmp_path / "b", "--steps", 10)
    one, other = weights(tmp_path / "a", 10), weights(tmp_path / "b", 10)
    assert all(torch.allclose(one[name], other[name], atol=1e-9, rtol=0) for name in one)


GRADIENTS = """
import sys, torch, handgrad as hg
from handgrad.training.distributed import Ranks
from safetensors.torch import save_file
torch.set_num_threads(1)
ranks = Ranks()
model = hg.GPT(hg.preset("nano", n_vocab=11, n_context=8, d_model=12, n_heads=3, n_blocks=2), dtype=torch.float64)
generator = torch.Generator().manual_seed(0)
tokens, targets = torch.randint(11, (2, 8, 8), generator=generator)
targets[3:, 2:] = -100  # ranks get very different numbers of targets
first, count = ranks.share(0, 8)
mine = slice(first, first + count)
n_targets = int((targets != -100).sum())
model.loss_and_grads(tokens[mine], targets[mine], n_targets=n_targets, finished=ranks.all_reduce_async)
ranks.wait()
if ranks.first:
    save_file({name: p.grad for name, p in model.named_parameters()}, sys.argv[1])
ranks.shutdown()
"""


def test_gradients_of_uneven_shares_are_weighted_correctly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g.py").write_text(GRADIENTS)
    monkeypatch.setattr(sys, "argv", ["g.py", str(tmp_path / "one")])
    runpy.run_path(str(tmp_path / "g.py"))
    done = run_processes(4, tmp_path / "g.py", tmp_path / "four")
    assert done.returncode == 0, done.stderr
    one, four = load_file(tmp_path / "one"), load_file(tmp_path / "four")
    for name, expected in one.items():
        assert ((four[name] - expected).norm() / expected.norm().clamp(min=1e-12)).item() <= 1e-12, name
