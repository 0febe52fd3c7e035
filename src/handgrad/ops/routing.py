"""How a router turns scores into gates. Does not import torch."""

from typing import NamedTuple

ROUTERS = ("softmax", "softmax of chosen", "sigmoid")


class Routing(NamedTuple):
    """The choices of `experts.route`."""

    k: int  # experts per token
    kind: str = "softmax"  # one of ROUTERS
    normalized: bool = True  # whether the gates of a token are divided by their sum
    scale: float = 1.0  # τ, of "sigmoid"
    groups: int = 1  # that the experts are divided into, for "sigmoid"
    kept: int = 1  # groups that a token may choose from
