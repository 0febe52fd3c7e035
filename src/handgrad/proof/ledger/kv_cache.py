"""The box at the end of Section 3: permutations of the tokens, and one more token with the keys and values kept."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...paper import activation, attention, embedding, kv_cache, layernorm, linear, transformer
from ...paper.attention import Head
from ...paper.kv_cache import Cache, Step
from ...paper.transformer import Network, Options
from ..oracles import count_multiply_adds, relative_error
from .check import COUNTED, EXACT, IDENTITY, Lab, check, mismatch, unless

CLEARLY = 1e-6  # a difference that rounding, near 1e-15, cannot produce


def _draw(lab: Lab) -> tuple[Tensor, Head]:
    """a (n_T, d) and a head; the last row of a is the new token's"""
    n, d = lab.size(4, 8), lab.size(2, 8)
    return lab.matrix(n, d), lab.head(d, lab.size(2, 8), lab.size(1, 8))  # d_ρ = 1 would hide the √d_ρ


def _filled(a: Tensor, head: Head) -> Cache:
    """The cache of the tokens of a, by torch."""
    return Cache(F.linear(a, head.w_k.t(), head.b_k), F.linear(a, head.w_v.t(), head.b_v))


def _one_by_one(a: Tensor, head: Head) -> list[Step]:
    """The tokens of a appended one after the other to an empty cache."""
    steps: list[Step] = []
    for row in a:
        steps.append(kv_cache.append(row, head, steps[-1].cache if steps else kv_cache.empty(head)))
    return steps


def _shuffle(lab: Lab, n: int) -> Tensor:
    """A permutation matrix that does move something."""
    while (p := lab.permutation(n)).trace() == n:
        pass
    return p


# ── permutations ────────────────────────────────────────────────────────────────────────────────────────────────────


@check("P-perm-equiv", 5, "", IDENTITY)
def permuting_the_tokens(lab: Lab) -> float:
    """without a mask Att(P a) = P Att(a) for every permutation P of the tokens, biases included"""
    a, head = _draw(lab)
    p = _shuffle(lab, len(a))
    moved, out = attention.forward(p @ a, head, causal=False).a, attention.forward(a, head, causal=False).a
    return relative_error(moved, p @ out)


@check("P-perm-not-inv", 5, "", EXACT)
def equivariance_is_not_invariance(lab: Lab) -> tuple[float, str]:
    """without a mask Att(P a) ≠ Att(a): the rows of the output move along with the tokens"""
    a, head = _draw(lab)
    out = attention.forward(a, head, causal=False).a
    apart = relative_error(attention.forward(_shuffle(lab, len(a)) @ a, head, causal=False).a, out)
    return unless(apart, CLEARLY), f"the outputs differ by {apart:.2g} of their size"


@check("P-perm-causal", 5, "", EXACT)
def the_mask_knows_the_order(lab: Lab) -> tuple[float, str]:
    """with the causal mask Att(P a) ≠ P Att(a): the mask breaks the equivariance"""
    a, head = _draw(lab)
    p = _shuffle(lab, len(a))
    apart = relative_error(attention.forward(p @ a, head).a, p @ attention.forward(a, head).a)
    return unless(apart, CLEARLY), f"the two differ by {apart:.2g} of their size"


# ── generation with a cache ─────────────────────────────────────────────────────────────────────────────────────────


