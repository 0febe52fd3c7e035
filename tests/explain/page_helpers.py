"""Shared by the tests that open the page in a browser."""

from collections.abc import Callable

from playwright.sync_api import Page, expect

Open = Callable[..., Page]
TIMEOUT = 120_000  # ms; the machine may be busy
expect.set_options(timeout=TIMEOUT)


def expect_station(page: Page, station: str) -> None:
    expect(page.locator("#view-station")).to_have_attribute("data-station", station)
