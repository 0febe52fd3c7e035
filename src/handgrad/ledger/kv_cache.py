"""The box at the end of Section 3: permutations of the tokens, and generation with cached keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import activation, attention, embedding, kv_cache, layernorm, linear, transformer
from ..paper.attention import Head
from ..paper.kv_cache import Cache, Step
from ..paper.transformer import Network, Options
from ..proof.oracles import count_multiply_adds, relative_error
from . import by_torch
from .check import COUNTED, EXACT, IDENTITY, RandomInputs, check, mismatch, shortfall

CLEARLY = 1e-6  # a difference far larger than rounding, which is near 1e-15


def _inputs(rng: RandomInputs) -> tuple[Tensor, Head]:
    """a (n_T, d) and a head; the last row of a is the new token's"""
    n, d = rng.size(4, 8), rng.size(2, 8)
    return rng.matrix(n, d), rng.head(d, rng.size(2, 8), rng.size(1, 8))  # d_ρ = 1 would hide the √d_ρ


def _cache_of(a: Tensor, head: Head) -> Cache:
    """The cache after the tokens of a, computed by torch."""
    return Cache(*by_torch.project(a, head)[1:])


def _one_by_one(a: Tensor, head: Head) -> list[Step]:
    """Append the tokens of a one by one to an empty cache."""
    steps: list[Step] = []
    for row in a:
        steps.append(kv_cache.append(row, head, steps[-1].cache if steps else kv_cache.empty(head)))
    return steps


def _shuffle(rng: RandomInputs, n: int) -> Tensor:
    """A permutation matrix other than the identity."""
    while (p := rng.permutation(n)).trace() == n:
        pass
    return p


# ── permutations ────────────────────────────────────────────────────────────────────────────────────────────────────


@check("P-perm-equiv", 5, "", IDENTITY)
def permuting_the_tokens(rng: RandomInputs) -> float:
    """without a mask Att(P a) = P Att(a) for every permutation P of the tokens, biases included"""
    a, head = _inputs(rng)
    p = _shuffle(rng, len(a))
    moved, out = attention.forward(p @ a, head, causal=False).a, attention.forward(a, head, causal=False).a
    return relative_error(moved, p @ out)


@check("P-perm-not-inv", 5, "", EXACT)
def equivariance_is_not_invariance(rng: RandomInputs) -> tuple[float, str]:
    """without a mask Att(P a) ≠ Att(a): the rows of the output are permuted like the tokens"""
    a, head = _inputs(rng)
    out = attention.forward(a, head, causal=False).a
    apart = relative_error(attention.forward(_shuffle(rng, len(a)) @ a, head, causal=False).a, out)
    return shortfall(apart, CLEARLY), f"the outputs differ by {apart:.2g} of their size"


@check("P-perm-causal", 5, "", EXACT)
def the_mask_breaks_equivariance(rng: RandomInputs) -> tuple[float, str]:
    """with the causal mask Att(P a) ≠ P Att(a): the mask breaks the equivariance"""
    a, head = _inputs(rng)
    p = _shuffle(rng, len(a))
    apart = relative_error(attention.forward(p @ a, head).a, p @ attention.forward(a, head).a)
    return shortfall(apart, CLEARLY), f"the two differ by {apart:.2g} of their size"


# ── generation with a cache ─────────────────────────────────────────────────────────────────────────────────────────


