/* Causal attention of a batch of query chunks over the paged cache (layouts: rope.c).
 *
 * The query heads that share a KV head are folded into the rows: row r of a sequence is query token r / group, head
 * r % group. A tile is up to ROWS rows of one sequence and KV head; it walks the keys in chunks, softmax running. So
 * decode and prefill are one kernel, and each key and value is read once for all rows of a tile.
 *
 * Latent attention is the same with one KV head whose values are the front part of its keys. Its pages (latent.c) have the
 * form of values; each tile turns a chunk of them into the form of keys first, which costs little beside its products.
 */
#include "kernels.h"
#include "tiles.h"
#include "vec.h"
#include <stdlib.h>

#define ROWS 16
#define CHUNK 128           /* keys between two updates of the running softmax */
#define PER_PAGE (PAGE / VW) /* vectors that hold one value for each token of a page */
#define KEY_PAGES (VW == 16 ? 4 : 1)
#define DIM_VECS (VW == 16 ? 4 : 2)

/* How the dot products are made: float32 cache; bfloat16 cache widened; bfloat16 cache and queries multiplied as such, by
 * vector or by tile instructions. */
enum { FLOAT32, WIDENED, DOT, TILES };

typedef struct {
    const void *q, *k, *v;
    const int32_t *tables, *kv_lens, *cu;
    void *out;
    const i64 *first; /* [sequences + 1] index of each sequence's first tile */
    i64 table_width;
    int sequences, heads, kv_heads, dim, value_dim, window, bf;
    float scale;
} attention_args;

/* s[r][t] = q[r] . key t, for nr rows and np pages. */
INLINE void scores(const void *const *k, float *s, const void *const *q, int dim, const int nr, const int np, const int mode) {
    const int nv = np * PER_PAGE;
    vf a[4][4];
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < nv; ++j) a[r][j] = v_zero();
    if (mode == FLOAT32) {
        for (int d = 0; d < dim; ++d) {
            vf key[4];
            for (int j = 0; j < nv; ++j) key[j] = v_ldf((const float *)k[j / PER_PAGE] + d * PAGE + j % PER_PAGE * VW);
            for (int r = 0; r < nr; ++r) {
                vf x = v_set(((const float *)q[r])[d]);
                for (int j = 0; j < nv; ++j) a[r][j] = v_fma(key[j], x, a[r][j]);
            }
        }
    } else {
        for (int d = 0; d < dim / 2; ++d) {
            vi key[4];
            for (int j = 0; j < nv; ++j)
                key[j] = v_ldi((const uint32_t *)k[j / PER_PAGE] + d * PAGE + j % PER_PAGE * VW);
            for (int r = 0; r < nr; ++r) {
#if VW == 16
                if (mode == DOT) {
                    int pair;
                    memcpy(&pair, (const b16 *)q[r] + 2 * d, 4);
                    __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                    for (int j = 0; j < nv; ++j) a[r][j] = _mm512_dpbf16_ps(a[r][j], (__m512bh)key[j], x);
                    continue;
                }
#endif
                vf x = v_set(((const float *)q[r])[2 * d]), y = v_set(((const float *)q[r])[2 * d + 1]);
                for (int j = 0; j < nv; ++j) {
                    a[r][j] = v_fma(v_low(key[j]), x, a[r][j]);
                    a[r][j] = v_fma(v_high(key[j]), y, a[r][j]);
                }
            }
        }
    }
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < nv; ++j) v_stf(s + r * CHUNK + j * VW, a[r][j]);
}

/* acc[r][0 : nv * VW] += sum over t < n of p[r][t] * value t. p holds floats, or bfloat16 when mode is DOT. Values past n
 * are not looked at: they may be anything. */
