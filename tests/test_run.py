"""The life of a run as a user meets it: created, continued, damaged, disturbed, concluded again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import handgrad as hg
from conftest import group, handgrad
from handgrad.files.atomic import LEFTOVER, exchange, sweep, write_folder, write_text
from handgrad.training.run import Run

TEXT = "".join(f"{n} green bottles hanging on the wall, and if {n % 7} of them should fall\n" for n in range(400))
SMALL = ["--n-blocks", "1", "--d-model", "8", "--n-heads", "1", "--n-context", "16", "--batch-tokens", "64"]
SMALL += ["--eval-every", "2", "--eval-batches", "1", "--save-every", "2", "--sample-tokens", "0", "--log-every", "2"]
COMMANDS = ("train", "finetune")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("made"))


def make_runs(place: Path) -> Path:
    """A finished run of train and one of finetune, their data, and the cache."""
    os.environ["HANDGRAD_CACHE"] = str(place / "cache")
    try:
        (place / "text.txt").write_text(TEXT)
        lines = [json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i + 1}"}) for i in range(40)]
        (place / "examples.jsonl").write_text("\n".join(lines))
        assert handgrad("train", *train_options(place), "--out", place / "train").returncode == 0
        assert handgrad("finetune", *finetune_options(place), "--out", place / "finetune").returncode == 0
    finally:
        del os.environ["HANDGRAD_CACHE"]
    return place


def train_options(place: Path) -> list[object]:
    return ["--data", place / "text.txt", "--steps", 6, *SMALL]


def finetune_options(place: Path) -> list[object]:
    few = ["--eval-every", 2, "--save-every", 2, "--log-every", 1, "--sample-tokens", 0, "--batch-examples", 4]
    return ["--model", place / "train", "--data", place / "examples.jsonl", "--steps", 6, "--rank", 2, *few]


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HANDGRAD_CACHE", str(made / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in COMMANDS:
        shutil.copytree(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    """Every file by its path; the lock is empty whether it is there or not."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    (file,) = folder.glob("*model.safetensors")
    return {name: t.clone() for name, t in load_file(file).items()}  # the file itself may be changed by the test


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(LEFTOVER)]


# ── damaged checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", COMMANDS)
def test_if_no_checkpoint_is_usable_nothing_is_touched(place: Path, command: str) -> None:
    run = place / command
    for folder in Run(run).folders():
        next(folder.glob("*config.json")).unlink()
    before = content(run)
    done = handgrad(command, "--resume", "--out", run, "--steps", 9)
    assert done.returncode == 1 and "is usable (nothing was changed)" in done.stderr
    assert content(run) == before


def flip(file: Path, at: int = -1) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 if at < 0 else at] ^= 0x10
    file.write_bytes(raw)


def other_optimizer(folder: Path) -> None:
    state = load_file(folder / "optimizer.safetensors")
    save_file(
        {name: t + 1 if t.is_floating_point() else t for name, t in state.items()}, folder / "optimizer.safetensors"
    )


