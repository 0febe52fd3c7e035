"""Shapes of models, as frozen dataclasses, and the presets. Knows nothing of tensors."""

from dataclasses import dataclass, fields, replace
from math import isfinite

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


SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on. What is None is decided by the model and the data, and written down resolved."""

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
    log_every: int = 10
    eval_every: int = 250
    eval_batches: int = 32
    save_every: int = 250
    keep: int = 2
    sample_tokens: int = 160
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            _check_type(field.name, kind, getattr(self, field.name))
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
                 "save_every": 1, "keep": 1, "sample_tokens": 0, "seed": 0}  # fmt: skip
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


def _check_type(name: str, kind: str, value: object) -> None:
    """What comes from a file can be anything."""
    if value is None and "None" in kind:
        return
    if kind.startswith("bool") and not isinstance(value, bool):
        raise HandgradError(f"{_flag(name)} must be true or false, not {value!r}")
    if kind.startswith("int") and (not isinstance(value, int) or isinstance(value, bool)):
        raise HandgradError(f"{_flag(name)} must be a whole number, not {value!r}")
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if kind.startswith("float") and not numeric:
        raise HandgradError(f"{_flag(name)} must be a number, not {value!r}")
    if kind.startswith("str") and not isinstance(value, str):
        raise HandgradError(f"{_flag(name)} must be text, not {value!r}")
    if name == "data" and not (isinstance(value, tuple) and all(isinstance(source, str) for source in value)):
        raise HandgradError(f"--data must name files, folders or patterns, not {value!r}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