def _next_logits(token: int, position: int, p: Network, o: Options, caches: list[list[Cache]]) -> Tensor:
    """The logits of one token, computing only its row of every layer; `caches[block][head]` grow by one row."""

    def row(i: int) -> Tensor:
        return torch.tensor([i])

    a = embedding.forward(row(token), p.w_tok) + embedding.forward(row(position), p.w_pos)  # (1, d)
    for block, block_caches in zip(p.blocks, caches, strict=True):
        a_2 = layernorm.forward(a, block.w_1, block.b_1, o.eps).a
        steps = [kv_cache.append(a_2[0], head, cache) for head, cache in zip(block.heads, block_caches, strict=True)]
        block_caches[:] = [step.cache for step in steps]
        a_3 = torch.cat([step.a for step in steps])[None]
        a_5 = transformer.add(a, linear.forward(a_3, block.w_3, block.b_3))
        a_6 = layernorm.forward(a_5, block.w_5, block.b_5, o.eps).a
        a_8 = activation.g(linear.forward(a_6, block.w_6, block.b_6), o.g)
        a = transformer.add(a_5, linear.forward(a_8, block.w_8, block.b_8))
    return transformer.forward_logits(layernorm.forward(a, p.w_10, p.b_10, o.eps).a, p)[0]


@check("D-gen-loop", 5, "", IDENTITY)
def generation(rng: RandomInputs) -> float:
    """append t_next, feed all n_T+1 tokens, take the last row, repeat: cached and recomputed runs of 2 layers agree"""
    n_prompt, n_new, n_vocab = rng.size(1, 4), 20, rng.size(5, 9)
    p = rng.network(n_vocab, n_prompt + n_new, rng.size(4, 8), [(3, 2), (1, 4)], n_blocks=2)
    o = Options()
    full = rng.ids(n_prompt, n_vocab).tolist()
    cached = list(full)
    caches = [[kv_cache.empty(head) for head in block.heads] for block in p.blocks]
    for position in range(n_prompt - 1):
        _next_logits(cached[position], position, p, o, caches)
    error = 0.0
    for _ in range(n_new):
        from_cache = _next_logits(cached[-1], len(cached) - 1, p, o, caches)
        recomputed = transformer.forward(torch.tensor(full), p, o).a_12[-1]
        error = max(error, relative_error(from_cache, recomputed))
        cached.append(int(from_cache.argmax()))
        full.append(int(recomputed.argmax()))
    return error + mismatch((cached, full))


@check("E-kv-append", 5, "", IDENTITY)
def the_cache_grows_by_a_row(rng: RandomInputs) -> float:
    """k_cache ← [k_cache ⊕ k(t_next)] ∈ (n_T+1, d_ρ), v_cache likewise ∈ (n_T+1, d_h); the earlier rows do not change"""
    a, head = _inputs(rng)
    before = _cache_of(a[:-1], head)
    after = kv_cache.append(a[-1], head, before).cache
    changed = mismatch((torch.equal(after.k[:-1], before.k), True), (torch.equal(after.v[:-1], before.v), True))
    full = _cache_of(a, head)
    return changed + max(relative_error(after.k, full.k), relative_error(after.v, full.v))


@check("E-kv-rho", 5, "", IDENTITY)
def attention_of_the_new_token(rng: RandomInputs) -> float:
    """the new last row of ρ = softmax(q(t_next) [k_cache ⊕ k(t_next)]ᵗ/√d_ρ) ∈ (n_T+1); 1/√d_ρ is missing in print (R4)"""
    a, head = _inputs(rng)
    q, k, _ = by_torch.project(a, head)
    rows = [F.softmax(q[t] @ k[: t + 1].t() * q.shape[1] ** -0.5, 0) for t in range(len(a))]
    return max(relative_error(step.rho, row) for step, row in zip(_one_by_one(a, head), rows, strict=True))


@check("E-kv-out", 5, "", IDENTITY)
def output_of_the_new_token(rng: RandomInputs) -> float:
    """a_i^h(t_next) = that row times [v_cache ⊕ v(t_next)] ∈ (d_h), a vector (R12): the last row of full attention"""
    a, head = _inputs(rng)
    expected = by_torch.head_output(a, a, a, head)
    return relative_error(torch.stack([step.a for step in _one_by_one(a, head)]), expected)


