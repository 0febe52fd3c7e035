"""Chat templates: rendering equals that of transformers, and the assistant's text is located exactly."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models
from transformers import PreTrainedTokenizerFast

from handgrad.errors import HandgradError
from handgrad.text import chat_template
from handgrad.text.chat_template import ChatTemplate
from handgrad.text.tokenizer import read_extra_files

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

MARKED = """
{%- for m in messages %}
    {{- '<|' + m.role + '|>\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.content + eos_token + '\\n' }}{% endgeneration %}
    {%- else %}
        {{- m.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""

TEMPLATES = {
    "marked": MARKED,
    "plain": "{{ bos_token }}{% for m in messages %}{{ m['role'].upper() }}: {{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}",
    # no header for the answer; the system message becomes part of the first question
    "brackets": """
{%- set ns = namespace(system='') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- set ns.system = m.content + '\\n' %}
        {%- continue %}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- bos_token + '[Q] ' + (ns.system if loop.index0 <= 1 else '') + m.content + ' [A]' }}
    {%- else %}
        {{- ' ' + m.content + eos_token }}
    {%- endif %}
{%- endfor %}""",
    # whitespace, a macro, JSON, tools that are None, special tokens that do not exist
    "odd": """{% macro head(role) -%}
<{{ role }}>
{%- endmacro %}
{% if tools is none and not documents %}
    none
{% endif %}
{{ sep_token }}{{ {'é': '<&>', 'n': [1, none]} | tojson }} {{ [1] | tojson(indent=2) }}
{% for m in messages %}
    {% if loop.index > 90 %}{% break %}{% endif %}
{{ head(m.role) }}
  {{ m.content }}
    {% endfor %}
{% if add_generation_prompt %}
{{ head('assistant') }}
  {% endif %}
""",
}

TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}],
    "two": [
        {"role": "system", "content": "Be short.\n"},
        {"role": "user", "content": "  naïve — 東京 🙂 <b>&amp;</b> {{ bos_token }}"},
        {"role": "assistant", "content": "Oh\r\n\tindeed"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "Bye"},
    ],
    "unanswered": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
}


def transformers_tokenizer(source: str) -> PreTrainedTokenizerFast:
    inner = tokenizers.Tokenizer(
        models.BPE(byte_fallback=True, vocab={f"<0x{i:02X}>": i for i in range(256)}, merges=[])
    )
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL.values()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=source, **SPECIAL)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("talk", TALKS)
def test_renders_like_transformers(template: str, talk: str) -> None:
    ours, oracle = ChatTemplate(TEMPLATES[template], SPECIAL), transformers_tokenizer(TEMPLATES[template])
    for generation_prompt in (False, True):
        expected = oracle.apply_chat_template(TALKS[talk], tokenize=False, add_generation_prompt=generation_prompt)
        assert ours.render(TALKS[talk], generation_prompt) == expected
    pieces = ours.segments(TALKS[talk])
    assert "".join(text for text, _ in pieces) == ours.render(TALKS[talk])
    answers = [m["content"].strip() for m in TALKS[talk] if m["role"] == "assistant"]
    assert [text.strip().removesuffix("</s>") for text, learn in pieces if learn] == answers


