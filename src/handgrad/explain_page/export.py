"""The page as one file: the same assets, with the server's answers for one sentence embedded as data, or with the model and
the program that computes them. The file opens from disk or from an e-mail and makes no requests."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ..errors import HandgradError
from ..formatting import size
from .course import Judge, course_view
from .json_numbers import as_json
from .json_types.questions import Error, Stepped
from .live_data import live_data
from .page_files import IMPORT, asset, imported, modules
from .proofs.prover import CheckResults, Prover, report, summary
from .routes import ROUTES, Served
from .session.session import Session, TracedSentence
from .stations.network import NEURONS
from .stations.table import Station
from .views.step import take_step

MAX_BYTES = 8_000_000
COLUMNS = (128, 64, 32)  # most columns of a picture: the first number with which the file is small enough
RATES = (0.001, 0.01, 0.1)
BY_HAND = 2  # entries of every result of a station with their terms, for exercises
STEPS = 12  # precomputed at each rate; one for a large model
Watch = Callable[[Sequence[str]], Iterable[str]]


class Embedded(dict[str, Any]):
    """Answers by the request as assets/api.js makes it, from the functions of routes.py."""

    def __init__(self, session: Session, sentence: TracedSentence):
        super().__init__()
        self.sentence, self.served = sentence, Served(session, Prover(session), Judge())

    def add(self, name: str, options: dict[str, int] | None = None, **given: object) -> None:
        route = ROUTES[name]
        self[route.key(**given)] = route.answer(self.served, {"id": self.sentence, **given}, **(options or {}))


def export(session: Session, text: str, watch: Watch = iter) -> str:
    """Return the page for this sentence as HTML. `watch` may wrap the iteration over stations to show progress."""
    sentence = session.sentence(text)
    embedded = answers(session, sentence, watch)
    for columns in _columns(session, sentence, MAX_BYTES - len(_page(embedded).encode())):
        page = _page({**embedded, **pictures(session, sentence, columns)})
        if len(page.encode()) <= MAX_BYTES:
            return page
    raise HandgradError(
        f"the file would have {size(len(page.encode()))}, above the limit of {size(MAX_BYTES)}: use a shorter sentence"
        " or a smaller model"
    )


def export_live(session: Session) -> str:
    """Return the page as HTML with the model instead of answers: it computes them itself, for any sentence."""
    page = _html({"live-model": model_as_text(session)}, live_program())
    if len(page.encode()) > MAX_BYTES:
        raise HandgradError(
            f"the file would have {size(len(page.encode()))}, above the limit of {size(MAX_BYTES)}: use a smaller model"
        )
    return page


def live_program() -> str:
    """The script that answers the page's requests: it defines serveLive."""
    return f"{bundle('live/serve.js')}\nglobalThis.serveLive = {_variable('live/serve.js')}.serve;"


def model_as_text(session: Session) -> str:
    """The model as JSON, with all digits."""
    return json.dumps(as_json(live_data(session)), ensure_ascii=False)


def _page(embedded: dict[str, Any]) -> str:
    """The HTML of the page with these answers."""
    return _html({"embedded-answers": as_text(embedded)})


def _html(texts: dict[str, str], program: str = "") -> str:
    """The HTML of the page with JSON by the ids of its elements, and a program that answers its requests."""
    style, script = asset("style.css") + asset("views.css"), bundle()
    scripts, worker = f"'{_digest(script)}'", ""
    if program:
        scripts, worker = f"{scripts} '{_digest(program)}'", " worker-src blob:;"
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src {scripts};{worker}"
        " base-uri 'none'; form-action 'none'"
    )
    page = asset("page.html")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    page = re.sub(r"<link[^>]*style\.css[^>]*>\n<link[^>]*views\.css[^>]*>", lambda _: head, page)
    elements = [f'<script type="application/json" id="{id}">{_safe(text)}</script>' for id, text in texts.items()]
    elements += [f'<script id="live-program">{program}</script>'] if program else []
    body = "\n".join([*elements, f'<script type="module">{script}</script>'])
    return re.sub(r"<script[^>]*page\.js[^>]*></script>", lambda _: body, page)


def _safe(text: str) -> str:
    """JSON that can stand inside an element."""
    return text.replace("<", "\\u003c")


def as_text(answers: Any) -> str:
    """JSON with six digits of every number, which keeps the file small."""
    return json.dumps(as_json(answers, 6), ensure_ascii=False, separators=(",", ":"))


