/* The products of linear_dot.c and linear_int8.c by the processor's tiles (tiles.h): same panels, same rows. Sums of
 * bfloat16 are the same but for their order, those of integers exactly.
 */
#include "int8.h"
#include "kernels.h"
#include "linear.h"
#include "tiles.h"
#include "vec.h"

#ifdef __AMX_BF16__
INLINE void put_rows(const linear_args *a, i64 row, int rows, i64 panel, float *sums, const int np) {
    const i64 K = a->in, whole = K / DOT_TILE_DEEP * DOT_TILE_DEEP, stride = (K + 1) / 2 * PANEL * 2;
    if (whole < K)
        for (int r = 0; r < rows; ++r)
            for (int j = 0; j < np; ++j) {
                const b16 *x = a->x + (row + r) * K, *w = a->w + (panel + j) * stride;
                vf sum = v_ldf(sums + r * SLOT + j * PANEL);
                for (i64 i = whole; i < K; i += 2) sum = pair_product(sum, w + i * PANEL, x + i, K - i);
                v_stf(sums + r * SLOT + j * PANEL, sum);
            }
    for (int r = 0; r < rows; ++r) {
        vf of[TILE_PANELS];
        for (int j = 0; j < np; ++j) of[j] = v_ldf(sums + r * SLOT + j * PANEL);
        put_row(a, row + r, panel, of, np);
    }
}

static void finish_dot(const void *args, i64 row, int rows, i64 panel, int32_t *sums, int np) {
    float *floats = (float *)(void *)sums;
    switch (np) {
    case 1: put_rows(args, row, rows, panel, floats, 1); break;
    case 2: put_rows(args, row, rows, panel, floats, 2); break;
    case 3: put_rows(args, row, rows, panel, floats, 3); break;
    default: put_rows(args, row, rows, panel, floats, 4);
    }
}

void dot_tile_groups(const linear_args *a, i64 begin, i64 end) {
    const tile_work t = {a->x, a->w, a->n, a->in * 2, (a->in + 1) / 2 * PANEL * 4, a->in / DOT_TILE_DEEP, a, NULL, finish_dot};
    tile_groups(&t, begin, end, BFLOATS);
}

/* Sums begin at what the rows' forms say. */
static void begin_int8(const void *args, i64 row, int rows, int32_t *sums, int np) {
    const int8_args *a = args;
    for (int r = 0; r < rows; ++r)
        for (int j = 0; j < np; ++j)
            _mm512_storeu_si512(sums + r * SLOT + j * PANEL, _mm512_set1_epi32(a->form[row + r].start));
}

static void finish_int8(const void *args, i64 row, int rows, i64 panel, int32_t *sums, int np) {
    finish(args, row, panel, sums, rows, np);
}

void int8_tile_groups(const int8_args *a, i64 begin, i64 end) {
    const tile_work t = {a->x, a->w, a->n, a->ldx, round_up(a->in, DEEP) * PANEL, a->in / INT8_TILE_DEEP, a, begin_int8,
                         finish_int8};
    tile_groups(&t, begin, end, INTEGERS);
}
#endif
