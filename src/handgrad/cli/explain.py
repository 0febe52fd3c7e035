"""The command explain: choose a model, then serve the page on this machine or write it to a file."""

import subprocess
import sys
import webbrowser
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread, Timer
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import HandgradError
from ..files.atomic import check_writable, write_text
from ..files.cache import cache_path
from ..formatting import loss, plural, public_path, size
from ..training.config import TrainOptions
from .options import MODEL

if TYPE_CHECKING:
    from ..explain_page.session.session import Session
    from ..model.gpt import GPT
    from ..text.tokenizer import Tokenizer

DEFAULT = "smollm2"  # if it was fetched
SEED = 0  # of random weights
GET = "get smollm2"
SMALL_MODEL = "nano"
STEPS = 400  # of the small model that is trained if there is no other
TEXT = "To be, or not to be, that is the question:"
TEXTS = {DEFAULT: "The capital of France is Berlin, and the capital of Italy is Rome."}  # a model that knows better
SMALL = 5_000_000  # parameters; below, one thread
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)


def explain(
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{MODEL} A preset has random weights. [default: smollm2 if it was fetched, or else the newest run in"
            " runs/, or else a small model that is trained meanwhile]"
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help=f"Sentence to show first. [default: {TEXT} For smollm2: {TEXTS[DEFAULT]}]")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page as one file that needs no server, and exit.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="With --html: put the model into the file instead of answers, so that it takes any sentence and step."
            " For a small model that reads characters.",
        ),
    ] = False,
    lora: Annotated[
        int,
        typer.Option(
            metavar="RANK", min=0, help="Freeze the model and train adapters of this rank. [default: 0, none]"
        ),
    ] = 0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port. [default: any free port]")] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the browser.")] = True,
) -> None:
    """Watch backpropagation: a page that shows a forward and a backward pass of a real model, layer by layer.

    Every layer is shown with its formulas, the numbers of your sentence, and a check of the formulas on this sentence
    against autograd and finite differences. Only this machine can open the page, and only with the printed address: it
    contains a key.

      handgrad explain --model nano --text "Once upon a time" --html page.html
      handgrad explain --model runs/mine --no-open
    """
    if live and html is None:
        raise HandgradError("--live is about the file that --html writes: add --html FILE")
    if html is not None:
        check_writable(html)
    with _waiting("Starting …"):
        import torch

    untrained = model is None and html is None and _nothing_trained()
    session = _session(choose(SMALL_MODEL if untrained else model), text, lora, others_read=html is not None)
    if session.size < SMALL or html is not None:  # products of one sentence: a second thread mostly waits
        torch.set_num_threads(1)
    session.encode(session.text)  # report an invalid sentence now
    if html is not None:
        from ..explain_page.export import export, export_live
        from ..proof.check_report import progress_bar

        write_text(html, export_live(session) if live else export(session, session.text, progress_bar("checking")))
        out.print(f"wrote {html}, {size(html.stat().st_size)}", highlight=False, soft_wrap=True)
        return
    from ..explain_page.server import Server

    server = Server(session, port)
    out.print(f"{session.name}, {session.note}", highlight=False, markup=False)
    out.print(f"{server.url}   Press Ctrl-C to stop.", highlight=False, soft_wrap=True)
    Thread(target=_trace_first, args=[session], daemon=True).start()
    with (
        TemporaryDirectory(prefix="handgrad-", ignore_cleanup_errors=True) as private,
        ExitStack() as beside,
        suppress(KeyboardInterrupt),  # the normal way to stop
    ):
        if open_browser:
            Timer(0.5, webbrowser.open, [_doorway(Path(private), server.url)]).start()
        if untrained:
            _train_beside(session, lora, beside)
        server.run()


def _doorway(folder: Path, url: str) -> str:
    """The address of a file that leads to the page. Only this user can read it, while everyone on the machine can read a
    browser's command line, and with it an address that contains the key."""
    file = folder / "explain.html"
    file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">handgrad</a>\n')
    return file.as_uri()


def _train_beside(session: "Session", lora: int, beside: ExitStack) -> None:
    """Train the small model in another process while the page shows it untrained; then serve it too, and tell the page
    where. `beside` ends what was started."""
    from ..explain_page.server import Server

    offer = f"For a model that knows more: handgrad {GET} (98 MB), then handgrad explain again."
    out.print(f"A small model is being trained meanwhile, {plural(STEPS, 'step')}. {offer}", highlight=False)
    session.better = {
        "text": f"This model has random weights. A trained one follows in about a minute, and a link to it here. {offer} ",
        "url": None,
    }
    command = [sys.executable, "-c", f"from {__name__} import _train_small_model; _train_small_model()"]
    process = beside.enter_context(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    )
    beside.callback(process.terminate)

    def follow() -> None:
        _, problem = process.communicate()
        if process.returncode:
            reason = (problem.strip().splitlines() or ["it was stopped"])[-1]
            session.better = {"text": f"The small model could not be trained: {reason}. {offer}", "url": ""}
            return
        url = beside.enter_context(Server(_session(choose(None), session.text, lora)))
        out.print(f"The small model is trained: {url}", highlight=False, soft_wrap=True)
        session.better = {"text": "A trained small model is there. ", "url": url}

    Thread(target=follow, daemon=True).start()


