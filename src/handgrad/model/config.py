"""`GPTConfig`: the shape of a model, and the presets. Does not import torch."""

from dataclasses import dataclass, fields, replace

from ..checks import check_integer, is_number
from ..errors import HandgradError

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "relu2")


@dataclass(frozen=True)
class GPTConfig:
    """A GPT-2-like network. The defaults are GPT-2 small."""

    n_vocab: int = 50257
    n_context: int = 1024
    d_model: int = 768
    n_heads: int = 12
    n_blocks: int = 12
    d_hidden: int | None = None  # width of the feed-forward layer; default: 4 · d_model
    d_rho: int | None = None  # width of a query and a key, per head; default: d_model / n_heads
    d_head: int | None = None  # width of a value, per head; default: d_model / n_heads
    activation: str = "gelu_tanh"
    eps: float = 1e-5
    tied: bool = True  # the logits layer is the token embedding transposed
    logits_bias: bool = False
    key_bias: bool = True  # b_k has no effect (eq. 19), but GPT-2's files have it
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("n_vocab", "n_context", "d_model", "n_heads", "n_blocks", "d_hidden", "d_rho", "d_head"):
            value = getattr(self, name)
            if value is None and name in ("d_hidden", "d_rho", "d_head"):
                continue
            check_integer(name, value)
        if self.activation not in ACTIVATIONS:
            raise HandgradError(f"unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        if self.d_model < 2:
            raise HandgradError("d_model must be at least 2: a norm over one feature is always 0")
        if not is_number(self.eps) or not 1e-30 <= self.eps < 1:
            raise HandgradError(f"eps must be a number of at least 1e-30 and below 1, not {self.eps!r}")
        for name in ("tied", "logits_bias", "key_bias", "causal"):
            if not isinstance(getattr(self, name), bool):
                raise HandgradError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if (self.d_rho is None or self.d_head is None) and self.d_model % self.n_heads:
            raise HandgradError(
                f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}: choose a number of heads that divides"
                " the width (or, from Python, give the widths per head with d_rho and d_head)"
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
