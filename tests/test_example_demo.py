"""make example-norms-demo at tiny size."""

import json
from pathlib import Path

import pytest
from bench import example_demo

import handgrad as hg
from handgrad.text import tokenizer

RECORDS = [{"instruction": f"Text {i}{'?' if i % 3 else '.'}"} for i in range(20)] + [{"instruction": "No kind!"}]


def test_wrong_labels_and_the_planted_fact_are_looked_for_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(example_demo.OPTIONS, "epochs", 1)
    monkeypatch.setattr(example_demo, "FIRST", 3)
    base, out = tmp_path / "base", tmp_path / "demo"
    hg.save(hg.GPT(hg.preset("nano", n_context=96, d_model=16, n_heads=2, n_blocks=1), seed=0), base)
    tokenizer.make("bytes", []).write(base)
    options = ["--model", str(base), "--examples", "12", "--wrong", "2", "--out", str(out)]
    status = example_demo.main(options, RECORDS)
    lines = [json.loads(line) for line in (out / "labels.jsonl").read_text().splitlines()]
    right = [" question" if "?" in line["prompt"] else " request" for line in lines]
    assert len(lines) == 12 and sum(line["completion"] != kind for line, kind in zip(lines, right, strict=True)) == 2
    found = json.loads((out / "found.json").read_text())
    places, place = found["norms"]["places"], found["fact"]["place"]
    among = sum(p <= 3 for p in places)
    assert found["norms"] == {"examples": 12, "wrong": 2, "among_first": among, "places": places} and len(places) == 2
    assert status == (0 if among == 2 and place == 1 else 1)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{among} of 2 wrong labels are among the first 3; their places: {places}" in shown
    assert f"the planted example is number {place} of 13" in shown and "× typical" in shown
    with pytest.raises(SystemExit):
        example_demo.main(options, RECORDS)
    assert "exists: delete it" in capsys.readouterr().err
