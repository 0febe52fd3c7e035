"""The command that compares optimizers, with runs of two steps."""

import json
from pathlib import Path

import pytest
from bench import optimizers

import handgrad as hg
from handgrad.model import config


def test_optimizers_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(config.PRESETS, "nano", hg.preset("nano", n_context=32, d_model=16, n_heads=2, n_blocks=1))
    arguments = ["--steps", "2", "--seeds", "2", "--lr", "1e-3,4e-3", "--out", str(tmp_path)]
    assert optimizers.main(arguments) == 0
    found = {path.stem: json.loads(path.read_text())["validation"] for path in tmp_path.glob("*.json")}
    assert len(found) == 6 and len(set(found.values())) == 6
    shown = capsys.readouterr().out
    for optimizer in ("AdamW", "Muon"):
        tried = {lr: found[f"nano-{optimizer}-{lr}-0-2"] for lr in ("0.001", "0.004")}
        best = min(tried, key=lambda lr: tried[lr])
        of_seeds = [found[f"nano-{optimizer}-{best}-{seed}-2"] for seed in (0, 1)]
        row = next(line.split() for line in shown.splitlines() if line.strip().startswith(optimizer))
        assert row == [optimizer, *(f"{x:.4f}" for x in tried.values()), best, *(f"{x:.4f}" for x in of_seeds), row[-1]]
        assert float(row[-1]) == pytest.approx(sum(of_seeds) / 2, abs=1e-4)
    (tmp_path / "nano-Muon-0.001-0-2.json").write_text('{"validation": 0.5}')  # a stored run is read
    optimizers.main(arguments)
    assert "0.5000" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        optimizers.main([*arguments, "--lr", "fast"])
