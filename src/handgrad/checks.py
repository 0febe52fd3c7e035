"""Validate single values of a configuration or a file; error messages name the option."""

from math import isfinite

from .errors import HandgradError, OutOfMemoryError, option, shown
from .formatting import size
from .machine import available_cores, available_memory

# (minimum, maximum) of each numeric setting, checked before anything is computed from it.
_WIDTH = (1, 1 << 24)
_COUNT = (1, 10**12)

LIMITS: dict[str, tuple[float, float]] = {
    "n_vocab": _WIDTH, "n_context": _WIDTH, "d_model": (1, 1 << 20), "n_heads": (1, 1 << 16), "n_blocks": (1, 1000),
    "d_hidden": _WIDTH, "d_rho": _WIDTH, "rotary_width": _WIDTH, "d_head": _WIDTH, "n_kv_heads": (1, 1 << 16),
    "window": _WIDTH, "sliding_window_pattern": _WIDTH,
    "n_experts": (1, 2048), "experts_per_token": (1, 2048), "d_expert": _WIDTH, "d_shared": _WIDTH,
    "expert_groups": (1, 2048), "groups_per_token": (1, 2048), "decoder_sparse_step": _WIDTH,
    "first_k_dense_replace": (0, 1000), "n_shared_experts": (0, 2048),
    "no_rope_layer_interval": _WIDTH, "max_window_layers": (0, 1 << 24), "conv_taps": (1, 64),
    "rank": (1, 1 << 16), "alpha": (0, 1e6),
    "steps": _COUNT, "batch_tokens": _COUNT, "batch_examples": _COUNT, "warmup": (0, 10**12), "log_every": _COUNT,
    "eval_every": _COUNT, "eval_batches": _COUNT, "save_every": _COUNT, "patience": _COUNT, "keep": _COUNT,
    "sample_tokens": (0, 10**6), "seed": (0, 2**63 - 1), "threads": (1, 1 << 16),
    "epochs": (0, 1e9), "minutes": (0, 1e9), "lr": (0, 1e38), "min_lr": (0, 1e38), "weight_decay": (0, 1e6),
    "clip": (0, 1e38), "balance_loss": (0, 1e6), "z_loss": (0, 1e6), "influence": (0, 1000), "peer_timeout": (0, 1e6),
}  # fmt: skip

_ABOVE_MINIMUM = (
    "alpha",
    "epochs",
    "minutes",
    "lr",
    "peer_timeout",
)  # must be greater than the minimum, not equal to it

# Added tokens, which the library searches for in every text; the largest vocabularies in use have 7,000.
MAX_ADDED, MAX_ADDED_CHARACTERS = 1 << 14, 1 << 22


def check_type(name: str, kind: str, value: object) -> None:
    """Raise unless `value` has the type that the annotation `kind` names."""
    if value is None and "None" in kind:
        return
    if kind.startswith("bool") and not isinstance(value, bool):
        raise HandgradError(f"{option(name)} must be true or false, not {value!r}")
    if kind.startswith("int") and not _is_integer(value):
        raise HandgradError(f"{option(name)} must be an integer, not {value!r}")
    if kind.startswith("float") and not is_number(value):
        raise HandgradError(f"{option(name)} must be a finite number, not {value!r}")
    if kind.startswith("str") and not isinstance(value, str):
        raise HandgradError(f"{option(name)} must be a string, not {value!r}")
    if kind == "tuple[str, ...]" and not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
        raise HandgradError(f"{option(name)} must be a string or a list of strings, not {value!r}")


def check_integer(name: str, value: object, label: str | None = None) -> None:
    """Raise unless `value` is an integer within LIMITS[name]. Messages call it `label`, or the option `name`."""
    minimum, maximum = LIMITS[name]
    label = label or option(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise HandgradError(f"{label} must be an integer of at least {minimum}, not {value!r}")
    if value > maximum:
        raise HandgradError(f"{label} must be an integer of at most {maximum:,}, not {value!r}")


def check_number(name: str, value: object, label: str) -> None:
    """Raise unless `value` is a finite number within LIMITS[name]. Messages call it `label`."""
    minimum, maximum = LIMITS[name]
    above = name in _ABOVE_MINIMUM
    if not is_number(value) or value < minimum or (above and value == minimum):  # type: ignore[operator]
        raise HandgradError(f"{label} must be {'a number above' if above else 'at least'} {minimum}, not {value!r}")
    if value > maximum:  # type: ignore[operator]
        raise HandgradError(f"{label} must be at most {maximum:g}, not {value!r}")


def check_threads(threads: int | None) -> None:
    """Raise unless `threads` is None or a number of threads that this machine can run at once."""
    if threads is None:
        return
    check_integer("threads", threads)
    if threads > (cores := available_cores()):
        raise HandgradError(
            f"{option('threads')} is {threads}, and this process may use {cores} cores: give at most {cores}"
        )


MIXED = "mixed"
PRECISIONS = ("float32", MIXED)  # that a command can ask for


def check_choice(precision: object, dtype: object) -> None:
    """Raise unless this precision, None for that of the dtype, can be asked for together with a dtype, None for any."""
    if precision is None:
        return
    if precision not in PRECISIONS:
        raise HandgradError(f"{option('precision')} must be {' or '.join(PRECISIONS)}, not {shown(precision)}")
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name != "float32":
        raise HandgradError(
            f"{option('precision', precision)} computes with weights in float32: leave out {option('dtype', name)}, or"
            f" {option('precision')}"
        )


def check_stored(packed: bool, base_dtype: str | None) -> None:
    """Raise unless one of the two at most says how frozen matrices are stored."""
    if base_dtype not in (None, "bfloat16", "float16"):
        raise HandgradError(f"{option('base_dtype')} must be bfloat16 or float16, not {base_dtype!r}")
    if packed and base_dtype is not None:
        both = f"{option('packed', True)} keeps the types of a GGUF file, {option('base_dtype')} is for directories"
        raise HandgradError(f"{both}: give one")


def check_memory(needed: int, what: str, remedy: str) -> None:
    """Raise if `needed` bytes are not free. Libraries may crash where an allocation fails."""
    free, whose = available_memory()
    if needed > free:
        raise OutOfMemoryError(f"{what} {size(needed)} of memory, and {size(free)} {whose} are free: {remedy}")


def check_added_tokens(tokens: object, name: object) -> None:
    """Raise if a tokenizer adds too many tokens to its vocabulary, or too long ones. Messages begin with `name`."""
    found = tokens if isinstance(tokens, list | dict) else ()
    texts = (
        x.get("content") if isinstance(x, dict) else x for x in (found.values() if isinstance(found, dict) else found)
    )
    characters = sum(len(text) for text in texts if isinstance(text, str))
    if len(found) > MAX_ADDED or characters > MAX_ADDED_CHARACTERS:
        raise HandgradError(
            f"{name}: {len(found):,} tokens are special or added, with {characters:,} characters; the maximum is"
            f" {MAX_ADDED:,}, with {MAX_ADDED_CHARACTERS:,}"
        )


def is_number(value: object) -> bool:
    """Whether `value` is a finite int or float, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
