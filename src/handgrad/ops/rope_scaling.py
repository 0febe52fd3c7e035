"""How rotary frequencies are changed for a longer context, under Hugging Face's names. Does not import torch."""

from typing import NamedTuple

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class Scaling(NamedTuple):
    """The fields of Hugging Face's `rope_parameters`."""

    rope_type: str = "default"
    factor: float = 1.0  # of the context; all types but default
    original_max_position_embeddings: int | None = None  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float | None = None  # yarn, 32 if None
    beta_slow: float | None = None  # 1 if None
    attention_factor: float | None = None  # m; None: computed from factor
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = (
        None  # longrope: divides each frequency in sequences of the original context
    )
    long_factor: tuple[float, ...] | None = None  # and in longer ones


UNSCALED = Scaling()
