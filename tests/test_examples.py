"""Lines of JSON → examples: what is learned, exactly; what is refused, by file and line; that nothing gets lost."""

import io
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from handgrad.display.examples import report
from handgrad.errors import HandgradError, LimitError
from handgrad.text import batches, corpus, examples, records, tokenizer
from handgrad.text.chat import ChatTemplate
from handgrad.text.examples import Examples, Summary
from handgrad.text.tokenizer import END, Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Whither so fast? 東京 🙂"},
    {"role": "assistant", "content": "To the naïve façade.\n"},
    {"role": "user", "content": "Oh"},
    {"role": "assistant", "content": "Indeed"},
]


def with_marks() -> Tokenizer:
    """Merged from a little text, with an end of texts and the marks of CHATML."""
    inner = tokenizer.make("bpe:300", [str(TALK)] * 3).inner
    inner.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer(inner)


MARKS = with_marks()
END_ID = MARKS.inner.token_to_id(END)
BYTES = tokenizer.make("bytes", [])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path / "cache"))


def lines(tmp_path: Path, *records: object, name: str = "d.jsonl") -> list[Path]:
    (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    return [tmp_path / name]


def read(files: list[Path], n_context: int = 1000, made: Tokenizer = MARKS, **more: Any) -> tuple[Examples, Summary]:
    return examples.read(files, made, n_context, **{"template": ChatTemplate(CHATML), **more})


def learned(found: Examples, i: int, made: Tokenizer = MARKS) -> list[tuple[str, bool]]:
    """Example i as text, in runs of what is learned and what is not."""
    ids, learn = found.example(i)
    cuts = [0, *(np.flatnonzero(np.diff(learn)) + 1).tolist(), len(ids)]
    return [(made.decode(ids[a:b].tolist()), bool(learn[a])) for a, b in pairwise(cuts)]


# ── what is learned ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_prompt_and_completion(tmp_path: Path) -> None:
    record = {"prompt": "Whither so", "completion": " fast?", "id": 7, "messages": None}
    found, summary = read(lines(tmp_path, record))
    prompt, completion = MARKS.encode("Whither so"), MARKS.encode(" fast?")
    assert found.ids.tolist() == [*prompt, *completion, END_ID]
    assert found.learn.tolist() == [False] * len(prompt) + [True] * (len(completion) + 1)
    ids, targets, lengths = found.batch(0, 1)
    assert ids.tolist() == found.ids[:-1].tolist() and lengths == [len(ids)]
    assert targets.tolist() == [-100] * (len(prompt) - 1) + completion + [END_ID]
    assert summary.kinds == {"messages": 0, "prompt and completion": 1, "text": 0}
    assert (summary.examples, summary.tokens, summary.targets) == (1, len(ids), len(completion) + 1)


def test_without_a_prompt_it_begins_as_a_text(tmp_path: Path) -> None:
    found, _ = read(lines(tmp_path, {"prompt": "", "completion": "ab"}))
    assert learned(found, 0) == [(END, False), (f"ab{END}", True)]


def test_text_begins_and_ends(tmp_path: Path) -> None:
    found, _ = read(lines(tmp_path, {"text": "naïve 東京", "prompt": "no completion"}))
    assert learned(found, 0) == [(END, False), (f"naïve 東京{END}", True)]
    bare, _ = read(lines(tmp_path, {"text": "naïve"}), made=BYTES)
    assert bare.ids.tolist() == list("naïve".encode())
    assert learned(bare, 0, BYTES) == [("n", False), ("aïve", True)], (
        "without an end the first token has nothing before"
    )


def test_messages_as_transformers_encodes_them(tmp_path: Path) -> None:
    found, _ = read(lines(tmp_path, {"messages": TALK, "text": "not this"}))
    judge = PreTrainedTokenizerFast(tokenizer_object=MARKS.inner, chat_template=CHATML)
    assert found.ids.tolist() == judge.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert learned(found, 0) == [
        (
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhither so fast? 東京 🙂<|im_end|>\n"
            "<|im_start|>assistant\n",
            False,
        ),
        ("To the naïve façade.\n<|im_end|>\n", True),
        ("<|im_start|>user\nOh<|im_end|>\n<|im_start|>assistant\n", False),
        ("Indeed<|im_end|>\n", True),
    ]


def test_loss_on_all(tmp_path: Path) -> None:
    unanswered = [{"role": "user", "content": "Oh"}]
    files = lines(
        tmp_path, {"prompt": "ab", "completion": "c"}, {"messages": TALK}, {"messages": unanswered}, {"text": "d"}
    )
    found, summary = read(files, loss_on="all")
    starts = found.offsets[:-1]
    assert np.flatnonzero(~found.learn).tolist() == starts.tolist(), "every token but the first of each"
    assert summary.targets == summary.tokens == len(found.ids) - 4


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_byte_order_mark_windows_lines_and_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('\ufeff\r\n{"text": "é"}\r\n\r\n  \r\n{"text": "b\u2028c"}'.encode())
    found, _ = read([tmp_path / "a.jsonl"])
    assert [learned(found, i)[1][0] for i in range(2)] == [f"é{END}", f"b\u2028c{END}"]


@pytest.mark.parametrize("written", [None, 1, 4])
def test_a_list_in_one_file(tmp_path: Path, written: int | None) -> None:
    records = [{"text": "a [1]"}, {"prompt": "p", "completion": "c"}, {"text": "东"}]
    (tmp_path / "d.json").write_text("\ufeff \n" + json.dumps(records, indent=written) + "\n\n", encoding="utf-8")
    whole, _ = read([tmp_path / "d.json"])
    one_by_one, _ = read(lines(tmp_path, *records))
    assert whole.fingerprint == one_by_one.fingerprint
    seen: list[int] = []
    places = [place.line for place, _ in examples.records([tmp_path / "d.json"], seen.append)]
    assert places == ([2, 2, 2] if written is None else [3, 6, 10])
    assert sum(seen) == (tmp_path / "d.json").stat().st_size


def test_folders_patterns_and_progress(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json"):
        lines(tmp_path, {"text": name}, {"text": "x"}, name=name)
    files = examples.find([str(tmp_path / "*.json*")])
    seen: list[int] = []
    found, _ = read(files, progress=seen.append)
    assert learned(found, 0)[1][0] == f"a.json{END}" and found.per_epoch == 4
    assert sum(seen) == sum(file.stat().st_size for file in files)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "a"}\n')))
    found, _ = read(examples.find(["-"]))
    assert learned(found, 0)[1][0] == f"a{END}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', " is not valid JSON: Expecting ',' delimiter, column 13"),
        (b"text", " is not valid JSON: Expecting value, column 1"),
        (b"[" * 100_000, " is not usable JSON: nested too deeply"),
        (b'{"text": "na\xefve"}', " is not UTF-8 text: convert it"),
        (b'"text"', ': it holds "text", not an object; wanted is prompt and completion, or messages, or text'),
        (b'{"body": "a", "text": null}', r": it has body, text \(null\); wanted is prompt and completion, or"),
        (b"{}", ": it has nothing; wanted"),
        (b'{"prompt": "a"}', ": it has prompt; wanted"),
        (b'{"completion": "a"}', ": it has completion; wanted"),
        (b'{"text": 3}', ": text is 3, not a string"),
        (b'{"prompt": "a", "completion": ["b"]}', r': completion is \["b"\], not a string'),
        (b'{"prompt": 1.5, "completion": "b"}', ": prompt is 1.5, not a string"),
        (b'{"prompt": "a", "completion": ""}', ": the completion is empty"),
        (b'{"prompt": "a", "messages": []}', ": it has messages, and a prompt or completion as well"),
        (b'{"messages": []}', ": messages is empty"),
        (b'{"messages": "Hello"}', ': messages is "Hello", not a list'),
        (b'{"messages": [{"role": "human", "content": "a"}]}', ': message 1 has the role "human": it can be system,'),
        (b'{"messages": [{"role": "user"}]}', ": message 1 has no content"),
        (b'{"messages": [{"role": "user", "content": 1}]}', ": message 1: its content is 1, not a string"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', ": the assistant says nothing in these messages"),
        (b'{"text": "half \\ud83d of it"}', r" holds \\ud83d, half of a character"),
        (b'{"messages": [{"role": "assistant", "content": "\\ude42"}]}', r" holds \\ude42, half"),
    ],
)
def test_every_mistake_is_named_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'\n{"text": "good"}\r\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(HandgradError, match=rf"bad\.jsonl, line 3{message}"):
        read([tmp_path / "bad.jsonl"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"text": "a"},\n\n{"text": 1}]', r"line 3: text is 1"),
        (
            b'[{"text": "a"}\n,\n{"text" "b"}]',
            r"the item of line 3 is not valid JSON: Expecting ':' delimiter, column 9",
        ),
        (b'[{"text": "a"}\n{"text": "b"}]', r"line 2: the list needs , or \] here"),
        (b'[{"text": "a"},\n', r"the item of line 2 is not valid JSON: Expecting value"),
        (b'[{"text": "a"}', r"line 1: the list needs , or \] here"),
        (b'[{"text": "a"}]\n[]', r"line 2: something follows the list"),
        (b'[{"text":\n"\xff"}]', r"line 2 is not UTF-8"),
        (b"[3]", r"line 1: it holds 3, not an object"),
    ],
)
def test_mistakes_in_a_list(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(HandgradError, match=rf"bad\.json, {message}"):
        read([tmp_path / "bad.json"])


def test_other_mistakes(tmp_path: Path) -> None:
    with pytest.raises(
        HandgradError, match=r"d\.jsonl, line 1: it has messages.*no chat template.*--chat-template FILE"
    ):
        read(lines(tmp_path, {"messages": TALK}), template=None)
    with pytest.raises(HandgradError, match=r"d\.jsonl, line 1: .*not incremental"):
        read(lines(tmp_path, {"messages": TALK}), template=ChatTemplate("{{ messages[-1].content }}"))
    knows = tokenizer.make("chars", ["abc"])
    with pytest.raises(HandgradError, match=r"d\.jsonl, line 2: .*'z' is not one of them"):
        read(lines(tmp_path, {"text": "abc"}, {"text": "abz"}), made=knows)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("# Data\n")
    with pytest.raises(HandgradError, match=r"folder holds no file called \*\.jsonl"):
        examples.find([str(tmp_path / "folder")])
    (tmp_path / "folder" / "d.jsonl").write_text('{"text": "ab"}\n')
    assert [f.name for f in examples.find([str(tmp_path / "folder")])] == ["d.jsonl"]
    (tmp_path / "README.md").write_text("# Data\n")
    with pytest.raises(
        HandgradError, match=r"README\.md, line 1 is not valid JSON: .*leave out what is not, as in --data"
    ):
        read([tmp_path / "README.md"])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(HandgradError, match=r"no example to learn from \(the files are empty\)"):
        read([tmp_path / "empty.jsonl"])
    with pytest.raises(HandgradError, match=r"no example .*1 with nothing to learn, the first .*d\.jsonl:1"):
        read(lines(tmp_path, {"text": ""}))
    with pytest.raises(HandgradError, match="loss_on is 'prompts': it can be answers or all"):
        read(lines(tmp_path, {"text": "a"}), loss_on="prompts")
    with pytest.raises(HandgradError, match="too_long is 'split': it can be cut or drop"):
        read(lines(tmp_path, {"text": "a"}), too_long="split")


# ── too long ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_texts_are_divided_and_others_cut(tmp_path: Path) -> None:
    records = [
        {"text": "abcdefghij"},
        {"prompt": "abc", "completion": "defghi"},
        {"prompt": "abcdef", "completion": "gh"},
        {"prompt": "abcde", "completion": "f"},
        {"text": "x"},
        {"prompt": "abcd", "completion": "e"},
    ]
    found, summary = read(lines(tmp_path, *records), 4, BYTES)
    assert [learned(found, i, BYTES) for i in range(found.per_epoch)] == [
        [("a", False), ("bcde", True)],
        [("e", False), ("fghi", True)],
        [("i", False), ("j", True)],
        [("abc", False), ("de", True)],
        [("abcd", False), ("e", True)],
    ]
    assert (summary.split, summary.cut, summary.cut_tokens) == (1, 1, 4)
    reasons = {reason: (d.count, d.first.line) for reason, d in summary.dropped.items()}
    assert reasons == {"with nothing to learn inside the context": (2, 3), "with nothing to learn": (1, 5)}
    assert summary.lengths.tolist() == [0, 1, 0, 0, 4] and summary.examples == 5
    dropped, summary = read(lines(tmp_path, *records), 4, BYTES, too_long="drop")
    assert [learned(dropped, i, BYTES) for i in range(dropped.per_epoch)] == [[("abcd", False), ("e", True)]]
    assert (summary.split, summary.cut) == (0, 0)
    reasons = {reason: (d.count, d.first.line) for reason, d in summary.dropped.items()}
    assert reasons == {"longer than the context of 4 tokens": (4, 1), "with nothing to learn": (1, 5)}


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
RECORD = st.one_of(
    st.fixed_dictionaries({"text": TEXT}),
    st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT.filter(bool)}),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(RECORD, min_size=1, max_size=8), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_nothing_gets_lost(records: list[dict[str, str]], n_context: int, seed: int, few: bool) -> None:
    """Every token of every text is a target exactly once in an epoch, in its place, whatever context, groups and order."""
    records = [{"text": "at least this"}, *records]
    drafts = [examples.draft(examples.Place(Path("d"), i), r, None, "answers") for i, r in enumerate(records)]
    expected = []
    for drafted, ids, learn in examples._encoded(iter(drafts), MARKS, pytest.fail):
        kept = len(ids) if drafted.kind == "text" else n_context + 1
        expected += ids[:kept][learn[:kept]].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples, "records", lambda files, progress: ((d.place, r) for d, r in zip(drafts, records)))  # noqa: B905
        patch.setattr(corpus, "CHUNK", 1 if few else 1 << 18)
        found, summary = examples.read([], MARKS, n_context, seed=seed)
    n = found.per_epoch
    ids, targets, lengths = found.batch(0, n, shuffle=False)
    assert targets[targets >= 0].tolist() == expected
    assert (summary.tokens, summary.targets) == (sum(lengths), len(expected)) == found.size(0, n)
    assert max(lengths) <= n_context and len(ids) == len(targets) == sum(lengths)
    assert int((summary.lengths * np.arange(len(summary.lengths))).sum()) == summary.tokens
    mixed = found.batch(n, n)
    assert sorted(mixed[2]) == sorted(lengths)
    assert sorted(mixed[1][mixed[1] >= 0].tolist()) == sorted(expected)


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def numbered(n: int, seed: int = 0) -> Examples:
    """Example i is i+2 times the id i, learned but for the first."""
    ids = np.concatenate([np.full(i + 2, i) for i in range(n)]).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(np.arange(n) + 2)])
    learn = np.ones(len(ids), bool)
    learn[offsets[:-1]] = False
    return Examples(ids, learn, offsets, np.arange(n), seed)


