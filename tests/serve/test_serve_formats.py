"""Structured output and tools, with the real clients: what the tiny model writes is random, and its form is always right."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import tokenizers
import torch
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from tiny_server import SHAPE, write_models
from tokenizers import decoders, models, normalizers

import handgrad as hg
from conftest import make_model
from handgrad.inference.engine import Engine, Options, Sampling
from handgrad.inference.grammar import Grammar, json_grammar, vocabulary
from handgrad.inference.model_text import ModelText, model_text
from handgrad.serve.routes import Server
from handgrad.serve.served_models import open_models
from handgrad.serve.tools import NOTATIONS, CallReader
from handgrad.text import tokenizer

TEMPLATE = """{% if tools %}Answer with <tool_call>: {{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
ASK = [{"role": "user", "content": "Who?"}]


class Address(BaseModel, extra="forbid"):
    street: str = Field(max_length=5)
    number: int = Field(ge=1, le=999)


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: str = Field(max_length=8)
    kind: Literal["human", "robot"]
    homes: list[Address] = Field(max_length=2)


def write_model(folder: Path, template: str = TEMPLATE) -> Path:
    hg.save(make_model(**{**SHAPE, "n_context": 2048}), folder)
    tokenizer.make("bytes", []).write(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(open_models(write_model(tmp_path_factory.mktemp("model")), "base"))
    with made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0) as made:
        yield made


# ── response_format ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_parse_of_the_official_client(client: openai.OpenAI, temperature: float) -> None:
    found = client.chat.completions.parse(
        model="base", messages=ASK, response_format=Person, temperature=temperature, seed=1, n=4
    )
    assert all(choice.finish_reason == "stop" and choice.message.parsed for choice in found.choices)
    if temperature:
        assert len({choice.message.content for choice in found.choices}) == 4


def test_a_stream_of_the_official_client(client: openai.OpenAI) -> None:
    asked = {"model": "base", "messages": ASK, "response_format": Person, "seed": 2}
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == client.chat.completions.parse(**asked).choices[0].message.parsed


def test_an_object_of_any_form(client: openai.OpenAI) -> None:
    """A value that goes on until the tokens are used up begins like an object."""
    for seed in range(6):
        choice = client.chat.completions.create(
            model="base", messages=ASK, response_format={"type": "json_object"}, max_tokens=300, seed=seed
        ).choices[0]
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_sequences_with_grammars_in_one_batch_are_what_they_are_alone(tmp_path: Path) -> None:
    """Grammars, penalties and bias of each, beside sequences without; log-probabilities are the model's own."""
    model = hg.load(write_model(tmp_path / "model"))
    tokens = vocabulary(model_text(model), 256)
    grammars = [Grammar(tokens, json_grammar(x)) for x in (Person.model_json_schema(), {"enum": ["yes", "no"]})]
    plain, penalized = Sampling(1.0, seed=1), Sampling(1.0, seed=2, frequency_penalty=1.5, logit_bias=((101, 3.0),))
    wanted = [
        (b"ab", Options(40, plain, logprobs=2)), (b"Who", Options(900, plain, logprobs=2, grammar=grammars[0])),
        (b"Who", Options(900, penalized, logprobs=2, grammar=grammars[0])), (b"abc", Options(30, penalized, logprobs=2)),
        (b"a", Options(9, Sampling(), logprobs=2, grammar=grammars[1])),
    ]  # fmt: skip

    def run(some: list[tuple[bytes, Options]]) -> list[Any]:
        engine = Engine(model)
        sequences = [engine.add(list(prompt), options) for prompt, options in some]
        while engine.busy:
            engine.step()
        return sequences

    together = run(wanted)
    for x, alone in zip(together, (run([one])[0] for one in wanted), strict=True):
        assert x.new == alone.new and x.finish == alone.finish
        expected = torch.log_softmax(model.logits(torch.tensor([x.ids]))[0, len(x.prompt) - 1 : -1], 1)
        for t, (i, found) in enumerate(zip(x.new, x.logprobs, strict=True)):
            assert found.logprob == pytest.approx(expected[t, i].item(), abs=1e-10)
            assert [p for _, p in found.top] == pytest.approx(expected[t].topk(2).values.tolist(), abs=1e-10)
    assert together[1].new != together[2].new
    for x in together[1:3]:
        Person.model_validate_json(bytes(x.new))
    assert bytes(together[4].new) in (b'"yes"', b'"no"') and together[4].finish == "stop"


WORDS = ['{"name": "Ann", "kind": "human"}', "hello world", "naïve €", '{"kind":']


def sentencepiece() -> tokenizer.Tokenizer:
    """As Llama's: a space before the first word, bytes as tokens of their own beside characters, special tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("h", "u"), ("hu", "m"), ("▁", '"'), ('"', ":"), ("▁", "{"), ("{", '"')]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.Tokenizer(inner)


@pytest.mark.parametrize("kind", ["bytes", "bpe:400", "chars", "sentencepiece"])
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.some_cases(3)
def test_grammars_for_every_kind_of_tokenizer(kind: str, end: bool) -> None:
    """Ids beyond the tokenizer's are never chosen, and an end of text only where it may be."""
    found = (
        sentencepiece() if kind == "sentencepiece" else tokenizer.make(kind, [*WORDS, '{}[]",: 0123456789humanrobt'])
    )
    n_vocab = found.n_vocab + 7
    ends = frozenset({found.n_vocab - 1}) if end else frozenset[int]()  # any id will do
    model = make_model(**{**SHAPE, "n_vocab": n_vocab, "n_context": 256})
    schema = {
        "type": "object", "properties": {"kind": {"enum": ["human", "robot"]}, "a": {"type": "integer", "maximum": 999}},
        "required": ["kind", "a"], "additionalProperties": False,
    }  # fmt: skip
    grammar = Grammar(vocabulary(ModelText(found, ends), n_vocab), json_grammar(schema))
    for seed in range(4):
        engine = Engine(model)
        x = engine.add([1], Options(200, Sampling(1.0, seed=seed), ends, grammar=grammar))
        while engine.busy:
            engine.step()
        assert x.finish == "stop", (x.finish, x.error)
        assert not set(x.new[:-1]) & ends and max(x.new) < found.n_vocab
        value = json.loads(found.decode([i for i in x.new if i not in ends]))
        assert value["kind"] in ("human", "robot") and value["a"] <= 999


def test_a_text_that_the_vocabulary_cannot_write() -> None:
    found = tokenizer.make("chars", ['{}"abc'])
    grammar = Grammar(vocabulary(ModelText(found, frozenset()), found.n_vocab), json_grammar({"const": "abz"}))
    engine = Engine(make_model(**{**SHAPE, "n_vocab": found.n_vocab}))
    x, other = engine.add([1], Options(9, grammar=grammar)), engine.add([1], Options(9))
    while engine.busy:
        engine.step()
    assert x.finish == "error" and "format cannot be kept" in str(x.error) and other.finish == "length"


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@tool
def weather(city: Literal["Rome", "Paris"], days: int) -> str:
    """The weather of some days."""
    return f"rain in {city}"


def test_structured_output_of_langchain(server: Server) -> None:
    chat = ChatOpenAI(model="base", base_url=f"{server.url}v1", api_key="none", max_retries=0, seed=3)
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Person, method=method).invoke("Who?"), Person)
    assert isinstance(chat.with_structured_output(Person).invoke("Who?"), Person)
    found = chat.with_structured_output(Person, include_raw=True, method="function_calling").invoke("Who?")
    assert found["parsing_error"] is None and found["raw"].tool_calls[0]["name"] == "Person"


