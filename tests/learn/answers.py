"""Answers to the exercises: two right ones each, written differently from the solution, and wrong ones with their fault."""

from handgrad.learn.course import COURSE

# By index notation, by loops, with keepdim instead of the paper's ~, in another order …
RIGHT: dict[str, tuple[str, str]] = {
    "softmax": (
        """
def backward(delta_rho, rho):
    inner = (delta_rho * rho).sum(-1, keepdim=True)
    return rho * (delta_rho - inner)
""",
        """
import torch

def backward(delta_rho, rho):
    rows = []
    for r, d in zip(rho, delta_rho):
        jacobian = torch.diag(r) - torch.outer(r, r)
        rows.append(jacobian @ d)
    return torch.stack(rows)
""",
    ),
    "loss": (
        """
import torch

def backward(y_pred, targets):
    delta = y_pred.clone()
    known = targets >= 0
    delta[~known] = 0
    rows = torch.arange(len(targets))[known]
    delta[rows, targets[known]] -= 1
    return delta / known.sum()
""",
        """
from handgrad.paper.loss import NO_TARGET
from handgrad.paper.notation import ohe

def backward(y_pred, targets):
    has = (targets != NO_TARGET).double().diag()
    return has @ (y_pred - ohe(targets.clamp(min=0), y_pred.shape[1])) / has.trace()
""",
    ),
    "linear": (
        """
import torch

def backward(delta, a, w):
    return torch.einsum("no,io->ni", delta, w), torch.einsum("ni,no->io", a, delta), delta.sum(0)
""",
        """
import torch

def backward(delta, a, w):
    grad_w = torch.zeros_like(w)
    grad_b = torch.zeros(w.shape[1], dtype=w.dtype)
    for row, d in zip(a, delta):
        grad_w += torch.outer(row, d)
        grad_b += d
    return (w @ delta.T).T, grad_w, grad_b
""",
    ),
    "activation": (
        """
import torch

def backward(delta, x):
    c = (2 / torch.pi) ** 0.5
    e = torch.exp(2 * c * (x + 0.044715 * x**3))
    t = (e - 1) / (e + 1)
    return delta * (0.5 * (1 + t) + 0.5 * x * (1 - t) * (1 + t) * c * (1 + 0.134145 * x**2))
""",
        """
import math
import torch

def backward(delta, x):
    # x · sigmoid(2u) is the same function
    c = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(c * (x + 0.044715 * x.pow(3)))
    slope = c * (1 + 3 * 0.044715 * x.pow(2))
    return delta * s + delta * x * s * (1 - s) * slope
""",
    ),
    "embedding": (
        """
import torch

def backward(delta, ids, n_rows):
    return torch.zeros(n_rows, delta.shape[1], dtype=delta.dtype).index_add_(0, ids, delta)
""",
        """
import torch

def backward(delta, ids, n_rows):
    grad = torch.zeros(n_rows, delta.shape[1], dtype=torch.float64)
    for t, v in enumerate(ids.tolist()):
        grad[v] += delta[t]
    return grad
""",
    ),
    "layernorm": (
        """
def backward(delta, a_bar, sigma, w):
    g = delta * w
    delta_prev = (g - g.mean(1, keepdim=True) - a_bar * (g * a_bar).mean(1, keepdim=True)) / sigma[:, None]
    return delta_prev, (delta * a_bar).sum(0), delta.sum(0)
""",
        """
import torch

def backward(delta, a_bar, sigma, w):
    n, d = delta.shape
    rows = []
    for t in range(n):
        one = torch.ones(d, d, dtype=delta.dtype)
        jacobian = (torch.eye(d, dtype=delta.dtype) - one / d - torch.outer(a_bar[t], a_bar[t]) / d) / sigma[t]
        rows.append(jacobian.T @ (w * delta[t]))
    return torch.stack(rows), torch.einsum("td,td->d", a_bar, delta), delta.T @ torch.ones(n, dtype=delta.dtype)
""",
    ),
    "rmsnorm": (
        """
def backward(delta, a_bar, rms, w):
    g = delta * w
    return (g - a_bar * (g * a_bar).mean(1, keepdim=True)) / rms[:, None], (delta * a_bar).sum(0)
""",
        """
import torch

def backward(delta, a_bar, rms, w):
    d = w.numel()
    a = a_bar * rms[:, None]
    g = delta @ torch.diag(w)
    inner = torch.einsum("td,td->t", g, a)
    return g / rms[:, None] - a * (inner / (d * rms**3))[:, None], torch.diag(a_bar.T @ delta)
""",
    ),
    "gated": (
        """
import torch

def backward(delta, a, gate, up, w_gate, w_up):
    s = torch.sigmoid(gate)
    d_gate = delta * up * (s + gate * s * (1 - s))
    d_up = delta * gate * s
    return d_gate @ w_gate.T + d_up @ w_up.T, a.T @ d_gate, a.T @ d_up
""",
        """
import torch
from handgrad.paper import linear
from handgrad.paper.gated import g, g_prime

def backward(delta, a, gate, up, w_gate, w_up):
    both = torch.cat([delta * up * g_prime(gate, "silu"), delta * g(gate, "silu")], 1)
    grad = a.t() @ both
    f = w_gate.shape[1]
    return linear.delta_prev(both, torch.cat([w_gate, w_up], 1)), grad[:, :f], grad[:, f:]
""",
    ),
    "lora": (
        """
def backward(delta, a, d, u, scale):
    inner = scale * delta @ u.T
    return inner @ d.T, a.T @ inner, scale * (a @ d).T @ delta
""",
        """
import torch

def backward(delta, a, d, u, scale):
    grad = scale * torch.einsum("ni,no->io", a, delta)
    return scale * torch.einsum("no,ro,ir->ni", delta, u, d), grad @ u.T, d.T @ grad
""",
    ),
    "rotary": (
        """
import torch

def backward(delta, positions, theta):
    angle = positions[:, None].double() * theta
    c, s = angle.cos(), angle.sin()
    x, y = delta.chunk(2, 1)
    return torch.cat([c * x + s * y, -s * x + c * y], 1)
""",
        """
import torch
from handgrad.paper.rotary import rotation

def backward(delta, positions, theta):
    out = torch.empty_like(delta)
    for i, t in enumerate(positions.tolist()):
        out[i] = rotation(-t, theta, False) @ delta[i]
    return out
""",
    ),
    "attention": (
        """
import math
import torch
from handgrad.paper.attention import Head

def backward(delta, a, head, saved):
    q, k, v, rho = saved.q, saved.k, saved.v, saved.rho
    d_v = rho.T @ delta
    d_rho = delta @ v.T
    d_raw = rho * (d_rho - (rho * d_rho).sum(1, keepdim=True)) / math.sqrt(q.shape[1])
    d_q, d_k = d_raw @ k, d_raw.T @ q
    delta_prev = d_q @ head.w_q.T + d_k @ head.w_k.T + d_v @ head.w_v.T
    return delta_prev, Head(a.T @ d_q, d_q.sum(0), a.T @ d_k, d_k.sum(0), a.T @ d_v, d_v.sum(0))
""",
        """
import torch
from handgrad.paper.attention import delta_causal, scale

def backward(delta, a, head, saved):
    d_raw = scale(delta_causal(torch.einsum("td,jd->tj", delta, saved.v), saved.rho), head.w_q.shape[1])
    signals = {"q": d_raw @ saved.k, "k": torch.einsum("tj,td->jd", d_raw, saved.q), "v": saved.rho.T @ delta}
    weights = {"q": head.w_q, "k": head.w_k, "v": head.w_v}
    delta_prev = sum(signals[x] @ weights[x].T for x in "qkv")
    grads = []
    for x in "qkv":
        grads += [a.T @ signals[x], torch.zeros_like(head.b_k) if x == "k" else signals[x].sum(0)]
    return [delta_prev, grads]
""",
    ),
    "block": (
        """
from handgrad.paper import activation, attention, layernorm, linear
from handgrad.paper.transformer import Block

def backward(delta_10, p, f, o):
    delta_8 = delta_10 @ p.w_8.T
    delta_7 = delta_8 * activation.g_prime(f.a_7, o.g)
    delta_6 = delta_7 @ p.w_6.T
    delta_5 = delta_10 + layernorm.delta_prev(delta_6, f.norm_5.a_bar, f.norm_5.sigma, p.w_5)
    delta_3 = delta_5 @ p.w_3.T
    delta_2, heads, at = 0, [], 0
    for head, saved in zip(p.heads, f.heads):
        width = head.w_v.shape[1]
        back = attention.backward(delta_3[:, at : at + width], f.a_2, head, saved)
        delta_2, at = delta_2 + back.delta, at + width
        heads.append(back.grads)
    delta_1 = layernorm.delta_prev(delta_2, f.norm_1.a_bar, f.norm_1.sigma, p.w_1) + delta_5
    return delta_1, Block(
        (f.norm_1.a_bar * delta_2).sum(0), delta_2.sum(0), heads, f.a_3.T @ delta_5, delta_5.sum(0),
        (f.norm_5.a_bar * delta_6).sum(0), delta_6.sum(0), f.a_6.T @ delta_7, delta_7.sum(0),
        f.a_8.T @ delta_10, delta_10.sum(0),
    )
""",
        """
from handgrad.paper import activation, attention, layernorm, linear

def through_linear(delta, a, w):
    return linear.delta_prev(delta, w), linear.grad_w(delta, a), linear.grad_b(delta)

def through_norm(delta, norm, w):
    back = layernorm.delta_prev(delta, norm.a_bar, norm.sigma, w)
    return back, layernorm.grad_w(delta, norm.a_bar), layernorm.grad_b(delta)

def backward(delta_10, p, f, o):
    delta, w_8, b_8 = through_linear(delta_10, f.a_8, p.w_8)
    delta = activation.delta_prev(delta, f.a_7, o.g)
    delta, w_6, b_6 = through_linear(delta, f.a_6, p.w_6)
    delta, w_5, b_5 = through_norm(delta, f.norm_5, p.w_5)
    stream = delta_10 + delta
    delta, w_3, b_3 = through_linear(stream, f.a_3, p.w_3)
    heads, delta = attention.backward_heads(delta, f.a_2, p.heads, attention.ManyForward(f.heads, f.a_3))
    delta, w_1, b_1 = through_norm(delta, f.norm_1, p.w_1)
    return stream + delta, [w_1, b_1, [list(h.grads) for h in heads], w_3, b_3, w_5, b_5, w_6, b_6, w_8, b_8]
""",
    ),
}


