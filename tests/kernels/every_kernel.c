/* Every kernel once or more, on numbers that depend on nothing, with all results written to the standard output: for machines
 * without Python or torch. Compiled together with the kernels; check.py compares the results of several builds. */

#include <stdio.h>
#include <string.h>

#include "../../src/handgrad/kernels/kernels.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static uint64_t state = 1;

/* −1 … 1 */
static double draw(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) / (double)(1ull << 52) - 1;
}

static real *drawn(size count) {
    real *x = new_buffer(count);
    for (size i = 0; i < count; i++) x[i] = (real)draw();
    return x;
}

static void show(const char *name, const real *x, size count) {
    printf("%s", name);
    for (size i = 0; i < count; i++) printf("\t%.17g", (double)x[i]);
    printf("\n");
}

static void require(const char *name, int status) {
    if (status) fprintf(stderr, "%s returned %d\n", name, status), exit(1);
}

static void rows(size n, size w) {
    real *x = drawn(n * w), *d = drawn(n * w), *u = drawn(n * w), *a = drawn(n * w), *b = drawn(n * w), *c = drawn(n * w);
    real *gain = drawn(w), *bias = drawn(w), *mu = drawn(n), *inv = drawn(n), *angle = drawn(n * w), *sine = drawn(n * w);
    double *loss = calloc((size_t)n, sizeof(double));
    int64_t *target = calloc((size_t)n, sizeof(int64_t));
#define ACTIVATED(g)                                                                                                     \
    hg_forward_##g(n, w, x, w, a, w), show("forward " #g, a, n * w);                                                     \
    hg_backward_##g(n, w, d, w, x, w, a, w, b, w), show("backward " #g, a, n * w), show("value", b, n * w);              \
    hg_forward_gate_##g(n, w, x, w, u, w, a, w), show("gate " #g, a, n * w);                                             \
    hg_backward_gate_##g(n, w, d, w, x, w, u, w, a, w, b, w, c, w), show("gate's slope", a, n * w);                      \
    show("up", b, n * w), show("gated", c, n * w);
    ACTIVATED(silu)
    ACTIVATED(gelu_tanh)
    hg_forward_rms(n, w, 1e-5, x, w, gain, a, w, inv), show("rms", a, n * w);
    hg_rebuild_norm(n, w, x, w, NULL, inv, gain, NULL, a, w, b, w), show("rebuilt rms", b, n * w);
    hg_backward_norm(n, w, d, w, a, w, inv, gain, 0, b, w), show("backward rms", b, n * w);
    hg_forward_layer(n, w, 1e-5, x, w, gain, bias, a, w, mu, inv), show("layer", a, n * w);
    hg_rebuild_norm(n, w, x, w, mu, inv, gain, bias, a, w, b, w), show("rebuilt layer", b, n * w);
    hg_backward_norm(n, w, d, w, a, w, inv, gain, 1, b, w), show("backward layer", b, n * w);
    hg_column_sums(n, w, d, w, a, w, gain), show("gain", gain, w);
    hg_column_sums(n, w, d, w, NULL, 0, gain), show("bias", gain, w);
    real *heads = drawn(n * 6 * w);
    for (size neighbors = 0; neighbors < 2; neighbors++)
        hg_rotate(n, 3, w, heads, 6 * w, 2 * w, angle, sine, -1, heads, 6 * w, 2 * w, neighbors), show("rotated", heads, n * 6 * w);
    for (size t = 0; t < n; t++) target[t] = t % w;
    require("loss", hg_softmax_loss(n, w, x, w, target, 0.3, loss)), show("loss", x, n * w);
    real *all[] = {x, d, u, a, b, c, gain, bias, mu, inv, angle, sine, heads};
    for (size_t i = 0; i < COUNT(all); i++) free(all[i]);
    free(loss), free(target);
}

static void attention(size keys, size wq, size wv, size causal, size window, double cap) {
    enum { HEADS = 4, SHARED = 2 };
    const int64_t table[] = {0, keys / 3, 0, keys / 3, keys / 3, keys, keys / 3, keys}; /* two sequences */
    size h = HEADS, g = HEADS / SHARED, n = keys;
    real *q = drawn(n * h * wq), *k = drawn(n * g * wq), *v = drawn(n * g * wv), *d = drawn(n * h * wv);
    real *a = drawn(n * h * wv), *lse = drawn(n * h), *sinks = drawn(h), *dq = drawn(n * h * wq), *dk = drawn(n * h * wq), *dv = drawn(n * h * wv);
#define SHAPE 2, table, NULL, n, n, h, SHARED, wq, wv, 0.4, cap, causal, window
#define INPUTS q, h *wq, wq, k, g *wq, wq, v, g *wv, wv, a, h *wv, wv, lse, h, 1
    require("attention", hg_forward_attention(SHAPE, cap > 0 ? sinks : NULL, INPUTS));
    require("attention", hg_backward_attention(SHAPE, d, h * wv, wv, INPUTS, dq, h * wq, wq, dk, h * wq, wq, dv, h * wv, wv));
    show("attention", a, n * h * wv), show("lse", lse, n * h), show("dq", dq, n * h * wq);
    show("dk", dk, n * h * wq), show("dv", dv, n * h * wv);
    real *all[] = {q, k, v, d, a, lse, sinks, dq, dk, dv};
    for (size_t i = 0; i < COUNT(all); i++) free(all[i]);
}

