"""Sizes of every scenario: the published ones, --quick, and --tiny, which runs in seconds."""

from dataclasses import dataclass
from typing import NamedTuple

import handgrad as hg


class AttentionShape(NamedTuple):
    """Sequences of equal length through attention alone."""

    sequences: int
    tokens: int  # of each
    heads: int
    kv_heads: int
    width: int  # of a head


@dataclass(frozen=True)
class Size:
    """The sizes of all scenarios."""

    name: str
    label: str  # of the model
    model: hg.ModelConfig
    recipe: hg.ModelConfig  # a small model on characters: nanoGPT's recipe for the CPU
    recipe_batch: tuple[int, int]  # sequences, tokens of each
    recipe_rounds: int
    train: tuple[tuple[int, int], ...]
    compiled: tuple[tuple[int, int], ...]  # entries of `train` that include torch.compile
    compile_recipe: bool
    loop: tuple[int, int]  # entry of `train` that includes the training loop
    bfloat16: tuple[tuple[int, int], ...]  # train in bfloat16
    mixed: tuple[str, ...]  # scenarios, and the recipe, with contenders in mixed precision and under autocast
    mixed_train: tuple[tuple[int, int], ...]  # entries of `train` with them
    memory: tuple[int, int]
    lora: tuple[tuple[int, int], ...]
    lora_models: tuple[tuple[str, hg.ModelConfig], ...]  # besides `model`, by label
    examples: int  # sft
    longest: int  # tokens of the longest example of sft and finetune
    finetune: tuple[int, int]  # examples per step, steps
    instruction_steps: int  # finetune with --model: steps of 8 examples
    packed_tokens: int  # of a step with packed weights
    context: tuple[int, ...]  # tokens of the example
    process_rounds: int  # finetune and context; twice as many of examples
    attention: tuple[AttentionShape, ...]
    busy_cores: tuple[int, ...]  # shared: processes that want a core
    shared_seconds: float  # shared: of each contender
    products: tuple[str, ...]  # layers
    product_tokens: int
    product_rows: tuple[int, ...]  # of a product in float32, bfloat16 and mixed precision
    generate: tuple[int, ...]  # tokens of the context
    generate_batches: tuple[int, ...]  # sequences that are decoded together
    new_tokens: int  # that are decoded in a round
    uneven: tuple[int, int]  # prompts, tokens of the longest
    recomputed: tuple[int, ...]  # new tokens with and without a cache
    low_bit_layers: tuple[int, int, int]  # number, outputs, inputs
    low_bit_rows: tuple[int, ...]
    numbers_in_memory: int  # that are read to measure the speed of memory: more than caches hold
    generate_rounds: int
    peaks: tuple[str, ...]  # scenarios that measure memory
    explain: tuple[str, int]  # model, words of the sentence
    rounds: int  # maximum
    measure_seconds: float  # budget of each time prediction
    bridge: tuple[int, int] = (1, 512)  # sequences, tokens of each
    bridge_models: tuple[tuple[str, hg.ModelConfig], ...] = ()  # besides `model`, by label
    bridge_compiled: bool = False
    precision: tuple[int, int] = (2, 64)  # texts, tokens of each
    base: str = ""  # --model; "": `model` with random weights


GPT2 = hg.preset("gpt2")
SMOLLM2 = (("SmolLM2 shape", hg.preset("smollm2-shape")),)
TINY_LLAMA = hg.preset("smollm2-shape", n_vocab=512, n_context=256, d_model=48, n_heads=3, n_kv_heads=1, n_blocks=2)
NANO = hg.preset("nano", n_vocab=65)
SHORT = (AttentionShape(12, 64, 4, 4, 32), AttentionShape(32, 128, 12, 12, 64))  # batches of short sequences