INLINE void values(const void *const *v, const float *p, float *acc, i64 acc_width, int n, i64 dp, const int nr,
                   const int nv, const int mode) {
    vf a[4][4];
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < nv; ++j) a[r][j] = v_ldf(acc + r * acc_width + j * VW);
    for (int t = 0; t < n; t += (mode == FLOAT32 ? 1 : 2)) {
        const void *page = v[t / PAGE];
        const int at = t % PAGE;
        if (mode == FLOAT32) {
            vf val[4];
            for (int j = 0; j < nv; ++j) val[j] = v_ldf((const float *)page + at * dp + j * VW);
            for (int r = 0; r < nr; ++r) {
                vf x = v_set(p[r * CHUNK + t]);
                for (int j = 0; j < nv; ++j) a[r][j] = v_fma(val[j], x, a[r][j]);
            }
            continue;
        }
        vi val[4];
        for (int j = 0; j < nv; ++j) val[j] = v_ldi((const uint32_t *)page + at / 2 * dp + j * VW);
#if VW == 16
        if (mode == DOT) {
            if (t + 1 == n)
                for (int j = 0; j < nv; ++j) val[j] = _mm512_and_si512(val[j], _mm512_set1_epi32(0xffff));
            for (int r = 0; r < nr; ++r) {
                int pair;
                memcpy(&pair, (const b16 *)(p + r * CHUNK) + t, 4);
                __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                for (int j = 0; j < nv; ++j) a[r][j] = _mm512_dpbf16_ps(a[r][j], (__m512bh)val[j], x);
            }
            continue;
        }
#endif
        for (int r = 0; r < nr; ++r) {
            vf x = v_set(p[r * CHUNK + t]);
            for (int j = 0; j < nv; ++j) a[r][j] = v_fma(v_low(val[j]), x, a[r][j]);
        }
        if (t + 1 == n) break;
        for (int r = 0; r < nr; ++r) {
            vf x = v_set(p[r * CHUNK + t + 1]);
            for (int j = 0; j < nv; ++j) a[r][j] = v_fma(v_high(val[j]), x, a[r][j]);
        }
    }
    for (int r = 0; r < nr; ++r)
        for (int j = 0; j < nv; ++j) v_stf(acc + r * acc_width + j * VW, a[r][j]);
}

#ifdef __AMX_BF16__
/* Tiles 0-3 are sums [16][16] float32; 4 and 5 hold rows [16][32] and pages [16 pairs][16][2]; 6 and 7 the same, 16 deep. */
static const tile_shapes TILE_SHAPES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 32, 64}, {16, 16, 16, 16, 16, 16, 16, 8}};

/* As `scores`, for ROWS rows of q [ROWS][dim] and dim a multiple of 16. */
static __attribute__((noinline)) void scores_by_tiles(const void *const *k, float *s, const b16 *q, int dim, int pages) {
    MEMORY_IS_READ;
    for (int p = 0; p < pages; p += 4) {
        const int np = pages - p < 4 ? pages - p : 4;
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        int d = 0;
        for (; d + 32 <= dim; d += 32) {
            _tile_loadd(4, q + d, dim * 2);
#define PART(I) if (np > I) { _tile_loadd(5, (const b16 *)k[p + I] + d * PAGE, 64); _tile_dpbf16ps(I, 4, 5); }
            PART(0) PART(1) PART(2) PART(3)
#undef PART
        }
        if (d < dim) {
            _tile_loadd(6, q + d, dim * 2);
#define PART(I) if (np > I) { _tile_loadd(7, (const b16 *)k[p + I] + d * PAGE, 64); _tile_dpbf16ps(I, 6, 7); }
            PART(0) PART(1) PART(2) PART(3)
#undef PART
        }
#define PART(I) if (np > I) { _tile_stored(I, s + (p + I) * PAGE, CHUNK * 4); }
        PART(0) PART(1) PART(2) PART(3)
#undef PART
    }
    MEMORY_IS_READ;
}

