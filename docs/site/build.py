"""Build the documentation site from the pages, the docstrings and the source: `make docs`, `make site`.

The pages, written and generated, go into a folder of sources, from which Zensical makes the site. It opens from the disk and
requests nothing from elsewhere: formulas are MathML, and the search has its index in a script.
"""

import argparse
import gc
import json
import re
import shutil
import sys
from pathlib import Path

import yaml
import zensical

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench

import notebooks
import pages
import quotes
from handgrad import __version__

HERE = Path(__file__).parent
FRONT = "---\n{}\n---\n\n"  # of a page
DEMO = "<!-- demo -->"  # the place of the button in docs/index.md
BUTTON = "[Try it now](demo/index.html){ .md-button .md-button--primary }"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("site", type=Path, nargs="?", default=quotes.ROOT / "build" / "site")
    parser.add_argument("--repository", default="", help="address of the repository; without it no page links there")
    parser.add_argument("--demo", type=Path, help="folder with an index.html that the home page links to, if it exists")
    options = parser.parse_args()
    gc.disable()  # a sixth of the time, for a process that ends soon
    site = options.site.resolve()
    sources = site.with_name(f"{site.name}-sources")
    shutil.rmtree(sources, ignore_errors=True)
    demo = options.demo if options.demo and (options.demo / "index.html").is_file() else None
    write_pages(sources / "docs", demo, web_address(options.repository))
    (sources / "mkdocs.yml").write_text(json.dumps(configuration(options.repository)))  # JSON is YAML
    try:
        zensical.build(str(sources / "mkdocs.yml"), {"clean": True, "strict": True})
    except RuntimeError as error:
        sys.exit(f"{site} is as it was, because of the issues above: {error}")
    (sources / "site" / "404.html").unlink()  # its links lead to the root of the host
    shutil.rmtree(site, ignore_errors=True)
    (sources / "site").rename(site)


def configuration(repository: str) -> dict[str, object]:
    """mkdocs.yml with what only a build knows."""
    config = yaml.safe_load((quotes.ROOT / "mkdocs.yml").read_text())
    config |= {"docs_dir": "docs", "site_dir": "site", "repo_url": web_address(repository)}
    config["site_name"] += f" {__version__}"
    config["theme"]["custom_dir"] = str(HERE / "theme")
    return config


def web_address(remote: str) -> str:
    """git@host:owner/name.git → https://host/owner/name; an address without the user's name or token"""
    return re.sub(r"^(https://)[^/@]*@", r"\1", re.sub(r"^git@([^:]+):", r"https://\1/", remote)).removesuffix(".git")


def write_pages(docs: Path, demo: Path | None, repository: str = "") -> None:
    """Write every page with its quotes and links in place, the notebooks, and copy pictures and the demo."""
    pictures = shutil.ignore_patterns("*.py", "__pycache__")
    shutil.copytree(quotes.ROOT / "docs" / "images", docs / "images", ignore=pictures)
    if demo:
        shutil.copytree(demo, docs / "demo")
    for uri, (text, origin) in gather().items():
        (docs / uri).parent.mkdir(parents=True, exist_ok=True)
        (docs / uri).write_text(complete(text, uri, origin, demo is not None, repository))
    for file in notebooks.FOLDER.glob("*.py"):
        (docs / "notebooks" / f"{file.stem}.ipynb").write_text(notebooks.ipynb(file, repository))


def complete(text: str, uri: str, origin: str, has_demo: bool, repository: str = "") -> str:
    """A page with its quotes, its links, the buttons of the demo and of Colab, and what the theme is told about it."""
    text = quotes.place_quotes(quotes.redirect_links(text, origin, uri), uri)
    if uri == "index.md":
        text = FRONT.format("hide: [navigation, toc]") + text.replace(DEMO, BUTTON if has_demo else "")
    stem = uri.removeprefix("notebooks/").removesuffix(".md")
    if (notebooks.FOLDER / f"{stem}.py").is_file() and (link := notebooks.colab_link(stem, repository)):
        title, _, rest = text.partition("\n\n")
        text = f"{title}\n\n{link}\n\n{rest}"
    if uri.startswith("source/") or uri == quotes.PROJECT["CHANGELOG.md"]:
        text = FRONT.format("search: {exclude: true}") + text
    return text


def gather() -> dict[str, tuple[str, str]]:
    """The text of every page by its name, and the file of the repository whose links it has."""
    written = {file.relative_to(quotes.ROOT / "docs").as_posix(): file for file in quotes.PAGES}
    texts = {uri: (file.read_text(), f"docs/{uri}") for uri, file in written.items()}
    texts |= {uri: (text, f"docs/{uri}") for uri, text in pages.generate().items()}  # in place of those that say so
    for origin, uri in quotes.PROJECT.items():
        if origin != "README.md":
            texts[uri] = ((quotes.ROOT / origin).read_text(), origin)
    shown = {path for text, origin in texts.values() for path in quotes.outside_links(text, origin)}
    shown |= {quotes.PACKAGE + name.split()[0] for text, _ in texts.values() for name in quotes.names_in(text)}
    for path in shown - set(quotes.PROJECT):
        texts[quotes.source_page(path)] = (pages.show_source(path), path)
    return texts


if __name__ == "__main__":
    main()