def test_tools_of_langchain(server: Server) -> None:
    """A call that must come, its result, and the next answer."""
    chat = ChatOpenAI(model="base", base_url=f"{server.url}v1", api_key="none", max_retries=0, seed=3, max_tokens=200)
    bound = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False, strict=True)
    messages: list[Any] = [HumanMessage("Weather?")]
    answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Paris") and type(call["args"]["days"]) is int
    messages += [answer, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert chat.bind_tools([weather]).invoke(messages).response_metadata["finish_reason"] in ("stop", "length")
    streamed = None
    for chunk in bound.stream(messages[:1]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None and streamed.tool_calls[0]["args"] == call["args"]


TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"x": {"$ref": "#/$defs/small"}}, "required": ["x"], "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}}}}},
    {"type": "function", "function": {"name": "g"}},
]  # fmt: skip


def test_tool_choice(client: openai.OpenAI) -> None:
    def ask(choice: Any, **more: Any) -> Any:
        return client.chat.completions.create(
            model="base", messages=ASK, tools=TOOLS, tool_choice=choice, max_tokens=200, seed=4, **more
        ).choices[0]

    named = ask({"type": "function", "function": {"name": "f"}})
    assert named.finish_reason == "tool_calls" and named.message.content is None
    (call,) = named.message.tool_calls
    assert call.function.name == "f" and json.loads(call.function.arguments)["x"] in range(10)
    single = ask("required", parallel_tool_calls=False)
    assert len(single.message.tool_calls) == 1 and single.message.tool_calls[0].function.name in ("f", "g")
    assert ask("none").message.tool_calls is None and ask("auto").message.tool_calls is None
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    found = [ask("auto", response_format=form, n=1, temperature=t) for t in (0.5, 1, 1.5, 2)]
    assert all(x.message.tool_calls or json.loads(x.message.content) in (1, 2) for x in found)


