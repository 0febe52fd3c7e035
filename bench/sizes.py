"""Sizes of every scenario: the published ones, --quick, and --tiny, which runs in seconds."""

from dataclasses import dataclass

import handgrad as hg


@dataclass(frozen=True)
class Size:
    """The sizes of all scenarios."""

    name: str
    label: str  # of the model
    model: hg.ModelConfig
    recipe: hg.ModelConfig  # a small model on characters: nanoGPT's recipe for the CPU
    recipe_batch: tuple[int, int]  # sequences, tokens of each
    train: tuple[tuple[int, int], ...]
    compiled: tuple[tuple[int, int], ...]  # entries of `train` that include torch.compile
    compile_recipe: bool
    loop: tuple[int, int]  # entry of `train` that includes the training loop
    step: tuple[int, int]  # lora and memory
    examples: int  # sft
    longest: int  # tokens of the longest example of sft and finetune
    finetune: tuple[int, int]  # examples per step, steps
    instruction_steps: int  # finetune with --model: steps of 8 examples
    packed_tokens: int  # of a step with packed weights
    context: tuple[int, ...]  # tokens of the example
    process_rounds: int  # finetune and context
    attention: tuple[int, ...]  # tokens
    products: tuple[str, ...]  # layers
    product_tokens: int
    peaks: tuple[str, ...]  # scenarios that measure memory
    explain: tuple[str, int]  # model, words of the sentence
    rounds: int  # maximum
    measure_seconds: float  # budget of each time prediction
    base: str = ""  # --model of finetune and context; "": `model` with random weights


GPT2 = hg.preset("gpt2")
NANO = hg.preset("nano", n_vocab=65)

FULL = Size(
    name="full",
    label="GPT-2 124M",
    model=GPT2,
    recipe=NANO,
    recipe_batch=(12, 64),
    train=((4, 64), (1, 512), (1, 1024), (4, 1024)),
    compiled=((1, 512), (1, 1024)),  # compiling takes a minute for each shape
    compile_recipe=True,
    loop=(1, 512),
    step=(4, 1024),
    examples=24,
    longest=900,
    finetune=(24, 3),
    instruction_steps=5,
    packed_tokens=1024,
    context=(512, 1024, 2048, 4096, 8192),
    process_rounds=2,
    attention=(128, 256, 512, 1024, 2048, 4096),
    products=("c_attn", "c_proj", "c_fc", "mlp.c_proj", "head"),
    product_tokens=1024,
    peaks=("train", "memory", "lora", "sft"),
    explain=("gpt2", 64),
    rounds=40,
    measure_seconds=0.5,
)
QUICK = Size(
    name="quick",
    label="GPT-2 124M",
    model=GPT2,
    recipe=NANO,
    recipe_batch=(12, 64),
    train=((1, 128), (1, 512)),
    compiled=(),
    compile_recipe=False,
    loop=(1, 512),
    step=(1, 256),
    examples=2,
    longest=900,
    finetune=(6, 2),
    instruction_steps=3,
    packed_tokens=1024,
    context=(512, 1024),
    process_rounds=1,
    attention=(128, 512, 1024),
    products=("c_fc", "head"),
    product_tokens=1024,
    peaks=("memory", "lora", "sft"),  # train would take longer than everything else
    explain=("nano", 10),
    rounds=40,
    measure_seconds=0.5,
)
TINY = Size(
    name="tiny",
    label="tiny GPT-2",
    # 1,024 tokens of 512 ids: fast, but large enough for a step's memory to be measurable
    model=hg.preset("gpt2", n_vocab=512, n_context=256, d_model=32, n_heads=2, n_blocks=2),
    recipe=hg.preset("nano", n_vocab=65, n_context=16, d_model=16, n_heads=2, n_blocks=1),
    recipe_batch=(2, 16),
    train=((2, 32), (1, 128)),
    compiled=(),
    compile_recipe=False,  # the first compilation alone takes half a minute
    loop=(1, 128),
    step=(4, 256),
    examples=3,
    longest=128,
    finetune=(3, 2),
    instruction_steps=2,
    packed_tokens=500,
    context=(32, 64, 128),
    process_rounds=1,
    attention=(32, 128),
    products=("c_fc", "head"),
    product_tokens=32,
    peaks=("memory", "lora"),
    explain=("nano", 3),
    rounds=1,
    measure_seconds=0.02,
)
SIZES = {size.name: size for size in (FULL, QUICK, TINY)}
