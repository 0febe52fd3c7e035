"""Untrusted files: reading any path ends at once, with the value or with a one-line error."""

import os
import socket
from pathlib import Path

import pytest

from handgrad.errors import HandgradError, MissingError, printable, shown
from handgrad.files.reading import open_regular, parse_json, read_bytes, read_json, read_text


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    (tmp_path / "loop").symlink_to("loop")
    for name, why in {
        "pipe": "a pipe", "/dev/zero": "a device", ".": "a folder", "loop": "symbolic links", "a\0b": "null",
        "x" * 300: "name too long", "socket": "no such device",
    }.items():  # fmt: skip
        with pytest.raises(HandgradError, match=f"cannot read .*{why}"):
            open_regular(tmp_path / name)
    listening.close()
    with pytest.raises(MissingError, match="no such file"):
        open_regular(tmp_path / "none")


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(HandgradError, match="larger than 1 MB"):
        read_bytes(tmp_path / "sparse", 1_000_000)
    with pytest.raises(HandgradError, match="larger than 64,000 bytes"):
        read_bytes(tmp_path / "sparse", 64_000)
    (tmp_path / "latin").write_bytes(b"ab\xff")
    with pytest.raises(HandgradError, match="byte 2"):
        read_text(tmp_path / "latin")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "deep"),
        ("[" * 100 + "]" * 100, "64 levels"),
        ('{"a": ' * 70 + "1" + "}" * 70, "64 levels"),
        ('{"n": ' + "9" * 5000 + "}", "5,000 digits"),
        ('{"text": "\\ud83d"}', r"\\ud83d, half of a character"),
        ('{"\\ud83d": 1}', r"\\ud83d, half of a character"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_dangerous_json_is_rejected(text: str, why: str) -> None:
    with pytest.raises(HandgradError, match=why):
        parse_json(text, "x.json")


def test_valid_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, {"b": "\\ud83d\\ude00"}], "c": -1e5}')
    assert read_json(tmp_path / "a.json") == {"a": [1, {"b": "😀"}], "c": -1e5}
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(HandgradError, match="a JSON object, not a list"):
        read_json(tmp_path / "b.json")


def test_messages_are_short_and_printable() -> None:
    assert len(str(HandgradError("x" * 1_200_000))) == 1000
    assert str(HandgradError("a\x1b[31mb\ud83d")) == "a\\x1b[31mb\\ud83d"
    assert printable("x" * 300).startswith("xxx") and len(printable("x" * 300)) == 200
    assert shown(["x" * 1000]).endswith("…") and len(shown({"a": "x" * 10_000_000})) <= 60
