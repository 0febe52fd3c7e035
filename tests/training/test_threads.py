"""The number of threads of a run: measured without side effects, recorded and kept; or following the load, if wanted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from bench.process import busy_cores

import handgrad as hg
from conftest import handgrad, run_processes, succeed, use_empty_cache
from handgrad import checks, lora, machine, optim
from handgrad.cli.generate import use_fastest_threads
from handgrad.errors import HandgradError
from handgrad.files import manifest
from handgrad.plan import thread_count
from handgrad.plan.thread_count import ROUNDS, candidates, choose
from handgrad.training import threads
from handgrad.training.distributed import Ranks
from handgrad.training.threads import trial_step
from runs import OFTEN, SMALL, TEXT, same_weights, small_job, weights


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_empty_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that may use two threads, and no variable that decides their number."""
    for name in thread_count.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class FakeMachine:
    """A clock, and a step that takes `seconds[n]` with n threads."""

    def __init__(self, **seconds: float):
        self.seconds = {int(name[1:]): s for name, s in seconds.items()}
        self.now, self.threads = 0.0, 0
        self.steps: list[int] = []

    def use(self, number: int) -> None:
        self.threads = number

    def step(self) -> None:
        self.steps.append(self.threads)
        self.now += self.seconds[self.threads]

    def choose(self, *counts: int) -> int:
        chosen = choose(self.step, counts, self.use, lambda: self.now)
        assert self.threads == chosen
        return chosen


# ── the choice ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_candidates_are_halves_of_the_most() -> None:
    assert [candidates(n) for n in (1, 2, 6, 8)] == [[1], [2, 1], [6, 3, 1], [8, 4, 2, 1]]


def test_fastest_number_is_chosen_and_the_first_kept_without_a_clear_gain() -> None:
    assert FakeMachine(n4=0.02, n2=0.01, n1=0.015).choose(4, 2, 1) == 2
    assert FakeMachine(n2=1.0, n1=0.01).choose(2, 1) == 1
    assert FakeMachine(n2=0.01, n1=0.02).choose(1, 2) == 2
    assert FakeMachine(n2=0.012, n1=0.01).choose(2, 1) == 2
    assert FakeMachine(n2=0.01, n1=0.012).choose(1, 2) == 1


def test_typical_time_counts_not_the_luckiest() -> None:
    machine = FakeMachine(n2=0.03, n1=0.02)
    lucky = iter([0.03, 0.001])  # the second step with two threads met an idle machine

    def step() -> None:
        machine.step()
        if machine.threads == 2:
            machine.now += next(lucky, 0.03) - 0.03

    assert choose(step, [2, 1], use=machine.use, clock=lambda: machine.now) == 1


def test_hopeless_candidate_runs_once_and_slow_steps_are_not_repeated() -> None:
    hopeless = FakeMachine(n2=0.2, n1=0.01)
    hopeless.choose(2, 1)
    assert hopeless.steps.count(2) == 1 and hopeless.steps.count(1) == 1 + ROUNDS
    slow = FakeMachine(n2=5.0, n1=8.0)
    assert slow.choose(2, 1) == 2 and slow.steps == [1, 2, 1]