@pytest.mark.parametrize("talk", TALKS)
def test_assistant_segments_equal_those_a_template_marks(talk: str) -> None:
    found = transformers_tokenizer(MARKED).apply_chat_template(
        TALKS[talk], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    oracle = transformers_tokenizer(MARKED)
    mask: list[int] = []
    ids: list[int] = []
    for text, learn in ChatTemplate(MARKED, SPECIAL).segments(TALKS[talk]):
        piece = oracle(text, add_special_tokens=False)["input_ids"]
        ids += piece
        mask += [int(learn)] * len(piece)
    assert ids == found["input_ids"] and sum(mask) > 0
    assert mask == found["assistant_masks"]


def test_the_clock_is_fixed() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y, %f') }}", now=datetime(2024, 2, 29))
    assert template.render([{"role": "user", "content": "a"}]) == "29 February 2024, 000000"
    before = datetime.now().isoformat()
    today = ChatTemplate("{{ strftime_now('%Y-%m-%dT%H:%M:%S.%f') }}").render(TALKS["one"])
    assert before <= today <= datetime.now().isoformat()
    running = ChatTemplate("{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert [learn for _, learn in running.segments(TALKS["unanswered"])] == [False, True, False]


def test_templates_that_are_not_incremental_are_rejected() -> None:
    last_only = (
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(last_only).segments(TALKS["one"]) == [("Why?", False), ("Because.", True)]
    with pytest.raises(HandgradError, match=r"not incremental.* message 3 .*chat_template='FILE'"):
        ChatTemplate(last_only).segments(TALKS["two"])
    header_only_in_prompt = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    with pytest.raises(HandgradError, match="not incremental"):
        ChatTemplate(header_only_in_prompt).segments(TALKS["one"])
    closed_late = (
        "{% for m in messages %}{{ m.content }}{{ '' if loop.last and add_generation_prompt else ';' }}{% endfor %}"
    )
    assert ChatTemplate(closed_late).segments(TALKS["one"]) == [("Why?", False), (";Because.;", True)]
    with pytest.raises(HandgradError, match="not incremental"):
        ChatTemplate(closed_late).segments([*TALKS["one"], {"role": "assistant", "content": "Really."}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "t.jinja fails for this conversation: roles must alternate"),
        ("{{ messages[9].content.x }}", "fails for this conversation"),
        ("{{ 'a' + 1 }}", "fails for this conversation"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_errors_inside_a_template_are_reported(source: str, message: str) -> None:
    with pytest.raises(HandgradError, match=message):
        ChatTemplate(source, name="t.jinja").render(TALKS["one"])


def test_syntax_errors_are_reported_with_their_line() -> None:
    with pytest.raises(HandgradError, match=r"t\.jinja, line 2, is not a chat template: .*endfor"):
        ChatTemplate("a\n{% endfor %}", name="t.jinja")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", 'messages is "Hello", not a list'),
        ([], "messages is empty"),
        (["Hello"], 'message 1 is "Hello", not an object'),
        ([{"role": "user"}], "message 1 has no content: it has role"),
        ([{"content": "a"}], "message 1 has no role: it has content"),
        ([{}], "message 1 has no role: it has nothing"),
        (
            [TALKS["one"][0], {"role": "human", "content": "a"}],
            'message 2 has the role "human"; allowed: system, user',
        ),
        ([{"role": ["user"], "content": "a"}], r'has the role \["user"\]'),
        ([{"role": "user", "content": None}], "message 1: its content is null, not a string"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "its content is .*, not a string or a list of text",
        ),
        ([{"role": "user", "content": [{"type": "image", "text": "a"}]}], "its content is .*, not a string"),
        ([{"role": "user", "content": []}], "its content is .*, not a string"),
        ([{"role": "user", "content": ["a" * 90]}], "its content is .*…, not a string"),
        (
            [{"role": "assistant", "content": [{"type": "text", "text": ""}]}],
            "message 1: the assistant's content is empty",
        ),
        ([{"role": "assistant", "content": ""}], "message 1: the assistant's content is empty"),
    ],
)
def test_invalid_messages_are_rejected(messages: Any, message: str) -> None:
    for method in (ChatTemplate("").render, ChatTemplate("").segments):
        with pytest.raises(HandgradError, match=message):
            method(messages)


def test_content_in_parts_is_joined() -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]},
        TALKS["one"][1],
    ]
    for source in TEMPLATES.values():
        template = ChatTemplate(source, SPECIAL)
        assert template.render(parts) == template.render(TALKS["one"])
        assert template.segments(parts) == template.segments(TALKS["one"])
    assert parts[0]["content"][0]["text"] == "Wh"


def test_long_conversations_up_to_the_maximum() -> None:
    talk = [{"role": ("user", "assistant")[i % 2], "content": f" {i} "} for i in range(400)]
    for name in TEMPLATES:
        pieces = ChatTemplate(TEMPLATES[name].replace("> 90", "> 900"), SPECIAL).segments(talk)
        assert [text.strip().removesuffix("</s>").strip() for text, learn in pieces if learn] == [
            str(i) for i in range(1, 400, 2)
        ]
    with pytest.raises(HandgradError, match="a conversation has 401 messages; the maximum is 400"):
        ChatTemplate(TEMPLATES[name], SPECIAL).segments([*talk, talk[0]])


def template_of(folder: Path) -> ChatTemplate:
    return chat_template.of_files(read_extra_files(folder), folder)


def test_where_the_template_is_searched(tmp_path: Path) -> None:
    settings = tmp_path / "tokenizer_config.json"
    with pytest.raises(HandgradError, match=r"no chat template.*give one with chat_template='FILE', or write the data"):
        template_of(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<old>", "eos_token": "<e>"}')
    settings.write_text(
        json.dumps({"bos_token": {"content": "<b>", "special": True}, "add_bos_token": True, "chat_template": "config"})
    )
    found = template_of(tmp_path)
    assert found.source == "config" and found.special == {"bos_token": "<b>", "eos_token": "<e>"}
    listed = [{"name": "tools", "template": "x"}, {"name": "default", "template": "listed"}]
    settings.write_text(json.dumps({"chat_template": listed}))
    assert template_of(tmp_path).source == "listed"
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert template_of(tmp_path).source == "file é"
    assert template_of(tmp_path).special == {"bos_token": "<old>", "eos_token": "<e>"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", b"[]", "must contain a JSON object"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "rag", "template": "x"}]}',
            "named rag, none named default",
        ),
        ("tokenizer_config.json", b'{"chat_template": 3}', "has no chat template"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja is not UTF-8"),
        ("chat_template.jinja", b"{% if %}", r"chat_template\.jinja, line 1, is not a chat template"),
    ],
)
def test_damaged_model_folders_are_reported(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HandgradError, match=message):
        template_of(tmp_path)
