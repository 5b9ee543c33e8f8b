/* Row-wise kernels: root mean square norm with an optional residual addition, and silu(gate) * up. */
#include "kernels.h"
#include "vec.h"

typedef struct {
    void *x;
    const void *delta, *weight;
    void *out;
    i64 width;
    float eps;
} norm_args;

INLINE void norm_rows(const norm_args *a, i64 begin, i64 end, const int bf, const int weight_bf) {
    const i64 H = a->width, full = H / VW * VW;
    const int rest = (int)(H - full);
    for (i64 r = begin; r < end; ++r) {
        const i64 o = r * H;
        vf sum = v_zero();
        for (i64 i = 0; i < full; i += VW) {
            vf v = v_load(a->x, o + i, bf);
            if (a->delta) {
                v_store(a->x, o + i, v_add(v, v_load(a->delta, o + i, bf)), bf);
                v = v_load(a->x, o + i, bf); /* what is normed is the residual as it is stored, rounded */
            }
            sum = v_fma(v, v, sum);
        }
        if (rest) {
            vf v = v_loadn(a->x, o + full, rest, bf);
            if (a->delta) {
                v_storen(a->x, o + full, v_add(v, v_loadn(a->delta, o + full, rest, bf)), rest, bf);
                v = v_loadn(a->x, o + full, rest, bf);
            }
            sum = v_fma(v, v, sum);
        }
        const vf k = v_set(1.f / sqrtf(v_sum(sum) / (float)H + a->eps));
        for (i64 i = 0; i < full; i += VW)
            v_store(a->out, o + i, v_mul(v_mul(v_load(a->x, o + i, bf), k), v_load(a->weight, i, weight_bf)), bf);
        if (rest) {
            vf v = v_mul(v_mul(v_loadn(a->x, o + full, rest, bf), k), v_loadn(a->weight, full, rest, weight_bf));
            v_storen(a->out, o + full, v, rest, bf);
        }
    }
}
static void norm_ff(void *a, i64 b, i64 e) { norm_rows(a, b, e, 0, 0); }
static void norm_fb(void *a, i64 b, i64 e) { norm_rows(a, b, e, 0, 1); }
static void norm_bf(void *a, i64 b, i64 e) { norm_rows(a, b, e, 1, 0); }
static void norm_bb(void *a, i64 b, i64 e) { norm_rows(a, b, e, 1, 1); }

/* x [n, width], delta the same or NULL: x += delta; out = x / rms(x) * weight. bf: x, delta and out are bfloat16. */
EXPORT void dpi_rms_norm(void *x, const void *delta, const void *weight, void *out, i64 n, i64 width, float eps, int bf,
                         int weight_bf, int threads) {
    norm_args a = {x, delta, weight, out, width, eps};
    body_fn body = bf ? (weight_bf ? norm_bb : norm_bf) : (weight_bf ? norm_fb : norm_ff);
    for_each_chunk(n, n * width < 16384 ? 1 : threads, body, &a);
}

typedef struct {
    const void *gate_up;
    void *out;
    i64 width;
} silu_args;

INLINE void silu_rows(const silu_args *a, i64 begin, i64 end, const int bf) {
    const i64 I = a->width, full = I / VW * VW;
    const int rest = (int)(I - full);
    for (i64 r = begin; r < end; ++r) {
        const i64 g = 2 * r * I, u = g + I, o = r * I;
        for (i64 i = 0; i < full; i += VW)
            v_store(a->out, o + i, v_mul(v_silu(v_load(a->gate_up, g + i, bf)), v_load(a->gate_up, u + i, bf)), bf);
        if (rest) {
            vf x = v_loadn(a->gate_up, g + full, rest, bf), y = v_loadn(a->gate_up, u + full, rest, bf);
            v_storen(a->out, o + full, v_mul(v_silu(x), y), rest, bf);
        }
    }
}
static void silu_f(void *a, i64 b, i64 e) { silu_rows(a, b, e, 0); }
static void silu_b(void *a, i64 b, i64 e) { silu_rows(a, b, e, 1); }

/* gate_up [n, 2 width] -> out [n, width] = silu(gate) * up. */
EXPORT void dpi_silu_mul(const void *gate_up, void *out, i64 n, i64 width, int bf, int threads) {
    silu_args a = {gate_up, out, width};
    for_each_chunk(n, n * width < 8192 ? 1 : threads, bf ? silu_b : silu_f, &a);
}

typedef struct {
    const i64 *ids;
    const void *table;
    void *out;
    i64 width;
} embed_args;

INLINE void embed_rows(const embed_args *a, i64 begin, i64 end, const int table_bf, const int bf) {
    const i64 W = a->width, full = W / VW * VW;
    const int rest = (int)(W - full);
    for (i64 r = begin; r < end; ++r) {
        const i64 from = a->ids[r] * W, to = r * W;
        for (i64 i = 0; i < full; i += VW) v_store(a->out, to + i, v_load(a->table, from + i, table_bf), bf);
        if (rest) v_storen(a->out, to + full, v_loadn(a->table, from + full, rest, table_bf), rest, bf);
    }
}
static void embed_ff(void *a, i64 b, i64 e) { embed_rows(a, b, e, 0, 0); }
static void embed_bf(void *a, i64 b, i64 e) { embed_rows(a, b, e, 1, 0); }
static void embed_fb(void *a, i64 b, i64 e) { embed_rows(a, b, e, 0, 1); }
static void embed_bb(void *a, i64 b, i64 e) { embed_rows(a, b, e, 1, 1); }

/* table [rows, width], ids [n] -> out [n, width]. table_bf, bf: table or out is bfloat16, else float32. */
EXPORT int dpi_embed(const i64 *ids, const void *table, void *out, i64 n, i64 width, i64 rows, int table_bf, int bf,
                     int threads) {
    for (i64 r = 0; r < n; ++r)
        if (ids[r] < 0 || ids[r] >= rows) return BAD_ID;
    embed_args a = {ids, table, out, width};
    body_fn body = bf ? (table_bf ? embed_bb : embed_fb) : (table_bf ? embed_bf : embed_ff);
    for_each_chunk(n, n * width < 16384 ? 1 : threads, body, &a);
    return OK;
}
