"""The parameters of each route: which exist, what they may be, and what is refused.

Every parameter of a request must be in its route's table. One that OpenAI has and this server does not is accepted only
with a value that changes nothing. `null` is the same as leaving a parameter out.
"""

import re
from collections.abc import Callable
from typing import Any

from ..checks import is_number
from ..errors import HandgradError, shown
from ..files.reading import parse_json
from .api_errors import ApiError, invalid

Check = Callable[[str, Any], Any]
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOP = 20  # most probable tokens to return
MAX_COUNT = 1 << 31
MAX_IDS = 1024  # of logit_bias and stop_token_ids
MAX_TOOLS = 128


def integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise invalid(name, f"{name} must be an integer from {low} to {high}, not {shown(value)}")
        return value

    return check


def number(low: float, high: float, above: bool = False) -> Check:
    """above   the lowest value itself is not allowed"""

    def check(name: str, value: Any) -> float:
        if not is_number(value) or not low <= value <= high or (above and value == low):
            bound = "above" if above else "from"
            raise invalid(name, f"{name} must be a number {bound} {low:g} to {high:g}, not {shown(value)}")
        return float(value)

    return check


def boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise invalid(name, f"{name} must be true or false, not {shown(value)}")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(name, f"{name} must be a string, not {shown(value)}")
    return value


def stops(name: str, value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(s, str) and s for s in found):
        raise invalid(name, f"{name} must be a string that is not empty, or a list of them, not {shown(value)}")
    if len(found) > MAX_STOPS or any(len(s) > MAX_STOP_CHARACTERS for s in found):
        raise invalid(name, f"{name} may have {MAX_STOPS} strings of {MAX_STOP_CHARACTERS} characters at most")
    return found


def prompts(name: str, value: Any) -> list[str | list[int]]:
    """A text, texts, ids, or lists of ids → a list of prompts"""
    given = [value] if isinstance(value, str) or _are_ids(value) else value
    if isinstance(given, list) and "" in given:
        raise invalid(name, f"{name} is empty: give at least one character or token")
    if isinstance(given, list) and given and (all(isinstance(x, str) for x in given) or all(map(_are_ids, given))):
        return given
    raise invalid(name, f"{name} must be a string, a list of strings, of token ids, or of lists of token ids")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def token_ids(name: str, value: Any) -> list[int]:
    if value != [] and not _are_ids(value):
        raise invalid(name, f"{name} must be a list of token ids, not {shown(value)}")
    if len(value) > MAX_IDS:
        raise invalid(name, f"{name} may have {MAX_IDS:,} ids at most, not {len(value):,}")
    return list(value)


def bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """{"id": number from −100 to 100, …}"""
    if not isinstance(value, dict):
        raise invalid(name, f"{name} must be an object of numbers by token id, not {shown(value)}")
    if len(value) > MAX_IDS:
        raise invalid(name, f"{name} may have {MAX_IDS:,} ids at most, not {len(value):,}")
    check, found = number(-100, 100), []
    for key, x in value.items():
        if not re.fullmatch("[0-9]{1,10}", key):
            raise invalid(name, f"{name} has {shown(key)}, which is not a token id")
        found.append((int(key), check(f"{name}.{key}", x)))
    return tuple(found)


def labels(name: str, value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(x, str) for x in value.values()):
        raise invalid(name, f"{name} must be an object of strings, not {shown(value)}")


def one_of(*values: str) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise invalid(name, f"{name} must be {' or '.join(values)}, not {shown(value)}")
        return value

    return check


def response_format(name: str, value: Any) -> Any:
    """The schema that the answer must satisfy; None: any text"""
    form = _object(name, value, "type", "json_schema")
    kind = one_of("text", "json_object", "json_schema")(f"{name}.type", form.get("type"))
    if ("json_schema" in form) != (kind == "json_schema"):
        raise invalid(name, f"{name} has type {kind}; json_schema belongs to the type json_schema, which needs it")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    within = f"{name}.json_schema"
    given = _object(within, form["json_schema"], "name", "schema", "description", "strict")
    schema = given.get("schema", {})
    if not isinstance(schema, dict):
        raise invalid(f"{within}.schema", f"{within}.schema must be an object, not {shown(schema)}")
    return schema


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Functions: name, description and parameters, a JSON schema"""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid(name, f"{name} must be a list of {MAX_TOOLS} functions at most, not {shown(value)}")
    found: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(value):
        function = _function(f"{name}[{i}]", tool, "description", "parameters", "strict")
        if not isinstance(function.setdefault("parameters", NO_PARAMETERS), dict):
            raise invalid(name, f"{name}[{i}].function.parameters must be a JSON schema")
        if function["name"] in found:
            raise invalid(name, f"{name} has two functions called {function['name']}")
        found[function["name"]] = {"type": "function", "function": function}
    return list(found.values())


def tool_choice(name: str, value: Any) -> str:
    """none, auto or required, or "=name" of a function"""
    if isinstance(value, dict):
        function: str = _function(name, value)["name"]
        return f"={function}"
    found: str = one_of("none", "auto", "required")(name, value)
    return found


def _function(name: str, value: Any, *more: str) -> dict[str, Any]:
    """{"type": "function", "function": {"name": …, …}} → what describes the function"""
    given = _object(name, value, "type", "function")
    one_of("function")(f"{name}.type", given.get("type"))
    function = _object(f"{name}.function", given.get("function"), "name", *more)
    if not isinstance(function.get("name"), str) or not re.fullmatch(r"[\w.-]{1,64}", function["name"], re.ASCII):
        wrong = f"{name}.function.name"
        raise invalid(wrong, f"{wrong} must have 1 to 64 letters, digits or _.-, not {shown(function.get('name'))}")
    return function


def _object(name: str, value: Any, *keys: str) -> dict[str, Any]:
    """An object with no other keys; null is the same as leaving a key out"""
    if not isinstance(value, dict):
        raise invalid(name, f"{name} must be an object, not {shown(value)}")
    for key in value:
        if key not in keys:
            raise ApiError(400, f"{name}.{key} is not supported", f"{name}.{key}"[:200], "unsupported_parameter")
    return {key: x for key, x in value.items() if x is not None}


KEYS_OF_A_MESSAGE = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}  # besides role, content and name


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """What a chat template takes: role and content, a name, calls of tools and their results. The template checks the
    values."""
    if not isinstance(value, list) or not value:
        raise invalid(name, f"{name} must be a list of messages that is not empty, not {shown(value)}")
    found = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise invalid(f"{name}[{i}]", f"{name}[{i}] must be an object, not {shown(message)}")
        role = message.get("role")
        more = KEYS_OF_A_MESSAGE.get(role, ()) if isinstance(role, str) else ()
        ignored = [key for key, x in message.items() if x is None]
        given = _object(f"{name}[{i}]", message, "role", "content", "name", *more, *ignored)
        if "tool_calls" in given:
            given["tool_calls"] = _calls(f"{name}[{i}].tool_calls", given["tool_calls"])
            given.setdefault("content", "")
        found.append(given)
    return found


def _calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Earlier calls, with their arguments as values: templates write them as JSON."""
    if not isinstance(value, list) or not value:
        raise invalid(name, f"{name} must be a list of calls that is not empty, not {shown(value)}")
    found = []
    for i, call in enumerate(value):
        where = f"{name}[{i}]"
        given = _object(where, call, "id", "type", "function")
        function = _function(where, {"type": "function", "function": given.get("function")}, "arguments")
        try:
            arguments = parse_json(text(f"{where}.function.arguments", function.get("arguments")), "the text")
        except HandgradError as reason:
            raise invalid(f"{where}.function.arguments", f"{where}.function.arguments: {reason}") from None
        found.append({**given, "type": "function", "function": {**function, "arguments": arguments}})
    return found


