/* What sampling needs of whole rows of logits: the best token, log of the sum of exponentials, the k best tokens. */
#include "vec.h"
#include <stdlib.h>

typedef struct {
    const void *x;
    i64 width, k;
    i64 *ids;
    float *values;
    int failed;
} vocab_args;

#define BOTH(name, args) \
    static void name##_f(void *a, i64 b, i64 e) { name((args *)a, b, e, 0); } \
    static void name##_b(void *a, i64 b, i64 e) { name((args *)a, b, e, 1); }

INLINE float element(const void *x, i64 i, const int bf) { return bf ? widen(((const b16 *)x)[i]) : ((const float *)x)[i]; }

/* Largest value of a row; NaN if there is one. */
INLINE float row_max(const void *x, i64 o, i64 V, const int bf) {
    const i64 full = V / VW * VW;
    vf m0 = v_set(-INFINITY), m1 = m0;
    unsigned bad = 0;
    i64 i = 0;
    for (; i + 2 * VW <= full; i += 2 * VW) {
        vf a = v_load(x, o + i, bf), b = v_load(x, o + i + VW, bf);
        bad |= v_nan(a) | v_nan(b);
        m0 = v_max(m0, a), m1 = v_max(m1, b);
    }
    for (; i < full; i += VW) {
        vf a = v_load(x, o + i, bf);
        bad |= v_nan(a);
        m0 = v_max(m0, a);
    }
    float best = v_hmax(v_max(m0, m1));
    for (; i < V; ++i) {
        float a = element(x, o + i, bf);
        bad |= a != a;
        if (a > best) best = a;
    }
    return bad ? NAN : best;
}

/* Index of the first element of the row's part that is `best`, or NaN where that is NaN; it is there. */
INLINE i64 place_of(const void *x, i64 o, i64 V, float best, const int bf) {
    const i64 full = V / VW * VW;
    for (i64 i = 0; i < full; i += VW) {
        vf v = v_load(x, o + i, bf);
        unsigned hit = best != best ? v_nan(v) : v_equal(v, best);
        if (hit) return i + __builtin_ctz(hit);
    }
    for (i64 i = full; i < V; ++i) {
        float v = element(x, o + i, bf);
        if (v == best || (v != v && best != best)) return i;
    }
    return -1;
}

/* A row is read once, part by part; the best one's part, which is in the first-level cache or nearly so, once more. */
enum { PART = 4096 };

INLINE void argmax(const vocab_args *a, i64 begin, i64 end, const int bf) {
    for (i64 r = begin; r < end; ++r) {
        const i64 o = r * a->width, V = a->width;
        float best = -INFINITY;
        i64 part = 0;
        for (i64 i = 0; i < V && best == best; i += PART) {
            const float m = row_max(a->x, o + i, min_i64(PART, V - i), bf);
            if (m > best || m != m) best = m, part = i;
        }
        a->ids[r] = part + place_of(a->x, o + part, min_i64(PART, V - part), best, bf);
        a->values[r] = best;
    }
}
BOTH(argmax, vocab_args)

INLINE void logsumexp(const vocab_args *a, i64 begin, i64 end, const int bf) {
    for (i64 r = begin; r < end; ++r) {
        const i64 o = r * a->width, V = a->width, full = V / VW * VW;
        const float best = row_max(a->x, o, V, bf);
        if (best != best || isinf(best)) {
            a->values[r] = best;
            continue;
        }
        double total = 0;
        i64 i = 0;
        while (i < full) { /* short float sums, so that a long row loses no digits */
            vf sum = v_zero();
            for (i64 stop = min_i64(full, i + 1024); i < stop; i += VW)
                sum = v_add(sum, v_exp(v_sub(v_load(a->x, o + i, bf), v_set(best))));
            total += v_sum(sum);
        }
        for (; i < V; ++i) total += exp(element(a->x, o + i, bf) - best);
        a->values[r] = (float)(best + log(total));
    }
}
BOTH(logsumexp, vocab_args)

