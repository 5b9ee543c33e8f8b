/* The processor's tiles (AMX): how their shapes are told, and rows times panels of weights by them.
 *
 * A tile of weights is 1 KiB of a panel, as it lies; one of rows is 64 bytes of up to 16 rows, as they lie. Two tiles of
 * rows times two panels, or one times four, are summed at once. The last 16 rows may be computed with some of those before
 * them again, so that all tiles have one height. All rows pass by a group of panels while that is in the second-level cache:
 * tiles are loaded as fast as that gives them, and sums that were put away between two parts of the depth would cost more
 * than parts in the first-level cache save.
 */
#ifndef DPI_TILES_H
#define DPI_TILES_H
#ifdef __AMX_BF16__
#include "ahead.h"
#include <immintrin.h>
#include <stddef.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes __attribute__((aligned(64)));

/* The compiler does not know that tile loads read memory. */
#define MEMORY_IS_READ __asm__ volatile("" ::: "memory")

#define TILE_ROWS 16
#define TILE_DEPTH 64     /* bytes of a row */
#define TILE_BYTES 1024   /* of weights */
#define TILE_LINES 16     /* cache lines of them */
#define TILE_PANELS 4     /* most panels at once */
#define SUMS 16           /* of a row and a panel: float or int32_t */
#define SLOT (TILE_PANELS * SUMS) /* sums of a row, used or not */
#define ROW_BLOCK 512     /* rows that stay in the second-level cache while the panels pass by */

/* What is multiplied: sums of bfloat16 are floats from zero, those of int8_t times uint8_t begin at what is there. */
enum { BFLOATS, INTEGERS };

#define MULTIPLY(C, A, B) do { if (kind == INTEGERS) _tile_dpbsud(C, A, B); else _tile_dpbf16ps(C, A, B); } while (0)
#define BEGIN(C, AT) do { if (kind == INTEGERS) _tile_loadd(C, AT, SLOT * 4); else _tile_zero(C); } while (0)

/* Rows [n] of `row_bytes` bytes; panels of `panel_bytes`; `count` tiles deep. `begin` and `finish` are called for `rows` rows
 * from `row` on and np panels from `panel` on, with their sums [rows][SLOT]. */
typedef struct {
    const void *rows, *weights;
    i64 n, row_bytes, panel_bytes, count;
    const void *args;
    void (*begin)(const void *args, i64 row, int rows, int32_t *sums, int np);
    void (*finish)(const void *args, i64 row, int rows, i64 panel, int32_t *sums, int np);
} tile_work;

/* sums[2][TILE_ROWS][SLOT] = rows at x[0] and x[1] times two panels, or one. */
INLINE void square(const tile_work *t, const char *const x[2], const char *w, int32_t *sums, ahead *next, const int np,
                   const int kind) {
    int32_t *second = sums + TILE_ROWS * SLOT;
    BEGIN(0, sums); BEGIN(2, second);
    if (np > 1) { BEGIN(1, sums + SUMS); BEGIN(3, second + SUMS); }
    for (i64 i = 0; i < t->count; ++i) {
        const char *at = w + i * TILE_BYTES;
        _tile_loadd(4, x[0] + i * TILE_DEPTH, t->row_bytes);
        _tile_loadd(6, at, 64);
        MULTIPLY(0, 4, 6);
        _tile_loadd(5, x[1] + i * TILE_DEPTH, t->row_bytes);
        MULTIPLY(2, 5, 6);
        if (np > 1) {
            _tile_loadd(7, at + t->panel_bytes, 64);
            MULTIPLY(1, 4, 7);
            MULTIPLY(3, 5, 7);
        }
        ask_ahead(next);
    }
    _tile_stored(0, sums, SLOT * 4); _tile_stored(2, second, SLOT * 4);
    if (np > 1) { _tile_stored(1, sums + SUMS, SLOT * 4); _tile_stored(3, second + SUMS, SLOT * 4); }
}

