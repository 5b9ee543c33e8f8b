/* y = x W^T + bias with weights and activations of 8 bits, sums of 32; or, gated, y = silu(x G^T) * (x U^T).
 *
 * Weights are symmetric per output: w ~ scale[o] * q, q in -127 .. 127. They are kept as q + 128 (the instruction takes
 * unsigned by signed) in panels of 16 outputs: [out / 16][in / 4][16][4], inputs padded to a multiple of 16 with 128;
 * gated, panels of G and of U take turns.
 *
 * Activations are quantized here, row by row, before the products: x ~ scale * n. A few inputs of a row are often many
 * times larger than all others, and would leave these a handful of steps. So the scale is that of the largest but
 * APART, and what exceeds 8 bits in those is multiplied apart, in 16 bits. What 128 adds to a sum is 128 times the sum
 * of the row's integers, so sums start at minus that.
 *
 * Tiles and the passing of panels are as in linear_dot.c. Integers add up exactly in any order: results do not depend on
 * threads or on the other rows.
 */
#include "ahead.h"
#include "int8.h"
#include "kernels.h"
#include "vec.h"

#if VW == 16 && defined(__AVX512VNNI__)
#define ROWS 6
#define ROW_BLOCK 192 /* rows that stay in the second-level cache while the panels pass by */
#define DEPTH 4096    /* inputs of a part: a group of panels of that depth is 256 KiB */
#define UNROLL 4      /* quads of inputs between two requests for weights to come: DEEP inputs */
#define MOST_STEEP 64 /* by how much some of a row may exceed 8 bits */
#define LEAST 0x0880  /* 2^-110 as bfloat16: a row of nothing larger counts as zero, its scale could not be inverted */
#define INFINITE 0x7f80

/* Bytes of a quantized row: whole cache lines, and one more so that rows do not fall on the same places of a cache. */
INLINE i64 row_bytes(i64 in) { return round_up(in, 64) + 64; }

/* Activations */

typedef struct {
    const b16 *x;
    int8_t *q;
    row_form *form;
    i64 in;
} quantize_args;

/* Magnitudes of x[i : i + 32] as bits, whose order is that of the values; zero from n on. */
INLINE vi magnitudes(const b16 *x, i64 i, i64 n) {
    const vi bits = n - i < 32 ? _mm512_maskz_loadu_epi16((__mmask32)((1ull << (n - i)) - 1), x + i) : v_ldi(x + i);
    return _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
}

/* Puts `bits` into the largest APART + 1, which are in order. */
INLINE void insert(unsigned top[APART + 1], unsigned bits) {
    if (bits <= top[APART]) return;
    int at = APART;
    for (; at > 0 && bits > top[at - 1]; --at) top[at] = top[at - 1];
    top[at] = bits;
}

/* The largest APART + 1 magnitudes of x[0:n], zero where there are not as many. */
INLINE void largest(const b16 *x, i64 n, unsigned top[APART + 1]) {
    vi most = _mm512_setzero_si512();
    for (i64 i = 0; i < n; i += 32) most = _mm512_max_epu16(most, magnitudes(x, i, n));
    uint16_t lanes[32];
    _mm512_storeu_si512(lanes, most);
    unsigned bound[APART + 1] = {0};
    for (int l = 0; l < 32; ++l) insert(bound, lanes[l]);
    /* As many are at least bound[APART]: only those need a look. */
    const unsigned under = bound[APART] ? bound[APART] - 1 : 0;
    memset(top, 0, sizeof(unsigned) * (APART + 1));
    for (i64 i = 0; i < n; i += 32) {
        const vi bits = magnitudes(x, i, n);
        const unsigned floor = top[APART] > under ? top[APART] : under;
        uint32_t found = _mm512_cmpgt_epu16_mask(bits, _mm512_set1_epi16((short)floor));
        if (!found) continue;
        _mm512_storeu_si512(lanes, bits);
        for (; found; found &= found - 1) insert(top, lanes[__builtin_ctz(found)]);
    }
}

