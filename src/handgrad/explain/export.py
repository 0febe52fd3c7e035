"""The page as one file: the same assets and, in place of the server, its answers as data. It opens from a disk or a mail,
asks nobody for anything, and shows one sentence."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import HandgradError
from . import views
from .proof import Prover, Verdict
from .server import ASSETS, asset, plain
from .session import Look, Session
from .steps import take_step

MOST_BYTES = 8_000_000
COLUMNS = 128  # cells of a picture across
RATES = (0.001, 0.01, 0.1)
STEPS = 12  # at each rate
Watch = Callable[[Sequence[str]], Iterable[str]]


def export(session: Session, text: str, watch: Watch = iter) -> str:
    """The whole page on this sentence. `watch` may wrap the stations as they are proven."""
    look = session.look(text)
    island = {"table": views.table(session), **answers(session, look, watch)}
    data = json.dumps(_short(plain(island)), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    style, script = asset("style.css"), bundle()
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}';"
        " base-uri 'none'; form-action 'none'"
    )
    page = asset("page.html")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    page = re.sub(r"<link[^>]*style\.css[^>]*>", lambda _: head, page)
    body = f'<script type="application/json" id="island">{data}</script>\n<script type="module">{script}</script>'
    page = re.sub(r"<script[^>]*page\.js[^>]*></script>", lambda _: body, page)
    if len(page.encode()) > MOST_BYTES:
        size = len(page.encode()) / 1e6
        raise HandgradError(
            f"the file would have {size:.1f} MB, and {MOST_BYTES / 1e6:.0f} MB is the limit: use a shorter sentence or a"
            " smaller model"
        )
    return page


def answers(session: Session, look: Look, watch: Watch = iter) -> dict[str, Any]:
    """What the server would answer, by the question as the page asks it."""
    found: dict[str, Any] = {"overview": views.overview(session, look)}
    for station in session.stations:
        found[f"station?station={station.id}"] = views.at_station(session, look, station, COLUMNS)
        if station.stream:
            found[f"lens?station={station.id}"] = views.lens(session, look, station)
    config = session.model.config
    for block in range(config.n_blocks):
        for head in range(config.n_heads):
            found[f"head?block={block}&head={head}"] = views.at_head(session, look, block, head)
    found |= _proofs(session, look, watch)
    found["steps"] = _steps(session, look)
    return found


def _proofs(session: Session, look: Look, watch: Watch) -> dict[str, Any]:
    """Autograd's verdict on everything; finite differences where the model is small."""
    prover, verdict = Prover(session), Verdict()
    for id in watch([station.id for station in session.stations]):
        prover.answer_now(look, verdict, session.by_id[id], differences=session.size <= views.LARGE)
    found: dict[str, Any] = {f"proof?station={s.id}": prover.verdict(verdict, s.id) for s in session.stations}
    found["proofs"] = {s.id: prover.verdict(verdict, s.id, brief=True) for s in session.stations}
    return found


def _steps(session: Session, look: Look) -> dict[str, Any]:
    """Steps at some rates, taken beforehand."""
    found: dict[str, Any] = {}
    for rate in RATES:
        here, taken = look, []
        for _ in range(STEPS if session.size <= views.LARGE else 2):
            try:
                taken.append(take_step(session, here, rate, "SGD"))
            except HandgradError as reason:
                taken.append({"error": str(reason)})
                break
            here = session.find(taken[-1]["id"])
        found[f"{rate:g}"] = taken
    return found


def bundle() -> str:
    """The modules in one script, each in a room of its own: an import becomes a look into the room of the other."""
    parts = []
    for name in ASSETS:
        if name.endswith(".js"):
            code = asset(name)
            given = re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", code, re.M)
            code = re.sub(r'^import (\{[^}]*\}) from "\./(\w+)\.js";', r"const \1 = \2Module;", code, flags=re.M)
            code = re.sub(r"^export ", "", code, flags=re.M)
            parts.append(f"const {name[:-3]}Module = (() => {{\n{code}\nreturn {{ {', '.join(given)} }};\n}})();")
    return "\n".join(parts).replace("</script", "<\\/script")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _short(x: Any) -> Any:
    """Six significant digits are enough to read."""
    if isinstance(x, float):
        return float(f"{x:.6g}")
    if isinstance(x, dict):
        return {key: _short(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_short(value) for value in x]
    return x
