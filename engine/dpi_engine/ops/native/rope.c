/* Split qkv, norm q and k per head if asked, rotate, and write K and V into their pages.
 *
 * Pages of a bfloat16 cache: K [page][kv head][dim / 2][16 tokens][2], V [page][kv head][8 token pairs][padded dim][2].
 * That is the order in which dot product instructions eat them: neighbours are summed, no transposition is left to do.
 * Pages of a float32 cache: K [page][kv head][dim][16 tokens], V [page][kv head][16 tokens][padded dim].
 * The padded dim is a multiple of 16; its padding is zero from the start and never written.
 */
#include "kernels.h"
#include "rows.h"

typedef struct {
    const void *qkv;
    const i64 *positions, *slots;
    const float *cos, *sin;
    void *k, *v, *q;
    const float *q_norm, *k_norm;
    int heads, kv_heads, dim;
    float eps;
} rope_args;

INLINE void rope_rows(const rope_args *a, i64 begin, i64 end, const int bf, const int cache_bf) {
    const int HQ = a->heads, HK = a->kv_heads, D = a->dim;
    const i64 DP = round_up(D, 16), W = (i64)(HQ + 2 * HK) * D;
    float f[MAX_DIM];
    b16 t[MAX_DIM];
    for (i64 r = begin; r < end; ++r) {
        const float *c = a->cos + a->positions[r] * (D / 2), *s = a->sin + a->positions[r] * (D / 2);
        const i64 page = a->slots[r] / PAGE, at = a->slots[r] % PAGE;
        for (int h = 0; h < HQ; ++h) {
            turn(a->qkv, r * W + (i64)h * D, f, D, c, s, a->q_norm, a->eps, bf);
            copy(f, a->q, (r * HQ + h) * D, D, bf);
        }
        for (int h = 0; h < HK; ++h) {
            turn(a->qkv, r * W + (i64)(HQ + h) * D, f, D, c, s, a->k_norm, a->eps, bf);
            const i64 kv = page * HK + h;
            if (cache_bf) {
                uint32_t pair, *k = (uint32_t *)((b16 *)a->k + kv * PAGE * D) + at;
                copy(f, t, 0, D, 1);
                for (int i = 0; i < D / 2; ++i) {
                    memcpy(&pair, t + 2 * i, 4);
                    k[(i64)i * PAGE] = pair;
                }
            } else {
                float *k = (float *)a->k + kv * PAGE * D + at;
                for (int i = 0; i < D; ++i) k[(i64)i * PAGE] = f[i];
            }
            const i64 x = r * W + (i64)(HQ + HK + h) * D;
            if (cache_bf) {
                b16 *v = (b16 *)a->v + kv * PAGE * DP + at / 2 * DP * 2 + at % 2;
                const b16 *from = (const b16 *)a->qkv + x;
                if (!bf) {
                    copy((const float *)a->qkv + x, t, 0, D, 1);
                    from = t;
                }
                for (int i = 0; i < D; ++i) v[2 * i] = from[i];
            } else {
                memcpy((float *)a->v + (kv * PAGE + at) * DP, (const float *)a->qkv + x, (size_t)D * 4);
            }
        }
    }
}
static void rope_ff(void *a, i64 b, i64 e) { rope_rows(a, b, e, 0, 0); }
static void rope_fb(void *a, i64 b, i64 e) { rope_rows(a, b, e, 0, 1); }
static void rope_bb(void *a, i64 b, i64 e) { rope_rows(a, b, e, 1, 1); }

/* qkv [n, (heads + 2 kv_heads) dim]; cos, sin [max_position, dim / 2]; q [n, heads dim]. The cache has `slots_total` slots.
 * bf: qkv and q are bfloat16 (then the cache is, too). Nothing is written when a position or slot is out of range. */
EXPORT int dpi_rope_write(const void *qkv, const i64 *positions, const i64 *slots, const float *cos, const float *sin,
                          void *k, void *v, void *q, const float *q_norm, const float *k_norm, i64 n, i64 max_position,
                          i64 slots_total, int heads, int kv_heads, int dim, float eps, int bf, int cache_bf, int threads) {
    for (i64 r = 0; r < n; ++r) {
        if (positions[r] < 0 || positions[r] >= max_position) return BAD_POSITION;
        if (slots[r] < 0 || slots[r] >= slots_total) return BAD_SLOT;
    }
    rope_args a = {qkv, positions, slots, cos, sin, k, v, q, q_norm, k_norm, heads, kv_heads, dim, eps};
    i64 work = n * (heads + 2 * kv_heads) * dim;
    for_each_chunk(n, work < 8192 ? 1 : threads, bf ? rope_bb : cache_bf ? rope_fb : rope_ff, &a);
    return OK;
}