def edit_manifest(folder: Path, **changes: object) -> None:
    file = folder / "handgrad-manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES = {
    "weights": lambda f: flip(f / "model.safetensors"),
    "optimizer": lambda f: flip(f / "optimizer.safetensors"),
    "optimizer of another run": other_optimizer,
    "config": lambda f: flip(f / "config.json"),
    "tokenizer": lambda f: flip(f / "tokenizer.json"),
    "a file is gone": lambda f: (f / "generation_config.json").unlink(),
    "a file is a folder": lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
    "a file is a pipe": lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")),
    "step": lambda f: edit_manifest(f, step=-5),
    "no files": lambda f: edit_manifest(f, files={}),
    "seconds": lambda f: edit_manifest(f, seconds=1e9),
    "manifest is a list": lambda f: (f / "handgrad-manifest.json").write_text("[]"),
    "manifest is empty": lambda f: (f / "handgrad-manifest.json").write_text(""),
    "manifest is not text": lambda f: (f / "handgrad-manifest.json").write_bytes(b"\x80\xff"),
    "manifest is gone": lambda f: (f / "handgrad-manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_left_aside_and_an_older_one_used(place: Path, damage: str) -> None:
    truth = weights(place / "train", 6)
    DAMAGES[damage](place / "train" / "checkpoints" / "step-00000006")
    done = handgrad("train", "--resume", "--out", "train")
    assert done.returncode == 0, done.stderr
    assert "skipped: " in done.stdout and "resuming train from step 4" in done.stdout
    assert same(weights(place / "train", 6), truth)
    assert (place / "train" / "checkpoints" / "damaged-step-00000006").is_dir(), "never deleted"
    assert "skipped: " not in handgrad("train", "--resume", "--out", "train", "--steps", 8).stdout


def test_a_checkpoint_of_another_run_is_not_used(place: Path) -> None:
    assert handgrad("train", *train_options(place.parent / "x"), "--data", place / "train/run.json").returncode == 1
    shutil.copytree(place / "train", place / "other")
    settings = json.loads((place / "other" / "run.json").read_text())
    Run(place / "other").configure({k: v for k, v in settings.items() if k != "digest"} | {"id": "f" * 32})
    done = handgrad("train", "--resume", "--out", "other")
    assert done.returncode == 1 and "belongs to another run" in done.stderr


def test_a_damaged_model_of_a_run_is_not_loaded(place: Path) -> None:
    flip(place / "finetune" / "adapter" / "adapter_model.safetensors")
    with pytest.raises(hg.HandgradError, match="is damaged: it has changed since handgrad wrote it"):
        hg.load(place / "finetune" / "adapter")
    best = Run(place / "train").best().folder
    flip(best / "model.safetensors")
    with pytest.raises(hg.HandgradError, match="is damaged: it has changed since handgrad wrote it"):
        hg.load(best)
    (best / "handgrad-manifest.json").unlink()
    hg.load(best)  # without a manifest it is a model like any other


# ── run.json and metrics.jsonl ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["[]", "{", "", '{"training": {"lr": 1}}', "lr", "seed", None])
def test_a_damaged_run_json_is_taken_from_the_newest_checkpoint(place: Path, text: str | None) -> None:
    file = place / "train" / "run.json"
    before = json.loads(file.read_text())
    if text is None:
        file.unlink()
    elif text in ("lr", "seed"):
        file.write_text(json.dumps(before | {"training": before["training"] | {text: 7}}))
    else:
        file.write_text(text)
    done = handgrad("train", "--resume", "--out", "train", "--steps", 8)
    assert done.returncode == 0, done.stderr
    after = json.loads(file.read_text())
    assert (
        after["training"]["lr"] == before["training"]["lr"] and after["training"]["seed"] == before["training"]["seed"]
    )
    assert after["id"] == before["id"] and "using the settings in the newest checkpoint" in done.stdout


def test_without_a_checkpoint_a_damaged_run_json_ends_it(place: Path) -> None:
    shutil.rmtree(place / "train" / "checkpoints")
    (place / "train" / "run.json").write_text("[]")
    before = content(place / "train")
    done = handgrad("train", "--resume", "--out", "train")
    assert done.returncode == 1 and "Restore it, or start a new run" in done.stderr
    assert content(place / "train") == before


BAD_LINES = [
    b"\x80\xff", b"[]", b"null", b"{", b'{"step": "x"}', b'{"step": 1e400}', b'{"loss": 1}', b'{"step": 1, "loss": 2}',
    b'{"step": 1, "val_loss": "x"}', b'{"step": 1, "val_loss": 1, "sample": 5}', b"[" * 100_000, b"\0" * 100,
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: repr(line[:20]))
def test_a_bad_line_of_metrics_does_not_stop_a_run(place: Path, line: bytes) -> None:
    file = place / "train" / "metrics.jsonl"
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]) + b"\n")
    done = handgrad("train", "--resume", "--out", "train", "--steps", 8)
    assert done.returncode == 0, done.stderr
    assert len(Run(place / "train").records()) == len(lines) + 2
    assert "8 steps" in (place / "train" / "report.html").read_text()


# ── create or continue ──────────────────────────────────────────────────────────────────────────────────────────────


def test_resume_creates_continues_and_ends(made: Path, place: Path) -> None:
    full = ["train", "--resume", *train_options(made), "--out", "new"]
    first = handgrad(*full)
    assert first.returncode == 0 and "new contains no run: starting a new one" in first.stdout, first.stderr
    shutil.rmtree(place / "new" / "checkpoints" / "step-00000006")
    again = handgrad(*full)  # the same command, as a script or torchrun would give it
    assert again.returncode == 0 and "resuming new from step 4" in again.stdout, again.stderr
    assert same(weights(place / "new", 6), weights(place / "train", 6))
    done = handgrad(*full)
    assert done.returncode == 0 and "finished after 6 steps" in done.stdout
    changed = handgrad(*full, "--lr", "0.5")
    assert changed.returncode == 1 and "--lr cannot change when a run is resumed" in changed.stderr


