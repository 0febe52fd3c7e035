"""Exercise: the gated feed-forward layer of Llama (SwiGLU)."""

from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import gated
from ..exercise import Case, Exercise, Line

SILU = "silu"


def case(label: str, a: Tensor, w_gate: Tensor, w_up: Tensor, delta: Tensor) -> Case:
    gate, up = a @ w_gate, a @ w_up
    d_gate, d_up = gated.delta_gate(delta, gate, up, SILU), gated.delta_up(delta, gate, SILU)
    no_up, no_prime = delta * gated.g_prime(gate, SILU), delta * up * gated.g(gate, SILU)
    return Case(
        label, (delta, a, gate, up, w_gate, w_up),
        lambda a, w_gate, w_up: gated.forward(a @ w_gate, a @ w_up, SILU),
        {"delta_prev": a, "grad_w_gate": w_gate, "grad_w_up": w_up}, delta,
        terms={"delta_prev": {
            "the branch of the gate, Δ_gate w_gateᵗ": d_gate @ w_gate.t(),
            "the branch of up, Δ_up w_upᵗ": d_up @ w_up.t(),
        }},
        mistakes={
            "delta_prev": {
                "up were left out of Δ_gate": no_up @ w_gate.t() + d_up @ w_up.t(),
                "Δ_gate used g instead of g'": no_prime @ w_gate.t() + d_up @ w_up.t(),
                "w_gate and w_up were exchanged": d_gate @ w_up.t() + d_up @ w_gate.t(),
            },
            "grad_w_gate": {
                "up were left out of Δ_gate": a.t() @ no_up,
                "Δ_gate used g instead of g'": a.t() @ no_prime,
                "it were the gradient of w_up": a.t() @ d_up,
            },
            "grad_w_up": {
                "Δ_up were Δ alone, without g(gate)": a.t() @ delta,
                "Δ_up used gate instead of g(gate)": a.t() @ (delta * gate),
                "it were the gradient of w_gate": a.t() @ d_gate,
            },
        },
        scales={"n_T": float(len(a))},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, d, f = rng.size(3, 5), rng.size(6, 8), rng.size(9, 11)
    s = 1.5 / d**0.5
    tensors = rng.matrix(n, d), s * rng.matrix(d, f), s * rng.matrix(d, f), rng.matrix(n, f)
    return case(f"random numbers, {n} tokens, {d} → {f} features", *tensors)


EXERCISE = Exercise(
    name="gated",
    title="gated feed-forward (SwiGLU)",
    text="""
    Llama's feed-forward layer has two branches that read the same input; one decides how much of the other passes:

        gate = a w_gate      up = a w_up      a_i = g(gate) ∘ up      g(x) = x / (1 + e^(−x)), called SiLU

    g(gate, "silu") and g_prime(gate, "silu") are given.
    """,
    arguments=(
        Line("delta", "(n_T, f)", "Δ_i = ∂L/∂a_i"),
        Line("a", "(n_T, d)", "the input of both branches"),
        Line("gate", "(n_T, f)", "a w_gate"),
        Line("up", "(n_T, f)", "a w_up"),
        Line("w_gate", "(d, f)", "weights"),
        Line("w_up", "(d, f)", "weights"),
    ),
    returns=(
        Line("delta_prev", "(n_T, d)", "∂L/∂a"),
        Line("grad_w_gate", "(d, f)", "∂w_gate"),
        Line("grad_w_up", "(d, f)", "∂w_up"),
    ),
    imports=("from handgrad.paper import linear", "from handgrad.paper.gated import g, g_prime"),
    hints=(
        "A product of two factors: the error signal of each is Δ times the other. Then the chain rule through g, on"
        " one side only.",
        "Δ_gate = Δ ∘ up ∘ g'(gate) and Δ_up = Δ ∘ g(gate). From there on, each branch is a fully connected layer.",
        "a was read twice, so delta_prev is the sum of what both branches send back: linear.delta_prev(Δ_gate,"
        " w_gate) + linear.delta_prev(Δ_up, w_up).",
    ),
    quoted=(gated.delta_gate, gated.delta_up),
    solution_body="""\
d_gate, d_up = delta_gate(delta, gate, up, "silu"), delta_up(delta, gate, "silu")
delta_prev = linear.delta_prev(d_gate, w_gate) + linear.delta_prev(d_up, w_up)
return delta_prev, linear.grad_w(d_gate, a), linear.grad_w(d_up, a)""",
    page="gated",
    case=case,
    random=_random,
)
