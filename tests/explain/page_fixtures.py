"""A browser for the tests of the page. Every page that a test opens is watched: for errors in the console, for requests
to other hosts, and for the words null, undefined and NaN in anything it ever shows."""

import os
import shutil
from collections.abc import Iterator

import pytest
from page_helpers import TIMEOUT, Open
from playwright.sync_api import Browser, Page, sync_playwright
from tiny_session import make_session

from handgrad.explain.server import Server
from handgrad.explain.session import Session

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run"]  # fmt: skip
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
LEFT_OUT = "no Chromium found: the tests of the explain page in a real browser were LEFT OUT"

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
    if CHROMIUM is None and os.environ.get("CI") != "true":
        pytest.skip(LEFT_OUT)
    assert CHROMIUM is not None, "CI=true but no Chromium found: install it (apt-get install chromium)"
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
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
    """Open pages; fail if one logs an error, requests anything from another host, or shows null, undefined or NaN."""
    contexts, errors = [], []

    def open_one(where: str = "", *, base: str = "", expected: str = "", **options: object) -> Page:
        base = base or request.getfixturevalue("url")
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})  # type: ignore[arg-type]
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(WATCH)
        serious = ("error", "warning")
        page.on("console", lambda m: errors.append(m.text) if m.type in serious and m.text != expected else None)
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
        context.close()
    assert errors == []
