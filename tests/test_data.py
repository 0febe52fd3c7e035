"""Texts → tokens → batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from handgrad import data, tokenizer
from handgrad.errors import HandgradError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path / "cache"))


def tokens_of(tmp_path: Path, text: str, kind: str = "bytes") -> data.Tokens:
    (tmp_path / "t.txt").write_text(text, newline="")
    return data.prepare([tmp_path / "t.txt"], tokenizer.make(kind, [text]))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("kind", ["bytes", "gpt2", "bpe:300"])
def test_reading_in_pieces_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, kind: str
) -> None:
    text = "One line\r\nand  another,\n\n\n   indented — naïve\n" * 20 + "no end"
    made = tokenizer.make(kind, [text])
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "CHUNK", chunk)
    (tmp_path / "t.txt").write_bytes(text.encode())
    tokens = data.prepare([tmp_path / "t.txt"], made)
    expected = made.encode(text) + ([made.end] if made.end is not None else [])
    assert tokens[slice(None)].tolist() == expected


def test_jsonl_and_documents_that_end(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"body": t}) for t in ("first", "second")) + "\n\n")
    made = tokenizer.make("gpt2", [])
    tokens = data.prepare([tmp_path / "d.jsonl"], made, field="body")
    assert tokens[slice(None)].tolist() == [*made.encode("first"), 50256, *made.encode("second"), 50256]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.txt", b"abc\0def", "zero bytes"),
        ("l.txt", "naïve".encode("latin-1"), "not UTF-8"),
        ("x.jsonl", b'{"text": 1}\n', "no text under 'text'"),
        ("y.jsonl", b"{]\n", "line 1 is not JSON"),
        ("z.jsonl", b'{"body": "a"}\n', "it has body"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HandgradError, match=message):
        data.prepare([tmp_path / name], tokenizer.make("bytes", []))
    assert not list((tmp_path / "cache").rglob("*.tokens")), "nothing half-made is kept"


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden", "sub/c.txt"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text("x")
    assert [f.name for f in data.find([str(tmp_path / "d")])] == ["a.txt", "b.txt", "c.txt"]
    assert [f.name for f in data.find([str(tmp_path / "d" / "*.txt")])] == ["a.txt", "b.txt"]
    with pytest.raises(HandgradError, match="no file, folder or pattern"):
        data.find([str(tmp_path / "nowhere*")])
    (tmp_path / "e").mkdir()
    with pytest.raises(HandgradError, match="holds no files"):
        data.find([str(tmp_path / "e")])


def test_the_cache_knows_content_not_names(tmp_path: Path) -> None:
    first = tokens_of(tmp_path, "some text\n" * 9)
    (tmp_path / "t.txt").rename(tmp_path / "u.txt")
    again = data.prepare([tmp_path / "u.txt"], tokenizer.make("bytes", []))
    assert again.path == first.path
    assert tokens_of(tmp_path, "other text\n").path != first.path


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    first = tokens_of(tmp_path, "some text\n" * 9)
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[:-3] + b"abc")
    with pytest.raises(HandgradError, match="damaged"):
        data.read(first.path)
    assert tokens_of(tmp_path, "some text\n" * 9).path.read_bytes() == whole


@pytest.mark.parametrize("n", [1, 2, 3, 10, 64, 1000])
def test_shuffled_is_a_permutation(n: int) -> None:
    orders = {tuple(data.shuffled(i, n, seed, epoch) for i in range(n)) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert len(orders) == 4 or n < 10


def test_an_epoch_visits_every_window_once_and_targets_follow(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, "".join(chr(33 + i % 90) for i in range(1003)))
    windows = data.Windows(tokens, 0, len(tokens), context=10, seed=3)
    ids, targets, _ = windows.batch(0, windows.per_epoch)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    starts = [windows._place(i) for i in range(windows.per_epoch)]
    assert len({(s - min(starts)) // 10 for s in starts}) == windows.per_epoch == 100
    late = windows.batch(windows.per_epoch + 7, 3)[0]
    assert torch.equal(late, windows.batch(windows.per_epoch, 10)[0][7:]), "any place can be reached directly"


def test_too_short(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, "abcdefgh")
    with pytest.raises(HandgradError, match="too few for a context of 8"):
        data.split(tokens, 8, 0.1, 0)
    with pytest.raises(HandgradError, match=r"keep 0\.1 of them for validation"):
        data.split(tokens, 4, 0.1, 0)
    training, validation = data.split(tokens, 4, 0.0, 0)
    assert validation is None and training.per_epoch == 1


READ = """
import resource, sys
from pathlib import Path
from handgrad import data, tokenizer
made = tokenizer.make(sys.argv[2], [])
data.prepare([Path(sys.argv[3])], made)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens = data.prepare([Path(sys.argv[1])], made)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, len(tokens))
"""


@pytest.mark.parametrize(("kind", "megabytes"), [("bytes", 96), ("gpt2", 12)])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, kind: str, megabytes: int) -> None:
    line = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.\n"
    (tmp_path / "small").write_text(line * 40_000)
    with open(tmp_path / "large", "w") as file:
        for _ in range(megabytes):
            file.write(line * (1_000_000 // len(line)))
    arguments = [sys.executable, "-c", READ, str(tmp_path / "large"), kind, str(tmp_path / "small")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    more, count = map(int, done.stdout.split())
    assert count > 100_000 * megabytes / 6 and more < 24_000, f"{more} kB more for {megabytes} MB of text"
