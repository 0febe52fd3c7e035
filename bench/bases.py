"""Models to fine-tune and records to fine-tune on: a named model with real instructions, GPT-2 with random weights on pieces
of text, and for the tiny size models of the same two families that need no download."""

import json
import random
import tempfile
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

import handgrad as hg
from handgrad.formats import models
from handgrad.gguf.file import is_gguf
from handgrad.text import examples, tokenizer
from handgrad.text.batches import shuffled_index
from handgrad.text.downloads import fetch
from handgrad.text.format import choose

from .in_transformers import RANK
from .process import ROOT
from .sizes import FULL, Size

Record = dict[str, Any]
TINY_LLAMA = {
    "context_length": 256, "embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "vocab_size": 259,
    "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16,
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Base:
    """A model to fine-tune, and a text in its language."""

    name: str
    path: Path  # as handgrad is given it: a directory or a GGUF file
    folder: Path  # where its copy for transformers, the initial adapter and all data are written
    text: str
    records: list[Record]  # to choose from

    @property
    def is_packed(self) -> bool:
        """Whether the file has packed matrices, which handgrad can leave packed."""
        return is_gguf(self.path)

    @cached_property
    def tokenizer(self) -> tokenizer.Tokenizer:
        return models.tokenizer_of(self.path)

    @cached_property
    def n_context(self) -> int:
        return models.config_of(self.path).n_context

    def read(self, data: Path) -> examples.Examples:
        """The examples of a file as handgrad finetune reads them."""
        return examples.read([data], self.tokenizer, self.n_context, template=choose(self.tokenizer).template)[0]

    def write(self, records: list[Record], name: str) -> Path:
        """Write records such that training takes them in this order."""
        lines = [""] * len(records)
        for i, record in enumerate(records):
            lines[shuffled_index(i, len(records), 0, 0)] = json.dumps(record) + "\n"
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(lines))
        return path

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each record."""
        path = self.folder / "all.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        return lengths_of(self.read(path))

    def write_peers_copy(self) -> None:
        """Write what transformers + peft need: the same weights in base/, those of packed files also rounded in bfloat16/,
        and the initial factors in start/."""
        model = hg.load(self.path)
        if self.path != self.folder / "base":
            hg.save(model, self.folder / "base")
        if self.is_packed:
            hg.save(hg.load(self.path, dtype="bfloat16"), self.folder / "bfloat16")
        hg.lora.inject(model, RANK)
        hg.lora.save(model, self.folder / "start")


def lengths_of(data: examples.Examples) -> list[int]:
    return [int(n) - 1 for n in np.diff(data.offsets)]


def base_of(size: Size, folder: Path) -> Base:
    """The model that a size names, or its GPT-2 with random weights."""
    if size.base and size.name == "tiny":
        return tiny_llama(folder)
    if not size.base:
        return random_gpt2(size, folder)
    path = models.weights_folder(size.base)
    records = json.loads(fetch("instructions")[0].read_text())
    return Base(size.base, path, folder, fetch("shakespeare")[0].read_text(), records)


@cache
def long_base(size: Size, tokens: int) -> Base:
    """The named model, or one with random weights whose context holds so many tokens."""
    long = replace(size.model, n_context=max(size.model.n_context, tokens))
    return base_of(replace(size, model=long), Path(tempfile.mkdtemp()))


def random_gpt2(size: Size, folder: Path) -> Base:
    """A random model with its tokenizer, and pieces of text with lengths like those of instruction data, the first eighth of
    each as its prompt. The tiny size uses bytes and needs no download."""
    if size.model.n_vocab == FULL.model.n_vocab:
        # about 3 characters per token
        made, text, per_token = tokenizer.make("gpt2", []), fetch("shakespeare")[0].read_text(), 3
    else:
        made, text, per_token = tokenizer.make("bytes", []), (ROOT / "LICENSE").read_text(), 1
    hg.save(hg.GPT(size.model, seed=0), folder / "base")
    made.write(folder / "base")
    records = [{"prompt": p, "completion": c} for p, c in pieces(text, size.finetune[0], size.longest, per_token)]
    return Base(size.label, folder / "base", folder, text, records)


def pieces(text: str, count: int, longest: int, per_token: int) -> list[tuple[str, str]]:
    """Prompts and completions of different lengths, from random places of a text."""
    rng, found = random.Random(0), []
    shortest = max(12, 20 * longest // 900)
    for _ in range(count):
        tokens = rng.lognormvariate(4.9, 0.85) * longest / 900
        length = per_token * int(min(longest, max(shortest, tokens)))
        at = rng.randrange(len(text) - length)
        cut = at + max(min(30, length // 2), length // 8)
        found.append((text[at:cut], text[cut : at + length]))
    return found


def tiny_llama(folder: Path) -> Base:
    """A random model of SmolLM2's kind: grouped queries, packed matrices, bytes as tokens, a chat template."""
    import gguf
    from gguf import GGMLQuantizationType as Kind
    from tokenizers.pre_tokenizers import ByteLevel

    path, rng, c = folder / "tiny.gguf", np.random.default_rng(0), TINY_LLAMA
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in c.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "Ġt", "<|im_start|>", "<|im_end|>"])
    writer.add_token_types(257 * [gguf.TokenType.NORMAL] + 2 * [gguf.TokenType.CONTROL])
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(258)
    writer.add_chat_template(CHAT_TEMPLATE)
    d, f, kv = c["embedding_length"], c["feed_forward_length"], 2 * c["rope.dimension_count"]
    matrices = {
        "attn_q": (d, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, d), "ffn_gate": (f, d),
        "ffn_up": (f, d), "ffn_down": (d, f),
    }  # fmt: skip
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(c["block_count"]) for name, shape in matrices.items()}
    for name, shape in (shapes | {"token_embd.weight": (c["vocab_size"], d)}).items():
        kind = Kind.Q8_0 if name == "token_embd.weight" else Kind.Q4_1
        w = gguf.quants.quantize(rng.normal(0, 0.1, shape).astype(np.float32), kind)
        writer.add_tensor(name, w, raw_dtype=kind)
    for norm in ("output_norm", *(f"blk.{i}.{kind}_norm" for i in range(c["block_count"]) for kind in ("attn", "ffn"))):
        writer.add_tensor(f"{norm}.weight", np.ones(d, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    text = (ROOT / "LICENSE").read_text()
    records = [{"instruction": p, "output": c} for p, c in pieces(text, 24, 100, 1)]
    return Base("tiny Llama", path, folder, text, records)
