"""MiniCPM, whose code is not part of transformers: its multipliers under Granite's names are the same model."""

import json
from pathlib import Path

import pytest
from members import (
    LENGTHS,
    LIMIT,
    assert_equal_gradients,
    batch,
    our_gradients,
    their_gradients,
    their_logits,
    transformers_model,
)

import handgrad as hg
from handgrad.proof.oracles import relative_error


@pytest.mark.parametrize(("emb", "depth", "base"), [(12.0, 1.4, 6), (1.0, 1.0, 18), (3.5, 0.7, 40)])
def test_equal_to_granite_with_its_multipliers(emb: float, depth: float, base: int, tmp_path: Path) -> None:
    theirs = transformers_model(
        "granite, 3 queries to a key", embedding_multiplier=emb, residual_multiplier=depth / 2**0.5,
        logits_scaling=18 / base, attention_multiplier=(18 / 9) ** -0.5,
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    multipliers = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier", "mlp_bias")
    raw = {name: x for name, x in json.loads(file.read_text()).items() if name not in multipliers}
    raw |= {"model_type": "minicpm", "scale_emb": emb, "scale_depth": depth, "dim_model_base": base}
    file.write_text(json.dumps(raw))
    ours = hg.load(tmp_path / "m", dtype="float64")
    tokens, targets = batch()
    loss, grads = their_gradients(theirs, tokens, targets, LENGTHS)
    assert relative_error(ours.logits(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS)) <= LIMIT
    assert ours.loss_and_grads(tokens, targets, LENGTHS) == pytest.approx(loss, rel=LIMIT)
    assert_equal_gradients(our_gradients(ours), grads)
    hg.save(ours, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["model_type"] == "minicpm" and written["dim_model_base"] == base
    assert written["scale_emb"] == emb and written["scale_depth"] == pytest.approx(depth)
    assert hg.load(tmp_path / "saved").config.residual_scale == pytest.approx(ours.config.residual_scale)