/* As `values`, for ROWS rows; the last page must hold zeros past the last key. */
static __attribute__((noinline)) void values_by_tiles(const void *const *v, const float *p, float *acc, int pages, int dp) {
    MEMORY_IS_READ;
    for (int d = 0; d < dp; d += 64) {
        const int nd = dp - d < 64 ? (dp - d) / 16 : 4;
#define PART(I) if (nd > I) { _tile_loadd(I, acc + d + I * 16, dp * 4); }
        PART(0) PART(1) PART(2) PART(3)
#undef PART
        for (int i = 0; i < pages; ++i) {
            _tile_loadd(6, (const b16 *)p + i * PAGE, CHUNK * 4);
#define PART(I) if (nd > I) { _tile_loadd(7, (const b16 *)v[i] + 2 * (d + I * 16), dp * 4); _tile_dpbf16ps(I, 6, 7); }
            PART(0) PART(1) PART(2) PART(3)
#undef PART
        }
#define PART(I) if (nd > I) { _tile_stored(I, acc + d + I * 16, dp * 4); }
        PART(0) PART(1) PART(2) PART(3)
#undef PART
    }
    MEMORY_IS_READ;
}
#endif

/* Functions of sizes known at run time, which become constants in them, so that the accumulators above are registers. They
 * are not inlined: in every kind of tile, each with all sizes, they took the compiler a minute. */
#define CASE(f, r, c) case (r)*8 + (c): f(r, c); break;
#define CASES(f, r) CASE(f, r, 1) CASE(f, r, 2) CASE(f, r, 3) CASE(f, r, 4)
#define SPECIALIZE(f, r, c) switch ((r)*8 + (c)) { CASES(f, 1) CASES(f, 2) CASES(f, 3) CASES(f, 4) }
#define SCORES(NR, NP) if (NP <= KEY_PAGES) scores(k, s, q, dim, NR, NP <= KEY_PAGES ? NP : 1, mode)
#define VALUES(NR, NV) if (NV <= DIM_VECS) values(v, p, acc, acc_width, n, dp, NR, NV <= DIM_VECS ? NV : 1, mode)
#define PRODUCTS(KIND, MODE) \
    static __attribute__((noinline)) void scores_##KIND(const void *const *k, float *s, const void *const *q, int dim, \
                                                        int nr, int np) { \
        enum { mode = MODE }; \
        SPECIALIZE(SCORES, nr, np) \
    } \
    static __attribute__((noinline)) void values_##KIND(const void *const *v, const float *p, float *acc, i64 acc_width, \
                                                        int n, i64 dp, int nr, int nv) { \
        enum { mode = MODE }; \
        SPECIALIZE(VALUES, nr, nv) \
    }
PRODUCTS(float32, FLOAT32)
PRODUCTS(widened, WIDENED)
#if VW == 16
PRODUCTS(dot, DOT)
#define PRODUCT(NAME, MODE) ((MODE) == FLOAT32 ? NAME##_float32 : (MODE) == WIDENED ? NAME##_widened : NAME##_dot)
#else
#define PRODUCT(NAME, MODE) ((MODE) == FLOAT32 ? NAME##_float32 : NAME##_widened)
#endif

