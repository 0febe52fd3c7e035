"""Text files → token files → batches."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from handgrad.errors import HandgradError
from handgrad.text import batches, corpus, tokenizer


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path / "cache"))


def tokens_of(tmp_path: Path, text: str, kind: str = "bytes") -> corpus.Tokens:
    (tmp_path / "t.txt").write_text(text, newline="")
    return corpus.prepare([tmp_path / "t.txt"], tokenizer.make(kind, [text]))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("kind", ["bytes", "gpt2", "bpe:300"])
@pytest.mark.some_cases(3)
def test_reading_in_pieces_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, kind: str
) -> None:
    text = "One line\r\nand  another,\n\n\n   indented — naïve\n" * 20 + "no end"
    made = tokenizer.make(kind, [text])
    monkeypatch.setattr(corpus, "CHUNK", chunk)
    (tmp_path / "t.txt").write_bytes(text.encode())
    tokens = corpus.prepare([tmp_path / "t.txt"], made)
    expected = made.encode(text) + ([made.end] if made.end is not None else [])
    assert tokens[slice(None)].tolist() == expected


def test_jsonl_lines_are_documents_that_end(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"body": t}) for t in ("first", "second")) + "\n\n")
    made = tokenizer.make("gpt2", [])
    tokens = corpus.prepare([tmp_path / "d.jsonl"], made, field="body")
    assert tokens[slice(None)].tolist() == [*made.encode("first"), 50256, *made.encode("second"), 50256]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.txt", b"abc\0def", "zero bytes"),
        ("l.txt", "naïve".encode("latin-1"), "not UTF-8"),
        ("x.jsonl", b'{"text": 1}\n', "no text in the field 'text'"),
        ("y.jsonl", b"{]\n", "line 1 is not valid JSON"),
        ("z.jsonl", b'{"body": "a"}\n', "its fields are body"),
        ("u.jsonl", b'{"text": "a"}\n\xff', "line 2 is not UTF-8"),
    ],
)
def test_files_that_are_not_text_are_rejected(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HandgradError, match=message):
        corpus.prepare([tmp_path / name], tokenizer.make("bytes", []))
    assert not list((tmp_path / "cache").rglob("*.tokens")), "no partial file is left"


def test_find_takes_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden", "sub/c.txt"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text("x")
    assert [f.name for f in corpus.find([str(tmp_path / "d")])] == ["a.txt", "b.txt", "c.txt"]
    assert [f.name for f in corpus.find([str(tmp_path / "d" / "*.txt")])] == ["a.txt", "b.txt"]
    with pytest.raises(HandgradError, match="no file, folder or pattern"):
        corpus.find([str(tmp_path / "nowhere*")])
    (tmp_path / "e").mkdir()
    with pytest.raises(HandgradError, match="contains no files"):
        corpus.find([str(tmp_path / "e")])


def test_the_cache_depends_on_content_not_names(tmp_path: Path) -> None:
    first = tokens_of(tmp_path, "some text\n" * 9)
    (tmp_path / "t.txt").rename(tmp_path / "u.txt")
    again = corpus.prepare([tmp_path / "u.txt"], tokenizer.make("bytes", []))
    assert again.path == first.path
    assert tokens_of(tmp_path, "other text\n").path != first.path


def test_every_changed_byte_of_a_token_file_is_detected(tmp_path: Path) -> None:
    """The header and the ids have checksums; a damaged file is made again."""
    tokens = tokens_of(tmp_path, "some text\n" * 9)
    original = tokens.path.read_bytes()
    generator = random.Random(0)
    positions = [
        *range(260),
        *generator.sample(range(260, corpus.HEADER - 32), 40),
        *range(corpus.HEADER - 32, len(original)),
    ]
    for position in positions:
        changed = bytearray(original)
        changed[position] ^= 1 << generator.randrange(8)
        tokens.path.write_bytes(changed)
        with pytest.raises(HandgradError, match="damaged"):
            corpus.read(tokens.path)
    assert tokens_of(tmp_path, "some text\n" * 9).path.read_bytes() == original
    other = tokens_of(tmp_path, "another text\n" * 9)
    other.path.replace(tokens.path)
    with pytest.raises(HandgradError, match="damaged"):
        corpus.read(tokens.path)
    for short in (b"", original[:100], original[: corpus.HEADER], original + b"a"):
        tokens.path.write_bytes(short)
        with pytest.raises(HandgradError, match="damaged"):
            corpus.read(tokens.path)


@pytest.mark.parametrize("field", ["magic", "key", "dtype", "count", "vocabulary", "crc32"])
@pytest.mark.parametrize("value", [None, -1, "O", "<f8", [], 1 << 80, "missing"])
def test_a_forged_header_is_detected_and_the_file_made_again(tmp_path: Path, field: str, value: object) -> None:
    tokens = tokens_of(tmp_path, "some text\n" * 9)
    original = tokens.path.read_bytes()
    header = json.loads(original[: corpus.HEADER - 32].rstrip(b"\0")) | {field: value}
    if value == "missing":
        del header[field]
    raw = json.dumps(header).encode().ljust(corpus.HEADER - 32, b"\0")
    tokens.path.write_bytes(raw + hashlib.sha256(raw).digest() + original[corpus.HEADER :])
    assert tokens_of(tmp_path, "some text\n" * 9).path.read_bytes() == original


def test_large_ids_are_stored_as_32_bit(tmp_path: Path) -> None:
    made = tokenizer.make("chars", ["ab"])
    text = made.to_json().replace('"b":1', '"b":70000')
    wide = tokenizer.from_json(text)
    assert wide.n_vocab == 70_001
    (tmp_path / "t.txt").write_text("abba")
    assert corpus.prepare([tmp_path / "t.txt"], wide)[slice(None)].tolist() == [0, 70_000, 70_000, 0]


# ── dangerous files ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    os.mkfifo(folder / "pipe.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    for source, why in ((folder / "pipe.txt", "a pipe"), ("/dev/zero", "a device"), (folder / "zero.txt", "a device")):
        with pytest.raises(HandgradError, match=f"cannot read .*{why}"):
            corpus.find([str(source)])
        with pytest.raises(HandgradError, match=f"cannot read .*{why}"):
            corpus.prepare([Path(source)], tokenizer.make("bytes", []))
    with pytest.raises(HandgradError, match="contains no files"):
        corpus.find([str(folder)])
    (folder / "a.txt").write_text("x")
    assert corpus.find([str(folder)]) == [folder / "a.txt"]
    (folder / os.fsdecode(b"\xff.txt")).write_text("x")
    with pytest.raises(HandgradError, match="half of a character"):
        corpus.find([str(folder)])
    for name in (f"{folder}/a\0b", os.fsdecode(b"\xff")):
        with pytest.raises(HandgradError):
            corpus.find([name])


def test_standard_input_of_zero_bytes_is_rejected_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero") as zeros:
        monkeypatch.setattr(sys, "stdin", zeros)
        with pytest.raises(HandgradError, match="zero bytes"):
            corpus.from_stdin()
    assert not list((tmp_path / "cache" / "stdin").iterdir())


@pytest.mark.parametrize("text", ["\n ", "x", " ", "word ", "é", "\n"])
def test_pieces_are_bounded_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(corpus, "CHUNK", 100)
    monkeypatch.setattr(tokenizer, "MAX_PIECE", 300)
    content = text * (10_000 // len(text))
    (tmp_path / "t.txt").write_text(content, newline="")
    pieces = list(corpus.texts([tmp_path / "t.txt"]))
    assert "".join(piece.text for piece in pieces) == content and [p.last for p in pieces].count(True) == 1
    assert max(len(piece.text) for piece in pieces) <= 400
    if text == "word ":
        assert all(piece.text.startswith(" word") for piece in pieces[1:]), "cut before a space"


def test_reading_takes_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character is searched once for a cut position, even if there is none."""
    characters = 0

    def counting(text: str, searched: int = 0) -> int:
        nonlocal characters
        characters += len(text) - searched
        return cut_position(text, searched)

    cut_position = corpus.cut_position
    monkeypatch.setattr(corpus, "cut_position", counting)
    monkeypatch.setattr(corpus, "CHUNK", 1 << 10)
    (tmp_path / "t.txt").write_text("\n " * 1_000_000, newline="")
    assert sum(len(piece.text) for piece in corpus.texts([tmp_path / "t.txt"])) == 2_000_000
    assert characters == 2_000_000