def test_a_start_that_was_killed_before_run_json_can_be_repeated(made: Path, place: Path) -> None:
    for resume in ([], ["--resume"]):
        shutil.rmtree(place / "new", ignore_errors=True)
        (place / "new" / "checkpoints").mkdir(parents=True)
        (place / "new" / ".lock").touch()
        (place / "new" / f"{LEFTOVER}new.x").write_text("{")
        done = handgrad("train", *resume, *train_options(made), "--out", "new")
        assert done.returncode == 0, done.stderr
        assert not leftovers(place / "new")


def test_a_group_that_torchrun_restarts_continues(made: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(place / "train" / "checkpoints" / "step-00000006")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    done = handgrad("train", *train_options(made), "--out", "train")
    assert done.returncode == 0 and "resuming train from step 4" in done.stdout, done.stderr
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    assert handgrad("train", *train_options(made)).returncode == 0
    assert "resuming runs/nano-1" in handgrad("train", *train_options(made)).stdout
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "def")
    assert handgrad("train", *train_options(made)).returncode == 0
    assert sorted(p.name for p in (place / "runs").iterdir()) == ["nano-1", "nano-2"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_conclusion_that_is_missing_is_written_again(place: Path, command: str) -> None:
    before = content(place / command)
    (place / command / "report.html").unlink()
    shutil.rmtree(place / command / "adapter", ignore_errors=True)
    done = handgrad(command, "--resume", "--out", command)
    assert done.returncode == 0 and "finished after 6 steps" in done.stdout, done.stderr
    assert content(place / command).keys() == before.keys()


def test_the_lock_does_not_follow_links(place: Path) -> None:
    (place / "mine.txt").write_text("mine")
    (place / "train" / ".lock").unlink()
    (place / "train" / ".lock").symlink_to(place / "mine.txt")
    done = handgrad("train", "--resume", "--out", "train", "--steps", 8)
    assert done.returncode == 1 and "it is a symbolic link; remove it" in done.stderr
    assert (place / "mine.txt").read_text() == "mine"


def test_nothing_is_written_through_a_link(place: Path) -> None:
    for name in ("report.html", "metrics.jsonl", "run.json"):
        shutil.copy(place / "train" / name, place / f"mine-{name}")
        (place / "train" / name).unlink()
        (place / "train" / name).symlink_to(place / f"mine-{name}")
    before = {name: (place / name).read_bytes() for name in os.listdir(place) if name.startswith("mine-")}
    assert handgrad("train", "--resume", "--out", "train", "--steps", 8).returncode == 0
    assert {name: (place / name).read_bytes() for name in before} == before
    assert Run(place / "train").records()[-1]["step"] == 8 and not (place / "train" / "report.html").is_symlink()
    (place / "outside").mkdir()
    shutil.rmtree(place / "finetune" / "adapter")
    (place / "finetune" / "adapter").symlink_to(place / "outside")
    assert handgrad("finetune", "--resume", "--out", "finetune").returncode == 0
    assert not list((place / "outside").iterdir()) and hg.load(place / "finetune" / "adapter").adapter.rank == 2


def test_names_that_are_no_text_are_named_before_any_work(made: Path, place: Path) -> None:
    for given in (["--out", "a\udcff"], ["--data", "b\udcff.txt", "--out", "c"]):
        done = handgrad("train", "--data", made / "text.txt", *given)
        assert done.returncode == 1 and f"{given[0]} contains \\udcff, half of a character" in done.stderr
    assert sorted(p.name for p in place.iterdir()) == ["finetune", "train"]


def test_everybody_may_read_what_the_mask_allows(place: Path) -> None:
    before = os.umask(0o022)
    os.umask(before)
    files = [*(place / "finetune" / "adapter").iterdir(), *Run(place / "train").folders()[-1].iterdir()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~before}


def test_a_run_can_only_be_made_longer(place: Path) -> None:
    shutil.rmtree(place / "train" / "checkpoints" / "step-00000006")
    done = handgrad("train", "--resume", "--out", "train", "--steps", 5)
    assert done.returncode == 1 and "runs until step 6: --steps can only extend it" in done.stderr


def test_a_run_that_appears_meanwhile_is_not_taken_over(
    made: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "handgrad.training.lifecycle._check_free", lambda run, resume: None
    )  # the other process comes after it
    before = content(place / "train")
    done = handgrad("train", *train_options(made), "--out", "train")
    assert done.returncode == 1 and "has just been created by another process" in done.stderr
    assert content(place / "train") == before


def test_a_folder_of_the_user_is_not_touched(place: Path) -> None:
    (place / "mine").mkdir()
    (place / "mine" / "notes.txt").write_text("mine")
    for resume in ([], ["--resume"]):
        done = handgrad("train", *resume, "--out", "mine", "--data", place / "mine" / "notes.txt")
        assert done.returncode == 1 and "is not a run folder" in done.stderr
    assert [p.name for p in (place / "mine").iterdir()] == ["notes.txt"]


def test_a_dry_start_that_fails_leaves_nothing(made: Path, place: Path) -> None:
    done = handgrad("train", "--data", made / "text.txt", "--n-context", 100_000, "--out", "a/b/c")
    assert done.returncode == 1 and not (place / "a").exists()
    (place / "empty").mkdir()
    done = handgrad("train", "--data", made / "text.txt", "--n-context", 100_000, "--out", "empty")
    assert done.returncode == 1 and not list((place / "empty").iterdir())


# ── what a run reports ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_short_run_logs_its_last_step(made: Path, place: Path) -> None:
    small = ["--n-blocks", "1", "--d-model", "8", "--n-heads", "1", "--n-context", "16", "--batch-tokens", "64"]
    done = handgrad("train", "--data", made / "text.txt", "--steps", 3, "--val-share", 0, "--out", "short", *small)
    assert done.returncode == 0 and "finished after 3 steps, loss" in done.stdout, done.stderr
    (record,) = Run(place / "short").records()
    assert record["step"] == 3 and record["tokens"] == 3 * 64
    page = (place / "short" / "report.html").read_text()
    assert "3 steps" in page and "No step" not in page
    assert "<circle" in page, "one point is drawn as a dot"
    overall = f"{record['tokens'] / record['seconds']:,.0f}"
    assert overall in page, "the throughput is the run's"


def test_the_base_model_may_be_better(made: Path, place: Path) -> None:
    """A learning rate that ruins the model: what is delivered is the best trained step, and it is said."""
    wild = ["--lr", 50, "--schedule", "constant", "--warmup", 0, "--clip", 0, "--full"]
    options = [*finetune_options(made), *wild]
    rank = options.index("--rank")
    done = handgrad("finetune", *options[:rank], *options[rank + 2 :], "--out", "worse")
    assert done.returncode == 0, done.stderr
    losses = {r["step"]: r["val_loss"] for r in Run(place / "worse").records() if "val_loss" in r}
    assert losses[0] < min(losses[2], losses[4], losses[6]), "the point of the test"
    assert "was better before training" in done.stderr
    assert "The model was better before training" in (place / "worse" / "report.html").read_text()
    best = min((2, 4, 6), key=losses.__getitem__)
    assert Run(place / "worse").best().step == best
    delivered = load_file(place / "worse" / "model" / "model.safetensors")
    assert same(delivered, weights(place / "worse", best))


def test_a_dry_run_shows_what_it_would_take_and_writes_nothing(made: Path, place: Path) -> None:
    done = handgrad("finetune", *finetune_options(made), "--dry-run", "--out", "dry")
    assert done.returncode == 0 and not (place / "dry").exists(), done.stderr
    assert "36 examples to train on, 4 to validate on" in done.stdout
    assert "trainable parameters" in done.stdout and "6 steps would take about" in done.stdout
    done = handgrad("train", *train_options(made), "--dry-run")
    assert done.returncode == 0 and not (place / "runs").exists() and "time of a step" in done.stdout
    done = handgrad("train", *train_options(made), "--dry-run", "--out", "train")
    assert done.returncode == 1 and "exists: choose another --out" in done.stderr


def test_the_commands_from_python(made: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"n_blocks": 1, "d_model": 8, "n_heads": 1, "n_context": 16, "batch_tokens": 64, "sample_tokens": 0}
    often = {"steps": 6, "eval_every": 2, "eval_batches": 1, "save_every": 2, "log_every": 2}
    first = hg.train(made / "text.txt", out="python", quiet=True, **shape, **often)
    assert capsys.readouterr().out == ""
    assert same(weights(first.folder, 6), weights(place / "train", 6)), "as the command does"
    assert first.val_loss == Run(first.folder).best().val_loss
    again = hg.train(made / "text.txt", out="python", resume=True, quiet=True, **{**shape, **often, "steps": 8})
    assert again.outcome.step == 8 and torch.equal(
        again.model.transformer.wte.weight,
        load_file(place / "python/checkpoints/step-00000008/model.safetensors")["transformer.wte.weight"],
    )
    tuned = hg.finetune(first.folder, [made / "examples.jsonl"], rank=2, steps=2, targets="c_attn,c_fc", out="tuned")
    assert "examples to train on" in capsys.readouterr().out
    assert tuned.path == Path("tuned/adapter") and hg.load(tuned.path).adapter.rank == 2
    with pytest.raises(hg.HandgradError, match=r"unknown option 'stepps'; available: .*steps"):
        hg.train(made / "text.txt", stepps=5)
    with pytest.raises(hg.HandgradError, match="exists: choose another --out"):
        hg.train(made / "text.txt", out="python")
    for wrong, why in (
        (lambda: hg.finetune(first.model, "x.jsonl"), "not a GPT: hg.save it first"),
        (lambda: hg.finetune(first.folder, [{"prompt": "a"}]), "write the examples to a .jsonl file first"),
        (lambda: hg.train("x.txt", out=3), "out must be the path of a folder, not 3"),
    ):
        with pytest.raises(hg.HandgradError, match=why):
            wrong()


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_folders_are_exchanged_in_one_step(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    assert not exchange(tmp_path / "a", tmp_path / "none")


@pytest.mark.parametrize("crash", [1, 2, 3])
def test_without_an_exchange_the_old_folder_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: int
) -> None:
    """Where the system cannot exchange names, a kill between the renames loses nothing."""
    write_folder(tmp_path / "m", lambda f: (f / "a").write_text("old") and None)
    monkeypatch.setattr("handgrad.files.atomic.exchange", lambda one, other: False)
    calls = 0
    rename = os.rename

    def killed(*names: object) -> None:
        nonlocal calls
        calls += 1
        if calls == crash:
            os._exit(9)
        rename(*names)

    monkeypatch.setattr("handgrad.files.atomic.os.rename", killed)
    child = os.fork()
    if child == 0:
        write_folder(tmp_path / "m", lambda f: (f / "a").write_text("new") and None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.setattr("handgrad.files.atomic.os.rename", rename)
    sweep(tmp_path, owned=True)
    assert (tmp_path / "m" / "a").read_text() == ("old" if crash < 3 else "new")
    assert not leftovers(tmp_path)


def test_leftovers_in_use_are_spared_and_abandoned_ones_swept(tmp_path: Path) -> None:
    (tmp_path / f"{LEFTOVER}new.dead").write_text("x")
    os.utime(tmp_path / f"{LEFTOVER}new.dead", (0, 0))

    def fill(partial: Path) -> None:
        os.utime(partial, (0, 0))
        write_text(tmp_path / "other.txt", "x")  # sweeps as well, and must spare this one
        (partial / "a").write_text("1")

    write_folder(tmp_path / "m", fill)
    assert {p.name for p in tmp_path.iterdir()} == {"m", "other.txt"}


# ── several processes ───────────────────────────────────────────────────────────────────────────────────────────────


DIES_ONCE = """
import os, sys, signal
from handgrad.training import loop
from handgrad.cli.app import main
step = loop.take_step
def dies(job, ranks):
    if job.step == 3 and ranks.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(job, ranks)
loop.take_step = dies
main()
"""


def test_torchrun_restarts_a_run_and_a_lost_peer_is_one_line(made: Path, place: Path) -> None:
    Path("script.py").write_text(DIES_ONCE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    whole = [*launch, "--max-restarts", "1", "script.py", "train", *train_options(made), "--out", "two"]
    done = subprocess.run([*map(str, whole)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming two from step 2" in done.stdout and "finished after 6 steps" in done.stdout
    ours = [line for line in done.stderr.splitlines() if line.startswith(("handgrad:", "handgrad, "))]
    assert len(ours) == 1 and "lost contact with another of the 2" in ours[0], ours
    assert "Traceback" not in done.stderr.split("torch.distributed.elastic")[0]


FAILS_ON_ONE = """
import os
from handgrad.training import loop
from handgrad.cli.app import main
from handgrad.errors import HandgradError
step = loop.take_step
def fails(job, ranks):
    if ranks.rank == 1:
        raise HandgradError("no more paper")
    return step(job, ranks)
loop.take_step = fails
main()
"""


def test_every_process_prints_its_own_reason_once(made: Path, place: Path) -> None:
    Path("script.py").write_text(FAILS_ON_ONE)
    done = group(2, "script.py", "train", *train_options(made), "--out", "two")
    ours = [line for line in done.stderr.splitlines() if line.startswith(("handgrad:", "handgrad, "))]
    assert "handgrad, process 1: no more paper" in ours and len(ours) <= 2, done.stderr
    done = group(2, "train", "--data", made / "text.txt", "--n-context", 100_000, "--out", "three")
    ours = [line for line in done.stderr.splitlines() if line.startswith(("handgrad:", "handgrad, "))]
    assert len(ours) == 1 and "too few for a context" in ours[0], done.stderr
