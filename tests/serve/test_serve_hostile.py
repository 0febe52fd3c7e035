"""Requests that are wrong, too large or hostile get an error in OpenAI's form that names the parameter; the server lives."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_server import open_tiny, post, write_models

from handgrad.serve.routes import Limits, Server, is_loopback

COMPLETION = {"model": "base", "prompt": "ab", "max_tokens": 2}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = open_tiny(write_models(tmp_path_factory.mktemp("models")))
    made = Server(models, limits=Limits(parallel=2, queue=4, max_tokens=50, body=20_000))
    with made:
        yield made


@pytest.fixture(autouse=True)
def _still_lives(server: Server) -> Iterator[None]:
    yield
    status, found = post(server, "/v1/completions", COMPLETION)
    assert status == 200 and len(found["choices"]) == 1
    assert server.runner.count == 0 and not server.runner.engine.busy


def refused(server: Server, path: str, body: Any, status: int, param: str | None, **headers: str) -> str:
    found_status, found = post(server, path, body, headers)
    assert (found_status, found["error"]["param"]) == (status, param), found
    assert set(found["error"]) == {"message", "type", "param", "code"} and found["error"]["message"]
    return str(found["error"]["message"])


WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", "hot"), ("temperature", 1e308), ("temperature", True), ("top_p", 1.5),
    ("top_k", 0), ("top_k", 2.5), ("min_p", -1), ("repetition_penalty", 0), ("seed", -1), ("seed", 1 << 63),
    ("seed", 1.5), ("n", 0), ("n", 10**9), ("n", 100), ("stop", ""), ("stop", [1]), ("stop", ["a"] * 17), ("stop", {}),
    ("max_tokens", -1), ("max_tokens", 51), ("max_tokens", "2"), ("max_tokens", 10**30), ("stream", "yes"), ("stream", 1),
    ("stream_options", {"include_usage": True}), ("best_of", 2), ("best_of", True), ("suffix", "x"), ("logit_bias", [5]),
    ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"256": 1}), ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {str(i): 0 for i in range(1025)}), ("frequency_penalty", 2.5), ("presence_penalty", False),
    ("nonsense", None), ("nonsense", 1), ("model", 3), ("response_format", "json"),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_object", "json_schema": {}}), ("stop_token_ids", 5), ("stop_token_ids", [256]),
    ("stop_token_ids", [-1]), ("stop_token_ids", [1] * 1025), ("ignore_eos", 1), ("metadata", {"a": 1}), ("metadata", []),
    ("store", "no"), ("functions", [{}]), ("reasoning_effort", "low"),
]  # fmt: skip


@pytest.mark.parametrize("name,value", WRONG, ids=lambda x: str(x)[:20])
def test_wrong_parameters_are_named(server: Server, name: str, value: Any) -> None:
    refused(server, "/v1/completions", {**COMPLETION, name: value}, 400, name)
    refused(server, "/v1/chat/completions", {**CHAT, name: value}, 400, name)


SCHEMAS: list[tuple[Any, str]] = [
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, ""),
    ({"type": "foo"}, "Invalid type"), ({"not": {}}, "Unimplemented"), ({"$ref": "#/no"}, "does not exist"),
    ({"$ref": "http://example.org/x"}, "not present"), ({"type": "string", "pattern": "(?=a)b"}, "regex"),
    ({"x-guidance": 3, "type": "foo"}, "Invalid type"), ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisf"),
    ({"items": [{"type": "foo"}]}, "response_format: failed to compile"),
]  # fmt: skip


@pytest.mark.parametrize("schema,reason", SCHEMAS, ids=lambda x: str(x)[:30])
def test_schemas_that_cannot_be_kept(server: Server, schema: Any, reason: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        assert reason in refused(server, path, {**body, "response_format": form}, 400, "response_format")


@pytest.mark.parametrize(
    "body,param",
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"), ({"logit_bias": {"5": True}}, "logit_bias.5"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
    ids=str,
)  # fmt: skip
def test_parts_that_are_wrong_are_named(server: Server, body: dict[str, Any], param: str) -> None:
    refused(server, "/v1/completions", {**COMPLETION, **body}, 400, param)
    refused(server, "/v1/chat/completions", {**CHAT, **body}, 400, param)


FUNCTION = {"type": "function", "function": {"name": "f"}}


WRONG_TOOLS: list[tuple[dict[str, Any], str]] = [  # the template of this model has none
    ({"tools": [FUNCTION]}, "tools"), ({"tools": {}}, "tools"), ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools"), ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools"),
    ({"tools": [FUNCTION], "tool_choice": "maybe"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
]  # fmt: skip
WRONG_EMBEDDINGS: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"), ({"input": ""}, "input"), ({"input": ["a"] * 2049}, "input"),
    ({"input": [9999]}, "input"),
    ({"dimensions": 8}, "dimensions"), ({"encoding_format": "hex"}, "encoding_format"), ({"input": "x" * 161}, "input"),
    ({"truncate": True}, "truncate"),
]  # fmt: skip
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"), ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"),
    ({"echo": 1}, "echo"), ({"model": None}, "model"), ({"prompt": None}, "prompt"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
]  # fmt: skip
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages"), ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": 2}, "logprobs"), ({"max_completion_tokens": 1}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"), ({"echo": True}, "echo"),
]  # fmt: skip
REQUESTS = [
    *(("/v1/chat/completions", {**CHAT, **body}, param) for body, param in WRONG_TOOLS + WRONG_CHATS),
    *(("/v1/embeddings", {"model": "base", "input": "ab", **body}, param) for body, param in WRONG_EMBEDDINGS),
    *(("/v1/completions", {**COMPLETION, **body}, param) for body, param in WRONG_COMPLETIONS),
]


@pytest.mark.parametrize("path,body,param", REQUESTS, ids=lambda x: str(x)[-60:])
def test_wrong_requests(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    refused(server, path, body, 400, param)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], ["a", [1]], [1, "a"], [-1], [256], [1 << 70], [1.5], [True], {"a": 1}, 7, "x" * 161, "\ud800"],
    ids=lambda x: str(x)[:12].encode("ascii", "replace").decode(),
)
def test_wrong_prompts(server: Server, prompt: Any) -> None:
    param = None if prompt == "\ud800" else "prompt"
    refused(server, "/v1/completions", {**COMPLETION, "prompt": prompt}, 400, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"model": "base"', b"[" * 9000, b'{"a":' * 3000,
     b'{"seed": ' + b"9" * 5000 + b"}", b'"' + b"a" * 100],
    ids=lambda x: str(x[:10]),
)  # fmt: skip
def test_bodies_that_are_no_requests(server: Server, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/attribution"):
        refused(server, path, body, 400, None)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_are_none(server: Server, number: bytes) -> None:
    refused(
        server, "/v1/completions", b'{"model":"base","prompt":"a","temperature":' + number + b"}", 400, "temperature"
    )


def test_other_errors(server: Server) -> None:
    assert "base, one, two" in refused(server, "/v1/completions", {**COMPLETION, "model": "gpt"}, 404, "model")
    assert "20,000 bytes" in refused(server, "/v1/completions", {"user": "x" * 30_000}, 413, None)
    refused(server, "/v1/nothing", {}, 404, None)
    refused(server, "/v1/models", {}, 405, None)
    refused(server, "/v1/completions/", COMPLETION, 404, None)
    assert "7 sequences" in refused(server, "/v1/completions", {**COMPLETION, "prompt": ["a"] * 7}, 400, "prompt")
    assert "8 sequences" in refused(server, "/v1/completions", {**COMPLETION, "prompt": ["a"] * 4, "n": 2}, 400, "n")
    refused(server, "/v1/completions", COMPLETION, 415, None, **{"Content-Type": "text/plain"})
    refused(server, "/v1/completions", COMPLETION, 421, None, Host="example.org")
    refused(server, "/v1/attribution", {"model": "base", "prompt": "ab"}, 400, "completion")
    refused(server, "/v1/attribution", {"model": "base", "completion": "ab"}, 400, "prompt")
    assert is_loopback("127.0.0.1") and is_loopback("::1") and not is_loopback("0.0.0.0") and not is_loopback("x.org")


def test_a_chunked_body_is_bounded(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.split(":")[-1][:-1]))
    pieces = (b" " * 1000 for _ in range(40))
    connection.request("POST", "/v1/completions", pieces, {"Content-Type": "application/json"}, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["error"]["code"] == "body_too_large"
    connection.close()


def test_values_that_change_nothing_are_accepted(server: Server) -> None:
    neutral = {
        "user": "me", "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "suffix": None, "best_of": 1,
        "tools": [], "response_format": {"type": "text"}, "stop": None, "seed": None, "temperature": None, "store": True,
        "metadata": {"run": "3"}, "stop_token_ids": [], "ignore_eos": False,
    }  # fmt: skip
    assert post(server, "/v1/completions", {**COMPLETION, **neutral})[0] == 200
    for more in ({}, {"tools": [FUNCTION], "tool_choice": "none"}):
        assert post(server, "/v1/chat/completions", {**CHAT, **neutral, **more})[0] == 200
    assert post(server, "/v1/chat/completions", CHAT, {"Content-Type": "Application/JSON; charset=utf-8"})[0] == 200
