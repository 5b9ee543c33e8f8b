/* Which experts a token goes to: scores of a router in float32, and the best of them.
 *
 * The router's weights [experts, hidden] lie in float32 panels (panels.h).
 */
#include "kernels.h"
#include "panels.h"

typedef struct {
    const void *x;
    const float *panels, *bias;
    int32_t *ids;
    float *weights, *wide, *logits;
    i64 n, hidden, experts;
    int k, sigmoid, normalize, groups, kept, best;
    float scaling;
} route_args;

static void widen_rows(void *ctx, i64 begin, i64 end) {
    const route_args *a = ctx;
    const b16 *x = a->x;
    i64 i = begin * a->hidden;
    const i64 stop = end * a->hidden;
    for (; i + VW <= stop; i += VW) v_stf(a->wide + i, v_ldb(x + i));
    for (; i < stop; ++i) a->wide[i] = widen(x[i]);
}

/* Item: up to MOST_ROWS rows times two panels, or the last one. */
static void score_rows(void *ctx, i64 begin, i64 end) {
    const route_args *a = ctx;
    const i64 K = a->hidden, panels = (a->experts + PANEL - 1) / PANEL, pairs = (panels + 1) / 2;
    const i64 blocks = (a->n + MOST_ROWS - 1) / MOST_ROWS;
    float sums[MOST_ROWS][2 * PANEL] __attribute__((aligned(64)));
    for (i64 item = begin; item < end; ++item) {
        const i64 b = item / pairs, p = item % pairs * 2;
        const i64 low = a->n * b / blocks, high = a->n * (b + 1) / blocks; /* of even height */
        const int nr = (int)(high - low), both = p + 1 < panels;
        const void *x[MOST_ROWS];
        for (int r = 0; r < nr; ++r) x[r] = a->wide + (low + r) * K;
        const void *one = panel_of(a->panels, p, K, FLOAT32), *two = both ? panel_of(a->panels, p + 1, K, FLOAT32) : one;
        if (both) two_panels(x, one, two, sums, K, nr, FLOAT32);
        else one_panel(x, one, sums, K, nr, FLOAT32);
        for (int r = 0; r < nr; ++r)
            memcpy(a->logits + (low + r) * panels * PANEL + p * PANEL, sums[r], (both ? 2 : 1) * PANEL * sizeof(float));
    }
}

/* The best of x[0:n] that is not yet `taken`, the lowest among equals; what is not a number is never better. */
INLINE i64 next_best(const float *x, const uint8_t *taken, i64 n) {
    i64 best = 0;
    while (taken[best]) ++best;
    for (i64 i = best + 1; i < n; ++i)
        if (!taken[i] && (x[i] > x[best] || (x[best] != x[best] && x[i] == x[i]))) best = i;
    return best;
}

static void route_rows(void *ctx, i64 begin, i64 end) {
    const route_args *a = ctx;
    const i64 E = a->experts, room = round_up(E, PANEL), size = E / a->groups;
    float choice[MAX_EXPERTS], worth[MAX_EXPERTS];
    uint8_t taken[MAX_EXPERTS], left_out[MAX_EXPERTS];
    for (i64 r = begin; r < end; ++r) {
        float *scores = a->logits + r * room; /* in place; those of the padding are 0 and stay finite */
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
}

/* x [n, hidden] float32 or (bf) bfloat16; panels by dpi_pack_panels; bias [experts] or NULL -> ids, weights [n, k]. `room`:
 * for n (round_up(experts, 16) + (bf: hidden)) floats. The caller has made sure that there are at most MAX_EXPERTS, that
 * `groups` divides them, that a group has `best` members, and that `kept` groups have k. */
EXPORT int dpi_route(const void *x, const float *panels, const float *bias, int32_t *ids, float *weights, float *room, i64 n,
                     i64 hidden, i64 experts, int k, int sigmoid, int normalize, int groups, int kept, int best,
                     float scaling, int bf, int threads) {
    if (experts > MAX_EXPERTS) return TOO_MANY;
    float *wide = bf ? room + n * round_up(experts, PANEL) : (float *)x; /* only read when not bf */
    route_args a = {x, panels, bias, ids, weights, wide, room, n, hidden, experts, k, sigmoid, normalize, groups, kept, best, scaling};
    const i64 pairs = (experts + 2 * PANEL - 1) / (2 * PANEL), blocks = (n + MOST_ROWS - 1) / MOST_ROWS;
    if (bf) for_each_chunk(n, n * hidden < 16384 ? 1 : threads, widen_rows, &a);
    for_each_item(blocks * pairs, n * hidden * experts < 65536 ? 1 : threads, score_rows, &a);
    for_each_chunk(n, n * experts < 8192 ? 1 : threads, route_rows, &a);
    return OK;
}
