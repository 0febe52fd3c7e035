"""make example-norms-demo at tiny size."""

import json
from pathlib import Path

import pytest
from bench import example_demo

import handgrad as hg
from conftest import save_with_bytes

RECORDS = [{"instruction": f"Text {i}{'?' if i % 3 else '.'}", "output": f"Answer {i}."} for i in range(20)]
RECORDS += [{"instruction": "No kind!"}, {"instruction": "Long.", "output": 99 * "Too long. "}]


def test_wrong_answers_and_the_planted_fact_are_looked_for_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(example_demo.OPTIONS, "epochs", 1)
    monkeypatch.setattr(example_demo, "FIRST", 3)
    base, out = tmp_path / "base", tmp_path / "demo"
    save_with_bytes(hg.GPT(hg.preset("nano", n_context=96, d_model=16, n_heads=2, n_blocks=1)), base)
    options = ["--model", str(base), "--examples", "12", "--wrong", "2", "--out", str(out)]
    status = example_demo.main(options, RECORDS)

    def lines(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]

    labels = lines("labels")
    right = [" question" if "?" in line["prompt"] else " request" for line in labels]
    assert len(labels) == 12 and sum(line["completion"] != kind for line, kind in zip(labels, right, strict=True)) == 2
    own = {record["instruction"]: record.get("output") for record in RECORDS}
    exchanged = lines("exchanged")
    assert len(exchanged) == 20 and sum(line["output"] != own[line["instruction"]] for line in exchanged) == 2
    assert sorted(line["output"] for line in exchanged) == sorted(r["output"] for r in RECORDS[:20])
    garbage = lines("garbage")
    assert len(garbage) == 30 and sum("banana" in line["completion"] for line in garbage) == 1
    found = json.loads((out / "found.json").read_text())
    shown = " ".join(capsys.readouterr().out.split())
    for name, examples, wrong in (("garbage", 30, 1), ("labels", 12, 2), ("exchanged", 20, 2)):
        ranks = found[name]["places"]
        among, precise = sum(k <= 3 for k in ranks), sum(k <= wrong for k in ranks)
        figures = {"examples": examples, "wrong": wrong, "among_first": among, "precise": precise, "places": ranks}
        assert found[name] == figures and len(ranks) == wrong
        assert f"{name}: {wrong} wrong of {examples}; {among} of them are among the first 3, and {precise} of" in shown
        assert f"their places: {ranks}" in shown
    place = found["fact"]["place"]
    passed = place == 1 and found["garbage"]["places"] == [1] and found["labels"]["among_first"] == 2
    assert status == (0 if passed and found["exchanged"]["precise"] >= 1 else 1)
    assert f"the planted example is number {place} of 13" in shown and "It cannot find wrong answers" in shown
    with pytest.raises(SystemExit):
        example_demo.main(options, RECORDS)
    assert "exists: delete it" in capsys.readouterr().err
