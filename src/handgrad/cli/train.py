"""`handgrad train`"""

from typing import Any

from ..model.config import PRESETS
from ..training.config import TrainOptions
from .options import COMMON_LOGGING, COMMON_OPTIMIZATION, MODEL_SHAPE, PRECISION, Options, with_options

OPTIONS: Options = {
    "Data": {
        "data": "Text files, folders, glob patterns, .jsonl files, or - for standard input; repeatable."
        " [default: tiny Shakespeare]",
        "text_field": "Field of a .jsonl line that holds the text.",
        "tokenizer": "bytes, chars, gpt2, bpe:N or a tokenizer.json. [default: chars for Shakespeare, gpt2 for GPT-2's"
        " shapes, else bytes]",
        "val_share": "Fraction of the text, at its end, used for validation.",
    },
    "Model": {
        "model": f"A preset ({', '.join(PRESETS)}), or a model directory or run folder to start from. A preset's bare"
        " name is the preset; ./NAME is the folder.",
        **MODEL_SHAPE,
        "dtype": "Data type: float32, float64 or bfloat16.",
        "precision": PRECISION,
    },
    "Length": {
        "steps": "Number of optimizer steps. [default: 2000]",
        "epochs": "Passes over the data.",
        "minutes": "Time budget in minutes; the schedule follows wall-clock time.",
    },
    "Optimization": {
        "batch_tokens": "Tokens per step, rounded to full contexts; processed in pieces as needed."
        " [default: 12 contexts]",
        "lr": "Peak learning rate. [default: 0.5/width, at most 0.004]",
        "min_lr": "Final learning rate. [default: a tenth of --lr]",
        "warmup": "Steps of linear warm-up. [default: 100, at most a tenth of the run]",
        **COMMON_OPTIMIZATION,
        "seed": "Seed of the weights and of the order of the data.",
    },
    "Logging and checkpoints": COMMON_LOGGING
    | {
        "log_every": "Steps between log lines. [default: 10]",
        "eval_every": "Steps between evaluations. [default: 250]",
        "save_every": "Steps between checkpoints. [default: 250]",
    },
}


@with_options(OPTIONS, TrainOptions)
def train(**given: Any) -> None:
    """Train a model on text, with every gradient derived by hand.

    Without any option: a small model on tiny Shakespeare, in about a minute. The run folder holds checkpoints that open
    in transformers, metrics.jsonl and report.html. Ctrl-C finishes the step, saves and exits; --resume continues exactly
    there. The same command under torchrun --nproc-per-node N -m handgrad trains in N processes.

      handgrad train
      handgrad train --data book.txt --model gpt2 --out runs/book
      handgrad train --resume --out runs/book
    """
    from ..training.pretrain import prepare
    from .training_run import run_command

    run_command(given, TrainOptions, prepare)
