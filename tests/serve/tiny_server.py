"""A tiny model with a byte tokenizer and a chat template, two adapters of it, and a server of all three."""

import http.client
import json
from pathlib import Path
from typing import Any

import torch

import handgrad as hg
from conftest import make_model, perturb
from handgrad.serve.routes import Server
from handgrad.serve.served_models import Models, open_models
from handgrad.text import tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SHAPE = {"n_vocab": 256, "n_context": 160, "d_model": 16, "n_heads": 2, "n_blocks": 2}


def write_models(folder: Path) -> Path:
    """Write the folders base, one and two, in float64: results can be compared to the last digits."""
    model = make_model(**SHAPE)
    hg.save(model, folder / "base")
    tokenizer.make("bytes", []).write(folder / "base")
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE)
    for i, name in enumerate(("one", "two")):
        model = hg.load(folder / "base")
        hg.lora.inject(model, rank=2, dora=name == "two")
        perturb(model, seed=i)
        hg.lora.save(model, folder / name)
    return folder


def open_tiny(folder: Path) -> Models:
    return open_models(folder / "base", "base", {"one": folder / "one", "two": folder / "two"})


def post(server: Server, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Send JSON, or bytes as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.split(":")[-1][:-1]))
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, raw, {"Content-Type": "application/json", **(headers or {})})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text)


def expected_logprobs(model: hg.GPT, ids: list[int]) -> torch.Tensor:
    """(n − 1, V) log-probabilities of every next token, computed directly."""
    return torch.log_softmax(model.logits(torch.tensor([ids]))[0, :-1], 1)