/* Quantizes x[i : i + count]; returns the integers, and notes what exceeds 8 bits. */
INLINE vi quantize_some(const b16 *x, i64 i, int count, vf limit, vf steps, int8_t *q, row_form *form, int *apart) {
    const vf values = count == VW ? v_ldb(x + i) : v_ldbn(x + i, count);
    const vi n = _mm512_cvtps_epi32(v_mul(values, steps)); /* to the nearest, ties to even */
    _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtsepi32_epi8(n)); /* there is room, and beyond the inputs all are 0 */
    unsigned large = _mm512_cmp_ps_mask(_mm512_abs_ps(values), limit, _CMP_GT_OQ);
    if (large) {
        int32_t all[VW];
        _mm512_storeu_si512(all, n);
        for (; large; large &= large - 1) {
            const int k = __builtin_ctz(large);
            form->at[*apart] = (int32_t)(i + k);
            form->rest[(*apart)++] = all[k] - q[i + k];
        }
    }
    return n;
}

static void quantize_rows(void *ctx, i64 begin, i64 end) {
    const quantize_args *a = ctx;
    const i64 K = a->in, wide = row_bytes(K), full = K / VW * VW;
    for (i64 r = begin; r < end; ++r) {
        const b16 *x = a->x + r * K;
        int8_t *q = a->q + r * wide;
        row_form form = {0};
        unsigned top[APART + 1];
        largest(x, K, top);
        const int usable = top[0] >= LEAST && top[0] < INFINITE;
        for (i64 i = usable ? full : 0; i < wide; i += VW) _mm_storeu_si128((__m128i *)(q + i), _mm_setzero_si128());
        if (!usable) {
            form.scale = top[0] < LEAST ? 0.f : NAN;
            a->form[r] = form;
            continue;
        }
        const float least = widen((b16)top[0]) / MOST_STEEP, next = widen((b16)top[APART]);
        const float limit = next > least ? next : least; /* what 127 steps stand for */
        const vf steps = v_set(127.f / limit);
        vi sum = _mm512_setzero_si512();
        int apart = 0;
        for (i64 i = 0; i < full; i += VW)
            sum = _mm512_add_epi32(sum, quantize_some(x, i, VW, v_set(limit), steps, q, &form, &apart));
        if (full < K)
            sum = _mm512_add_epi32(sum, quantize_some(x, full, (int)(K - full), v_set(limit), steps, q, &form, &apart));
        form.scale = limit / 127.f;
        form.start = -128 * _mm512_reduce_add_epi32(sum);
        a->form[r] = form;
    }
}

/* Products */

INLINE vi quad_of(const int8_t *x) {
    int quad;
    memcpy(&quad, x, 4);
    return _mm512_set1_epi32(quad);
}

/* One tile over inputs [from, to): kept[r][j] is set, or added to when from > 0, for nr rows and np panels. */
INLINE void tile(const int8_args *a, i64 row, i64 panel, i64 from, i64 to, int32_t *kept, ahead *next, const int nr,
                 const int np) {
    const i64 ldx = a->ldx, stride = round_up(a->in, DEEP) * PANEL, quads = round_up(to - from, DEEP) / 4;
    const uint8_t *w = a->w + panel * stride + from * PANEL;
    const int8_t *x = a->x + row * ldx + from;
    ahead asked = *next;
    vi sums[ROWS][PANELS];
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < np; ++j)
            sums[r][j] = from ? v_ldi(kept + (r * PANELS + j) * PANEL) : _mm512_set1_epi32(a->form[row + r].start);
    for (i64 i = 0; i < quads; i += UNROLL) { /* beyond the inputs are zeros */
        ask_ahead(&asked);
        for (int u = 0; u < UNROLL; ++u) {
            vi col[PANELS];
            __asm__ volatile("" ::: "memory"); /* loads brought forward would push sums out of registers */
            for (int j = 0; j < np; ++j) col[j] = v_ldi(w + j * stride + (i + u) * PANEL * 4);
            for (int r = 0; r < nr; ++r) {
                const vi quad = quad_of(x + r * ldx + 4 * (i + u));
                for (int j = 0; j < np; ++j) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[r][j]) : "v"(col[j]), "v"(quad));
            }
        }
    }
    next->at = asked.at;
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < np; ++j) _mm512_storeu_si512(kept + (r * PANELS + j) * PANEL, sums[r][j]);
}

