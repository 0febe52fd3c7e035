"""The contenders of `generate`: handgrad's engine, transformers, llama.cpp's llama-bench, and the speed of memory."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

import handgrad as hg
from handgrad.inference.engine import Engine, Options, Sequence
from handgrad.model.layers.linear import Linear

from .attempts import Attempts, MissingError, WrongError
from .measure import Timing
from .process import reason_of

TIE = 1e-3  # of log-probabilities: where the two most probable tokens are as near, rounding decides which one is chosen
Prompts = list[list[int]]


class Contender(Protocol):
    def seconds(self) -> float:
        """Run once; the seconds it took."""


@dataclass(frozen=True)
class Generator:
    """A contender in this process; `generate` returns the new ids of every prompt."""

    generate: Callable[[], Prompts]

    def seconds(self) -> float:
        start = time.perf_counter()
        self.generate()
        return time.perf_counter() - start


def time_in_turns(made: dict[str, Contender], rounds: int, attempts: Attempts) -> dict[str, Timing]:
    """Seconds of every contender in every round, after one run that does not count."""
    timings = {name: Timing() for name in made}
    for name, contender in made.items():
        attempts(name, contender.seconds)
    for _ in attempts.rounds(rounds):
        for name, contender in made.items():
            if (seconds := attempts(name, contender.seconds)) is not None:
                timings[name].rounds.append(seconds)
    return {name: timings[name] for name in attempts.competing(made)}


def check_same(model: hg.GPT, prompts: Prompts, ours: Prompts, theirs: Prompts, reference: str) -> None:
    """Raise if other tokens were generated, unless the first that differs was chosen between two of equal probability."""
    for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
        t = next((t for t, (x, y) in enumerate(zip(mine, other, strict=True)) if x != y), None)
        if t is None:
            continue
        result = hg.generate(model, prompt + mine[:t], 1, logprobs=2, details=True)
        (_, first), (_, second) = result.logprobs[0].top
        if first - second > TIE:
            raise WrongError(f"new token {t} is {mine[t]}, that of {reference} {other[t]}; not timed")


# ── handgrad ────────────────────────────────────────────────────────────────────────────────────────────────────────


def ours(model: hg.GPT, prompts: Prompts, new: int, cached: bool = True) -> Generator:
    """Prompts and `new` tokens of each, in one batch."""

    def generate() -> Prompts:
        engine = Engine(model, cache=cached)
        found = [engine.add(prompt, Options(new)) for prompt in prompts]
        while engine.busy:
            engine.step()
        return [sequence.new for sequence in found]

    return Generator(generate)


def our_decoding(model: hg.GPT, prompts: Prompts, new: int) -> Generator:
    """Only the `new` tokens after the first: the prompts are in the cache."""
    engine = Engine(model)
    found = [engine.add(prompt, Options(sys.maxsize)) for prompt in prompts]
    while any(not sequence.new for sequence in found):
        engine.step()
    for sequence in found:
        _rewind(sequence)

    def generate() -> Prompts:
        for _ in range(new):
            engine.step()
        result = [list(sequence.new) for sequence in found]
        for sequence in found:
            _rewind(sequence)
        return result

    return Generator(generate)


def _rewind(sequence: Sequence) -> None:
    """Forget all new tokens but the first, which is not in the cache."""
    del sequence.new[1:], sequence.window[len(sequence.prompt) + 1 :]
    sequence.slot.length = len(sequence.prompt)


# ── transformers ────────────────────────────────────────────────────────────────────────────────────────────────────


def peer(folder: Path) -> Any:
    """transformers' model, which generates as many tokens as are wanted."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0
    return network


