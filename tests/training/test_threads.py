"""The number of threads of a run: measured without side effects, followed by the load, recorded and resumed."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import handgrad as hg
from conftest import SilentDisplay, handgrad, use_empty_cache
from handgrad import adapters, checks, machine, optim
from handgrad.errors import HandgradError
from handgrad.files import manifest
from handgrad.training import threads
from handgrad.training.config import TrainOptions
from handgrad.training.distributed import Ranks
from handgrad.training.job import Job
from handgrad.training.pretrain import prepare
from handgrad.training.threads import FAR, GAIN, PAUSE, PROBE, ROUNDS, STEPS, Watcher, candidates, choose, trial_step
from runs import OFTEN, SMALL, TEXT, same_weights, weights


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_empty_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that may use two threads, and no variable that decides their number."""
    for name in threads.VARIABLES:
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

    def choose(self, *counts: int, gain: float = GAIN) -> int:
        chosen = choose(self.step, counts, gain, self.use, lambda: self.now)
        assert self.threads == chosen
        return chosen


# ── the choice ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_candidates_are_halves_of_the_most() -> None:
    assert [candidates(n) for n in (1, 2, 6, 8)] == [[1], [2, 1], [6, 3, 1], [8, 4, 2, 1]]


def test_fastest_number_is_chosen() -> None:
    assert FakeMachine(n4=0.02, n2=0.01, n1=0.015).choose(4, 2, 1) == 2
    assert FakeMachine(n2=1.0, n1=0.01).choose(2, 1) == 1
    assert FakeMachine(n2=0.01, n1=0.02).choose(1, 2) == 2


def test_first_candidate_is_kept_without_a_clear_gain() -> None:
    assert FakeMachine(n2=0.012, n1=0.01).choose(2, 1) == 2
    assert FakeMachine(n2=0.01, n1=0.012).choose(1, 2) == 1
    assert FakeMachine(n2=0.02, n1=0.01).choose(2, 1, gain=FAR) == 2


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


def test_failed_measurement_sets_the_first_candidate() -> None:
    machine = FakeMachine(n2=0.1, n1=0.1)

    def step() -> None:
        raise HandgradError("no step")

    with pytest.raises(HandgradError):
        choose(step, [2, 1], use=machine.use, clock=lambda: machine.now)
    assert machine.threads == 2


# ── the watcher ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Training:
    """Steps under a watcher with its own clock."""

    def __init__(self, cost: float = 0.4):
        self.now = 0.0
        self.watcher = Watcher(lambda: self.now)
        self.watcher.chosen(cost, changed=False)

    def due(self, seconds: float, steps: int, work: float = 100.0, more: bool = False) -> int | None:
        """The first of these steps after which a new choice is due."""
        for i in range(steps):
            self.now += seconds
            if self.watcher.due(self.watcher.slowdown(seconds, work), more):
                return i
        return None


def test_steady_and_faster_steps_need_no_choice() -> None:
    training = Training()
    assert training.due(0.1, 500) is None and training.due(0.04, 500) is None


