"""Checks of single values: what a configuration or a file may say, with messages that name the option."""

from math import isfinite

from .errors import HandgradError

# The least and the most that a number may be: what a file says is compared with this before anything is computed from it.
_WIDTH = (1, 1 << 24)


_COUNT = (1, 10**12)


LIMITS: dict[str, tuple[float, float]] = {
    "n_vocab": _WIDTH, "n_context": _WIDTH, "d_model": (1, 1 << 20), "n_heads": (1, 1 << 16), "n_blocks": (1, 1000),
    "d_hidden": _WIDTH, "d_rho": _WIDTH, "d_head": _WIDTH,
    "rank": (1, 1 << 16), "alpha": (0, 1e6),
    "steps": _COUNT, "batch_tokens": _COUNT, "batch_examples": _COUNT, "warmup": (0, 10**12), "log_every": _COUNT,
    "eval_every": _COUNT, "eval_batches": _COUNT, "save_every": _COUNT, "patience": _COUNT, "keep": _COUNT,
    "sample_tokens": (0, 10**6), "seed": (0, 2**63 - 1),
    "epochs": (0, 1e9), "minutes": (0, 1e9), "lr": (0, 1e38), "min_lr": (0, 1e38), "weight_decay": (0, 1e6),
    "clip": (0, 1e38),
}  # fmt: skip


_ABOVE = ("alpha", "epochs", "minutes", "lr")  # these may not be the least itself


def check_type(name: str, kind: str, value: object) -> None:
    """What comes from a file can be anything."""
    if value is None and "None" in kind:
        return
    if kind.startswith("bool") and not isinstance(value, bool):
        raise HandgradError(f"{flag(name)} must be true or false, not {value!r}")
    if kind.startswith("int") and (not isinstance(value, int) or isinstance(value, bool)):
        raise HandgradError(f"{flag(name)} must be a whole number, not {value!r}")
    if kind.startswith("float") and not is_number(value):
        raise HandgradError(f"{flag(name)} must be a number, not {value!r}")
    if kind.startswith("str") and not isinstance(value, str):
        raise HandgradError(f"{flag(name)} must be text, not {value!r}")
    if kind == "tuple[str, ...]" and not (isinstance(value, tuple) and all(isinstance(one, str) for one in value)):
        raise HandgradError(f"{flag(name)} must be text, or a list of texts, not {value!r}")


def check_whole(name: str, value: object, called: str | None = None) -> None:
    least, most = LIMITS[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise HandgradError(f"{called or name} must be a whole number of at least {least}, not {value!r}")
    if value > most:
        raise HandgradError(f"{called or name} must be a whole number of at most {most:,}, not {value!r}")


def check_number(name: str, value: object, called: str) -> None:
    least, most = LIMITS[name]
    above = name in _ABOVE
    if not is_number(value) or value < least or (above and value == least):  # type: ignore[operator]
        raise HandgradError(f"{called} must be {'a number above' if above else 'at least'} {least}, not {value!r}")
    if value > most:  # type: ignore[operator]
        raise HandgradError(f"{called} must be at most {most:g}, not {value!r}")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
