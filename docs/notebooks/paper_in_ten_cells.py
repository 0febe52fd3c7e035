# %% [markdown]
# # The paper in ten cells
#
# A transformer with one block, forward and backward, by the equations of the paper. Every function of `handgrad.paper` is
# one equation; the number in each comment is the paper's. Nothing here uses automatic differentiation.

# %% [markdown]
# **1. Parameters.** $n_T = 5$ tokens, $d = 6$ features, two heads, a vocabulary of 11.

# %%
import torch

from handgrad.paper import activation, attention, embedding, layernorm, linear, loss
from handgrad.paper.attention import Head

torch.manual_seed(0)
n_vocab, n_context, d, d_rho, d_h, eps = 11, 8, 6, 2, 3, 1e-5


def draw(*shape):
    return 0.5 * torch.randn(*shape, dtype=torch.float64)


w_tok, w_pos = draw(n_vocab, d), draw(n_context, d)
w_1, b_1, w_5, b_5, w_10, b_10 = 1 + draw(d), draw(d), 1 + draw(d), draw(d), 1 + draw(d), draw(d)
heads = [Head(draw(d, d_rho), draw(d_rho), draw(d, d_rho), draw(d_rho), draw(d, d_h), draw(d_h)) for _ in range(2)]
w_3, b_3, w_6, b_6, w_8, b_8 = draw(2 * d_h, d), draw(d), draw(d, 4 * d), draw(4 * d), draw(4 * d, d), draw(d)
a_0 = torch.tensor([3, 1, 4, 1, 5])
targets = loss.next_tokens(a_0)
print("tokens ", a_0.tolist())
print("targets", targets.tolist())

# %% [markdown]
# **2. Embedding.** $a_1 = \mathrm{ohe}(a_0) w_{\mathrm{tok}} + \mathrm{ohe}(0, 1, \dots) w_{\mathrm{pos}}$

# %%
positions = torch.arange(len(a_0))
a_1 = embedding.forward(a_0, w_tok) + embedding.forward(positions, w_pos)  # (2)
print("a_1", tuple(a_1.shape))

# %% [markdown]
# **3. LayerNorm.** Every row gets mean 0 and standard deviation 1, then a gain and an offset.

# %%
norm_1 = layernorm.forward(a_1, w_1, b_1, eps)  # (36) to (38)
a_2 = norm_1.a
print("mean of each row of the normalized input:", norm_1.a_bar.mean(1).abs().max() < 1e-12)

# %% [markdown]
# **4. Attention.** Row $t$ of $\rho$ says how much token $t$ takes from each earlier token.

# %%
many = attention.forward_heads(a_2, heads)  # (4) to (18), and (34)
a_3 = many.a
print(many.heads[0].rho.round(decimals=2))

# %% [markdown]
# **5. Projection and skip connection.**

# %%
a_4 = linear.forward(a_3, w_3, b_3)
a_5 = a_1 + a_4

# %% [markdown]
# **6. Feed-forward layer and skip connection.**

# %%
norm_5 = layernorm.forward(a_5, w_5, b_5, eps)
a_7 = linear.forward(norm_5.a, w_6, b_6)
a_8 = activation.g(a_7, "gelu_tanh")
a_10 = a_5 + linear.forward(a_8, w_8, b_8)

# %% [markdown]
# **7. Logits and loss.** The head is the token embedding again: one matrix, used twice.

# %%
norm_10 = layernorm.forward(a_10, w_10, b_10, eps)
a_12 = norm_10.a @ w_tok.t()
print("loss", loss.forward(a_12, targets).item())

# %% [markdown]
# **8. Backward: from the loss to the feed-forward layer.** $\Delta_i$ is the derivative of the loss with respect to $a_i$.

# %%
delta_12 = loss.delta_logits(torch.softmax(a_12, 1), targets)
delta_10 = layernorm.delta_prev(delta_12 @ w_tok, norm_10.a_bar, norm_10.sigma, w_10)  # (40)
delta_8 = linear.delta_prev(delta_10, w_8)
delta_7 = activation.delta_prev(delta_8, a_7, "gelu_tanh")
delta_6 = linear.delta_prev(delta_7, w_6)
delta_5 = delta_10 + layernorm.delta_prev(delta_6, norm_5.a_bar, norm_5.sigma, w_5)  # the skip adds its own Δ
print("the last token has no target, so its row is 0:", bool((delta_5[-1] == 0).all()))

# %% [markdown]
# **9. Backward: attention, LayerNorm, embedding.** The tied matrix gets the sum of both gradients.

# %%
delta_3 = linear.delta_prev(delta_5, w_3)
back = attention.backward_heads(delta_3, a_2, heads, many)  # (22) to (35)
delta_1 = delta_5 + layernorm.delta_prev(back.delta, norm_1.a_bar, norm_1.sigma, w_1)
grad_w_tok = embedding.grad_w(delta_1, a_0, n_vocab) + delta_12.t() @ norm_10.a  # (3) and the head
grad_w_q = back.heads[0].grads.w_q  # (31.a)
print(
    "rows of the error signal of the attention weights sum to 0:", back.heads[0].delta_causal.sum(1).abs().max() < 1e-14
)

# %% [markdown]
# **10. Proof.** Move $w_{\mathrm{tok}}$ and $w_q$ a little and measure the loss: the same numbers without any derivative.


# %%
def loss_with(w_tok, w_q):
    a_1 = embedding.forward(a_0, w_tok) + embedding.forward(positions, w_pos)
    a_3 = attention.forward_heads(layernorm.forward(a_1, w_1, b_1, eps).a, [heads[0]._replace(w_q=w_q), heads[1]]).a
    a_5 = a_1 + linear.forward(a_3, w_3, b_3)
    a_7 = linear.forward(layernorm.forward(a_5, w_5, b_5, eps).a, w_6, b_6)
    a_10 = a_5 + linear.forward(activation.g(a_7, "gelu_tanh"), w_8, b_8)
    return loss.forward(layernorm.forward(a_10, w_10, b_10, eps).a @ w_tok.t(), targets)


h, w_q = 1e-5, heads[0].w_q
v_tok, v_q = draw(n_vocab, d), draw(d, d_rho)
measured = (loss_with(w_tok + h * v_tok, w_q + h * v_q) - loss_with(w_tok - h * v_tok, w_q - h * v_q)) / (2 * h)
formula = (grad_w_tok * v_tok).sum() + (grad_w_q * v_q).sum()
print(f"formula {formula:.8f}, measured {measured:.8f}")
assert abs(formula - measured) < 1e-7 * abs(formula)
