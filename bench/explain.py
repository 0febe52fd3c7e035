"""How long the page of handgrad explain takes with a large model: python -m bench.explain [--model gpt2] [--tokens 64]

Starts the command in a process of its own and opens its page in Chromium: seconds from the start of the command to the
first view, then to a full station, for each kind of station and a change of the sentence; the memory of the process at
its highest; and eight clients at once, each with a sentence of its own.
"""

import argparse
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from urllib.parse import urlencode

from playwright.sync_api import Page, sync_playwright

WORDS = (
    "The quick brown fox jumps over the lazy dog and then it sits down in the shade of an old tree to think about all that"
    " it has seen on its long way through the woods where nobody had ever told it what to do or whom to ask when the night"
    " came and the stars were out again above the quiet hills"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    text = " ".join(WORDS.split()[: given.tokens])
    command = [sys.executable, "-m", "handgrad", "explain", "--no-open", "--model", given.model, "--text", text]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(line for line in process.stdout if "http://" in line).split()[0]
        print(f"{time.perf_counter() - began:6.2f} s  from the start to listening")
        browse(url, began)
        print(f"{peak(process.pid) / 1e9:6.2f} GB memory of the process at its highest, one client")
        eight(url)
        print(f"{peak(process.pid) / 1e9:6.2f} GB memory of the process at its highest, eight clients")
    finally:
        process.terminate()
        process.wait()


def browse(url: str, began: float) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(300_000)
        page.add_init_script("localStorage.setItem('handgrad tour', 'seen')")
        page.goto(url)
        page.wait_for_selector("html[data-ready=yes]")
        took, tokens = time.perf_counter() - began, page.locator("#tokens button").count()
        print(f"{took:6.2f} s  from the start to the first view, {tokens} tokens")
        table = json.loads(get(url, "/api/table"))
        middle = [s["id"] for s in table["stations"] if s["block"] == table["blocks"] // 2]
        report(page, ["a_0", "a_1", *middle, "a_11", "a_12", "loss"], "while the proof is being made")
        started = time.perf_counter()
        page.goto(f"{url}#/station/{middle[4]}/backward")
        page.wait_for_selector("#badge.good[data-state=done]")
        print(f"{time.perf_counter() - started:6.2f} s  more until a station was proven, finite differences too")
        report(page, ["a_0", "a_1", *middle, "a_11", "a_12", "loss"], "after it")
        started = time.perf_counter()
        page.fill("#sentence", " ".join(reversed(page.input_value("#sentence").split())))
        before = page.locator("#view-station").get_attribute("data-look")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#view-station:not([data-look='{before}'])")
        print(f"{time.perf_counter() - started:6.2f} s  another sentence")
        browser.close()


def report(page: Page, stations: list[str], when: str) -> None:
    took: dict[str, float] = {}
    for station in stations:
        started = time.perf_counter()
        page.goto(f"{page.url.split('#')[0]}#/station/{station}/forward")
        page.wait_for_selector(f"#view-station[data-station='{station}']")
        took[station] = time.perf_counter() - started
    slowest = max(took, key=lambda s: took[s])
    print(f"{statistics.median(took.values()):6.2f} s  a station {when}; the slowest, {slowest}, {took[slowest]:.2f} s")


def get(url: str, path: str, body: dict[str, object] | None = None) -> bytes:
    connection = http.client.HTTPConnection(url.split("/")[2])
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = answer.read()
    assert answer.status == 200, found
    return found


def eight(url: str) -> None:
    failed: list[object] = []

    def client(i: int) -> None:
        try:
            look = json.loads(get(url, "/api/sentence", {"text": f"client {i}: {WORDS[: 100 + i]}"}))
            for station in ("a_1", "blocks.0.a_3", "a_12", "loss"):
                get(url, f"/api/station?{urlencode({'id': look['id'], 'station': station})}")
        except Exception as reason:
            failed.append(reason)

    started = time.perf_counter()
    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    print(f"{took:6.2f} s  eight clients at once, a sentence and four stations each; {len(failed)} failed")


def peak(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        return 1024.0 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
