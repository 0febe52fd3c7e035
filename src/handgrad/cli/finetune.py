"""`handgrad finetune`"""

from typing import Any

from ..training.config import FORMATS, LOSS_ON, TOO_LONG, FinetuneOptions
from .options import COMMON_LOGGING, COMMON_OPTIMIZATION, PRECISION, Options, with_options

OPTIONS: Options = {
    "Data": {
        "data": "Files (.jsonl, .json, .csv, .parquet, .txt), folders, glob patterns, or - for standard input;"
        " repeatable. A record has prompt and completion, or messages, or text, or Alpaca's or ShareGPT's fields.",
        "field": "The data's name for a field, as in prompt=question; repeatable.",
        "skip_bad": "Skip invalid records instead of stopping.",
        "val_data": "Examples to validate on. [default: a share of --data]",
        "val_share": "Fraction of the examples, chosen by --seed, used for validation.",
        "format": f"Form of prompts and completions, {' or '.join(FORMATS)}: messages in the model's chat template, or as"
        " they are. Recorded with the result. [default: chat if the model has a chat template]",
        "chat_template": "Jinja file that formats messages. [default: the model's template]",
        "loss_on": f"Tokens with a loss, {' or '.join(LOSS_ON)}: completions and assistant turns only, or prompts too.",
        "too_long": f"Examples longer than the context, {' or '.join(TOO_LONG)}: cut their end (texts are split), or skip"
        " them.",
    },
    "Model": {
        "model": "A model directory, a .gguf file, one of `handgrad get`, a run folder, an adapter to continue, or a"
        " name on the hub.",
        "dtype": "Data type: float32, float64 or bfloat16.",
        "precision": PRECISION,
        "packed": "Keep the matrices of a GGUF model packed: the same gradients. Least memory with --recompute blocks.",
        "base_dtype": "Keep the matrices of a model directory in two bytes: bfloat16 or float16.",
        "gguf": "Also write the adapter as adapter.gguf, for llama.cpp's --lora.",
        "full": "Train all weights instead of an adapter.",
        "rank": "Rank of the adapters.",
        "alpha": "Scale of the adapters: their output is multiplied by alpha/rank. [default: the rank]",
        "targets": "Layers with adapters, by name, end of name or regular expression: c_attn, mlp.c_proj, lm_head …"
        " Separate names with commas, or repeat the option.",
        "rslora": "Scale by alpha/√rank instead (rsLoRA).",
        "dora": "Also train a magnitude for every output (DoRA).",
        "dropout": "Dropout probability of the adapters' input.",
        "freeze_down": "Train the adapters' up factors only (LoRA-FA).",
        "modules_to_save": "Layers trained in full and saved with the adapter, by the end of their name, as in PEFT: ln_f,"
        " or norm for every norm of a Llama.",
        "bias": "Biases trained and saved with the adapter: all of the model, or lora_only, those of layers with adapters."
        " [default: none]",
    },
    "Length": {
        "epochs": "Passes over the examples. [default: 3]",
        "steps": "Number of optimizer steps.",
        "minutes": "Time budget in minutes; the schedule follows wall-clock time.",
    },
    "Optimization": {
        "batch_examples": "Examples per step; processed in pieces as needed.",
        "lr": "Peak learning rate. [default: 0.0005, with --full 0.00005]",
        "min_lr": "Final learning rate. [default: 0]",
        "warmup": "Steps of linear warm-up. [default: 20, at most a tenth of the run]",
        **COMMON_OPTIMIZATION,
        "share_prefixes": "Compute what examples of a batch begin with in common, such as a system prompt, once: the same"
        " gradients up to rounding. Without effect with --dropout. [default: on]",
        "seed": "Seed of the adapters, of the order of the examples, and of dropout.",
    },
    "Logging and checkpoints": COMMON_LOGGING
    | {
        "example_norms": "Measure loss and gradient of every example while training, and list those that fit the others"
        " least: garbage, wrong labels, broken templates.",
        "influence": "Number of validation answers for which to rank the training examples that pushed them, in"
        " report.html.",
        "log_every": "Steps between log lines. [default: a tenth of the run, at most 10]",
        "eval_every": "Steps between evaluations. [default: a tenth of the run, at least 5]",
        "save_every": "Steps between checkpoints. [default: a tenth of the run, at least 5]",
    },
}


@with_options(OPTIONS, FinetuneOptions)
def finetune(**given: Any) -> None:
    """Fine-tune a model on examples: low-rank adapters, or with --full all weights.

    Examples are packed without padding, and none attends to another. The loss is the mean over all target tokens of the
    batch. At the end --out holds the best adapter, in PEFT's format, as adapter/ (with --full the model, as model/), next
    to checkpoints, metrics.jsonl and report.html. Ctrl-C, --resume and torchrun work as with handgrad train.

      handgrad finetune --model path/to/gpt2 --data examples.jsonl
      handgrad finetune --model path/to/gpt2 --data examples.jsonl --rank 4 --targets c_attn,lm_head
      handgrad finetune --model smollm2 --packed --data examples.jsonl
      handgrad finetune --resume
    """
    from ..training.finetune import prepare
    from .training_run import run_command

    run_command(given, FinetuneOptions, prepare)
