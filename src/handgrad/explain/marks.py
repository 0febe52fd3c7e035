"""Numbers inside sentences for the page: marked with their exact value, so that assets/format.js writes every number."""


def typeset(x: float) -> str:
    """⟦0.0123456⟧: the page writes 0.0123"""
    return f"⟦{float(x)!r}⟧"


def percent(fraction: float) -> str:
    """⟦0.4512%⟧: the page writes 45 %"""
    return f"⟦{float(fraction)!r}%⟧"