def test_the_order_is_that_of_the_seed_and_any_place_can_be_reached() -> None:
    found = numbered(13, seed=5)
    for first, count in ((0, 13), (9, 30), (26, 1)):
        ids, targets, lengths = found.batch(first, count)
        order = [batches.shuffled(i % 13, 13, 5, i // 13) for i in range(first, first + count)]
        assert lengths == [i + 1 for i in order]
        assert ids.tolist() == targets.tolist() == [i for i in order for _ in range(i + 1)]
        assert ids.dtype == targets.dtype == torch.int64
        assert found.size(first, count) == (sum(lengths), sum(lengths))
    assert found.batch(11, 4, shuffle=False)[2] == [12, 13, 1, 2]


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    def of(*records: object, **more: Any) -> str:
        return read(lines(tmp_path, *records), **more)[0].fingerprint

    pair = {"prompt": "ab", "completion": "cd"}
    assert of(pair) == of(pair | {"id": 1}) and len(of(pair)) == 32
    different = [
        of(pair),
        of({"prompt": "abc", "completion": "d"}),
        of(pair, pair),
        of(pair, loss_on="all"),
        of({"text": "abcd"}),
    ]
    assert len(set(different)) == 5


def test_split() -> None:
    found = numbered(50)
    training, validation = examples.split(found, 0.1, 3)
    assert validation is not None and (training.per_epoch, validation.per_epoch) == (45, 5)
    firsts = [part.ids[part.offsets[:-1]].tolist() for part in (training, validation)]
    assert sorted(firsts[0] + firsts[1]) == list(range(50)) and firsts[1] == sorted(firsts[1]) != list(range(45, 50))
    for part in (training, validation):
        for i in range(part.per_epoch):
            ids, learn = part.example(i)
            assert len(ids) == ids[0] + 2 and learn.tolist() == [False] + [True] * (len(ids) - 1)
    again, other = examples.split(found, 0.1, 3)[1], examples.split(found, 0.1, 4)[1]
    assert again is not None and other is not None
    assert again.fingerprint == validation.fingerprint != other.fingerprint
    assert examples.split(found, 0.0, 3) == (found, None)
    for share in (0.001, 0.999):
        training, validation = examples.split(numbered(2), share, 0)
        assert validation is not None and training.per_epoch == validation.per_epoch == 1
    # stretches of one text stay together; of a single text the end is kept
    together = Examples(found.ids, found.learn, found.offsets, np.arange(50) // 5, 0)
    training, validation = examples.split(together, 0.2, 1)
    assert validation is not None and set(training.lines) | set(validation.lines) == set(range(10))
    assert not set(training.lines) & set(validation.lines) and validation.per_epoch == 10
    alone = Examples(found.ids, found.learn, found.offsets, np.zeros(50), 0)
    training, validation = examples.split(alone, 0.1, 1)
    assert validation is not None and validation.ids[validation.offsets[:-1]].tolist() == [45, 46, 47, 48, 49]
    with pytest.raises(HandgradError, match=r"1 example cannot be divided.*--val-share 0"):
        examples.split(numbered(1), 0.1, 0)
    with pytest.raises(HandgradError, match="a share of 1 cannot be kept"):
        examples.split(found, 1.0, 0)


def test_large_vocabularies_need_wider_ids(tmp_path: Path) -> None:
    files = lines(tmp_path, {"text": "ab"})
    assert read(files)[0].ids.dtype == np.uint16
    wide = with_marks()
    wide.n_vocab = (1 << 16) + 1
    assert read(files, made=wide)[0].ids.dtype == np.uint32
    assert read(files, made=wide)[0].fingerprint == read(files)[0].fingerprint


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────────────


def shown(found: tuple[Examples, Summary], width: int, made: Tokenizer = MARKS, colours: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colours, color_system="standard" if colours else None)
    console.print(*report(found[1], found[0], made, width), sep="\n")
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 100])
def test_the_report(tmp_path: Path, width: int) -> None:
    records = [{"messages": TALK}, {"text": ""}, {"prompt": "a" * 700, "completion": "b"}, {"text": "c d " * 700}]
    text = shown(read(lines(tmp_path, *records), 500), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for part in (
        "from lines: 1 messages, 1 prompt and completion, 2 text",
        "1 text longer than the context, split into several examples",
        "1 skipped, with nothing to learn inside the context; first:",
        "«To the naïve façade.⏎ <|im_end|>⏎»",
        "«Indeed<|im_end|>⏎»",
        "<|im_start|>user⏎ Oh<|im_end|>⏎",
    ):
        assert part in flat, part
    assert "d.jsonl:3" in "".join(text.split()), "a long path is folded anywhere"
    assert "█" in text and text.count("«") == 2


def test_the_report_in_colours_shortened_and_harmless(tmp_path: Path) -> None:
    record = {"prompt": "\x1b[31m\u202e[bold]\t" + "ab " * 900, "completion": "é" * 900 + "\x85z"}
    text = shown(read(lines(tmp_path, record), 10_000, BYTES), 80, BYTES, colours=True)
    assert "␛[31m<U+202E>[bold]⇥" in text and "<U+0085>z" in text
    assert "characters …" in text and len(text.splitlines()) < 40
    assert "«" not in text and "\x1b[1;" in text and "\u202e" not in text


# ── bad lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_bad_lines_are_listed_or_skipped(tmp_path: Path) -> None:
    good = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(5)]
    (file,) = lines(tmp_path, *good)
    bad = [b"{", b"\xff", b'{"text": 3}', b"[1]", b'{"text": ' + b"9" * 5000 + b"}", b"[" * 100_000] * 2
    file.write_bytes(file.read_bytes() + b"".join(line + b"\n" for line in bad) + b'{"text": "the last"}\n')
    with pytest.raises(HandgradError) as caught:
        read([file])
    said = str(caught.value).split("\n")
    assert said[0] == "12 lines cannot be used (--skip-bad goes on without them):" and said[-1] == "  and 2 more"
    assert len(said) == 12 and [f"line {i}" in line for i, line in enumerate(said[1:-1], 6)] == [True] * 10
    assert max(map(len, said)) <= 210
    found, summary = read([file], skip_bad=True)
    assert found.per_epoch == 6 and summary.bad == 12 and len(summary.mistakes) == 10
    assert learned(found, 5)[1][0] == f"the last{END}"
    assert "12 invalid lines skipped" in shown((found, summary), 80)


def test_lines_the_tokenizer_cannot_encode_are_bad_lines(tmp_path: Path) -> None:
    knows = tokenizer.make("chars", ["abc"])
    files = lines(tmp_path, {"text": "abc"}, {"text": "xa"}, {"text": "cb"}, {"text": "y"})
    with pytest.raises(HandgradError, match=r"2 lines(.|\n)*line 2: .*'x'(.|\n)*line 4: .*'y'"):
        read(files, made=knows)
    found, summary = read(files, made=knows, skip_bad=True)
    assert found.per_epoch == 2 and summary.bad == 2


def test_lines_and_lists_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = lines(tmp_path, {"text": "a"}, {"text": "b" * 100}, {"text": "c"})
    monkeypatch.setattr(corpus, "LONGEST_LINE", 50)
    with pytest.raises(HandgradError, match="line 2 is longer than"):
        read(files)
    assert read(files, skip_bad=True)[0].per_epoch == 2
    (tmp_path / "l.json").write_text('[{"text": "' + "a" * 100 + '"}]')
    monkeypatch.setattr(records, "WHOLE", 50)
    with pytest.raises(HandgradError, match=r"l\.json is larger than"):
        read([tmp_path / "l.json"])
    for inside in ("[" * 100_000, '{"text": "\\ud83d"}', "9" * 5000):
        (tmp_path / "m.json").write_text(f"[\n{inside}]")
        monkeypatch.setattr(records, "WHOLE", 1 << 20)
        with pytest.raises(HandgradError, match=r"m\.json, the item of line 2 "):
            read([tmp_path / "m.json"])
    os.mkfifo(tmp_path / "pipe.jsonl")
    for place in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(HandgradError, match="not a regular file"):
            read([place])


# ── other formats ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_alpaca(tmp_path: Path) -> None:
    alpaca = {"instruction": "Add.", "input": "2+2", "output": "4", "text": "all of it"}
    bare = {"instruction": "Greet.", "input": "", "output": "Hello"}
    found, summary = read(lines(tmp_path, alpaca, bare), template=None)
    assert learned(found, 0) == [("Add.\n\n2+2\n\n", False), (f"4{END}", True)]
    assert learned(found, 1) == [("Greet.\n\n", False), (f"Hello{END}", True)]
    assert summary.kinds["prompt and completion"] == 2
    found, _ = read(lines(tmp_path, alpaca | {"system": "Be kind."}))
    messages = [("system", "Be kind."), ("user", "Add.\n\n2+2"), ("assistant", "4")]
    same, _ = read(lines(tmp_path, {"messages": [{"role": r, "content": c} for r, c in messages]}))
    assert found.fingerprint == same.fingerprint
    with pytest.raises(HandgradError, match="line 1: input is 3, not a string"):
        read(lines(tmp_path, alpaca | {"input": 3}))


def test_sharegpt(tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    found, summary = read(lines(tmp_path, {"conversations": turns, "id": 3}, {"conversations": TALK}))
    same, _ = read(lines(tmp_path, {"messages": TALK}, {"messages": TALK}))
    assert found.fingerprint == same.fingerprint and summary.kinds["messages"] == 2
    with pytest.raises(HandgradError, match='line 1: turn 1 is from "cat": it can be human'):
        read(lines(tmp_path, {"conversations": [{"from": "cat", "value": "meow"}]}))
    with pytest.raises(HandgradError, match="line 1: conversations is 3, not a list"):
        read(lines(tmp_path, {"conversations": 3}))


def test_contents_in_parts(tmp_path: Path) -> None:
    parts = [{"role": m["role"], "content": [{"type": "text", "text": c} for c in m["content"]]} for m in TALK]
    found, _ = read(lines(tmp_path, {"messages": parts}))
    assert found.fingerprint == read(lines(tmp_path, {"messages": TALK}))[0].fingerprint
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    with pytest.raises(HandgradError, match=r"message 1: its content is .*not a string or a list of text parts"):
        read(lines(tmp_path, {"messages": image}))


@pytest.mark.parametrize(("suffix", "between"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_tables(tmp_path: Path, suffix: str, between: str) -> None:
    rows = [("id", "prompt", "completion"), ("1", "a, b; c", "d"), ("2", 'two\nlines "x"', "é")]
    text = "\ufeff" + "\r\n".join(between.join('"' + c.replace('"', '""') + '"' for c in row) for row in rows)
    (tmp_path / f"d.{suffix}").write_text(text + "\r\n", newline="", encoding="utf-8")
    seen: list[int] = []
    found, _ = read([tmp_path / f"d.{suffix}"], progress=seen.append)
    assert [learned(found, i) for i in range(2)] == [
        [("a, b; c", False), (f"d{END}", True)],
        [('two\nlines "x"', False), (f"é{END}", True)],
    ]
    assert sum(seen) == (tmp_path / f"d.{suffix}").stat().st_size


def test_mistakes_in_tables(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('prompt,completion\na,b\nc\nd,e,f\n"g"h,i\n\nj,k\n"l')
    with pytest.raises(HandgradError) as caught:
        read([tmp_path / "d.csv"])
    said = str(caught.value)
    for part in (
        "line 3: it has 1 cell, and the first row 2",
        "line 4: it has 3",
        "line 5: is no row",
        "line 8: is no row",
    ):
        assert part in said, said
    assert read([tmp_path / "d.csv"], skip_bad=True)[0].per_epoch == 2


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(HandgradError, match=r"d\.parquet needs the package pyarrow: pip install pyarrow"):
        read([tmp_path / "d.parquet"])
    monkeypatch.undo()
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with pytest.raises(HandgradError, match=r"d\.parquet is not a parquet file"):
        read([tmp_path / "d.parquet"])
    rows: list[dict[str, Any]] = [{"messages": TALK, "text": None}, {"messages": None, "text": "abc"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    seen: list[int] = []
    found, _ = read([tmp_path / "d.parquet"], progress=seen.append)
    assert found.fingerprint == read(lines(tmp_path, *rows))[0].fingerprint
    assert sum(seen) == (tmp_path / "d.parquet").stat().st_size


def test_names_of_the_data(tmp_path: Path) -> None:
    record = {"question": "2+2?", "answer": "4", "prompt": "not this", "messages": []}
    files = lines(tmp_path, record)
    found, _ = read(files, fields=("prompt=question", "completion=answer"))
    assert learned(found, 0) == [("2+2?", False), (f"4{END}", True)]
    assert read(files, fields=["text=answer"])[1].kinds["text"] == 1
    with pytest.raises(HandgradError, match=r"line 1: it has no 'body'.*it has question, answer"):
        read(files, fields=["text=body"])
    for wrong in ("prompt", "prompt=", "question=prompt"):
        with pytest.raises(HandgradError, match=f"--field {wrong}: give a name of ours"):
            read(files, fields=[wrong])
    with pytest.raises(HandgradError, match="prompt is a already"):
        read(files, fields=["prompt=a", "prompt=b"])


# ── equal examples ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_examples_are_counted_and_stay_on_one_side(tmp_path: Path) -> None:
    found, summary = read(lines(tmp_path, *({"prompt": f"q{i % 10}", "completion": f"a{i % 10}"} for i in range(200))))
    assert summary.examples == 200 and summary.distinct == 10
    text = " ".join(shown((found, summary), 100).split())
    assert "190 examples equal to an earlier one" in text
    assert "Only 10 of 200 examples are distinct" in text
    for seed in range(5):
        training, validation = examples.split(found, 0.1, seed)
        assert validation is not None and (training.per_epoch, validation.per_epoch) == (180, 20)
        assert examples.shared(training, validation) == 0
    assert examples.shared(found, validation) == 20
    distinct, summary = read(lines(tmp_path, *({"text": f"text number {i}"} for i in range(40))))
    assert summary.distinct == 40 and "distinct" not in shown((distinct, summary), 100)
    same, _ = read(lines(tmp_path, *({"text": "the same"} for _ in range(40))))
    assert examples.split(same, 0.1, 0) == (same, None)


def test_a_large_group_of_equal_examples_is_trained_on(tmp_path: Path) -> None:
    records = [{"text": "the same"}] * 90 + [{"text": f"another, {i}"} for i in range(3)]
    found, _ = read(lines(tmp_path, *records))
    for seed in range(5):
        training, validation = examples.split(found, 0.1, seed)
        assert validation is not None and training.per_epoch >= 90 and examples.shared(training, validation) == 0
    pair, _ = read(lines(tmp_path, *[{"text": "the same"}] * 5, *[{"text": "another"}] * 4))
    training, validation = examples.split(pair, 0.1, 0)
    assert validation is not None and (training.per_epoch, validation.per_epoch) == (5, 4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=2, max_size=40), st.floats(0.01, 0.9))
def test_no_example_is_on_both_sides(pairs: list[tuple[int, int]], share: float) -> None:
    """Whatever examples the lines have in common."""
    pairs = sorted(pairs, key=lambda pair: pair[1])
    ids = np.array([[value, value] for value, _ in pairs], np.uint16).ravel()
    found = Examples(
        ids, np.tile([False, True], len(pairs)), 2 * np.arange(len(pairs) + 1), np.array([n for _, n in pairs])
    )
    n_lines = len(set(found.lines.tolist()))
    if n_lines * share < 1 and len(pairs) > n_lines:
        return
    training, validation = examples.split(found, share, 0)
    if validation is None:
        assert training is found
        return
    assert validation is not None and training.per_epoch and validation.per_epoch
    assert training.per_epoch + validation.per_epoch == len(pairs)
    assert examples.shared(training, validation) == 0
    assert not set(training.lines.tolist()) & set(validation.lines.tolist())


def test_a_template_that_takes_too_long_ends_it_at_the_first_line(tmp_path: Path) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    (tmp_path / "d.jsonl").write_text(f"{line}\n" * 1000)  # a second each would take a quarter of an hour
    with pytest.raises(LimitError, match="takes too long"):
        examples.read(
            [tmp_path / "d.jsonl"], tokenizer.make("bytes", []), 64, template=ChatTemplate(loops), skip_bad=True
        )


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("prompt,prompt,completion\na,b,c\n")
    with pytest.raises(HandgradError, match='two columns are called "prompt": rename one of them'):
        examples.read([tmp_path / "d.csv"], tokenizer.make("bytes", []), 64)


def test_a_bad_first_line_can_be_skipped(tmp_path: Path) -> None:
    line = json.dumps({"text": "some words"})
    (tmp_path / "d.jsonl").write_text(f"[1, 2]\n{line}\n{line}\n")
    found, summary = examples.read([tmp_path / "d.jsonl"], tokenizer.make("bytes", []), 64, skip_bad=True)
    assert found.per_epoch == 2 and summary.bad == 1
