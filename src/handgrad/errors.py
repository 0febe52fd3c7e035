"""Mistakes a user can make. The command line prints such an error as one line and exits with status 1."""


class HandgradError(ValueError):
    """What was given, what was expected, what to do."""


class NonFiniteError(HandgradError):
    """A weight, activation or loss is NaN or infinite."""
