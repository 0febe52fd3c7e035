"""Ten configurations give the recorded results (tests/recorded.py)."""

import contextlib
import json

import pytest

import recorded
from handgrad.kernels import library

RECORD = json.loads(recorded.FILE.read_text())


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", recorded.CONFIGURATIONS)
def test_results_match_the_recording(name: str, kernels: bool) -> None:
    """The recording was made without compiled kernels, which sum in another order."""
    with contextlib.nullcontext() if kernels else library.disabled():
        expected, found = RECORD["configurations"][name], recorded.compute(**recorded.CONFIGURATIONS[name])
    tolerance = 1e-10 if recorded.CONFIGURATIONS[name].get("dtype") == "float64" else 1e-4
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance, abs=tolerance)
    if not kernels and recorded.machine() == RECORD["machine"]:
        assert found["losses"] == expected["losses"]
        assert found["digests"] == expected["digests"]


def test_every_configuration_is_recorded() -> None:
    assert set(RECORD["configurations"]) == set(recorded.CONFIGURATIONS) and len(recorded.CONFIGURATIONS) == 10
