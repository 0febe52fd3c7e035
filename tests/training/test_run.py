"""Run folders: start, resume, damage, locks, symlinks, reports, and failures of several processes."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import handgrad as hg
from conftest import error_of, handgrad, run_processes, succeed
from handgrad.files.atomic import LEFTOVER
from handgrad.training.run import Run
from runs import SMALL, finetune_options, leftovers, make_runs, same_weights, train_options, weights

COMMANDS = ("train", "finetune")


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def workdir(finished_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with copies of the finished runs."""
    monkeypatch.setenv("HANDGRAD_CACHE", str(finished_runs / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in COMMANDS:
        shutil.copytree(finished_runs / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def file_contents(folder: Path) -> dict[str, bytes]:
    """Contents of every file below a folder, by path, without the lock: it is empty and may be absent."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


# ── damaged checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", COMMANDS)
def test_resume_without_usable_checkpoint_changes_nothing(workdir: Path, command: str) -> None:
    run = workdir / command
    for folder in Run(run).folders():
        next(folder.glob("*config.json")).unlink()
    before = file_contents(run)
    assert "is usable (nothing was changed)" in error_of(command, "--resume", "--out", run, "--steps", 9)
    assert file_contents(run) == before


def flip_byte(file: Path, at: int = -1) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 if at < 0 else at] ^= 0x10
    file.write_bytes(raw)


def change_optimizer(folder: Path) -> None:
    state = load_file(folder / "optimizer.safetensors")
    save_file(
        {name: t + 1 if t.is_floating_point() else t for name, t in state.items()}, folder / "optimizer.safetensors"
    )


def edit_manifest(folder: Path, **changes: object) -> None:
    file = folder / "handgrad-manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES = {
    "weights": lambda f: flip_byte(f / "model.safetensors"),
    "optimizer": lambda f: flip_byte(f / "optimizer.safetensors"),
    "optimizer of another run": change_optimizer,
    "config": lambda f: flip_byte(f / "config.json"),
    "tokenizer": lambda f: flip_byte(f / "tokenizer.json"),
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
@pytest.mark.some_cases(6)
def test_damaged_checkpoint_is_set_aside_and_an_older_one_used(workdir: Path, damage: str) -> None:
    expected = weights(workdir / "train", 6)
    DAMAGES[damage](workdir / "train" / "checkpoints" / "step-00000006")
    done = succeed("train", "--resume", "--out", "train")
    assert "skipped: " in done.stdout and "resuming train from step 4" in done.stdout
    assert same_weights(weights(workdir / "train", 6), expected)
    assert (workdir / "train" / "checkpoints" / "damaged-step-00000006").is_dir(), (
        "a damaged checkpoint must not be deleted"
    )
    assert "skipped: " not in handgrad("train", "--resume", "--out", "train", "--steps", 8).stdout


def test_checkpoint_of_another_run_is_rejected(workdir: Path) -> None:
    assert handgrad("train", *train_options(workdir.parent / "x"), "--data", workdir / "train/run.json").returncode == 1
    shutil.copytree(workdir / "train", workdir / "other")
    settings = json.loads((workdir / "other" / "run.json").read_text())
    Run(workdir / "other").configure({k: v for k, v in settings.items() if k != "digest"} | {"id": "f" * 32})
    assert "belongs to another run" in error_of("train", "--resume", "--out", "other")


def test_damaged_model_of_a_run_is_rejected(workdir: Path) -> None:
    flip_byte(workdir / "finetune" / "adapter" / "adapter_model.safetensors")
    with pytest.raises(hg.HandgradError, match="is damaged: it has changed since handgrad wrote it"):
        hg.load(workdir / "finetune" / "adapter")
    best = Run(workdir / "train").best().folder
    flip_byte(best / "model.safetensors")
    with pytest.raises(hg.HandgradError, match="is damaged: it has changed since handgrad wrote it"):
        hg.load(best)
    (best / "handgrad-manifest.json").unlink()
    hg.load(best)  # without a manifest nothing is checked


# ── run.json and metrics.jsonl ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["[]", "{", "", '{"training": {"lr": 1}}', "lr", "seed", None])
def test_damaged_run_json_is_restored_from_newest_checkpoint(workdir: Path, text: str | None) -> None:
    file = workdir / "train" / "run.json"
    before = json.loads(file.read_text())
    if text is None:
        file.unlink()
    elif text in ("lr", "seed"):
        file.write_text(json.dumps(before | {"training": before["training"] | {text: 7}}))
    else:
        file.write_text(text)
    done = succeed("train", "--resume", "--out", "train", "--steps", 8)
    after = json.loads(file.read_text())
    assert (
        after["training"]["lr"] == before["training"]["lr"] and after["training"]["seed"] == before["training"]["seed"]
    )
    assert after["id"] == before["id"] and "using the settings in the newest checkpoint" in done.stdout


def test_damaged_run_json_without_checkpoint_is_rejected(workdir: Path) -> None:
    shutil.rmtree(workdir / "train" / "checkpoints")
    (workdir / "train" / "run.json").write_text("[]")
    before = file_contents(workdir / "train")
    assert "Restore it, or start a new run" in error_of("train", "--resume", "--out", "train")
    assert file_contents(workdir / "train") == before


BAD_LINES = [
    b"\x80\xff", b"[]", b"null", b"{", b'{"step": "x"}', b'{"step": 1e400}', b'{"loss": 1}', b'{"step": 1, "loss": 2}',
    b'{"step": 1, "val_loss": "x"}', b'{"step": 1, "val_loss": 1, "sample": 5}', b"[" * 100_000, b"\0" * 100,
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: repr(line[:20]))
def test_bad_line_in_metrics_is_ignored(workdir: Path, line: bytes) -> None:
    file = workdir / "train" / "metrics.jsonl"
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]) + b"\n")
    succeed("train", "--resume", "--out", "train", "--steps", 8)
    assert len(Run(workdir / "train").records()) == len(lines) + 2
    assert "8 steps" in (workdir / "train" / "report.html").read_text()


# ── start or resume ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_resume_starts_continues_and_finishes_a_run(finished_runs: Path, workdir: Path) -> None:
    full = ["train", "--resume", *train_options(finished_runs), "--out", "new"]
    first = handgrad(*full)
    assert first.returncode == 0 and "new contains no run: starting a new one" in first.stdout, first.stderr
    shutil.rmtree(workdir / "new" / "checkpoints" / "step-00000006")
    again = handgrad(*full)  # the same command, as a script or torchrun repeats it
    assert again.returncode == 0 and "resuming new from step 4" in again.stdout, again.stderr
    assert same_weights(weights(workdir / "new", 6), weights(workdir / "train", 6))
    done = handgrad(*full)
    assert done.returncode == 0 and "finished after 6 steps" in done.stdout
    relative = os.path.relpath(finished_runs / "text.txt")  # begins with ../
    for data in (relative, f"train/../{relative}"):
        named = handgrad("train", "--resume", "--data", data, "--out", "new")
        assert named.returncode == 0 and "finished after 6 steps" in named.stdout, named.stderr
    Path("text.txt").write_text("other text " * 400)
    other = handgrad("train", "--resume", "--data", "text.txt", "--out", "new")
    assert other.returncode == 1 and "--data cannot change when a run is resumed" in other.stderr
    assert "--lr cannot change when a run is resumed" in error_of(*full, "--lr", "0.5")


def test_start_killed_before_run_json_can_be_repeated(finished_runs: Path, workdir: Path) -> None:
    for resume in ([], ["--resume"]):
        shutil.rmtree(workdir / "new", ignore_errors=True)
        (workdir / "new" / "checkpoints").mkdir(parents=True)
        (workdir / "new" / ".lock").touch()
        (workdir / "new" / f"{LEFTOVER}new.x").write_text("{")
        succeed("train", *resume, *train_options(finished_runs), "--out", "new")
        assert not leftovers(workdir / "new")


def test_run_restarted_by_torchrun_continues(
    finished_runs: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(workdir / "train" / "checkpoints" / "step-00000006")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    done = handgrad("train", *train_options(finished_runs), "--out", "train")
    assert done.returncode == 0 and "resuming train from step 4" in done.stdout, done.stderr
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    succeed("train", *train_options(finished_runs))
    assert "resuming runs/nano-1" in handgrad("train", *train_options(finished_runs)).stdout
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "def")
    succeed("train", *train_options(finished_runs))
    assert sorted(p.name for p in (workdir / "runs").iterdir()) == ["nano-1", "nano-2"]


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_report_and_adapter_are_written_again(workdir: Path, command: str) -> None:
    before = file_contents(workdir / command)
    (workdir / command / "report.html").unlink()
    shutil.rmtree(workdir / command / "adapter", ignore_errors=True)
    done = handgrad(command, "--resume", "--out", command)
    assert done.returncode == 0 and "finished after 6 steps" in done.stdout, done.stderr
    assert file_contents(workdir / command).keys() == before.keys()


def test_lock_does_not_follow_symlinks(workdir: Path) -> None:
    (workdir / "user.txt").write_text("user data")
    (workdir / "train" / ".lock").unlink()
    (workdir / "train" / ".lock").symlink_to(workdir / "user.txt")
    assert "it is a symbolic link; remove it" in error_of("train", "--resume", "--out", "train", "--steps", 8)
    assert (workdir / "user.txt").read_text() == "user data"


def test_no_file_is_written_through_a_symlink(workdir: Path) -> None:
    for name in ("report.html", "metrics.jsonl", "run.json"):
        shutil.copy(workdir / "train" / name, workdir / f"user-{name}")
        (workdir / "train" / name).unlink()
        (workdir / "train" / name).symlink_to(workdir / f"user-{name}")
    before = {name: (workdir / name).read_bytes() for name in os.listdir(workdir) if name.startswith("user-")}
    succeed("train", "--resume", "--out", "train", "--steps", 8)
    assert {name: (workdir / name).read_bytes() for name in before} == before
    assert Run(workdir / "train").records()[-1]["step"] == 8 and not (workdir / "train" / "report.html").is_symlink()
    (workdir / "outside").mkdir()
    shutil.rmtree(workdir / "finetune" / "adapter")
    (workdir / "finetune" / "adapter").symlink_to(workdir / "outside")
    succeed("finetune", "--resume", "--out", "finetune")
    assert not list((workdir / "outside").iterdir()) and hg.load(workdir / "finetune" / "adapter").adapter.rank == 2


def test_undecodable_path_is_rejected_before_any_work(finished_runs: Path, workdir: Path) -> None:
    for given in (["--out", "a\udcff"], ["--data", "b\udcff.txt", "--out", "c"]):
        done = handgrad("train", "--data", finished_runs / "text.txt", *given)
        assert done.returncode == 1 and f"{given[0]} contains \\udcff, half of a character" in done.stderr
    assert sorted(p.name for p in workdir.iterdir()) == ["finetune", "train"]


def test_file_modes_follow_the_umask(workdir: Path) -> None:
    umask = os.umask(0o022)
    os.umask(umask)
    files = [*(workdir / "finetune" / "adapter").iterdir(), *Run(workdir / "train").folders()[-1].iterdir()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}


def test_resume_cannot_shorten_a_run(workdir: Path) -> None:
    shutil.rmtree(workdir / "train" / "checkpoints" / "step-00000006")
    before = (workdir / "train" / "run.json").read_text()
    done = handgrad("train", "--resume", "--out", "train", "--steps", 5)
    assert done.returncode == 1 and "runs until step 6: --steps can only extend it" in done.stderr
    assert (workdir / "train" / "run.json").read_text() == before


def test_run_created_concurrently_is_not_overwritten(
    finished_runs: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the other process creates its run after this check
    monkeypatch.setattr("handgrad.training.lifecycle._check_free", lambda run, resume: None)
    before = file_contents(workdir / "train")
    done = handgrad("train", *train_options(finished_runs), "--out", "train")
    assert done.returncode == 1 and "has just been created by another process" in done.stderr
    assert file_contents(workdir / "train") == before


def test_folder_that_is_not_a_run_is_rejected_unchanged(workdir: Path) -> None:
    (workdir / "user").mkdir()
    (workdir / "user" / "notes.txt").write_text("user data")
    for resume in ([], ["--resume"]):
        done = handgrad("train", *resume, "--out", "user", "--data", workdir / "user" / "notes.txt")
        assert done.returncode == 1 and "is not a run folder" in done.stderr
    assert [p.name for p in (workdir / "user").iterdir()] == ["notes.txt"]


def test_failed_start_leaves_no_files(finished_runs: Path, workdir: Path) -> None:
    done = handgrad("train", "--data", finished_runs / "text.txt", "--n-context", 100_000, "--out", "a/b/c")
    assert done.returncode == 1 and not (workdir / "a").exists()
    (workdir / "empty").mkdir()
    done = handgrad("train", "--data", finished_runs / "text.txt", "--n-context", 100_000, "--out", "empty")
    assert done.returncode == 1 and not list((workdir / "empty").iterdir())


# ── reports, dry runs and the Python interface ────────────────────────────────────────────────────────────────────────


def test_short_run_logs_its_last_step(finished_runs: Path, workdir: Path) -> None:
    done = handgrad(
        "train", "--data", finished_runs / "text.txt", "--steps", 3, "--val-share", 0, "--out", "short", *SMALL
    )
    assert done.returncode == 0 and "finished after 3 steps, loss" in done.stdout, done.stderr
    (record,) = Run(workdir / "short").records()
    assert record["step"] == 3 and record["tokens"] == 3 * 64
    page = (workdir / "short" / "report.html").read_text()
    assert "3 steps" in page and "No step" not in page
    assert "<circle" in page, "a single point must be drawn as a dot"
    overall = f"{record['tokens'] / record['seconds']:,.0f}"
    assert overall in page, "the report shows the average throughput of the run"


def test_warning_when_the_base_model_was_better(finished_runs: Path, workdir: Path) -> None:
    """If training only made the model worse, the best trained step is saved and a warning printed."""
    diverging = ["--lr", 50, "--schedule", "constant", "--warmup", 0, "--clip", 0, "--full"]
    options = [*finetune_options(finished_runs), *diverging]
    rank = options.index("--rank")
    done = succeed("finetune", *options[:rank], *options[rank + 2 :], "--out", "worse")
    losses = {r["step"]: r["val_loss"] for r in Run(workdir / "worse").records() if "val_loss" in r}
    assert losses[0] < min(losses[2], losses[4], losses[6]), "training must make the model worse here"
    assert "was better before training" in done.stderr
    assert "The model was better before training" in (workdir / "worse" / "report.html").read_text()
    best = min((2, 4, 6), key=losses.__getitem__)
    assert Run(workdir / "worse").best().step == best
    saved = load_file(workdir / "worse" / "model" / "model.safetensors")
    assert same_weights(saved, weights(workdir / "worse", best))


def test_dry_run_prints_the_plan_and_writes_nothing(finished_runs: Path, workdir: Path) -> None:
    done = handgrad("finetune", *finetune_options(finished_runs), "--dry-run", "--out", "dry")
    assert done.returncode == 0 and not (workdir / "dry").exists(), done.stderr
    assert "36 examples to train on, 4 to validate on" in done.stdout
    assert "trainable parameters" in done.stdout and "6 steps would take about" in done.stdout
    done = handgrad("train", *train_options(finished_runs), "--dry-run")
    assert done.returncode == 0 and not (workdir / "runs").exists() and "time of a step" in done.stdout
    done = handgrad("train", *train_options(finished_runs), "--dry-run", "--out", "train")
    assert done.returncode == 1 and "exists: choose another --out" in done.stderr


def test_train_and_finetune_from_python(finished_runs: Path, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"n_blocks": 1, "d_model": 8, "n_heads": 1, "n_context": 16, "batch_tokens": 64, "sample_tokens": 0}
    often = {"steps": 6, "eval_every": 2, "eval_batches": 1, "save_every": 2, "log_every": 2}
    first = hg.train(finished_runs / "text.txt", out="python", quiet=True, **shape, **often)
    assert capsys.readouterr().out == ""
    assert same_weights(weights(first.folder, 6), weights(workdir / "train", 6)), "hg.train must equal the command"
    assert first.val_loss == Run(first.folder).best().val_loss
    again = hg.train(
        finished_runs / "text.txt", out="python", resume=True, quiet=True, **{**shape, **often, "steps": 8}
    )
    assert again.outcome.step == 8 and torch.equal(
        again.model.transformer.wte.weight,
        load_file(workdir / "python/checkpoints/step-00000008/model.safetensors")["transformer.wte.weight"],
    )
    tuned = hg.finetune(
        first.folder, [finished_runs / "examples.jsonl"], rank=2, steps=2, targets="c_attn,c_fc", out="tuned"
    )
    assert "examples to train on" in capsys.readouterr().out
    assert tuned.path == Path("tuned/adapter") and hg.load(tuned.path).adapter.rank == 2
    with pytest.raises(hg.HandgradError, match=r"unknown option 'stepps'; available: .*steps"):
        hg.train(finished_runs / "text.txt", stepps=5)
    with pytest.raises(hg.HandgradError, match="exists: choose another out, or continue it with resume=True"):
        hg.train(finished_runs / "text.txt", out="python")
    for call, message in (
        (lambda: hg.finetune(first.model, "x.jsonl"), "not of type GPT: hg.save it first"),
        (lambda: hg.finetune(first.folder, [{"prompt": "a"}]), "write the examples to a .jsonl file first"),
        (lambda: hg.train("x.txt", out=3), "out must be the path of a folder, not 3"),
    ):
        with pytest.raises(hg.HandgradError, match=message):
            call()


def test_run_whose_flush_to_disk_fails_can_be_resumed(
    finished_runs: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of run.json as given and as decided, of the empty metrics, of the first checkpoint. tests/kills.py has all calls."""
    flush, options = os.fsync, (*train_options(finished_runs), "--steps", 1, "--out", "run")
    for n in (1, 3, 5, 7):
        count = itertools.count()

        def fails(handle: int, n: int = n, count: Iterator[int] = count) -> None:
            if next(count) == n:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            flush(handle)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fails)
            failed = handgrad("train", *options)
        assert failed.returncode == 1 and "Input/output error while flushing" in failed.stderr, (n, failed.stderr)
        resumed = handgrad("train", *options, "--resume")
        assert resumed.returncode == 0, (n, resumed.stderr)
        shutil.rmtree("run")


# ── several processes ─────────────────────────────────────────────────────────────────────────────────────────────────


def error_lines(stderr: str) -> list[str]:
    """The lines that handgrad itself printed."""
    return [line for line in stderr.splitlines() if line.startswith(("handgrad:", "handgrad, "))]


KILLED_ONCE = """
import os, sys, signal
from handgrad.training import loop
from handgrad.cli.app import main
step = loop.take_step
def killed(job, ranks):
    if job.step == 3 and ranks.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(job, ranks)
loop.take_step = killed
main()
"""


@pytest.mark.long
def test_torchrun_restarts_a_run_and_a_lost_process_prints_one_line(finished_runs: Path, workdir: Path) -> None:
    Path("script.py").write_text(KILLED_ONCE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*launch, "--max-restarts", "1", "script.py", "train", *train_options(finished_runs), "--out", "two"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming two from step 2" in done.stdout and "finished after 6 steps" in done.stdout
    ours = error_lines(done.stderr)
    assert len(ours) == 1 and "lost contact with another of the 2" in ours[0], ours
    assert "Traceback" not in done.stderr.split("torch.distributed.elastic")[0]


STOPPED = """
import os, signal, sys
from pathlib import Path
from handgrad.training import loop
from handgrad.cli.app import main
step, stopped = loop.take_step, int(os.environ["STOPPED"])
def stops(job, ranks):
    if ranks.rank == stopped:
        Path("pid").write_text(str(os.getpid()))
    ranks.total(0)
    if job.step == 3 and ranks.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    return step(job, ranks)
loop.take_step = stops
try:
    main()
finally:
    os.kill(int(Path("pid").read_text()), signal.SIGKILL)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_process_that_does_not_answer_ends_the_group(
    finished_runs: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Also if it hosts the store through which processes find each other."""
    Path("script.py").write_text(STOPPED)
    monkeypatch.setenv("STOPPED", str(rank))
    options = (*train_options(finished_runs), "--out", "two", "--peer-timeout", 1)
    done = run_processes(2, "script.py", "train", *options)
    (line,) = error_lines(done.stderr)
    assert "another of the 2 processes did not answer within 1 second" in line and "--peer-timeout" in line
    assert "ended" not in line
    succeed("train", "--resume", "--out", "two")


WORKS_LONG = """
import threading
import torch.distributed as dist
from handgrad.training.distributed import Ranks
ranks = Ranks()
ranks.set_timeout(0.6)
enough, send, sent = threading.Event(), dist.broadcast, []
def counted(*arguments, **named):
    sent.append(arguments)
    enough.set() if len(sent) == 8 else None  # four in the time that the others wait for one answer
    return send(*arguments, **named)
dist.broadcast = counted
assert ranks.broadcast(lambda: enough.wait() and "done") == "done"
ranks.shutdown()
"""


def test_others_wait_for_a_first_process_that_works_longer_than_the_limit(workdir: Path) -> None:
    Path("script.py").write_text(WORKS_LONG)
    done = run_processes(2, "script.py")
    assert done.returncode == 0, done.stderr


FAILS_ON_ONE = """
import os
from handgrad.training import loop
from handgrad.cli.app import main
from handgrad.errors import HandgradError
step = loop.take_step
def fails(job, ranks):
    if ranks.rank == 1:
        raise HandgradError("out of paper")
    return step(job, ranks)
loop.take_step = fails
main()
"""


def test_each_process_prints_its_error_once(finished_runs: Path, workdir: Path) -> None:
    Path("script.py").write_text(FAILS_ON_ONE)
    done = run_processes(2, "script.py", "train", *train_options(finished_runs), "--out", "two")
    ours = error_lines(done.stderr)
    assert "handgrad, process 1: out of paper" in ours and len(ours) <= 2, done.stderr
    done = run_processes(2, "train", "--data", finished_runs / "text.txt", "--n-context", 100_000, "--out", "three")
    ours = error_lines(done.stderr)
    assert len(ours) == 1 and "too few for a context" in ours[0], done.stderr
