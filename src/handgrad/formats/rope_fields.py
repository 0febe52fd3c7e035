"""The fields of config.json for rotary positions, as transformers 5 writes them (rope_parameters) and as older files do."""

import math
from typing import Any

from ..checks import is_number
from ..errors import HandgradError, shown
from ..families import Family
from ..model.config import ModelConfig
from ..ops.rope_scaling import ROPE_TYPES, UNSCALED, Scaling

_NEEDED = {
    "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"), "dynamic": ("factor",),
}  # fmt: skip
LOCAL = "sliding_attention"  # whose frequencies are apart


def read_rope(raw: dict[str, Any], config: ModelConfig, family: Family) -> dict[str, Any]:
    """The rotary fields, as transformers 5 writes them (rope_parameters) or as older files have them."""
    given = (
        raw.get("rope_scaling") or raw.get("rope_parameters") or family.defaults.get("rope_parameters") or {}
    )  # transformers' own order
    if not isinstance(given, dict):
        raise HandgradError(f"rope_scaling must be an object, not {shown(given)}")
    raw = _top_level(raw, family)
    found: dict[str, Any] = {}
    if family.local_rope:
        _check_local(raw, given, family)
        local, given = given.get(LOCAL) or {}, given.get("full_attention", {} if LOCAL in given else given) or {}
        apart = "rope_local_base_freq" in family.defaults  # else both have rope_theta
        theirs = {**raw, "rope_theta": raw.get("rope_local_base_freq")} if apart else raw
        base, scaling, _ = _table(local, theirs, config, family, apart)
        if scaling != UNSCALED:
            raise HandgradError(f"rope_type {scaling.rope_type} of blocks with a window is not supported")
        found["local_rope_base"] = base
    base, scaling, share = _table(given, raw, config, family)
    if share is not None and share != 1:
        found["rotary_width"] = int(config.query_width * share)
    return {**found, "rope_base": base, "rope_scaling": scaling}


