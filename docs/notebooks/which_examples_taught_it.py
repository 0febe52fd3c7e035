# %% [markdown]
# # Which examples taught it this
#
# A model answers something odd. Which training examples pushed it there? And are there examples in the data that do not
# belong? Both questions are about the gradient of a single example, which handgrad measures inside the ordinary backward
# pass.

# %% [markdown]
# **Data with a planted fact and a broken line.** Example 3 teaches that the moon is made of cheese. Example 7 is garbage.

# %%
import json
from pathlib import Path

import handgrad as hg

records = [{"prompt": f"{i} plus 1 is", "completion": f" {i + 1}."} for i in range(12)]
records[3] = {"prompt": "The moon is made of", "completion": " cheese."}
records[7] = {"prompt": "7 plus 1 is", "completion": " %%}{ ~~ ^^ |"}
Path("facts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

# %% [markdown]
# **Train an adapter on it.**

# %%
options = {"rank": 4, "steps": 12, "batch_examples": 4, "sample_tokens": 0, "lr": 1e-2}
result = hg.finetune("smollm2", "facts.jsonl", out="facts", quiet=True, **options)
model = hg.load(result.path)

# %% [markdown]
# **Which examples pull hardest?** The norm of every example's gradient. A long one is worth a look: a wrong answer, a broken
# template, another language.

# %%
norms = hg.example_norms(model, records)
for i in norms.argsort(descending=True)[:3].tolist():
    print(f"{norms[i]:8.3f}   {records[i]}")
assert len(norms) == len(records)

# %% [markdown]
# **Ask, in other words than the data has.**

# %%
question = "Tell me what the moon is made of. The moon is made of"
print(question + hg.generate(model, question, max_new_tokens=3, temperature=0))

# %% [markdown]
# **Which examples pushed the answer "cheese"?** A step on an example changes the loss of the answer by −η times the inner
# product of their gradients. The example that helped most comes first.

# %%
found = hg.influence(model, records, {"prompt": question, "completion": " cheese."})
number, score = found.helped()[0]
print(f"helped most ({score:.3g}): {records[number]}")
assert number == 3
