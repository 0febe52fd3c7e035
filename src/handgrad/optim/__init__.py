"""Learning rates and optimizers.

Import the names below. torch.optim does the updates; this package picks one by name, clips gradients, computes the
schedule, can update each layer inside the backward pass, and rounds bfloat16 weights stochastically. It knows the model,
but no data and no files.
"""

from .in_backward import OptimizerInBackward
from .muon import matrices
from .optimizers import clip_factor, copies, groups, length, maker, norm, step
from .schedule import FINETUNE_LR, LORA_LR, learning_rate, pretraining_lr
from .state import align, restore, state_of
from .stochastic_rounding import StochasticRounding

__all__ = [
    "FINETUNE_LR",
    "LORA_LR",
    "OptimizerInBackward",
    "StochasticRounding",
    "align",
    "clip_factor",
    "copies",
    "groups",
    "learning_rate",
    "length",
    "maker",
    "matrices",
    "norm",
    "pretraining_lr",
    "restore",
    "state_of",
    "step",
]
