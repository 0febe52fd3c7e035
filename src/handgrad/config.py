"""Shapes of models, as frozen dataclasses, and the presets. Knows nothing of tensors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import ClassVar

from .errors import HandgradError

ACTIVATIONS = ("relu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class GPTConfig:
    """A GPT-2-like network. The defaults are GPT-2 small."""

    n_vocab: int = 50257
    n_context: int = 1024
    d_model: int = 768
    n_heads: int = 12
    n_blocks: int = 12
    d_hidden: int | None = None  # width of the feed-forward layer; 4 · d_model unless given
    d_rho: int | None = None  # width of a query and a key, per head; d_model / n_heads unless given
    d_head: int | None = None  # width of a value, per head; d_model / n_heads unless given
    activation: str = "gelu_tanh"
    eps: float = 1e-5
    tied: bool = True  # the logits layer is the token embedding transposed
    logits_bias: bool = False
    key_bias: bool = True  # b_k changes nothing (eq. 19); GPT-2's files have it
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("n_vocab", "n_context", "d_model", "n_heads", "n_blocks", "d_hidden", "d_rho", "d_head"):
            value = getattr(self, name)
            if value is None and name in ("d_hidden", "d_rho", "d_head"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise HandgradError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.activation not in ACTIVATIONS:
            raise HandgradError(f"unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        if self.d_model < 2:
            raise HandgradError("d_model must be at least 2: a norm over one feature is always 0")
        if not isinstance(self.eps, int | float) or not 0 <= self.eps < 1:
            raise HandgradError(f"eps must be a number of at least 0 and below 1, not {self.eps!r}")
        for name in ("tied", "logits_bias", "key_bias", "causal"):
            if not isinstance(getattr(self, name), bool):
                raise HandgradError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if (self.d_rho is None or self.d_head is None) and self.d_model % self.n_heads:
            raise HandgradError(
                f"a width of {self.d_model} cannot be shared by {self.n_heads} heads: choose n_heads that divides"
                " d_model, or give the widths per head with d_rho and d_head"
            )

    @property
    def hidden_width(self) -> int:
        return 4 * self.d_model if self.d_hidden is None else self.d_hidden

    @property
    def query_width(self) -> int:
        """d_ρ"""
        return self.d_model // self.n_heads if self.d_rho is None else self.d_rho

    @property
    def value_width(self) -> int:
        """d_h"""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head


PRESETS = {
    # the network whose parameters Section 7 and Table 3 count
    "paper": GPTConfig(n_blocks=1, tied=False, logits_bias=True),
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(d_model=1024, n_heads=16, n_blocks=24),
    "gpt2-large": GPTConfig(d_model=1280, n_heads=20, n_blocks=36),
    "gpt2-xl": GPTConfig(d_model=1600, n_heads=25, n_blocks=48),
    # characters or bytes; small enough to train in about a minute on a laptop
    "nano": GPTConfig(n_vocab=256, n_context=64, d_model=128, n_heads=4, n_blocks=4),
}


def preset(name: str, **changes: object) -> GPTConfig:
    """A preset by name, with single fields changed: preset("nano", n_blocks=2)."""
    if name not in PRESETS:
        raise HandgradError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    known = {f.name for f in fields(GPTConfig)}
    for change in changes:
        if change not in known:
            raise HandgradError(f"a model has no {change!r}; it has {', '.join(sorted(known))}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters beside some of a model's linear layers."""

    rank: int = 16
    alpha: float | None = None  # the rank unless given, which makes the factor 1
    targets: str | tuple[str, ...] = "all-linear"  # names, ends of names or regular expressions
    rank_pattern: dict[str, int] = field(
        default_factory=dict
    )  # other ranks and alphas where a name, or its end, matches
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    rslora: bool = False  # the factor is alpha/√rank, not alpha/rank
    dora: bool = False  # a trained magnitude for each output
    dropout: float = 0.0  # of what the branch reads, while training
    freeze_down: bool = False  # LoRA-FA: only the up factor trains
    modules_to_save: tuple[str, ...] = ()  # trained whole and kept with the adapter

    def __post_init__(self) -> None:
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except (re.error, TypeError) as reason:
                raise HandgradError(f"{pattern!r} is not a regular expression: {reason}") from None
        for what, rank in {"rank": self.rank, **self.rank_pattern}.items():
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise HandgradError(
                    f"the rank of an adapter must be a whole number of at least 1, not {rank!r} ({what})"
                )
        for what, alpha in {"alpha": self.alpha, **self.alpha_pattern}.items():
            if alpha is not None and not (_is_number(alpha) and alpha > 0):
                raise HandgradError(f"alpha must be a number above 0, not {alpha!r} ({what})")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise HandgradError(f"the dropout of an adapter must be at least 0 and below 1, not {self.dropout!r}")

    def rank_of(self, name: str) -> int:
        return self.rank_pattern.get(_pattern_for(name, self.rank_pattern), self.rank)

    def alpha_of(self, name: str) -> float:
        return self.alpha_pattern.get(_pattern_for(name, self.alpha_pattern), self.alpha or self.rank)

    def scale_of(self, name: str) -> float:
        rank = self.rank_of(name)
        return self.alpha_of(name) / (rank**0.5 if self.rslora else rank)


