"""The fields of LFM2's config.json: which blocks have a short convolution, the width of the feed-forward layer, which
several fields compute, and two other names of fields."""

from typing import Any

from ..checks import check_integer, is_number
from ..errors import HandgradError, shown
from ..families import Family
from ..model.config import ModelConfig


def read_conv_fields(raw: dict[str, Any], config: ModelConfig, family: Family) -> dict[str, Any]:
    """The blocks with a short convolution, and what LFM2's files compute or name in their own way: the width of the
    feed-forward layer and whether the embedding is tied."""
    if not family.has("conv"):
        return {}
    kinds, attention = raw.get("layer_types"), raw.get("full_attn_idxs")
    blocks = range(config.n_blocks)
    if kinds is None:
        attention = list(blocks) if attention is None else attention
        if not isinstance(attention, list) or any(type(i) is not int for i in attention):
            raise HandgradError(f"full_attn_idxs must be a list of blocks, not {shown(attention)}")
        kinds = ["full_attention" if i in attention else "conv" for i in blocks]
    tied = raw.get("tie_embedding")
    if not isinstance(tied, bool | None):
        raise HandgradError(f"tie_embedding must be true or false, not {shown(tied)}")
    width = _feed_forward_width(raw, config.hidden_width, family)
    found = {"conv_blocks": tuple(i for i in blocks if kinds[i] == "conv"), "d_hidden": width}
    return found if tied is None else {**found, "tied": tied}


def _feed_forward_width(raw: dict[str, Any], width: int, family: Family) -> int:
    """Two thirds of the width in the file, times a factor, rounded up to a multiple; or the width itself."""
    adjust, factor, multiple, own = (
        raw.get(name, family.defaults[name])
        for name in ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "block_ff_dim")
    )
    if own is not None:
        check_integer("d_hidden", own, "block_ff_dim")
        width = own
    if not isinstance(adjust, bool):
        raise HandgradError(f"block_auto_adjust_ff_dim must be true or false, not {shown(adjust)}")
    if not adjust:
        return width
    width = int(2 * width / 3)
    if not is_number(factor) or not 0 < factor < 1e6:
        raise HandgradError(f"block_ffn_dim_multiplier must be a number above 0, not {shown(factor)}")
    check_integer("d_hidden", multiple, "block_multiple_of")
    adjusted: int = multiple * -(-int(factor * width) // multiple)
    return adjusted


def conv_fields(config: ModelConfig) -> dict[str, object]:
    """The same to write. A file beside which this one is written may have had the other names, which come first."""
    return {
        "layer_types": ["conv" if i in config.conv_blocks else "full_attention" for i in range(config.n_blocks)],
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": config.hidden_width,
        "tie_embedding": config.tied,
    }
