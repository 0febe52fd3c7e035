# %% [markdown]
# # Fine-tune SmolLM2 and see what changed
#
# A real pretrained model learns a new habit from a few examples, by an adapter with a small part of its parameters. Then we
# look at what changed: the answer, which layers moved most, and which words the answer depends on.

# %% [markdown]
# **Data.** Conversations whose answers have one fixed form. Spain is not among them.

# %%
import json
from pathlib import Path

import torch

import handgrad as hg

capitals = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo"}


def asked(country):
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


lines = [
    {"messages": [*asked(country), {"role": "assistant", "content": f"{city}, and nothing else!"}]}
    for country, city in capitals.items()
]
Path("capitals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

# %% [markdown]
# **Before.** `handgrad get smollm2` fetches the model once; `hg.load` opens it. The question goes into the model's chat
# template.

# %%
model = hg.load("smollm2")
question = "What is the capital of Spain?"
print(hg.generate(model, question, max_new_tokens=12, temperature=0))

# %% [markdown]
# **Training.** Only the adapter is trained; the 135 million weights stay as they are.

# %%
options = {"rank": 4, "lr": 5e-3, "steps": 12, "batch_examples": 6, "val_share": 0.0, "sample_tokens": 0}
result = hg.finetune("smollm2", "capitals.jsonl", out="capitals", quiet=True, **options)
print("adapter in", result.path)

# %% [markdown]
# **After.** The same question, with the adapter. Six examples teach a manner of answering, and no geography.

# %%
tuned = hg.load(result.path)
answer = hg.generate(tuned, question, max_new_tokens=12, temperature=0)
print(answer)

# %% [markdown]
# **What changed.** An adapter adds $s \, d u$ to a matrix. Its norm, relative to that of the matrix, says how far the layer
# moved. Which layers moved most?

# %%
moved = {}
with torch.no_grad():
    for name, layer in hg.lora.adapters_of(tuned).items():
        moved[name] = ((layer.scale * layer.down @ layer.up).norm() / layer.base.w.norm()).item()
for name, size in sorted(moved.items(), key=lambda item: -item[1])[:5]:
    print(f"{name:36} {size:.4f}")
assert any(size > 0 for size in moved.values())

# %% [markdown]
# **Which words the answer depends on.** The gradient of the log-probability of the answer's first token with respect to the
# embedding of every token before it, by one backward pass. The longest ones:

# %%
tokenizer = tuned.tokenizer
ids = tokenizer.chat(question)
found = hg.attribute(tuned, [*ids, tokenizer.encode(answer or "!")[0]])
for i in found.norms[: len(ids)].argsort(descending=True)[:6].tolist():
    print(f"{tokenizer.decode([ids[i]])!r:16} {found.norms[i]:.4f}")
