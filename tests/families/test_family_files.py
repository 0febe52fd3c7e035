"""Folders of every family: what we save transformers opens; fields of config.json old and new, omitted and refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from members import (
    DISTINCT,
    FAMILIES,
    LENGTHS,
    LIMIT,
    LLAMA3,
    LLAMA_LIKE,
    MORE,
    NO_TOKEN_IDS,
    PLAIN,
    TYPICAL,
    YARN,
    batch,
    from_folder,
    randomize,
    their_logits,
    transformers_model,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.families import Family
from handgrad.proof.oracles import relative_error

# fields that say nothing about the computation, or that a list beside them overrides
SILENT = ("transformers_version", "_name_or_path", "max_window_layers", "no_rope_layer_interval", "use_sliding_window",
          "decoder_sparse_step", "mlp_only_layers")  # fmt: skip


def fields_of(folder: Path) -> dict[str, Any]:
    """config.json as transformers understands it. Two of its names are one activation."""
    fields = AutoConfig.from_pretrained(folder).to_dict()
    for field in ("hidden_act", "hidden_activation", "activation_function"):
        if fields.get(field) == "gelu_pytorch_tanh":
            fields[field] = "gelu_new"
    if fields["model_type"] == "lfm2":  # the width that it computes from several fields, of which we write one
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        fields = {name: x for name, x in fields.items() if not name.startswith("block_") and name != "full_attn_idxs"}
        fields["intermediate_size"] = network.model.layers[0].feed_forward.w1.out_features
    if fields["model_type"] == "granitemoehybrid":  # that of experts, of which a dense model has none
        del fields["intermediate_size"]
    if "sliding_attention" not in (fields.get("layer_types") or ["sliding_attention"]):  # no block has the window
        fields.pop("sliding_window", None)
    return {name: value for name, value in fields.items() if name not in SILENT and value is not None}


def edit(folder: Path, without: tuple[str, ...] = (), **fields: Any) -> None:
    """Change fields of config.json and leave out others."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in raw.items() if name not in without}))


def assert_opened_alike(folder: Path) -> None:
    tokens, _ = batch()
    ours = hg.load(folder, dtype="float64")
    with torch.no_grad():
        expected = their_logits(from_folder(folder), tokens, LENGTHS)
    assert relative_error(ours.logits(tokens, LENGTHS), expected) <= LIMIT


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved model of every family; copy a folder before changing it."""
    folder = tmp_path_factory.mktemp("originals")
    for family, name in PLAIN.items():
        transformers_model(name).save_pretrained(folder / family)
    return {family: folder / family for family in PLAIN}


@pytest.fixture
def copy_of(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: shutil.copytree(originals[family], tmp_path / family)


def test_exaone_without_a_block_that_has_the_window(tmp_path: Path) -> None:
    """No block is rotated then, which a file without a window cannot say: ours says so itself."""
    transformers_model("exaone4, window", layer_types=["full_attention"] * 2).save_pretrained(tmp_path / "m")
    assert_opened_alike(tmp_path / "m")
    model = hg.load(tmp_path / "m", dtype="float64")
    hg.save(model, tmp_path / "ours")
    assert model.config.unrotated == (0, 1) and hg.load(tmp_path / "ours").config == model.config


@pytest.mark.parametrize(
    "field", [{"rope_theta": 500.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}], ids=str
)
def test_gptj_has_fixed_frequencies(field: dict[str, Any], copy_of: Callable[[str], Path]) -> None:
    """transformers ignores these fields in GPT-J's files, so that reading them would change the model."""
    folder = copy_of("gptj")
    model = hg.load(folder, dtype="float64")
    edit(folder, **field)
    with pytest.raises(HandgradError, match=f"{next(iter(field))} is .*does not implement for model_type gptj"):
        hg.load(folder)
    other = hg.GPT(replace(model.config, rope_base=500.0))
    hg.save(other, folder.parent / "ours")
    assert json.loads((folder.parent / "ours" / "config.json").read_text())["model_type"] == "handgrad"
    assert hg.load(folder.parent / "ours").config == other.config


# ── both directions ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.some_cases(8)
def test_transformers_opens_what_we_save(name: str, tmp_path: Path) -> None:
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    hg.save(hg.load(tmp_path / "theirs", dtype="float64"), tmp_path / "ours")
    assert fields_of(tmp_path / "ours") == fields_of(tmp_path / "theirs")
    reopened, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, output_loading_info=True
    )
    assert not any(loading.values()), loading
    expected = theirs.state_dict()
    assert set(reopened.state_dict()) == set(expected)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in reopened.state_dict().items())
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.some_cases(3)
def test_stored_dtype_survives(name: str, dtype: str, tmp_path: Path) -> None:
    theirs = transformers_model(name).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "theirs")
    model = hg.load(tmp_path / "theirs")
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    hg.save(model, tmp_path / "ours")
    ours, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert all(torch.equal(ours[key], tensor) for key, tensor in expected.items())
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.some_cases(4)
def test_a_folder_in_several_files(family: str, tmp_path: Path) -> None:
    transformers_model(PLAIN[family]).save_pretrained(tmp_path / "m", max_shard_size="4KB")
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 2
    assert_opened_alike(tmp_path / "m")