static void products(size m, size n, size w) {
    real *a = drawn(m * n), *b = drawn(n * w), *bias = drawn(w), *c = drawn(m * w);
    for (int by = 0; by < 4; by++) { /* rows or columns are contiguous */
        size ar = by & 1 ? 1 : n, ak = by & 1 ? m : 1, bk = by & 2 ? 1 : w, bj = by & 2 ? n : 1;
        require("product", hg_product(m, w, n, a, ar, ak, b, bk, bj, by ? bias : NULL, c, w, 0)), show("product", c, m * w);
    }
    for (size few = 1; few <= 16 && few <= m; few += 5) {
        require("few rows", hg_few_rows(few, n, w, a, n, b, n, c, w)), show("few rows", c, few * w);
        hg_few_rows_in_out(few, n, w, a, n, b, w, c, w), show("few rows, in_out", c, few * w);
    }
    free(a), free(b), free(bias), free(c);
}

/* By kind: numbers and bytes of a block, and where its float16 scales are */
static const struct { size numbers, bytes, scales, count; } blocks_of[] = {
    {32, 34, 0, 1}, {32, 18, 0, 1}, {32, 20, 0, 2}, {32, 64, 0, 0}, {32, 22, 0, 1}, {32, 24, 0, 2},
    {256, 144, 0, 2}, {256, 176, 0, 2}, {256, 210, 208, 1},
    {32, 17, 0, 0}};

static uint8_t *packed(size kind, size blocks) {
    size bytes = blocks_of[kind].bytes;
    uint8_t *data = malloc((size_t)(blocks * bytes));
    for (size i = 0; i < blocks * bytes; i++) data[i] = (uint8_t)(128 + 127 * draw());
    if (kind == 3) { /* bfloat16 between 2⁻⁴ and 2⁴ */
        for (size i = 1; i < blocks * bytes; i += 2) data[i] = 0x3e + (data[i] & 0x81);
        return data;
    }
    if (kind == 9)
        for (size i = 0; i < blocks; i++) data[i * bytes] = 0x78 | (data[i * bytes] & 7);
    for (size i = 0; i < blocks; i++) /* float16 of about 2⁻⁷ */
        for (size j = 0; j < blocks_of[kind].count; j++) {
            uint8_t *high = data + i * bytes + blocks_of[kind].scales + 2 * j + 1;
            *high = 0x20 | (*high & 0x83);
        }
    return data;
}

static void packed_products(size n, size f_in, size f_out) {
    for (size kind = 0; kind < (size)COUNT(blocks_of); kind++) {
        if (kind > 3 && kind < 9) continue;
        uint8_t *w = packed(kind, f_in / 32 * f_out);
        float *a = malloc((size_t)(n * f_in) * 4), *out = malloc((size_t)(n * f_out) * 4);
        for (size i = 0; i < n * f_in; i++) a[i] = (float)draw();
        real *wide = new_buffer(n * f_out);
        hg_packed_product(kind, n, f_in, f_out, a, f_in, w, out, f_out);
        for (size i = 0; i < n * f_out; i++) wide[i] = (real)out[i];
        show("packed", wide, n * f_out);
        if (kind < 3) {
            require("rounded", hg_rounded_product(kind, n, f_in, f_out, a, f_in, w, out, f_out));
            for (size i = 0; i < n * f_out; i++) wide[i] = (real)out[i];
            show("packed, rounded", wide, n * f_out);
        }
        free(w), free(a), free(out), free(wide);
    }
}