/* A key whose order is that of the value (NaN on top), then that of the lower index. */
INLINE uint64_t key_of(float v, i64 i) {
    uint32_t u;
    if (v != v) u = 0xffffffffu;
    else {
        v += 0.f; /* -0 and 0 are equal */
        memcpy(&u, &v, 4);
        u = u & 0x80000000u ? ~u : u | 0x80000000u;
    }
    return (uint64_t)u << 32 | (uint32_t)~(uint32_t)i;
}

static int descending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Reorder so that the k largest of n stand first. The pivot is the median of three; keys are distinct. */
static void select_best(uint64_t *x, i64 n, i64 k) {
    i64 low = 0, high = n - 1;
    while (low < high) {
        uint64_t a = x[low], b = x[(low + high) / 2], c = x[high];
        uint64_t pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        i64 i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) ++i;
            while (x[j] < pivot) --j;
            if (i <= j) {
                uint64_t t = x[i];
                x[i++] = x[j];
                x[j--] = t;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return;
    }
}

/* Candidates above the bar are collected; when the buffer is full, the best k stay and raise the bar. */
INLINE void topk(vocab_args *a, i64 begin, i64 end, const int bf) {
    const i64 V = a->width, k = a->k, full = V / VW * VW, room = 2 * k + 256;
    uint64_t *c = malloc((size_t)(room + VW) * sizeof(uint64_t));
    if (!c) {
        a->failed = 1;
        return;
    }
    for (i64 r = begin; r < end; ++r) {
        const i64 o = r * V;
        i64 count = 0;
        float bar = -INFINITY;
        int open = 1; /* fewer than k seen: everything is a candidate, also -inf */
        for (i64 i = 0; i < V; i += VW) {
            unsigned hits;
            if (i < full) hits = open ? (1u << VW) - 1 : v_above(v_load(a->x, o + i, bf), bar);
            else hits = (1u << (V - i)) - 1;
            while (hits) {
                const i64 at = i + __builtin_ctz(hits);
                hits &= hits - 1;
                c[count++] = key_of(element(a->x, o + at, bf), at);
            }
            if (count >= room || (open && count >= k + 64)) {
                select_best(c, count, k);
                count = k;
                open = 0;
                /* c[k - 1] need not be the least of the best; look for it. */
                uint64_t least = c[0];
                for (i64 j = 1; j < k; ++j) least = c[j] < least ? c[j] : least;
                bar = element(a->x, o + (uint32_t)~(uint32_t)least, bf);
                if (bar != bar) bar = INFINITY; /* the best k are all NaN: another NaN would not be better */
            }
        }
        select_best(c, count, k);
        qsort(c, (size_t)k, sizeof(uint64_t), descending);
        for (i64 j = 0; j < k; ++j) {
            const i64 at = (uint32_t)~(uint32_t)c[j];
            a->ids[r * k + j] = at;
            a->values[r * k + j] = element(a->x, o + at, bf);
        }
    }
    free(c);
}
BOTH(topk, vocab_args)

/* x [n, width] -> ids [n]: index of the largest, the lowest among equals; a NaN counts as the largest. values [n]: it. */
EXPORT void dpi_argmax(const void *x, i64 *ids, float *values, i64 n, i64 width, int bf, int threads) {
    vocab_args a = {x, width, 0, ids, values, 0};
    for_each_chunk(n, threads, bf ? argmax_b : argmax_f, &a);
}

/* x [n, width] -> values [n] = log(sum(exp(row))). */
EXPORT void dpi_logsumexp(const void *x, float *values, i64 n, i64 width, int bf, int threads) {
    vocab_args a = {x, width, 0, 0, values, 0};
    for_each_chunk(n, threads, bf ? logsumexp_b : logsumexp_f, &a);
}

/* x [n, width] -> values, ids [n, k], largest first, lower index first among equals, NaN before everything. */
EXPORT int dpi_topk(const void *x, float *values, i64 *ids, i64 n, i64 width, i64 k, int bf, int threads) {
    vocab_args a = {x, width, k, ids, values, 0};
    for_each_chunk(n, threads, bf ? topk_b : topk_f, &a);
    return a.failed ? NO_MEMORY : OK;
}
