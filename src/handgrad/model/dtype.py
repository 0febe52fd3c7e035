"""The dtypes a model can have."""

import torch

from ..errors import HandgradError

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def as_dtype(given: torch.dtype | str, known: tuple[torch.dtype, ...] = DTYPES) -> torch.dtype:
    """A dtype, or its name: torch.bfloat16, "bfloat16"."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in known}
    dtype = names.get(given.removeprefix("torch.")) if isinstance(given, str) else given
    if dtype not in known:
        *most, last = names
        raise HandgradError(f"dtype must be {', '.join(most)} or {last}, not {given}")
    return dtype