def _next_logits(token: int, position: int, p: Network, o: Options, caches: list[list[Cache]]) -> Tensor:
    """One token through the network, with its row of every layer only; `caches[block][head]` grow by one row."""

    def row(i: int) -> Tensor:
        return torch.tensor([i])

    a = embedding.forward(row(token), p.w_tok) + embedding.forward(row(position), p.w_pos)  # (1, d)
    for block, kept in zip(p.blocks, caches, strict=True):
        a_2 = layernorm.forward(a, block.w_1, block.b_1, o.eps).a
        steps = [kv_cache.append(a_2[0], head, cache) for head, cache in zip(block.heads, kept, strict=True)]
        kept[:] = [step.cache for step in steps]
        a_3 = torch.cat([step.a for step in steps])[None]
        a_5 = transformer.add(a, linear.forward(a_3, block.w_3, block.b_3))
        a_6 = layernorm.forward(a_5, block.w_5, block.b_5, o.eps).a
        a_8 = activation.g(linear.forward(a_6, block.w_6, block.b_6), o.g)
        a = transformer.add(a_5, linear.forward(a_8, block.w_8, block.b_8))
    return transformer.forward_logits(layernorm.forward(a, p.w_10, p.b_10, o.eps).a, p)[0]


@check("D-gen-loop", 5, "", IDENTITY)
def generation(lab: Lab) -> float:
    """append t_next, feed all n_T+1 tokens, take the last row, repeat: cached and recomputed runs of 2 layers agree"""
    n_prompt, n_new, n_vocab = lab.size(1, 4), 20, lab.size(5, 9)
    p = lab.network(n_vocab, n_prompt + n_new, lab.size(4, 8), [(3, 2), (1, 4)], n_blocks=2)
    o = Options()
    full = lab.ids(n_prompt, n_vocab).tolist()
    cached = list(full)
    caches = [[kv_cache.empty(head) for head in block.heads] for block in p.blocks]
    for position in range(n_prompt - 1):
        _next_logits(cached[position], position, p, o, caches)
    error = 0.0
    for _ in range(n_new):
        quick = _next_logits(cached[-1], len(cached) - 1, p, o, caches)
        whole = transformer.forward(torch.tensor(full), p, o).a_12[-1]
        error = max(error, relative_error(quick, whole))
        cached.append(int(quick.argmax()))
        full.append(int(whole.argmax()))
    return error + mismatch((cached, full))


@check("E-kv-append", 5, "", IDENTITY)
def the_cache_grows_by_a_row(lab: Lab) -> float:
    """k_cache ← [k_cache ⊕ k(t_next)] ∈ (n_T+1, d_ρ), v_cache likewise ∈ (n_T+1, d_h); the kept rows stay untouched"""
    a, head = _draw(lab)
    before = _filled(a[:-1], head)
    after = kv_cache.append(a[-1], head, before).cache
    kept = mismatch((torch.equal(after.k[:-1], before.k), True), (torch.equal(after.v[:-1], before.v), True))
    whole = _filled(a, head)
    return kept + max(relative_error(after.k, whole.k), relative_error(after.v, whole.v))


@check("E-kv-rho", 5, "", IDENTITY)
def attention_of_the_new_token(lab: Lab) -> float:
    """the new last row of ρ = softmax(q(t_next) [k_cache ⊕ k(t_next)]ᵗ/√d_ρ) ∈ (n_T+1); print lacks 1/√d_ρ (R4)"""
    a, head = _draw(lab)
    q, k = F.linear(a, head.w_q.t(), head.b_q), F.linear(a, head.w_k.t(), head.b_k)
    rows = [F.softmax(q[t] @ k[: t + 1].t() * q.shape[1] ** -0.5, 0) for t in range(len(a))]
    return max(relative_error(step.rho, row) for step, row in zip(_one_by_one(a, head), rows, strict=True))


@check("E-kv-out", 5, "", IDENTITY)
def output_of_the_new_token(lab: Lab) -> float:
    """a_i^h(t_next) = that row times [v_cache ⊕ v(t_next)] ∈ (d_h), a vector (R12): the last row of full attention"""
    a, head = _draw(lab)
    q, whole = F.linear(a, head.w_q.t(), head.b_q), _filled(a, head)
    truth = F.scaled_dot_product_attention(q, whole.k, whole.v, is_causal=True)
    return relative_error(torch.stack([step.a for step in _one_by_one(a, head)]), truth)


