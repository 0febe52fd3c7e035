# %% [markdown]
# # Fine-tune SmolLM2 and see what changed
#
# A real pretrained model learns a new habit from a few examples, by an adapter with a small part of its parameters. Then we
# look at what changed: the loss, the answers, and which layers moved most.

# %% [markdown]
# **Data.** Questions with answers in one fixed form.

# %%
import json
from pathlib import Path

import torch

import handgrad as hg
from handgrad.formats.models import tokenizer_of

capitals = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo"}
lines = [
    {"prompt": f"The capital of {country}?", "completion": f" It is {city}, and nothing else."}
    for country, city in capitals.items()
]
Path("capitals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines * 4))

# %% [markdown]
# **Before.** `handgrad get smollm2` fetches the model once. `hg.load` opens it. The question is asked as
# it is, without a chat template.

# %%
model = hg.load("smollm2")
question = "The capital of Peru?"
before = hg.generate(model, question, max_new_tokens=8, temperature=0)
print(before)

# %% [markdown]
# **Training.** Only the adapter is trained; the 135 million weights stay as they are.

# %%
options = {"rank": 4, "steps": 8, "batch_examples": 4, "sample_tokens": 0}
result = hg.finetune("smollm2", "capitals.jsonl", out="capitals", quiet=True, **options)
print("adapter in", result.path)

# %% [markdown]
# **After.** The same question, with the adapter.

# %%
tuned = hg.load(result.path)
print(hg.generate(tuned, question, max_new_tokens=8, temperature=0))

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
# **Which words the answer depends on.** The gradient of the answer's first token with respect to the embedding of every
# token of the question, by one backward pass.

# %%
tokenizer = tokenizer_of(result.path)
ids = tokenizer.encode(question + " It")
found = hg.attribute(tuned, ids)
for id, norm in zip(ids, found.norms.tolist(), strict=True):
    print(f"{tokenizer.decode([id])!r:12} {norm:.4f}")
