"""`ModelConfig`: the shape of a model and its choices, each independent of the others, and the presets. Does not import
torch."""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ..checks import check_integer, check_number, is_number
from ..errors import HandgradError, option
from ..families import FAMILIES, Family
from ..ops.rope_scaling import ROPE_TYPES, UNSCALED, Scaling
from ..ops.routing import ROUTERS

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "relu2")
GATES = ("silu", "gelu", "gelu_tanh")
CLAMPED = "clamped"  # the gate of gpt-oss
NORMS = ("layer", "rms")
POSITIONS = ("learned", "rotary")
MOST_EXPERTS = 1 << 16  # in all blocks together: each is several layers, whose names are compared with those of files
_OPTIONAL = (
    "d_hidden", "d_rho", "d_head", "n_kv_heads", "window", "rotary_width", "n_experts", "experts_per_token", "d_expert",
    "d_shared",
)  # fmt: skip
_SCALES = ("embedding_scale", "residual_scale", "logit_scale", "logit_cap", "attention_scale", "score_cap")
_SWITCHES = (
    "tied", "logits_bias", "key_bias", "causal", "gated", "qkv_bias", "out_bias", "mlp_bias", "norm_bias", "qk_norm",
    "qk_norm_joint", "rotary_neighbors", "parallel", "sinks", "qkv_by_head", "normalized_gates",
    "conv_bias",
)  # fmt: skip


