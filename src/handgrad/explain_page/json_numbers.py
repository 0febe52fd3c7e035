"""Numbers of an answer as JSON has them."""

import math
from typing import Any


def as_json(x: Any, digits: int | None = None) -> Any:
    """Replace infinity and NaN by null, and round other floats to that many significant digits, if it is given."""
    if isinstance(x, float):
        if not math.isfinite(x):
            return None
        return x if digits is None else float(f"{x:.{digits}g}")
    if isinstance(x, dict):
        return {key: as_json(value, digits) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [as_json(value, digits) for value in x]
    return x
