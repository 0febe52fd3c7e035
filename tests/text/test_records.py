"""Records of fine-tuning files: formats, conversions, and errors that name file and line."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from example_files import TALK, learned, lines, read

from handgrad.errors import HandgradError
from handgrad.text import corpus, examples, records, tokenizer
from handgrad.text.chat_template import ChatTemplate
from handgrad.text.tokenizer import END


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path / "cache"))


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_byte_order_mark_crlf_and_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('\ufeff\r\n{"text": "é"}\r\n\r\n  \r\n{"text": "b\u2028c"}'.encode())
    found, _ = read([tmp_path / "a.jsonl"])
    assert [learned(found, i)[1][0] for i in range(2)] == [f"é{END}", f"b\u2028c{END}"]


@pytest.mark.parametrize("written", [None, 1, 4])
def test_a_json_list_equals_one_object_per_line(tmp_path: Path, written: int | None) -> None:
    entries = [{"text": "a [1]"}, {"prompt": "p", "completion": "c"}, {"text": "东"}]
    (tmp_path / "d.json").write_text("\ufeff \n" + json.dumps(entries, indent=written) + "\n\n", encoding="utf-8")
    from_list, _ = read([tmp_path / "d.json"])
    from_lines, _ = read(lines(tmp_path, *entries))
    assert from_list.fingerprint == from_lines.fingerprint
    seen: list[int] = []
    found = [location.line for location, _ in records.records([tmp_path / "d.json"], seen.append)]
    assert found == ([2, 2, 2] if written is None else [3, 6, 10])
    assert sum(seen) == (tmp_path / "d.json").stat().st_size


def test_patterns_and_progress(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json"):
        lines(tmp_path, {"text": name}, {"text": "x"}, name=name)
    files = records.find([str(tmp_path / "*.json*")])
    seen: list[int] = []
    found, _ = read(files, progress=seen.append)
    assert learned(found, 0)[1][0] == f"a.json{END}" and found.per_epoch == 4
    assert sum(seen) == sum(file.stat().st_size for file in files)


def test_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "a"}\n')))
    found, _ = read(records.find(["-"]))
    assert learned(found, 0)[1][0] == f"a{END}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', " is not valid JSON: Expecting ',' delimiter, column 13"),
        (b"text", " is not valid JSON: Expecting value, column 1"),
        (b"[" * 100_000, " is not usable JSON: nested too deeply"),
        (b'{"text": "na\xefve"}', " is not UTF-8 text: convert it"),
        (b'"text"', ': the record is "text", not an object; expected prompt and completion, or messages, or text'),
        (b'{"body": "a", "text": null}', r": the record has body, text \(null\); expected prompt and completion, or"),
        (b"{}", ": the record has no fields; expected"),
        (b'{"prompt": "a"}', ": the record has prompt; expected"),
        (b'{"completion": "a"}', ": the record has completion; expected"),
        (b'{"text": 3}', ": text is 3, not a string"),
        (b'{"prompt": "a", "completion": ["b"]}', r': completion is \["b"\], not a string'),
        (b'{"prompt": 1.5, "completion": "b"}', ": prompt is 1.5, not a string"),
        (b'{"prompt": "a", "completion": ""}', ": the completion is empty"),
        (b'{"prompt": "a", "messages": []}', ": the record has messages as well as a prompt or completion"),
        (b'{"messages": []}', ": messages is empty"),
        (b'{"messages": "Hello"}', ': messages is "Hello", not a list'),
        (b'{"messages": [{"role": "human", "content": "a"}]}', ': message 1 has the role "human"; allowed: system,'),
        (b'{"messages": [{"role": "user"}]}', ": message 1 has no content"),
        (b'{"messages": [{"role": "user", "content": 1}]}', ": message 1: its content is 1, not a string"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', ": the messages have no assistant text"),
        (b'{"text": "half \\ud83d of it"}', r" contains \\ud83d, half of a character"),
        (b'{"messages": [{"role": "assistant", "content": "\\ude42"}]}', r" contains \\ude42, half"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'\n{"text": "good"}\r\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(HandgradError, match=rf"bad\.jsonl, line 3{message}"):
        read([tmp_path / "bad.jsonl"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"text": "a"},\n\n{"text": 1}]', r"line 3: text is 1"),
        (
            b'[{"text": "a"}\n,\n{"text" "b"}]',
            r"the item on line 3 is not valid JSON: Expecting ':' delimiter, column 9",
        ),
        (b'[{"text": "a"}\n{"text": "b"}]', r"line 2: expected , or \] after an item"),
        (b'[{"text": "a"},\n', r"the item on line 2 is not valid JSON: Expecting value"),
        (b'[{"text": "a"}', r"line 1: expected , or \] after an item"),
        (b'[{"text": "a"}]\n[]', r"line 2: unexpected text after the list"),
        (b'[{"text":\n"\xff"}]', r"line 2 is not UTF-8"),
        (b"[3]", r"line 1: the record is 3, not an object"),
    ],
)
def test_errors_in_a_list_name_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(HandgradError, match=rf"bad\.json, {message}"):
        read([tmp_path / "bad.json"])


def test_unusable_data_is_rejected_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(
        HandgradError, match=r"d\.jsonl, line 1: the record has messages.*no chat template.*chat_template='FILE'"
    ):
        read(lines(tmp_path, {"messages": TALK}), template=None)
    with pytest.raises(HandgradError, match=r"d\.jsonl, line 1: .*not incremental"):
        read(lines(tmp_path, {"messages": TALK}), template=ChatTemplate("{{ messages[-1].content }}"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("# Data\n")
    with pytest.raises(HandgradError, match=r"folder contains no file named \*\.jsonl"):
        records.find([str(tmp_path / "folder")])
    (tmp_path / "folder" / "d.jsonl").write_text('{"text": "ab"}\n')
    assert [f.name for f in records.find([str(tmp_path / "folder")])] == ["d.jsonl"]
    (tmp_path / "README.md").write_text("# Data\n")
    with pytest.raises(
        HandgradError, match=r"README\.md, line 1 is not valid JSON: .*exclude other files by a pattern, as in data="
    ):
        read([tmp_path / "README.md"])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(HandgradError, match=r"no usable example \(the files are empty\)"):
        read([tmp_path / "empty.jsonl"])
    with pytest.raises(HandgradError, match=r"no usable example .*1 with nothing to learn, the first .*d\.jsonl:1"):
        read(lines(tmp_path, {"text": ""}))
    with pytest.raises(HandgradError, match="loss_on is 'prompts'; allowed: answers or all"):
        read(lines(tmp_path, {"text": "a"}), loss_on="prompts")
    with pytest.raises(HandgradError, match="too_long is 'split'; allowed: cut or drop"):
        read(lines(tmp_path, {"text": "a"}), too_long="split")


def test_lines_and_lists_of_bounded_size_from_regular_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = lines(tmp_path, {"text": "a"}, {"text": "b" * 100}, {"text": "c"})
    monkeypatch.setattr(corpus, "MAX_LINE", 50)
    with pytest.raises(HandgradError, match="line 2 is longer than"):
        read(files)
    assert read(files, skip_bad=True)[0].per_epoch == 2
    (tmp_path / "l.json").write_text('[{"text": "' + "a" * 100 + '"}]')
    monkeypatch.setattr(records, "MAX_FILE", 50)
    with pytest.raises(HandgradError, match=r"l\.json is larger than"):
        read([tmp_path / "l.json"])
    for inside in ("[" * 100_000, '{"text": "\\ud83d"}', "9" * 5000):
        (tmp_path / "m.json").write_text(f"[\n{inside}]")
        monkeypatch.setattr(records, "MAX_FILE", 1 << 20)
        with pytest.raises(HandgradError, match=r"m\.json, the item on line 2 "):
            read([tmp_path / "m.json"])
    os.mkfifo(tmp_path / "pipe.jsonl")
    for file in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(HandgradError, match="not a regular file"):
            read([file])


# ── other formats ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_alpaca_records_are_converted(tmp_path: Path) -> None:
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


def test_sharegpt_records_are_converted(tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    found, summary = read(lines(tmp_path, {"conversations": turns, "id": 3}, {"conversations": TALK}))
    same, _ = read(lines(tmp_path, {"messages": TALK}, {"messages": TALK}))
    assert found.fingerprint == same.fingerprint and summary.kinds["messages"] == 2
    with pytest.raises(HandgradError, match='line 1: turn 1 is from "cat"; allowed: human'):
        read(lines(tmp_path, {"conversations": [{"from": "cat", "value": "meow"}]}))
    with pytest.raises(HandgradError, match="line 1: conversations is 3, not a list"):
        read(lines(tmp_path, {"conversations": 3}))


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_csv_and_tsv_rows_are_records(tmp_path: Path, suffix: str, separator: str) -> None:
    rows = [("id", "prompt", "completion"), ("1", "a, b; c", "d"), ("2", 'two\nlines "x"', "é")]
    text = "\ufeff" + "\r\n".join(separator.join('"' + c.replace('"', '""') + '"' for c in row) for row in rows)
    (tmp_path / f"d.{suffix}").write_text(text + "\r\n", newline="", encoding="utf-8")
    seen: list[int] = []
    found, _ = read([tmp_path / f"d.{suffix}"], progress=seen.append, template=None)
    assert [learned(found, i) for i in range(2)] == [
        [("a, b; c", False), (f"d{END}", True)],
        [('two\nlines "x"', False), (f"é{END}", True)],
    ]
    assert sum(seen) == (tmp_path / f"d.{suffix}").stat().st_size


def test_errors_in_tables_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('prompt,completion\na,b\nc\nd,e,f\n"g"h,i\n\nj,k\n"l')
    with pytest.raises(HandgradError) as caught:
        read([tmp_path / "d.csv"])
    message = str(caught.value)
    for part in (
        "line 3: the row has 1 cell, the first row has 2",
        "line 4: the row has 3",
        "line 5: not a valid table row",
        "line 8: not a valid table row",
    ):
        assert part in message, message
    assert read([tmp_path / "d.csv"], skip_bad=True)[0].per_epoch == 2


def test_parquet_rows_are_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_fields_can_be_renamed(tmp_path: Path) -> None:
    record = {"question": "2+2?", "answer": "4", "prompt": "not this", "messages": []}
    files = lines(tmp_path, record)
    found, _ = read(files, fields=("prompt=question", "completion=answer"), template=None)
    assert learned(found, 0) == [("2+2?", False), (f"4{END}", True)]
    assert read(files, fields=["text=answer"])[1].kinds["text"] == 1
    with pytest.raises(HandgradError, match=r"line 1: the field 'body' .*is missing; the record has question, answer"):
        read(files, fields=["text=body"])
    for wrong in ("prompt", "prompt=", "question=prompt"):
        with pytest.raises(HandgradError, match=f"field={wrong!r}: give a known field"):
            read(files, fields=[wrong])
    with pytest.raises(HandgradError, match="prompt is already mapped to a"):
        read(files, fields=["prompt=a", "prompt=b"])


def test_tables_with_duplicate_columns_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("prompt,prompt,completion\na,b,c\n")
    with pytest.raises(HandgradError, match='two columns are named "prompt": rename one of them'):
        examples.read([tmp_path / "d.csv"], tokenizer.make("bytes", []), 64)
