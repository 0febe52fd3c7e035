"""A browser for the tests of the page. Every page that a test opens is watched: for errors in the console, for requests
to other hosts, for the words null, undefined and NaN in anything it ever shows, and for fields that it reads of an answer
and that json_types does not declare."""

import json
from collections.abc import Iterator

import pytest
from contract import RECORD_READS, undeclared
from page_helpers import TIMEOUT, Open
from playwright.sync_api import Browser, Page, sync_playwright
from tiny_session import make_session

from conftest import need_chromium
from handgrad.explain_page.server import Server
from handgrad.explain_page.session.session import Session

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run"]  # fmt: skip

WATCH = """
const bad = /\\bnull|undefined|\\bNaN/;
const names = ["aria-label", "aria-valuetext", "title", "class", "placeholder"];
window.badTexts = [];
const look = (text) => bad.test(text ?? "") && window.badTexts.push(text);
const visit = (node) => {
  if (node.nodeType === 3) return node.parentElement?.closest("pre, script, style, textarea") || look(node.data);
  for (const name of names) look(node.getAttribute?.(name));
  node.childNodes.forEach(visit);
};
new MutationObserver((records) => records.forEach((record) => {
  if (record.type === "childList") record.addedNodes.forEach(visit);
  else if (record.type === "attributes") look(record.target.getAttribute(record.attributeName));
  else visit(record.target);
})).observe(document, { subtree: true, childList: true, characterData: true, attributes: true, attributeFilter: names });
"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = need_chromium()
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def session() -> Session:
    return make_session()


@pytest.fixture(scope="module")
def url(session: Session) -> Iterator[str]:
    with Server(session) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open pages; fail if one logs an error, requests anything from another host, shows null, undefined or NaN, or reads a
    field that is not declared."""
    contexts, errors = [], []

    def open_one(where: str = "", *, base: str = "", expected: str = "", refused: str = "", **options: object) -> Page:
        base = base or request.getfixturevalue("url")
        usual = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}  # moving dots keep a core busy
        context = browser.new_context(**{**usual, **options})  # type: ignore[arg-type]
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(WATCH)
        page.add_init_script(f"{{{RECORD_READS}}}")
        serious = ("error", "warning")
        allowed = lambda text: text == expected or bool(refused and refused in text)  # noqa: E731
        page.on("console", lambda m: errors.append(m.text) if m.type in serious and not allowed(m.text) else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        ours = (base.partition("?")[0], "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(ours) else errors.append(r.url))
        page.goto(base + where)
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield open_one
    for context in contexts:
        for page in context.pages:
            errors += page.evaluate("window.badTexts")
            reads = [json.loads(path) for path in page.evaluate("[...window.reads]")]
            errors += [f"{path} is read and not declared" for path in reads if undeclared(path[0], path[1:])]
        context.close()
    assert errors == []
