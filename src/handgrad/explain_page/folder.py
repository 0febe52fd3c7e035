"""The page as a folder of static files, for a website or to open from the disk: models, and sentences chosen before.

    index.html, style.css, views.css, page.js        the page, and in index.html what the folder contains
    data/smollm2/table.js, learn.js                  what does not depend on the sentence
    data/smollm2/1/overview.js, blocks.0.a_6.js …    the answers for the first sentence, in parts
    data/program.js, data/nano/model.js              a model that answers in the browser

A page from the disk may not fetch data, nor load modules. So the modules are joined into one script, and a part is a script
that calls one function with its answers; assets/folder.js inserts it when an answer of it is asked for.
"""

import base64
import gzip
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import HandgradError
from ..files.atomic import write_folder
from .export import COLUMNS, Watch, answers, as_text, bundle, live_program, model_as_text, pictures
from .page_files import asset
from .session.session import Session

MARK = "stored-answers"  # the id of the element of index.html that says what the folder contains
OF_MODEL = ("table", "learn")  # answers that do not depend on the sentence
POLICY = (  # a folder on the disk is not "self" in every browser
    "default-src 'none'; img-src data:; style-src 'self' file:; script-src 'self' file:;"
    " worker-src blob:; base-uri 'none'; form-action 'none'"
)


class Shown(NamedTuple):
    """A model of the folder, and its sentences; or the model alone, which answers in the browser."""

    session: Session
    texts: Sequence[str]
    live: bool = False


def export_folder(folder: Path, models: Sequence[Shown], watch: Watch = iter) -> None:
    """Write the page with these models into a folder; it replaces an earlier one. The first sentence of the first model is
    shown first."""
    check_folder(folder)

    for session, texts, _ in models:
        for text in texts:
            session.encode(text)  # report an invalid sentence before any work

    def fill(new: Path) -> None:
        index = [(_write_live if shown.live else _write_stored)(new / "data", shown, watch) for shown in models]
        for name, text in base_files(index).items():
            (new / name).write_text(text, encoding="utf-8")

    write_folder(folder, fill)


def check_folder(folder: Path) -> None:
    """Raise if the folder has files that are not an exported page's, or cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise HandgradError(f"cannot write {folder}: it is a file; give a folder")
    index = folder / "index.html"
    ours = index.is_file() and MARK in index.read_text(encoding="utf-8", errors="replace")
    if folder.exists() and any(folder.iterdir()) and not ours:
        raise HandgradError(f"{folder} has other files: give a new folder, or one that was written by this command")
    if not folder.resolve().parent.is_dir():
        raise HandgradError(f"cannot write {folder}: the folder {folder.parent} does not exist")


def _write_live(data: Path, shown: Shown, watch: Watch) -> dict[str, Any]:
    """Write a model, and the program that computes with it."""
    session = shown.session
    session.text = next(iter(shown.texts), session.text)
    _write_part(data, f"{_folder_of(session)}/model", {"data": model_as_text(session)})
    program = f"function handgradProgram() {{\n{short(live_program())}\n}}\n"
    call = 'handgradAnswers("program",{source:`(${handgradProgram})();`});\n'
    (data / "program.js").write_text(program + call, encoding="utf-8")
    return {**_about(shown), "requests": {}, "sentences": []}


def _about(shown: Shown) -> dict[str, Any]:
    session = shown.session
    return {"name": session.name, "folder": _folder_of(session), "command": session.command, "live": shown.live}


def _folder_of(session: Session) -> str:
    """The folder of a model, whose name may have any characters."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", session.name)


def _write_part(data: Path, path: str, answers: dict[str, Any]) -> None:
    file = data / f"{path}.js"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"handgradAnswers({as_text(path)},{as_text(compressed(answers))});\n", encoding="utf-8")


def _write_stored(data: Path, shown: Shown, watch: Watch) -> dict[str, Any]:
    """Write the answers of a model; return what the page must know of it before it asks."""
    session = shown.session
    sentences, requests = [], dict[str, list[str]]()
    for number, text in enumerate(shown.texts, 1):
        sentence = session.sentence(text)
        found = {**answers(session, sentence, watch), **pictures(session, sentence, COLUMNS[0])}
        del found["command"]
        parts: dict[str, dict[str, Any]] = {}
        found["table"] = {**found["table"], "text": shown.texts[0]}
        for key, answer in found.items():
            name, given = _request(key)
            requests[name] = list(given)
            file = given.get("station") or (f"block.{given['block']}" if "block" in given else name)
            path = f"{_folder_of(session)}/{file}" if name in OF_MODEL else f"{_folder_of(session)}/{number}/{file}"
            parts.setdefault(path, {})[key] = answer
        for path, part in parts.items():
            _write_part(data, path, part)
        sentences.append({"id": sentence.id, "text": text})
    return {**_about(shown), "requests": requests, "sentences": sentences}


def _request(key: str) -> tuple[str, dict[str, str]]:
    """head?block=0&head=1 → head, {"block": "0", "head": "1"}"""
    name, _, query = key.partition("?")
    return name, dict(pair.split("=", 1) for pair in query.split("&") if pair)


def compressed(answers: dict[str, Any]) -> str:
    """JSON, compressed because the formulas of every block repeat, in base64; assets/folder.js reads it."""
    return base64.b64encode(gzip.compress(as_text(answers).encode(), mtime=0)).decode()


def short(script: str) -> str:
    """A script without its comments and indentation. No string of the page's modules continues on the next line."""
    script = re.sub(r"^\s*/\*\*(?:(?!\*/).)*\*/\n", "", script, flags=re.M | re.S)
    return re.sub(r"^(?:\s*//.*\n|\s+)", "", script, flags=re.M)


def base_files(index: list[dict[str, Any]]) -> dict[str, str]:
    """The files that every view needs, by their names."""
    page = asset("page.html").replace('href="/assets/', 'href="')
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<link rel="icon" href="data:,">\n<link '
    page = page.replace("<link ", head, 1)
    data = as_text(index).replace("<", "\\u003c")
    body = f'<script type="application/json" id="{MARK}">{data}</script>\n<script defer src="page.js"></script>'
    page = re.sub(r"<script[^>]*page\.js[^>]*></script>", lambda _: body, page)
    styles = {name: asset(name) for name in ("style.css", "views.css")}
    return {"index.html": page, "page.js": short(bundle()), **styles}