def test_any_loop_can_choose(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hg.choose_threads` sets the number, unless a variable has decided."""

    def step() -> None:
        time.sleep(0.02 if torch.get_num_threads() == 2 else 0.002)

    assert hg.choose_threads(step) == torch.get_num_threads() == 1
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert hg.choose_threads(step) == torch.get_num_threads() == 2


@pytest.mark.parametrize(("load", "number"), [(0.0, 2), (9.0, 1)])
def test_commands_that_generate_choose_on_a_busy_machine(
    load: float, number: int, two_threads: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def logits(tokens: torch.Tensor, generating: bool) -> None:
        assert generating
        time.sleep(0.02 if torch.get_num_threads() == 2 else 0.002)

    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    use_fastest_threads(mock.Mock(logits=logits))
    assert torch.get_num_threads() == number
    assert ("threads: 1 of 2, measured, because the machine is busy" in capsys.readouterr().err) == (number == 1)


def test_failed_measurement_sets_the_first_candidate() -> None:
    machine = FakeMachine(n2=0.1, n1=0.1)

    def step() -> None:
        raise HandgradError("no step")

    with pytest.raises(HandgradError):
        choose(step, [2, 1], use=machine.use, clock=lambda: machine.now)
    assert machine.threads == 2


# ── the trial step ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"update_inside": True}, {"recompute": "blocks"}])
@pytest.mark.parametrize("flop", [threads.TRIAL_FLOP, 0.0])
def test_trial_step_changes_nothing(
    text: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], flop: float
) -> None:
    monkeypatch.setattr(threads, "TRIAL_FLOP", flop)
    job = small_job(text, **options)
    lora.inject(job.model, rank=2, targets="all-linear", dropout=0.5)
    before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    state, random = optim.state_of(job.optimizer, job.names), torch.get_rng_state()
    lengths_seen: list[int] = []
    original = job.model.loss_and_grads

    def spy(tokens: torch.Tensor, *arguments: object, **more: object) -> float:
        lengths_seen.append(tokens.numel())
        return original(tokens, *arguments, **more)

    monkeypatch.setattr(job.model, "loss_and_grads", spy)
    trial_step(job)()
    assert lengths_seen == [64 if flop else threads.TRIAL_TOKENS]
    assert all(torch.equal(p, before[name]) for name, p in job.model.named_parameters())
    assert all(p.grad is None for p in job.model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    after = optim.state_of(job.optimizer, job.names)
    assert set(after) == set(state) and all(torch.equal(after[name], state[name]) for name in state)
    assert (job.step, job.seconds, job.tokens) == (0, 0.0, 0)


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def choosing(monkeypatch: pytest.MonkeyPatch, *answers: int) -> list[list[int]]:
    """Measure as usual, but choose these numbers one after the other. Returns the candidates of the calls."""
    calls: list[list[int]] = []
    left = list(answers)

    def chosen(run_step: Callable[[], object], counts: list[int]) -> int:
        calls.append(counts)
        choose(run_step, counts)
        torch.set_num_threads(left[0])
        return left.pop(0)

    monkeypatch.setattr(threads, "choose", chosen)
    return calls


def history(run: Path, step: int) -> object:
    return manifest.read(run / "checkpoints" / f"step-{step:08d}")["threads"]


def metrics(run: Path) -> dict[int, int]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["threads"] for r in records if "threads" in r}


def train(text: Path, out: str, *more: object, steps: int = 6) -> str:
    done = succeed("train", "--data", text, "--out", out, "--steps", steps, *SMALL, *OFTEN, "--keep", 9, *more)
    return done.stdout


def test_measuring_changes_no_bit_of_the_run(text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "threads:" not in train(text, "fixed", "--threads", 1)
    calls = choosing(monkeypatch, 1)
    assert "threads: 1 of 2, measured" in train(text, "measured")
    assert calls == [[2, 1]] and torch.get_num_threads() == 2
    assert same_weights(weights(Path("fixed"), 6), weights(Path("measured"), 6))
    assert history(Path("measured"), 6) == [[0, 1]] and metrics(Path("measured")) == {2: 1, 4: 1, 6: 1}
    assert json.loads(Path("measured/run.json").read_text())["threads"] == 1


@pytest.mark.parametrize("name", thread_count.VARIABLES)
def test_variables_of_the_user_decide(
    text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "2")
    calls = choosing(monkeypatch)
    train(text, "run")
    assert not calls and history(Path("run"), 6) == [[0, 2]]


@pytest.mark.parametrize("checkpoints", [True, False])
def test_resumed_run_keeps_its_number(
    text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch, checkpoints: bool
) -> None:
    """It measures nothing, and no variable changes the number: neither with a checkpoint nor before the first one."""
    calls = choosing(monkeypatch, 1)
    train(text, "run")
    before = weights(Path("run"), 6)
    for step in (4, 6) if checkpoints else (2, 4, 6):
        (Path("run/checkpoints") / f"step-{step:08d}").rename(f"moved-{step}")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    said = train(text, "run", "--resume")
    assert "threads: 1 of 2, as recorded; --threads changes it" in said
    assert len(calls) == 1 and history(Path("run"), 6) == [[0, 1]]
    assert same_weights(weights(Path("run"), 6), before)


def test_a_run_that_follows_the_load(text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PAUSE", 0.0)
    monkeypatch.setattr(threads, "COST", 0.0)  # measure after every step
    calls = choosing(monkeypatch, 2, 2, 2, 1, 1, 1, 2, 2)
    said = train(text, "run", "--follow-load")
    assert "threads: 2 of 2, measured, and again as the load changes" in said
    assert "step 3: 1 thread instead of 2: faster now" in said
    assert history(Path("run"), 2) == [[0, 2]] and history(Path("run"), 6) == [[0, 2], [3, 1]]
    assert metrics(Path("run")) == {2: 2, 4: 1, 6: 1}
    assert calls == [[2, 1], [2, 1], [2, 1], [2, 1], [1, 2], [1, 2]]
    train(text, "run", "--resume", steps=8)  # follows it still
    assert calls[6:] == [[1, 2], [2, 1]] and history(Path("run"), 8) == [[0, 2], [3, 1], [6, 2]]
    train(text, "run", "--resume", "--threads", 1, steps=10)
    assert len(calls) == 8 and history(Path("run"), 10) == [[0, 2], [3, 1], [6, 2], [8, 1]]


def test_following_the_load_is_refused_where_it_cannot_be(text: Path) -> None:
    with pytest.raises(HandgradError, match="follow_load=True chooses what threads decides: give one"):
        hg.train(text, threads=1, follow_load=True, out="run")
    ranks, job = Ranks(), small_job(text, follow_load=True)
    ranks.size = 2
    with pytest.raises(HandgradError, match="follow_load=True is for a run of one process"):
        threads.Threads(job, ranks, print)


def test_several_processes_measure_nothing(text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = choosing(monkeypatch)
    ranks, job = Ranks(), small_job(text)
    ranks.size = 2
    with threads.Threads(job, ranks, print) as chosen:
        assert (chosen.number, chosen.describe(), calls) == (2, "", [])


SHAPE = ["--n-blocks", 1, "--d-model", 64, "--n-heads", 2, "--n-context", 32, "--batch-tokens", 512]  # fmt: skip


@pytest.mark.long
def test_a_killed_run_keeps_its_bits_when_the_load_changes(text: Path) -> None:
    """Processes that choose for themselves; the second one meets busy cores. Compared with a run that is not interrupted."""
    own = {name: value for name, value in os.environ.items() if name not in thread_count.VARIABLES}
    options = ["--data", text, *SHAPE, "--steps", 10, "--sample-tokens", 0, "--save-every", 1, "--keep", 99]
    command = ["train", *options, "--out", "run"]
    start = [sys.executable, "-m", "handgrad", *map(str, command)]
    process = subprocess.Popen(start, env=own, stdout=subprocess.DEVNULL)
    while not Path("run/checkpoints/step-00000003").exists() and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not Path("run/checkpoints/step-00000010").exists()
    number = json.loads(Path("run/run.json").read_text())["threads"]
    assert run_processes(1, "--version").returncode == 0  # what forks has been imported
    with busy_cores(machine.available_cores()):
        done = run_processes(1, *command, "--resume", environment=own)
    assert done.returncode == 0 and "resuming run from step" in done.stdout, done.stderr
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {record["threads"] for record in records if "threads" in record} == {number}
    for n in {number, 1, 2}:  # the bits of this shape depend on no number of threads
        with mock.patch.object(checks, "available_cores", lambda: 2):
            succeed("train", *options, "--threads", n, "--out", f"with-{n}")
        assert same_weights(weights(Path("run"), 10), weights(Path(f"with-{n}"), 10))


def test_threads_can_change_on_resume(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_cores", lambda: 2)
    train(text, "run", "--threads", 1)
    train(text, "run", "--threads", 2, "--resume", steps=8)
    assert history(Path("run"), 8) == [[0, 1], [6, 2]] and torch.get_num_threads() == 1


def test_bad_numbers_of_threads_are_refused(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_cores", lambda: 2)
    too_many = "--threads is 3, and this process may use 2 cores: give at most 2"
    for value, message in [(0, "--threads must be an integer of at least 1, not 0"), (3, too_many)]:
        for command in ("train", "plan"):
            arguments = ["--data", text, "--out", "run"] if command == "train" else ["--model", "nano"]
            done = handgrad(command, *arguments, "--threads", value)
            assert done.returncode == 1 and message in " ".join(done.stderr.split())
    with pytest.raises(HandgradError, match="threads must be an integer, not 'all'"):
        hg.train(text, threads="all", out="run")
    assert not Path("run").exists()
