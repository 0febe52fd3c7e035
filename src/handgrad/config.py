"""Shapes of models, as frozen dataclasses, and the presets. Knows nothing of tensors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import ClassVar

from . import sandbox
from .errors import HandgradError

ACTIVATIONS = ("relu", "gelu", "gelu_tanh")

# The least and the most that a number may be: what a file says is compared with this before anything is computed from it.
_WIDTH = (1, 1 << 24)
_COUNT = (1, 10**12)
LIMITS: dict[str, tuple[float, float]] = {
    "n_vocab": _WIDTH, "n_context": _WIDTH, "d_model": (1, 1 << 20), "n_heads": (1, 1 << 16), "n_blocks": (1, 1000),
    "d_hidden": _WIDTH, "d_rho": _WIDTH, "d_head": _WIDTH,
    "rank": (1, 1 << 16), "alpha": (0, 1e6),
    "steps": _COUNT, "batch_tokens": _COUNT, "batch_examples": _COUNT, "warmup": (0, 10**12), "log_every": _COUNT,
    "eval_every": _COUNT, "eval_batches": _COUNT, "save_every": _COUNT, "patience": _COUNT, "keep": _COUNT,
    "sample_tokens": (0, 10**6), "seed": (0, 2**63 - 1),
    "epochs": (0, 1e9), "minutes": (0, 1e9), "lr": (0, 1e38), "min_lr": (0, 1e38), "weight_decay": (0, 1e6),
    "clip": (0, 1e38),
}  # fmt: skip
_ABOVE = ("alpha", "epochs", "minutes", "lr")  # these may not be the least itself
PATTERNS = 4096  # in a configuration
PATTERN_LENGTH = 1000


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


def _check_whole(name: str, value: object, called: str | None = None) -> None:
    least, most = LIMITS[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise HandgradError(f"{called or name} must be a whole number of at least {least}, not {value!r}")
    if value > most:
        raise HandgradError(f"{called or name} must be a whole number of at most {most:,}, not {value!r}")


def _check_number(name: str, value: object, called: str) -> None:
    least, most = LIMITS[name]
    above = name in _ABOVE
    if not _is_number(value) or value < least or (above and value == least):  # type: ignore[operator]
        raise HandgradError(f"{called} must be {'a number above' if above else 'at least'} {least}, not {value!r}")
    if value > most:  # type: ignore[operator]
        raise HandgradError(f"{called} must be at most {most:g}, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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
            _check_whole(name, value)
        if self.activation not in ACTIVATIONS:
            raise HandgradError(f"unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        if self.d_model < 2:
            raise HandgradError("d_model must be at least 2: a norm over one feature is always 0")
        if not _is_number(self.eps) or not 1e-30 <= self.eps < 1:
            raise HandgradError(f"eps must be a number of at least 1e-30 and below 1, not {self.eps!r}")
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
        targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        texts = (*self.rank_pattern, *self.alpha_pattern, *targets, *self.modules_to_save)
        if len(texts) > PATTERNS:
            raise HandgradError(f"an adapter may have {PATTERNS:,} names and patterns, not {len(texts):,}")
        for text in texts:
            if not isinstance(text, str) or len(text) > PATTERN_LENGTH:
                raise HandgradError(f"a name or pattern is text of at most {PATTERN_LENGTH:,} characters, not {text!r}")
        prepare_matches((*self.rank_pattern, *self.alpha_pattern), ())
        _check_whole("rank", self.rank, "the rank of an adapter")
        for pattern, rank in self.rank_pattern.items():
            _check_whole("rank", rank, f"the rank for {pattern}")
        for what, alpha in [("alpha", self.alpha), *((f"alpha for {p}", x) for p, x in self.alpha_pattern.items())]:
            if alpha is not None:
                _check_number("alpha", alpha, what)
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
    if _is_plain(pattern):
        begin = len(name) - len(pattern)
        end = name[begin:] if begin == 0 or (begin > 0 and name[begin - 1] == ".") else None
        return end is not None and (end == pattern or all(a in (b, ".") for a, b in zip(pattern, end, strict=True)))
    if (pattern, name) not in _matched:
        prepare_matches([pattern], [name])
    return _matched[pattern, name]


_matched: dict[tuple[str, str], bool] = {}  # regular expressions and names that were compared


def prepare_matches(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Compare all regular expressions with all names at once, for `matches` to know. They can come from a file: a child
    process runs them, and one that takes too long is an error."""
    foreign = [pattern for pattern in dict.fromkeys(patterns) if not _is_plain(pattern)]
    names = list(names)
    if not foreign or (names and all((pattern, name) in _matched for pattern in foreign for name in names)):
        return
    if len(_matched) > 1_000_000:
        _matched.clear()
    for pattern, found in zip(foreign, sandbox.match(foreign, names), strict=True):
        _matched.update({(pattern, name): name in found for name in names})


def _is_plain(pattern: str) -> bool:
    return re.fullmatch(r"[\w.-]*", pattern) is not None


def split_names(given: Iterable[str]) -> tuple[str, ...]:
    """Names given one by one or with commas; a comma inside brackets belongs to a regular expression."""
    names: dict[str, None] = {}
    for text in given:
        depth, start = 0, 0
        for at, sign in enumerate(f"{text},"):
            depth += (sign in "([{") - (sign in ")]}")
            if sign == "," and (depth <= 0 or at == len(text)):
                names[text[start:at].strip()] = None
                start = at + 1
    return tuple(name for name in names if name)


SHAPE = ("n_blocks", "d_model", "n_heads", "n_context", "d_hidden")  # what a run can change of a preset
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
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in LIMITS and value is not None:
                check = _check_whole if isinstance(value, int) and "float" not in str(f.type) else _check_number
                check(f.name, value, _flag(f.name))
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
        for name in ("targets", "modules_to_save"):
            object.__setattr__(self, name, split_names(getattr(self, name)))
        for name, choices in (("loss_on", LOSS_ON), ("too_long", TOO_LONG)):
            if getattr(self, name) not in choices:
                raise HandgradError(f"{_flag(name)} must be {' or '.join(choices)}, not {getattr(self, name)!r}")
        if self.full and self.adapter != LoRAConfig(targets=("all-linear",)):
            raise HandgradError("--full trains all weights: options of the adapter do not go with it")

    @property
    def adapter(self) -> LoRAConfig:
        return LoRAConfig(
            self.rank, self.alpha, self.targets, rslora=self.rslora, dora=self.dora, dropout=self.dropout,
            freeze_down=self.freeze_down, modules_to_save=self.modules_to_save,
        )  # fmt: skip
