"""`hg.generate`: continue prompts, given as ids or as text."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..checks import check_integer
from ..errors import HandgradError, shown
from ..model.gpt import GPT
from ..model.passes.batch import check_ids
from ..text.format import choose
from ..text.tokenizer import Tokenizer
from .engine import Engine, Options
from .grammar import Grammar, json_grammar, vocabulary
from .model_text import ModelText, model_text
from .sampling import Sampling
from .text_batch import Batch

NO_BIAS: Mapping[int, float] = MappingProxyType({})
ENDED = -1  # in a (B, new) result: the row has ended before

Ids = list[int]
Prompts = Tensor | str | list[str] | list[int] | list[Ids] | list[Tensor]
Stop = str | int | Sequence[str | int]


class Settings(TypedDict, total=False):
    """The options of `generate` by name."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    json_schema: Mapping[str, Any] | None
    seed: int | Sequence[int] | None
    stop: Stop
    stop_at_end: bool | None
    logprobs: int | None
    prompt_logprobs: bool
    context_full: Literal["stop", "slide"]
    cache: bool
    tokenizer: Tokenizer | None
    format: str | None


@overload
def generate(
    model: GPT, tokens: Tensor, max_new_tokens: int = ..., *, stream: Literal[False] = ...,
    details: Literal[False] = ..., **settings: Unpack[Settings],
) -> Tensor: ...  # fmt: skip
@overload
def generate(
    model: GPT, tokens: Tensor, max_new_tokens: int = ..., *, stream: Literal[True], details: Literal[False] = ...,
    **settings: Unpack[Settings],
) -> Iterator[Tensor]: ...  # fmt: skip
@overload
def generate(
    model: GPT, tokens: str, max_new_tokens: int = ..., *, stream: Literal[False] = ..., details: Literal[False] = ...,
    **settings: Unpack[Settings],
) -> str: ...  # fmt: skip
@overload
def generate(
    model: GPT, tokens: str, max_new_tokens: int = ..., *, stream: Literal[True], details: Literal[False] = ...,
    **settings: Unpack[Settings],
) -> Iterator[str]: ...  # fmt: skip
@overload
def generate(
    model: GPT, tokens: Prompts, max_new_tokens: int = ..., *, stream: bool = ..., details: bool = ...,
    **settings: Unpack[Settings],
) -> Any: ...  # fmt: skip
def generate(
    model: GPT,
    tokens: Prompts,
    max_new_tokens: int = 200,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] = NO_BIAS,
    json_schema: Mapping[str, Any] | None = None,
    seed: int | Sequence[int] | None = None,
    stop: Stop = (),
    stop_at_end: bool | None = None,
    logprobs: int | None = None,
    prompt_logprobs: bool = False,
    context_full: Literal["stop", "slide"] = "stop",
    cache: bool = True,
    tokenizer: Tokenizer | None = None,
    format: str | None = None,
    stream: bool = False,
    details: bool = False,
) -> Any:
    """Continue prompts. What comes out has the form of what goes in:

    "text"                     the text that follows, or with format "chat" the answer; a list of texts gives a list
    [1, 2, 3]                  the ids that follow; a list of lists, or of 1-D tensors, of any lengths gives a list of lists
    (B, T) tensor of ids       (B, new) tensor; rows that end early are filled with −1

    max_new_tokens    most tokens to add
    temperature, top_k, top_p, min_p, repetition_penalty   how tokens are chosen, applied in the order of `transformers`:
                      penalty, temperature, top-k, top-p, min-p. Temperature 0 takes the most probable token
    frequency_penalty, presence_penalty   subtracted from the logits of tokens of the new text: per occurrence, and once
    logit_bias        numbers to add to the logits of ids
    json_schema       the text is JSON that satisfies this schema, and ends with it; {"type": "object"}: any object
    seed              the same seed gives the same tokens, alone or in a batch: prompt i has seed + i, or the i-th of a list
    stop              strings or ids at which to end; a string is left out of the text
    stop_at_end       end at the model's end-of-sequence ids (default: for text; ids go on)
    logprobs          number of most probable tokens to return with the log-probability of each token; needs details=True
    prompt_logprobs   also of the prompt's tokens
    context_full      "stop" ends when the context is full; "slide" continues from its second half
    cache             False computes everything again for every token: slow, for comparison
    tokenizer         instead of the model's own
    format            of text: "chat", a message in the model's chat template, or "raw", as it is (default: as the model was
                      fine-tuned; otherwise "chat" if it has a chat template). Ids are always used as they are
    stream            iterate over what comes: text pieces, ids, or (B) ids per step; (index, piece) for a list of prompts
    details           return `Generation`s: ids, text, reason of the end, log-probabilities
    """
    kind, prompts = _kind(tokens)
    strings, ids = _stops(stop)
    ends = kind.text if stop_at_end is None else stop_at_end
    needs_text = kind.text or strings or ends or tokenizer is not None or json_schema is not None
    text = model_text(model, tokenizer) if needs_text else None
    if text is not None and ends:
        ids |= text.ends
    if (logprobs is not None or prompt_logprobs) and not details:
        raise HandgradError("log-probabilities are part of the detailed result: give details=True too")
    if stream and details:
        raise HandgradError("stream=True gives pieces and details=True a result at the end: choose one")
    seeds = _seeds(seed, len(prompts))
    grammar = None
    if json_schema is not None and text is not None:
        ids |= text.ends  # where the JSON is complete, the model may end it
        grammar = Grammar(vocabulary(text, model.config.n_vocab), json_grammar(json_schema))
    penalties = (frequency_penalty, presence_penalty, tuple(logit_bias.items()))
    samplings = [Sampling(temperature, top_k, top_p, min_p, repetition_penalty, one, *penalties) for one in seeds]
    options = [
        Options(max_new_tokens, sampling, frozenset(ids), logprobs, prompt_logprobs, context_full, grammar=grammar)
        for sampling in samplings
    ]
    if kind.text and text is not None:
        prompts = _formatted(prompts, text.tokenizer, format)
    elif format is not None:
        raise HandgradError(
            "format is for text: ids are used as they are (model.tokenizer.chat formats messages as ids)"
        )
    encoded = [_encoded(prompt, text) for prompt in prompts]
    batch = Batch(Engine(model, cache=cache), encoded, options, text, strings)
    if stream:
        return _columns(batch, model.device) if kind.tensor else _pieces(batch, kind)
    for _ in batch:
        pass
    results = batch.results()
    if details:
        return results[0] if kind.single else results
    if kind.tensor:
        longest = max(len(result.ids) for result in results)
        rows = [result.ids + [ENDED] * (longest - len(result.ids)) for result in results]
        return torch.tensor(rows, device=model.device)
    found = [result.text if kind.text else result.ids for result in results]
    return found[0] if kind.single else found