def _session(chosen: "Chosen", text: str | None, lora: int, others_read: bool = False) -> "Session":
    from ..explain_page.session.session import Session, add_adapters

    network, tokenizer, name, note, source = chosen
    python = in_python(source, others_read)
    if lora:
        add_adapters(network, lora)
        note += f", with adapters of rank {lora}"
        python += f"\nhg.lora.inject(model, {lora})"
    return Session(network, tokenizer, name, note, text or TEXTS.get(name, TEXT), python)


def _waiting(what: str) -> AbstractContextManager[object]:
    """Show on a terminal what is being done, until the context ends."""
    return err.status(escape(what)) if err.is_terminal else nullcontext()


def _trace_first(session: "Session") -> None:
    """Trace the first sentence while the browser opens."""
    with suppress(HandgradError):  # the page reports it
        value = session.sentence(session.text).trace.loss
        out.print(f"Ready: the sentence was run forward and backward; its loss is {loss(value)}.", highlight=False)


class Chosen(NamedTuple):
    """The model of the page."""

    network: "GPT"
    tokenizer: "Tokenizer"
    name: str
    note: str  # where its weights come from
    source: str | Path  # what `hg.load` takes; the name of a preset


def in_python(source: str | Path, others_read: bool = False) -> str:
    """The lines that define `model`. What others will read has no path of this machine."""
    from ..model.config import PRESETS

    if source in PRESETS:
        return f"model = hg.GPT(hg.preset({source!r}), seed={SEED}).eval()"
    given = public_path(source) if others_read else str(source)
    where = "  # where this folder is on your machine" if given != str(source) else ""
    return f"model = hg.load({given!r}).eval(){where}"


def choose(name: str | None) -> Chosen:
    """Find the model and its tokenizer."""
    from ..formats.models import find_model
    from ..formats.run_folder import model_folder, newest_run
    from ..model.gpt import GPT
    from ..text.downloads import is_cached

    if name is None and is_cached(DEFAULT):
        name = DEFAULT
    if name is None and newest_run(with_checkpoint=True) is None:
        run = _train_small_model()
        opened = _open(model_folder(run), SMALL_MODEL)
        return Chosen(*opened, SMALL_MODEL, f"trained for {plural(STEPS, 'step')}", run)
    found = find_model(name)
    if found.folder is None:
        network = GPT(found.config, seed=SEED)
        note = "; ".join(["random weights, not trained", found.note]).strip("; ")
        return Chosen(network, _tokenizer(None, network), found.name, note, found.name)
    where = public_path(found.name)
    note = f"trained in {where}" if name is None else "trained weights" if name == DEFAULT else f"from {where}"
    return Chosen(*_open(found.folder, found.name), Path(found.name).name, note, found.name)


def _open(folder: Path, name: str) -> "tuple[GPT, Tokenizer]":
    from ..formats.models import open_folder

    with _waiting(f"Loading {Path(name).name} …"):
        network = open_folder(folder)
        return network, _tokenizer(folder, network)


def _tokenizer(folder: Path | None, network: "GPT") -> "Tokenizer":
    """Return the tokenizer of the model folder, or else the one that fits the size of the vocabulary."""
    from ..formats.models import tokenizer_folder
    from ..text import tokenizer

    if folder is not None and (found := tokenizer_folder(folder)) is not None:
        return tokenizer.read(found)
    if network.config.n_vocab == 256:
        return tokenizer.make("bytes", ())
    if network.config.n_vocab == 50257:
        return tokenizer.gpt2()
    remedy = "put its tokenizer.json there" if folder else "choose a folder that has a tokenizer.json"
    raise HandgradError(
        f"{folder or 'this preset'} has no tokenizer, and its vocabulary of {network.config.n_vocab:,} is neither bytes"
        f" (256) nor GPT-2's (50,257): {remedy}"
    )


def _nothing_trained() -> bool:
    """Whether there is no model to show but one that has to be trained first."""
    from ..formats.run_folder import newest_run
    from ..text.downloads import is_cached

    return not is_cached(DEFAULT) and newest_run(with_checkpoint=True) is None and not _is_trained(_small_folder())


def _small_folder() -> Path:
    return cache_path("demo", f"{SMALL_MODEL}-{STEPS}")


def _is_trained(folder: Path) -> bool:
    from ..training.run import Run

    trained = next(Run(folder).usable(), None)
    return trained is not None and trained.step >= STEPS


def _train_small_model() -> Path:
    """Train the small model of `make demo` for a short time and cache it; return its run folder."""
    from ..display.run_progress import Board, Lines
    from ..formats.run_folder import RUNS
    from ..training.distributed import Ranks
    from ..training.lifecycle import Request, execute
    from ..training.pretrain import prepare

    folder = _small_folder()
    if _is_trained(folder):
        return folder
    display: Lines = Board(out) if out.is_terminal else Lines(out)
    display.say(f"No run in {RUNS}/. Training a small model first: {STEPS} steps, saved in {folder}")
    options = {"steps": STEPS, "eval_every": STEPS, "save_every": STEPS, "sample_tokens": 0}
    ranks = Ranks()
    try:
        result = execute(Request(TrainOptions, prepare, options, folder, resume=True), ranks, display)
    finally:
        ranks.shutdown()
    if not result.outcome.finished:
        raise KeyboardInterrupt
    return folder