def changed(exercise: str, old: str, new: str) -> str:
    """The solution with one mistake."""
    code = COURSE[exercise].solution()
    assert code.count(old) == 1, (exercise, old)
    return code.replace(old, new)


# exercise, wrong answer, the value to begin with, kind of the fault, words of the sentence
WRONG: list[tuple[str, str, str, str, str]] = [
    ("softmax", "def backward(delta_rho, rho):\n    return delta_rho * rho\n", "delta_scores", "missing term",
     "lacks the second term"),
    ("softmax", changed("softmax", "return delta_causal(", "return -delta_causal("), "delta_scores", "sign",
     "has the wrong sign"),
    ("softmax", RIGHT["softmax"][0].replace("rho * (delta_rho - inner)", "delta_rho - inner"), "delta_scores",
     "known mistake", "∘ ρ, were left out"),
    ("softmax", RIGHT["softmax"][0].replace(".sum(", ".mean("), "delta_scores", "missing term",
     "has the second term, −~(Δ_ρ ⊖ ρ) ∘ ρ, divided by the number of columns"),
    ("loss", changed("loss", "return delta_logits(y_pred, targets) / n", "return (y_pred - y_gt(targets, y_pred.shape[1],"
     " y_pred.dtype)) / n"), "delta_12", "known mistake", "the rows without a target were not 0"),
    ("loss", changed("loss", "targets) / n", "targets)"), "delta_12", "factor", "multiplied by the number of targets"),
    ("loss", changed("loss", "targets) / n", "targets) / len(targets)"), "delta_12", "known mistake",
     "all rows were counted"),
    ("linear", changed("linear", "return a.t() @ delta", "return delta.t() @ a"), "grad_w", "transpose", "is transposed"),
    ("linear", changed("linear", "return sum_tokens(delta)", "return delta"), "grad_b", "missing sum",
     "lacks the sum over the tokens"),
    ("linear", changed("linear", "return a.t() @ delta", "return a.t() @ delta / len(a)"), "grad_w", "factor",
     "divided by n_T"),
    ("embedding", "import torch\ndef backward(delta, ids, n_rows):\n"
     "    grad = torch.zeros(n_rows, delta.shape[1]).double()\n    grad[ids] = delta\n    return grad\n",
     "grad_w", "known mistake", "one row of Δ instead of the sum"),
    ("layernorm", changed("layernorm", "(d * g - mean_part - spread_part)", "(d * g - spread_part)"), "delta_prev",
     "missing term", "lacks the term of the mean"),
    ("layernorm", changed("layernorm", "torch.diag(1 / (d * sigma)) @", "torch.diag(1 / sigma) @"), "delta_prev", "factor",
     "multiplied by d"),
    ("rmsnorm", RIGHT["rmsnorm"][0].replace("g - a_bar", "g + a_bar"), "delta_prev", "missing term",
     "has the wrong sign in the term of rms"),
    ("rotary", changed("rotary", "interleaved).t() @ row", "interleaved) @ row"), "delta_prev", "known mistake",
     "rotated forward"),
    ("attention", changed("attention", "scale(delta_scaled, q.shape[1])", "delta_scaled"), "grads.w_k", "factor",
     "multiplied by √d_ρ"),
    ("attention", changed("attention", "delta_v + delta_q + delta_k", "delta_v + delta_q"), "delta_prev", "missing term",
     "lacks the branch of the keys"),
    ("block", changed("block", "delta_5 = add(delta_10, layernorm", "delta_5 = add(layernorm"), "grads.b_3", "missing term",
     "lacks Δ_10, which comes by the skip connection"),
    ("block", changed("block", "delta_1 = add(delta_5, layernorm", "delta_1 = add(layernorm"), "delta_1", "missing term",
     "lacks Δ_5, which comes by the skip connection"),
]  # fmt: skip
