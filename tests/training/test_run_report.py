"""What the report of a run draws and writes."""

from handgrad.ops.rope_scaling import Scaling
from handgrad.training import run_report


def test_two_points_are_no_trend() -> None:
    drawn = run_report.chart({"training": [(1.0, 2.0), (4.0, 1.0)]})
    assert drawn.count("<circle") == 2 and "<polyline" not in drawn
    drawn = run_report.chart({"training": [(1.0, 2.0), (4.0, 1.0), (5.0, 1.0)]})
    assert drawn.count("<polyline") == 1 and "<circle" not in drawn


def test_blocks_are_counted_from_1() -> None:
    steps = [{"step": 1, "grad_norms": {"block 0": 1.0, "block 11": 2.0, "final norm": 3.0}}]
    assert list(run_report._by_layer(steps)) == ["block 1", "block 12", "final norm"]


def test_a_scaled_rotation_is_written_by_its_fields() -> None:
    assert run_report._setting("rope_scaling", list(Scaling())) == "none"
    scaled = Scaling("yarn", 4.0, original_max_position_embeddings=4096)
    text = run_report._setting("rope_scaling", list(scaled))
    assert text == "rope_type yarn, factor 4, original_max_position_embeddings 4096"
