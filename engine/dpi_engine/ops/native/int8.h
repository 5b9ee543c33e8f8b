/* What the linears of 8 bits share: quantized rows, arguments, and what is done with a row's sums. See linear_int8.c. */
#ifndef DPI_INT8_H
#define DPI_INT8_H
#include "vec.h"

#if VW == 16 && defined(__AVX512VNNI__)
#define PANEL 16
#define PANELS 4 /* panels that are summed at once, at most */
#define DEEP 16  /* inputs are padded to a multiple of these */
#define APART 4  /* inputs of a row that may exceed 8 bits */

/* A quantized row: x ~ scale * n; sums of its products start at `start`. n is q, and at the inputs `at` q + rest. */
typedef struct {
    float scale;
    int32_t start, at[APART], rest[APART];
} row_form;

typedef struct {
    const int8_t *x;
    const row_form *form;
    const uint8_t *w;
    const float *scale, *bias;
    b16 *y;
    i64 n, in, out, ldx;
    int gated;
} int8_args;

/* sum + what exceeds 8 bits in a row, times the weights of a panel. */
INLINE vi with_rest(vi sum, const row_form *form, const uint8_t *w, const vi pick[APART], const vi rest[APART]) {
    for (int t = 0; t < APART; ++t)
        sum = _mm512_dpwssd_epi32(sum, _mm512_shuffle_epi8(v_ldi(w + form->at[t] / 4 * PANEL * 4), pick[t]), rest[t]);
    return sum;
}

/* From the sums of a tile to its outputs. */
static inline void finish(const int8_args *a, i64 row, i64 panel, const int32_t *kept, int nr, int np) {
    const i64 stride = round_up(a->in, DEEP) * PANEL;
    const int each = a->gated ? 2 : 1;
    const int zero = (int)0x80808000u;
    const vi first = _mm512_broadcast_i32x4(_mm_setr_epi32(zero, zero + 4, zero + 8, zero + 12));
    for (int r = 0; r < nr; ++r) {
        const row_form *form = a->form + row + r;
        const vf by = v_set(form->scale);
        vi pick[APART], rest[APART];
        for (int t = 0; t < APART; ++t) { /* one byte of each four, as the lower half of 32 bits; the rest zero */
            pick[t] = _mm512_add_epi8(first, _mm512_set1_epi32(form->at[t] % 4));
            rest[t] = _mm512_set1_epi32(form->rest[t] & 0xffff);
        }
        for (int j = 0; j < np; j += each) {
            const i64 at = (panel + j) * PANEL, column = at / each;
            const int left = (int)min_i64(PANEL, a->out - column), have = a->gated ? PANEL : left;
            vf y[2];
            for (int k = 0; k < each; ++k) {
                const vi kept_sum = v_ldi(kept + (r * PANELS + j + k) * PANEL);
                const vi sum = with_rest(kept_sum, form, a->w + (panel + j + k) * stride, pick, rest);
                const vf bias = a->bias ? v_ldfn(a->bias + at + k * PANEL, have) : v_zero();
                y[k] = v_fma(_mm512_cvtepi32_ps(sum), v_mul(by, v_ldfn(a->scale + at + k * PANEL, have)), bias);
            }
            if (a->gated) y[0] = v_mul(v_silu(y[0]), y[1]);
            v_stbn(a->y + (row + r) * a->out + column, y[0], left);
        }
    }
}

/* All rows times panels [begin, end), by the processor's tiles. */
void int8_tile_groups(const int8_args *a, i64 begin, i64 end);
#define INT8_TILE_DEEP 64 /* inputs must be a multiple of these */
#endif
#endif