def assert_calls_f(folder: Path) -> None:
    """A call that must come is one of f, with its arguments."""
    opened = open_models(folder, "base")
    with Server(opened) as url, openai.OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(
            model="base", messages=ASK, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}
        ).choices[0]
    assert json.loads(choice.message.tool_calls[0].function.arguments)["x"] in range(10)


@pytest.mark.parametrize(
    "template,written",
    [
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]'),
        ('{"name": function name, "parameters": dictionary of argument name and its value}',
         '{"name": "f", "parameters": {"x": 1}}'),
    ],
    ids=["Mistral", "Llama"],
)  # fmt: skip
def test_calls_of_other_families(tmp_path: Path, template: str, written: str) -> None:
    source = (
        "{% if tools %}{% raw %}"
        + template
        + "{% endraw %}{% endif %}"
        + TEMPLATE.partition("endif %}")[2].replace("<tool", "<")
    )
    assert_calls_f(write_model(tmp_path / "m", source))
    notation = next(x for x in NOTATIONS if x.mark in source)
    reader = CallReader(notation, {"f"}, single=False)
    assert "".join(map(reader.add, written)) == ""
    assert [x["function"]["arguments"] for x in reader.end()[1]] == ['{"x": 1}']


def test_calls_between_special_tokens(tmp_path: Path) -> None:
    """Some vocabularies have the marks as special tokens, which a text does not contain."""
    found = tokenizer.make("bpe:300", WORDS)
    found.inner.add_special_tokens(["<tool_call>", "</tool_call>"])
    hg.save(make_model(**{**SHAPE, "n_vocab": found.n_vocab + 2, "n_context": 2048}), tmp_path / "m")
    found.write(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE)
    assert_calls_f(tmp_path / "m")


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "text,content,names",
    [
        ("Hello <b>you</b>", "Hello <b>you</b>", []), (f"Let me see.\n{CALL}", "Let me see.", ["f"]),
        (f"{CALL}\n{CALL}", "", ["f", "f"]), (CALL.removesuffix("</tool_call>"), "", ["f"]),
        ('<tool_call>[{"name": "f"}, {"name": "f"}]</tool_call>', "", ["f", "f"]),
        *((x, x, []) for x in ("<tool_call>{", "a<tool_c", '<tool_call>{"name": "no"}</tool_call>')),
        ('<tool_call>{"name": {}}', '<tool_call>{"name": {}}', []),
        *((x, x, []) for x in ('<tool_call>{"name": "f", "arguments": 3}', '<tool_call>[{"name": "f"}, 3]')),
    ],
)  # fmt: skip
def test_calls_in_a_text(text: str, content: str, names: list[str]) -> None:
    """Piece by piece, as a stream has it: nothing of a call is given as text."""
    for size in (1, 3, 1000):
        reader = CallReader(NOTATIONS[0], {"f"}, single=False)
        certain = "".join(reader.add(text[i : i + size]) for i in range(0, len(text), size))
        rest, calls = reader.end()
        assert (certain + rest).strip() == content and [x["function"]["name"] for x in calls] == names
        assert not names or "<tool_call>" not in certain + rest


