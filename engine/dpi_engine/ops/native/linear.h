/* What the linears of bfloat16 rows share: arguments, and what is done with a row's sums. */
#ifndef DPI_LINEAR_H
#define DPI_LINEAR_H
#include "ahead.h"
#include "vec.h"

#if VW == 16
#define PANEL 16

/* See dpi_linear_dot. */
typedef struct {
    const b16 *x, *w;
    const float *bias;
    b16 *y;
    i64 n, in, out;
    int gated;
} linear_args;

/* sums + a pair of inputs times a panel's row of pairs; the last input of an odd row has no partner (`left` is 1), and
 * what lies after it may be anything. */
INLINE vf pair_product(vf sums, const b16 *w, const b16 *x, i64 left) {
    int pair = x[0];
    if (left > 1) memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sums, (__m512bh)v_ldi(w), (__m512bh)_mm512_set1_epi32(pair));
}

/* y[row] of panels [panel, panel + np) from their sums. Gated: np is even. */
INLINE void put_row(const linear_args *a, i64 row, i64 panel, const vf *sums, const int np) {
    b16 *y = a->y + row * a->out;
    if (a->gated) {
        for (int j = 0; j + 1 < np; j += 2) {
            const i64 column = (panel + j) / 2 * PANEL;
            const int left = (int)min_i64(PANEL, a->out - column);
            vf gate = sums[j], up = sums[j + 1];
            if (a->bias) gate = v_add(gate, v_ldf(a->bias + 2 * column)), up = v_add(up, v_ldf(a->bias + 2 * column + PANEL));
            v_stbn(y + column, v_mul(v_silu(gate), up), left);
        }
        return;
    }
    for (int j = 0; j < np; ++j) {
        const i64 column = (panel + j) * PANEL;
        const int left = (int)min_i64(PANEL, a->out - column);
        v_stbn(y + column, a->bias ? v_add(sums[j], v_ldfn(a->bias + column, left)) : sums[j], left);
    }
}

/* All rows times panels [begin, end), by the processor's tiles. */
void dot_tile_groups(const linear_args *a, i64 begin, i64 end);
#define DOT_TILE_DEEP 32 /* inputs of a tile */
#endif
#endif
