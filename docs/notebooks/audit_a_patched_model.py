# %% [markdown]
# # Audit a patched model
#
# A fused kernel, a patch, an adapter: the forward pass is right, the loss falls, and yet a gradient is wrong. `hg.audit`
# runs a model's own backward pass and compares every error signal and every gradient with the hand-derived ones.

# %% [markdown]
# **A sound model.** A small Llama of transformers, with random weights, and a batch.

# %%
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import handgrad as hg

shape = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape, **special))
with torch.no_grad():
    for p in model.parameters():
        p += 0.1 * torch.randn(p.shape)
batch = torch.randint(31, (2, 12))

report = hg.audit(model, batch)
print(report)
assert report.passed

# %% [markdown]
# **A patch.** Somebody replaces the norm by an `autograd.Function` that is faster. Its forward pass is right. Its backward
# pass forgets the part along the output, as if the root mean square were a constant.


# %%
class FastNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w, eps):
        inverse = (a.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(a, w, inverse)
        return a * inverse * w

    @staticmethod
    def backward(ctx, delta):
        a, w, inverse = ctx.saved_tensors
        grad_w = (delta * a * inverse).reshape(-1, len(w)).sum(0)
        return delta * w * inverse, grad_w, None  # the second term is missing


norm = model.model.layers[1].post_attention_layernorm
norm.forward = lambda a: FastNorm.apply(a, norm.weight, norm.variance_epsilon)

# %% [markdown]
# **The audit names the layer.** The first wrong tensor on the way back is the one before this norm.

# %%
report = hg.audit(model, batch, setup=False)
print(report)
assert not report.passed

# %% [markdown]
# **Repaired.** With the missing term the audit passes again.


# %%
class RightNorm(FastNorm):
    @staticmethod
    def backward(ctx, delta):
        a, w, inverse = ctx.saved_tensors
        a_bar, g = a * inverse, delta * w
        grad_w = (delta * a_bar).reshape(-1, len(w)).sum(0)
        return inverse * (g - a_bar * (g * a_bar).mean(-1, keepdim=True)), grad_w, None


norm.forward = lambda a: RightNorm.apply(a, norm.weight, norm.variance_epsilon)
assert hg.audit(model, batch, setup=False).passed
