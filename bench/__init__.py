"""Side-by-side measurements against the peers: `handgrad bench`, or `python -m bench`.

Every scenario lets its contenders take turns in one run and keeps the minimum and the median of several rounds; only
ratios mean anything on a noisy machine, and none on a busy one. Losses and gradients are compared before anything is
timed, so that no wrong answer is timed. Peak memory is measured in a separate process for each contender.

    sizes.py       full, --quick, --tiny: how large every scenario is
    peers.py       the contenders: ours, eager autograd, torch.compile, transformers + peft, the bare matrix products
    measure.py     turns, peak memory, the machine's load
    scenarios.py   train, memory, lora, sft, attention, products
    finetune.py    the command finetune and the same by transformers + peft
    explain.py     the page of handgrad explain in a browser
    picture.py     the plot
"""

SCENARIOS = {
    "train": "A whole training step: loss, all gradients, AdamW.",
    "memory": "Peak memory of a whole step, above weights and optimizer state.",
    "lora": "Adapters of rank 16 beside every matrix of every block.",
    "sft": "LoRA on uneven, prompt-masked examples: packed by handgrad, padded by the peer.",
    "finetune": "The command finetune on uneven lines of JSON: whole processes, memory included.",
    "attention": "The backward pass of attention alone, against the library's kernel.",
    "products": "Every matrix product of a layer as ops/linear.py writes it, and turned around: (bᵗ aᵗ)ᵗ.",
    "explain": "Waiting times and memory of the page of handgrad explain in Chromium; no peer.",
}