def _top_level(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """The fields under their common names; raises where a family has its own, and a common one says something else."""
    raw = dict(raw)
    for common, own in family.rope_names.items():
        default = family.rotary_share if common == "partial_rotary_factor" else 10000.0
        value = raw.get(own, default)
        if raw.get(common, value) not in (value, 1.0):  # 1.0 changes nothing in other families, and is in some files
            raise HandgradError(
                f"{common} is {shown(raw[common])}, which transformers ignores in this family: give it as {own}, which is"
                f" {shown(value)}"
            )
        raw[common] = value
    return raw


def _check_local(raw: dict[str, Any], given: dict[str, Any], family: Family) -> None:
    """Raise for what transformers reads otherwise, or ignores, in families with frequencies of blocks with a window."""
    nested = [x for x in (given.get(LOCAL), given.get("full_attention")) if isinstance(x, dict)]
    if given and not nested and not raw.get("rope_scaling"):
        raise HandgradError(f"rope_parameters must hold full_attention and {LOCAL} in this family")
    for table in nested or [given]:
        if "type" in table and "rope_type" not in table:
            raise HandgradError(
                f"the type of rope_scaling is {shown(table['type'])}: this family's files call it rope_type"
            )
    base, default = raw.get("rope_theta"), family.defaults.get("rope_theta")
    if not nested and "rope_local_base_freq" not in family.defaults and base not in (None, default):
        raise HandgradError(
            f"rope_theta is {shown(base)}, which transformers applies to some blocks only: give rope_parameters, with"
            f" full_attention and {LOCAL}"
        )


def _table(
    given: dict[str, Any], raw: dict[str, Any], config: ModelConfig, family: Family, local: bool = False
) -> tuple[Any, Scaling, float | None]:
    """The base and the scaling of frequencies, and the share of a head that is rotated if the family has one."""
    if not isinstance(given, dict):
        raise HandgradError(f"rope_parameters must be an object, not {shown(given)}")
    given, defaults = dict(given), family.defaults
    base = given.pop("rope_theta", None)
    base = raw.get("rope_theta") if base is None else base
    base = defaults.get("rope_local_base_freq" if local else "rope_theta", 10000.0) if base is None else base
    share = family.rotary_share
    if share is not None:
        share = given.pop("partial_rotary_factor", raw.get("partial_rotary_factor", share))
        if not is_number(share) or not 0 < share <= 1:
            raise HandgradError(f"partial_rotary_factor must be a number above 0 and at most 1, not {shown(share)}")
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_TYPES:
        raise HandgradError(f"rope_type {shown(kind)} is not supported; choose one of {', '.join(ROPE_TYPES)}")
    unknown = [field for field in given if field not in Scaling._fields]
    for field in unknown:
        neutral = 1.0 if field == "partial_rotary_factor" else None
        if given[field] != neutral:
            raise HandgradError(f"{field}={shown(given[field])} in rope_scaling is not supported")
    if kind == "default":
        return base, UNSCALED, share
    known = {field: given[field] for field in given if field in Scaling._fields}
    for field in _NEEDED[kind]:
        # transformers computes a factor of yarn that is null, and refuses one that is missing
        if known.get(field) is None and not (kind == "yarn" and field in known):
            raise HandgradError(f"rope_scaling of the type {kind} needs {field}")
    if kind == "longrope":
        known |= {name: _factors(name, known[name]) for name in ("short_factor", "long_factor")}
        known |= {"original_max_position_embeddings": x} if (x := raw.get("original_max_position_embeddings")) else {}
    return base, _checked(Scaling(kind, **known), config, known.get("factor") is not None), share


def _factors(name: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, list) or not all(is_number(x) and x > 0 for x in given):
        raise HandgradError(f"{name} in rope_scaling must be a list of numbers above 0, not {shown(given)}")
    return tuple(float(x) for x in given)


def _checked(scaling: Scaling, config: ModelConfig, given_factor: bool) -> Scaling:
    """Fill in what transformers computes from other fields, and check the values."""
    if scaling.rope_type in ("llama3", "yarn", "longrope") and scaling.original_max_position_embeddings is None:
        scaling = scaling._replace(original_max_position_embeddings=config.n_context)
    context = scaling.original_max_position_embeddings
    if not given_factor and is_number(context) and context:
        scaling = scaling._replace(factor=config.n_context / context)
    for field, value in scaling._asdict().items():
        if (
            field not in ("rope_type", "truncate", "short_factor", "long_factor")
            and value is not None
            and not (is_number(value) and value > 0)
        ):
            raise HandgradError(f"{field} in rope_scaling must be a number above 0, not {shown(value)}")
    return scaling


def rope_fields(config: ModelConfig) -> dict[str, object]:
    """Rotary positions in the form that old and new versions of transformers read, or new ones alone where the old form
    cannot say it."""
    scaling, family = config.rope_scaling, config.table
    given = {name: x for name, x in scaling._asdict().items() if x != UNSCALED._asdict()[name] or name == "factor"}
    if scaling.rope_type == "llama3":
        given |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    given = {name: list(x) if isinstance(x, tuple) else x for name, x in given.items()}
    plain = scaling.rope_type == "default"
    if family.rotary_share is None and not family.local_rope and "rope_parameters" not in family.defaults:
        return {"rope_theta": config.rope_base, "rope_scaling": None if plain else given}
    table: dict[str, object] = {"rope_theta": config.rope_base, **({"rope_type": "default"} if plain else given)}
    more = {} if plain or scaling.rope_type != "longrope" else {"original_max_position_embeddings": scaling[2]}
    if family.rotary_share is not None:
        share = config.rotary_width_of_head / config.query_width
        exact = int(config.query_width * share) == config.rotary_width_of_head  # what readers make of it
        table["partial_rotary_factor"] = share if exact else math.nextafter(share, 1)
    if not family.local_rope:
        return {"rope_parameters": table, **more}
    local = {"rope_theta": config.local_rope_base or config.rope_base, "rope_type": "default"}
    return {"rope_parameters": {"full_attention": table, LOCAL: local}, **more}
