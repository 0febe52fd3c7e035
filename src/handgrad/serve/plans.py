"""From the parameters of a request to the sequences of the engine and the form of the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import HandgradError
from ..inference.sampling import Sampling
from ..inference.sequences import Options, check_prompt
from .answers import ChatForm, Choice, CompletionForm, Form
from .api_errors import ApiError, invalid
from .served_models import Models, Served
from .tools import Tools, grammar_of, tools_of

DEFAULT_TOKENS = 16  # of a completion, as OpenAI's


@dataclass(frozen=True)
class Plan:
    """What to compute for a request, sequence by sequence: all choices of the first prompt, then of the second, …"""

    prompts: list[list[int]]
    options: list[Options]
    choices: list[Choice]
    stop: list[str]
    form: Form
    prompt_tokens: int  # each prompt counted once


def served(models: Models, name: str) -> Served:
    """The model that a request names."""
    if name not in models.served:
        known = ", ".join(models.served)
        raise ApiError(404, f"there is no model {name[:200]!r}; available: {known}", "model", "model_not_found")
    return models.served[name]


def completion(models: Models, most: int | None, asked: dict[str, Any]) -> Plan:
    """The plan of a request for completions."""
    model = served(models, asked["model"])
    if "prompt" not in asked:
        raise invalid("prompt", "prompt is missing: give the text to continue")
    echo, logprobs = asked.get("echo", False), asked.get("logprobs")
    new = asked.get("max_tokens", min(DEFAULT_TOKENS, most or DEFAULT_TOKENS))
    if new == 0 and not echo:
        raise invalid("max_tokens", "max_tokens may be 0 only with echo: there would be nothing to return")
    prompts = [encode(models, "prompt", prompt) for prompt in asked["prompt"]]
    form = CompletionForm(model.name, models.tokens, logprobs, _usage_wanted(asked))
    scored = echo and (logprobs is not None or new == 0)
    echoed = [_echo(models, given, ids) if echo else None for given, ids in zip(asked["prompt"], prompts, strict=True)]
    _check_limit("max_tokens", new, most)
    return _plan(models, model, asked, prompts, "prompt", form, new, scored, echoed, tools_of(model, {}))


def chat(models: Models, most: int | None, asked: dict[str, Any]) -> Plan:
    """The plan of a request for the next message of a chat."""
    model = served(models, asked["model"])
    tools = tools_of(model, asked)
    ids = render(models, model, asked, tools.offered)
    wanted = {name: asked[name] for name in ("max_completion_tokens", "max_tokens") if name in asked}
    if len(set(wanted.values())) > 1:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ: give one of them")
    for name, value in wanted.items():
        _check_limit(name, value, most)
    room = max(1, models.network.config.n_context - len(ids) + 1)
    new = next(iter(wanted.values()), min(room, most or room))
    top = asked.get("top_logprobs")
    if top is not None and not asked.get("logprobs"):
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    logprobs = (top or 0) if asked.get("logprobs") else None
    form = ChatForm(model.name, models.tokens, logprobs, _usage_wanted(asked))
    return _plan(models, model, asked, [ids], "messages", form, new, False, [None], tools)


def render(
    models: Models, model: Served, asked: dict[str, Any], tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """The ids of a conversation, ready for the assistant's message."""
    if "messages" not in asked:
        raise invalid("messages", "messages is missing: give the conversation")
    if model.template is None:
        raise ApiError(400, f"{model.name} has no chat template: use /v1/completions", "messages", "no_chat_template")
    try:
        text = model.template.render(asked["messages"], add_generation_prompt=True, tools=tools)
    except HandgradError as reason:
        raise invalid("messages", reason) from None
    return encode(models, "messages", text)


def encode(models: Models, param: str, prompt: str | list[int]) -> list[int]:
    """The ids of a prompt, checked."""
    try:
        ids = models.text.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
    except HandgradError as reason:
        raise invalid(param, reason) from None
    if not ids:
        raise invalid(param, f"{param} is empty: give at least one character or token")
    _check_ids(models, param, ids)
    context = models.network.config.n_context
    if len(ids) > context:
        message = f"{param} has {len(ids):,} tokens, and the context of the model {context:,}: shorten it"
        raise ApiError(400, message, param, "context_length_exceeded")
    return ids


def _plan(
    models: Models,
    model: Served,
    asked: dict[str, Any],
    prompts: list[list[int]],
    param: str,
    form: Form,
    new: int,
    scored: bool,
    echoed: list[str | None],
    tools: Tools,
) -> Plan:
    """`n` sequences for every prompt; sequence i of the request has seed + i."""
    n, seed = asked.get("n", 1), asked.get("seed")
    stops, bias = asked.get("stop_token_ids", []), asked.get("logit_bias", ())
    _check_ids(models, "stop_token_ids", stops)
    _check_ids(models, "logit_bias", [i for i, _ in bias])
    ends = frozenset(stops) if asked.get("ignore_eos") else models.text.ends.union(stops)
    grammar = grammar_of(models, asked, tools)
    all_prompts, options, choices = list[list[int]](), list[Options](), list[Choice]()
    for ids, echo in zip(prompts, echoed, strict=True):
        for _ in range(n):
            sampling = Sampling(
                asked.get("temperature", 1.0), asked.get("top_k"), asked.get("top_p"), asked.get("min_p"),
                asked.get("repetition_penalty", 1.0), None if seed is None else (seed + len(options)) % 2**63,
                asked.get("frequency_penalty", 0.0), asked.get("presence_penalty", 0.0), bias,
            )  # fmt: skip
            option = Options(new, sampling, ends, form.logprobs, scored, adapter=model.adapter, grammar=grammar)
            if not options:
                _check(models, param, ids, option)
            all_prompts.append(ids)
            options.append(option)
            choices.append(Choice(form.tokens, ids, echo, form.logprobs is not None, form.list_end, tools.reader()))
    stop = [*asked.get("stop", []), *tools.stop]
    return Plan(all_prompts, options, choices, stop, form, sum(len(ids) for ids in prompts))


def _check_ids(models: Models, param: str, ids: Sequence[int]) -> None:
    n_vocab = models.network.config.n_vocab
    for i in ids:
        if not 0 <= i < n_vocab:
            raise invalid(param, f"{param}: there is no token {str(i)[:30]}; ids go from 0 to {n_vocab - 1}")


def _check(models: Models, param: str, ids: list[int], options: Options) -> None:
    try:
        check_prompt(models.network, ids, options)
    except HandgradError as reason:
        raise invalid(param, reason) from None


def _check_limit(name: str, value: int, most: int | None) -> None:
    if most is not None and value > most:
        raise invalid(name, f"{name} may be {most:,} at most, not {value:,}")


def _echo(models: Models, given: str | list[int], ids: list[int]) -> str:
    return given if isinstance(given, str) else models.text.tokenizer.decode(ids)


def _usage_wanted(asked: dict[str, Any]) -> bool:
    if "stream_options" in asked and not asked.get("stream"):
        raise invalid("stream_options", "stream_options needs stream: true")
    return bool(asked.get("stream_options", {}).get("include_usage"))
