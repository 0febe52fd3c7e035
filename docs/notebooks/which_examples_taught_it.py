# %% [markdown]
# # Which examples taught it this
#
# A model answers something odd. Which training examples pushed it there? And are there examples in the data that do not
# belong? Both questions are about the gradient of a single example, which handgrad measures inside the ordinary backward
# pass.

# %% [markdown]
# **Data with a planted fact and a broken line.** Record 4 teaches that the moon is made of cheese. Record 8 is garbage.

# %%
import json
from pathlib import Path

import handgrad as hg

records = [{"prompt": f"{i} plus 1 is", "completion": f" {i + 1}."} for i in range(12)]
records[3] = {"prompt": "The moon is made of", "completion": " cheese."}
records[7] = {"prompt": "7 plus 1 is", "completion": " %%}{ ~~ ^^ |"}
Path("facts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

# %% [markdown]
# **Train an adapter on it**, and measure the norm of every example's gradient in every step.

# %%
options = {"rank": 4, "lr": 1e-2, "steps": 24, "batch_examples": 6, "val_share": 0.0, "sample_tokens": 0}
result = hg.finetune("smollm2", "facts.jsonl", out="facts", quiet=True, example_norms=True, **options)

# %% [markdown]
# **Which examples pull hardest?** Those whose gradients were the longest for their number of targets. A long one is worth a
# look: a wrong answer, a broken template, another language. `facts/report.html` has the same list.

# %%
for outlier, shown in result.outlying.rows[:3]:
    print(f"record {shown.record}: {outlier.times:.1f} times as long as is typical: {shown.prompt} → {shown.answer}")
assert result.outlying.total == len(records)

# %% [markdown]
# **Ask, in other words than the data has.**

# %%
model = hg.load(result.path)
question = "Tell me what the moon is made of."
print(hg.generate(model, question, max_new_tokens=8, temperature=0))

# %% [markdown]
# **Which example pushed the answer "cheese"?** A step on an example changes the loss of the answer by −η times the inner
# product of their gradients. The model has learned the fact, so the gradient of its source is short by now; the cosine
# compares directions alone.

# %%
found = hg.influence(model, records, {"prompt": question, "completion": " cheese."})
number, score = found.helped(by="cosine")[0]
print(f"helped most (cosine {found.cosines[number, 0]:.2f}): {records[number]}")
assert number == 3
