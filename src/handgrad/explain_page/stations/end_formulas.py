"""The formulas of the ends of the network: the tokens, the embedding, and the loss or what else is explained."""

from typing import NamedTuple

from ...ops.logits import LogitMap
from .formulas import About, Formula


def tokens() -> About:
    return About(
        title="Tokens",
        summary="The sentence, split into tokens, each represented by its id. Integers have no gradient, so the backward"
        " pass ends at the embedding. But if each token is written as a one-hot row, the same rule gives a Δ₀: to first"
        " order, how the explained number would change if another token stood at this position.",
        forward=(Formula(r"a_0 \in \{0, \dots, n_{\mathrm{vocab}} - 1\}^{n_T}", "Section 1"),),
        backward=(Formula(r"\Delta_0 = \Delta_1 w_{\mathrm{tok}}^t", "Section 2"),),
        sources=(("forward", "ops/embedding.py forward"), ("backward", "ops/linear.py backward")),
    )


def embedding(tied: bool, positions: bool, scale: float = 1.0) -> About:
    """With a table of positions, or without: then they enter in attention."""
    by = "" if scale == 1 else rf"{scale:.4g} \, "
    head = r" + \Delta_{12}^t a_{11}" if tied else ""
    position = r"\mathrm{ohe}(0, \dots, n_T - 1)"
    added = rf" + {position} \, w_{{\mathrm{{pos}}}}" if positions else ""
    tables = (
        "Each token selects its row of the token table, its position selects a row of the position table, and the two rows"
        " are added. In the backward pass, the error of each token is added to the gradient of exactly these rows."
        if positions
        else "Each token selects its row of the token table. There is no table of positions: they enter in attention, as"
        " rotations of queries and keys. In the backward pass, the error of each token is added to the gradient of its row."
    )
    if tied:
        tables += " The logits have the same token table, so their gradient is added to this one."
    if by:
        tables += f" What is selected is multiplied by {scale:.4g}, and so is the error."
    by_token = Formula(
        rf"\partial w_{{\mathrm{{tok}}}} = {by}\mathrm{{ohe}}(a_0)^t \Delta_1{head}", "3, R9" if tied else "3"
    )
    by_position = Formula(rf"\partial w_{{\mathrm{{pos}}}} = {position}^t \Delta_1", "3")
    return About(
        title="Embedding",
        summary=tables,
        forward=(Formula(rf"a_1 = {by}\mathrm{{ohe}}(a_0) \, w_{{\mathrm{{tok}}}}{added}", "2"),),
        backward=(by_token, by_position) if positions else (by_token,),
        errata=("R9",) if tied else (),
        sources=(("forward", "ops/embedding.py forward"), ("backward", "ops/embedding.py grad_w")),
    )


class Explained(NamedTuple):
    summary: str
    forward: tuple[Formula, ...]
    backward: tuple[Formula, ...]


# The last station by what is explained: its definition is that of the numbers beside it
LOSSES = {
    "sentence": Explained(
        summary="Softmax turns the logits into probabilities. The loss is the mean surprise, −log of the probability that"
        " each true next token was given. The backward pass starts here: the error of each vocabulary token is its"
        " probability, minus 1 for the correct one, divided by the number of targets n.",
        forward=(
            Formula(
                r"y_{\mathrm{pred}} = \mathrm{softmax}(a_{12}) \qquad L = -\frac{1}{n} \sum_t \log"
                r" y_{\mathrm{pred}}(t)_{\mathrm{target}(t)}",
                "Section 1",
            ),
        ),
        backward=(Formula(r"\Delta_{12} = \frac{1}{n} \left( y_{\mathrm{pred}} - y_{\mathrm{gt}} \right)", "Table 2"),),
    ),
    "position": Explained(
        summary="Softmax turns the logits into probabilities. The loss of one token alone is explained: its surprise,"
        " −log of the probability that it was given at its row t. The backward pass starts here: the error of each"
        " vocabulary token in row t is its probability, minus 1 for the correct one. All other rows"
        " are 0, and nothing is divided.",
        forward=(
            Formula(
                r"y_{\mathrm{pred}} = \mathrm{softmax}(a_{12}) \qquad L = -\log y_{\mathrm{pred}}(t)_{\mathrm{target}(t)}",
                "Section 1",
            ),
        ),
        backward=(
            Formula(
                r"\Delta_{12}(t) = y_{\mathrm{pred}}(t) - y_{\mathrm{gt}}(t) \qquad \Delta_{12}(s) = 0, \; s \neq t",
                "Table 2",
            ),
        ),
    ),
    "difference": Explained(
        summary="A difference of two logits is explained: that of token u minus that of token v, at row t. The softmax is"
        " shown, and does not take part. The backward pass starts here: the error is 1 for u, −1 for v, and 0 everywhere"
        " else.",
        forward=(
            Formula(
                r"y_{\mathrm{pred}} = \mathrm{softmax}(a_{12}) \qquad L = a_{12}(t)_u - a_{12}(t)_v",
                "a difference of logits",
            ),
        ),
        backward=(
            Formula(
                r"\Delta_{12}(t)_u = 1 \qquad \Delta_{12}(t)_v = -1 \qquad \Delta_{12} = 0 \; \mathrm{elsewhere}",
                "a difference of logits",
            ),
        ),
    ),
}


def explained(kind: str, logits: LogitMap) -> Explained:
    """The last station if this kind of objective is explained, by the logits y that the softmax reads."""
    found = LOSSES[kind]
    if logits.identity:
        return found
    s, c = "" if logits.scale == 1 else rf"{logits.scale:.4g} \, ", logits.cap
    mapped = rf"y = {s}a_{{12}}" if c is None else rf"y = {c:g} \tanh(\frac{{{s}a_{{12}}}}{{{c:g}}})"
    slope = s.replace(r"\, ", "") if c is None else rf"{s}\left(1 - \left(\frac{{y}}{{{c:g}}}\right)^2\right)"
    how = " and ".join([*(["scaled"] if s else []), *(["capped"] if c is not None else [])])

    def by_y(x: Formula) -> Formula:
        return x._replace(latex=x.latex.replace(r"\Delta_{12}", r"\Delta_y").replace("a_{12}", "y"))

    return Explained(
        f"The logits are {how} first: the softmax reads y. {found.summary}",
        (Formula(mapped, "the model's own"), *map(by_y, found.forward)),
        (*map(by_y, found.backward), Formula(rf"\Delta_{{12}} = {slope} \circ \Delta_y", "the model's own")),
    )


def loss(logits: LogitMap) -> About:
    return About(
        title="Loss",
        **explained("sentence", logits)._asdict(),
        errata=("R5",),
        sources=(("forward", "ops/loss.py forward_and_delta"), ("backward", "ops/loss.py forward_and_delta")),
    )