class _Kind(NamedTuple):
    """The form of the prompts, which the result has as well."""

    tensor: bool = False
    text: bool = False
    single: bool = False


def _kind(tokens: object) -> tuple[_Kind, list[Any]]:
    """The form, and a list of the prompts: texts, lists of ids or 1-D tensors."""
    if isinstance(tokens, str):
        return _Kind(text=True, single=True), [tokens]
    if isinstance(tokens, Tensor):
        check_ids("tokens", tokens)
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise HandgradError(f"tokens must be (B, T) and not empty; got shape {tuple(tokens.shape)}")
        return _Kind(tensor=True), list(tokens)
    if not isinstance(tokens, list | tuple):
        raise HandgradError(
            f"tokens must be a text, a tensor of ids or a list of either, not a {type(tokens).__name__}"
        )
    if not tokens:
        raise HandgradError("there is no prompt: give at least one")
    if all(isinstance(x, str) for x in tokens):
        return _Kind(text=True), list(tokens)
    if all(type(x) is int for x in tokens):
        return _Kind(single=True), [list(tokens)]
    for x in tokens:
        if not isinstance(x, Tensor) and not (isinstance(x, list | tuple) and all(type(i) is int for i in x)):
            raise HandgradError(f"a prompt must be a list of ids or a 1-D tensor, like the others, not {shown(x)}")
    return _Kind(), list(tokens)


def _formatted(prompts: list[str], tokenizer: Tokenizer, given: str | None) -> list[str]:
    """The prompts as the model reads them."""
    if not all(prompts):
        raise HandgradError("the prompt is empty: give at least one character")
    how = choose(tokenizer, given)
    how.warn(tokenizer.source, "this call")
    return [how.prompt(prompt) for prompt in prompts]


def _encoded(prompt: Any, text: ModelText | None) -> Any:
    if not isinstance(prompt, str):
        return prompt
    assert text is not None
    return text.tokenizer.encode_prompt(prompt)


def _stops(stop: object) -> tuple[list[str], set[int]]:
    """Stop strings and stop ids."""
    given = [stop] if isinstance(stop, str | int) else stop
    if not isinstance(given, list | tuple | set | frozenset):
        raise HandgradError(f"stop must be a string, an id or a list of them, not {shown(stop)}")
    for x in given:
        if type(x) not in (str, int) or x == "":
            raise HandgradError(f"stop has {shown(x)}: give strings that are not empty, or ids")
    return [x for x in given if isinstance(x, str)], {x for x in given if isinstance(x, int)}


def _seeds(seed: object, n: int) -> list[int | None]:
    """One for each prompt: seed, seed + 1, …, or the given ones."""
    if isinstance(seed, list | tuple):
        if len(seed) != n:
            raise HandgradError(f"seed has {len(seed)} numbers for {n} prompts: give one, or one for each prompt")
        return list(seed)
    if seed is None:
        return [None] * n
    check_integer("seed", seed)
    assert isinstance(seed, int)
    return [seed + i for i in range(n)]


def _pieces(batch: Batch, kind: _Kind) -> Iterator[Any]:
    """Pieces of text, or ids, as they come; with the index of their prompt unless there is one only."""
    for i, piece in batch:
        value = piece.text if kind.text else piece.id
        if value is not None and value != "":
            yield value if kind.single else (i, value)


def _columns(batch: Batch, device: torch.device) -> Iterator[Tensor]:
    """(B) ids per step: a row may be ahead of others, and waits."""
    rows: list[Ids] = [[] for _ in batch.writers]
    ended = [False] * len(rows)
    done = 0
    for i, piece in batch:
        if piece.id is not None:
            rows[i].append(piece.id)
        ended[i] = piece.finish is not None
        while any(len(row) > done for row in rows) and all(
            len(row) > done or end for row, end in zip(rows, ended, strict=True)
        ):
            yield torch.tensor([row[done] if len(row) > done else ENDED for row in rows], device=device)
            done += 1
