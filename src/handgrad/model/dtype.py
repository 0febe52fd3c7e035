"""The dtypes a model can have."""

import torch

from ..errors import HandgradError

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
STORED_DTYPES = (*DTYPES, torch.float16)  # of weights in files


def as_dtype(given: torch.dtype | str, known: tuple[torch.dtype, ...] = DTYPES, called: str = "dtype") -> torch.dtype:
    """A dtype, or its name: torch.bfloat16, "bfloat16"."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in known}
    dtype = names.get(given.removeprefix("torch.")) if isinstance(given, str) else given
    if dtype not in known:
        *most, last = names
        raise HandgradError(f"{called} must be {', '.join(most)} or {last}, not {given}")
    return dtype