def stream_options(name: str, value: Any) -> dict[str, bool]:
    return {key: boolean(f"{name}.{key}", x) for key, x in _object(name, value, "include_usage").items()}


def positions(name: str, value: Any) -> list[int]:
    if not _are_ids(value) or not all(1 <= i < MAX_COUNT for i in value):
        raise invalid(name, f"{name} must be a list of token positions of at least 1, not {shown(value)}")
    return list(value)


SAMPLING: dict[str, Check] = {
    "model": text,
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(1, MAX_COUNT),
    "min_p": number(0, 1),
    "repetition_penalty": number(0, 10, above=True),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "logit_bias": bias,
    "response_format": response_format,
    "seed": integer(0, 2**63 - 1),
    "stop": stops,
    "stop_token_ids": token_ids,
    "ignore_eos": boolean,
    "n": integer(1, 128),
    "stream": boolean,
    "stream_options": stream_options,
    "metadata": labels,
    "store": boolean,
}
COMPLETION: dict[str, Check] = {
    **SAMPLING,
    "prompt": prompts,
    "max_tokens": integer(0, MAX_COUNT),
    "echo": boolean,
    "logprobs": integer(0, MAX_TOP),
}
CHAT: dict[str, Check] = {
    **SAMPLING,
    "messages": messages,
    "max_tokens": integer(1, MAX_COUNT),
    "max_completion_tokens": integer(1, MAX_COUNT),
    "logprobs": boolean,
    "top_logprobs": integer(0, MAX_TOP),
    "tools": tools,
    "tool_choice": tool_choice,
    "parallel_tool_calls": boolean,
}
EMBEDDINGS: dict[str, Check] = {
    "model": text,
    "input": prompts,
    "encoding_format": one_of("float", "base64"),
    "dimensions": integer(1, MAX_COUNT),
}
ATTRIBUTION: dict[str, Check] = {
    "model": text, "prompt": prompts, "messages": messages, "completion": text, "targets": positions,
}  # fmt: skip

IGNORED = ("user", "safety_identifier", "prompt_cache_key")  # labels for the operator's records: they change no answer
NEUTRAL: dict[str, tuple[Any, ...]] = {  # parameters of OpenAI's that are not supported, and values that change nothing
    "best_of": (1,), "suffix": (), "tools": ([],), "tool_choice": ("none",), "functions": ([],), "function_call": ("none",),
    "parallel_tool_calls": (), "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (),
    "verbosity": (), "service_tier": ("auto", "default"), "web_search_options": (),
}  # fmt: skip


def parse(body: bytes, table: dict[str, Check]) -> dict[str, Any]:
    """The parameters of a request: those that are given, checked."""
    try:
        raw = parse_json(body.decode(), "the body")
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8 text", code="invalid_json") from None
    except HandgradError as reason:
        raise ApiError(400, reason, code="invalid_json") from None
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(raw)}", code="invalid_json")
    found = {}
    for name, value in raw.items():
        if name not in table and name not in NEUTRAL and name not in IGNORED:
            raise ApiError(400, f"unknown parameter {shown(name)}", name[:200], "unknown_parameter")
        if value is None or name in IGNORED:
            continue
        if name in table:
            found[name] = table[name](name, value)
        elif not any(_same(value, x) for x in NEUTRAL[name]):
            raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_parameter")
    if "model" not in found:
        raise invalid("model", "model is missing: name one of /v1/models")
    return found


def _same(value: Any, neutral: Any) -> bool:
    """Whether a value is the neutral one; 0.0 is 0, and false is not."""
    return bool(value == neutral) and (is_number(value) or type(value) is type(neutral))
