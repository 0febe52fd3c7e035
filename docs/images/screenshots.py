"""Take the screenshots of handgrad explain, for `make images`. Uses the newest run in runs/, or trains the small model."""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from handgrad.cli.explain import TEXT, choose
from handgrad.explain.server import Server
from handgrad.explain.session import Session

HERE = Path(__file__).parent
SIZE = {"width": 1180, "height": 800}
# file name, address, theme, element to scroll to
SHOTS = [
    ("explain-map", "station/blocks.1.a_6/backward?token=33", "light", None),
    ("explain-station", "station/blocks.2.a_10/backward?token=33", "dark", ".maps"),
    ("explain-attention", "station/blocks.1.a_3/backward?head=2&token=4", "light", ".attention"),
    ("explain-flow", "flow", "light", ".station-head"),
    ("explain-step", "step", "light", ".station-head"),
]


def main() -> None:
    network, tokenizer, name, note = choose(None)
    session = Session(network, tokenizer, name, note, TEXT)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with Server(session) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for file, where, theme, focus in SHOTS:
            context = browser.new_context(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")
            page = context.new_page()
            page.add_init_script("localStorage.setItem('handgrad tour', 'seen')")
            page.goto(f"{url}#/{where}")
            page.wait_for_selector("html[data-ready=yes]")
            if where.startswith("station"):
                page.wait_for_selector("#badge.good[data-state=done]", timeout=120_000)
                page.wait_for_selector("#map li:last-child .tick:has-text('✔')")
            if where == "step":
                page.click("#step-many")
                page.wait_for_selector("#step-many:has-text('run 20'):not([disabled])")
            if focus:
                page.locator(focus).first.evaluate(
                    "node => scrollTo(0, node.getBoundingClientRect().top + scrollY - 12)"
                )
            page.wait_for_timeout(600)
            page.screenshot(path=str(HERE / f"{file}.png"))
            context.close()
        browser.close()


main()
