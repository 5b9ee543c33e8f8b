/* The products of linear_dot.c by the processor's tiles (AMX), for many rows: same panels, same sums but for their order.
 *
 * A tile of weights is 32 inputs of a panel, as they lie; one of rows is 32 inputs of up to 16 rows of x, as they lie. Two
 * tiles of rows times two panels, or one times four, are summed at once. The last 16 rows may be computed with some of
 * those before them again, so that all tiles have one height.
 */
#include "kernels.h"
#include "linear.h"
#include "tiles.h"
#include "vec.h"

#ifdef __AMX_BF16__
#define HEIGHT 16     /* most rows of a tile */
#define DEEP 32       /* inputs of a tile */
#define SUMS 256      /* floats of a tile */
#define ROW_BLOCK 512 /* rows that stay in the second-level cache while the panels pass by */
#define TILE_LINES 16 /* cache lines of a tile of weights */
#define DEPTH 4096    /* most inputs of a part: storing sums between parts costs more than it saves */

/* kept[4][HEIGHT][PANEL] += rows at x[0] and x[1] times two panels, or one, over `count` tiles. */
INLINE void square(const b16 *const x[2], i64 bytes, const b16 *w, i64 stride, i64 count, float *kept, int fresh,
                   ahead *next, const int np) {
    if (fresh) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    } else {
        _tile_loadd(0, kept, 64); _tile_loadd(2, kept + 2 * SUMS, 64);
        if (np > 1) { _tile_loadd(1, kept + SUMS, 64); _tile_loadd(3, kept + 3 * SUMS, 64); }
    }
    for (i64 t = 0; t < count; ++t) {
        const i64 at = t * DEEP * PANEL;
        _tile_loadd(4, x[0] + t * DEEP, bytes);
        _tile_loadd(6, w + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x[1] + t * DEEP, bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (np > 1) {
            _tile_loadd(7, w + stride + at, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        ask_ahead(next, next->panels, next->lines);
    }
    _tile_stored(0, kept, 64); _tile_stored(2, kept + 2 * SUMS, 64);
    if (np > 1) { _tile_stored(1, kept + SUMS, 64); _tile_stored(3, kept + 3 * SUMS, 64); }
}

/* The same for one tile of rows and up to four panels: kept[4][HEIGHT][PANEL]. */
INLINE void line(const b16 *x, i64 bytes, const b16 *w, i64 stride, i64 count, float *kept, int fresh, ahead *next,
                 const int np) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    if (!fresh) {
        _tile_loadd(0, kept, 64);
        if (np > 1) _tile_loadd(1, kept + SUMS, 64);
        if (np > 2) _tile_loadd(2, kept + 2 * SUMS, 64);
        if (np > 3) _tile_loadd(3, kept + 3 * SUMS, 64);
    }
    for (i64 t = 0; t < count; ++t) {
        const i64 at = t * DEEP * PANEL;
        _tile_loadd(4, x + t * DEEP, bytes);
        _tile_loadd(5, w + at, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (np > 1) { _tile_loadd(6, w + stride + at, 64); _tile_dpbf16ps(1, 4, 6); }
        if (np > 2) { _tile_loadd(7, w + 2 * stride + at, 64); _tile_dpbf16ps(2, 4, 7); }
        if (np > 3) { _tile_loadd(5, w + 3 * stride + at, 64); _tile_dpbf16ps(3, 4, 5); }
        ask_ahead(next, next->panels, next->lines);
    }
    _tile_stored(0, kept, 64);
    if (np > 1) _tile_stored(1, kept + SUMS, 64);
    if (np > 2) _tile_stored(2, kept + 2 * SUMS, 64);
    if (np > 3) _tile_stored(3, kept + 3 * SUMS, 64);
}

/* y[row : row + rows] of np panels from their sums [panel][HEIGHT][PANEL]. */
INLINE void finish(const linear_args *a, i64 row, int rows, i64 panel, float *kept, const int np) {
    const i64 K = a->in, whole = K / DEEP * DEEP, stride = (K + 1) / 2 * PANEL * 2;
    if (whole < K)
        for (int r = 0; r < rows; ++r)
            for (int j = 0; j < np; ++j) {
                const b16 *x = a->x + (row + r) * K, *w = a->w + (panel + j) * stride;
                vf sums = v_ldf(kept + j * SUMS + r * PANEL);
                for (i64 i = whole; i < K; i += 2) sums = pair_product(sums, w + i * PANEL, x + i, K - i);
                v_stf(kept + j * SUMS + r * PANEL, sums);
            }
    for (int r = 0; r < rows; ++r) {
        vf sums[4];
        for (int j = 0; j < np; ++j) sums[j] = v_ldf(kept + j * SUMS + r * PANEL);
        put_row(a, row + r, panel, sums, np);
    }
}

static void finish_any(const linear_args *a, i64 row, int rows, i64 panel, float *kept, int np) {
    switch (np) {
    case 1: finish(a, row, rows, panel, kept, 1); break;
    case 2: finish(a, row, rows, panel, kept, 2); break;
    case 3: finish(a, row, rows, panel, kept, 3); break;
    default: finish(a, row, rows, panel, kept, 4);
    }
}

/* All rows times panels [begin, end). */
void tile_groups(const linear_args *a, i64 begin, i64 end) {
    const i64 K = a->in, stride = (K + 1) / 2 * PANEL * 2, bytes = K * 2;
    const int height = (int)min_i64(HEIGHT, a->n), single = a->n <= HEIGHT, group = single ? 4 : 2;
    const i64 tiles = K / DEEP, parts = max_i64(1, (tiles * DEEP + DEPTH - 1) / DEPTH);
    tile_shapes shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {0}};
    for (int i = 0; i < 8; ++i) shapes.rows[i] = (uint8_t)(i < 5 || (i == 5 && !single) ? height : HEIGHT);
    float kept[ROW_BLOCK / (2 * HEIGHT)][4 * SUMS] __attribute__((aligned(64)));
    MEMORY_IS_READ;
    _tile_loadconfig(&shapes);
    for (i64 r0 = 0; r0 < a->n; r0 += ROW_BLOCK) {
        const i64 rows = min_i64(ROW_BLOCK, a->n - r0), blocks = (rows + 2 * HEIGHT - 1) / (2 * HEIGHT);
        for (i64 p = begin; p < end; p += group) {
            const int np = (int)min_i64(group, end - p);
            for (i64 part = 0; part < parts; ++part) {
                const i64 from = tiles * part / parts, count = tiles * (part + 1) / parts - from;
                const b16 *w = a->w + p * stride + from * DEEP * PANEL;
                ahead next = next_panels(a->w, stride * 2, p + group, parts == 1 ? end : 0, blocks, np, TILE_LINES);
                for (i64 b = 0; b < blocks; ++b) {
                    i64 row[2];
                    const b16 *x[2];
                    for (int i = 0; i < 2; ++i) {
                        row[i] = min_i64(r0 + (2 * b + i) * HEIGHT, a->n - height);
                        x[i] = a->x + row[i] * K + from * DEEP;
                    }
                    MEMORY_IS_READ;
                    if (single) switch (np) {
                        case 1: line(x[0], bytes, w, stride, count, kept[parts > 1 ? b : 0], !part, &next, 1); break;
                        case 2: line(x[0], bytes, w, stride, count, kept[parts > 1 ? b : 0], !part, &next, 2); break;
                        case 3: line(x[0], bytes, w, stride, count, kept[parts > 1 ? b : 0], !part, &next, 3); break;
                        default: line(x[0], bytes, w, stride, count, kept[parts > 1 ? b : 0], !part, &next, 4);
                    }
                    else if (np > 1) square(x, bytes, w, stride, count, kept[parts > 1 ? b : 0], !part, &next, 2);
                    else square(x, bytes, w, stride, count, kept[parts > 1 ? b : 0], !part, &next, 1);
                    MEMORY_IS_READ;
                    if (part + 1 < parts) continue;
                    if (single) finish_any(a, 0, height, p, kept[parts > 1 ? b : 0], np);
                    else
                        for (int i = 0; i < 2 && r0 + (2 * b + i) * HEIGHT < r0 + rows; ++i)
                            finish_any(a, row[i], height, p, kept[parts > 1 ? b : 0] + 2 * i * SUMS, np);
                }
            }
        }
    }
    _tile_release();
}
#endif