#define CASE(R, P) case (R) * 8 + (P): tile(a, row, panel, from, to, kept, next, R, P); break;
#define CASES(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4)

static void any_tile(const int8_args *a, i64 row, i64 panel, i64 from, i64 to, int32_t *kept, ahead *next, int nr, int np) {
    switch (nr * 8 + np) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) }
}

static void groups(const int8_args *a, i64 begin, i64 end) {
    const i64 K = a->in, stride = round_up(K, DEEP) * PANEL;
    int32_t kept[ROW_BLOCK / ROWS + 1][ROWS * PANELS * PANEL] __attribute__((aligned(64)));
    for (i64 r0 = 0; r0 < a->n; r0 += ROW_BLOCK) {
        const i64 rows = min_i64(ROW_BLOCK, a->n - r0), blocks = (rows + ROWS - 1) / ROWS;
        for (i64 p = begin; p < end; p += PANELS) {
            const int np = (int)min_i64(PANELS, end - p);
            for (i64 from = 0; from < K; from += DEPTH) {
                const i64 to = min_i64(K, from + DEPTH);
                ahead next = next_panels(a->w, stride, p + np, K <= DEPTH ? end : 0, blocks, np, UNROLL);
                for (i64 b = 0; b < blocks; ++b) {
                    const i64 top = rows * b / blocks, bottom = rows * (b + 1) / blocks; /* tiles of even height */
                    any_tile(a, r0 + top, p, from, to, kept[b], &next, (int)(bottom - top), np);
                    if (to == K) finish(a, r0 + top, p, kept[b], (int)(bottom - top), np);
                }
            }
        }
    }
}

/* Fewer rows are as fast by quads. */
#define FEWEST_TILE_ROWS 8

static void any_groups(const int8_args *a, i64 begin, i64 end) {
#ifdef __AMX_INT8__
    if (a->n >= FEWEST_TILE_ROWS && a->in % INT8_TILE_DEEP == 0) {
        int8_tile_groups(a, begin, end);
        return;
    }
#endif
    groups(a, begin, end);
}

static void plain_groups(void *ctx, i64 begin, i64 end) { any_groups(ctx, begin, end); }
static void gated_groups(void *ctx, i64 begin, i64 end) { any_groups(ctx, 2 * begin, 2 * end); }

/* x [n, in] bfloat16; w and scale by dpi_pack_int8; bias [out] float32 or NULL -> y [n, out] bfloat16. Gated, packed rows,
 * scales and bias are 16 of G, 16 of U and so on, [2 round_up(out, 16)] in all. `room`: n dpi_int8_room(in) bytes for
 * the quantized rows, at a multiple of 4. A row with a value that is not finite gives NaN in all its outputs, and the other
 * rows are what they are without it. */
EXPORT int dpi_linear_int8(const b16 *x, const uint8_t *w, const float *scale, const float *bias, b16 *y, void *room,
                           i64 n, i64 in, i64 out, int gated, int threads) {
    int8_t *quantized = room;
    row_form *form = (row_form *)(void *)(quantized + n * row_bytes(in));
    quantize_args q = {x, quantized, form, in};
    for_each_chunk(n, n * in < 4096 ? 1 : threads, quantize_rows, &q);
    int8_args a = {quantized, form, w, scale, bias, y, n, in, out, row_bytes(in), gated};
    if (n > 0) for_each_chunk((out + PANEL - 1) / PANEL, threads, gated ? gated_groups : plain_groups, &a);
    return OK;
}