def test_far_slower_steps_need_a_choice_soon() -> None:
    training = Training()
    training.due(0.1, 200)
    assert training.due(0.11 * FAR, 100) in range(STEPS // 2, STEPS)
    training.watcher.chosen(0.4, changed=True)
    assert training.due(0.11 * FAR, 100) is None  # the new normal


def test_a_hiccup_or_a_larger_batch_needs_no_choice() -> None:
    training = Training()
    training.due(0.1, 200)
    assert training.due(5.0, STEPS // 2 - 1) is None and training.due(0.1, 50) is None
    assert training.due(1.0, 50, work=1000.0) is None


def test_choices_take_a_small_part_of_the_time() -> None:
    training = Training(cost=10.0)
    training.due(0.1, STEPS)
    training.due(10.0, 50)
    assert PAUSE * 10 <= training.now < PAUSE * 10 + 300
    assert Training(cost=10.0).due(1.0, PAUSE * 10 - 1) is None


def test_more_threads_are_tried_less_and_less_often() -> None:
    training = Training(cost=0.1)
    training.watcher.chosen(0.1, changed=True)
    assert training.due(1.0, 1000, more=False) is None
    training.watcher.chosen(0.1, changed=True)
    for wait in (PROBE, 2 * PROBE, 4 * PROBE):
        assert training.due(1.0, 1000, more=True) == math.ceil(wait) - 1
        training.watcher.chosen(0.1, changed=False)
    training.watcher.chosen(0.1, changed=True)
    assert training.due(1.0, 1000, more=True) == math.ceil(PROBE) - 1


# ── the trial step ────────────────────────────────────────────────────────────────────────────────────────────────────


def make_job(text: Path, **options: object) -> Job:
    shape = (("d_model", 16), ("n_blocks", 2), ("n_context", 16), ("n_heads", 2))
    config = TrainOptions(data=(str(text),), shape=shape, **{"batch_tokens": 64, "steps": 9, **options})
    return prepare(config, Ranks(), SilentDisplay())


@pytest.mark.parametrize("options", [{}, {"update_inside": True}, {"recompute": "blocks"}])
@pytest.mark.parametrize("flop", [threads.TRIAL_FLOP, 0.0])
def test_trial_step_changes_nothing(
    text: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], flop: float
) -> None:
    monkeypatch.setattr(threads, "TRIAL_FLOP", flop)
    job = make_job(text, **options)
    adapters.inject(job.model, rank=2, targets="all-linear", dropout=0.5)
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

Calls = list[tuple[list[int], float]]


def choosing(monkeypatch: pytest.MonkeyPatch, *answers: int) -> Calls:
    """Measure as usual, but choose these numbers one after the other. Returns the candidates and gains of the calls."""
    calls: Calls = []
    left = list(answers)

    def chosen(run_step: Callable[[], object], counts: list[int], gain: float) -> int:
        calls.append((counts, gain))
        choose(run_step, counts, gain)
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
    done = handgrad("train", "--data", text, "--out", out, "--steps", steps, *SMALL, *OFTEN, "--keep", 9, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_measuring_changes_no_bit_of_the_run(text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "threads:" not in train(text, "fixed", "--threads", 1)
    calls = choosing(monkeypatch, 1)
    assert "threads: 1 of 2, measured" in train(text, "measured")
    assert calls == [([2, 1], GAIN)] and torch.get_num_threads() == 2
    assert same_weights(weights(Path("fixed"), 6), weights(Path("measured"), 6))
    assert history(Path("measured"), 6) == [[0, 1]] and metrics(Path("measured")) == {2: 1, 4: 1, 6: 1}
    assert json.loads(Path("measured/run.json").read_text())["threads"] == 1


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_variables_of_the_user_decide(
    text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "2")
    calls = choosing(monkeypatch)
    train(text, "run")
    assert not calls and history(Path("run"), 6) == [[0, 2]]


def test_change_is_announced_recorded_and_resumed(
    text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps become slow after the third: the run goes on with one thread, and so does a run resumed from then on; one
    resumed from before prefers two again."""
    calls = choosing(monkeypatch, 2, 1, 1, 1)
    slow = iter([1.0, 1.0, FAR + 1, *[1.0] * 20])
    monkeypatch.setattr(Watcher, "slowdown", lambda *_: next(slow))
    monkeypatch.setattr(Watcher, "due", lambda _, slowdown, more: slowdown > FAR)
    said = train(text, "run")
    assert "step 3: 1 thread instead of 2, because steps had become 4.0 times as slow" in said
    assert history(Path("run"), 2) == [[0, 2]] and history(Path("run"), 6) == [[0, 2], [3, 1]]
    assert metrics(Path("run")) == {2: 2, 4: 1, 6: 1}
    assert calls == [([2, 1], GAIN), ([2, 1], GAIN)]

    assert "threads: 1 of 2, as recorded" in train(text, "run", "--resume", steps=8)
    assert calls[2:] == [([1, 2], FAR)] and history(Path("run"), 8) == [[0, 2], [3, 1]]
    for step in (4, 6, 8):
        (Path("run/checkpoints") / f"step-{step:08d}").rename(f"moved-{step}")
    assert "threads: 1 of 2, measured; the run had 2 before" in train(text, "run", "--resume", steps=8)
    assert calls[3:] == [([2, 1], FAR)] and history(Path("run"), 8) == [[0, 2], [2, 1]]


def test_run_without_a_checkpoint_starts_again_with_its_number(
    text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = choosing(monkeypatch, 1, 1)
    train(text, "run")
    for folder in Path("run/checkpoints").iterdir():
        folder.rename(folder.name)
    train(text, "run", "--resume")
    assert calls == [([2, 1], GAIN), ([1, 2], FAR)]
    assert same_weights(weights(Path("run"), 6), load_file("step-00000006/model.safetensors"))


def test_several_processes_measure_nothing(text: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = choosing(monkeypatch)
    ranks, job = Ranks(), make_job(text)
    ranks.size = 2
    with threads.Threads(job, ranks, print) as chosen:
        assert (chosen.number, chosen.watcher, calls) == (2, None, [])


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


def test_spinning_is_limited_unless_the_user_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({}, {"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        machine.limit_spinning()
        expected = given or {"GOMP_SPINCOUNT": "10000"}
        assert {n: os.environ[n] for n in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if n in os.environ} == expected