@check("P-kv-lastcol", 5, "", EXACT)
def nobody_saw_the_new_token(lab: Lab) -> float:
    """appending a token gives ρ a last column that is exactly 0 except for its last entry"""
    a, head = _draw(lab)
    column = attention.forward(a, head).rho[:, -1]
    return mismatch((int(column[:-1].count_nonzero()), 0), (bool(column[-1] > 0), True))


@check("P-kv-oldrows", 5, "", IDENTITY)
def the_earlier_rows_stay(lab: Lab) -> float:
    """appending a token leaves the entries of ρ as they were, and which token it is changes not one bit of them"""
    a, head = _draw(lab)
    short, long = attention.forward(a[:-1], head).rho, attention.forward(a, head).rho[:-1, :-1]
    other = attention.forward(torch.cat([a[:-1], lab.matrix(1, a.shape[1])]), head).rho[:-1, :-1]
    # Sums over rows of another length may round in another order, so only equal lengths can be equal bit for bit.
    return relative_error(long, short) + mismatch((torch.equal(long, other), True))


@check("C-kv-linear", 5, "", COUNTED)
def a_cached_step_is_linear(lab: Lab) -> tuple[float, str]:
    """attention of the n-th token costs n(d_ρ+d_h) multiply-adds with a cache, n²(d_ρ+d_h) without; n(n+1)/2 in all"""
    a, head = _draw(lab)
    (n, d), d_rho, d_h = a.shape, head.w_q.shape[1], head.w_v.shape[1]
    projections = d * (2 * d_rho + d_h)  # of one token
    before = _filled(a[:-1], head)
    step = count_multiply_adds(lambda: kv_cache.append(a[-1], head, before)) - projections
    whole = count_multiply_adds(lambda: attention.forward(a, head)) - n * projections
    every = count_multiply_adds(lambda: _one_by_one(a, head)) - n * projections
    width = d_rho + d_h
    error = mismatch((step, n * width), (whole, n * n * width), (every, width * n * (n + 1) // 2))
    return error, f"{step} against {whole} for n = {n}; {every} for all {n} tokens"


@check("C-kv-mem", 5, "", EXACT)
def a_cache_is_linear(lab: Lab) -> tuple[float, str]:
    """a head's cache holds n_T(d_ρ+d_h) numbers; GPT-2 small 18 432 a token, 72 MiB in float32 for 1024 tokens"""
    a, head = _draw(lab)
    width = head.w_q.shape[1] + head.w_v.shape[1]
    sizes = [step.cache.k.numel() + step.cache.v.numel() for step in _one_by_one(a, head)]
    gpt2_head = lab.head(768, 64, 64)
    gpt2 = kv_cache.append(lab.matrix(768), gpt2_head, kv_cache.empty(gpt2_head)).cache
    a_token = 12 * 12 * (gpt2.k.numel() + gpt2.v.numel())  # 12 blocks of 12 heads
    mebibytes = a_token * 1024 * 4 / 2**20
    error = mismatch((sizes, [t * width for t in range(1, len(a) + 1)]), (a_token, 18_432), (mebibytes, 72.0))
    return error, f"{a_token} numbers a token, {mebibytes:g} MiB"


@check("P-qv-cache", 5, "", IDENTITY)
def with_the_names_swapped(lab: Lab) -> float:
    """if ρ = softmax(k qᵗ/√d_ρ) instead, the same step works with the queries and the values kept"""
    a, head = _draw(lab)
    assert head.b_k is not None
    swapped = head._replace(w_q=head.w_k, b_q=head.b_k, w_k=head.w_q, b_k=head.b_q)
    q, (k, v) = F.linear(a, head.w_q.t(), head.b_q), _filled(a, head)
    truth = F.scaled_dot_product_attention(k, q, v, is_causal=True)
    steps = _one_by_one(a, swapped)
    kept = max(relative_error(steps[-1].cache.k, q), relative_error(steps[-1].cache.v, v))
    return max(kept, relative_error(torch.stack([step.a for step in steps]), truth))