@check("P-kv-lastcol", 5, "", EXACT)
def no_earlier_token_sees_the_new_one(rng: RandomInputs) -> float:
    """appending a token gives ρ a last column that is exactly 0 except for its last entry"""
    a, head = _inputs(rng)
    column = attention.forward(a, head).rho[:, -1]
    return mismatch((int(column[:-1].count_nonzero()), 0), (bool(column[-1] > 0), True))


@check("P-kv-oldrows", 5, "", IDENTITY)
def earlier_rows_do_not_change(rng: RandomInputs) -> float:
    """appending a token does not change the earlier entries of ρ; they are bit-identical whichever token it is"""
    a, head = _inputs(rng)
    short, long = attention.forward(a[:-1], head).rho, attention.forward(a, head).rho[:-1, :-1]
    other = attention.forward(torch.cat([a[:-1], rng.matrix(1, a.shape[1])]), head).rho[:-1, :-1]
    # Sums over rows of different lengths may round in a different order: only equal lengths can be bit-identical.
    return relative_error(long, short) + mismatch((torch.equal(long, other), True))


@check("C-kv-linear", 5, "", COUNTED)
def a_cached_step_is_linear(rng: RandomInputs) -> tuple[float, str]:
    """attention of the n-th token costs n(d_ρ+d_h) multiply-adds with a cache, n²(d_ρ+d_h) without; n(n+1)/2 in all"""
    a, head = _inputs(rng)
    (n, d), d_rho, d_h = a.shape, head.w_q.shape[1], head.w_v.shape[1]
    projections = d * (2 * d_rho + d_h)  # of one token
    before = _cache_of(a[:-1], head)
    step = count_multiply_adds(lambda: kv_cache.append(a[-1], head, before)) - projections
    full = count_multiply_adds(lambda: attention.forward(a, head)) - n * projections
    all_steps = count_multiply_adds(lambda: _one_by_one(a, head)) - n * projections
    width = d_rho + d_h
    error = mismatch((step, n * width), (full, n * n * width), (all_steps, width * n * (n + 1) // 2))
    return error, f"{step} against {full} for n = {n}; {all_steps} for all {n} tokens"


@check("C-kv-mem", 5, "", EXACT)
def a_cache_is_linear(rng: RandomInputs) -> tuple[float, str]:
    """a head's cache holds n_T(d_ρ+d_h) numbers; GPT-2 small 18 432 a token, 72 MiB in float32 for 1024 tokens"""
    a, head = _inputs(rng)
    width = head.w_q.shape[1] + head.w_v.shape[1]
    sizes = [step.cache.k.numel() + step.cache.v.numel() for step in _one_by_one(a, head)]
    gpt2_head = rng.head(768, 64, 64)
    gpt2 = kv_cache.append(rng.matrix(768), gpt2_head, kv_cache.empty(gpt2_head)).cache
    a_token = 12 * 12 * (gpt2.k.numel() + gpt2.v.numel())  # 12 blocks of 12 heads
    mebibytes = a_token * 1024 * 4 / 2**20
    error = mismatch((sizes, [t * width for t in range(1, len(a) + 1)]), (a_token, 18_432), (mebibytes, 72.0))
    return error, f"{a_token} numbers a token, {mebibytes:g} MiB"


@check("P-qv-cache", 5, "", IDENTITY)
def queries_and_keys_swapped(rng: RandomInputs) -> float:
    """if ρ = softmax(k qᵗ/√d_ρ) instead, the same step works with cached queries and values"""
    a, head = _inputs(rng)
    assert head.b_k is not None
    swapped = head._replace(w_q=head.w_k, b_q=head.b_k, w_k=head.w_q, b_k=head.b_q)
    q, k, v = by_torch.project(a, head)
    expected = F.scaled_dot_product_attention(k, q, v, is_causal=True)
    steps = _one_by_one(a, swapped)
    cached = max(relative_error(steps[-1].cache.k, q), relative_error(steps[-1].cache.v, v))
    return max(cached, relative_error(torch.stack([step.a for step in steps]), expected))
