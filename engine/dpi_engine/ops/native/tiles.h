/* The processor's tiles (AMX): how their shapes are told. */
#ifndef DPI_TILES_H
#define DPI_TILES_H
#ifdef __AMX_BF16__
#include <immintrin.h>
#include <stdint.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes __attribute__((aligned(64)));

/* The compiler does not know that tile loads read memory. */
#define MEMORY_IS_READ __asm__ volatile("" ::: "memory")
#endif
#endif