FULL = Size(
    name="full",
    label="GPT-2 124M",
    model=GPT2,
    recipe=NANO,
    recipe_batch=(12, 64),
    recipe_rounds=25,
    train=((4, 64), (1, 512), (1, 1024), (4, 1024)),
    compiled=((1, 512), (1, 1024), (4, 1024)),  # compiling takes a minute for each shape
    compile_recipe=True,
    loop=(1, 512),
    bfloat16=((1, 512),),
    mixed=("recipe", "memory", "lora", "sft", "finetune", "context", "bridge"),
    mixed_train=((1, 512), (4, 1024)),
    memory=(4, 1024),
    lora=((1, 256), (1, 1024), (4, 1024)),
    lora_models=SMOLLM2,
    examples=24,
    longest=900,
    finetune=(24, 3),
    instruction_steps=5,
    packed_tokens=1024,
    context=(128, 256, 512, 1024, 2048, 4096, 8192),
    process_rounds=2,
    attention=(
        *(AttentionShape(1, n, 12, 12, 64) for n in (64, 128, 256, 512, 1024, 2048, 4096)),
        *(AttentionShape(1, n, 24, 24, 32) for n in (128, 512, 1024)),
        *(AttentionShape(1, n, 6, 6, 128) for n in (128, 512, 1024)),
        *(AttentionShape(1, n, 9, 3, 64) for n in (128, 512, 1024)),
        *SHORT,
    ),
    busy_cores=(0, 1, 2),
    shared_seconds=10,
    products=("c_attn", "c_proj", "c_fc", "mlp.c_proj", "head"),
    product_tokens=1024,
    product_rows=(256, 512, 1024, 2048, 4096),
    generate=(32, 128, 512, 2048),
    generate_batches=(1, 4, 16),
    new_tokens=16,
    uneven=(16, 512),
    recomputed=(16, 32, 64, 128, 256),
    low_bit_layers=(48, 3072, 768),
    low_bit_rows=(1, 8, 16),
    numbers_in_memory=1 << 27,
    generate_rounds=5,
    peaks=("train", "memory", "lora", "sft", "bridge"),
    bridge_models=SMOLLM2,
    bridge_compiled=True,
    precision=(32, 235),
    explain=("gpt2", 64),
    rounds=40,
    measure_seconds=1.5,
)
QUICK = Size(
    name="quick",
    label="GPT-2, 4 blocks, 8,192 ids",
    # making, comparing and updating 124 million parameters alone takes a minute
    model=hg.preset("gpt2", n_blocks=4, n_vocab=8192),
    recipe=NANO,
    recipe_batch=(12, 64),
    recipe_rounds=3,
    train=((1, 256),),
    compiled=(),
    compile_recipe=False,
    loop=(1, 256),
    bfloat16=(),
    mixed=("lora",),
    mixed_train=((1, 256),),
    memory=(1, 128),
    lora=((1, 256),),
    lora_models=(),
    examples=2,
    longest=300,
    finetune=(4, 2),
    instruction_steps=3,
    packed_tokens=1024,
    context=(128, 256),
    process_rounds=1,
    attention=(*(AttentionShape(1, n, 12, 12, 64) for n in (128, 1024)), AttentionShape(1, 512, 9, 3, 64), SHORT[0]),
    busy_cores=(0, 1),
    shared_seconds=1,
    products=("c_fc",),
    product_tokens=1024,
    product_rows=(1024,),
    generate=(128,),
    generate_batches=(1, 4),
    new_tokens=8,
    uneven=(4, 128),
    recomputed=(32,),
    low_bit_layers=(16, 3072, 768),
    low_bit_rows=(1,),
    numbers_in_memory=1 << 26,
    generate_rounds=2,
    peaks=("memory",),  # a process for each contender of the others would take longer than everything else
    bridge=(1, 256),
    explain=("nano", 10),
    rounds=20,
    measure_seconds=0.2,
)
TINY = Size(
    name="tiny",
    label="tiny GPT-2",
    # 1,024 tokens of 512 ids: fast, but large enough for a step's memory to be measurable
    model=hg.preset("gpt2", n_vocab=512, n_context=256, d_model=32, n_heads=2, n_blocks=2),
    recipe=hg.preset("nano", n_vocab=65, n_context=16, d_model=16, n_heads=2, n_blocks=1),
    recipe_batch=(2, 16),
    recipe_rounds=1,
    train=((2, 32), (1, 128)),
    compiled=(),
    compile_recipe=False,  # the first compilation alone takes half a minute
    loop=(1, 128),
    bfloat16=((1, 128),),
    mixed=("memory", "lora", "sft", "finetune", "context", "bridge"),
    mixed_train=((1, 128),),
    memory=(4, 256),
    lora=((4, 256),),
    lora_models=(("tiny Llama", TINY_LLAMA),),
    examples=3,
    longest=128,
    finetune=(3, 2),
    instruction_steps=2,
    packed_tokens=500,
    context=(32, 64),
    process_rounds=1,
    attention=(AttentionShape(1, 128, 2, 2, 16), AttentionShape(2, 24, 4, 2, 16)),
    busy_cores=(0, 1),
    shared_seconds=0.1,
    products=("c_fc", "head"),
    product_tokens=32,
    product_rows=(64,),
    generate=(16, 48),
    generate_batches=(1, 3),
    new_tokens=4,
    uneven=(3, 24),
    recomputed=(4, 8),
    low_bit_layers=(2, 64, 96),
    low_bit_rows=(1, 3),
    numbers_in_memory=1 << 16,
    generate_rounds=1,
    peaks=("memory",),
    bridge=(2, 128),
    explain=("nano", 3),
    rounds=1,
    measure_seconds=0.02,
)
SIZES = {size.name: size for size in (FULL, QUICK, TINY)}
