"""The hooks of mkdocs: generated pages, quoted source, formulas as MathML, and an index for the search.

The site needs nothing from outside: formulas are MathML, which browsers draw themselves, and the search is a script with
the text of every page.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import pages
import quotes
from handgrad.explain_page.stations.formulas import mathml

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
TAG = re.compile(r"<(script|style|math)\b.*?</\1>|<[^>]+>", re.S)
SECTION = re.compile(r'<h([23]) id="([^"]+)">(.*?)</h\1>', re.S)
_origins: dict[str, str] = {}  # page → the file of the repository that it comes from
_index: list[dict[str, str]] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and a page for every source file that another page shows or links to."""
    _origins.clear()
    _index.clear()
    written = {f.src_uri: Path(f.abs_src_path or "").read_text() for f in files.documentation_pages()}
    _origins.update({uri: f"docs/{uri}" for uri in written})
    made = pages.generate()
    for origin, uri in quotes.PROJECT.items():
        if origin != "README.md":
            made[uri] = (quotes.ROOT / origin).read_text()
            _origins[uri] = origin
    needed: set[str] = set()
    for uri, text in {**written, **made}.items():
        needed |= quotes.outside_links(text, _origins.get(uri, f"docs/{uri}"))
        needed |= {quotes.PACKAGE + name.split()[0] for name in quotes.names_in(text)}
    for path in needed - set(quotes.PROJECT):
        made[quotes.source_page(path)] = pages.show_source(path)
    for uri, text in sorted(made.items()):
        if (stand_in := files.get_file_from_path(uri)) is not None:  # says in the repository what the site shows here
            files.remove(stand_in)
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Quote the source, and let links to files outside docs/ lead to pages of the site."""
    uri = page.file.src_uri
    try:
        markdown = quotes.place_quotes(quotes.redirect_links(markdown, _origins.get(uri, f"docs/{uri}"), uri), uri)
    except ValueError as error:
        raise PluginError(f"{uri}: {error}") from None
    return markdown


def on_page_content(content: str, page: Page, **_: Any) -> str:
    """Write formulas as MathML, and add the page to the index of the search."""
    content = FORMULA.sub(_draw, content)
    if not page.file.src_uri.startswith("source/"):
        _add_to_index(page.file.url, str(page.title), content)
    return content


def _draw(found: re.Match[str]) -> str:
    latex = html.unescape(found[2]).strip()
    inline = found[1] == "span"
    made = mathml(latex)
    return made.replace('display="block"', 'display="inline"', 1) if inline else f'<div class="display">{made}</div>'


def _add_to_index(url: str, title: str, content: str) -> None:
    parts = SECTION.split(content)
    sections = [("", title, parts[0])]
    sections += [(parts[i + 1], _text(parts[i + 2]), parts[i + 3]) for i in range(1, len(parts), 4)]
    for anchor, heading, body in sections:
        where = title if heading == title else f"{title} › {heading}"
        _index.append({"url": url + (f"#{anchor}" if anchor else ""), "title": where, "text": _text(body)})


def _text(content: str) -> str:
    return " ".join(html.unescape(TAG.sub(" ", content)).replace("#", "").split())


def on_post_build(config: MkDocsConfig) -> None:
    """Write the index of the search as a script, because a page on the disk may not read other files."""
    target = Path(config.site_dir) / "search-index.js"
    target.write_text(f"const INDEX = {json.dumps(_index, ensure_ascii=False)};\n")
