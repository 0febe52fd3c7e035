"""`LoRAConfig`: rank, scale and target layers of an adapter. Does not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..checks import check_integer, check_number, is_number
from ..errors import HandgradError
from .patterns import matches, prepare_matches

BIASES = ("none", "all", "lora_only")
MAX_PATTERNS, MAX_PATTERN_LENGTH = 4096, 1000  # in a configuration, which may come from a file


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters for some of a model's linear layers."""

    rank: int = 16
    alpha: float | None = None  # default: the rank, so that the scale is 1
    targets: str | tuple[str, ...] = "all-linear"  # names, ends of names or regular expressions
    rank_pattern: dict[str, int] = field(default_factory=dict)  # ranks of layers whose name, or its end, matches
    alpha_pattern: dict[str, float] = field(default_factory=dict)  # alphas likewise
    rslora: bool = False  # scale alpha/√rank instead of alpha/rank
    dora: bool = False  # train a magnitude per output
    dropout: float = 0.0  # of the adapter's input, while training
    freeze_down: bool = False  # LoRA-FA: train only the up factor
    modules_to_save: tuple[str, ...] = ()  # layers trained in full and saved with the adapter
    bias: str = "none"  # biases that train: "all" of the model, or "lora_only" those of layers with adapters

    def __post_init__(self) -> None:
        targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        texts = (*self.rank_pattern, *self.alpha_pattern, *targets, *self.modules_to_save)
        if len(texts) > MAX_PATTERNS:
            raise HandgradError(f"an adapter may have at most {MAX_PATTERNS:,} names and patterns, not {len(texts):,}")
        for text in texts:
            if not isinstance(text, str) or len(text) > MAX_PATTERN_LENGTH:
                raise HandgradError(
                    f"a name or pattern must be a string of at most {MAX_PATTERN_LENGTH:,} characters, not {text!r}"
                )
        prepare_matches((*self.rank_pattern, *self.alpha_pattern), ())
        check_integer("rank", self.rank, "the rank of an adapter")
        for pattern, rank in self.rank_pattern.items():
            check_integer("rank", rank, f"the rank for {pattern}")
        for what, alpha in [("alpha", self.alpha), *((f"alpha for {p}", x) for p, x in self.alpha_pattern.items())]:
            if alpha is not None:
                check_number("alpha", alpha, what)
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise HandgradError(f"the dropout of an adapter must be at least 0 and below 1, not {self.dropout!r}")

        if self.bias not in BIASES:
            raise HandgradError(f"the biases that train with an adapter are {', '.join(BIASES)}, not {self.bias!r}")

    def rank_of(self, name: str) -> int:
        return self.rank_pattern.get(_pattern_for(name, self.rank_pattern), self.rank)

    def alpha_of(self, name: str) -> float:
        return self.alpha_pattern.get(_pattern_for(name, self.alpha_pattern), self.alpha or self.rank)

    def scale_of(self, name: str) -> float:
        rank = self.rank_of(name)
        return self.alpha_of(name) / (rank**0.5 if self.rslora else rank)


def _pattern_for(name: str, patterns: Iterable[str]) -> str:
    return next((p for p in patterns if matches(p, name)), "")
