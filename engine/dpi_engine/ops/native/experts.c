/* Routed experts: what the ones that a token goes to make of it.
 *
 * Weights lie in the panels of panels.h. Gate and up of an expert follow each other, each with panels of its own.
 *
 * (token, choice) pairs are sorted by expert. First each expert's panels of gate and up meet its tokens, then each group of
 * output columns is summed over all experts by one thread, in order of experts: no sum depends on the number of threads.
 */
#include "kernels.h"
#include "panels.h"
#include <stdlib.h>

#define GROUP 4 /* panels that stay in the second-level cache while rows pass by */

typedef struct {
    const void *x;
    const float *weights;
    const void *gate_up, *down;
    void *inner;       /* [pairs, inner width]: silu(gate) * up */
    float *sums;       /* [n, hidden] */
    void *out;         /* [n, hidden] */
    const int32_t *pair; /* [pairs] by expert: row * choices + choice */
    const i64 *first;  /* [experts + 1] into pair */
    const int32_t *hit; /* experts that have pairs */
    i64 hits, n, hidden, width;
    int choices, bf;
} expert_args;

INLINE vf silu_times(vf a, vf b) { return v_mul(v_div(a, v_add(v_set(1.f), v_exp(v_sub(v_zero(), a)))), b); }

/* Item: GROUP panels of one expert's gate and up. */
INLINE void open_rows(const expert_args *a, i64 begin, i64 end, const int mode) {
    const i64 panels = (a->width + PANEL - 1) / PANEL, groups = (panels + GROUP - 1) / GROUP, K = a->hidden;
    const i64 row_bytes = K * (mode == DOT ? 2 : 4);
    float sums[MOST_ROWS][2 * PANEL] __attribute__((aligned(64)));
    for (i64 item = begin; item < end; ++item) {
        const i64 e = a->hit[item / groups], p0 = item % groups * GROUP, p1 = min_i64(panels, p0 + GROUP);
        const i64 from = a->first[e], count = a->first[e + 1] - from, blocks = (count + MOST_ROWS - 1) / MOST_ROWS;
        for (i64 b = 0; b < blocks; ++b) {
            const i64 low = from + count * b / blocks, high = from + count * (b + 1) / blocks; /* of even height */
            const int nr = (int)(high - low);
            const void *x[MOST_ROWS];
            for (int r = 0; r < nr; ++r) x[r] = (const char *)a->x + a->pair[low + r] / a->choices * row_bytes;
            for (i64 p = p0; p < p1; ++p) {
                const void *gate = panel_of(a->gate_up, (2 * e) * panels + p, K, mode);
                const void *up = panel_of(a->gate_up, (2 * e + 1) * panels + p, K, mode);
                two_panels(x, gate, up, sums, K, nr, mode);
                const int left = (int)min_i64(PANEL, a->width - p * PANEL);
                for (int r = 0; r < nr; ++r)
                    for (int j = 0; j < left; j += VW) {
                        const vf y = silu_times(v_ldf(sums[r] + j), v_ldf(sums[r] + PANEL + j));
                        const i64 at = (low + r) * a->width + p * PANEL + j;
                        if (left - j >= VW) v_store(a->inner, at, y, mode == DOT);
                        else v_storen(a->inner, at, y, left - j, mode == DOT);
                    }
            }
        }
    }
}

/* Item: 2 GROUP panels of output columns, over all experts. */
INLINE void close_columns(const expert_args *a, i64 begin, i64 end, const int mode) {
    const i64 panels = (a->hidden + PANEL - 1) / PANEL, K = a->width, row_bytes = K * (mode == DOT ? 2 : 4);
    float sums[MOST_ROWS][2 * PANEL] __attribute__((aligned(64)));
    for (i64 item = begin; item < end; ++item) {
        const i64 p0 = item * 2 * GROUP, p1 = min_i64(panels, p0 + 2 * GROUP);
        const i64 c0 = p0 * PANEL, c1 = min_i64(a->hidden, p1 * PANEL);
        for (i64 r = 0; r < a->n; ++r) memset(a->sums + r * a->hidden + c0, 0, (size_t)(c1 - c0) * 4);
        for (i64 h = 0; h < a->hits; ++h) {
            const i64 e = a->hit[h], from = a->first[e], count = a->first[e + 1] - from;
            const i64 blocks = (count + MOST_ROWS - 1) / MOST_ROWS;
            for (i64 b = 0; b < blocks; ++b) {
                const i64 low = from + count * b / blocks, high = from + count * (b + 1) / blocks;
                const int nr = (int)(high - low);
                const void *x[MOST_ROWS];
                for (int r = 0; r < nr; ++r) x[r] = (const char *)a->inner + (low + r) * row_bytes;
                for (i64 p = p0; p < p1; p += 2) {
                    const void *one = panel_of(a->down, e * panels + p, K, mode);
                    const void *two = p + 1 < p1 ? panel_of(a->down, e * panels + p + 1, K, mode) : one;
                    two_panels(x, one, two, sums, K, nr, mode);
                    const int left = (int)min_i64(2 * PANEL, c1 - p * PANEL);
                    for (int r = 0; r < nr; ++r) {
                        const i64 pair = a->pair[low + r];
                        float *to = a->sums + pair / a->choices * a->hidden + p * PANEL;
                        const vf by = v_set(a->weights[pair]);
                        int j = 0;
                        for (; j + VW <= left; j += VW) v_stf(to + j, v_fma(v_ldf(sums[r] + j), by, v_ldf(to + j)));
                        if (j < left)
                            v_stfn(to + j, v_fma(v_ldfn(sums[r] + j, left - j), by, v_ldfn(to + j, left - j)), left - j);
                    }
                }
            }
        }
        if (!a->bf) continue;
        for (i64 r = 0; r < a->n; ++r) {
            const i64 at = r * a->hidden;
            i64 c = c0;
            for (; c + VW <= c1; c += VW) v_store(a->out, at + c, v_ldf(a->sums + at + c), 1);
            if (c < c1) v_storen(a->out, at + c, v_ldfn(a->sums + at + c, (int)(c1 - c)), (int)(c1 - c), 1);
        }
    }
}

