"""Ten configurations compute what they computed when they were recorded (tests/recorded.py)."""

import json

import pytest

import recorded

RECORD = json.loads(recorded.FILE.read_text())


@pytest.mark.parametrize("name", recorded.CONFIGURATIONS)
def test_nothing_has_changed(name: str) -> None:
    expected, found = RECORD["configurations"][name], recorded.compute(**recorded.CONFIGURATIONS[name])
    double = recorded.CONFIGURATIONS[name].get("dtype") == "float64"
    close = 1e-10 if double else 1e-4
    assert found["losses"] == pytest.approx(expected["losses"], rel=close)
    assert found["norms"] == pytest.approx(expected["norms"], rel=close, abs=close)
    if recorded.machine() == RECORD["machine"]:
        assert found["losses"] == expected["losses"]
        assert found["digests"] == expected["digests"]


def test_every_configuration_is_recorded() -> None:
    assert set(RECORD["configurations"]) == set(recorded.CONFIGURATIONS) and len(recorded.CONFIGURATIONS) == 10
