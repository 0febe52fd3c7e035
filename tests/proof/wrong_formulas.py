"""Functions with a wrong formula, to be put in the place of right ones."""

from collections.abc import Callable
from typing import Any

import pytest

from handgrad.ops import rotary

Wrong = tuple[Any, str, Callable[..., Any]]  # a module or class, a name in it, and what to put there


def after(owner: Any, name: str, change: Callable[..., Any]) -> Wrong:
    """A function whose result becomes change(result, *arguments); None: the result, changed in place."""
    right = getattr(owner, name)

    def wrong(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        changed = change(found, *args)
        return found if changed is None else changed

    return owner, name, wrong


def before(owner: Any, name: str, change: Callable[..., Any]) -> Wrong:
    """A function that gets change(*arguments)."""
    right = getattr(owner, name)
    return owner, name, lambda *args, **options: right(*change(*args), **options)


FREQUENCIES = rotary.frequencies.__wrapped__


def frequencies_with(**wrong: Callable[..., Any]) -> Wrong:
    """Frequencies, computed again with other parts."""

    def compute(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name, f in wrong.items():
                patch.setattr(rotary, name, f)
            return FREQUENCIES(*given)

    return rotary, "frequencies", compute