def test_line_length_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE", 20)
    (tmp_path / "t.jsonl").write_text('{"text": "short"}\n' + " " * 19 + "\n" + "x" * 100 + '\n{"text": "b"}')
    found = list(corpus.read_lines(tmp_path / "t.jsonl"))
    assert [number for number, _ in found] == [1, 2, 3, 4] and found[2][1] is None and found[3][1] == b'{"text": "b"}'
    with pytest.raises(HandgradError, match=r"line 3 is longer than"):
        list(corpus.texts([tmp_path / "t.jsonl"]))


@pytest.mark.parametrize("n", [1, 2, 3, 10, 64, 1000])
def test_shuffled_index_is_a_permutation(n: int) -> None:
    orders = {tuple(batches.shuffled_index(i, n, seed, epoch) for i in range(n)) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert len(orders) == 4 or n < 10


def test_an_epoch_visits_every_window_once_and_targets_follow(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, "".join(chr(33 + i % 90) for i in range(1003)))
    windows = batches.Windows(tokens, 0, len(tokens), context=10, seed=3)
    ids, targets, _ = windows.batch(0, windows.per_epoch)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    starts = [windows._start_of(i) for i in range(windows.per_epoch)]
    assert len({(s - min(starts)) // 10 for s in starts}) == windows.per_epoch == 99
    late = windows.batch(windows.per_epoch + 7, 3)[0]
    assert torch.equal(late, windows.batch(windows.per_epoch, 10)[0][7:]), "any position can be reached directly"


@pytest.mark.parametrize("n", [201, 202, 205, 210, 31, 22, 21, 20, 13, 11])
def test_every_epoch_starts_at_another_offset(tmp_path: Path, n: int) -> None:
    tokens = tokens_of(tmp_path, "x" * n)
    windows = batches.Windows(tokens, 0, n, context=10, seed=3)
    offsets = set()
    for epoch in range(60):
        starts = sorted(windows._start_of(epoch * windows.per_epoch + i) for i in range(windows.per_epoch))
        assert starts == list(range(starts[0], starts[0] + 10 * windows.per_epoch, 10))
        assert starts[0] >= 0 and starts[-1] + 10 < n
        offsets.add(starts[0] % 10)
    assert len(offsets) >= min(9, n - 10), "11 tokens are one window of 10 and its last target"
    assert windows.per_epoch >= max(1, (n - 1) // 10 - 1)
    assert windows.batch(0, 1)[0].shape == (1, 10)
    in_order = batches.Windows(tokens, 0, n, context=10, seed=3, random_offset=False)
    assert in_order.per_epoch == (n - 1) // 10, "validation reads all that fits"


def test_texts_too_short_for_the_context_are_rejected(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, "abcdefgh")
    with pytest.raises(HandgradError, match="too few for a context of 8"):
        batches.split(tokens, 8, 0.1, 0)
    with pytest.raises(HandgradError, match=r"hold out 0\.1 of them for validation"):
        batches.split(tokens, 4, 0.1, 0)
    training, validation = batches.split(tokens, 4, 0.0, 0)
    assert validation is None and training.per_epoch == 1


MEASURE_MEMORY = """
import sys
from pathlib import Path
from handgrad.machine import peak_memory
from handgrad.text import corpus, tokenizer
made = tokenizer.make(sys.argv[2], [])
corpus.prepare([Path(sys.argv[3])], made)
before = peak_memory()
tokens = corpus.prepare([Path(sys.argv[1])], made)
print((peak_memory() - before) // 1024, len(tokens))
"""


@pytest.mark.parametrize(("kind", "megabytes"), [("bytes", 96), ("gpt2", 6)])
@pytest.mark.some_cases(3)
def test_memory_does_not_grow_with_the_text(tmp_path: Path, kind: str, megabytes: int) -> None:
    line = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.\n"
    (tmp_path / "small").write_text(line * 10_000)
    with open(tmp_path / "large", "w") as file:
        for _ in range(megabytes):
            file.write(line * (1_000_000 // len(line)))
    arguments = [sys.executable, "-c", MEASURE_MEMORY, str(tmp_path / "large"), kind, str(tmp_path / "small")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    more, count = map(int, done.stdout.split())
    assert count > 100_000 * megabytes / 6 and more < 24_000, f"{more} kB more for {megabytes} MB of text"
