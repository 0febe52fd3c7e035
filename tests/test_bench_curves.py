"""The command that draws loss curves in both precisions, with runs of two steps."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench import curves

from handgrad.model.precision import why_not_mixed


@pytest.mark.skipif(why_not_mixed() is not None, reason="there is nothing to compare")
def test_curves_are_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "nano", "--out", str(tmp_path), "--svg", str(tmp_path / "curves.svg")]
    assert curves.main([*arguments, "--steps", "2"]) == 0
    found = {name: json.loads((tmp_path / f"nano-{name}-2.json").read_text()) for name in ("float32", "mixed")}
    assert all(len(run["losses"]) == 2 for run in found.values()) and found["float32"] != found["mixed"]
    shown = capsys.readouterr().out
    assert f"{found['mixed']['validation']:.4f}" in shown
    drawn = "".join(ElementTree.parse(tmp_path / "curves.svg").getroot().itertext())
    assert "mixed: validation loss" in drawn and "small model, Shakespeare" in drawn
    found["mixed"]["validation"] *= 1.01  # a stored run is read, and a loss that is too far away is an error
    (tmp_path / "nano-mixed-2.json").write_text(json.dumps(found["mixed"]))
    assert curves.main([*arguments, "--steps", "2"]) == 1
