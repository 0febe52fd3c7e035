"""Fine-tuning examples: which tokens are targets, what is cut or dropped, batches, bad records, and the report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_files import BYTES, CHAT, CHATML, END_ID, TALK, chat_tokenizer, learned, lines, numbered, read, shown
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from handgrad.errors import HandgradError, LimitError
from handgrad.text import batches, corpus, examples, tokenizer
from handgrad.text.chat_template import ChatTemplate
from handgrad.text.drafts import draft
from handgrad.text.records import Location
from handgrad.text.tokenizer import END

# ── targets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_targets_of_prompt_and_completion(tmp_path: Path) -> None:
    record = {"prompt": "Whither so", "completion": " fast?", "id": 7, "messages": None}
    found, summary = read(lines(tmp_path, record), template=None)
    prompt, completion = CHAT.encode("Whither so"), CHAT.encode(" fast?")
    assert found.ids.tolist() == [*prompt, *completion, END_ID]
    assert found.is_target.tolist() == [False] * len(prompt) + [True] * (len(completion) + 1)
    ids, targets, lengths = found.batch(0, 1)
    assert ids.tolist() == found.ids[:-1].tolist() and lengths == [len(ids)]
    assert targets.tolist() == [-100] * (len(prompt) - 1) + completion + [END_ID]
    assert summary.kinds == {"messages": 0, "prompt and completion": 1, "text": 0}
    assert (summary.examples, summary.tokens, summary.targets) == (1, len(ids), len(completion) + 1)


def test_an_empty_prompt_becomes_the_end_of_text_token(tmp_path: Path) -> None:
    found, _ = read(lines(tmp_path, {"prompt": "", "completion": "ab"}), template=None)
    assert learned(found, 0) == [(END, False), (f"ab{END}", True)]


def test_texts_begin_and_end_with_the_end_of_text_token(tmp_path: Path) -> None:
    found, _ = read(lines(tmp_path, {"text": "naïve 東京", "prompt": "no completion"}))
    assert learned(found, 0) == [(END, False), (f"naïve 東京{END}", True)]
    bare, _ = read(lines(tmp_path, {"text": "naïve"}), made=BYTES)
    assert bare.ids.tolist() == list("naïve".encode())
    assert learned(bare, 0, BYTES) == [("n", False), ("aïve", True)], (
        "without an end-of-text token the first token is no target"
    )


def test_what_the_file_puts_before_every_text_begins_every_example_once(tmp_path: Path) -> None:
    made, mark = chat_tokenizer(), "<|im_start|>"
    around = processors.TemplateProcessing(f"{mark} $A", special_tokens=[(mark, made.inner.token_to_id(mark))])
    made.inner.post_processor = around
    records = [{"text": "naïve"}, {"prompt": "Oh", "completion": "!"}, {"prompt": "", "completion": "!"}]
    found, _ = read(lines(tmp_path, *records), made=made, template=None)
    assert learned(found, 0, made) == [(mark, False), (f"naïve{END}", True)]
    assert learned(found, 1, made) == [(f"{mark}Oh", False), (f"!{END}", True)]
    assert learned(found, 2, made) == [(mark, False), (f"!{END}", True)]
    begun = {"messages": [{"role": "user", "content": "Oh"}, {"role": "assistant", "content": "Indeed"}]}
    found, _ = read(lines(tmp_path, begun), made=made)  # the template has it
    assert made.decode(found.ids).count(mark) == 2 and made.decode(found.ids).startswith(f"{mark}user")


def test_messages_are_encoded_like_transformers(tmp_path: Path) -> None:
    found, _ = read(lines(tmp_path, {"messages": TALK, "text": "not this"}))
    oracle = PreTrainedTokenizerFast(tokenizer_object=CHAT.inner, chat_template=CHATML)
    assert found.ids.tolist() == oracle.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
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


def test_loss_on_all_makes_every_token_a_target(tmp_path: Path) -> None:
    unanswered = [{"role": "user", "content": "Oh"}]
    files = lines(
        tmp_path, {"prompt": "ab", "completion": "c"}, {"messages": TALK}, {"messages": unanswered}, {"text": "d"}
    )
    found, summary = read(files, loss_on="all")
    starts = found.offsets[:-1]
    assert np.flatnonzero(~found.is_target).tolist() == starts.tolist(), "all but the first token of each example"
    assert summary.targets == summary.tokens == len(found.ids) - 4


# ── too long ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_long_texts_are_split_and_other_examples_cut_or_dropped(tmp_path: Path) -> None:
    records = [
        {"text": "abcdefghij"},
        {"prompt": "abc", "completion": "defghi"},
        {"prompt": "abcdef", "completion": "gh"},
        {"prompt": "abcde", "completion": "f"},
        {"text": "x"},
        {"prompt": "abcd", "completion": "e"},
    ]
    found, summary = read(lines(tmp_path, *records), 4, BYTES, template=None)
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
    dropped, summary = read(lines(tmp_path, *records), 4, BYTES, too_long="drop", template=None)
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
def test_every_target_appears_once_per_epoch(
    records: list[dict[str, str]], n_context: int, seed: int, few: bool
) -> None:
    """For any context, grouping and order, every token of a text is a target exactly once per epoch."""
    records = [{"text": "at least this"}, *records]
    drafts = [draft(Location(Path("d"), i), r, None, "answers") for i, r in enumerate(records)]
    expected = []
    for drafted, ids, learn in examples._encode(iter(drafts), CHAT, pytest.fail):
        stop = len(ids) if drafted.kind == "text" else n_context + 1
        expected += ids[:stop][learn[:stop]].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples, "records", lambda files, progress: ((d.location, r) for d, r in zip(drafts, records)))  # noqa: B905
        patch.setattr(corpus, "CHUNK", 1 if few else 1 << 18)
        found, summary = examples.read([], CHAT, n_context, seed=seed)
    n = found.per_epoch
    ids, targets, lengths = found.batch(0, n, shuffle=False)
    assert targets[targets >= 0].tolist() == expected
    assert (summary.tokens, summary.targets) == (sum(lengths), len(expected)) == found.size(0, n)
    assert max(lengths) <= n_context and len(ids) == len(targets) == sum(lengths)
    assert int((summary.lengths * np.arange(len(summary.lengths))).sum()) == summary.tokens
    shuffled = found.batch(n, n)
    assert sorted(shuffled[2]) == sorted(lengths)
    assert sorted(shuffled[1][shuffled[1] >= 0].tolist()) == sorted(expected)


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_order_depends_on_the_seed_and_any_batch_can_be_reached() -> None:
    found = numbered(13, seed=5)
    for first, count in ((0, 13), (9, 30), (26, 1)):
        ids, targets, lengths = found.batch(first, count)
        order = [batches.shuffled_index(i % 13, 13, 5, i // 13) for i in range(first, first + count)]
        assert lengths == [i + 1 for i in order]
        assert ids.tolist() == targets.tolist() == [i for i in order for _ in range(i + 1)]
        assert ids.dtype == targets.dtype == torch.int64
        assert found.size(first, count) == (sum(lengths), sum(lengths))
    assert found.batch(11, 4, shuffle=False)[2] == [12, 13, 1, 2]


def test_the_fingerprint_depends_on_content_and_order(tmp_path: Path) -> None:
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


def test_large_vocabularies_use_32_bit_ids(tmp_path: Path) -> None:
    files = lines(tmp_path, {"text": "ab"})
    assert read(files)[0].ids.dtype == np.uint16
    wide = chat_tokenizer()
    wide.n_vocab = (1 << 16) + 1
    assert read(files, made=wide)[0].ids.dtype == np.uint32
    assert read(files, made=wide)[0].fingerprint == read(files)[0].fingerprint


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_the_report_in_colors_shortened_and_harmless(tmp_path: Path) -> None:
    record = {"prompt": "\x1b[31m\u202e[bold]\t" + "ab " * 900, "completion": "é" * 900 + "\x85z"}
    text = shown(read(lines(tmp_path, record), 10_000, BYTES), 80, BYTES, colors=True)
    assert "␛[31m<U+202E>[bold]⇥" in text and "<U+0085>z" in text
    assert "characters …" in text and len(text.splitlines()) < 40
    assert "«" not in text and "\x1b[1;" in text and "\u202e" not in text


# ── bad records ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bad_lines_are_listed_or_skipped(tmp_path: Path) -> None:
    good = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(5)]
    (file,) = lines(tmp_path, *good)
    bad = [b"{", b"\xff", b'{"text": 3}', b"[1]", b'{"text": ' + b"9" * 5000 + b"}", b"[" * 100_000] * 2
    file.write_bytes(file.read_bytes() + b"".join(line + b"\n" for line in bad) + b'{"text": "the last"}\n')
    with pytest.raises(HandgradError) as caught:
        read([file])
    listed = str(caught.value).split("\n")
    assert listed[0] == "12 lines cannot be used (skip_bad=True leaves them out):" and len(listed) == 7
    assert [f"line {i}" in line for i, line in enumerate(listed[1:], 6)] == [True] * 6
    assert all(line.endswith("(and 1 more line like it)") for line in listed[1:]) and max(map(len, listed)) <= 330
    found, summary = read([file], skip_bad=True)
    assert found.per_epoch == 6 and summary.bad == 12 and len(summary.mistakes) == 6
    assert learned(found, 5)[1][0] == f"the last{END}" and found.record_numbers.tolist() == [1, 2, 3, 4, 5, 18]
    assert "12 invalid lines skipped" in shown((found, summary), 80)


def test_one_reason_is_listed_once_and_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would shorten the message
    Path("d.csv").write_text("question,answer\n" + "q,a\n" * 14)
    with pytest.raises(HandgradError) as caught:
        read([Path("d.csv")])
    title, line = str(caught.value).split("\n")
    assert title.startswith("14 lines") and line.endswith(
        "Name its fields, as in field='prompt=question' field='completion=answer' (and 13 more lines like it)"
    )
    found, _ = read([Path("d.csv")], fields=["prompt=question", "completion=answer"])
    assert found.per_epoch == 14


def test_more_reasons_than_an_error_lists(tmp_path: Path) -> None:
    bad = [json.dumps({"text": i}) for i in range(13)]
    (tmp_path / "d.jsonl").write_text("\n".join([*bad, bad[0]]) + "\n")
    with pytest.raises(HandgradError) as caught:
        read([tmp_path / "d.jsonl"])
    listed = str(caught.value).split("\n")
    assert len(listed) == 12 and "(and 1 more line like it)" in listed[1] and listed[-1] == "  and 3 more"


def test_lines_that_cannot_be_encoded_are_bad_lines(tmp_path: Path) -> None:
    three_characters = tokenizer.make("chars", ["abc"])
    files = lines(tmp_path, {"text": "abc"}, {"text": "xa"}, {"text": "cb"}, {"text": "y"})
    with pytest.raises(HandgradError, match=r"2 lines(.|\n)*line 2: .*'x' is not one of them(.|\n)*line 4: .*'y'"):
        read(files, made=three_characters)
    found, summary = read(files, made=three_characters, skip_bad=True)
    assert found.per_epoch == 2 and summary.bad == 2
    assert found.record_numbers.tolist() == [1, 3]  # of the records in the file, by which a report names them


def test_a_template_over_its_limit_stops_reading_at_the_first_line(tmp_path: Path) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    (tmp_path / "d.jsonl").write_text(f"{line}\n" * 1000)  # a second each would take a quarter of an hour
    with pytest.raises(LimitError, match="takes too long"):
        read([tmp_path / "d.jsonl"], template=ChatTemplate(loops), skip_bad=True)


def test_a_bad_first_line_can_be_skipped(tmp_path: Path) -> None:
    line = json.dumps({"text": "some words"})
    (tmp_path / "d.jsonl").write_text(f"[1, 2]\n{line}\n{line}\n")
    found, summary = read([tmp_path / "d.jsonl"], made=BYTES, skip_bad=True)
    assert found.per_epoch == 2 and summary.bad == 1
