/* Routed experts: which ones a token goes to, and what they make of it.
 *
 * Weights [out, in] lie in panels of 16 outputs, zero-padded: float32 [out / 16][in][16], bfloat16 [out / 16][in / 2][16][2]
 * (as in linear.c). Gate and up of an expert follow each other, each with panels of its own.
 *
 * (token, choice) pairs are sorted by expert. First each expert's panels of gate and up meet its tokens, then each group of
 * output columns is summed over all experts by one thread, in order of experts: no sum depends on the number of threads.
 */
#include "vec.h"
#include <stdlib.h>

#define PANEL 16
#define PARTS (PANEL / VW)
#define TOGETHER (VW == 16 ? 2 : 1) /* panels whose sums fit in registers beside each other */
#define MOST_ROWS 6
#define GROUP 4 /* panels that stay in the second-level cache while rows pass by */
#define AHEAD 2048 /* bytes of weights asked for in advance */

/* How products are made: float32 weights; bfloat16 weights widened; bfloat16 weights and rows multiplied as such. */
enum { FLOAT32, WIDENED, DOT };

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

/* sums[r][0 : 16 np] = row r times np panels, for nr rows of K elements. Odd K: the panels are padded, rows are not. */
INLINE void product(const void *const *x, const void *const *w, float (*sums)[2 * PANEL], i64 K, const int nr, const int np,
                    const int split, const int mode) {
    vf acc[MOST_ROWS][TOGETHER * PARTS][4];
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < np * PARTS; ++j)
            for (int u = 0; u < split; ++u) acc[r][j][u] = v_zero();
    if (mode == FLOAT32) {
        i64 i = 0;
        for (; i + split <= K; i += split)
            for (int u = 0; u < split; ++u) {
                vf col[TOGETHER * PARTS];
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
        for (; i + split <= whole; i += split)
            for (int u = 0; u < split; ++u) {
                vi col[TOGETHER * PARTS];
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
            for (int u = 1; u < split; ++u) sum = v_add(sum, acc[r][j][u]);
            v_stf(sums[r] + j * VW, sum);
        }
}

/* Two panels, however many fit at once; few rows get more sums each, which hides the latency of the multiply-adds. */
INLINE void two_panels(const void *const *x, const void *first, const void *second, float (*sums)[2 * PANEL], i64 K, int nr,
                       const int mode) {
    const void *w[2] = {first, second};
#define ROWS_OF(NR, SPLIT) case NR: \
        if (TOGETHER == 2) product(x, w, sums, K, NR, TOGETHER, SPLIT, mode); \
        else { \
            product(x, w, sums, K, NR, 1, SPLIT, mode); \
            product(x, w + 1, (float (*)[2 * PANEL])(sums[0] + PANEL), K, NR, 1, SPLIT, mode); \
        } \
        break;
    switch (nr) {
    ROWS_OF(1, 4)
    ROWS_OF(2, 2)
    ROWS_OF(3, 1)
    ROWS_OF(4, 1)
    ROWS_OF(5, 1)
    ROWS_OF(6, 1)
    }
#undef ROWS_OF
}

INLINE const void *panel_of(const void *weights, i64 panel, i64 K, const int mode) {
    return mode == FLOAT32 ? (const void *)((const float *)weights + panel * K * PANEL)
                           : (const void *)((const b16 *)weights + panel * round_up(K, 2) * PANEL);
}

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

typedef struct {
    const float *logits, *bias;
    int32_t *ids;
    float *weights;
    i64 experts;
    int k, sigmoid, normalize, groups, kept, best, failed;
    float scaling;
} route_args;

/* The best of x[0:n] that is not yet `taken`, the lowest among equals; what is not a number is never better. */
INLINE i64 next_best(const float *x, const uint8_t *taken, i64 n) {
    i64 best = 0;
    while (taken[best]) ++best;
    for (i64 i = best + 1; i < n; ++i)
        if (!taken[i] && (x[i] > x[best] || (x[best] != x[best] && x[i] == x[i]))) best = i;
    return best;
}

static void route_rows(void *ctx, i64 begin, i64 end) {
    route_args *a = ctx;
    const i64 E = a->experts, room = round_up(E, VW), size = E / a->groups;
    float *scores = malloc((size_t)(2 * room + a->groups) * sizeof(float) + (size_t)(E + a->groups));
    if (!scores) {
        a->failed = 1;
        return;
    }
    float *choice = scores + room, *worth = choice + room;
    uint8_t *taken = (uint8_t *)(worth + a->groups), *left_out = taken + E;
    for (i64 r = begin; r < end; ++r) {
        memcpy(scores, a->logits + r * E, (size_t)E * 4);
        for (i64 i = E; i < room; ++i) scores[i] = 0;
        if (a->sigmoid) {
            for (i64 i = 0; i < room; i += VW)
                v_stf(scores + i, v_div(v_set(1.f), v_add(v_set(1.f), v_exp(v_sub(v_zero(), v_ldf(scores + i))))));
        } else {
            float top = scores[0], sum = 0;
            for (i64 i = 1; i < E; ++i) top = scores[i] > top ? scores[i] : top;
            for (i64 i = 0; i < room; i += VW) v_stf(scores + i, v_exp(v_sub(v_ldf(scores + i), v_set(top))));
            for (i64 i = 0; i < E; ++i) sum += scores[i];
            for (i64 i = 0; i < E; ++i) scores[i] /= sum;
        }
        for (i64 i = 0; i < E; ++i) choice[i] = a->bias ? scores[i] + a->bias[i] : scores[i];
        memset(taken, 0, (size_t)E);
        if (a->groups > 1) {
            for (int g = 0; g < a->groups; ++g) { /* members are taken for a while, to find the best of each group */
                worth[g] = 0;
                for (int b = 0; b < a->best; ++b) {
                    const i64 at = next_best(choice + g * size, taken + g * size, size);
                    worth[g] += choice[g * size + at];
                    taken[g * size + at] = 1;
                }
            }
            memset(left_out, 0, (size_t)a->groups);
            memset(taken, 1, (size_t)E);
            for (int i = 0; i < a->kept; ++i) {
                const i64 g = next_best(worth, left_out, a->groups);
                left_out[g] = 1;
                memset(taken + g * size, 0, (size_t)size);
            }
        }
        float sum = 0;
        for (int j = 0; j < a->k; ++j) {
            const i64 at = next_best(choice, taken, E);
            taken[at] = 1;
            a->ids[r * a->k + j] = (int32_t)at;
            a->weights[r * a->k + j] = scores[at];
            sum += scores[at];
        }
        const float by = a->normalize ? a->scaling / (sum + 1e-20f) : a->scaling;
        for (int j = 0; j < a->k; ++j) a->weights[r * a->k + j] *= by;
    }
    free(scores);
}

/* logits [n, experts]; bias [experts] or NULL -> ids, weights [n, k]. The caller has made sure that `groups` divides
 * `experts`, that a group has `best` members, and that `kept` groups have k. */
EXPORT int dpi_route(const float *logits, const float *bias, int32_t *ids, float *weights, i64 n, i64 experts, int k,
                     int sigmoid, int normalize, int groups, int kept, int best, float scaling, int threads) {
    route_args a = {logits, bias, ids, weights, experts, k, sigmoid, normalize, groups, kept, best, 0, scaling};
    for_each_chunk(n, n * experts < 8192 ? 1 : threads, route_rows, &a);
    return a.failed ? NO_MEMORY : OK;
}
