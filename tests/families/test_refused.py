"""Kinds of models that are refused say what they need."""

import json
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import handgrad as hg
from handgrad.families import FAMILIES
from handgrad.families.refused import REFUSED


def test_nothing_is_both_read_and_refused() -> None:
    assert not set(REFUSED) & set(FAMILIES)


def test_transformers_knows_all_of_them() -> None:
    assert set(REFUSED) <= set(CONFIG_MAPPING_NAMES)
    assert set(FAMILIES) - set(CONFIG_MAPPING_NAMES) == {"minicpm"}


def test_every_language_model_of_transformers_is_read_or_refused_by_what_it_needs() -> None:
    """A new version of transformers shows here what is new in it."""
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILIES) - set(REFUSED) == set()


@pytest.mark.parametrize("name", REFUSED)
def test_the_message_names_what_is_missing(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(hg.HandgradError) as error:
        hg.load(tmp_path)
    assert f"model_type {name} is not supported: {REFUSED[name]}" in str(error.value)
