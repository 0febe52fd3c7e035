"""Side-by-side benchmarks against other libraries: `handgrad bench`, or `python -m bench`.

The contenders of a scenario run in turns, and the minimum and median of several rounds are reported. Only ratios are
meaningful on a noisy machine, and none on a busy one. Losses and gradients are compared before anything is timed. Peak
memory is measured in a separate process per contender.

    sizes.py       full, --quick, --tiny: sizes of every scenario
    peers.py       the contenders: ours, eager autograd, torch.compile, transformers + peft, the matmuls alone
    measure.py     interleaved timing, peak memory, the machine's load
    cases.py       models and batches of train, memory, lora, sft
    compete.py     compares, times and measures the contenders of a case
    scenarios.py   all scenarios; attention and products
    bases.py       models and examples of finetune and context
    finetune.py    the command finetune, and the same by transformers + peft
    demo.py        make finetune-demo: SmolLM2's losses and answers before and after, and the same by the peer
    peft_peer.py   the process of transformers + peft
    context.py     the command finetune on one example of increasing length
    process.py     peak memory of a process
    explain.py     the page of handgrad explain in a browser
    picture.py     the plot
"""

SCENARIOS = {
    "train": "A training step: loss, all gradients, AdamW.",
    "memory": "Peak memory of a step, above weights and optimizer state.",
    "lora": "A step with LoRA adapters of rank 16 on every matrix of every block.",
    "sft": "LoRA on prompt-masked examples of different lengths: packed by handgrad, padded by the peer.",
    "finetune": "The command finetune on examples of different lengths; time and memory of the process.",
    "context": "A LoRA step of the command finetune on one example, longer and longer; no peer.",
    "attention": "The backward pass of attention alone, against torch's kernel.",
    "products": "Every matrix product of a layer as ops/linear.py writes it, and transposed: (bᵗ aᵗ)ᵗ.",
    "explain": "Waiting times and memory of the page of handgrad explain in Chromium; no peer.",
}
WITH_MODEL = ("finetune", "context")  # scenarios that take --model