def test_a_model_whose_calls_are_unknown(tmp_path: Path) -> None:
    opened = open_models(write_model(tmp_path / "m", TEMPLATE.replace("<tool_call>", "<call>")), "base")
    asked = {"model": "base", "messages": ASK, "tools": TOOLS, "max_tokens": 5}
    with Server(opened) as url, openai.OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(**asked).choices[0].message.tool_calls is None
        with pytest.raises(openai.BadRequestError, match="is not known: give tool_choice auto"):
            client.chat.completions.create(**asked, tool_choice="required")


# ── other parameters ────────────────────────────────────────────────────────────────────────────────────────────────


def test_penalties_bias_and_ends(client: openai.OpenAI, server: Server) -> None:
    def ask(**more: Any) -> Any:
        asked = {"model": "base", "prompt": "ab", "max_tokens": 12, "temperature": 0, "logprobs": 0, **more}
        return client.completions.create(**asked).choices[0]

    forced = ask(logit_bias={"65": 100})
    assert forced.text == "A" * 12 and min(forced.logprobs.token_logprobs) < -1  # the model's own, without the bias
    assert ask(logit_bias={"65": 100}, extra_body={"stop_token_ids": [65]}).finish_reason == "stop"
    varied = ask(logit_bias={str(i): 90 for i in (65, 66, 67)}, frequency_penalty=2, presence_penalty=2)
    assert {varied.text.count(x) for x in "ABC"} == {4}
    model = server.runner.model
    options = {"frequency_penalty": 1.2, "presence_penalty": -0.3, "temperature": 0.9, "seed": 5}
    assert (
        ask(**options).text
        == hg.generate(model, "ab", 12, format="raw", **options)
        != ask(temperature=0.9, seed=5).text
    )


def test_ignore_eos_and_health(tmp_path: Path) -> None:
    write_models(tmp_path)
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": 65}))
    opened = open_models(tmp_path / "base", "base")
    with Server(opened, api_key="k") as url, openai.OpenAI(base_url=f"{url}v1", api_key="k", max_retries=0) as client:
        asked = {"model": "base", "prompt": "ab", "max_tokens": 3, "logit_bias": {"65": 100}}
        ended = client.completions.create(**asked).choices[0]
        assert (ended.text, ended.finish_reason) == ("", "stop")
        goes_on = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
        assert (goes_on.text, goes_on.finish_reason) == ("AAA", "length")
        with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as anyone:
            assert anyone.get("/health", cast_to=object) == {"status": "ok"}
            with pytest.raises(openai.AuthenticationError):
                anyone.get("/v1/models", cast_to=object)


def test_embeddings_are_the_mean_of_the_last_layer(tmp_path: Path) -> None:
    from transformers import AutoModel

    write_models(tmp_path)
    opened = open_models(tmp_path / "base", "base", {"one": tmp_path / "one"})
    reference = AutoModel.from_pretrained(tmp_path / "base", dtype=torch.float64).eval()
    texts = ["Once upon a time", "naïve"]
    with Server(opened) as url, openai.OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as client:
        for form in ("float", openai.NOT_GIVEN):  # by default the client asks for base64
            found = client.embeddings.create(model="base", input=texts, encoding_format=form)
            assert found.usage.prompt_tokens == found.usage.total_tokens == 22
            for text, entry in zip(texts, found.data, strict=True):
                with torch.no_grad():
                    expected = reference(torch.tensor([list(text.encode())])).last_hidden_state[0].mean(0)
                assert entry.embedding == pytest.approx(expected.tolist(), abs=1e-6)
        other = client.embeddings.create(model="one", input=list(b"abc"), encoding_format="float").data[0].embedding
        assert other != client.embeddings.create(model="base", input="abc", encoding_format="float").data[0].embedding


def test_an_adapter_alone_is_served_as_the_model(tmp_path: Path) -> None:
    write_models(tmp_path)
    opened = open_models(tmp_path / "two", "two")
    expected = hg.generate(hg.load(tmp_path / "two"), "ab", 5, format="raw")
    with Server(opened) as url, openai.OpenAI(base_url=f"{url}v1", api_key="k", max_retries=0) as client:
        found = client.completions.create(model="two", prompt="ab", max_tokens=5, temperature=0)
    assert found.choices[0].text == expected
