"""What a reader is told about the steps of a mixture of experts."""

from ...model.layers.experts import Experts
from ...ops.routing import Routing
from .formulas import About, Formula, written

_ROUTE = ("forward", "ops/experts.py route")
_BACK = ("backward", "ops/experts.py backward")


def router(mixture: Experts) -> About:
    """a_scores → a_gates"""
    r: Routing = mixture.routing
    if r.kind == "sigmoid":
        share = r"g_e = \tau \frac{\sigma(s_e)}{\sum_{chosen} \sigma(s)}" if r.normalized else r"g_e = \tau \sigma(s_e)"
        forward = (Formula(share, "L-moe-sigmoid"),)
        slope = r"\sigma (1 - \sigma)"
        inside = (
            r"\frac{\tau}{\sum \sigma} (\Delta_g - \langle \hat g, \Delta_g \rangle)"
            if r.normalized
            else r"\tau \Delta_g"
        )
        backward = (Formula(rf"\Delta_s = {inside} \circ {slope}", "L-moe-sigmoid"),)
    elif r.normalized or r.kind != "softmax":
        forward = (Formula(r"g_e = \frac{e^{s_e}}{\sum_{chosen} e^{s}}", "L-moe-normalized"),)
        backward = (Formula(r"\Delta_s = g \circ (\Delta_g - \langle g, \Delta_g \rangle)", "L-moe-normalized"),)
    else:
        forward = (Formula(r"g_e = p_e \qquad p = \mathrm{softmax}(s)", "L-moe-softmax"),)
        backward = (Formula(r"\Delta_s = p \circ (\Delta_p - \langle p, \Delta_p \rangle)", "L-moe-softmax"),)
    return About(
        title="Router",
        summary=f"Chooses {r.k} of {len(mixture.experts)} experts for each token, by their scores, and says how much of each"
        " goes into the output: one column for each chosen expert. In the backward pass, a score gets an error for what"
        " another share of its expert would have changed.",
        forward=forward, backward=backward, sources=(_ROUTE, _BACK), derived_in=("experts",),
    )  # fmt: skip


def experts(mixture: Experts, inputs: tuple[str, ...], output: str) -> About:
    """a_6 of every expert's tokens → a_experts"""
    a, y, delta = written(inputs[0]), written(output), r"g_e \Delta_9"
    return About(
        title="Experts",
        summary="Each token goes through the feed-forward layers that the router has chosen for it. Their outputs are side"
        " by side, in the order of the gates. In the backward pass, an expert gets the error of its own tokens, times its"
        " gate.",
        forward=(Formula(rf"{y} = [g({a} w_{{gate}}) \circ {a} w_{{up}}] w_{{down}}", "L-moe-fwd"),),
        backward=(Formula(rf"\Delta_y = {delta}", "L-moe-bwd"),),
        sources=(
            ("forward", "model/layers/experts.py Experts.forward"),
            ("backward", "model/layers/mlp.py MLP.backward_gated"),
        ),
        derived_in=("experts",),
    )  # fmt: skip


def mixture(inputs: tuple[str, ...], output: str) -> About:
    """a_gates and a_experts → a_9"""
    more = r" + \sigma(a_6 v) \, y_{shared}" if len(inputs) == 4 else " + y_{shared}" if len(inputs) == 3 else ""
    return About(
        title="Mixture",
        summary="Adds the outputs of each token's experts, each times its gate"
        + (", and what the expert computes that all tokens share." if more else "."),
        forward=(Formula(rf"{written(output)} = \sum_{{chosen}} g_e y_e{more}", "L-moe-fwd"),),
        backward=(Formula(r"\Delta_{g,e} = \langle \Delta_9, y_e \rangle", "L-moe-router"),),
        sources=(("forward", "paper/experts.py mixture"), ("backward", "paper/experts.py delta_gate")),
        derived_in=("experts",),
    )  # fmt: skip