static void unpacked(size blocks) {
    for (size kind = 0; kind < (size)COUNT(blocks_of); kind++) {
        if (kind == 3) continue;
        size count = blocks * blocks_of[kind].numbers;
        uint8_t *w = packed(kind, blocks);
        float *out = malloc((size_t)count * 4);
        uint16_t *rounded = malloc((size_t)count * 2);
        real *wide = new_buffer(count);
        hg_packed_unpack(kind, blocks, w, out, 1);
        for (size i = 0; i < count; i++) wide[i] = (real)out[i];
        show("unpacked", wide, count);
        hg_packed_unpack(kind, blocks, w, rounded, 0);
        for (size i = 0; i < count; i++) {
            union { uint32_t i; float f; } u = {.i = (uint32_t)rounded[i] << 16};
            wide[i] = (real)u.f;
        }
        show("unpacked, rounded", wide, count);
        free(w), free(out), free(rounded), free(wide);
    }
}

#define KEPT 64 /* tensors of the matrices of a block */
static real *kept[KEPT];
static int kept_count;

static int64_t keep(size count) { return (int64_t)(kept[kept_count++] = drawn(count)); }

static matrix linear(size kind, size f_in, size f_out, size rank) {
    return (matrix){kind, f_in, f_out, keep(f_in * f_out), kind == OUT_IN ? f_in : f_out, keep(f_out), rank,
                    rank ? keep(f_in * rank) : 0, rank ? keep(rank * f_out) : 0, 0.5};
}

/* `n` tokens through two blocks, with adapters, q and k norms, rotation, a gate and a window */
static void tokens(size n, size kind, size gated) {
    enum { D = 24, HEADS = 4, SHARE = 2, WIDTH = 6, HIDDEN = 40, CAPACITY = 200 };
    size cached = 2 * (HEADS / SHARE) * CAPACITY * WIDTH;
    real *keys = drawn(n * cached), *values = drawn(n * cached), *a = drawn(n * D), *cosine = drawn(n * WIDTH), *sine = drawn(n * WIDTH);
    real *q = drawn(n * HEADS * WIDTH), *out = drawn(n * HEADS * WIDTH);
    int64_t places[16 * 6];
    for (size t = 0; t < n; t++) {
        int64_t row[6] = {(int64_t)(keys + t * cached), (int64_t)(values + t * cached), cached / 2, cached / 2, CAPACITY, 11 * t + 3};
        memcpy(places + 6 * t, row, sizeof(row));
    }
    block blocks[2];
    for (int i = 0; i < 2; i++) {
        blocks[i] = (block){.index = i, .d = D, .heads = HEADS, .share = SHARE, .d_rho = WIDTH, .d_h = WIDTH, .hidden = HIDDEN,
            .window = i ? 50 : 0, .rotated = 1, .activation = i, .gated = gated, .inputs = 3, .mlp_inputs = gated ? 2 : 1,
            .scale = 0.4, .cap = i ? 1.5 : 0, .sinks = i ? keep(HEADS) : 0,
            .norm_1 = {keep(D), i ? keep(D) : 0, 1e-5}, .norm_5 = {keep(D), 0, 1e-5},
            .q_norm = {keep(WIDTH), 0, 1e-5}, .k_norm = {keep(WIDTH), 0, 1e-5},
            .qkv = {linear(kind, D, HEADS * WIDTH, 3), linear(kind, D, HEADS / SHARE * WIDTH, 0), linear(kind, D, HEADS / SHARE * WIDTH, 2)},
            .out = linear(kind, HEADS * WIDTH, D, 0), .mlp = {linear(kind, D, HIDDEN, 4), linear(kind, D, HIDDEN, 0)},
            .contract = linear(kind, HIDDEN, D, 1)};
    }
    require("token blocks", hg_token_blocks(2, blocks, n, places, cosine, sine, a)), show("token blocks", a, n * D);
    size h = HEADS * WIDTH, g = h / SHARE;
    require("attend", hg_attend_tokens(n, HEADS, SHARE, WIDTH, WIDTH, 1, 40, 0.4, 0, NULL, places, q, h, WIDTH, a, g, WIDTH, a, g, WIDTH,
                                       out, h, WIDTH));
    show("attend", out, n * h);
    real *all[] = {keys, values, a, cosine, sine, q, out};
    for (size_t i = 0; i < COUNT(all); i++) free(all[i]);
    while (kept_count) free(kept[--kept_count]);
}

int main(void) {
    rows(3, 5), rows(150, 129);
    attention(12, 5, 3, 1, 0, 0), attention(200, 8, 17, 1, 40, 0), attention(150, 16, 8, 0, 0, 0), attention(90, 7, 5, 1, 0, 1.5);
    products(9, 33, 37), products(300, 520, 40);
    packed_products(3, 64, 5), packed_products(13, 512, 40), packed_products(23, 96, 33);
    unpacked(1), unpacked(640);
    tokens(1, OUT_IN, 1), tokens(12, OUT_IN, 0), tokens(3, IN_OUT, 1), tokens(16, IN_OUT, 0);
    return 0;
}