def _pattern_for(name: str, patterns: Iterable[str]) -> str:
    return next((p for p in patterns if matches(p, name)), "")


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern is the name, the end of it after a dot, or a regular expression for either."""
    compiled = re.compile(pattern)
    begins = [0, *(i + 1 for i, sign in enumerate(name) if sign == ".")]
    return any(compiled.fullmatch(name, i) for i in begins)


SCHEDULES = ("cosine", "linear", "constant")
LOSS_ON = ("answers", "all")
TOO_LONG = ("cut", "drop")


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on. What is None is decided by the model and the data, and written down resolved."""

    command: ClassVar[str] = "train"

    # what
    data: tuple[str, ...] = ()  # files, folders, patterns, "-"; none: the default corpus
    text_field: str = "text"  # of .jsonl files
    model: str = "nano"  # a preset or a model directory
    shape: tuple[tuple[str, int], ...] = ()  # fields of the preset that are changed
    tokenizer: str | None = None
    val_share: float = 0.1
    # how long
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    # how
    batch_tokens: int | None = None
    lr: float | None = None  # 0.5/d_model, at most 4e-3
    min_lr: float | None = None  # a tenth of lr unless given
    warmup: int | None = None  # 100 steps, but not more than a tenth of the run
    schedule: str = "cosine"
    optimizer: str = "AdamW"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0  # 0: none
    update_inside: bool = False
    recompute: str = "none"
    dtype: str = "float32"
    seed: int = 0
    # watching and keeping
    log_every: int | None = None  # 10
    eval_every: int | None = None  # 250
    eval_batches: int = 32
    save_every: int | None = None  # 250
    patience: int | None = None  # end after so many evaluations without a lower validation loss
    keep: int = 2
    sample_tokens: int = 160
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            kind = f.type.__name__ if isinstance(f.type, type) else str(f.type)
            _check_type(f.name, kind, getattr(self, f.name))
        if self.schedule not in SCHEDULES:
            raise HandgradError(f"--schedule must be {', '.join(SCHEDULES)}, not {self.schedule!r}")
        if self.recompute not in ("none", "blocks"):
            raise HandgradError(f"--recompute must be none or blocks, not {self.recompute!r}")
        if self.dtype not in ("float32", "float64", "bfloat16"):
            raise HandgradError(f"--dtype must be float32, float64 or bfloat16, not {self.dtype!r}")
        if not 0 <= self.val_share < 1:
            raise HandgradError(f"--val-share must be at least 0 and below 1, not {self.val_share}")
        if sum(x is not None for x in (self.steps, self.epochs, self.minutes)) > 1:
            raise HandgradError("give one of --steps, --epochs and --minutes, not several")
        least = {"steps": 1, "batch_tokens": 1, "warmup": 0, "log_every": 1, "eval_every": 1, "eval_batches": 1,
                 "save_every": 1, "patience": 1, "keep": 1, "sample_tokens": 0, "seed": 0}  # fmt: skip
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise HandgradError(f"{_flag(name)} must be a whole number of at least {smallest}, not {value!r}")
        for name in ("epochs", "minutes", "lr", "min_lr", "weight_decay", "clip"):
            value = getattr(self, name)
            positive = name in ("epochs", "minutes", "lr")
            if value is not None and (value < 0 or (positive and value == 0)):
                raise HandgradError(f"{_flag(name)} must be {'above' if positive else 'at least'} 0, not {value!r}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise HandgradError(f"{_flag(name)} must be at least 0 and below 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    """Fine-tuning on examples: what it depends on beyond training."""

    command: ClassVar[str] = "finetune"

    # what
    model: str = ""  # a model directory, the folder of a run, an adapter, a name on the hub
    val_data: tuple[str, ...] = ()  # examples kept apart already; else a share of the data
    chat_template: str | None = None  # a file, in place of the model's own
    loss_on: str = "answers"  # completions and assistant turns, or all
    field: tuple[str, ...] = ()  # our names of the data's fields: prompt=question
    skip_bad: bool = False  # leave out lines that cannot be used
    too_long: str = "cut"  # examples that do not fit into the context lose their end, texts are split; or drop
    batch_examples: int = 16
    clock: str | None = None  # the time that chat templates see, for a resumed run to see the same
    # which weights
    full: bool = False
    rank: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] = ("all-linear",)
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    freeze_down: bool = False
    modules_to_save: tuple[str, ...] = ()
    # other defaults than pre-training has
    weight_decay: float = 0.0
    eval_batches: int = 1000
    schedule: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("loss_on", LOSS_ON), ("too_long", TOO_LONG)):
            if getattr(self, name) not in choices:
                raise HandgradError(f"{_flag(name)} must be {' or '.join(choices)}, not {getattr(self, name)!r}")
        if self.batch_examples < 1:
            raise HandgradError(f"--batch-examples must be at least 1, not {self.batch_examples}")
        if self.full and self.adapter != LoRAConfig(targets=("all-linear",)):
            raise HandgradError("--full trains all weights: options of the adapter do not go with it")

    @property
    def adapter(self) -> LoRAConfig:
        return LoRAConfig(
            self.rank, self.alpha, self.targets, rslora=self.rslora, dora=self.dora, dropout=self.dropout,
            freeze_down=self.freeze_down, modules_to_save=self.modules_to_save,
        )  # fmt: skip


def _check_type(name: str, kind: str, value: object) -> None:
    """What comes from a file can be anything."""
    if value is None and "None" in kind:
        return
    if kind.startswith("bool") and not isinstance(value, bool):
        raise HandgradError(f"{_flag(name)} must be true or false, not {value!r}")
    if kind.startswith("int") and (not isinstance(value, int) or isinstance(value, bool)):
        raise HandgradError(f"{_flag(name)} must be a whole number, not {value!r}")
    if kind.startswith("float") and not _is_number(value):
        raise HandgradError(f"{_flag(name)} must be a number, not {value!r}")
    if kind.startswith("str") and not isinstance(value, str):
        raise HandgradError(f"{_flag(name)} must be text, not {value!r}")
    if kind == "tuple[str, ...]" and not (isinstance(value, tuple) and all(isinstance(one, str) for one in value)):
        raise HandgradError(f"{_flag(name)} must be text, or a list of texts, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