# ── fields of config.json ───────────────────────────────────────────────────────────────────────────────────────────

OLD = [
    {"rope_theta": 77.0},
    {"rope_theta": 77.0, "rope_scaling": None},
    {"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
    {"rope_theta": 77.0, "rope_scaling": {"rope_type": "default"}},
    {"rope_theta": 1e4, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 16}},  # max / original
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},  # the original length is max_position_embeddings
    {"rope_theta": 9.0, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},  # the inner one holds
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 77.0},
    {"rope_parameters": {**YARN, "beta_fast": None, "beta_slow": None, "attention_factor": None}},
    {},
]


@pytest.mark.parametrize("fields", OLD, ids=str)
@pytest.mark.parametrize("name", ["llama, llama3", "smollm3, llama3"])
@pytest.mark.some_cases(3)
def test_rotary_fields_of_files_old_and_new(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    transformers_model(name).save_pretrained(tmp_path / "m")
    edit(tmp_path / "m", without=("rope_parameters",))
    edit(tmp_path / "m", **fields)
    assert_opened_alike(tmp_path / "m")


# sizes for which the default share of a head is even, and fields that transformers has no usable default for
OMITTED: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_attention_heads": 4}, "phi": {"num_attention_heads": 4},
    "stablelm": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "granitemoehybrid": {"num_local_experts": 0, "position_embedding_type": "rope", "layer_types": ["attention"] * 5,
                         "mamba_n_heads": 1},
    "nemotron": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "ministral": {"head_dim": 2, "sliding_window": 4096}, "helium": {"head_dim": 2, "num_key_value_heads": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.some_cases(6)
def test_omitted_fields_have_transformers_defaults(family: str, tmp_path: Path) -> None:
    sizes = {
        "model_type": family, "vocab_size": 29, "hidden_size": 64, "intermediate_size": 11,
        "num_hidden_layers": 2 if "mlp.experts" in FAMILIES[family].names else 5,  # by default there are 128 experts
        "num_attention_heads": 32, **NO_TOKEN_IDS, **({} if family != "dots1" else MORE[family]),
        **OMITTED.get(family, {}),
    }  # fmt: skip
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), experts_implementation="eager")
    randomize(network)
    network.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(sizes))
    assert_opened_alike(tmp_path / "m")
    hg.save(hg.load(tmp_path / "m", dtype="float64"), tmp_path / "ours")
    ours, theirs = fields_of(tmp_path / "ours"), fields_of(tmp_path / "m")
    said = set(theirs) - {"architectures", "dtype"}
    assert {name: ours.get(name) for name in said} == {name: theirs[name] for name in said}


