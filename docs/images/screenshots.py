"""Take the screenshots of handgrad explain, for `make images`: of SmolLM2, which is fetched if needed, and of the small
model, which is trained if needed."""

import shutil
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from handgrad.cli.explain import DEFAULT, TEXT, TEXTS, choose, train_small_model
from handgrad.explain_page.server import Server
from handgrad.explain_page.session.session import Session

HERE = Path(__file__).parent
SIZE = {"width": 1180, "height": 800}
Shot = tuple[str, str, str, str | None, str | None]
# file name, address, theme, what to click first, element to scroll to
LANGUAGE: list[Shot] = [
    ("explain-start", "start", "light", "#blame", ".top"),
    ("explain-what-if", "whatif", "dark", "[data-part='head 0 2']", "#view-whatif .station-head"),
]
SMALL: list[Shot] = [
    ("explain-map", "station/blocks.1.a_6/backward?token=33", "light", None, None),
    ("explain-station", "station/blocks.2.a_10/backward?token=33", "dark", None, ".maps"),
    ("explain-attention", "station/blocks.1.a_3/backward?head=2&token=4", "light", None, ".attention"),
    ("explain-play", "station/blocks.1.a_3/backward?token=33", "light", "#play-pass", "#play"),
    ("explain-flow", "flow", "light", None, "#view-flow .station-head"),
    ("explain-step", "step", "light", "#step-many", "#view-step .station-head"),
]
SHOWN = 29  # so many stops of the pass are taken before its picture
READY = {
    "#blame": "#shares",
    "#play-pass": "#play-picture[data-seconds]",
    "#step-many": "#step-many:has-text('run 20'):not([aria-disabled])",
}
TIMEOUT = 300_000  # ms


def main() -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
    chromium = next(filter(None, map(shutil.which, names)), None)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for model, text, shots in ((DEFAULT, TEXTS[DEFAULT], LANGUAGE), (str(train_small_model()), TEXT, SMALL)):
            network, tokenizer, name, note, _ = choose(model)
            with Server(Session(network, tokenizer, name, note, text)) as url:
                for shot in shots:
                    take(browser, url, *shot)
        browser.close()


def take(browser: Browser, url: str, file: str, where: str, theme: str, click: str | None, focus: str | None) -> None:
    context = browser.new_context(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    page.goto(f"{url}#/{where}")
    page.wait_for_selector("html[data-ready=yes]")
    if where.startswith("station"):
        page.wait_for_selector("#badge.good[data-state=done]")
        page.wait_for_selector("#map li:last-child .tick:has-text('✔')")
    if click:
        page.click(click)
        page.wait_for_selector(READY.get(click, ".outcome"))
    for _ in range(SHOWN if click == "#play-pass" else 0):
        page.click("#play-step")
    if focus:
        page.locator(focus).first.evaluate("node => scrollTo(0, node.getBoundingClientRect().top + scrollY - 12)")
    page.wait_for_timeout(600)
    page.screenshot(path=str(HERE / f"{file}.png"))
    context.close()


main()
