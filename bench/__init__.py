"""Side-by-side measurements against the peers: `handgrad bench`, or `python -m bench`.

Every scenario lets its contenders take turns in one run and keeps the minimum and the median of several rounds; only
ratios mean anything on a noisy machine. Gradients are compared before anything is timed, so that nobody times a wrong
answer. Peak memory is measured for each contender in a process of its own.

    peers.py       the contenders: ours, eager autograd, torch.compile, transformers + peft, the bare matrix products
    measure.py     turns, and peak memory
    scenarios.py   train, memory, lora, sft, attention, products
    picture.py     the plot
"""
