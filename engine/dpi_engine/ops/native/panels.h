/* Rows times panels of 16 outputs, gathered from anywhere: what routing and experts multiply with.
 *
 * Weights [out, in] lie in panels of 16 outputs, zero-padded: float32 [out / 16][in][16], bfloat16 [out / 16][in / 2][16][2]
 * (as in linear.c).
 */
#ifndef DPI_PANELS_H
#define DPI_PANELS_H
#include "vec.h"

#define PANEL 16
#define PARTS (PANEL / VW)
#define MOST_ROWS 6
#define TOGETHER_ROWS (VW == 16 ? 6 : 3) /* so many rows' sums of two panels fit in registers beside each other */
#define CHAINS (VW == 16 ? 2 : 1)        /* of multiply-adds for each sum, which hides their latency */
#define AHEAD 2048 /* bytes of weights asked for in advance */

/* How products are made: float32 weights; bfloat16 weights widened; bfloat16 weights and rows multiplied as such. */
enum { FLOAT32, WIDENED, DOT };

/* sums[r][0 : 16 np] = row r times np panels, for nr rows of K elements. Odd K: the panels are padded, rows are not.
 * The order of a sum is the same for any nr and np: what a row gives does not depend on the rows beside it. */
INLINE void product(const void *const *x, const void *const *w, float (*sums)[2 * PANEL], i64 K, const int nr, const int np,
                    const int mode) {
    vf acc[MOST_ROWS][2 * PARTS][CHAINS];
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < np * PARTS; ++j)
            for (int u = 0; u < CHAINS; ++u) acc[r][j][u] = v_zero();
    if (mode == FLOAT32) {
        i64 i = 0;
        for (; i + CHAINS <= K; i += CHAINS)
            for (int u = 0; u < CHAINS; ++u) {
                vf col[2 * PARTS];
                for (int j = 0; j < np * PARTS; ++j) {
                    const float *from = (const float *)w[j / PARTS] + (i + u) * PANEL;
                    __builtin_prefetch((const char *)from + AHEAD);
                    col[j] = v_ldf(from + j % PARTS * VW);
                }
                for (int r = 0; r < nr; ++r) {
                    const vf from = v_set(((const float *)x[r])[i + u]);
                    for (int j = 0; j < np * PARTS; ++j) acc[r][j][u] = v_fma(col[j], from, acc[r][j][u]);
                }
            }
        for (; i < K; ++i)
            for (int j = 0; j < np * PARTS; ++j) {
                const vf col = v_ldf((const float *)w[j / PARTS] + i * PANEL + j % PARTS * VW);
                for (int r = 0; r < nr; ++r) acc[r][j][0] = v_fma(col, v_set(((const float *)x[r])[i]), acc[r][j][0]);
            }
    } else {
        const i64 whole = K / 2;
        i64 i = 0;
        for (; i + CHAINS <= whole; i += CHAINS)
            for (int u = 0; u < CHAINS; ++u) {
                vi col[2 * PARTS];
                for (int j = 0; j < np * PARTS; ++j) {
                    const b16 *from = (const b16 *)w[j / PARTS] + (i + u) * PANEL * 2;
                    __builtin_prefetch((const char *)from + AHEAD);
                    col[j] = v_ldi(from + j % PARTS * VW * 2);
                }
#if VW == 16
                if (mode == DOT) {
                    for (int r = 0; r < nr; ++r) {
                        int two;
                        memcpy(&two, (const b16 *)x[r] + 2 * (i + u), 4);
                        const __m512bh from = (__m512bh)_mm512_set1_epi32(two);
                        for (int j = 0; j < np * PARTS; ++j)
                            acc[r][j][u] = _mm512_dpbf16_ps(acc[r][j][u], (__m512bh)col[j], from);
                    }
                    continue;
                }
#endif
                for (int r = 0; r < nr; ++r) {
                    const float *from = (const float *)x[r] + 2 * (i + u);
                    const vf even = v_set(from[0]), odd = v_set(from[1]);
                    for (int j = 0; j < np * PARTS; ++j) {
                        acc[r][j][u] = v_fma(v_low(col[j]), even, acc[r][j][u]);
                        acc[r][j][u] = v_fma(v_high(col[j]), odd, acc[r][j][u]);
                    }
                }
            }
        for (; 2 * i < K; ++i)
            for (int j = 0; j < np * PARTS; ++j) {
                const vi col = v_ldi((const b16 *)w[j / PARTS] + i * PANEL * 2 + j % PARTS * VW * 2);
                for (int r = 0; r < nr; ++r) {
                    const float even = mode == DOT ? widen(((const b16 *)x[r])[2 * i]) : ((const float *)x[r])[2 * i];
                    acc[r][j][0] = v_fma(v_low(col), v_set(even), acc[r][j][0]);
                    if (2 * i + 1 >= K) continue;
                    const float odd = mode == DOT ? widen(((const b16 *)x[r])[2 * i + 1]) : ((const float *)x[r])[2 * i + 1];
                    acc[r][j][0] = v_fma(v_high(col), v_set(odd), acc[r][j][0]);
                }
            }
    }
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < np * PARTS; ++j) {
            vf sum = acc[r][j][0];
            for (int u = 1; u < CHAINS; ++u) sum = v_add(sum, acc[r][j][u]);
            v_stf(sums[r] + j * VW, sum);
        }
}

#define BY_ROWS(OF) switch (nr) { OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) }

INLINE void one_panel(const void *const *x, const void *panel, float (*sums)[2 * PANEL], i64 K, int nr, const int mode) {
#define ROWS_OF(NR) case NR: product(x, &panel, sums, K, NR, 1, mode); break;
    BY_ROWS(ROWS_OF)
#undef ROWS_OF
}

/* Two panels, however many fit at once. */
INLINE void two_panels(const void *const *x, const void *first, const void *second, float (*sums)[2 * PANEL], i64 K, int nr,
                       const int mode) {
    const void *w[2] = {first, second};
#define ROWS_OF(NR) case NR: \
        if (NR <= TOGETHER_ROWS) product(x, w, sums, K, NR, 2, mode); \
        else { \
            product(x, w, sums, K, NR, 1, mode); \
            product(x, w + 1, (float (*)[2 * PANEL])(sums[0] + PANEL), K, NR, 1, mode); \
        } \
        break;
    BY_ROWS(ROWS_OF)
#undef ROWS_OF
}

INLINE const void *panel_of(const void *weights, i64 panel, i64 K, const int mode) {
    return mode == FLOAT32 ? (const void *)((const float *)weights + panel * K * PANEL)
                           : (const void *)((const b16 *)weights + panel * round_up(K, 2) * PANEL);
}
#endif
