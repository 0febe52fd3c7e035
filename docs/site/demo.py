"""Build the demonstration of the site: the explain page as a folder, with SmolLM2 on chosen sentences and the small model.
`make site` runs it if the page has changed.

SmolLM2 is fetched if it is not in the cache, and the small model is trained once, as `handgrad explain` does.
"""

import argparse
import importlib
import sys
from pathlib import Path

import torch

from handgrad.errors import HandgradError
from handgrad.explain_page.folder import Shown, export_folder
from handgrad.explain_page.session.session import Session
from handgrad.proof.check_report import progress_bar
from handgrad.text import downloads

explain = importlib.import_module("handgrad.cli.explain")  # `handgrad.cli.explain` is also a function
SENTENCES = (
    explain.TEXTS[explain.DEFAULT],
    "When Mary and John went to the store, John gave a drink to Mary.",
    "The cat sat on the mat, and then the cat sat on the dog.",
    "The keys to the old wooden cabinet is on the table.",
    "Two plus two is four, and three plus three is seven.",
)
SMALL = (explain.TEXT,)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demonstration of the site.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder in which the small model is trained, or is")
    options = parser.parse_args()
    try:
        build(options.folder, options.model)
    except HandgradError as reason:
        sys.exit(f"the demonstration was not built: {reason}\nmake docs builds the documentation without it")


def build(folder: Path, small_model: Path) -> None:
    """Write the folder; it is replaced if it is there."""
    downloads.fetch(explain.DEFAULT)
    torch.set_num_threads(1)
    watch = progress_bar("checking")
    export_folder(
        folder, [Shown(language_model(), SENTENCES), Shown(character_model(small_model), SMALL, live=True)], watch
    )


def language_model() -> Session:
    found: Session = explain.make_session(explain.choose(explain.DEFAULT), SENTENCES[0], 0, others_read=True)
    return found


def character_model(folder: Path) -> Session:
    found: Session = explain.make_session(explain.small_model(folder), SMALL[0], 0, others_read=True)
    return found


if __name__ == "__main__":
    main()
