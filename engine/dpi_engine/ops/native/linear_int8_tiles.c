/* The products of linear_int8.c by the processor's tiles (AMX): same panels, same rows, the same sums exactly.
 *
 * Tiles and the passing of rows are as in linear_tiles.c, with 64 inputs to a tile.
 */
#include "ahead.h"
#include "int8.h"
#include "kernels.h"
#include "tiles.h"
#include "vec.h"

#ifdef __AMX_INT8__
#define HEIGHT 16
#define SLOT (PANELS * PANEL) /* sums of a row: of PANELS panels, used or not */
#define TILE (16 * PANEL * 4) /* bytes of a tile of weights */
#define TILE_LINES 16

/* kept[2][HEIGHT][SLOT] += rows at x[0] and x[1] times two panels, or one. */
INLINE void square(const int8_t *const x[2], i64 ldx, const uint8_t *w, i64 stride, i64 count, int32_t *kept, ahead *next,
                   const int np) {
    const i64 bytes = SLOT * 4;
    int32_t *second = kept + HEIGHT * SLOT;
    _tile_loadd(0, kept, bytes); _tile_loadd(2, second, bytes);
    if (np > 1) { _tile_loadd(1, kept + PANEL, bytes); _tile_loadd(3, second + PANEL, bytes); }
    for (i64 t = 0; t < count; ++t) {
        _tile_loadd(4, x[0] + t * INT8_TILE_DEEP, ldx);
        _tile_loadd(6, w + t * TILE, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(5, x[1] + t * INT8_TILE_DEEP, ldx);
        _tile_dpbsud(2, 5, 6);
        if (np > 1) {
            _tile_loadd(7, w + stride + t * TILE, 64);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(3, 5, 7);
        }
        ask_ahead(next, next->panels, next->lines);
    }
    _tile_stored(0, kept, bytes); _tile_stored(2, second, bytes);
    if (np > 1) { _tile_stored(1, kept + PANEL, bytes); _tile_stored(3, second + PANEL, bytes); }
}

/* The same for one tile of rows and up to PANELS panels: kept[HEIGHT][SLOT]. */
INLINE void line(const int8_t *x, i64 ldx, const uint8_t *w, i64 stride, i64 count, int32_t *kept, ahead *next, const int np) {
    const i64 bytes = SLOT * 4;
    _tile_loadd(0, kept, bytes);
    if (np > 1) _tile_loadd(1, kept + PANEL, bytes);
    if (np > 2) _tile_loadd(2, kept + 2 * PANEL, bytes);
    if (np > 3) _tile_loadd(3, kept + 3 * PANEL, bytes);
    for (i64 t = 0; t < count; ++t) {
        const uint8_t *at = w + t * TILE;
        _tile_loadd(4, x + t * INT8_TILE_DEEP, ldx);
        _tile_loadd(5, at, 64);
        _tile_dpbsud(0, 4, 5);
        if (np > 1) { _tile_loadd(6, at + stride, 64); _tile_dpbsud(1, 4, 6); }
        if (np > 2) { _tile_loadd(7, at + 2 * stride, 64); _tile_dpbsud(2, 4, 7); }
        if (np > 3) { _tile_loadd(5, at + 3 * stride, 64); _tile_dpbsud(3, 4, 5); }
        ask_ahead(next, next->panels, next->lines);
    }
    _tile_stored(0, kept, bytes);
    if (np > 1) _tile_stored(1, kept + PANEL, bytes);
    if (np > 2) _tile_stored(2, kept + 2 * PANEL, bytes);
    if (np > 3) _tile_stored(3, kept + 3 * PANEL, bytes);
}

/* Sums of `rows` rows from `row` on begin at what the rows' forms say. */
INLINE void begin_sums(const int8_args *a, i64 row, int rows, int32_t *kept, int np) {
    for (int r = 0; r < rows; ++r)
        for (int j = 0; j < np; ++j)
            _mm512_storeu_si512(kept + r * SLOT + j * PANEL, _mm512_set1_epi32(a->form[row + r].start));
}

void int8_tile_groups(const int8_args *a, i64 begin, i64 end) {
    const i64 stride = round_up(a->in, DEEP) * PANEL, count = a->in / INT8_TILE_DEEP;
    const int height = (int)min_i64(HEIGHT, a->n), single = a->n <= HEIGHT, group = single ? PANELS : 2;
    const i64 blocks = single ? 1 : (a->n + 2 * HEIGHT - 1) / (2 * HEIGHT);
    tile_shapes shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {0}};
    for (int i = 0; i < 8; ++i) shapes.rows[i] = (uint8_t)(i < 5 || (i == 5 && !single) ? height : HEIGHT);
    int32_t kept[2 * HEIGHT * SLOT] __attribute__((aligned(64)));
    MEMORY_IS_READ;
    _tile_loadconfig(&shapes);
    for (i64 p = begin; p < end; p += group) {
        const int np = (int)min_i64(group, end - p);
        const uint8_t *w = a->w + p * stride;
        ahead next = next_panels(a->w, stride, p + group, end, blocks, np, TILE_LINES);
        for (i64 b = 0; b < blocks; ++b) {
            i64 row[2];
            const int8_t *x[2];
            for (int i = 0; i < 2; ++i) {
                row[i] = min_i64((2 * b + i) * HEIGHT, a->n - height);
                x[i] = a->x + row[i] * a->ldx;
                if (i == 0 || !single) begin_sums(a, row[i], height, kept + i * HEIGHT * SLOT, np);
            }
            MEMORY_IS_READ;
            if (single) switch (np) {
                case 1: line(x[0], a->ldx, w, stride, count, kept, &next, 1); break;
                case 2: line(x[0], a->ldx, w, stride, count, kept, &next, 2); break;
                case 3: line(x[0], a->ldx, w, stride, count, kept, &next, 3); break;
                default: line(x[0], a->ldx, w, stride, count, kept, &next, 4);
            }
            else if (np > 1) square(x, a->ldx, w, stride, count, kept, &next, 2);
            else square(x, a->ldx, w, stride, count, kept, &next, 1);
            MEMORY_IS_READ;
            finish(a, row[0], p, kept, height, np);
            if (!single && (2 * b + 1) * HEIGHT < a->n) finish(a, row[1], p, kept + HEIGHT * SLOT, height, np);
        }
    }
    _tile_release();
}
#endif
