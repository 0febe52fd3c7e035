"""Model directories: exchange with transformers in both directions, and errors for broken directories."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import handgrad as hg
from conftest import OTHER_ACTIVATIONS, handgrad, make_model, perturb, save_as_others
from handgrad.checks import LIMITS
from handgrad.families.family import ACTIVATIONS
from handgrad.files.manifest import FILE
from handgrad.inference.model_text import model_text
from handgrad.lora.config import LoRAConfig
from handgrad.lora.layer import LoRA
from handgrad.model.config import _SCALES
from handgrad.proof.oracles import relative_error
from handgrad.text import tokenizer
from handgrad.training.config import FinetuneOptions, TrainOptions
from tiny_chat import write_chat_model
from tiny_gguf import write_tiny_smollm2


@pytest.mark.parametrize(
    "shape", [{}, {"tied": False, "logits_bias": True, "key_bias": False, "causal": False}, {"d_rho": 2, "d_head": 5}]
)
def test_save_and_load_round_trip_is_bit_identical(shape: dict[str, object], tmp_path: Path) -> None:
    model = make_model(n_blocks=2, dtype=torch.float32, **shape)
    hg.save(model, tmp_path / "m")
    loaded = hg.load(tmp_path / "m")
    assert loaded.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == model.config.tied
    hg.save(loaded, tmp_path / "m")  # replaces the first one
    assert sorted(f.name for f in tmp_path.iterdir()) == ["m"], "temporary files were left behind"


def test_broken_directories_are_rejected(tmp_path: Path) -> None:
    model = make_model(dtype=torch.float32)
    save_as_others(model, tmp_path / "m")

    def assert_rejected(message: str) -> None:
        with pytest.raises(hg.HandgradError, match=message):
            hg.load(tmp_path / "m")

    weights, config = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "config.json"
    intact_weights, intact_config = weights.read_bytes(), config.read_text()
    weights.write_bytes(intact_weights[: len(intact_weights) // 2])
    assert_rejected("model.safetensors cannot be read")
    weights.write_bytes(intact_weights)
    config.write_text(intact_config.replace('"n_embd": 12', '"n_embd": 24'))
    assert_rejected(r"wte.weight has shape \(11, 12\); config.json requires \(11, 24\)")
    config.write_text(intact_config.replace('"n_layer": 1', '"n_layer": 2'))
    assert_rejected("no tensor 'transformer.h.1.attn.c_attn.bias'")
    config.write_text(intact_config.replace("gpt2", "t5"))
    assert_rejected("model_type t5 is not supported")
    config.write_text("{")
    assert_rejected("not valid JSON")
    config.write_text(json.dumps({"model_type": "gpt2"}))
    assert_rejected("has no field 'vocab_size'")
    config.write_text(intact_config.replace("gelu_new", "swish"))
    assert_rejected('activation_function "swish"')
    config.write_text(intact_config)
    save_file({}, weights)
    assert_rejected("are missing")
    weights.unlink()
    assert_rejected("does not exist")
    config.unlink()
    assert_rejected("has no config.json")
    with pytest.raises(hg.HandgradError, match="not a directory"):
        hg.load(tmp_path / "nowhere")


def test_mask_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    model = make_model(dtype=torch.float32)
    save_as_others(model, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert torch.equal(hg.load(tmp_path / "m").transformer.wte.weight, model.transformer.wte.weight)


def test_non_gpt2_model_is_not_saved_as_gpt2(tmp_path: Path) -> None:
    hg.save(make_model(causal=False), tmp_path / "m")
    with pytest.raises(ValueError, match="handgrad"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_save_rejects_model_with_adapters(tmp_path: Path) -> None:
    model = make_model()
    model.blocks[0].mlp.c_fc = LoRA(model.blocks[0].mlp.c_fc, 2, 1.0)
    with pytest.raises(hg.HandgradError, match=r"c_fc has an adapter"):
        hg.save(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


OLD_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
OLD_WEIGHTS = (
    "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "adapter_config.json",
    "adapter_model.safetensors", "handgrad-merge.safetensors", "optimizer.safetensors",
)  # fmt: skip
USER_FILES = ("README.md", "notes.txt", ".gitattributes", "tokenizer.json.bak")


def make_old_directory(folder: Path) -> None:
    hg.save(make_model(), folder)
    for name in (*OLD_FILES, *OLD_WEIGHTS, *USER_FILES):
        (folder / name).write_text("old")
    (folder / "figures").mkdir()


def test_save_removes_files_of_the_previous_model(tmp_path: Path) -> None:
    make_old_directory(tmp_path / "m")
    model = make_model(seed=1, n_vocab=13)
    hg.save(model, tmp_path / "m")
    names = {f.name for f in (tmp_path / "m").iterdir()}
    assert names == {"config.json", "model.safetensors", FILE, "figures", *USER_FILES}
    assert torch.equal(hg.load(tmp_path / "m").transformer.wte.weight, model.transformer.wte.weight)


def test_save_in_place_keeps_tokenizer_files(tmp_path: Path) -> None:
    make_old_directory(tmp_path / "m")
    (tmp_path / "link").symlink_to("m")
    hg.save(hg.load(tmp_path / "m"), tmp_path / "link")
    names = {f.name for f in (tmp_path / "m").iterdir()}
    assert names == {"config.json", "model.safetensors", FILE, "figures", *OLD_FILES, *USER_FILES}


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_a_model_is_saved_with_its_tokenizer(kind: str, tmp_path: Path) -> None:
    """The copy reads, formats and ends texts as the model does, also in transformers."""
    source = tmp_path / ("source.gguf" if kind == "gguf" else "source")
    (write_tiny_smollm2 if kind == "gguf" else write_chat_model)(source)
    model = hg.load(source)
    found = model.tokenizer
    assert found.decode(found.encode("Hé 🙂")) == "Hé 🙂" and model.tokenizer is found
    asked = found.chat("Why?")
    assert asked == found.chat([{"role": "user", "content": "Why?"}]) and "Why?" in found.decode(asked)
    hg.save(model, tmp_path / "copy")
    copy = hg.load(tmp_path / "copy")
    assert model_text(copy).ends == model_text(model).ends != frozenset()
    assert copy.tokenizer.to_json() == found.to_json() and copy.tokenizer.chat("Why?") == asked
    theirs = AutoTokenizer.from_pretrained(tmp_path / "copy")
    talk = [{"role": "user", "content": "Why?"}]
    assert theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"] == asked
    answers = [handgrad("generate", "--model", m, "--prompt", "Why?", "--max-new-tokens", 5, "--temperature", 0).stdout
               for m in (source, tmp_path / "copy")]  # fmt: skip
    assert answers[0] == answers[1] != ""


def test_a_tokenizer_can_be_set_and_a_model_may_have_none(tmp_path: Path) -> None:
    model = make_model(n_vocab=256)
    assert model.tokenizer is None
    hg.save(model, tmp_path / "without")
    assert not (tmp_path / "without" / "tokenizer.json").exists() and hg.load(tmp_path / "without").tokenizer is None
    model.tokenizer = tokenizer.make("bytes", [])
    hg.save(model, tmp_path / "with")
    assert hg.load(tmp_path / "with").tokenizer.encode("a") == [97] and isinstance(hg.generate(model, "a", 2), str)
    loaded = hg.load(tmp_path / "with")
    shutil.rmtree(tmp_path / "with")
    hg.save(loaded, tmp_path / "again")  # the weights are still there, the tokenizer is not
    assert torch.equal(hg.load(tmp_path / "again").embed.weight, model.embed.weight)


def test_unreadable_weights_are_not_reported_as_missing(tmp_path: Path) -> None:
    hg.save(make_model(), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    (tmp_path / "m" / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    file.chmod(0)
    if not os.access(file, os.R_OK):  # root can read every file
        with pytest.raises(hg.HandgradError, match=r"model.safetensors: permission denied"):
            hg.load(tmp_path / "m")
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(hg.HandgradError, match=r"model.safetensors: too many levels of symbolic links"):
        hg.load(tmp_path / "m")


def test_tensor_names_are_checked_before_the_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as_others(make_model(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"n_layer": 1000}))
    built: list[int] = []
    original_init = hg.GPT.__init__

    def init(self: hg.GPT, config: hg.ModelConfig, **how: Any) -> None:
        built.append(config.n_blocks)
        original_init(self, config, **how)

    monkeypatch.setattr(hg.GPT, "__init__", init)
    with pytest.raises(
        hg.HandgradError, match=r"no tensor 'transformer.h.1.attn.c_attn.bias' \(11988 of 12004 are missing\)"
    ):
        hg.load(tmp_path / "m")
    assert sum(built) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_vocab", 10**12), ("n_context", 10**12), ("d_model", 10**9), ("n_heads", 10**7), ("n_blocks", 10**7), ("eps", 0.0),
     ("d_hidden", 10**30), ("d_rho", 10**9), ("d_head", 10**9), ("eps", 1e308), ("eps", float("nan")), ("eps", True)],
)  # fmt: skip
def test_model_shape_out_of_limits_is_rejected(field: str, value: float) -> None:
    with pytest.raises(hg.HandgradError, match=f"{field} must be"):
        hg.preset("nano", **{field: value})


def test_every_numeric_option_has_limits() -> None:
    for kind in (hg.ModelConfig, LoRAConfig, TrainOptions, FinetuneOptions):
        for f in dataclasses.fields(kind):
            if str(f.type).startswith(("int", "float", "<class 'int'", "<class 'float'")):
                checked_elsewhere = ("eps", "dropout", "val_share", "beta1", "beta2", "rope_base")  # all below 1
                checked_elsewhere += ("gain_offset", "gate_scale", "local_rope_base", *_SCALES)
                assert f.name in LIMITS or f.name in checked_elsewhere, f.name


def test_save_does_not_overwrite_other_folders(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "thesis.txt").write_text("years of work")
    with pytest.raises(hg.HandgradError, match="not a model directory"):
        hg.save(make_model(), tmp_path / "user")
    assert (tmp_path / "user" / "thesis.txt").read_text() == "years of work"


# ── directories written by transformers and others ────────────────────────────────────────────────────────────────────


def make_transformers_model(shape: dict[str, Any]) -> GPT2LMHeadModel:
    base = {"vocab_size": 23, "n_positions": 16, "n_embd": 12, "n_head": 3, "n_layer": 2, "resid_pdrop": 0.0}
    no_dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**{**base, **no_dropout, **shape}))
    perturb(model, seed=0, scale=0.2)
    return model.eval()


@pytest.mark.parametrize(
    "shape",
    [{}, {"tie_word_embeddings": False}, {"n_head": 1, "n_layer": 1}, {"n_inner": 20},
     {"layer_norm_epsilon": 1e-3, "n_layer": 3, "n_embd": 20, "n_head": 5},
     *({"activation_function": theirs} for theirs, ours in ACTIVATIONS.items() if ours in OTHER_ACTIVATIONS)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.some_cases(4)
def test_transformers_and_we_agree_in_both_directions(
    shape: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    make_transformers_model(shape).to(dtype).save_pretrained(tmp_path / "m")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "m", dtype=torch.float64, attn_implementation="eager")
    stored = hg.load(tmp_path / "m")
    assert stored.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert stored.config.tied == shape.get("tie_word_embeddings", True)
    ours = hg.load(tmp_path / "m", dtype=torch.float64)
    tokens, targets = torch.randint(23, (2, 3, 11))
    targets[0, :7] = -100
    logits = theirs(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert relative_error(ours.logits(tokens), logits) <= 1e-8
    assert ours.loss_and_grads(tokens, targets) == pytest.approx(expected.item(), rel=1e-10)
    expected_parameters = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        assert p.grad is not None
        assert relative_error(p.grad, expected_parameters[name].grad) <= 1e-8, name
    hg.save(ours, tmp_path / "ours")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert relative_error(ours.logits(tokens), again(tokens).logits) <= 1e-12


def test_sharded_transformers_checkpoint_is_loaded(tmp_path: Path) -> None:
    theirs = make_transformers_model({})
    theirs.save_pretrained(tmp_path / "m", max_shard_size="4KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    tokens = torch.randint(23, (1, 9))
    assert relative_error(hg.load(tmp_path / "m").logits(tokens), theirs(tokens).logits) < 1e-5
    index = tmp_path / "m" / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    missing = next(iter(entries["weight_map"].values()))
    (tmp_path / "m" / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(hg.HandgradError, match=missing):
        hg.load(tmp_path / "m")
    index.write_text("{}")
    with pytest.raises(hg.HandgradError, match="weight_map"):
        hg.load(tmp_path / "m")


def test_tensor_names_without_prefix_are_loaded(tmp_path: Path) -> None:
    theirs = make_transformers_model({})
    theirs.transformer.save_pretrained(tmp_path / "m")  # GPT2Model: names start with h., wte., …
    assert "wte.weight" in load_file(tmp_path / "m" / "model.safetensors")
    tokens = torch.randint(23, (1, 9))
    assert relative_error(hg.load(tmp_path / "m").logits(tokens), theirs(tokens).logits) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_transformers_loads_our_shards_in_each_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(n_blocks=2, n_vocab=23, dtype=torch.float32)
    hg.save(model, tmp_path / "m", dtype=dtype, shard_bytes=2000)
    assert len(list((tmp_path / "m").glob("model-*"))) > 2
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "m", dtype=torch.float32)
    ours = hg.load(tmp_path / "m", dtype=torch.float32)
    tokens = torch.randint(23, (1, 9))
    assert relative_error(ours.logits(tokens), theirs(tokens).logits) < 1e-5
    new = theirs.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)[:, 9:]
    assert torch.equal(new, hg.generate(ours, tokens, 4))
    hg.save(model, tmp_path / "m")  # in one file: replaces the shards
    assert sorted(f.name for f in (tmp_path / "m").iterdir()) == ["config.json", FILE, "model.safetensors"]
    assert torch.equal(hg.load(tmp_path / "m").logits(tokens), model.logits(tokens))


def test_values_outside_float16_are_rejected(tmp_path: Path) -> None:
    model = make_model(dtype=torch.float32)
    with torch.no_grad():
        model.blocks[0].mlp.c_fc.weight[0, 0] = 1e6
    with pytest.raises(hg.HandgradError, match=r"c_fc.weight has values that float16 cannot represent"):
        hg.save(model, tmp_path / "m", dtype=torch.float16)
    assert not (tmp_path / "m").exists()


def test_unexpected_tensors_and_pickled_weights_are_rejected(tmp_path: Path) -> None:
    save_as_others(make_model(dtype=torch.float32), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file({**load_file(file), "transformer.h.5.ln_1.weight": torch.zeros(12)}, tmp_path / "x")
    (tmp_path / "x").rename(file)
    with pytest.raises(hg.HandgradError, match=r"h.5.ln_1.weight"):
        hg.load(tmp_path / "m")
    file.rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(hg.HandgradError, match=r"pytorch_model.bin.*safetensors"):
        hg.load(tmp_path / "m")


def test_stored_head_overrides_tie_word_embeddings(tmp_path: Path) -> None:
    model = make_model(tied=False, dtype=torch.float32)
    save_as_others(model, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tokens = torch.randint(11, (1, 9))
    assert torch.equal(hg.load(tmp_path / "m").logits(tokens), model.logits(tokens))


def test_load_maps_the_file_without_copying(tmp_path: Path) -> None:
    hg.save(hg.GPT(hg.preset("nano", n_vocab=200_000)), tmp_path / "m")  # 102 MB, almost all in the embedding
    code = (
        "import sys, handgrad as hg\n"
        "def used(): return int(next(x for x in open('/proc/self/status') if x.startswith('RssAnon')).split()[1])\n"
        "hg.load(sys.argv[1]); before = used(); model = hg.load(sys.argv[1]); print(used() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "m"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 5_000, "loading must not copy the weights into anonymous memory (kB)"


def test_name_without_folder_is_looked_up_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(hg.HandgradError, match=r"nobody/nothing.*hub"):
        hg.load("nobody/nothing")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(hg.HandgradError, match="pip install huggingface_hub"):
        hg.load("nobody/nothing")
    with pytest.raises(hg.HandgradError, match="not a directory"):
        hg.load("./nothing/at/all")


def test_model_is_loaded_from_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of huggingface_hub is filled as by a download."""
    cache = tmp_path / "hub" / "models--someone--small"
    commit = "0" * 40
    model = make_model(dtype=torch.float32)
    hg.save(model, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tokens = torch.randint(11, (1, 9))
    assert torch.equal(hg.load("someone/small").logits(tokens), model.logits(tokens))
