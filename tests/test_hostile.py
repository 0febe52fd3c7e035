"""Hostile files: each is rejected with a one-line error, or read, within 2 s and 300 MB."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

import handgrad as hg
from conftest import save_as_others
from handgrad.cli import chat as chat_command
from handgrad.cli import generate as generate_command
from handgrad.families import FAMILIES
from handgrad.files import manifest
from handgrad.formats import huggingface, models
from handgrad.gguf.file import open_gguf
from handgrad.lora import merge_record
from handgrad.text import chat_template, records, tokenizer
from handgrad.text.chat_template import ChatTemplate
from handgrad.training.config import TrainOptions
from handgrad.training.option_file import read_option_file
from hostile import MEGABYTES, SECONDS, Case, Runner

SHAPE = hg.preset("nano", n_vocab=11, n_context=16, d_model=12, n_heads=3, n_blocks=2)
SIZES: dict[str, Any] = {
    "n_vocab": 11, "n_context": 16, "d_model": 12, "n_heads": 3, "n_blocks": 2, "n_experts": 4, "experts_per_token": 2,
    "d_head": 4, "d_rho": 4,
}  # fmt: skip
EXPERTS = hg.ModelConfig(**SIZES, **FAMILIES["gpt_oss"].fixed, family="gpt_oss")
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5_000
DOWN = "model.layers.0.mlp.experts.down_proj"
EVIL = r"(([\w.]+)+)+!"  # exponential in the length of a name
TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
HUGE = f'{{"a": {{"dtype": "F32", "shape": [{"9" * 40}], "data_offsets": [0, 0]}}}}'
DOUBLING = "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
Make = Callable[[Path], object]


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def model(folder: Path) -> Path:
    save_as_others(hg.GPT(SHAPE), folder / "m")
    return folder / "m"


def config(folder: Path, **changes: Any) -> None:
    file = model(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def config_text(folder: Path, field: str, text: str) -> None:
    file = model(folder) / "config.json"
    file.write_text(file.read_text().replace("{", f'{{"{field}": {text},', 1))


def pipe(make: Make, name: str, folder: Path) -> None:
    make(folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def link(make: Make, name: str, to: str, folder: Path) -> None:
    make(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(to)


def replace_by_folder(make: Make, name: str, folder: Path) -> None:
    make(folder)
    (folder / name).unlink()
    (folder / name).mkdir()


def sparse(make: Make, name: str, folder: Path) -> None:
    make(folder)
    with open(folder / name, "wb") as file:
        file.truncate(1 << 40)


def weights(folder: Path, raw: bytes) -> None:
    (model(folder) / "model.safetensors").write_bytes(raw)


def header(folder: Path, text: str) -> None:
    weights(folder, len(text).to_bytes(8, "little") + text.encode())


def many_tensors(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header(folder, json.dumps({f"h.{i}": entry for i in range(40_000)}))


def experts(folder: Path, family: str = "gpt_oss", **changes: Any) -> None:
    """A model with experts, and other numbers in its config.json."""
    own = {"d_shared": 48} if family in ("qwen2_moe", "dots1") else {}
    save_as_others(hg.GPT(hg.ModelConfig(**SIZES, **FAMILIES[family].fixed, **own, family=family)), folder / "m")
    file = folder / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def stacked(folder: Path, name: str, shape: list[int]) -> None:
    """A model of gpt-oss, which has stacked experts, and a header that claims this shape for a tensor of it."""
    save_as_others(hg.GPT(EXPERTS), folder / "m")
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (folder / "m" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def shards(folder: Path, weight_map: dict[str, str]) -> Path:
    (model(folder) / "model.safetensors").unlink()
    (folder / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder / "m"


def duplicate_tensor(folder: Path) -> None:
    m = shards(folder, {"wte.weight": "a.safetensors", "wpe.weight": "b.safetensors"})
    for name in ("a", "b"):
        save_file({"wte.weight": torch.zeros(3), "wpe.weight": torch.zeros(3)}, m / f"{name}.safetensors")


def load(folder: Path) -> object:
    return hg.load(folder / "m")


def copy(folder: Path) -> object:
    (folder / "out").mkdir(exist_ok=True)
    return huggingface.write_model(hg.load(folder / "m"), folder / "out", like=folder / "m")


CONFIG, TENSORS, FACTORS = "m/config.json", "m/model.safetensors", "a/adapter_model.safetensors"
MODELS = [
    Case("ten million blocks", partial(config, n_layer=10**7), load, "at most 1,000"),
    Case("a thousand blocks", partial(config, n_layer=1000), load, "of 12004 are missing"),
    Case("a vocabulary of 10**12", partial(config, vocab_size=10**12), load, "vocab_size must be"),
    Case("a large vocabulary", partial(config, vocab_size=1 << 24), load, "wte.weight has shape (11, 12)"),
    Case("widths", partial(config, n_embd=3 * (1 << 18), n_inner=1 << 24), load, "config.json requires"),
    Case("eps of 1e308", partial(config, layer_norm_epsilon=1e308), load, "layer_norm_epsilon must be"),
    Case("eps of 0", partial(config, layer_norm_epsilon=0), load, "layer_norm_epsilon must be"),
    Case("eps of -1", partial(config, layer_norm_epsilon=-1), load, "layer_norm_epsilon must be"),
    Case("a shape that is not a number", partial(config, n_inner=float("nan")), load, "n_inner must be"),
    Case("nested JSON", partial(config_text, field="x", text=DEEP), load, "nested too deeply"),
    Case("5,000 digits", partial(config_text, field="x", text=DIGITS), load, "5,000 digits"),
    Case("half a character", partial(config_text, field="x", text='"\\ud83d"'), load, "half of a character"),
    Case("a long line", partial(config, model_type="x" * 1_200_000), load, 'model_type is "xxx'),
    Case("a large config", partial(config, x="x" * 20_000_000), load, "larger than 16 MB"),
    Case("config is a pipe", partial(pipe, model, CONFIG), load, "it is a pipe"),
    Case("config is a device", partial(link, model, CONFIG, "/dev/zero"), load, "it is a device"),
    Case("config is endless", partial(sparse, model, CONFIG), load, "larger than 16 MB"),
    Case("weights are a pipe", partial(pipe, model, TENSORS), load, "it is a pipe"),
    Case("weights are a device", partial(link, model, TENSORS, "/dev/zero"), load, "it is a device"),
    Case("weights are a folder", partial(replace_by_folder, model, TENSORS), load, "it is a folder"),
    Case("weights are a circle of links", partial(link, model, TENSORS, "model.safetensors"), load, "symbolic links"),
    Case("weights are endless", partial(sparse, model, TENSORS), load, "is not valid JSON"),
    Case("a header of exabytes", partial(weights, raw=b"\xff" * 16), load, "the maximum is 4,000,000"),
    Case("a header cut off", partial(weights, raw=b"\x10\0\0\0\0\0\0\0{"), load, "ends inside its header"),
    Case("a nested header", partial(header, text=DEEP), load, "nested too deeply"),
    Case("a header with no shapes", partial(header, text='{"a": 5}'), load, "no shape for"),
    Case("a header of many tensors", many_tensors, load, "are missing"),
    Case("a shape of 40 digits", partial(header, text=HUGE), load, "are missing"),
    Case("10**9 experts", partial(experts, num_local_experts=10**9), load, "num_local_experts must be"),
    Case("no experts", partial(experts, num_local_experts=0), load, "num_local_experts must be"),
    Case("the most experts", partial(experts, num_local_experts=2048), load, "config.json requires"),
    Case("the most experts, 1,000 blocks", partial(experts, num_local_experts=2048, num_hidden_layers=1000,
         layer_types=["full_attention"] * 1000), load, "2,048,000 experts"),
    Case("65 experts in 1,000 blocks", partial(experts, family="mixtral", num_local_experts=65,
         num_hidden_layers=1000), load, "are missing"),
    Case("5 experts of 4", partial(experts, num_experts_per_tok=5), load, "more than the 4 experts"),
    Case("no expert for a token", partial(experts, num_experts_per_tok=0), load, "num_experts_per_tok must be"),
    Case("a wide expert", partial(experts, intermediate_size=1 << 24), load, "config.json requires"),
    Case("a shared expert of 10**12", partial(experts, family="qwen2_moe", shared_expert_intermediate_size=10**12), load,
         "shared_expert_intermediate_size must be"),
    Case("a wide shared expert", partial(experts, family="qwen2_moe", shared_expert_intermediate_size=1 << 24), load,
         "config.json requires"),
    Case("10**9 shared experts", partial(experts, family="dots1", n_shared_experts=10**9), load, "n_shared_experts must be"),
    Case("2,048 wide shared experts", partial(experts, family="dots1", n_shared_experts=2048, moe_intermediate_size=1 << 24),
         load, "n_shared_experts · moe_intermediate_size must be"),
    Case("10**9 groups", partial(experts, family="dots1", n_group=10**9), load, "n_group must be"),
    Case("10**9 blocks without experts", partial(experts, family="dots1", first_k_dense_replace=10**9), load,
         "first_k_dense_replace must be"),
    Case("a coefficient without an end", partial(experts, family="mixtral", output_router_logits=True,
         router_aux_loss_coef=1e300), load, "router_aux_loss_coef must be"),
    Case("a number for stacked experts", partial(stacked, name=DOWN, shape=[]), load, "has shape ()"),
    Case("endless empty experts", partial(stacked, name=DOWN, shape=[10**15, 0, 0]), load, "config.json requires"),
    Case("experts of 40 digits", partial(stacked, name=DOWN, shape=[int("9" * 40)] * 3), load, "config.json requires"),
    Case("experts of four axes", partial(stacked, name=DOWN, shape=[4, 1, 1, 1]), load, "config.json requires"),
    Case("another of 40 digits", partial(stacked, name="x", shape=[int("9" * 40)]), load, "are missing"),
    Case("5,000 shards", lambda d: shards(d, {f"t{i}": f"s{i}" for i in range(5_000)}), load, "lists 5,000 files"),
    Case("a shard outside the folder", lambda d: shards(d, {"t": "../../x"}), load, "not a file name in the same folder"),
    Case("a shard that is a pipe", lambda d: os.mkfifo(shards(d, {"t": "s"}) / "s"), load, "it is a pipe"),
    Case("the same tensor in two shards", duplicate_tensor, load, "is in a.safetensors and in b.safetensors"),
    Case("generation settings are a pipe", partial(pipe, model, "m/generation_config.json"), copy, "it is a pipe"),
    Case("a name of a million letters", lambda d: None, lambda d: hg.load("x" * 1_000_000), "is not a directory"),
    Case("half a character in a name", lambda d: None, lambda d: hg.load("\ud83d"), "is not a directory"),
]  # fmt: skip


# ── adapters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def adapter(folder: Path, **changes: Any) -> None:
    made = hg.load(model(folder))
    hg.lora.inject(made, rank=2)
    hg.lora.save(made, folder / "a")
    (folder / "a" / manifest.FILE).unlink()
    file = folder / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load_adapter(folder: Path) -> object:
    return hg.load(folder / "a")


def evil_targets(folder: Path) -> object:
    return hg.lora.inject(hg.GPT(SHAPE), targets=[EVIL])


def unmerge(folder: Path) -> object:
    return merge_record.read_merge(hg.load(folder / "m"), folder / "a", folder / "m")


def chain(folder: Path, length: int) -> None:
    """Adapters, each of which names the next as its base model, and the last the first."""
    adapter(folder, base_model_name_or_path=str(folder / f"a{length - 1}"))
    for i in range(1, length):
        shutil.copytree(folder / "a", folder / f"a{i}")
        config = json.loads((folder / "a" / "adapter_config.json").read_text())
        base = str(folder / ("a" if i == 1 else f"a{i - 1}"))
        (folder / f"a{i}" / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))


def own_base(folder: Path) -> None:
    adapter(folder, base_model_name_or_path=str(folder / "a"))
    (folder / "a" / "tokenizer.json").unlink(missing_ok=True)


def tokenizer_of_adapter(folder: Path) -> object:
    return models.tokenizer_of(folder / "a")


ADAPTERS = [
    Case("its base is itself", own_base, load_adapter, "which is an adapter itself"),
    Case("its base is itself, for the tokenizer", own_base, tokenizer_of_adapter, "which is an adapter itself"),
    Case("a circle of bases", partial(chain, length=3), load_adapter, "which is an adapter itself"),
    Case("rslora in words", partial(adapter, use_rslora="false"), load_adapter, "use_rslora must be true or false"),
    Case("dora in words", partial(adapter, use_dora="no"), load_adapter, "use_dora must be true or false"),
    Case("freeze_down as a number", partial(adapter, handgrad={"freeze_down": 1}), load_adapter, "freeze_down must be true"),
    Case("a rank in words", partial(adapter, r="2"), load_adapter, "must be an integer"),
    Case("alpha in words", partial(adapter, lora_alpha="2"), load_adapter, "alpha must be"),
    Case("evil rank_pattern", partial(adapter, rank_pattern={EVIL: 4}), load_adapter, "takes too long"),
    Case("evil alpha_pattern", partial(adapter, alpha_pattern={EVIL: 4}), load_adapter, "takes too long"),
    Case("evil targets", lambda d: None, evil_targets, "takes too long"),
    Case("many patterns", partial(adapter, rank_pattern={f"x{i}": 1 for i in range(100_000)}), load_adapter, "4,096"),
    Case("slow patterns", partial(adapter, rank_pattern={f"(.*)*{i}": 1 for i in range(2_000)}), load_adapter, "takes too"),
    Case("a long pattern", partial(adapter, rank_pattern={"(a|b)" * 300_000: 1}), load_adapter, "at most 1,000 characters"),
    Case("nested groups", partial(adapter, rank_pattern={"(" * 1000: 1}), load_adapter, "is not a regular expression"),
    Case("names that are numbers", partial(adapter, modules_to_save=[5, None]), load_adapter, "must be a string"),
    Case("lora_alpha of 1e308", partial(adapter, lora_alpha=1e308), load_adapter, "alpha must be at most"),
    Case("a rank of 10**9", partial(adapter, r=10**9), load_adapter, "at most 65,536"),
    Case("a rank not stored", partial(adapter, r=60_000), load_adapter, "is (2, 12)"),
    Case("a base that is not a name", partial(adapter, base_model_name_or_path={"a": 1}), load_adapter, "not a name"),
    Case("a zero byte in the base", partial(adapter, base_model_name_or_path="~\0"), load_adapter, "not a name"),
    Case("its config is a pipe", partial(pipe, adapter, "a/adapter_config.json"), load_adapter, "it is a pipe"),
    Case("its tensors are a pipe", partial(pipe, adapter, FACTORS), load_adapter, "it is a pipe"),
    Case("its tensors are a device", partial(link, adapter, FACTORS, "/dev/zero"), load_adapter, "a device"),
    Case("what was merged is a pipe", partial(pipe, adapter, "m/handgrad-merge.safetensors"), unmerge, "it is a pipe"),
]  # fmt: skip


# ── chat templates ──────────────────────────────────────────────────────────────────────────────────────────────────


def template(source: str, talk: Any = TALK) -> Callable[[Path], object]:
    return lambda folder: ChatTemplate(source).segments(talk)


def find(folder: Path) -> object:
    return chat_template.of_files(tokenizer.read_extra_files(folder), folder)


def nothing(folder: Path) -> None:
    pass


def turns(n: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(n)]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"
TEMPLATES = [
    Case("nested loops", nothing, template(LOOPS), "the chat template"),
    Case("nested loops without text", nothing, template(LOOPS.replace("{{ a * b }}", "")), "takes too long"),
    Case("a gigabyte of x", nothing, template("{{ 'x' * 10**9 }}"), "memory"),
    Case("a gigabyte of messages", nothing, template("{{ messages[0].content * 10**9 }}"), "memory"),
    Case("thirty megabytes of x", nothing, template("{{ messages[0].content * 7_500_000 }}"), "the output is too long"),
    Case("indent of 10**9", nothing, template("{{ messages | tojson(indent=10**9) }}"), "memory"),
    Case("range of 10**9", nothing, template("{% for i in range(10**9) %}{% endfor %}"), "Range too big"),
    Case("a huge power", nothing, template("{{ 10 ** (10 ** 8) }}"), "takes too long"),
    Case("doubling", nothing, template(DOUBLING), "memory"),
    Case("an endless macro", nothing, template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "recursion"),
    Case("nested brackets", nothing, template("{{ " + "(" * 100_000 + " }}"), "is not a chat template"),
    Case("an evil filter", nothing, template("{{ 'a' | center(10**9) }}"), "memory"),
    Case("4,000 turns", nothing, template(CHATML, turns(4_000)), "the maximum is 400"),
    Case("its file is a pipe", lambda d: os.mkfifo(d / "chat_template.jinja"), find, "it is a pipe"),
    Case("its file is endless", partial(sparse, nothing, "chat_template.jinja"), find, "larger than 16 MB"),
    Case("settings are a pipe", lambda d: os.mkfifo(d / "tokenizer_config.json"), find, "it is a pipe"),
    Case("nested settings", lambda d: (d / "tokenizer_config.json").write_text(DEEP), find, "nested too deeply"),
]  # fmt: skip


# ── options ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def options(name: str, text: str) -> Make:
    return lambda folder: (folder / name).write_text(text)


def read_options(name: str) -> Callable[[Path], object]:
    return lambda folder: read_option_file(folder / name, TrainOptions)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40)) + "lr: *a40\n"
OPTIONS = [
    Case("a billion laughs", options("c.yaml", LAUGHS), read_options("c.yaml"), "has an alias"),
    Case("nested YAML", options("c.yaml", "[" * 30_000), read_options("c.yaml"), "cannot be read"),
    Case("nested TOML", options("c.toml", "a = " + "[" * 30_000), read_options("c.toml"), "cannot be read"),
    Case("digits in YAML", options("c.yaml", f"steps: {DIGITS}"), read_options("c.yaml"), "cannot be read"),
    Case("digits in TOML", options("c.toml", f"steps = {DIGITS}"), read_options("c.toml"), "cannot be read"),
    Case("an invalid date", options("c.yaml", "steps: 2001-99-99"), read_options("c.yaml"), "cannot be read"),
    Case("steps of 10**30", options("c.toml", f"steps = {10**30}"), read_options("c.toml"), "at most 1,000,000,000,000"),
    Case("a rate of 1e308", options("c.toml", "lr = 1e308"), read_options("c.toml"), "lr must be at most"),
    Case("large options", options("c.yaml", "x: y\n" * 100_000), read_options("c.yaml"), "larger than"),
    Case("options are a pipe", lambda d: os.mkfifo(d / "c.toml"), read_options("c.toml"), "it is a pipe"),
]  # fmt: skip


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def gguf_text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_array(name: str, *texts: str, n: int = 1) -> bytes:
    """A metadata entry: n times these texts."""
    return gguf_text(name) + struct.pack("<IIQ", 9, 8, n * len(texts)) + b"".join(map(gguf_text, texts)) * n


def gguf_setting(name: str, value: str) -> bytes:
    return gguf_text(name) + struct.pack("<I", 8) + gguf_text(value)


def gguf_file(*entries: bytes, tensors: int = 0) -> Make:
    content = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries)) + b"".join(entries)
    return lambda folder: (folder / "m.gguf").write_bytes(content)


def gguf_tokenizer_of(folder: Path) -> object:
    return tokenizer.read(folder / "m.gguf")


def open_gguf_file(folder: Path) -> object:
    return open_gguf(folder / "m.gguf")


LONG_PIECES = [
    gguf_setting("tokenizer.ggml.model", "llama"),
    gguf_array("tokenizer.ggml.tokens", *(chr(65 + i // 512) * (1 + i % 512) for i in range(512 * 100))),
    gguf_text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 512 * 100) + bytes(4 * 512 * 100),
]
GGUF = [
    Case("2 million texts", gguf_file(gguf_array("a", "ab", n=(1 << 21) - 1)), open_gguf_file, None),
    Case("texts of wide characters", gguf_file(gguf_array("a", "a" * 300 + "🙂", n=140_000)), open_gguf_file, None),
    Case("too many texts", gguf_file(gguf_array("a", "", n=1 << 22)), open_gguf_file, "more than 2,097,152 elements"),
    Case("a huge header", gguf_file(*[gguf_setting(f"{i}", "x" * 10**6) for i in range(60)]), open_gguf_file, "48 MB"),
    Case("2**16 tensors", gguf_file(tensors=1 << 16), open_gguf_file, "it ends at the name of a tensor"),
    Case("a GGUF pipe", lambda d: os.mkfifo(d / "m.gguf"), open_gguf_file, "it is a pipe"),
    Case("an endless GGUF file", partial(sparse, gguf_file(), "m.gguf"), open_gguf_file, "not with GGUF"),
    Case("pieces of all lengths", gguf_file(*LONG_PIECES), gguf_tokenizer_of, "more than 4,194,304 characters"),
]  # fmt: skip


# ── texts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def tokenizer_file(**parts: Any) -> Make:
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(tokenizer.byte_symbols())}, "merges": []},
    }  # fmt: skip
    return lambda folder: (folder / "tokenizer.json").write_text(json.dumps(content | parts))


def encode(folder: Path) -> object:
    return tokenizer.read(folder).encode("a b c é" * 1000)


def decode(folder: Path) -> object:
    return tokenizer.read(folder).decode([tokenizer.byte_symbols().index("a")])


def split(pattern: str) -> Make:
    return tokenizer_file(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    )


def strip(start: int, stop: int) -> Make:
    return tokenizer_file(decoder={"type": "Strip", "content": "a", "start": start, "stop": stop})


def added(n: int, length: int = 1) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [{"id": 256 + i, "content": f"<{i}>" * length, **flags} for i in range(n)]


def added_beside_merges(folder: Path) -> None:
    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(tokenizer.byte_symbols())}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "added_tokens.json").write_text(json.dumps({f"<{i}>": 256 + i for i in range(300_000)}))


def parquet(folder: Path, value: str, rows: int) -> None:
    """Stored once, as an entry of a dictionary, and compressed."""
    indices = pyarrow.array([0] * rows, pyarrow.int32())
    table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(indices, [value])})
    pyarrow.parquet.write_table(table, folder / "x.parquet", compression="zstd", write_statistics=False)


def read_records(name: str) -> Callable[[Path], object]:
    return lambda folder: sum(1 for _ in records.records([folder / name]))


def wide_table(folder: Path) -> None:
    (folder / "x.csv").write_text(",".join(f"c{i}" for i in range(60_000)) + "\n" + "," * 59_999)


def with_stdin(read: Callable[[], object], *command: str) -> Callable[[Path], object]:
    """Read what a command prints without an end."""

    def call(folder: Path) -> object:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as endless:
            assert endless.stdout is not None
            sys.stdin = io.TextIOWrapper(endless.stdout)
            try:
                return read()
            finally:
                endless.kill()

    return call


def read_prompts() -> object:
    return generate_command._lines(Path("-"))


def read_messages() -> object:
    return list(chat_command._lines(False))


TO_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TO_BYTES_AGAIN = {"type": "Sequence", "pretokenizers": [TO_BYTES] * 24}
FIRST, SECOND = ({"Sequence": {"id": x, "type_id": i}} for i, x in enumerate("AB"))
REPEATED = {
    "type": "TemplateProcessing",
    "single": [FIRST] * 10_000,
    "pair": [FIRST, SECOND],
    "special_tokens": {},
}
ONE_LONG_PIECE = [
    gguf_setting("tokenizer.ggml.model", "llama"),
    gguf_array("tokenizer.ggml.tokens", "a" * 4_000_000, "a", "b"),
    gguf_text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 3) + bytes(4 * 3),
]
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["a" * 400_000, -1.0]]}
TEXTS = [
    Case("one long piece", gguf_file(*ONE_LONG_PIECE), gguf_tokenizer_of, "the longest has 4,000,000 characters"),
    Case("24 steps to bytes", tokenizer_file(pre_tokenizer=TO_BYTES_AGAIN), encode, "memory"),
    Case("a text 10,000 times", tokenizer_file(post_processor=REPEATED), encode, "makes 100,000 tokens"),
    Case("300,000 added tokens", tokenizer_file(added_tokens=added(300_000)), encode, "300,000 tokens are special or added"),
    Case("long added tokens", tokenizer_file(added_tokens=added(5_000, 1_000)), encode, "with 4,194,304"),
    Case("added tokens beside merges", added_beside_merges, encode, "300,000 tokens are special or added"),
    Case("Strip from both ends", strip(1, 1), decode, "takes up to 1 characters from the beginning"),
    Case("Strip beyond the beginning", strip(0, 4_000_000_000), decode, "4,000,000,000 from its end"),
    Case("Strip from the beginning", strip(4_000_000_000, 0), decode, None),
    Case("Strip from the end", strip(0, 1), decode, None),
    Case("words in many ways", split("(?:abc|a|b|c|bc|ab)+!"), encode, "cannot be used as a tokenizer"),
    Case(
        "an escape in many ways", split(r"(?:[\x{4e00}-\x{4e10}]|[\x{4e05}])+(?!b)\d"), encode,
        "cannot be used as a tokenizer",
    ),
    Case("a long entry of Unigram", tokenizer_file(model=UNIGRAM), encode, "400,000 characters"),
    Case("a cell of 230 MB", partial(parquet, value="a" * 230_000_000, rows=1), read_records("x.parquet"), "memory"),
    Case("a long cell in 600 rows", partial(parquet, value="a" * 2_000_000, rows=600), read_records("x.parquet"), None),
    Case("60,000 columns", wide_table, read_records("x.csv"), None),
    Case("endless prompts", nothing, with_stdin(read_prompts, "yes"), "more than 16 MB"),
    Case("an endless message", nothing, with_stdin(read_messages, "cat", "/dev/zero"), "more than 16 MB"),
]  # fmt: skip

CASES = [*MODELS, *ADAPTERS, *TEMPLATES, *OPTIONS, *GGUF, *TEXTS]


def test_a_panic_of_the_tokenizers_library_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pattern that no trial text shows to be slow."""
    monkeypatch.setattr("threading.active_count", lambda: 1)  # other tests may leave threads
    split("(?:[a][b]|[a]|[b])+!")(tmp_path)
    read = tokenizer.read(tmp_path)
    with pytest.raises(hg.HandgradError, match="cannot encode this text: Onig: Regex search error: retry-limit"):
        read.encode("ab" * 1000)
    os.write(2, b"still open")
    assert capfd.readouterr().err == "still open"


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner("test_hostile") as runner:
        yield runner


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.some_cases(5)
def test_hostile_files_are_rejected_or_read_within_limits(case: Case, runner: Runner, tmp_path: Path) -> None:
    case.make(tmp_path)
    found = runner.run(case.name, tmp_path)
    assert found.crash is None
    assert (found.error is None) == (case.error is None), found
    assert case.error is None or (found.error is not None and case.error in found.error), found
    assert len(found.error or "") <= 1000 and "\n" not in (found.error or "").strip()
    assert found.cpu_seconds < SECONDS and found.megabytes < MEGABYTES, found


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
