"""`hg.influence`: which training examples push an answer, by one checkpoint's gradients (TracIn).

    score_i = ⟨∂_i, ∂_query⟩      a small step on example i changes the query's loss by −lr · score_i, to first order

Positive: the example helped the answer; negative: it hindered it. Both gradients are those of mean losses.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import lora
from ..errors import HandgradError, shown
from ..formatting import plural
from ..inference.model_text import model_text
from ..model.gpt import GPT
from ..text.examples import Examples
from ..text.tokenizer import Tokenizer
from .inputs import Given, Shown, as_examples, as_text
from .measure import check_rank, products_with, projected

BY = ("score", "cosine")
RANK = 16  # of the projection of a model without an adapter


@dataclass(frozen=True, eq=False)
class Influence:
    """How much each training example pushes each query.

    scores    (N, K) ⟨∂_i, ∂_k⟩
    cosines   (N, K) the same, divided by both norms: from −1 to 1
    norms     (N) of the training examples' gradients
    """

    scores: Tensor
    cosines: Tensor
    norms: Tensor
    training: Examples = field(repr=False)
    queries: Examples = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)

    def helped(self, query: int = 0, count: int = 10, by: str = "score") -> list[tuple[int, float]]:
        """The numbers of the examples that push this query most, with their scores; by="cosine" ranks by direction alone."""
        return self._ranked(query, count, by, 1)

    def hindered(self, query: int = 0, count: int = 10, by: str = "score") -> list[tuple[int, float]]:
        """The same for those that push against it."""
        return self._ranked(query, count, by, -1)

    def _ranked(self, query: int, count: int, by: str, sign: int) -> list[tuple[int, float]]:
        check_by(by)
        values = (self.scores if by == "score" else self.cosines)[:, query]
        order = torch.argsort(values, descending=sign > 0, stable=True)[:count].tolist()
        return [(i, float(self.scores[i, query])) for i in order if sign * float(values[i]) > 0]

    def example(self, i: int) -> Shown:
        """Training example i as text."""
        return as_text(self.training, self.tokenizer, i)

    def query(self, k: int) -> Shown:
        """Query k as text."""
        return as_text(self.queries, self.tokenizer, k)

    def __repr__(self) -> str:
        queries = self.scores.shape[1]
        return f"Influence of {plural(len(self.scores), 'example')} on {queries:,} {'query' if queries == 1 else 'queries'}"


def check_by(by: str) -> None:
    """Raise unless examples can be ranked by this."""
    if by not in BY:
        raise HandgradError(f"examples are ranked by {' or '.join(BY)}, not {shown(by)}")


def influence(
    model: GPT, train_examples: Given, query: Given, *, rank: int | None = None, seed: int = 0,
    tokenizer: Tokenizer | None = None, format: str | None = None,
) -> Influence:  # fmt: skip
    """Rank training examples by how much they push a model's answers, with the gradients of the adapter if it has one.

    train_examples   records as in fine-tuning, paths of files, or a text.Examples
    query            the same: one record, {"prompt": …, "completion": …}, or several
    rank             of the random adapters onto which the gradients of a model without one are projected (default 16;
                     0: the gradients of all parameters that train, exact and slower)
    format           "chat" or "raw", of the examples and of the query (default: as fine-tuning chooses it)

    found = hg.influence(model, "examples.jsonl", {"prompt": "…", "completion": "…"})
    found.helped(), found.hindered(), found.scores
    """
    if rank is None:
        rank = 0 if lora.adapters_of(model) else RANK
    check_rank(model, rank)
    if model.named_adapters:
        raise HandgradError("the model has several adapters: load one alone")
    training, queries = (as_examples(model, given, tokenizer, format) for given in (train_examples, query))
    with projected(model, rank, seed):
        return of_examples(model, training, queries, model_text(model, tokenizer).tokenizer)


def of_examples(model: GPT, training: Examples, queries: Examples, tokenizer: Tokenizer) -> Influence:
    """The influence of examples on queries, over the parameters that train."""
    scores, norms, of_queries = products_with(model, training, queries)
    lengths = (norms[:, None] * of_queries).clamp(min=torch.finfo(torch.float64).tiny)
    return Influence(scores, scores / lengths, norms, training, queries, tokenizer)