/* Bytes of `room` that each row needs. */
EXPORT i64 dpi_int8_room(i64 in) { return row_bytes(in) + (i64)sizeof(row_form); }

/* Weights */

typedef struct {
    const void *weight;
    uint8_t *packed;
    float *scale;
    i64 in, out;
} pack_args;

INLINE void pack_panels(const pack_args *a, i64 begin, i64 end, const int bf) {
    const i64 K = a->in, wide = round_up(K, DEEP), full = K / VW * VW;
    const int rest = (int)(K - full);
    for (i64 p = begin; p < end; ++p)
        for (int c = 0; c < PANEL; ++c) {
            const i64 column = p * PANEL + c, at = column * K;
            uint8_t *to = a->packed + p * wide * PANEL + c * 4;
            if (column >= a->out) {
                for (i64 i = 0; i < wide; i += 4) memset(to + i * PANEL, 128, 4);
                continue;
            }
            const vi magnitude = _mm512_set1_epi32(0x7fffffff);
            vi bits = _mm512_setzero_si512(); /* magnitudes of floats are in the order of their bits, NaN above all */
            for (i64 i = 0; i < K; i += VW) {
                const vf x = i < full ? v_load(a->weight, at + i, bf) : v_loadn(a->weight, at + i, rest, bf);
                bits = _mm512_max_epu32(bits, _mm512_and_si512(_mm512_castps_si512(x), magnitude));
            }
            const uint32_t top = _mm512_reduce_max_epu32(bits);
            float most;
            memcpy(&most, &top, 4);
            /* A weight that is not finite makes its output NaN. */
            const int usable = most >= 0x1p-110f && top < 0x7f800000u;
            a->scale[column] = usable ? most / 127.f : top < 0x7f800000u ? 0.f : NAN;
            const vf steps = v_set(usable ? 127.f / most : 0.f);
            for (i64 i = 0; i < K; i += VW) {
                const vf x = i < full ? v_load(a->weight, at + i, bf) : v_loadn(a->weight, at + i, rest, bf);
                const vi q = usable ? _mm512_cvtps_epi32(v_mul(x, steps)) : _mm512_setzero_si512();
                uint8_t bytes[VW];
                _mm_storeu_si128((__m128i *)bytes, _mm512_cvtepi32_epi8(_mm512_add_epi32(q, _mm512_set1_epi32(128))));
                for (i64 k = i; k < wide && k < i + VW; k += 4) memcpy(to + k * PANEL, bytes + (k - i), 4);
            }
        }
}
static void pack_f(void *ctx, i64 begin, i64 end) { pack_panels(ctx, begin, end, 0); }
static void pack_b(void *ctx, i64 begin, i64 end) { pack_panels(ctx, begin, end, 1); }

/* weight [out, in], float32 or (bf) bfloat16 -> packed, round_up(out, 16) * round_up(in, 16) bytes, and scale [out]. */
EXPORT int dpi_pack_int8(const void *weight, uint8_t *packed, float *scale, i64 in, i64 out, int bf, int threads) {
    pack_args a = {weight, packed, scale, in, out};
    for_each_chunk((out + PANEL - 1) / PANEL, threads, bf ? pack_b : pack_f, &a);
    return OK;
}
#else
EXPORT int dpi_linear_int8(const b16 *x, const uint8_t *w, const float *scale, const float *bias, b16 *y, void *room,
                           i64 n, i64 in, i64 out, int gated, int threads) {
    (void)x, (void)w, (void)scale, (void)bias, (void)y, (void)room, (void)n, (void)in, (void)out, (void)gated, (void)threads;
    return NO_INSTRUCTIONS;
}
EXPORT i64 dpi_int8_room(i64 in) {
    (void)in;
    return 0;
}
EXPORT int dpi_pack_int8(const void *weight, uint8_t *packed, float *scale, i64 in, i64 out, int bf, int threads) {
    (void)weight, (void)packed, (void)scale, (void)in, (void)out, (void)bf, (void)threads;
    return NO_INSTRUCTIONS;
}
#endif