def answers(session: Session, sentence: TracedSentence, watch: Watch = iter) -> dict[str, Any]:
    """Return the answers that the file contains; `pictures` has the others."""
    found = Embedded(session, sentence)
    for name in ("table", "overview", "flow", "heads", "attribution"):
        found.add(name)
    for station in session.stations:
        if station.stream:
            found.add("lens", station=station.id)
    for block in session.network.having(*NEURONS):
        found.add("neurons", block=block)
    found["command"] = session.command
    found["learn"] = course_view(session, {}, grading=False)
    found |= _proofs(session, sentence, watch)
    found["steps"] = _steps(session, sentence)
    return found


def _columns(session: Session, sentence: TracedSentence, room: int) -> Iterator[int]:
    """Return the numbers of columns to try: those with which the pictures of all blocks would fit if each had the size of
    the first one's, and at least the last number."""
    for columns in COLUMNS:
        block = [s for s in session.stations if s.block == 0]
        size = len(
            as_text(pictures(session, sentence, columns, block, session.network.having("attention")[:1])).encode()
        )
        if size * session.model.config.n_blocks <= room or columns == COLUMNS[-1]:
            yield columns


def pictures(
    session: Session,
    sentence: TracedSentence,
    columns: int,
    stations: Sequence[Station] | None = None,
    blocks: Iterable[int] | None = None,
) -> dict[str, Any]:
    """Return the answers that consist of pictures, at most `columns` wide, of all stations and blocks, or of some."""
    config, found = session.model.config, Embedded(session, sentence)
    for station in session.stations if stations is None else stations:
        found.add("station", {"limit": columns, **_by_hand(session, station)}, station=station.id)
    for block in session.network.having("attention") if blocks is None else blocks:
        for head in range(config.n_heads):
            found.add("head", {"limit": columns}, block=block, head=head)
    return found


def _by_hand(session: Session, station: Station) -> dict[str, int]:
    """What the file has of a station to compute by hand; of a large model one entry of each result in the last block and
    outside the blocks, and one of each station elsewhere."""
    if not session.large:
        return {"stored": BY_HAND}
    return {"stored": 1, "every": station.block in (None, session.model.config.n_blocks - 1)}


def _proofs(session: Session, sentence: TracedSentence, watch: Watch) -> dict[str, Any]:
    """Check every station against autograd and, if the model is small, against finite differences."""
    prover, results = Prover(session), CheckResults()
    ids = [station.id for station in session.stations]
    for id in watch(ids):
        prover.check_now(sentence, results, session.by_id[id], differences=not session.large)
    found: dict[str, Any] = {ROUTES["proof"].key(station=id): report(results, id) for id in ids}
    return {**found, ROUTES["proofs"].key(): {id: summary(results, id) for id in ids}}


def _steps(session: Session, sentence: TracedSentence) -> dict[str, list[Stepped | Error]]:
    """Take the steps that the file shows, at each learning rate."""
    found: dict[str, list[Stepped | Error]] = {}
    for rate in RATES:
        here = sentence
        taken: list[Stepped | Error] = []
        for _ in range(1 if session.large else STEPS):
            try:
                made = take_step(session, here, rate, "SGD", undo=session.large)
            except HandgradError as reason:
                taken.append({"error": str(reason)})
                break
            taken.append(made)
            if not session.large:
                here = session.find(made["id"])
        found[f"{rate:g}"] = taken  # the key that assets/step.js looks up
    return found


def bundle(first: str = "page.js") -> str:
    """Join the JavaScript modules that page.js, or another one, needs into one script: each becomes a function that returns
    its exports."""
    parts = []
    for name in modules(first):
        code = asset(name)
        exports = re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", code, re.M)
        code = IMPORT.sub(partial(_constant, name), code)
        code = re.sub(r"^export ", "", code, flags=re.M)
        parts.append(f"const {_variable(name)} = (() => {{\n{code}\nreturn {{ {', '.join(exports)} }};\n}})();")
    return "\n".join(parts).replace("</script", "<\\/script")


def _constant(name: str, found: re.Match[str]) -> str:
    """import { a, b as c } from "./x.js"; → const { a, b: c } = xModule;
    import * as x from "./x.js"; → const x = xModule;"""
    names, path = found.groups()
    return f"const {names.removeprefix('* as ').replace(' as ', ': ')} = {_variable(imported(name, path))};"


def _variable(name: str) -> str:
    """engine/loss.js → engine_lossModule"""
    return f"{name[:-3].replace('/', '_')}Module"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
