"""The documentation site: it builds without a warning, every link leads somewhere, and it works from the disk."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote_plus, unquote, urldefrag

import pytest
import yaml
from axe_playwright_python.base import AXE_SCRIPT
from bench.row import Row
from playwright.sync_api import Page, expect, sync_playwright

import handgrad as hg
from conftest import need_chromium

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))
import build  # type: ignore[import-not-found]  # noqa: E402
import notebooks  # type: ignore[import-not-found]  # noqa: E402
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
    site, demo = tmp_path / "site", tmp_path / "demo"
    demo.mkdir()
    (demo / "index.html").write_text("<!doctype html><title>Demo</title>")
    command = [sys.executable, "docs/site/build.py", str(site), "--demo", str(demo)]
    command += ["--repository", "git@github.com:example/handgrad.git"]  # the theme would ask this host for stars
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "No issues found"), "the build warns"
    assert broken_links(site) == []

    home = Links((site / "index.html").read_text())
    assert {"demo/index.html", "https://github.com/example/handgrad"} <= set(home.links)
    assert f"handgrad {hg.__version__}" in (site / "chat.html").read_text()
    derivation = (site / "layers" / "layernorm.html").read_text()
    assert "def delta_prev(" in re.sub(r"<[^>]+>", "", derivation), "the code is quoted beside the formula"
    assert derivation.count("<math") > 50 and "\\mathrm" not in derivation, "formulas are MathML"
    reference = (site / "reference" / "python.html").read_text()
    assert all(f"hg.{name}" in reference for name in ("train", "GPT", "lora.inject", "verify"))
    assert "E-ln-dw" in (site / "reference" / "checks.html").read_text()
    assert "LoRA r=16" in (site / "benchmarks.html").read_text()
    assert "library kernel" in (site / "reference" / "benchmarks.html").read_text()
    assert "--resume" in (site / "reference" / "commands.html").read_text()
    notebook = Links((site / "notebooks" / "your_own_layer.html").read_text())
    colab = "https://colab.research.google.com/github/example/handgrad/blob/notebooks/your_own_layer.ipynb"
    assert {"your_own_layer.ipynb", colab} <= set(notebook.links)
    stored = json.loads((site / "notebooks" / "your_own_layer.ipynb").read_text())
    assert stored["cells"][0]["source"] == "%pip install --quiet git+https://github.com/example/handgrad"
    headings = [h for file in site.rglob("*.html") for h in re.findall(r"<h[1-3][^>]*>(.*?)<", file.read_text(), re.S)]
    assert len(headings) > 500 and [h for h in headings if re.match(r"(handgrad|bench|make) |.* --\w", h)] == []

    chromium = need_chromium()
    with ThreadPoolExecutor(1) as alone:  # other tests of this process may have a browser open in the main thread
        alone.submit(read_in_a_browser, chromium, site).result()


def read_in_a_browser(chromium: str, site: Path) -> None:
    """Use the site from the disk as a reader does; nothing may be requested from elsewhere."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
        context.set_default_timeout(120_000)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        errors: list[str] = []
        page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else errors.append(r.url))
        page.goto((site / "index.html").as_uri())
        page.get_by_title("Copy to clipboard").first.click()
        expect(page.get_by_text("Copied to clipboard")).to_be_visible(timeout=120_000)
        assert "pip install ." in page.evaluate("navigator.clipboard.readText()")
        assert page.evaluate("document.querySelector('.hero img').naturalWidth") > 1000

        for query, found in (  # a page, a heading, a formula with its words
            ("layernorm", "/layers/layernorm.html"),
            ("gain and offset", "/layers/layernorm.html#gain-and-offset"),
            ("scores that enter the softmax dρ=ρ∘", "/layers/attention.html#the-softmax"),
        ):
            assert (result := first_result(page, query)).endswith(found), result
        assert "changelog" not in first_result(page, "changelog")
        check_pages(page, site)
        page.locator("header").get_by_title("Switch to the dark theme").click()
        expect(page.locator("body[data-md-color-scheme=slate]")).to_be_visible()
        check_pages(page, site)
        assert page.evaluate("getComputedStyle(document.body).colorScheme") == "dark", "it is remembered"
        browser.close()
    assert errors == []


def first_result(page: Page, query: str) -> str:
    """The address of the page that the search puts first, without the query."""
    page.reload()
    page.keyboard.press("/")
    page.locator("dialog input").fill(query)
    link = page.locator(f"dialog a[href*='{quote_plus(query)}']").first
    expect(link).to_be_visible(timeout=120_000)
    return re.sub(r"\?h=[^#]*", "", str(link.get_attribute("href")))


def check_pages(page: Page, site: Path) -> None:
    """A guide and derivations fit wide and narrow screens, and axe finds nothing serious."""
    for name, width in (
        ("layers/layernorm", 1280),
        ("layers/layernorm", 390),
        ("layers/linear", 360),
        ("training", 390),
    ):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is too wide"
        page.evaluate(AXE_SCRIPT)
        found = page.evaluate("axe.run({resultTypes: ['violations'], preload: false})")["violations"]
        serious = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
        assert serious == [], name
    page.goto((site / "layers" / "linear.html").as_uri())
    box = page.locator(".beside math").first.bounding_box()
    assert box is not None and box["width"] > 40


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
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
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


def test_pages_are_completed() -> None:
    home = (ROOT / "docs" / "index.md").read_text()
    with_demo, without = (build.complete(home, "index.md", "docs/index.md", has) for has in (True, False))
    assert with_demo.count("(demo/index.html)") == 1 and "demo/index.html" not in without
    text, uri = "[there](LICENSE) [page](docs/chat.md)", "project/changelog.md"
    changes = build.complete(text, uri, "CHANGELOG.md", False)
    assert changes.endswith("[there](../source/LICENSE.md) [page](../chat.md)") and "exclude: true" in changes


def test_links_in_code_stay() -> None:
    link = "[there](../LICENSE)"
    text = f"```text\n{link}\n ```python {link}\n```\n{link}\n"
    shown = quotes.redirect_links(text, "docs/a.md", "a.md")
    assert shown == text.removesuffix(f"{link}\n") + "[there](source/LICENSE.md)\n"


def test_notebooks_for_jupyter_and_colab() -> None:
    for file in notebooks.FOLDER.glob("*.py"):
        stored = json.loads(notebooks.ipynb(file, ""))
        texts = [cell["source"] for cell in stored["cells"]]
        assert stored["nbformat"] == 4 and texts == [cell.text for cell in notebooks.cells(file)], (
            "nothing to install from"
        )
    assert notebooks.colab_link("x", "") == notebooks.colab_link("x", "https://example.org/a/b") == ""
    page = notebooks.page(notebooks.FOLDER / "your_own_layer.py")
    uri = "notebooks/your_own_layer.md"
    assert "colab" not in build.complete(page, uri, f"docs/{uri}", False).lower()


def test_address_of_the_repository() -> None:
    address = "https://example.org/a/b"
    for remote in ("git@example.org:a/b.git", f"{address}.git", "https://name:secret@example.org/a/b", address):
        assert build.web_address(remote) == address
    assert build.web_address("") == ""


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda p: p.name)
def test_links_are_words(page: Path) -> None:
    """A link to a page says where it leads, and the theme alone lists the headings of a page."""
    text = page.read_text()
    assert re.findall(r"\[`?[\w/.-]+\.md`?\]\(", text) == []
    assert re.findall(r"^(?:[-*] \[[^\]]+\]\(#[^)]*\)\n){2,}", text, flags=re.M) == []