static void open_float32(void *a, i64 b, i64 e) { open_rows(a, b, e, FLOAT32); }
static void open_widened(void *a, i64 b, i64 e) { open_rows(a, b, e, WIDENED); }
static void close_float32(void *a, i64 b, i64 e) { close_columns(a, b, e, FLOAT32); }
static void close_widened(void *a, i64 b, i64 e) { close_columns(a, b, e, WIDENED); }
#if VW == 16
static void open_dot(void *a, i64 b, i64 e) { open_rows(a, b, e, DOT); }
static void close_dot(void *a, i64 b, i64 e) { close_columns(a, b, e, DOT); }
#endif

/* x, out [n, hidden]; ids, weights [n, choices], id -1 for nothing; gate_up, down packed, of `experts` experts `width` wide
 * inside. inner: room for n choices width elements of x's kind; sums: for n hidden floats when bf, else unused. bf: x and out
 * are bfloat16 (then the weights are, too). Nothing is written when an id is out of range. */
EXPORT int dpi_experts(const void *x, const int32_t *ids, const float *weights, const void *gate_up, const void *down,
                       void *inner, float *sums, void *out, i64 n, i64 experts, i64 hidden, i64 width, int choices, int bf,
                       int weight_bf, int threads) {
    const i64 all = n * choices;
    i64 *first = calloc((size_t)experts + 2, sizeof(i64));
    int32_t *lists = malloc((size_t)(all + experts + 1) * sizeof(int32_t));
    if (!first || !lists) {
        free(first);
        free(lists);
        return NO_MEMORY;
    }
    int status = OK;
    i64 *next = first + 1, hits = 0; /* next[e]: where e's next pair goes; at the end, where e + 1 begins */
    int32_t *pair = lists, *hit = lists + all;
    for (i64 i = 0; i < all && !status; ++i) {
        if (ids[i] >= experts || ids[i] < -1) status = BAD_EXPERT;
        else if (ids[i] >= 0) ++first[ids[i] + 2];
    }
    if (!status) {
        for (i64 e = 0; e < experts; ++e) {
            if (first[e + 2]) hit[hits++] = (int32_t)e;
            first[e + 2] += first[e + 1];
        }
        for (i64 i = 0; i < all; ++i)
            if (ids[i] >= 0) pair[next[ids[i]]++] = (int32_t)i;
        expert_args a = {x, weights, gate_up, down, inner, bf ? sums : out, out, pair, first, hit, hits, n, hidden, width, choices, bf};
        body_fn open = weight_bf ? open_widened : open_float32, close = weight_bf ? close_widened : close_float32;
#if VW == 16
        if (bf) open = open_dot, close = close_dot;
#endif
        const i64 panels = (width + PANEL - 1) / PANEL, columns = (hidden + 2 * GROUP * PANEL - 1) / (2 * GROUP * PANEL);
        const int teams = all * hidden * width < 65536 ? 1 : threads;
        for_each_item(hits * ((panels + GROUP - 1) / GROUP), teams, open, &a);
        for_each_item(columns, teams, close, &a);
    }
    free(first);
    free(lists);
    return status;
}

typedef struct {
    const void *weight;
    void *packed;
    i64 in, out;
    int bf;
} pack_args;

static void pack_panels(void *ctx, i64 begin, i64 end) {
    const pack_args *a = ctx;
    const i64 rows = a->bf ? round_up(a->in, 2) : a->in;
    for (i64 p = begin; p < end; ++p)
        for (int c = 0; c < PANEL; ++c) {
            const i64 column = p * PANEL + c;
            if (a->bf) {
                b16 *to = (b16 *)a->packed + p * rows * PANEL + c * 2;
                for (i64 i = 0; i < rows; ++i)
                    to[i / 2 * PANEL * 2 + i % 2] = column < a->out && i < a->in ? ((const b16 *)a->weight)[column * a->in + i] : 0;
            } else {
                float *to = (float *)a->packed + p * rows * PANEL + c;
                for (i64 i = 0; i < rows; ++i) to[i * PANEL] = column < a->out ? ((const float *)a->weight)[column * a->in + i] : 0;
            }
        }
}

/* weight [out, in] -> packed: round_up(out, 16) times in (bf: round_up(in, 2)) elements. */
EXPORT void dpi_pack_panels(const void *weight, void *packed, i64 in, i64 out, int bf, int threads) {
    pack_args a = {weight, packed, in, out, bf};
    for_each_chunk((out + PANEL - 1) / PANEL, threads, pack_panels, &a);
}