#if VW == 16
/* to[c][r] = row r, column c, of 8 x 8 numbers of 64 bits; only the first `columns`. */
INLINE void transpose(const vi r[8], uint64_t *const to[8], int columns) {
    vi t[8], out[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_epi64(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi64(r[i], r[i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        const vi a = _mm512_shuffle_i64x2(t[i], t[i + 2], 0x88), b = _mm512_shuffle_i64x2(t[i], t[i + 2], 0xdd);
        const vi c = _mm512_shuffle_i64x2(t[i + 4], t[i + 6], 0x88), d = _mm512_shuffle_i64x2(t[i + 4], t[i + 6], 0xdd);
        out[i] = _mm512_shuffle_i64x2(a, c, 0x88);
        out[i + 4] = _mm512_shuffle_i64x2(a, c, 0xdd);
        out[i + 2] = _mm512_shuffle_i64x2(b, d, 0x88);
        out[i + 6] = _mm512_shuffle_i64x2(b, d, 0xdd);
    }
    for (int c = 0; c < columns; ++c) _mm512_storeu_si512(to[c], out[c]);
}

/* A page in the form of values -> keys, `dim` of them. What is read beyond `dim` is the padding of a page. */
INLINE void keys_of(const void *values, void *keys, int dim, const int mode) {
    const i64 stride = round_up(dim, 16);
    for (int d = 0; d < dim; d += 16) {
        const int left = dim - d < 16 ? dim - d : 16;
        uint64_t *to[8];
        vi r[8];
        if (mode == FLOAT32) {
            /* Two tokens of one element side by side, for elements 0 1 4 5 8 9 12 13, then for the others. */
            for (int half = 0; half < 2; ++half) {
                int columns = 0;
                for (int c = 0; c < 8; ++c) {
                    const int element = c / 2 * 4 + c % 2 + 2 * half;
                    to[c] = (uint64_t *)keys + (d + element) * (PAGE / 2);
                    columns += element < left;
                }
                for (int t = 0; t < 8; ++t) {
                    const vf even = v_ldf((const float *)values + 2 * t * stride + d);
                    const vf odd = v_ldf((const float *)values + (2 * t + 1) * stride + d);
                    r[t] = _mm512_castps_si512(half ? _mm512_unpackhi_ps(even, odd) : _mm512_unpacklo_ps(even, odd));
                }
                transpose(r, to, columns);
            }
            continue;
        }
        /* Two tokens of one element, of the next -> two elements of one token, of the next: the middle words change places. */
        const vi words = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
        for (int c = 0; c < 8; ++c) to[c] = (uint64_t *)keys + (d / 2 + c) * (PAGE / 2);
        for (int t = 0; t < 8; ++t) r[t] = _mm512_shuffle_epi8(v_ldi((const uint32_t *)values + t * stride + d), words);
        transpose(r, to, left / 2);
    }
}
#else
/* A page in the form of values -> keys, `dim` of them. */
INLINE void keys_of(const void *values, void *keys, int dim, const int mode) {
    const i64 stride = round_up(dim, 16);
    if (mode == FLOAT32) {
        const float *from = values;
        float *to = keys;
        for (int d = 0; d < dim; ++d)
            for (int t = 0; t < PAGE; ++t) to[d * PAGE + t] = from[t * stride + d];
        return;
    }
    /* Two tokens of one element, of the next -> two elements of one token, of the next: the middle words change places. */
    uint64_t *to = keys;
    for (int d = 0; d < dim; d += 2)
        for (int t = 0; t < PAGE / 2; ++t) {
            uint64_t x;
            memcpy(&x, (const uint32_t *)values + t * stride + d, 8);
            to[d / 2 * (PAGE / 2) + t] = (x & 0xffff00000000ffffu) | (x & 0xffff0000u) << 16 | (x >> 16 & 0xffff0000u);
        }
}
#endif

/* `turned`: room for the keys of a chunk of latents, NULL for pages that hold keys and values. */
INLINE void tile(const attention_args *a, int seq, int kv_head, i64 row0, int rows, const int mode, float *turned) {
    const int pairs = mode == DOT || mode == TILES; /* weights are rounded to bfloat16 */
    const int D = a->dim, V = turned ? a->value_dim : D, DP = (int)round_up(V, 16), G = a->heads / a->kv_heads;
    const int stride = turned ? (int)round_up(D, 16) : DP; /* from one token's values to the next one's */
    const i64 element = mode == FLOAT32 ? 4 : 2, q_element = a->bf ? 2 : 4;
    const i64 q0 = a->cu[seq], base = a->kv_lens[seq] - (a->cu[seq + 1] - q0);
    const int32_t *table = a->tables + seq * a->table_width;
    float acc[ROWS * MAX_DIM] __attribute__((aligned(64))), s[ROWS * CHUNK] __attribute__((aligned(64)));
    float top[ROWS], sum[ROWS];
    const void *q[ROWS];
    i64 lo[ROWS] = {0}, hi[ROWS] = {0}, at[ROWS]; /* row r sees keys lo..hi, and its output starts at element at[r] */
    memset(acc, 0, (size_t)(mode == TILES ? ROWS : rows) * DP * 4);
    for (int r = 0; r < rows; ++r) {
        const i64 token = (row0 + r) / G;
        const i64 row = (q0 + token) * a->heads + kv_head * G + (row0 + r) % G;
        at[r] = row * V;
        q[r] = (const char *)a->q + row * D * q_element;
        hi[r] = max_i64(0, base + token + 1);
        lo[r] = a->window > 0 ? max_i64(0, hi[r] - a->window) : 0;
        top[r] = -INFINITY, sum[r] = 0;
    }
#ifdef __AMX_BF16__
    b16 square[ROWS * MAX_DIM] __attribute__((aligned(64))), last[PAGE * MAX_DIM] __attribute__((aligned(64)));
    if (mode == TILES) {
        for (int r = 0; r < rows; ++r) memcpy(square + r * D, q[r], (size_t)D * 2);
        memset(square + rows * D, 0, (size_t)(ROWS - rows) * D * 2);
        memset(s, 0, sizeof s);
    }
#endif
    const vf scale = v_set(a->scale);
    for (i64 c = lo[0] / PAGE * PAGE; c < hi[rows - 1]; c += CHUNK) {
        const int n = (int)min_i64(CHUNK, hi[rows - 1] - c), pages = (n + PAGE - 1) / PAGE;
        const void *k[CHUNK / PAGE], *v[CHUNK / PAGE];
        for (int p = 0; p < pages; ++p) {
            const i64 kv = (i64)table[c / PAGE + p] * a->kv_heads + kv_head;
            if (turned) {
                v[p] = (const char *)a->k + kv * PAGE * stride * element;
                k[p] = (const char *)turned + p * PAGE * (i64)D * element;
                keys_of(v[p], (void *)k[p], D, mode);
                continue;
            }
            k[p] = (const char *)a->k + kv * PAGE * D * element;
            v[p] = (const char *)a->v + kv * PAGE * DP * element;
            /* Pages lie anywhere, which defeats the processor's own guesses: ask for all of them at once. */
            if (rows <= 8) {
                for (i64 i = 0; i < PAGE * D * element; i += 64) __builtin_prefetch((const char *)k[p] + i);
                for (i64 i = 0; i < PAGE * DP * element; i += 64) __builtin_prefetch((const char *)v[p] + i, 0, 2);
            }
        }
#ifdef __AMX_BF16__
        if (mode == TILES) scores_by_tiles(k, s, square, D, pages);
#endif
        for (int p = 0; p < pages && mode != TILES; p += KEY_PAGES)
            for (int r = 0; r < rows; r += 4) {
                const int nr = rows - r < 4 ? rows - r : 4, np = pages - p < KEY_PAGES ? pages - p : KEY_PAGES;
                PRODUCT(scores, mode)(k + p, s + r * CHUNK + p * PAGE, q + r, D, nr, np);
            }
        for (int r = 0; r < rows; ++r) {
            float *x = s + r * CHUNK;
            const int from = (int)max_i64(0, lo[r] - c), to = (int)min_i64(n, hi[r] - c), wide = pages * PAGE;
            if (from >= to) {
                memset(x, 0, (size_t)wide * 4);
                continue;
            }
            for (int i = 0; i < from; ++i) x[i] = -INFINITY;
            for (int i = to; i < wide; ++i) x[i] = -INFINITY;
            vf best = v_ldf(x), total = v_zero();
            for (int i = VW; i < wide; i += VW) best = v_max(best, v_ldf(x + i));
            float high = v_hmax(best) * a->scale;
            if (high < top[r]) high = top[r];
            for (int i = 0; i < wide; i += VW) {
                vf e = v_exp(v_fma(v_ldf(x + i), scale, v_set(-high)));
                total = v_add(total, e);
                /* In place: element i of the bfloat16 row lies before element i of the floats still to be read. */
                if (pairs) v_stb((b16 *)x + i, e);
                else v_stf(x + i, e);
            }
            if (pairs) {
                for (int i = 0; i < from; ++i) ((b16 *)x)[i] = 0;
                for (int i = to; i < wide; ++i) ((b16 *)x)[i] = 0;
            } else {
                for (int i = 0; i < from; ++i) x[i] = 0;
                for (int i = to; i < wide; ++i) x[i] = 0;
            }
            if (high != top[r]) {
                const float f = expf(top[r] - high);
                sum[r] *= f;
                for (int i = 0; i < DP; i += VW) v_stf(acc + r * DP + i, v_mul(v_ldf(acc + r * DP + i), v_set(f)));
                top[r] = high;
            }
            sum[r] += v_sum(total);
        }
#ifdef __AMX_BF16__
        if (mode == TILES) {
            const int past = n % PAGE; /* keys of a last page that is not full; the rest of it may be anything */
            if (past) {
                const b16 *from = v[pages - 1];
                memset(last, 0, (size_t)PAGE * DP * 2);
                memcpy(last, from, (size_t)(past / 2 * DP) * 4);
                for (int i = 0; past % 2 && i < DP; ++i) last[past / 2 * DP * 2 + 2 * i] = from[past / 2 * DP * 2 + 2 * i];
                v[pages - 1] = last;
            }
            values_by_tiles(v, s, acc, pages, DP);
        }
#endif
        for (int r = 0; r < rows && mode != TILES; r += 4)
            for (int d = 0; d < DP; d += DIM_VECS * VW) {
                const int nr = rows - r < 4 ? rows - r : 4;
                const int nv = (DP - d) / VW < DIM_VECS ? (DP - d) / VW : DIM_VECS;
                const i64 skip = d * element * (mode == FLOAT32 ? 1 : 2);
                const void *w[CHUNK / PAGE];
                for (int p = 0; p < pages; ++p) w[p] = (const char *)v[p] + skip;
                PRODUCT(values, mode)(w, s + r * CHUNK, acc + r * DP + d, DP, n, stride, nr, nv);
            }
    }
    for (int r = 0; r < rows; ++r) {
        const vf by = v_set(sum[r] == 0 ? 0.f : 1.f / sum[r]); /* no keys at all: a padding row, zero */
        for (int i = 0; i < V; i += VW) {
            vf x = v_mul(v_ldf(acc + r * DP + i), by);
            if (V - i >= VW) v_store(a->out, at[r] + i, x, a->bf);
            else v_storen(a->out, at[r] + i, x, V - i, a->bf);
        }
    }
}

INLINE void tiles(const attention_args *a, i64 begin, i64 end, const int mode, float *turned) {
    for (i64 item = begin; item < end; ++item) {
        int low = 0, high = a->sequences; /* the sequence with first[seq] <= item < first[seq + 1] */
        while (high - low > 1) {
            int mid = (low + high) / 2;
            if (a->first[mid] <= item) low = mid;
            else high = mid;
        }
        const i64 rows = (i64)(a->cu[low + 1] - a->cu[low]) * (a->heads / a->kv_heads), per_head = (rows + ROWS - 1) / ROWS;
        const i64 i = item - a->first[low], row0 = (per_head - 1 - i % per_head) * ROWS; /* longest rows first */
        tile(a, low, (int)(i / per_head), row0, (int)min_i64(ROWS, rows - row0), mode, turned);
    }
}
#define LATENT(NAME, MODE) \
    static void NAME(void *a, i64 b, i64 e) { \
        float turned[CHUNK * (MAX_DIM + MAX_TURNED)] __attribute__((aligned(64))); \
        tiles(a, b, e, MODE, turned); \
    }
static void tiles_float32(void *a, i64 b, i64 e) { tiles(a, b, e, FLOAT32, NULL); }
static void tiles_widened(void *a, i64 b, i64 e) { tiles(a, b, e, WIDENED, NULL); }
LATENT(latent_float32, FLOAT32)
LATENT(latent_widened, WIDENED)
#if VW == 16
static void tiles_dot(void *a, i64 b, i64 e) { tiles(a, b, e, DOT, NULL); }
LATENT(latent_dot, DOT)
#endif
#ifdef __AMX_BF16__
static void tiles_amx(void *a, i64 b, i64 e) {
    _tile_loadconfig(&TILE_SHAPES);
    tiles(a, b, e, TILES, NULL);
    _tile_release();
}
#endif

static int attend(const void *q, const void *k, const void *v, const int32_t *tables, const int32_t *kv_lens,
                  const int32_t *cu, void *out, i64 n, i64 table_width, i64 blocks, int sequences, int heads,
                  int kv_heads, int dim, int value_dim, int window, float scale, int bf, int cache_bf, int threads,
                  int latent) {
    i64 few[129], *first = sequences <= 128 ? few : malloc((size_t)(sequences + 1) * sizeof(i64));
    if (!first) return NO_MEMORY;
    int status = OK;
    i64 items = 0, keys = 0;
    if (cu[0] != 0 || cu[sequences] != n) status = BAD_LENGTH;
    for (int i = 0; i < sequences && !status; ++i) {
        const i64 m = (i64)cu[i + 1] - cu[i], used = ((i64)kv_lens[i] + PAGE - 1) / PAGE;
        if (m < 0 || kv_lens[i] < 0 || used > table_width) status = BAD_LENGTH;
        for (i64 p = 0; p < used && !status; ++p) {
            const int32_t page = tables[i * table_width + p];
            if (page < 0 || page >= blocks) status = BAD_PAGE;
        }
        first[i] = items;
        items += (m * (heads / kv_heads) + ROWS - 1) / ROWS * kv_heads;
        keys += m * kv_lens[i];
    }
    if (!status) {
        first[sequences] = items;
        attention_args a = {q, k, v, tables, kv_lens, cu, out, first, table_width, sequences, heads, kv_heads, dim, value_dim, window,
                            bf, scale};
        body_fn body = cache_bf ? tiles_widened : tiles_float32;
        if (latent) body = cache_bf ? latent_widened : latent_float32;
#if VW == 16
        if (bf) body = latent ? latent_dot : tiles_dot;
#endif
#ifdef __AMX_BF16__
        /* A tile costs the same however few of its rows are used. */
        if (bf && !latent && dim % 16 == 0 && n * (heads / kv_heads) >= 8 * (i64)sequences) body = tiles_amx;
#endif
        for_each_item(items, keys * heads * dim < 32768 ? 1 : threads, body, &a);
    }
    if (first != few) free(first);
    return status;
}

/* q, out [n, heads dim]; tables [sequences, table_width]; kv_lens [sequences]; cu [sequences + 1], cu[0] = 0, ending at n.
 * Query j of a sequence with m queries sees the keys before kv_len - m + j + 1, with window > 0 only the last `window`
 * of them. bf: q and out are bfloat16 (then the cache is, too). */
EXPORT int dpi_attention(const void *q, const void *k, const void *v, const int32_t *tables, const int32_t *kv_lens,
                         const int32_t *cu, void *out, i64 n, i64 table_width, i64 blocks, int sequences, int heads,
                         int kv_heads, int dim, int window, float scale, int bf, int cache_bf, int threads) {
    return attend(q, k, v, tables, kv_lens, cu, out, n, table_width, blocks, sequences, heads, kv_heads, dim, dim, window,
                  scale, bf, cache_bf, threads, 0);
}

/* As above over pages of latents: q [n, heads (rank + turned)], out [n, heads rank], all heads share one key. */
EXPORT int dpi_latent_attention(const void *q, const void *latents, const int32_t *tables, const int32_t *kv_lens,
                                const int32_t *cu, void *out, i64 n, i64 table_width, i64 blocks, int sequences,
                                int heads, int rank, int turned, float scale, int bf, int cache_bf, int threads) {
    return attend(q, latents, NULL, tables, kv_lens, cu, out, n, table_width, blocks, sequences, heads, 1, rank + turned,
                  rank, 0, scale, bf, cache_bf, threads, 1);
}
