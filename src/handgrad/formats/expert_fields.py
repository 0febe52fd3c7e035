"""The fields of config.json about mixtures of experts that are not one field of `ModelConfig` each."""

from typing import Any

from ..checks import check_integer, is_number
from ..errors import HandgradError, shown
from ..families import Family
from ..families.mixtral import ROUTER_LOSS
from ..model.config import ModelConfig


def read_experts(raw: dict[str, Any], config: ModelConfig, family: Family) -> dict[str, Any]:
    """The blocks without experts, and the width of what all tokens share."""
    found: dict[str, Any] = {}

    def integer(field: str) -> int:
        value = raw.get(field, family.defaults[field])
        check_integer(field, value)
        return int(value)

    if "decoder_sparse_step" in family.defaults:
        step, listed = integer("decoder_sparse_step"), raw.get("mlp_only_layers") or []
        if not isinstance(listed, list) or any(type(i) is not int for i in listed):
            raise HandgradError(f"mlp_only_layers must be a list of blocks, not {shown(listed)}")
        found["dense"] = tuple(i for i in range(config.n_blocks) if i in listed or (i + 1) % step)
    if "first_k_dense_replace" in family.defaults:
        found["dense"] = tuple(range(min(integer("first_k_dense_replace"), config.n_blocks)))
    if "n_shared_experts" in family.defaults:
        found["d_shared"] = integer("n_shared_experts") * config.expert_width or None
    if "output_router_logits" in family.defaults:
        wanted, weight = (raw.get(field, family.defaults[field]) for field in ROUTER_LOSS)
        if not isinstance(wanted, bool) or not is_number(weight) or weight < 0:
            raise HandgradError(
                "output_router_logits must be true or false and router_aux_loss_coef a number of at least 0, not"
                f" {shown(wanted)} and {shown(weight)}"
            )
        found["balance_loss"] = float(weight) if wanted else 0.0
    return found


def expert_fields(config: ModelConfig) -> dict[str, object]:
    """The same fields, as far as the family has them; `own` writes what it cannot express."""
    defaults, written = config.table.defaults, dict[str, object]()
    if "decoder_sparse_step" in defaults:
        written |= {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense)}
    if "first_k_dense_replace" in defaults:
        written["first_k_dense_replace"] = len(config.dense)
    if "n_shared_experts" in defaults:
        written["n_shared_experts"] = (config.d_shared or 0) // config.expert_width
    if "output_router_logits" in defaults:
        wanted, weight = ROUTER_LOSS
        written |= {wanted: config.balance_loss > 0}
        if config.balance_loss:  # without it, a coefficient has no effect: one that the file had stays
            written[weight] = config.balance_loss
    return written


def told_by_experts(config: ModelConfig) -> set[str]:
    """The choices that these fields express."""
    defaults, told = config.table.defaults, set[str]()
    first = config.dense == tuple(range(len(config.dense)))
    if "decoder_sparse_step" in defaults or ("first_k_dense_replace" in defaults and first):
        told.add("dense")
    if "n_shared_experts" in defaults and (config.d_shared or 0) % config.expert_width == 0:
        told.add("d_shared")
    if "output_router_logits" in defaults:
        told.add("balance_loss")
    return told
