"""Whether the memory of this machine is enough, and what to do if it is not."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import OutOfMemoryError, option
from ..formatting import size
from ..machine import available_memory
from .estimate import Plan

REMEDY = (
    f"{option('recompute', 'blocks')} and {option('update_inside', True)} need less, so do adapters instead of all"
    f" weights, {option('base_dtype', 'bfloat16')} or {option('packed', True)} for weights that do not train, and shorter"
    " sequences"
)


def misfit(plan: Plan, loaded: bool = False) -> str:
    """A sentence if a step does not fit into the memory that is free, or "". The weights may be `loaded` already."""
    free, whose = available_memory()
    free += plan.bytes_weights if loaded else 0
    if plan.bytes_peak <= free:
        return ""
    return (
        f"This step does not fit: its tensors need {size(plan.bytes_peak)}, and {size(free)} {whose} are free."
        f" {REMEDY}."
    )


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn a failed allocation into an error of one line: what was needed, what is there, what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as reason:
        text = str(reason)
        if not isinstance(reason, MemoryError) and "allocate memory" not in text:
            raise
        free, whose = available_memory()
        found = re.search(r"allocate (\d+) bytes", text)
        wanted = f"{size(int(found[1]))} more were needed, and" if found else "only"
        raise OutOfMemoryError(
            f"not enough memory: {wanted} {size(free)} {whose} are free. For training, {REMEDY}. handgrad plan predicts what"
            f" is needed; {option('bits', 8)} and a smaller model need less for generation"
        ) from None
