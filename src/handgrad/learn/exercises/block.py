"""Exercise: a whole block (Tables 2 and 3)."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import transformer
from ...paper.attention import Head
from ...paper.transformer import Block, Options
from ..exercise import Case, Exercise, Line


def case(label: str, a_1: Tensor, p: Block, delta_10: Tensor, o: Options = Options()) -> Case:  # noqa: B008
    saved = transformer.forward_block(a_1, p, o)
    deltas, _ = transformer.backward_block(delta_10, p, saved, o)
    through_norm, through_first = deltas.delta_5 - delta_10, deltas.delta_1 - deltas.delta_5
    skip, branch = "Δ_10, which comes by the skip connection", "what comes back through the feed-forward layer"
    return Case(
        label, (delta_10, p, saved, o),
        lambda a_1, *flat: transformer.forward_block(a_1, _block(iter(flat), len(p.heads)), o).a_10,
        {"delta_1": a_1, **dict(_named(p))}, delta_10,
        terms={
            "delta_1": {
                "Δ_5, which comes by the skip connection": deltas.delta_5,
                "what comes back through attention and the first norm": through_first,
                "Δ_10, which comes by both skip connections": delta_10,
            },
            "grads.w_3": {skip: saved.a_3.t() @ delta_10, branch: saved.a_3.t() @ through_norm},
            "grads.b_3": {skip: delta_10.sum(0), branch: through_norm.sum(0)},
        },
        mistakes={
            "grads.b_6": {"the activation's derivative were left out": deltas.delta_8.sum(0)},
            "grads.w_6": {"the activation's derivative were left out": saved.a_6.t() @ deltas.delta_8},
        },
        unsummed={
            "grads.b_8": delta_10, "grads.b_6": deltas.delta_7, "grads.b_5": deltas.delta_6, "grads.b_3": deltas.delta_4,
            "grads.b_1": deltas.delta_2, "grads.w_5": deltas.delta_6 * saved.norm_5.a_bar,
            "grads.w_1": deltas.delta_2 * saved.norm_1.a_bar,
        },
        scales={"n_T": float(len(a_1)), "d": float(a_1.shape[1])},
        returns=["delta_1", _structure(p, "grads")],
    )  # fmt: skip


def _named(p: Block) -> Iterator[tuple[str, Tensor]]:
    for name, value in p._asdict().items():
        if name != "heads":
            yield f"grads.{name}", value
            continue
        for i, head in enumerate(value):
            yield from ((f"grads.heads[{i}].{field}", x) for field, x in head._asdict().items())


def _structure(p: Block, name: str) -> list[Any]:
    fields: list[Any] = []
    for field in p._fields:
        inner = [[f"{name}.heads[{i}]", *(f"{name}.heads[{i}].{x}" for x in Head._fields)] for i in range(len(p.heads))]
        fields.append([f"{name}.heads", *inner] if field == "heads" else f"{name}.{field}")
    return [name, *fields]


def _block(flat: Iterator[Tensor], n_heads: int) -> Block:
    """A block from its tensors in the order of `_named`."""
    values: dict[str, Any] = {}
    for field in Block._fields:
        heads = field == "heads"
        values[field] = [Head(*(next(flat) for _ in Head._fields)) for _ in range(n_heads)] if heads else next(flat)
    return Block(**values)


def _random(rng: RandomInputs) -> Case:
    n, d = rng.size(4, 5), rng.size(6, 7)
    p = rng.block(d, [(3, 4), (2, 5)], 8)
    return case(f"random numbers, {n} tokens, 2 heads", rng.matrix(n, d), p, rng.matrix(n, d))


EXERCISE = Exercise(
    name="block",
    title="a whole block",
    text="""
    All layers are yours now; put them together. A block, as the paper's Table 2 has it:

        a_2 = norm(a_1; w_1, b_1)      a_3 = heads(a_2)             a_4 = a_3 w_3 + b_3~      a_5 = a_1 + a_4
        a_6 = norm(a_5; w_5, b_5)      a_7 = a_6 w_6 + b_6~         a_8 = g(a_7)
        a_9 = a_8 w_8 + b_8~           a_10 = a_5 + a_9

    `p` holds the parameters, `f` all activations of the forward pass: f.a_1 … f.a_10, f.norm_1 and f.norm_5 (each
    with a_bar and sigma), f.heads. The layers' backward functions are given: linear, layernorm and activation have
    delta_prev, and grad_w and grad_b where there are parameters; attention.backward_heads returns the heads' results
    and Δ_2. `o.g` is the name of the activation.
    """,
    arguments=(
        Line("delta_10", "(n_T, d)", "Δ_10 = ∂L/∂a_10"),
        Line("p", "", "the parameters", "Block"),
        Line("f", "", "the activations", "BlockForward"),
        Line("o", "", "options: o.g", "Options"),
    ),
    returns=(
        Line("delta_1", "(n_T, d)", "Δ_1 = ∂L/∂a_1"),
        Line("grads", "", "Block(w_1, b_1, heads, w_3, b_3, w_5, b_5, w_6, b_6, w_8, b_8): their gradients", "Block"),
    ),
    imports=(
        "from handgrad.paper import activation, attention, layernorm, linear",
        "from handgrad.paper.transformer import Block, BlockBackward, BlockForward, Options, add",
    ),
    hints=(
        "Go from a_10 back to a_1, one line of the table at a time. A sum sends its error signal to both of its"
        " terms unchanged; something that was read twice adds up what both readers send back.",
        "Δ_9 = Δ_10. Then Δ_8, Δ_7, Δ_6 by the layers, and Δ_5 = Δ_10 + what comes back through the second norm,"
        " because a_5 is read by the skip connection and by the norm. Δ_4 = Δ_5. Δ_1 is made like Δ_5.",
        "heads, delta_2 = attention.backward_heads(delta_3, f.a_2, p.heads, attention.ManyForward(f.heads, f.a_3));"
        " the gradients of head h are heads[h].grads. The gradients of a layer need the Δ of its output and its"
        " input: w_8 = linear.grad_w(delta_9, f.a_8).",
    ),
    quoted=(transformer.backward_block,),
    solution_body="""\
deltas, grads = backward_block(delta_10, p, f, o)
return deltas.delta_1, grads""",
    page="transformer",
    case=case,
    random=_random,
    stub="""\
delta_9 = delta_10
delta_8 = linear.delta_prev(delta_9, p.w_8)

delta_1 = ...
grads = Block(
    w_1=..., b_1=..., heads=..., w_3=..., b_3=..., w_5=..., b_5=..., w_6=..., b_6=...,
    w_8=linear.grad_w(delta_9, f.a_8), b_8=linear.grad_b(delta_9),
)
return delta_1, grads""",
)
