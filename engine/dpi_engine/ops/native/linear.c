/* y = x W^T + bias with bfloat16 weights, for processors whose matrix library has nothing good for them.
 *
 * Weights [out, in] are packed into panels of 16 outputs: [out / 16][in / 2][16][2], zero-padded. A panel row is 64 bytes:
 * one shift and one mask widen it in registers, so weights cost half the memory traffic of float32 and hardly any time.
 */
#include "kernels.h"
#include "vec.h"

#define PANEL 16
#define PARTS (PANEL / VW)
#define ROW_BLOCK 96 /* rows that stay in the second-level cache while the panels pass by */
#define MOST_ROWS 6
#define MOST_PANELS 4 /* at once, with one row; half as many with two */
#define AHEAD 4096 /* bytes of weights asked for in advance */

typedef struct {
    const float *x;
    const b16 *w;
    const float *bias;
    float *y;
    i64 n, in, out;
} linear_args;

/* nr rows times np panels, from `panel` on. Every sum is one chain over the inputs, however many rows there are: what a row
 * gives does not depend on the rows beside it, nor a request's tokens on its batch. With few rows, several panels at once
 * hide the latency of the multiply-adds. */
INLINE void block(const linear_args *a, i64 row, i64 panel, const int nr, const int np) {
    const i64 K = a->in, pairs = (K + 1) / 2, full = K / 2, at = panel * PANEL;
    const i64 size = pairs * PANEL * 2;
    const b16 *w = a->w + panel * size;
    const float *x = a->x + row * K;
    vf acc[MOST_ROWS][MOST_PANELS * PARTS];
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < np * PARTS; ++j) acc[r][j] = v_zero();
    i64 i = 0;
    for (; i < full; ++i) {
        const b16 *row_w = w + i * PANEL * 2;
        vf half[MOST_PANELS * PARTS];
        for (int j = 0; j < np * PARTS; ++j) {
            const b16 *from = row_w + j / PARTS * size + j % PARTS * VW * 2;
            /* Weights come from memory as fast as they are asked for. Past the end is harmless. */
            if (j % PARTS == 0) __builtin_prefetch((const char *)from + AHEAD);
            half[j] = v_low(v_ldi(from));
        }
        for (int r = 0; r < nr; ++r) {
            const vf from = v_set(x[r * K + 2 * i]);
            for (int j = 0; j < np * PARTS; ++j) acc[r][j] = v_fma(half[j], from, acc[r][j]);
        }
        /* Read the row again rather than keep it: AVX2 has 16 registers, and 12 hold sums. */
        __asm__("" : "+r"(row_w));
        for (int j = 0; j < np * PARTS; ++j) half[j] = v_high(v_ldi(row_w + j / PARTS * size + j % PARTS * VW * 2));
        for (int r = 0; r < nr; ++r) {
            const vf from = v_set(x[r * K + 2 * i + 1]);
            for (int j = 0; j < np * PARTS; ++j) acc[r][j] = v_fma(half[j], from, acc[r][j]);
        }
    }
    if (i < pairs) /* an odd input is left */
        for (int j = 0; j < np * PARTS; ++j) {
            const vf low = v_low(v_ldi(w + j / PARTS * size + i * PANEL * 2 + j % PARTS * VW * 2));
            for (int r = 0; r < nr; ++r) acc[r][j] = v_fma(low, v_set(x[r * K + 2 * i]), acc[r][j]);
        }
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < np * PARTS; ++j) {
            const i64 column = at + j * VW;
            if (column >= a->out) break;
            const int left = a->out - column < VW ? (int)(a->out - column) : VW;
            float *y = a->y + (row + r) * a->out + column;
            vf sum = acc[r][j];
            if (left == VW) {
                if (a->bias) sum = v_add(sum, v_ldf(a->bias + column));
                v_stf(y, sum);
            } else {
                if (a->bias) sum = v_add(sum, v_ldfn(a->bias + column, left));
                v_stfn(y, sum, left);
            }
        }
}

static void panels(void *ctx, i64 begin, i64 end) {
    const linear_args *a = ctx;
    for (i64 r0 = 0; r0 < a->n; r0 += ROW_BLOCK) {
        const i64 rows = min_i64(ROW_BLOCK, a->n - r0), blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
        i64 p = begin;
        if (rows == 1)
            for (; p + MOST_PANELS <= end; p += MOST_PANELS) block(a, r0, p, 1, MOST_PANELS);
        if (rows == 2)
            for (; p + MOST_PANELS / 2 <= end; p += MOST_PANELS / 2) block(a, r0, p, 2, MOST_PANELS / 2);
        for (; p < end; ++p)
            for (i64 b = 0; b < blocks; ++b) {
                const i64 from = r0 + rows * b / blocks, to = r0 + rows * (b + 1) / blocks; /* blocks of even height */
                switch (to - from) {
                case 1: block(a, from, p, 1, 1); break;
                case 2: block(a, from, p, 2, 1); break;
                case 3: block(a, from, p, 3, 1); break;
                case 4: block(a, from, p, 4, 1); break;
                case 5: block(a, from, p, 5, 1); break;
                case 6: block(a, from, p, 6, 1); break;
                }
            }
    }
}

/* x [n, in] float32, w packed, bias [out] float32 or NULL -> y [n, out] float32. */
EXPORT void dpi_linear(const float *x, const b16 *w, const float *bias, float *y, i64 n, i64 in, i64 out, int threads) {
    linear_args a = {x, w, bias, y, n, in, out};
    if (n > 0) for_each_chunk((out + PANEL - 1) / PANEL, threads, panels, &a);
}

typedef struct {
    const b16 *weight;
    b16 *packed;
    i64 in, out;
} pack_args;

static void pack_panels(void *ctx, i64 begin, i64 end) {
    const pack_args *a = ctx;
    const i64 pairs = (a->in + 1) / 2;
    for (i64 p = begin; p < end; ++p)
        for (int c = 0; c < PANEL; ++c) {
            const i64 column = p * PANEL + c;
            b16 *to = a->packed + p * pairs * PANEL * 2 + c * 2;
            for (i64 i = 0; i < 2 * pairs; ++i)
                to[i / 2 * PANEL * 2 + i % 2] = column < a->out && i < a->in ? a->weight[column * a->in + i] : 0;
        }
}

/* weight [out, in] bfloat16 -> packed, round_up(out, 16) * round_up(in, 2) elements. */
EXPORT void dpi_pack_linear(const b16 *weight, b16 *packed, i64 in, i64 out, int threads) {
    pack_args a = {weight, packed, in, out};
    for_each_chunk((out + PANEL - 1) / PANEL, threads, pack_panels, &a);
}
