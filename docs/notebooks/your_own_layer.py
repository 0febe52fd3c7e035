# %% [markdown]
# # Write and check your own layer
#
# A layer is a forward pass, a derivation and a backward pass. Here: a softplus gate $a_i = \log(1 + e^{a}) \circ c$ with one
# gain per feature, derived by hand, checked by `hg.check`, and used inside a PyTorch model.

# %% [markdown]
# **Derive.** Expand $\Delta \cdot \mathrm{d}a_i$ and read off the factors. With $s(a) = \log(1 + e^a)$ and
# $s'(a) = \sigma(a)$,
#
# $$
# \Delta \cdot \mathrm{d}a_i = [\Delta \circ \tilde c \circ \sigma(a)] \cdot \mathrm{d}a
# + [\sum_{\mathrm{tok}} \Delta \circ s(a)] \cdot \mathrm{d}c
# $$

# %%
import torch

import handgrad as hg


def forward(a, c):
    assert a.shape[1:] == c.shape, "c has one gain per feature"  # no broadcasting: backward does not sum for it
    return torch.nn.functional.softplus(a) * c


def backward(delta, a, c):
    return delta * c * torch.sigmoid(a), (delta * torch.nn.functional.softplus(a)).sum(0)


# %% [markdown]
# **Check.** The inputs are given by their dimensions. `hg.check` draws odd shapes, several dtypes, and memory that is not
# contiguous, and compares with differences of the forward pass along random directions. It also tries inputs that
# broadcast. This layer refuses them: without the `assert` the check would say that a sum is missing.

# %%
report = hg.check(forward, "n d", "d", backward=backward)
print(report)
assert report.passed

# %% [markdown]
# **A mistake.** The sum over tokens becomes a mean. The check says which input is wrong, and how.


# %%
def wrong(delta, a, c):
    return delta * c * torch.sigmoid(a), (delta * torch.nn.functional.softplus(a)).mean(0)


report = hg.check(forward, "n d", "d", backward=wrong)
print(report)
assert not report.passed

# %% [markdown]
# **Use.** As an `autograd.Function` the layer trains inside any PyTorch model, beside handgrad's own layers (`hg.nn`).


# %%
class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, c):
        ctx.save_for_backward(a, c)
        return forward(a, c)

    @staticmethod
    def backward(ctx, delta):
        return backward(delta, *ctx.saved_tensors)


assert hg.check(Gate, "n d", "d").passed
torch.manual_seed(0)
first, last = hg.nn.Linear(4, 8), hg.nn.Linear(8, 1)
gain = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.Adam([*first.parameters(), gain, *last.parameters()], lr=1e-2)
x = torch.randn(64, 4)
y = x.prod(1, keepdim=True)
losses = []
for _ in range(60):
    optimizer.zero_grad()
    loss = (last(Gate.apply(first(x), gain)) - y).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
assert losses[-1] < losses[0]
