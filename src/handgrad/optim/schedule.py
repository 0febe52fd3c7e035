"""The learning rate: default peaks, and the rate of a step (linear warm-up, then cosine or linear decay, or constant)."""

import math

LORA_LR, FINETUNE_LR = 5e-4, 5e-5  # default peaks of fine-tuning: adapters, all weights


def pretraining_lr(d_model: int) -> float:
    """Default peak of pre-training: wider models need smaller steps."""
    return min(4e-3, 0.5 / d_model)


def learning_rate(progress: float, step: int, lr: float, min_lr: float, warmup: int, schedule: str) -> float:
    """Linear warm-up over `warmup` steps, then decay from `lr` to `min_lr` as `progress` goes from 0 to 1."""
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    if schedule == "constant":
        return lr
    progress = min(1.0, max(0.0, progress))
    left = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return min_lr + (lr - min_lr) * left
