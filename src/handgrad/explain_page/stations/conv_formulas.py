"""The formulas of a short convolution with gates."""

from ...model.layers.short_conv import ShortConv
from ...model.steps import signal
from .formulas import About, Formula, written

Z, C = "z", "c"


def convolution(conv: ShortConv, gates: tuple[str, ...], output: str) -> About:
    """The convolution of one block, from B, C and x to y."""
    b, c, x = map(written, gates)
    d_b, d_c, d_x = (written(signal(name)) for name in gates)
    y, d_y, last = written(output), written(signal(output)), conv.taps.count - 1
    bias = conv.taps.bias is not None
    added = r" + b_{\mathrm{conv}}" if bias else ""
    taps = rf"\sum_{{j=0}}^{{{last}}} w_j"
    grads = rf"\partial w_j = \sum_{{t \ge j}} {Z}(t - j) \circ \Delta_{C}(t)"
    grads += rf" \qquad \partial b_{{\mathrm{{conv}}}} = \sum_{{\mathrm{{tok}}}} \Delta_{C}" if bias else ""
    return About(
        title="Convolution",
        summary=f"Mixes each token with the {last} before it, each feature by itself: a weighted sum of their rows of z,"
        " with the same weights at every position. Two gates that the tokens compute decide what enters (B) and what"
        " leaves (C). In the backward pass the error goes through the same weights in the other direction: a token is"
        f" blamed by itself and the {last} after it.",
        forward=(
            Formula(rf"{Z} = {b} \circ {x} \qquad {C}(t) = {taps} \circ {Z}(t - j){added}", "L-conv-fwd"),
            Formula(
                rf"{y} = {c} \circ {C} \qquad w_j = \text{{row }} j \text{{ of }} w_{{\mathrm{{conv}}}}", "L-conv-fwd"
            ),
        ),
        backward=(
            Formula(rf"{d_c} = {d_y} \circ {C} \qquad \Delta_{C} = {d_y} \circ {c}", "L-conv-bwd"),
            Formula(rf"\Delta_{Z}(t) = {taps} \circ \Delta_{C}(t + j)", "L-conv-bwd"),
            Formula(rf"{d_b} = \Delta_{Z} \circ {x} \qquad {d_x} = \Delta_{Z} \circ {b}", "L-conv-bwd"),
            Formula(grads, "L-conv-grad"),
        ),
        sources=(
            ("forward", "paper/short_conv.py forward"),
            ("forward", "paper/short_conv.py conv"),
            ("forward", "ops/short_conv.py forward"),
            ("backward", "paper/short_conv.py delta_z"),
            ("backward", "paper/short_conv.py grad_w"),
            ("backward", "ops/short_conv.py backward"),
            ("backward", "ops/short_conv.py grad_w"),
        ),
        derived_in=("short_conv",),
    )
