"""Ten configurations give the recorded results (tests/recorded.py)."""

import json

import pytest

import recorded

RECORD = json.loads(recorded.FILE.read_text())


@pytest.mark.parametrize("name", recorded.CONFIGURATIONS)
def test_results_match_the_recording(name: str) -> None:
    expected, found = RECORD["configurations"][name], recorded.compute(**recorded.CONFIGURATIONS[name])
    tolerance = 1e-10 if recorded.CONFIGURATIONS[name].get("dtype") == "float64" else 1e-4
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance, abs=tolerance)
    if recorded.machine() == RECORD["machine"]:
        assert found["losses"] == expected["losses"]
        assert found["digests"] == expected["digests"]


def test_every_configuration_is_recorded() -> None:
    assert set(RECORD["configurations"]) == set(recorded.CONFIGURATIONS) and len(recorded.CONFIGURATIONS) == 10