PUBLISHED = {
    "_name_or_path": "/data/checkpoints/x", "_attn_implementation_autoset": True, "attention_dropout": 0.1,
    "auto_map": {"AutoConfig": "configuration_x.XConfig"}, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0,
    "initializer_range": 0.04, "is_llama_config": True, "pretraining_tp": 1, "quantization_config": None,
    "rope_interleaved": False, "torch_dtype": "bfloat16", "transformers.js_config": {"dtype": "q4"},
    "transformers_version": "4.40.1", "use_cache": False, "unsloth_fixed": True, "neftune_noise_alpha": 5.0,
    "partial_rotary_factor": 1.0, "is_causal": True, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
    "tokenizer_class": "PreTrainedTokenizerFast", "return_dict": True, "output_attentions": False,
}  # fmt: skip


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_fields_of_published_files_that_change_nothing(family: str, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of(family)
    tokens, _ = batch()
    before = hg.load(folder, dtype="float64").logits(tokens, LENGTHS)
    edit(folder, **PUBLISHED)
    assert torch.equal(hg.load(folder, dtype="float64").logits(tokens, LENGTHS), before)


def test_a_window_that_is_switched_off(copy_of: Callable[[str], Path]) -> None:
    """Published Qwen2.5 files name a window that use_sliding_window does not use."""
    for family in ("qwen2", "qwen3"):
        folder = copy_of(family)
        edit(folder, without=("layer_types",), use_sliding_window=False, sliding_window=2, max_window_layers=0)
        assert_opened_alike(folder)


def test_a_tied_file_that_holds_the_head_twice_and_old_rotary_tables(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors")
    edit(folder, tie_word_embeddings=True)
    model = hg.load(folder, dtype="float64")
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert_opened_alike(folder)


def test_gelu_of_the_first_gemma_files_is_its_approximation_by_tanh(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gemma")
    edit(folder, hidden_act="gelu", hidden_activation=None)
    assert hg.load(folder).config.activation == "gelu_tanh"
    assert_opened_alike(folder)


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# fields that change the mathematics, or that say the weights were made for other mathematics
EVERYWHERE: dict[str, Any] = {
    "is_causal": False, "partial_rotary_factor": 0.5, "rope_interleaved": True, "attention_chunk_size": 8,
    "quantization_config": {"quant_method": "gptq", "bits": 4}, "per_layer_config": {"0": {"intermediate_size": 7}},
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 64,
    "attention_multiplier": 0.5, "residual_multiplier": 0.5, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
    "clip_qkv": 8.0, "num_experts": 8, "num_local_experts": 8, "use_qk_norm": True, "qk_layernorm": True,
    "add_cross_attention": True, "hidden_act": "quick_gelu",
}  # fmt: skip
ALL_WINDOWED = {"layer_types": None, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
SLIDING = ["sliding_attention", "full_attention"]
OF_A_FAMILY: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"sliding_window": 4}, "sliding_window"),
    ("llama", {"layer_types": SLIDING, "sliding_window": 4}, "layer_types|sliding_window"),
    ("llama", {"no_rope_layers": [0, 1]}, "no_rope_layers"),
    ("llama", {"head_dim": None, "num_attention_heads": 7}, "hidden_size=18 is not divisible by num_attention_heads=7"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    ("mistral", {"mlp_bias": True}, "mlp_bias"),
    ("mistral", {"layer_types": SLIDING, "sliding_window": 4}, "layer_types"),
    ("mistral", {"no_rope_layers": [0, 1]}, "no_rope_layers"),
    ("qwen2", {"mlp_bias": True}, "mlp_bias"),
    ("qwen2", {"layer_types": SLIDING}, "layer_types|sliding_window"),
    ("qwen2", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": 5}, "layer_types"),
    ("qwen2", {**ALL_WINDOWED, "sliding_window": 0}, "sliding_window must be"),
    ("qwen2", {**ALL_WINDOWED, "sliding_window": "4"}, "sliding_window must be"),
    ("qwen2", {**ALL_WINDOWED, "max_window_layers": "1"}, "max_window_layers"),
    ("qwen2", {"use_sliding_window": "false"}, "use_sliding_window must be true or false"),
    ("qwen2", {"no_rope_layers": [0, 1]}, "no_rope_layers"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias"),
    ("qwen3", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ("smollm3", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": "all"}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": ["0", "1"]}, "no_rope_layers must be a list of the numbers 0 or 1"),
    # transformers reads "yarn" as "longrope" here, with the context of another field, and refuses the others
    ("phi3", {"rope_parameters": YARN, "original_max_position_embeddings": 16}, "yarn"),
    ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    # what transformers ignores, or reads otherwise
    ("gpt_neox", {"rope_parameters": None, "rope_theta": 500.0}, "rope_theta is 500.0.*give it as rotary_emb_base"),
    ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.5, "partial_rotary_factor": 0.25}, "give it as rotary_pct"),
    ("gemma3_text", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping is 2.0; only null"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "must hold full_attention"),
    ("gemma3_text", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "call it rope_type"),
    ("olmo3", {"rope_parameters": None, "rope_theta": 1e4}, "applies to some blocks only"),
    ("olmo3", {"layer_types": None, "sliding_window_pattern": 2}, "transformers ignores it in this family"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
]
ROTARY: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "dynamic", "rope_theta": 1e4}, "dynamic needs factor"),
    ({"rope_type": "longrope", "long_factor": [1.0, 2.0], "rope_theta": 1e4}, "longrope needs short_factor"),
    (
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "rope_theta": 1e4},
        "short_factor .* 2 numbers",
    ),
    ({"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0], "rope_theta": 1e4}, "short_factor .* list"),
    ({"type": "mrope", "mrope_section": [1, 1], "rope_theta": 1e4}, "mrope"),
    ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"full_attention": {"rope_type": "default", "rope_theta": 1e4}}, "full_attention"),
    ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
    ({"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}, "factor"),
    ({"rope_type": "linear", "factor": "two", "rope_theta": 1e4}, "factor"),
    ({"rope_type": "yarn", "rope_theta": 1e4}, "yarn needs factor"),
    ({"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}, "low_freq_factor|high_freq_factor"),
    ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta must be"),
    ({"rope_type": "default", "rope_theta": 1}, "rope_theta must be"),
]
SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers must be"),
    ({"head_dim": 5}, "even"),
    ({"head_dim": -4}, "head_dim"),
    ({"hidden_size": "18"}, "hidden_size"),
    ({"intermediate_size": 12}, "mlp.*weight"),
    ({"hidden_size": 36}, "weight"),
    ({"num_hidden_layers": 3}, r"model\.layers\.2\."),
    ({"num_hidden_layers": 1}, r"model\.layers\.1\."),
    ({"vocab_size": 30}, r"embed_tokens"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"model_type": "t5"}, "t5"),
    ({"model_type": "gemma3n"}, "gemma3n.*alternating updates"),
    ({"model_type": None}, "model_type"),
    ({"model_type": "handgrad", "handgrad": {"family": "lama"}}, "family in 'handgrad' is .lama"),
]


def assert_refused(folder: Path, message: str, without: tuple[str, ...] = (), **fields: Any) -> None:
    """A folder with other fields of config.json is refused, by a message that names the folder."""
    edit(folder, without)
    edit(folder, **fields)
    with pytest.raises(hg.HandgradError, match=message) as error:
        hg.load(folder, dtype="float64")
    assert str(folder) in str(error.value), "the message does not say which file"


def computes(family: Family, field: str) -> bool:
    """Whether this family has the field. It may have one of another meaning, or one that has no effect in it."""
    own = {
        *family.fields,
        *family.defaults,
        *family.no_effect,
        *({"partial_rotary_factor"} if family.rotary_share else ()),
    }
    if field == "hidden_act":  # no activation of this name
        return field in family.no_effect
    return field in own or (field in ("num_experts", "num_local_experts") and family.has("mlp.experts"))


@pytest.mark.parametrize("field", EVERYWHERE)
def test_field_that_changes_the_mathematics_is_refused(field: str, copy_of: Callable[[str], Path]) -> None:
    families = [family for family in LLAMA_LIKE if not computes(FAMILIES[family], field)]
    assert len(families) > 10
    for family in families:
        assert_refused(copy_of(family), field, **{field: EVERYWHERE[field]})


@pytest.mark.parametrize(("family", "fields", "message"), OF_A_FAMILY, ids=str)
def test_field_that_this_family_does_not_compute_is_refused(
    family: str, fields: dict[str, Any], message: str, copy_of: Callable[[str], Path]
) -> None:
    assert_refused(copy_of(family), message, **fields)


@pytest.mark.parametrize(("parameters", "message"), ROTARY, ids=str)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_rotary_form_that_is_not_implemented_is_refused(
    field: str, parameters: dict[str, Any], message: str, copy_of: Callable[[str], Path]
) -> None:
    assert_refused(copy_of("qwen3"), message, ("rope_parameters",), **{field: parameters})


@pytest.mark.parametrize(("fields", "message"), SHAPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shape_that_does_not_fit_is_refused(
    family: str, fields: dict[str, Any], message: str, copy_of: Callable[[str], Path]
) -> None:
    assert_refused(copy_of(family), message, ("layer_types",), **fields)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_missing_size_is_named(field: str, copy_of: Callable[[str], Path]) -> None:
    for family in LLAMA_LIKE:
        assert_refused(copy_of(family), field, (field,))


@pytest.mark.parametrize("family", PLAIN)
def test_missing_misshapen_and_unknown_tensors_are_named(
    family: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(originals[family] / "model.safetensors")
    matrices = [n for n, t in tensors.items() if t.ndim == 2 and t.shape[0] != t.shape[1] and ".0." in n]
    gains = [n for n in tensors if "norm" in n or "ln_" in n]
    first, gain = matrices[0], gains[0]
    for name, broken in {
        first: {k: t for k, t in tensors.items() if k != first},
        gain: {k: t for k, t in tensors.items() if k != gain},
        matrices[-1]: {**tensors, matrices[-1]: tensors[matrices[-1]].t().contiguous()},
        f"{first}_extra": {**tensors, f"{first}_extra": torch.ones(3)},
    }.items():
        folder = shutil.copytree(originals[family], tmp_path / "m", dirs_exist_ok=True)
        save_file(broken, folder / "model.safetensors")
        assert_refused(folder, name.replace(".", r"\.").removeprefix(r"transformer\."))


def test_biases_that_config_json_does_not_announce_are_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.ones(36, dtype=torch.float64)
    save_file(tensors, folder / "model.safetensors")
    assert_refused(folder, r"model\.layers\.1\.self_attn\.q_proj\.bias")
