"""`ModelConfig`: the shape of a model and its choices, each independent of the others, and the presets. Does not import
torch."""

from dataclasses import dataclass, fields, replace
from typing import Any

from ..checks import check_integer, is_number
from ..errors import HandgradError, option
from ..families import FAMILIES, Family
from ..ops.rope_scaling import ROPE_TYPES, UNSCALED, Scaling

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "relu2")
GATES = ("silu", "gelu", "gelu_tanh")
NORMS = ("layer", "rms")
POSITIONS = ("learned", "rotary")
_OPTIONAL = ("d_hidden", "d_rho", "d_head", "n_kv_heads", "window")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. The defaults are GPT-2 small."""

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

    family: str = "gpt2"  # whose names the parameters have
    norm: str = "layer"  # "layer": LayerNorm; "rms": RMSNorm
    positions: str = "learned"  # "learned": a table added to the embeddings; "rotary": queries and keys are rotated
    gated: bool = False  # a_8 = g(gate) ∘ up instead of g(a_7)
    n_kv_heads: int | None = None  # heads of keys and values, each shared by a group of queries; default: n_heads
    qkv_bias: bool = True
    out_bias: bool = True  # of w_3
    mlp_bias: bool = True
    qk_norm: bool = False  # RMSNorm of every head's queries and keys, before the rotation
    rope_base: float = 10000.0
    rope_scaling: Scaling = UNSCALED
    unrotated: tuple[int, ...] = ()  # blocks whose queries and keys are not rotated
    window: int | None = None  # keys that a query sees, itself included; default: all before it
    windowed: tuple[int, ...] | None = None  # blocks to which `window` applies; default: all
    conv_blocks: tuple[int, ...] = ()  # blocks with a short convolution in place of attention
    conv_taps: int = 3  # tokens that it reads, its own included
    conv_bias: bool = False  # of its taps and its two matrices

    def __post_init__(self) -> None:
        for name in ("n_vocab", "n_context", "d_model", "n_heads", "n_blocks", *_OPTIONAL):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            check_integer(name, value)
        if not isinstance(self.family, str) or self.family not in FAMILIES:
            raise HandgradError(f"unknown family {self.family!r}; choose one of {', '.join(FAMILIES)}")
        self._check_choices()
        if self.d_model < 2:
            raise HandgradError(f"{option('d_model')} must be at least 2: a norm over one feature is always 0")
        if not is_number(self.eps) or not 1e-30 <= self.eps < 1:
            raise HandgradError(f"eps must be a number of at least 1e-30 and below 1, not {self.eps!r}")
        for name in (
            "tied", "logits_bias", "key_bias", "causal", "gated", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "conv_bias",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise HandgradError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if (self.d_rho is None or self.d_head is None) and self.d_model % self.n_heads:
            raise HandgradError(
                f"{option('d_model', self.d_model)} is not divisible by {option('n_heads', self.n_heads)}: choose a number"
                " of heads that divides the width (or, from Python, give the widths per head with d_rho and d_head)"
            )
        if self.n_heads % self.kv_heads:
            raise HandgradError(
                f"n_kv_heads={self.n_kv_heads} does not divide {option('n_heads', self.n_heads)}: every key/value"
                " head serves a group of equally many query heads"
            )
        if self.positions == "rotary":
            self._check_rotary()
        self._check_conv()
        if self.window is not None and not self.causal:
            raise HandgradError("a window needs a causal model (causal=True)")
        if self.windowed is not None and self.window is None:
            raise HandgradError("windowed lists the blocks with a window: give window as well")
        for name in ("unrotated", "windowed", "conv_blocks"):
            blocks = getattr(self, name)
            if blocks is None and name == "windowed":
                continue
            if not isinstance(blocks, tuple) or any(type(i) is not int or not 0 <= i < self.n_blocks for i in blocks):
                raise HandgradError(f"{name} must be a tuple of blocks from 0 to {self.n_blocks - 1}, not {blocks!r}")

    def _check_conv(self) -> None:
        check_integer("conv_taps", self.conv_taps)
        if self.conv_blocks and not self.table.has("conv"):
            raise HandgradError(f"the family {self.family} has no name for conv: choose another family")
        if self.conv_blocks and not self.causal:
            raise HandgradError("a short convolution reads earlier tokens only: it needs a causal model (causal=True)")

    def _check_choices(self) -> None:
        activations = GATES if self.gated else ACTIVATIONS
        for name, value, known in (
            ("activation", self.activation, activations),
            ("norm", self.norm, NORMS),
            ("positions", self.positions, POSITIONS),
        ):
            if value not in known:
                raise HandgradError(f"unknown {name} {value!r}; choose one of {', '.join(known)}")
        for layer, needed in (
            ("positions", self.positions == "learned"),
            ("attn.q_norm", self.qk_norm),
        ):
            if needed and not self.table.has(layer):
                raise HandgradError(f"the family {self.family} has no name for {layer}: choose another family")
        if self.gated != (self.table.has("mlp.gate") or self.table.has("mlp.gate_expand")):
            raise HandgradError(f"gated={self.gated} does not fit the family {self.family}: choose another family")
        if not self.key_bias and not (self.qkv_bias and self.positions == "learned" and not self.qk_norm):
            raise HandgradError(
                "key_bias=False needs query and value biases, learned positions and no qk_norm: else b_k has an effect"
            )

    def _check_rotary(self) -> None:
        if self.query_width % 2:
            raise HandgradError(
                f"rotary positions turn pairs of features: the width of a head must be even, not {self.query_width}"
            )
        if not is_number(self.rope_base) or not self.rope_base > 1:
            raise HandgradError(f"rope_base must be a number above 1, not {self.rope_base!r}")
        scaling = self.rope_scaling
        if not isinstance(scaling, Scaling) or scaling.rope_type not in ROPE_TYPES:
            raise HandgradError(f"rope_scaling must be a Scaling of the type {', '.join(ROPE_TYPES)}, not {scaling!r}")
        if scaling.rope_type != "default" and not self.table.scaled:
            raise HandgradError(f"rope_scaling of the type {scaling.rope_type} is not defined for {self.family}")
        for name, value in scaling._asdict().items():
            if name in ("rope_type", "truncate") or (value is None and name not in ("factor", "low_freq_factor")):
                continue
            if not is_number(value) or not value > 0:
                raise HandgradError(f"{name} of rope_scaling must be a number above 0, not {value!r}")
        if scaling.rope_type in ("llama3", "yarn") and scaling.original_max_position_embeddings is None:
            raise HandgradError(f"rope_scaling of the type {scaling.rope_type} needs original_max_position_embeddings")
        if scaling.rope_type == "llama3" and not scaling.high_freq_factor > scaling.low_freq_factor:
            raise HandgradError("rope_scaling: high_freq_factor must be larger than low_freq_factor")
        if not isinstance(scaling.truncate, bool):
            raise HandgradError(f"truncate of rope_scaling must be true or false, not {scaling.truncate!r}")

    @property
    def table(self) -> Family:
        """The names and fields of the family."""
        return FAMILIES[self.family]

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

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def qkv_widths(self) -> dict[str, int]:
        """Columns of w_q, w_k and w_v, all heads together."""
        keys, values = self.kv_heads * self.query_width, self.kv_heads * self.value_width
        return {"q": self.n_heads * self.query_width, "k": keys, "v": values}

    def rotated_block(self, i: int) -> bool:
        """Whether block i rotates its queries and keys."""
        return self.positions == "rotary" and i not in self.unrotated

    def window_of(self, i: int) -> int | None:
        """The window of block i."""
        return self.window if self.windowed is None or i in self.windowed else None


def _llama(**shape: Any) -> ModelConfig:
    plain = {"qkv_bias": False, "out_bias": False, "mlp_bias": False, "activation": "silu"}
    return ModelConfig(family="llama", **FAMILIES["llama"].fixed, **{**plain, **shape})


PRESETS = {
    # the network whose parameters Section 7 and Table 3 count
    "paper": ModelConfig(n_blocks=1, tied=False, logits_bias=True),
    "gpt2": ModelConfig(),
    "gpt2-medium": ModelConfig(d_model=1024, n_heads=16, n_blocks=24),
    "gpt2-large": ModelConfig(d_model=1280, n_heads=20, n_blocks=36),
    "gpt2-xl": ModelConfig(d_model=1600, n_heads=25, n_blocks=48),
    # characters or bytes; small enough to train in about a minute on a laptop
    "nano": ModelConfig(n_vocab=256, n_context=64, d_model=128, n_heads=4, n_blocks=4),
    # the same size with today's layers
    "nano-llama": _llama(
        n_vocab=256, n_context=64, d_model=128, n_heads=4, n_kv_heads=2, n_blocks=4, d_hidden=344
    ),
    "smollm2-shape": _llama(
        n_vocab=49152, n_context=8192, d_model=576, n_heads=9, n_kv_heads=3, n_blocks=30, d_hidden=1536,
        rope_base=100000.0,
    ),
    "tinyllama-shape": _llama(
        n_vocab=32000, n_context=2048, d_model=2048, n_heads=32, n_kv_heads=4, n_blocks=22, d_hidden=5632, tied=False
    ),
}  # fmt: skip


def preset(name: str, **changes: object) -> ModelConfig:
    """A preset by name, with single fields changed: preset("nano", n_blocks=2)."""
    if name not in PRESETS:
        raise HandgradError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    known = {f.name for f in fields(ModelConfig)}
    for change in changes:
        if change not in known:
            raise HandgradError(f"a model has no {change!r}; it has {', '.join(sorted(known))}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]
