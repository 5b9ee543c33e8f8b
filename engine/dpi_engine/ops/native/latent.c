/* What latent attention does before it attends: norm a token's latent, rotate its key part, write both into the page, and
 * put the queries together.
 *
 * Pages have the form that values have in rope.c: bfloat16 [page][8 token pairs][padded dim][2], float32 [page][16 tokens]
 * [padded dim], where dim = rank + turned. The padding is zero from the start and never written.
 */
#include "rows.h"

typedef struct {
    const void *q, *absorbed, *latent;
    const i64 *positions, *slots;
    const float *cos, *sin, *norm;
    void *cache, *out;
    i64 n;
    int heads, rank, turned, plain;
    float eps;
} latent_args;

/* x[0:width] -> out, normed. */
INLINE void normed(const void *x, i64 o, float *out, int width, const float *norm, float eps, const int bf) {
    const int full = width / VW * VW, rest = width - full;
    vf sum = v_zero();
    for (int i = 0; i < full; i += VW) {
        const vf a = v_load(x, o + i, bf);
        sum = v_fma(a, a, sum);
    }
    if (rest) {
        const vf a = v_loadn(x, o + full, rest, bf);
        sum = v_fma(a, a, sum);
    }
    const vf k = v_set(1.f / sqrtf(v_sum(sum) / (float)width + eps));
    for (int i = 0; i < full; i += VW) v_stf(out + i, v_mul(v_mul(v_load(x, o + i, bf), k), v_ldf(norm + i)));
    if (rest) v_stfn(out + full, v_mul(v_mul(v_loadn(x, o + full, rest, bf), k), v_ldfn(norm + full, rest)), rest);
}

INLINE void latent_rows(const latent_args *a, i64 begin, i64 end, const int bf, const int cache_bf) {
    const int H = a->heads, R = a->rank, T = a->turned, D = R + T, Q = a->plain + T;
    const i64 DP = round_up(D, 16), size = bf ? 2 : 4;
    float f[MAX_DIM + MAX_TURNED];
    b16 t[MAX_DIM + MAX_TURNED];
    for (i64 r = begin; r < end; ++r) {
        const float *c = a->cos + a->positions[r] * (T / 2), *s = a->sin + a->positions[r] * (T / 2);
        const i64 page = a->slots[r] / PAGE, at = a->slots[r] % PAGE;
        normed(a->latent, r * D, f, R, a->norm, a->eps, bf);
        turn(a->latent, r * D + R, f + R, T, c, s, NULL, 0, bf);
        if (cache_bf) {
            b16 *to = (b16 *)a->cache + page * PAGE * DP + at / 2 * DP * 2 + at % 2;
            copy(f, t, 0, D, 1);
            for (int i = 0; i < D; ++i) to[2 * i] = t[i];
        } else {
            memcpy((float *)a->cache + (page * PAGE + at) * DP, f, (size_t)D * 4);
        }
        for (int h = 0; h < H; ++h) {
            const i64 to = (r * H + h) * D;
            memcpy((char *)a->out + to * size, (const char *)a->absorbed + (h * a->n + r) * R * size, (size_t)R * size);
            turn(a->q, (r * H + h) * Q + a->plain, f, T, c, s, NULL, 0, bf);
            copy(f, a->out, to + R, T, bf);
        }
    }
}
static void latent_ff(void *a, i64 b, i64 e) { latent_rows(a, b, e, 0, 0); }
static void latent_fb(void *a, i64 b, i64 e) { latent_rows(a, b, e, 0, 1); }
static void latent_bb(void *a, i64 b, i64 e) { latent_rows(a, b, e, 1, 1); }

/* q [n, heads (plain + turned)]; absorbed [heads, n, rank]; latent [n, rank + turned]; norm [rank]; cos, sin [max_position,
 * turned / 2]; out [n, heads (rank + turned)]. bf: activations are bfloat16 (then the cache is, too). Nothing is written
 * when a position or slot is out of range. */
EXPORT int dpi_latent_write(const void *q, const void *absorbed, const void *latent, const i64 *positions,
                            const i64 *slots, const float *cos, const float *sin, const float *norm, void *cache,
                            void *out, i64 n, i64 max_position, i64 slots_total, int heads, int rank, int turned,
                            int plain, float eps, int bf, int cache_bf, int threads) {
    for (i64 r = 0; r < n; ++r) {
        if (positions[r] < 0 || positions[r] >= max_position) return BAD_POSITION;
        if (slots[r] < 0 || slots[r] >= slots_total) return BAD_SLOT;
    }
    latent_args a = {q, absorbed, latent, positions, slots, cos, sin, norm, cache, out, n, heads, rank, turned, plain, eps};
    const i64 work = n * (heads + 1) * (rank + turned);
    for_each_chunk(n, work < 8192 ? 1 : threads, bf ? latent_bb : cache_bf ? latent_fb : latent_ff, &a);
    return OK;
}
