"""Models that are prepared in other processes while the explain page shows one of random weights: the small model, which is
trained, and SmolLM2, which is downloaded if the page asks for it. Each is then served too, and the page links to it."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from threading import Thread
from typing import TYPE_CHECKING

from ..formatting import plural, size
from .explain import DEFAULT, STEPS, choose, make_session, out, small_model

if TYPE_CHECKING:
    from ..explain_page.json_types.model import Better
    from ..explain_page.session.session import Session

TRAIN = "from handgrad.cli.explain import train_small_model; train_small_model()"
FETCH = "import sys; from handgrad.text.downloads import fetch; fetch(sys.argv[1])"


def train_beside(session: "Session", lora: int, beside: ExitStack) -> None:
    """Train the small model; `beside` ends what was started."""
    out.print(f"A small model is being trained meanwhile, {plural(STEPS, 'step')}.", highlight=False)
    line: Better = {
        "text": "This model has random weights. A trained one follows in about a minute, and a link to it here.",
        "url": None,
        "download": False,
    }
    session.better.append(line)
    _prepare(
        line,
        [sys.executable, "-c", TRAIN],
        "The small model",
        lambda: make_session(small_model(), session.text, lora),
        beside,
    )


def offer_download(session: "Session", lora: int, beside: ExitStack) -> None:
    """Offer the model that the page would have shown."""
    from ..text.downloads import find

    amount = size(sum(member.size for member in find(DEFAULT).members))
    offer: Better = {
        "text": f"SmolLM2, a language model of 135 million parameters, knows more ({amount}).",
        "url": "",
        "download": True,
    }
    out.print(
        f"For a model that knows more: handgrad get {DEFAULT} ({amount}), then handgrad explain again.",
        highlight=False,
        soft_wrap=True,
    )
    session.better.append(offer)

    def start() -> None:
        if offer["download"]:
            offer.update({"text": f"SmolLM2 is being downloaded ({amount}).", "url": None, "download": False})
            command = [sys.executable, "-c", FETCH, DEFAULT]
            _prepare(offer, command, "SmolLM2", lambda: make_session(choose(DEFAULT), None, lora), beside, again=True)

    session.download = start


def _prepare(
    line: "Better",
    command: list[str],
    name: str,
    session: "Callable[[], Session]",
    beside: ExitStack,
    again: bool = False,
) -> None:
    """Run a command that makes a model available, then serve the model; say in a line of the page how far it is."""
    from ..explain_page.server import Server

    process = beside.enter_context(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    )
    beside.callback(process.terminate)

    def follow() -> None:
        _, problem = process.communicate()
        if process.returncode:
            reason = (problem.strip().splitlines() or ["it was stopped"])[-1]
            line.update({"text": f"{name} is not available: {reason}.", "url": "", "download": again})
            return
        url = beside.enter_context(Server(session()))
        out.print(f"{name} is ready: {url}", highlight=False, soft_wrap=True)
        line.update({"text": f"{name} is ready.", "url": url, "download": False})

    Thread(target=follow, daemon=True).start()
