"""Side-by-side benchmarks against other libraries: `handgrad bench`, or `python -m bench`.

The contenders of a scenario run in turns, and the minimum and median of several rounds are reported. Only ratios are
meaningful on a noisy machine, and none on a busy one. Losses and gradients are compared before anything is timed. Peak
memory is measured in a separate process per contender. A contender that fails is reported, and the rest goes on.

    sizes.py       full, --quick, --tiny: sizes of every scenario
    peers.py       the contenders: ours, eager autograd, torch.compile, transformers + peft
    products.py    the matmuls of a step alone
    row.py         a measurement
    attempts.py    calls to contenders that may fail
    measure.py     interleaved timing, peak memory
    machine.py     the machine, its load, versions, commit
    outputs.py     files that are written, checked first
    cases.py       models and batches of train, memory, lora, sft
    compete.py     compares, times and measures the contenders of a case
    bridge.py      contenders of bridge: a transformers model as it is, replaced, compiled; a model of handgrad, wrapped
    attention.py   attention alone, forward and backward
    bases.py       models and examples of finetune, context, generate and precision
    finetune.py    the command finetune, and the same by transformers + peft
    peft_peer.py   the process of transformers + peft
    context.py     the command finetune on one example of increasing length
    generate.py    generating tokens
    generators.py  its contenders: handgrad's engine, transformers, llama-bench, the speed of memory
    lowbit.py      its products with low-bit weights: handgrad's kernel and those of torch
    precision.py   gradients in mixed precision, under autocast and in bfloat16 against float32
    shared.py      a small model while other processes use the cores
    examples.py    a step that measures every example's gradient, and the plain step
    explain.py     the page of handgrad explain in a browser
    scenarios.py   all scenarios and their parts; single products; results as JSON
    supervise.py   runs the parts in a child process, which may be killed
    process.py     peak memory of a process
    show.py        tables and progress in the terminal
    picture.py     the plot
    table.py       the tables of README.md and docs/benchmarks.md, from JSON
    example_demo.py   make example-norms-demo: wrong answers by norm, a planted fact by influence, on SmolLM2
    demo.py        make finetune-demo and coder-demo: losses and answers before and after, and the same by the peer
    house_style.py the functions of a package as instructions, for make coder-demo
"""

SCENARIOS = {
    "train": "A training step: loss, all gradients, AdamW.",
    "memory": "Peak memory of a step, above weights and optimizer state.",
    "lora": "A step with LoRA adapters of rank 16 on every matrix of every block.",
    "sft": "LoRA on prompt-masked examples of different lengths: packed by handgrad, padded by the peer.",
    "bridge": "loss.backward() of a transformers model: as it is, after hg.nn.replace, compiled; and of hg.nn.wrap.",
    "finetune": "The command finetune on examples of different lengths; time and memory of the process.",
    "context": "A LoRA step of the command finetune on one example, longer and longer; no peer.",
    "generate": "Tokens per second of prompts and of new tokens, alone and in batches, in float32, 8 and 4 bits; the cache.",
    "attention": "Attention alone, backward and forward, against torch's kernels.",
    "products": "Matrix products of a layer: as written and transposed; in float32, bfloat16 and mixed precision.",
    "shared": "Steps of a small model while zero, one and two other processes use a core each.",
    "precision": "Gradients in mixed precision, under autocast and in bfloat16: errors against float32; nothing is timed.",
    "examples": "A step with the norm of every example's gradient, against the plain step: at most 1.3 times its time.",
    "explain": "Waiting times and memory of the page of handgrad explain in Chromium; no peer.",
}
WITH_MODEL = ("finetune", "context", "generate", "precision")  # scenarios that take --model
# with handgrad in mixed precision, and peers under autocast
WITH_MIXED = ("train", "memory", "lora", "sft", "bridge", "finetune", "context", "products", "precision")
