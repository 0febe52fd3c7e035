"""The command explain: choose a model, then serve the page on this machine or write it to a file."""

import shlex
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
        list[str] | None,
        typer.Option(
            help=f"Sentence to show first. With --folder, give several. [default: {TEXT} For smollm2: {TEXTS[DEFAULT]}]"
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page as one file that needs no server, and exit.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the page with these sentences as a folder for a website, whose parts are loaded when they are"
            " needed, and exit.",
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="With --html or --folder: put the model into the page instead of answers, so that it takes any sentence"
            " and step."
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
      handgrad explain --model nano --text "Once upon a time" --text "There was" --folder demo
      handgrad explain --model runs/mine --no-open
    """
    texts = text or []
    _check_output(html, folder, texts, live)
    with _waiting("Starting …"):
        import torch

    exported = html is not None or folder is not None
    untrained = model is None and not exported and _nothing_trained()
    session = make_session(
        choose(SMALL_MODEL if untrained else model), next(iter(texts), None), lora, others_read=exported
    )
    if session.size < SMALL or exported:  # products of one sentence: a second thread mostly waits
        torch.set_num_threads(1)
    session.encode(session.text)  # report an invalid sentence now
    if html is not None:
        from ..explain_page.export import export, export_live
        from ..proof.check_report import progress_bar

        write_text(html, export_live(session) if live else export(session, session.text, progress_bar("checking")))
        out.print(f"wrote {html}, {size(html.stat().st_size)}", highlight=False, soft_wrap=True)
        return
    if folder is not None:
        from ..explain_page.folder import Shown, export_folder
        from ..proof.check_report import progress_bar

        export_folder(folder, [Shown(session, texts or [session.text], live)], progress_bar("checking"))
        files = [file for file in folder.rglob("*") if file.is_file()]
        total = size(sum(file.stat().st_size for file in files))
        out.print(
            f"wrote {folder / 'index.html'}, {plural(len(files), 'file')}, {total}", highlight=False, soft_wrap=True
        )
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
            from .explain_beside import offer_download, train_beside

            train_beside(session, lora, beside)
            offer_download(session, lora, beside)
        server.run()


def _check_output(html: Path | None, folder: Path | None, texts: list[str], live: bool) -> None:
    """Raise if the page cannot be written as it was asked for."""
    if live and html is None and folder is None:
        raise HandgradError(
            "--live is about the page that --html or --folder writes: add --html FILE or --folder FOLDER"
        )
    if html is not None and folder is not None:
        raise HandgradError("--html writes one file and --folder a folder: give one of them")
    if len(texts) > 1 and folder is None:
        raise HandgradError("several sentences need --folder; without it, give --text once")
    if html is not None:
        check_writable(html)
    if folder is not None:
        from ..explain_page.folder import check_folder

        check_folder(folder)


def _doorway(folder: Path, url: str) -> str:
    """The address of a file that leads to the page. Only this user can read it, while everyone on the machine can read a
    browser's command line, and with it an address that contains the key."""
    file = folder / "explain.html"
    file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">handgrad</a>\n')
    return file.as_uri()


def make_session(chosen: "Chosen", text: str | None, lora: int, others_read: bool = False) -> "Session":
    from ..explain_page.session.session import Session, add_adapters

    network, tokenizer, name, note, source = chosen
    python = in_python(source, others_read)
    command = f"handgrad explain --model {shlex.quote(public_path(source) if others_read else str(source))}"
    if lora:
        add_adapters(network, lora)
        command += f" --lora {lora}"
        note += f", with adapters of rank {lora}"
        python += f"\nhg.lora.inject(model, {lora})"
    return Session(network, tokenizer, name, note, text or TEXTS.get(name, TEXT), python, command)


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
    from ..formats.run_folder import newest_run
    from ..model.gpt import GPT
    from ..text.downloads import is_cached

    if name is None and is_cached(DEFAULT):
        name = DEFAULT
    if name is None and newest_run(with_checkpoint=True) is None:
        return small_model()
    found = find_model(name)
    if found.folder is None:
        network = GPT(found.config, seed=SEED)
        note = "; ".join(["random weights, not trained", found.note]).strip("; ")
        return Chosen(network, _tokenizer(None, network), found.name, note, found.name)
    where = public_path(found.name)
    note = f"trained in {where}" if name is None else "trained weights" if name == DEFAULT else f"from {where}"
    return Chosen(*_open(found.folder, found.name), Path(found.name).name, note, found.name)


def small_model(folder: Path | None = None) -> Chosen:
    """The small model, which is trained if it is not in this folder, or in the cache."""
    from ..formats.run_folder import model_folder

    run = train_small_model(folder)
    return Chosen(*_open(model_folder(run), SMALL_MODEL), SMALL_MODEL, f"trained for {plural(STEPS, 'step')}", run)


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


def train_small_model(folder: Path | None = None) -> Path:
    """Train the small model of `make demo` for a short time, in this run folder or the cache, unless it is there; return the
    folder."""
    from ..display.run_progress import Board, Lines
    from ..training.distributed import Ranks
    from ..training.lifecycle import Request, execute
    from ..training.pretrain import prepare

    folder = folder or _small_folder()
    if _is_trained(folder):
        return folder
    display: Lines = Board(out) if out.is_terminal else Lines(out)
    display.say(f"Training a small model first: {STEPS} steps, saved in {folder}")
    options = {"steps": STEPS, "eval_every": STEPS, "save_every": STEPS, "sample_tokens": 0}
    ranks = Ranks()
    try:
        result = execute(Request(TrainOptions, prepare, options, folder, resume=True), ranks, display)
    finally:
        ranks.shutdown()
    if not result.outcome.finished:
        raise KeyboardInterrupt
    return folder
