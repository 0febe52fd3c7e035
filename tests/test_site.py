"""The documentation site: it builds without a warning, every link leads somewhere, and it works from the disk."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import yaml
from bench.row import Row
from playwright.sync_api import expect, sync_playwright

from conftest import need_chromium

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))
import pages  # type: ignore[import-not-found]  # noqa: E402
import quotes  # type: ignore[import-not-found]  # noqa: E402

PAGES = sorted((ROOT / "docs").rglob("*.md"))


class Links(HTMLParser):
    """The ids of a page, what it links to, and what a browser loads for it."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {given[name] or "" for name in ("id", "name") if name in given}
        target = given.get("href") or given.get("src")
        if target is not None:
            (self.links if tag == "a" else self.loaded).append(target)


def broken_links(site: Path) -> list[str]:
    """Links of the built pages that lead nowhere, and files that they would load from elsewhere."""
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        broken += [f"{path.name} loads {target}" for target in page.loaded if re.match(r"\w+://|//", target)]
        for target in (*page.links, *page.loaded):
            if re.match(r"(https?|mailto|data):", target):
                continue
            name, anchor = urldefrag(unquote(target))
            file = (path.parent / name).resolve() if name else path
            if not file.is_file() or (anchor and anchor not in pages[file].ids):
                broken.append(f"{path.name} → {target}")
    return broken


def test_the_site(tmp_path: Path) -> None:
    """In one test, because the build takes seconds."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, ""), "the build warns"
    assert broken_links(site) == []

    derivation = (site / "layers" / "layernorm.html").read_text()
    assert "def delta_prev(" in re.sub(r"<[^>]+>", "", derivation), "the code is quoted beside the formula"
    assert derivation.count("<math") > 50 and "\\mathrm" not in derivation, "formulas are MathML"
    reference = (site / "reference" / "python.html").read_text()
    assert all(f"hg.{name}" in reference for name in ("train", "GPT", "lora.inject", "verify"))
    assert "E-ln-dw" in (site / "reference" / "checks.html").read_text()
    assert "LoRA r=16" in (site / "benchmarks.html").read_text()
    assert "library kernel" in (site / "reference" / "benchmarks.html").read_text()
    assert "--resume" in (site / "reference" / "commands.html").read_text()

    chromium = need_chromium()
    with ThreadPoolExecutor(1) as alone:  # other tests of this process may have a browser open in the main thread
        alone.submit(read_in_a_browser, chromium, site).result()


def read_in_a_browser(chromium: str, site: Path) -> None:
    """Open the site from the disk, search, and follow a result; nothing may be requested from elsewhere."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.set_default_timeout(120_000)
        errors: list[str] = []
        page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else errors.append(r.url))
        page.goto((site / "index.html").as_uri())
        page.fill("#query", "gain and offset")
        expect(page.locator("#found a").first).to_contain_text("LayerNorm", timeout=120_000)
        page.press("#query", "Enter")
        page.wait_for_url("**/layers/layernorm.html#gain-and-offset")
        for name, width in (("layernorm", 360), ("layernorm", 1280), ("linear", 360)):
            page.set_viewport_size({"width": width, "height": 800})
            page.goto((site / "layers" / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is too wide"
        box = page.locator(".beside math").first.bounding_box()
        assert box is not None and box["width"] > 40
        browser.close()
    assert errors == []


def test_benchmarks_show_what_was_measured() -> None:
    row = Row("train", "nanoGPT", "handgrad", seconds=0.03012, ratio=1.1)
    assert pages.result_line(row) == "| nanoGPT | handgrad | 0.0301 |  |  | 1.10× |"
    failed = Row("train", "nanoGPT", "peer", problem="missing: peft")
    assert pages.result_line(failed) == "| nanoGPT | peer | missing: peft |  |  |  |"


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<p id="there">')
    good = '<a href="b.html#there"></a><a href="https://example.org"></a><img src="data:,">'
    (tmp_path / "a.html").write_text(good)
    assert broken_links(tmp_path) == []
    wrong = '<a href="c.html"></a><a href="b.html#gone"></a><script src="https://example.org/x.js"></script>'
    (tmp_path / "a.html").write_text(good + wrong)
    assert len(broken_links(tmp_path)) == 3


def test_pages_are_in_the_navigation() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"])))
    assert {str(page.relative_to(ROOT / "docs")) for page in PAGES} <= listed
    notebooks = {f"notebooks/{file.stem}.md" for file in (ROOT / "docs" / "notebooks").glob("*.py")}
    assert notebooks <= listed


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "layers"], ids=lambda p: p.stem)
def test_quoted_code_exists(page: Path) -> None:
    names = quotes.names_in(page.read_text())
    assert names or page.stem == "README", "a derivation shows the code of its formulas"
    for name in names:
        assert quotes.quote(name).code


def test_quotes() -> None:
    whole, line = quotes.quote("paper/layernorm.py grad_b"), quotes.quote("paper/layernorm.py delta_prev (40)")
    assert whole.code.startswith("def grad_b(") and line.code.startswith("return ") and line.code.endswith("# (40)")
    for wrong in ("paper/layernorm.py grad_c", "paper/layernorm.py delta_prev (41)", "layernorm"):
        with pytest.raises(ValueError):
            quotes.quote(wrong)
    page = "$$\na\n$$\n\ntext\n\n$$\nb\n$$\n\n<!-- source: paper/linear.py grad_b -->\n"
    shown = quotes.place_quotes(page, "layers/x.md")
    assert shown.startswith("$$\na\n$$\n\ntext\n\n<div") and "../source/src/handgrad/paper/linear.py.md#line-" in shown
