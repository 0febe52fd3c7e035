"""Waiting times of the page of handgrad explain in Chromium: from the start of the command to the first view, for every
kind of station, after a change of the sentence, of a step, and with eight clients at once; and the server's peak memory."""

import http.client
import json
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

from handgrad.errors import HandgradError

from .attempts import MissingError
from .process import memory_of

Found = tuple[str, float, int]  # what was timed, its seconds, peak memory of the process or 0
WORDS = (
    "The quick brown fox jumps over the lazy dog and then it sits down in the shade of an old tree to think about all that"
    " it has seen on its long way through the woods where nobody had ever told it what to do or whom to ask when the night"
    " came and the stars were out again above the quiet hills"
)


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
    return next(filter(None, map(shutil.which, names)), None)


def measure(model: str, words: int) -> tuple[int, list[Found]]:
    """The number of tokens of the sentence, and all waiting times."""
    if browser() is None:
        raise MissingError("explain is measured in a real browser: install Chromium (apt-get install chromium)")
    text = " ".join(WORDS.split()[:words])
    command = [sys.executable, "-m", "handgrad", "explain", "--no-open", "--model", model, "--text", text]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = next((line for line in process.stdout if "http://" in line), None)
        if line is None:
            raise HandgradError(f"handgrad explain did not start: {process.stderr.read().strip()}")
        url = line.split()[0]
        found: list[Found] = [("start to listening", time.perf_counter() - began, 0)]
        tokens = browse(url, began, found)
        found[-1] = (*found[-1][:2], peak(process.pid))
        for optimizer in ("SGD", "Adam"):
            found.append((f"a step of {optimizer}", step(url, text, optimizer), peak(process.pid)))
        found.append(("eight clients at once, a sentence and four stations each", eight(url, text), peak(process.pid)))
        return tokens, found
    finally:
        process.terminate()
        process.communicate()


def browse(url: str, began: float, found: list[Found]) -> int:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(300_000)
        page.add_init_script("localStorage.setItem('handgrad tour', 'seen')")
        page.goto(url)
        page.wait_for_selector("html[data-ready=yes]")
        found.append(("start to the first view", time.perf_counter() - began, 0))
        tokens = page.locator("#tokens button").count()
        table = json.loads(get(url, "/api/table"))
        middle = [s["id"] for s in table["stations"] if s["block"] == table["blocks"] // 2]
        stations = ["a_0", "a_1", *middle, "a_11", "a_12", "loss"]
        found += report(page, stations, "during the proof")
        started = time.perf_counter()
        page.goto(f"{url}#/station/{middle[4]}/backward")
        page.wait_for_selector("#badge.good[data-state=done]")
        found.append(("more until a station was proven", time.perf_counter() - started, 0))
        found += report(page, stations, "after the proof")
        started = time.perf_counter()
        page.fill("#sentence", " ".join(reversed(page.input_value("#sentence").split())))
        before = page.locator("#view-station").get_attribute("data-sentence")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#view-station:not([data-sentence='{before}'])")
        found.append(("another sentence", time.perf_counter() - started, 0))
        chromium.close()
    return tokens


def report(page: Any, stations: list[str], when: str) -> list[Found]:
    took: dict[str, float] = {}
    for station in stations:
        started = time.perf_counter()
        page.goto(f"{page.url.split('#')[0]}#/station/{station}/forward")
        page.wait_for_selector(f"#view-station[data-station='{station}']")
        took[station] = time.perf_counter() - started
    slowest = max(took, key=lambda s: took[s])
    return [
        (f"a station {when}, median", statistics.median(took.values()), 0),
        (f"the slowest, {slowest}", took[slowest], 0),
    ]


def get(url: str, path: str, body: dict[str, object] | None = None) -> bytes:
    connection = http.client.HTTPConnection(url.split("/")[2])
    headers = {"X-Handgrad-Key": url.partition("?key=")[2]}
    if body is None:
        connection.request("GET", path, headers=headers)
    else:
        connection.request("POST", path, json.dumps(body), {**headers, "Content-Type": "application/json"})
    try:
        answer = connection.getresponse()
        found = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise HandgradError(f"{path}: status {answer.status}, {found[:200]!r}")
    return found


def step(url: str, text: str, optimizer: str) -> float:
    id = json.loads(get(url, "/api/sentence", {"text": text}))["id"]
    started = time.perf_counter()
    get(url, "/api/step", {"id": id, "lr": 0.001, "optimizer": optimizer})
    return time.perf_counter() - started


def eight(url: str, text: str) -> float:
    def client(i: int) -> None:
        look = json.loads(get(url, "/api/sentence", {"text": f"client {i}: {text[:100]}"}))
        for station in ("a_1", "blocks.0.a_3", "a_12", "loss"):
            get(url, f"/api/station?{urlencode({'id': look['id'], 'station': station})}")

    started = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, i) for i in range(8)]
    failed = [reason for one in clients if (reason := one.exception()) is not None]
    if failed:
        raise HandgradError(f"{len(failed)} of eight clients at once failed: {failed[0]!r}")
    return time.perf_counter() - started


def peak(pid: int) -> int:
    return memory_of("VmHWM", pid)