class RotaryTable(NamedTuple):
    """Frequencies of rotary positions."""

    base: float
    scaling: Scaling


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
    qkv_by_head: bool = False  # of a layer with q, k and v: the columns of each head are side by side
    out_bias: bool = True  # of w_3
    mlp_bias: bool = True
    norm_bias: bool = True  # of LayerNorm
    gain_offset: float = 0.0  # 1: norms multiply by 1 + weight
    qk_norm: bool = False  # RMSNorm of every head's queries and keys, before the rotation
    qk_norm_joint: bool = False  # of all heads together instead of each
    parallel: bool = False  # a_10 = a_1 + a_4 + a_9: attention and feed-forward read one tensor
    embedding_scale: float = 1.0  # of a token's embedding
    residual_scale: float = 1.0  # of what a branch adds to the stream
    logit_scale: float = 1.0
    logit_cap: float | None = None  # c: logits become c tanh(logits / c)
    rope_base: float = 10000.0
    rope_scaling: Scaling = UNSCALED
    local_rope_base: float | None = None  # of blocks with a window, whose frequencies are not scaled; default: as all
    rotary_width: int | None = None  # features of a head that are rotated; default: all
    rotary_neighbors: bool = False  # planes are the features 2i and 2i + 1, not i and i + half the width
    unrotated: tuple[int, ...] = ()  # blocks whose queries and keys are not rotated
    window: int | None = None  # keys that a query sees, itself included; default: all before it
    windowed: tuple[int, ...] | None = None  # blocks to which `window` applies; default: all
    conv_blocks: tuple[int, ...] = ()  # blocks with a short convolution in place of attention
    conv_taps: int = 3  # tokens that it reads, its own included
    conv_bias: bool = False  # of its taps and its two matrices
    attention_scale: float | None = None  # of q kᵗ; default: 1/√d_ρ
    score_cap: float | None = None  # c: scores s become c tanh(s/c); default: no cap
    sinks: bool = False  # every head has a learned score without a key in its softmax

    n_experts: int | None = None  # feed-forward layers of a mixture, of which a token uses some; default: no mixture
    experts_per_token: int | None = None
    d_expert: int | None = None  # width of an expert; default: d_hidden
    router: str = "softmax"  # scores → gates: "softmax", "softmax of chosen" or "sigmoid", as `ops/experts.py` says
    normalized_gates: bool = True  # whether the gates of a token are divided by their sum
    gate_scale: float = 1.0  # that the gates of "sigmoid" are multiplied by
    expert_groups: int = 1  # that the experts are divided into; a token chooses from the best `groups_per_token`
    groups_per_token: int = 1
    d_shared: int | None = None  # width of an expert that all tokens go through; default: none
    dense: tuple[int, ...] = ()  # blocks with a feed-forward layer of width d_hidden instead of a mixture
    balance_loss: float = 0.0  # coefficient of the routers' balance loss in training; 0: without it
    z_loss: float = 0.0  # coefficient of the routers' z-loss in training

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
        for name in _SWITCHES:
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
        self._check_scales()
        if self.positions == "rotary":
            self._check_rotary()
        self._check_conv()
        if self.window is not None and not self.causal:
            raise HandgradError("a window needs a causal model (causal=True)")
        if self.windowed is not None and self.window is None:
            raise HandgradError("windowed lists the blocks with a window: give window as well")
        self._check_experts()
        for name in ("unrotated", "windowed", "dense", "conv_blocks"):
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

    def _check_scales(self) -> None:
        for name in _SCALES:
            x, optional = getattr(self, name), name in ("logit_cap", "attention_scale", "score_cap")
            if not (optional and x is None) and not (is_number(x) and 1e-6 <= x <= 1e6):
                raise HandgradError(
                    f"{name} must be a number from 1e-6 to 1e6, not {x!r}: leave it out for the default"
                )
        if type(self.gain_offset) not in (int, float) or self.gain_offset not in (0, 1):
            raise HandgradError(f"gain_offset must be 0 or 1, not {self.gain_offset!r}")
        if self.qkv_by_head and self.kv_heads != self.n_heads:
            raise HandgradError("qkv_by_head needs as many heads of keys as of queries: leave out n_kv_heads")
        if self.qk_norm_joint and not self.qk_norm:
            raise HandgradError("qk_norm_joint says how queries and keys are normalized: give qk_norm as well")

    def _check_choices(self) -> None:
        activations = (*GATES, CLAMPED) if self.gated else ACTIVATIONS
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
            ("norm_1", self.parallel),
        ):
            if needed and not self.table.has(layer):
                raise HandgradError(f"the family {self.family} has no name for {layer}: choose another family")
        if self.gated != any(self.table.has(x) for x in ("mlp.gate", "mlp.gate_expand", "expert.gate")):
            raise HandgradError(f"gated={self.gated} does not fit the family {self.family}: choose another family")
        if not self.key_bias and (not self.qkv_bias or self.key_bias_matters):
            raise HandgradError(
                "key_bias=False needs query and value biases, learned positions, and no qk_norm, score_cap or sinks: else"
                " b_k has an effect"
            )

    def _check_experts(self) -> None:
        for name in ("balance_loss", "z_loss"):
            value = getattr(self, name)
            check_number(name, value, option(name))
            if value and (self.n_experts is None or self.router == "sigmoid"):
                has = "no experts" if self.n_experts is None else "a router with sigmoids, which a bias balances"
                raise HandgradError(
                    f"{option(name, value)} is a loss of a router with a softmax, and this model has {has}: leave it out"
                )
        if (self.n_experts is None) != (self.experts_per_token is None):
            raise HandgradError("a mixture of experts needs both n_experts and experts_per_token")
        if self.n_experts is None or self.experts_per_token is None:
            if self.d_expert is not None or self.d_shared is not None or self.dense:
                raise HandgradError(
                    "d_expert, d_shared and dense belong to a mixture of experts: give n_experts as well"
                )
            if not (self.table.has("mlp.contract")):
                raise HandgradError(f"the family {self.family} has experts only: give n_experts and experts_per_token")
            return
        if self.n_blocks * self.n_experts > MOST_EXPERTS:
            raise HandgradError(
                f"n_blocks={self.n_blocks} with n_experts={self.n_experts} are {self.n_blocks * self.n_experts:,} experts;"
                f" the most that a model may have is {MOST_EXPERTS:,}"
            )
        for layer, needed in (
            ("mlp.experts", True),
            ("mlp.shared", self.d_shared is not None),
            ("mlp.contract", self.dense),
        ):
            if needed and not self.table.has(layer):
                raise HandgradError(f"the family {self.family} has no name for {layer}: choose another family")
        if self.router not in ROUTERS:
            raise HandgradError(f"unknown router {self.router!r}; choose one of {', '.join(ROUTERS)}")
        if not is_number(self.gate_scale) or not self.gate_scale > 0:
            raise HandgradError(f"gate_scale must be a number above 0, not {self.gate_scale!r}")
        groups, kept = self.expert_groups, self.groups_per_token
        for name, value in (("expert_groups", groups), ("groups_per_token", kept)):
            check_integer(name, value)
        size = self.n_experts // groups
        if self.n_experts % groups or kept > groups or (groups > 1 and (size < 2 or self.router != "sigmoid")):
            raise HandgradError(
                f"{self.n_experts} experts in {groups} groups, {kept} for a token: groups are of a sigmoid router, equally"
                " large, and have at least 2 experts"
            )
        if self.experts_per_token > size * kept:
            raise HandgradError(
                f"experts_per_token={self.experts_per_token} is more than the {size * kept} experts to choose from"
            )

    def _check_rotary(self) -> None:
        if self.query_width % 2:
            raise HandgradError(
                f"rotary positions turn pairs of features: the width of a head must be even, not {self.query_width}"
            )
        if not is_number(self.rope_base) or not self.rope_base > 1:
            raise HandgradError(f"rope_base must be a number above 1, not {self.rope_base!r}")
        if self.local_rope_base is not None and not (is_number(self.local_rope_base) and self.local_rope_base > 1):
            raise HandgradError(f"local_rope_base must be a number above 1, not {self.local_rope_base!r}")
        if self.rotary_width_of_head % 2 or self.rotary_width_of_head > self.query_width:
            raise HandgradError(
                f"rotary_width must be even and at most the width of a head, {self.query_width}, not {self.rotary_width}"
            )
        scaling = self.rope_scaling
        if not isinstance(scaling, Scaling) or scaling.rope_type not in ROPE_TYPES:
            raise HandgradError(f"rope_scaling must be a Scaling of the type {', '.join(ROPE_TYPES)}, not {scaling!r}")
        if scaling.rope_type not in ("default", *self.table.rope_types):
            raise HandgradError(f"rope_scaling of the type {scaling.rope_type} is not defined for {self.family}")
        for name, value in scaling._asdict().items():
            if name in ("rope_type", "truncate") or (value is None and name not in ("factor", "low_freq_factor")):
                continue
            if name in ("short_factor", "long_factor"):
                self._check_factors(name, value)
                continue
            if not is_number(value) or not value > 0:
                raise HandgradError(f"{name} of rope_scaling must be a number above 0, not {value!r}")
        if scaling.rope_type == "longrope" and None in (scaling.short_factor, scaling.long_factor):
            raise HandgradError("rope_scaling of the type longrope needs short_factor and long_factor")
        if scaling.rope_type in ("llama3", "yarn", "longrope") and scaling.original_max_position_embeddings is None:
            raise HandgradError(f"rope_scaling of the type {scaling.rope_type} needs original_max_position_embeddings")
        if scaling.rope_type == "llama3" and not scaling.high_freq_factor > scaling.low_freq_factor:
            raise HandgradError("rope_scaling: high_freq_factor must be larger than low_freq_factor")
        if not isinstance(scaling.truncate, bool):
            raise HandgradError(f"truncate of rope_scaling must be true or false, not {scaling.truncate!r}")

    def _check_factors(self, name: str, factors: Any) -> None:
        planes = self.rotary_width_of_head // 2
        if not isinstance(factors, tuple) or len(factors) != planes or not all(is_number(x) and x > 0 for x in factors):
            raise HandgradError(
                f"{name} of rope_scaling must be {planes} numbers above 0, one for each plane of a head"
            )

    @property
    def table(self) -> Family:
        """The names and fields of the family."""
        return FAMILIES[self.family]

    @property
    def hidden_width(self) -> int:
        return 4 * self.d_model if self.d_hidden is None else self.d_hidden

    @property
    def expert_width(self) -> int:
        return self.hidden_width if self.d_expert is None else self.d_expert

    def sparse_block(self, i: int) -> bool:
        """Whether block i has a mixture of experts."""
        return self.n_experts is not None and i not in self.dense

    @property
    def router_losses(self) -> bool:
        """Whether training adds losses of the routers."""
        return bool(self.balance_loss or self.z_loss) and any(map(self.sparse_block, range(self.n_blocks)))

    def leaves_rows_out(self, i: int) -> bool:
        """Whether block i, if it is the last, computes only some rows after the keys and values: not if parallel branches
        read one tensor, or if the losses of its router are of all rows."""
        return not self.parallel and not (self.router_losses and self.sparse_block(i))

    @property
    def key_bias_matters(self) -> bool:
        """Whether b_k has an effect. It adds the same to all scores of a query, which a softmax ignores (19), unless they
        are capped or stand beside a sink's, or keys are rotated or normalized."""
        return self.positions == "rotary" or self.qk_norm or self.score_cap is not None or self.sinks

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

    @property
    def rotary_width_of_head(self) -> int:
        """Features of a head that are rotated."""
        return self.query_width if self.rotary_width is None else self.rotary_width

    def rotary_tables(self) -> tuple[RotaryTable, ...]:
        """The frequencies of the model, and those of blocks with a window if they have their own."""
        if self.positions != "rotary":
            return ()
        local = () if self.local_rope_base is None else (RotaryTable(self.local_rope_base, UNSCALED),)
        return RotaryTable(self.rope_base, self.rope_scaling), *local

    def rotary_table_of(self, i: int) -> int:
        """Which of them block i has."""
        return int(self.local_rope_base is not None and self.window_of(i) is not None)

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
