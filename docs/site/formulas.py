"""An extension of Markdown that writes formulas as MathML, which browsers draw themselves."""

import html
import re

from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor

from handgrad.explain_page.stations.formulas import mathml

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


class Formulas(Postprocessor):
    def run(self, text: str) -> str:
        return FORMULA.sub(draw, text)


class FormulaExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(Formulas(md), "formulas", 1)  # after the one that puts raw HTML back


def draw(found: re.Match[str]) -> str:
    made = mathml(html.unescape(found[2]).strip())
    if found[1] == "span":
        return made.replace('display="block"', 'display="inline"', 1)
    return f'<div class="display">{made}</div>'


def makeExtension(**_: object) -> FormulaExtension:
    return FormulaExtension()
