/* y = x W^T + bias in bfloat16, by the processor's instructions for pairs of bfloat16 (sums are float32); or, gated,
 * y = silu(x G^T) * (x U^T).
 *
 * Weights lie in the panels of linear.c: [out / 16][in / 2][16][2]; gated, panels of G and of U take turns. A tile is up to ROWS rows times PANELS panels, whose
 * sums are registers. All rows pass by a group of panels while that is in the second-level cache, and meanwhile the next
 * group is asked for, so that memory and arithmetic work at the same time.
 */
#include "kernels.h"
#include "linear.h"
#include "vec.h"

#if VW == 16
#define PANELS 4
#define ROWS 6
#define ROW_BLOCK 192 /* rows that stay in the second-level cache while the panels pass by */
#define DEPTH 2048    /* inputs of a part: a group of panels of that depth is 256 KiB */
#define UNROLL 4      /* pairs between two requests for weights to come */

INLINE __m512bh pair_of(const b16 *x) {
    int pair;
    memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

/* sums[r][j] += x[r][0 : 2 pairs] . panel j, for nr rows and np panels that are `stride` elements apart. */
INLINE void products(vf sums[ROWS][PANELS], const b16 *x, i64 ldx, const b16 *w, i64 stride, i64 pairs, ahead *next,
                     const int nr, const int np) {
    ahead asked = *next;
    i64 i = 0;
    for (; i + UNROLL <= pairs; i += UNROLL) {
        ask_ahead(&asked);
        for (int u = 0; u < UNROLL; ++u) {
            __m512bh col[PANELS];
            for (int j = 0; j < np; ++j) col[j] = (__m512bh)v_ldi(w + j * stride + (i + u) * PANEL * 2);
            for (int r = 0; r < nr; ++r) {
                const __m512bh row = pair_of(x + r * ldx + 2 * (i + u));
                for (int j = 0; j < np; ++j) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], col[j], row);
            }
        }
    }
    for (; i < pairs; ++i)
        for (int r = 0; r < nr; ++r) {
            const __m512bh row = pair_of(x + r * ldx + 2 * i);
            for (int j = 0; j < np; ++j)
                sums[r][j] = _mm512_dpbf16_ps(sums[r][j], (__m512bh)v_ldi(w + j * stride + i * PANEL * 2), row);
        }
    next->at = asked.at;
}

/* One tile over inputs [from, to): sums start at 0 or at `kept`, and end there or in y. */
INLINE void tile(const linear_args *a, i64 row, i64 panel, i64 from, i64 to, float *kept, ahead *next, const int nr,
                 const int np) {
    const i64 K = a->in, stride = (K + 1) / 2 * PANEL * 2;
    const b16 *x = a->x + row * K, *w = a->w + panel * stride;
    vf sums[ROWS][PANELS];
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < np; ++j) sums[r][j] = from ? v_ldf(kept + (r * PANELS + j) * PANEL) : v_zero();
    products(sums, x + from, K, w + from * PANEL, stride, (to - from) / 2, next, nr, np);
    if (to < K) {
        for (int r = 0; r < nr; ++r)
            for (int j = 0; j < np; ++j) v_stf(kept + (r * PANELS + j) * PANEL, sums[r][j]);
        return;
    }
    for (int r = 0; r < nr; ++r) {
        if (K % 2)
            for (int j = 0; j < np; ++j)
                sums[r][j] = pair_product(sums[r][j], w + j * stride + K / 2 * PANEL * 2, x + r * K + K - 1, 1);
        put_row(a, row + r, panel, sums[r], np);
    }
}

#define CASE(R, P) case (R) * 8 + (P): tile(a, row, panel, from, to, kept, next, R, P); break;
#define CASES(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4)

static void any_tile(const linear_args *a, i64 row, i64 panel, i64 from, i64 to, float *kept, ahead *next, int nr, int np) {
    switch (nr * 8 + np) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) }
}

static void groups(const linear_args *a, i64 begin, i64 end) {
    const i64 K = a->in, stride = (K + 1) / 2 * PANEL * 2;
    float kept[ROW_BLOCK / ROWS + 1][ROWS * PANELS * PANEL] __attribute__((aligned(64)));
    for (i64 r0 = 0; r0 < a->n; r0 += ROW_BLOCK) {
        const i64 rows = min_i64(ROW_BLOCK, a->n - r0), blocks = (rows + ROWS - 1) / ROWS;
        for (i64 p = begin; p < end; p += PANELS) {
            const int np = (int)min_i64(PANELS, end - p);
            for (i64 from = 0; from < K; from += DEPTH) {
                const i64 to = min_i64(K, from + DEPTH);
                const int whole = K <= DEPTH;
                ahead next = next_panels(a->w, stride * 2, p + np, whole ? end : 0, blocks, np, UNROLL);
                for (i64 b = 0; b < blocks; ++b) {
                    const i64 top = rows * b / blocks, bottom = rows * (b + 1) / blocks; /* tiles of even height */
                    any_tile(a, r0 + top, p, from, to, kept[b], &next, (int)(bottom - top), np);
                }
            }
        }
    }
}

/* One row is as fast by pairs. */
#define FEWEST_TILE_ROWS 2

static void any_groups(const linear_args *a, i64 begin, i64 end) {
#ifdef __AMX_BF16__
    if (a->n >= FEWEST_TILE_ROWS) {
        dot_tile_groups(a, begin, end);
        return;
    }
#endif
    groups(a, begin, end);
}

static void plain_groups(void *ctx, i64 begin, i64 end) { any_groups(ctx, begin, end); }
static void gated_groups(void *ctx, i64 begin, i64 end) { any_groups(ctx, 2 * begin, 2 * end); }

/* x [n, in] bfloat16, w packed by dpi_pack_linear, bias [out] float32 or NULL -> y [n, out] bfloat16. Gated, packed rows
 * and bias are 16 of G, 16 of U and so on, [2 round_up(out, 16)] in all. */
EXPORT int dpi_linear_dot(const b16 *x, const b16 *w, const float *bias, b16 *y, i64 n, i64 in, i64 out, int gated,
                          int threads) {
    linear_args a = {x, w, bias, y, n, in, out, gated};
    if (n > 0) for_each_chunk((out + PANEL - 1) / PANEL, threads, gated ? gated_groups : plain_groups, &a);
    return OK;
}
#else
EXPORT int dpi_linear_dot(const b16 *x, const b16 *w, const float *bias, b16 *y, i64 n, i64 in, i64 out, int gated,
                          int threads) {
    (void)x, (void)w, (void)bias, (void)y, (void)n, (void)in, (void)out, (void)gated, (void)threads;
    return NO_INSTRUCTIONS;
}
#endif
