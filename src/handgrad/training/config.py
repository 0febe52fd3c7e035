"""The options of a run, as given (`TrainOptions`, `FinetuneOptions`), and what was decided where they were left open
(`Recipe`)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, get_origin, get_type_hints

from ..checks import LIMITS, check_choice, check_integer, check_number, check_stored, check_threads, check_type
from ..errors import HandgradError, option
from ..lora.config import LoRAConfig
from ..lora.patterns import split_names

SHAPE = ("n_blocks", "d_model", "n_heads", "n_context", "d_hidden")  # what a run can change of a preset


LENGTH_OPTIONS = f"{option('steps')}, {option('epochs')} or {option('minutes')}"
VALIDATION = f"needs examples to validate on: give {option('val_share')} or {option('val_data')}"


SCHEDULES = ("cosine", "linear", "constant")


LOSS_ON = ("answers", "all")


TOO_LONG = ("cut", "drop")


FORMATS = ("chat", "raw")


@dataclass(frozen=True)
class TrainOptions:
    """Everything a run depends on. What is None is decided by the model and the data, as a `Recipe`."""

    command: ClassVar[str] = "train"
    exports_result: ClassVar[bool] = False  # whether the best checkpoint is copied to a fixed name in the end
    gguf: ClassVar[bool] = False  # whether the adapter is also written as a GGUF file
    example_norms: ClassVar[bool] = False  # whether the norm of every example's gradient is measured
    influence: ClassVar[int] = 0  # validation answers whose training examples are ranked in the end
    share_prefixes: ClassVar[bool] = (
        False  # whether prefixes that sequences of a batch have in common are computed once
    )
    unrecorded: ClassVar[Mapping[str, Any]] = {}  # options that earlier versions did not have, as these computed

    # data and model
    data: tuple[str, ...] = ()  # files, folders, patterns, "-"; none: the default corpus
    text_field: str = "text"  # of .jsonl files
    model: str = "nano"  # a preset or a model directory
    shape: tuple[tuple[str, int], ...] = ()  # changed fields of the preset
    tokenizer: str | None = None
    val_share: float = 0.1
    # length
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    # optimization
    batch_tokens: int | None = None
    lr: float | None = None  # default: 0.5/d_model, at most 4e-3
    min_lr: float | None = None  # default: a tenth of lr
    warmup: int | None = None  # default: 100, at most a tenth of the run
    schedule: str = "cosine"
    optimizer: str = "AdamW"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0  # 0: no clipping
    balance_loss: float | None = None  # coefficients of the losses of a mixture's routers; default: the model's
    z_loss: float | None = None
    update_inside: bool = False
    recompute: str = "none"
    dtype: str = "float32"
    precision: str | None = None  # "float32" or "mixed"; default: that of the dtype
    seed: int = 0
    threads: int | None = None  # default: measured once, and recorded
    follow_load: bool = False  # measure again while training
    # logging and checkpoints
    log_every: int | None = None  # default: 10
    eval_every: int | None = None  # default: 250
    eval_batches: int = 32
    save_every: int | None = None  # default: 250
    patience: int | None = None  # stop after this many evaluations without a lower validation loss
    keep: int = 2
    sample_tokens: int = 160
    tensorboard: bool = False
    peer_timeout: float = 120.0  # seconds to wait for another process of the group

    def __post_init__(self) -> None:
        for f in fields(self):
            check_type(f.name, _name(f.type), getattr(self, f.name))
        for name in ("data", "val_data"):
            if "" in getattr(self, name, ()):
                raise HandgradError(f"{option(name)} is empty: give a file, a folder or a pattern")
        if self.schedule not in SCHEDULES:
            *most, last = SCHEDULES
            raise HandgradError(f"{option('schedule')} must be {', '.join(most)} or {last}, not {self.schedule!r}")
        if self.recompute not in ("none", "blocks"):
            raise HandgradError(f"{option('recompute')} must be none or blocks, not {self.recompute!r}")
        if self.dtype not in ("float32", "float64", "bfloat16"):
            raise HandgradError(f"{option('dtype')} must be float32, float64 or bfloat16, not {self.dtype!r}")
        check_choice(self.precision, self.dtype)
        if not 0 <= self.val_share < 1:
            raise HandgradError(f"{option('val_share')} must be at least 0 and below 1, not {self.val_share}")
        if sum(x is not None for x in (self.steps, self.epochs, self.minutes)) > 1:
            raise HandgradError(f"give one of {LENGTH_OPTIONS}, not several")
        for f in fields(self):
            _check_limits(f.name, f.type, getattr(self, f.name))
        check_threads(self.threads)
        if self.follow_load and self.threads is not None:
            raise HandgradError(f"{option('follow_load', True)} chooses what {option('threads')} decides: give one")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise HandgradError(f"{option(name)} must be at least 0 and below 1, not {getattr(self, name)}")

    @classmethod
    def types(cls) -> dict[str, Any]:
        """Every option by the name that the command line and `hg.train` give it, with its type."""
        return {name: kind for name, kind in get_type_hints(cls).items() if get_origin(kind) is not ClassVar}

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Options by these names; the others have their defaults."""
        return cls(**given)

    def flat(self) -> dict[str, Any]:
        """The reverse of `parse`: what run.json records."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def is_list(hint: object) -> bool:
    """Whether an option of this type takes several values."""
    return hint == tuple[str, ...]


def _check_limits(name: str, kind: Any, value: Any) -> None:
    if name in LIMITS and value is not None:
        check = check_number if "float" in _name(kind) else check_integer
        check(name, value, option(name))


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


DEFAULT_ADAPTER = LoRAConfig(targets=("all-linear",))
ADAPTER_TYPES: dict[str, Any] = {
    "full": bool, "rank": int, "alpha": float | None, "targets": tuple[str, ...], "rslora": bool, "dora": bool,
    "dropout": float, "freeze_down": bool, "modules_to_save": tuple[str, ...],
    "bias": str,
}  # fmt: skip


@dataclass(frozen=True)
class FinetuneOptions(TrainOptions):
    """The options of fine-tuning. The command line and `hg.finetune` name the adapter's options one by one."""

    command: ClassVar[str] = "finetune"
    exports_result: ClassVar[bool] = True
    unrecorded: ClassVar[Mapping[str, Any]] = {"share_prefixes": False}

    # data and model
    model: str = ""  # a model directory, the folder of a run, an adapter, a name on the hub
    val_data: tuple[str, ...] = ()  # validation examples; default: a share of the data
    format: str | None = None  # "chat" or "raw"; default: by the model (text/format.py)
    chat_template: str | None = None  # a file; default: the model's own
    loss_on: str = "answers"  # "answers": completions and assistant turns; "all": prompts as well
    field: tuple[str, ...] = ()  # names of fields in the data: prompt=question
    skip_bad: bool = False  # skip invalid lines
    too_long: str = "cut"  # longer than the context: "cut" the example (texts are split), or "drop" it
    batch_examples: int = 16
    packed: bool = False  # keep the matrices of a GGUF file packed
    base_dtype: str | None = None  # keep the matrices of a directory in two bytes: "bfloat16" or "float16"
    gguf: bool = False  # type: ignore[misc]  # also write the adapter as a GGUF file
    example_norms: bool = False  # type: ignore[misc]  # measure the norm of every example's gradient
    influence: int = 0  # type: ignore[misc]  # validation answers whose training examples are ranked in the end
    share_prefixes: bool = True  # type: ignore[misc]  # compute what examples of a batch begin with in common once
    clock: str | None = None  # time that chat templates see; recorded for resuming
    adapter: LoRAConfig | None = DEFAULT_ADAPTER  # None: train all weights
    # defaults that differ from pre-training
    weight_decay: float = 0.0
    eval_batches: int = 1000
    schedule: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("loss_on", LOSS_ON), ("too_long", TOO_LONG)):
            if getattr(self, name) not in choices:
                raise HandgradError(f"{option(name)} must be {' or '.join(choices)}, not {getattr(self, name)!r}")
        if self.format not in (None, *FORMATS):
            raise HandgradError(f"{option('format')} must be {' or '.join(FORMATS)}, not {self.format!r}")
        check_stored(self.packed, self.base_dtype)
        for name in ("packed", "base_dtype", "gguf"):
            if getattr(self, name) and self.adapter is None:
                does = "writes an adapter" if name == "gguf" else "freezes the weights"
                raise HandgradError(
                    f"{option(name)} {does}, and {option('full', True)} trains all weights: leave one of the two out"
                )

    @classmethod
    def types(cls) -> dict[str, Any]:
        hidden = ("adapter", "text_field", "shape", "tokenizer", "batch_tokens")  # the last four: pre-training only
        return {name: kind for name, kind in super().types().items() if name not in hidden} | ADAPTER_TYPES

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        own = {name: value for name, value in given.items() if name in ADAPTER_TYPES}
        for name, value in own.items():
            check_type(name, _name(ADAPTER_TYPES[name]), value)
            _check_limits(name, ADAPTER_TYPES[name], value)
        full = own.pop("full", False)
        for name in ("targets", "modules_to_save"):
            if name in own:
                own[name] = split_names(own[name])
        adapter = replace(DEFAULT_ADAPTER, **own)
        if full and adapter != DEFAULT_ADAPTER:
            raise HandgradError(f"{option('full', True)} trains all weights: options of the adapter do not go with it")
        others = {name: value for name, value in given.items() if name not in ADAPTER_TYPES}
        return super().parse(others | {"adapter": None if full else adapter})

    def flat(self) -> dict[str, Any]:
        adapter = self.adapter or DEFAULT_ADAPTER
        own = {name: getattr(adapter, name) for name in ADAPTER_TYPES if name != "full"}
        others = {name: value for name, value in super().flat().items() if name in self.types()}
        return others | own | {"full": self.adapter is None}


@dataclass(frozen=True)
class Recipe:
    """What the options left open, decided by the model and the data. Fields have the names of the options."""

    steps: int | None  # None: minutes limit the run
    minutes: float | None
    lr: float
    min_lr: float
    warmup: int
    log_every: int
    eval_every: int
    save_every: int