/* sums[TILE_ROWS][SLOT] = rows at x times up to TILE_PANELS panels. */
INLINE void line(const tile_work *t, const char *x, const char *w, int32_t *sums, ahead *next, const int np, const int kind) {
    BEGIN(0, sums);
    if (np > 1) BEGIN(1, sums + SUMS);
    if (np > 2) BEGIN(2, sums + 2 * SUMS);
    if (np > 3) BEGIN(3, sums + 3 * SUMS);
    for (i64 i = 0; i < t->count; ++i) {
        const char *at = w + i * TILE_BYTES;
        _tile_loadd(4, x + i * TILE_DEPTH, t->row_bytes);
        _tile_loadd(5, at, 64);
        MULTIPLY(0, 4, 5);
        if (np > 1) { _tile_loadd(6, at + t->panel_bytes, 64); MULTIPLY(1, 4, 6); }
        if (np > 2) { _tile_loadd(7, at + 2 * t->panel_bytes, 64); MULTIPLY(2, 4, 7); }
        if (np > 3) { _tile_loadd(5, at + 3 * t->panel_bytes, 64); MULTIPLY(3, 4, 5); }
        ask_ahead(next);
    }
    _tile_stored(0, sums, SLOT * 4);
    if (np > 1) _tile_stored(1, sums + SUMS, SLOT * 4);
    if (np > 2) _tile_stored(2, sums + 2 * SUMS, SLOT * 4);
    if (np > 3) _tile_stored(3, sums + 3 * SUMS, SLOT * 4);
}

/* All rows times panels [begin, end). */
INLINE void tile_groups(const tile_work *t, i64 begin, i64 end, const int kind) {
    const int height = (int)min_i64(TILE_ROWS, t->n), single = t->n <= TILE_ROWS, group = single ? TILE_PANELS : 2;
    tile_shapes shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {0}};
    for (int i = 0; i < 8; ++i) shapes.rows[i] = (uint8_t)(i < 5 || (i == 5 && !single) ? height : TILE_ROWS);
    int32_t sums[2 * TILE_ROWS * SLOT] __attribute__((aligned(64)));
    MEMORY_IS_READ;
    _tile_loadconfig(&shapes);
    for (i64 r0 = 0; r0 < t->n; r0 += ROW_BLOCK) {
        const i64 rows = min_i64(ROW_BLOCK, t->n - r0), blocks = (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
        for (i64 p = begin; p < end; p += group) {
            const int np = (int)min_i64(group, end - p);
            const char *w = (const char *)t->weights + p * t->panel_bytes;
            ahead next = next_panels(t->weights, t->panel_bytes, p + group, end, blocks, np, TILE_LINES);
            for (i64 b = 0; b < blocks; ++b) {
                i64 row[2];
                const char *x[2];
                for (int i = 0; i < (single ? 1 : 2); ++i) {
                    row[i] = min_i64(r0 + (2 * b + i) * TILE_ROWS, t->n - height);
                    x[i] = (const char *)t->rows + row[i] * t->row_bytes;
                    if (t->begin) t->begin(t->args, row[i], height, sums + i * TILE_ROWS * SLOT, np);
                }
                MEMORY_IS_READ;
                if (!single && np > 1) square(t, x, w, sums, &next, 2, kind);
                else if (!single) square(t, x, w, sums, &next, 1, kind);
                else switch (np) {
                    case 1: line(t, x[0], w, sums, &next, 1, kind); break;
                    case 2: line(t, x[0], w, sums, &next, 2, kind); break;
                    case 3: line(t, x[0], w, sums, &next, 3, kind); break;
                    default: line(t, x[0], w, sums, &next, 4, kind);
                }
                MEMORY_IS_READ;
                t->finish(t->args, row[0], height, p, sums, np);
                if (!single && (2 * b + 1) * TILE_ROWS < rows)
                    t->finish(t->args, row[1], height, p, sums + TILE_ROWS * SLOT, np);
            }
        }
    }
    _tile_release();
}
#endif
#endif
