"""The command: which model it chooses, what it writes, how it reports mistakes."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_session import TEXT, make_session
from typer.testing import CliRunner

import handgrad as hg
from handgrad.cli import explain as cli_explain
from handgrad.cli import explain_beside
from handgrad.cli.app import app
from handgrad.cli.explain import choose, explain
from handgrad.explain_page.server import Server
from handgrad.formats import models
from handgrad.formats.models import find_model
from handgrad.text import downloads, tokenizer
from handgrad.training import checkpoint
from handgrad.training.run import Run


def model_directory(folder: Path, with_tokenizer: bool = True, **shape: object) -> Path:
    session = make_session(n_blocks=1, **shape)  # type: ignore[arg-type]
    hg.save(session.model, folder)
    if with_tokenizer:
        session.tokenizer.write(folder)
    return folder


def run_folder(folder: Path) -> Path:
    run, session = Run(folder), make_session(n_blocks=1)
    folder.mkdir(parents=True)
    run.create({"tokens": "x"})
    checkpoint.save(run, 3, session.model, session.tokenizer, {"rng/torch": torch.get_rng_state()}, {"seconds": 1.0})
    return folder


def test_a_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_directory(tmp_path / "model")
    explain(model=str(folder), text=[TEXT], html=tmp_path / "page.html", lora=2)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "with adapters of rank 2" in page and "Content-Security-Policy" in page
    assert "src=" not in page.replace("src/", "") and "<link" not in page
    assert "page.html" in capsys.readouterr().out
    assert str(tmp_path) not in page and "model = hg.load('model').eval()" in page, "others have no such path"


def test_a_live_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    characters = tokenizer.make("chars", [TEXT])
    hg.save(hg.GPT(hg.preset("nano", n_vocab=characters.n_vocab, n_blocks=1, d_model=16)), tmp_path / "model")
    characters.write(tmp_path / "model")
    explain(model=str(tmp_path / "model"), text=[TEXT], html=tmp_path / "page.html", live=True)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'id="live-model"' in page and 'embedded-answers">' not in page and str(tmp_path) not in page
    assert "page.html" in capsys.readouterr().out


def test_choice_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_explain, "train_small_model", lambda *_: run_folder(tmp_path / "small"))
    monkeypatch.setattr(downloads, "is_cached", lambda name: False)
    assert "trained for 400 steps" in choose(None)[3]
    run_folder(tmp_path / "runs" / "mine")
    (tmp_path / "runs" / "begun").mkdir()
    (tmp_path / "runs" / "begun" / "run.json").write_text("{}")  # newer, but without a checkpoint
    network, tokenizer, name, note, source = choose(None)
    assert source == "runs/mine"
    assert (
        name == "mine" and note == "trained in runs/mine" and tokenizer.n_vocab == 256 and network.config.n_blocks == 1
    )
    assert choose("nano")[3].startswith("random weights")
    monkeypatch.setattr(downloads, "is_cached", lambda name: name == "smollm2")
    monkeypatch.setattr(cli_explain, "DEFAULT", "smollm2")
    asked: list[str | None] = []
    monkeypatch.setattr(models, "find_model", lambda name: asked.append(name) or find_model("nano"))
    choose(None)
    assert asked == ["smollm2"]
    assert choose(str(model_directory(tmp_path / "bytes", with_tokenizer=False)))[1].encode("a") == [97]


@pytest.mark.long
def test_the_small_model_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_explain, "STEPS", 2)
    monkeypatch.setattr(cli_explain, "cache_path", lambda kind, name: tmp_path / kind / name)
    folder = cli_explain.train_small_model()
    assert Run(folder).best().step == 2
    assert [path.name for path in folder.parent.iterdir()] == ["nano-2"]
    before = (folder / "run.json").stat().st_mtime_ns
    assert cli_explain.train_small_model() == folder and (folder / "run.json").stat().st_mtime_ns == before


def test_the_lines_of_python_define_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_directory(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    for name in ("nano", "runs/mine", str(folder)):
        chosen = choose(name)
        assert str(tmp_path) not in chosen.note
        names: dict[str, object] = {}
        exec("import handgrad as hg\n" + cli_explain.in_python(chosen.source), names)
        model = names["model"]
        assert isinstance(model, hg.GPT) and not model.training
        for p, q in zip(model.parameters(), chosen.network.parameters(), strict=True):
            assert torch.equal(p, q)
        for_others = cli_explain.in_python(chosen.source, others_read=True)
        assert str(tmp_path) not in for_others and for_others.startswith("model = hg.")


class Trained:
    """A process that has trained a model, or could not."""

    returncode = 0

    def __init__(self, command: list[str], **options: object):
        self.command = command

    def __enter__(self) -> "Trained":
        return self

    def __exit__(self, *_: object) -> None: ...

    def communicate(self) -> tuple[str, str]:
        return "", "Error: no space left on device"

    def terminate(self) -> None: ...


class AtOnce:
    """A thread that has ended when it is started."""

    def __init__(self, target: Callable[[], None], daemon: bool):
        self.start = target


def test_the_page_opens_before_a_model_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SmolLM2 and without a run, the page starts with random weights, and links to the small model when it is
    trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_explain, "cache_path", lambda kind, name: tmp_path / kind / name)
    monkeypatch.setattr(downloads, "is_cached", lambda name: False)
    assert cli_explain._nothing_trained()
    monkeypatch.setattr(explain_beside.subprocess, "Popen", Trained)
    monkeypatch.setattr(explain_beside, "Thread", AtOnce)
    trained = run_folder(tmp_path / "demo" / "nano-400")
    monkeypatch.setattr(cli_explain, "train_small_model", lambda *_: trained)
    session = make_session(n_blocks=1)
    with pytest.raises(hg.HandgradError, match="no model to download"):
        session.download()
    with ExitStack() as beside:
        explain_beside.train_beside(session, 0, beside)
        explain_beside.offer_download(session, 0, beside)
        small, offer = session.better
        assert offer["download"] and "(98.4 MB)" in offer["text"] and not small["download"]
        monkeypatch.setattr(explain_beside, "choose", lambda name: cli_explain.small_model())
        session.download()
        assert not offer["download"], "once"
        for line in (small, offer):
            assert line["url"] and urllib.request.urlopen(line["url"]).status == 200
    monkeypatch.setattr(Trained, "returncode", 1)
    with ExitStack() as beside:
        explain_beside.train_beside(session, 0, beside)
        offer["download"] = True
        session.download()
    for line in (session.better[-1], offer):
        assert "no space left" in line["text"] and line["url"] == ""
    assert offer["download"], "it can be tried again"
    monkeypatch.setattr(cli_explain, "STEPS", 3)
    run_folder(tmp_path / "demo" / "nano-3")
    assert not cli_explain._nothing_trained()


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(hg.HandgradError, match="neither a preset"):
        choose("gpt5")
    with pytest.raises(hg.HandgradError, match=r"put its\s+tokenizer.json there"):
        choose(str(model_directory(tmp_path / "odd", with_tokenizer=False, n_vocab=300)))
    folder = str(model_directory(tmp_path / "model"))
    with pytest.raises(hg.HandgradError, match="does not exist"):
        explain(model=folder, html=tmp_path / "no" / "page.html")
    with pytest.raises(hg.HandgradError, match="at most 48"):
        explain(model=folder, text=["x" * 50], html=tmp_path / "page.html")
    with pytest.raises(hg.HandgradError, match="rank"):
        explain(model=folder, text=[TEXT], html=tmp_path / "page.html", lora=999)
    assert not (tmp_path / "page.html").exists()


def test_the_command_serves_until_interrupted(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "model")
    command = [sys.executable, "-m", "handgrad", "explain", "--model", str(folder), "--text", TEXT, "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        url = next(line for line in process.stdout if "http://" in line).split()[0]
        with urllib.request.urlopen(url) as page:
            assert b"handgrad" in page.read()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    assert process.returncode == 0 and process.stderr.read() == ""
    process.stdout.close()
    process.stderr.close()


def test_a_server_can_be_started_and_stopped_twice() -> None:
    for _ in range(2):
        with Server(make_session(n_blocks=1)) as url, urllib.request.urlopen(url) as page:
            assert page.status == 200


def test_the_browser_gets_the_key_in_a_file_that_only_this_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line of a browser can be read by everyone on the machine."""
    opened: list[str] = []
    seen: list[tuple[str, int]] = []

    def run(server: Server) -> None:
        file = Path(urllib.request.url2pathname(opened[0].removeprefix("file://")))
        seen.append((file.read_text(), file.parent.stat().st_mode & 0o777))
        server._socket.close()
        assert f'url={server.url}"' in seen[0][0] and server.key in server.url and server.key not in opened[0]

    class At:  # a Timer that does not wait
        def __init__(self, _: float, function: Any, arguments: list[Any]):
            self.start = lambda: function(*arguments)

    monkeypatch.setattr("handgrad.cli.explain.Timer", At)
    monkeypatch.setattr("handgrad.cli.explain._trace_first", lambda session: None)
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(Server, "run", run)
    done = CliRunner().invoke(app, ["explain", "--model", "nano", "--text", TEXT])
    assert done.exit_code == 0 and "?key=" in done.stdout, done.output
    assert seen[0][1] == 0o700 and not Path(urllib.request.url2pathname(opened[0].removeprefix("file://"))).exists()


def test_help_lists_every_option() -> None:
    done = CliRunner().invoke(app, ["explain", "--help"])
    assert done.exit_code == 0
    for option in ("--model", "--text", "--html", "--lora", "--port", "--no-open"):
        assert option in done.stdout
