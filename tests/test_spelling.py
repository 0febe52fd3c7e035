"""One spelling, American, in code, documentation, messages and names of files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "bench", "docs", ".github")
KINDS = {".py", ".md", ".js", ".css", ".html", ".c", ".h", ".yml", ".toml", ".cff", ""}
# Prompts of recorded runs, and names of others. (Python and the public value of `finish` have "cancelled".)
QUOTED = ("primary colours", "labelledby")

WORDS = {
    "colour": "color", "behaviour": "behavior", "favour": "favor", "neighbour": "neighbor", "honour": "honor",
    "labour": "labor", "flavour": "flavor", "humour": "humor", "harbour": "harbor", "endeavour": "endeavor",
    "centred": "centered", "centre": "center", "fibre": "fiber", "calibre": "caliber", "licence": "license",
    "defence": "defense", "offence": "offense", "pretence": "pretense", "grey": "gray", "catalogue": "catalog",
    "programme": "program", "artefact": "artifact", "judgement": "judgment", "acknowledgement": "acknowledgment",
    "ageing": "aging", "whilst": "while", "amongst": "among", "misspelt": "misspelled", "learnt": "learned",
    "skilful": "skillful", "sceptic": "skeptic", "manoeuvre": "maneuver", "practise": "practice",
    "cancelling": "canceling",
}  # fmt: skip
VERBS = (
    "author|capital|categor|character|critic|crystall|custom|diagonal|digit|discret|emphas|equal|"
    "factor|final|formal|general|ideal|initial|item|linear|local|material|maxim|memor|minim|mobil|"
    "modern|neutral|normal|optim|organ|orthogonal|parallel|parametr|penal|polar|priorit|quant|random|"
    "real|recogn|regular|serial|special|stabil|standard|summar|symbol|symmetr|synchron|token|util|"
    "vector|visual"
)
DOUBLED = "channel|fuel|label|level|marshal|model|signal|travel|tunnel"
BRITISH = re.compile(
    rf"(?P<word>{'|'.join(sorted(WORDS, key=len, reverse=True))})"
    rf"|(?P<verb>(?:{VERBS})is|analys)(?=(?:e|ed|er|ers|ing|ations?|able)(?![a-z]))"
    rf"|(?P<third>(?:{VERBS})is)(?=es(?![a-z]))"
    rf"|(?P<doubled>(?:{DOUBLED})l)(?=(?:ed|ing|ers?)(?![a-z]))",
    re.I,
)

LOWER = re.compile(BRITISH.pattern)


def american(found: re.Match[str]) -> str:
    """The American form of what was found, in the same case."""
    text = found[0]
    if found["word"]:
        changed = WORDS[text.lower()]
    else:
        changed = text.lower()[:-1] + ("z" if found["verb"] or found["third"] else "")
    return changed.upper() if text.isupper() else changed.capitalize() if text[0].isupper() else changed


def translated(text: str) -> str:
    """The text in American spelling, quotations as they are."""
    pieces = re.split(f"({'|'.join(QUOTED)})", text)
    return "".join(piece if piece in QUOTED else BRITISH.sub(american, piece) for piece in pieces)


def written_files() -> list[Path]:
    """Every file of text that is written by hand."""
    found = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    kept = (file for file in found if file.is_file() and file.suffix in KINDS and "__pycache__" not in file.parts)
    return [
        file for file in kept if "data" not in file.parts and not file.name.startswith(".") and file != Path(__file__)
    ]


def test_spelling_is_american() -> None:
    wrong = []
    for file in written_files():
        where = file.relative_to(ROOT)
        wrong += [f"{where}: name it {translated(file.name)}"] * (translated(file.name) != file.name)
        text = file.read_text()
        if not LOWER.search(text.lower()):  # four times as fast as ignoring case
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if translated(line) != line:
                words = {found[0] for found in BRITISH.finditer(line)}
                wrong.append(f"{where}:{number}: {', '.join(sorted(words))} → {translated(line).strip()[:100]}")
    assert not wrong, "write\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("british", "expected"),
    [
        ("The COLOURS of Neighbouring rows", "The COLORS of Neighboring rows"),
        ("can_dequantise, normalisation, _Tokeniser", "can_dequantize, normalization, _Tokenizer"),
        ("labelled and modelling", "labeled and modeling"),
        ("exercise, promise, otherwise, emphasis, organism, analyses, layerwise", None),
        ("aria-labelledby, Name three primary colours., CancelledError", None),
    ],
)
def test_translation(british: str, expected: str | None) -> None:
    assert translated(british) == (british if expected is None else expected)
