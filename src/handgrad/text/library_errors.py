"""Errors of the `tokenizers` library, each as one line."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import HandgradError, printable


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn errors of the `tokenizers` library into HandgradError. A panic in its Rust code raises PanicException, which
    is not a subclass of Exception."""
    try:
        yield
    except HandgradError:
        raise
    except BaseException as reason:
        if not isinstance(reason, Exception) and type(reason).__name__ != "PanicException":
            raise
        raise HandgradError(f"{what}: {printable((str(reason).splitlines() or ['no reason given'])[0])}") from None


@contextmanager
def without_panic_report() -> Iterator[None]:
    """Keep what Rust prints at a panic from standard error: `library_errors` makes one line of it. Not while other threads
    run, whose output would be lost as well."""
    if threading.active_count() > 1:
        yield
        return
    try:
        kept = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