def theirs(network: Any, prompts: Prompts, new: int) -> Generator:
    """The same by `generate` of transformers; uneven prompts are padded on the left, as it needs them."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def generate() -> Prompts:
        found = network.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        return found[:, longest:].tolist()  # type: ignore[no-any-return]

    return Generator(generate)


def their_decoding(network: Any, prompts: Prompts, new: int) -> Generator:
    from transformers import DynamicCache

    ids, kept = torch.tensor(prompts), DynamicCache(config=network.config)
    with torch.inference_mode():
        logits = network(ids, past_key_values=kept, use_cache=True, logits_to_keep=1).logits
    ids = torch.cat([ids, logits[:, -1].argmax(1, keepdim=True)], 1)
    n, mask = len(prompts[0]), torch.ones_like(ids)

    def generate() -> Prompts:
        found = network.generate(ids, attention_mask=mask, past_key_values=kept, max_new_tokens=new, do_sample=False)
        kept.crop(n - kept.get_seq_length())
        return found[:, n:].tolist()  # type: ignore[no-any-return]

    return Generator(generate)


# ── llama.cpp ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Llama:
    """llama-bench, which times itself: a prompt, or new tokens behind `depth` others. One sequence."""

    program: str
    model: Path
    prompt: int = 0
    new: int = 0
    depth: int = 0

    def seconds(self) -> float:
        options = {"-m": self.model, "-p": self.prompt, "-n": self.new, "-d": self.depth, "-r": 1, "-o": "json"}
        words = [str(word) for pair in options.items() for word in pair]
        command = [self.program, *words, "-t", str(torch.get_num_threads()), "-ngl", "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"llama-bench: {reason_of(done)}")
        (found,) = json.loads(done.stdout)
        return float(found["avg_ns"]) / 1e9


def llama(model: Path, kind: str, **numbers: int) -> Llama:
    """llama-bench on a copy of a GGUF file with all matrices of this kind; the file itself if kind is empty."""
    beside = Path(sys.executable).parent
    program = shutil.which("llama-bench") or shutil.which("llama-bench", path=beside)
    if program is None:
        raise MissingError("llama-bench is not on PATH: make llama-bench builds it")
    return Llama(program, copy_as(model, kind) if kind else model, **numbers)


@cache
def copy_as(model: Path, kind: str) -> Path:
    """A copy of a GGUF file whose matrices have another type, in a temporary folder. With Q4_1 the head is Q8_0, as in
    handgrad's 4 bits and in the files of llama.cpp's own llama-quantize."""
    import tempfile

    import gguf

    reader, path = gguf.GGUFReader(model), Path(tempfile.mkdtemp()) / f"{kind}.gguf"
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    head = "output.weight" if any(x.name == "output.weight" for x in reader.tensors) else "token_embd.weight"
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        its_kind = "F32" if numbers.ndim < 2 else "Q8_0" if (kind, tensor.name) == ("Q4_1", head) else kind
        to = gguf.GGMLQuantizationType[its_kind]
        data = tensor.data if tensor.tensor_type == to else gguf.quants.quantize(numbers, to)
        writer.add_tensor(tensor.name, data, raw_dtype=to)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


# ── the speed of memory ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Bound:
    """The time in which memory delivers so many bytes, measured by adding up numbers."""

    nbytes: int
    numbers: int

    def seconds(self) -> float:
        buffer = numbers_in_memory(self.numbers)
        start = time.perf_counter()
        buffer.sum()
        return (time.perf_counter() - start) * self.nbytes / buffer.nbytes


@cache
def numbers_in_memory(count: int) -> torch.Tensor:
    return torch.ones(count)


def bytes_of_steps(model: hg.GPT, sequences: int, context: int, steps: int) -> int:
    """Bytes that decoding reads: all matrices once per step, and the keys and values of every sequence so far."""
    layers = {id(m): m for m in model.modules() if isinstance(m, Linear)}.values()
    weights = sum(x.packed.nbytes if x.weight is None else x.weight.nbytes for x in layers)  # type: ignore[union-attr]
    c = model.config
    per_token = c.n_blocks * c.kv_heads * (c.query_width + c.value_width) * next(model.parameters()).element_size()
    lengths = range(context - steps, context)
    return steps * weights + sequences * per_token * sum(lengths)
