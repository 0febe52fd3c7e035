"""A tiny chat model that was trained for a moment on two conversations, with a byte tokenizer and a chat template."""

import json
from pathlib import Path

import torch

import handgrad as hg
from handgrad.text.tokenizer import make

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALKS = [
    "[user]hello\n[assistant]good day to you\n[user]and now?\n[assistant]now we talk\n",
    "[system]be brief\n[user]hello\n[assistant]hé 🙂 hi\n[user]and now?\n[assistant]bye then\n",
]


def write_chat_model(folder: Path, seed: int = 0, n_context: int = 128, steps: int = 60) -> None:
    """Write a model that ends its answers with a line feed."""
    model = hg.GPT(
        hg.preset("nano-llama", n_vocab=256, n_context=n_context, d_model=32, n_heads=2, n_kv_heads=1, n_blocks=2),
        seed=seed,
    )
    texts = [torch.tensor(list(talk.encode())) for talk in TALKS]
    lengths = [len(ids) - 1 for ids in texts]
    tokens, targets = torch.cat([x[:-1] for x in texts]), torch.cat([x[1:] for x in texts])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss_and_grads(tokens, targets, lengths)
        optimizer.step()
    hg.save(model, folder)
    tokenizer = make("bytes", [])
    tokenizer.extra_files["tokenizer_config.json"] = json.dumps({"chat_template": TEMPLATE})
    tokenizer.write(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [10]}')
