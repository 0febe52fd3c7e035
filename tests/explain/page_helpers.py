"""Shared by the tests that open the page in a browser."""

from collections.abc import Callable
from pathlib import Path

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Locator, Page, expect
from tiny_session import TEXT

from handgrad.explain_page.export import export
from handgrad.explain_page.session.session import Session

Open = Callable[..., Page]
TIMEOUT = 120_000  # ms; the machine may be busy
expect.set_options(timeout=TIMEOUT)


def go(page: Page, where: str) -> None:
    """Open another view of the same page."""
    page.goto(f"{page.url.split('#')[0]}#/{where}")
    expect(page.locator("[role=tabpanel]:not([hidden]):not([aria-busy]) h2").first).to_be_visible()


def number(page: Page, selector: str, name: str = "value") -> float:
    """A number that the page shows, with all its digits."""
    return data(page.locator(selector), name)


def check_accessibility(page: Page, *rules: str) -> None:
    """By all rules of axe, or by those that are named."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    chosen = {"runOnly": rules} if rules else {}
    found = page.evaluate("options => axe.run(options)", {"resultTypes": ["violations"], "preload": False, **chosen})[
        "violations"
    ]
    assert [(v["id"], v["impact"], v["nodes"][0]["html"]) for v in found] == []


def expect_all_proven(page: Page) -> None:
    """Wait until every station is proven: the page asks the server until then, which must not end before."""
    ticks = page.locator("#map .tick")
    expect(ticks.filter(has_text="✔")).to_have_count(ticks.count())


def expect_station(page: Page, station: str) -> None:
    expect(page.locator("#view-station")).to_have_attribute("data-station", station)


def data(element: Locator, name: str = "value") -> float:
    """The exact number that an element shows."""
    return float(element.get_attribute(f"data-{name}") or "")


def exported(session: Session, folder: Path, text: str = TEXT) -> str:
    """The address of the page as one file."""
    file = folder / "page.html"
    file.write_text(export(session, text), encoding="utf-8")
    return file.as_uri()
