/* What the kernels share: storage types, error codes, loops over threads. Plain C, called through ctypes. */
#ifndef DPI_H
#define DPI_H
#include <stdint.h>

typedef uint16_t b16; /* bfloat16, as bits */
typedef int64_t i64;

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define PAGE 16      /* tokens in a page of the KV cache */
#define MAX_DIM 512  /* widest attention head, or latent */
#define MAX_TURNED 128 /* widest rotated part beside a latent */
#define MAX_EXPERTS 1024 /* that a router chooses among */

/* What exported functions return; the caller makes a message of it. */
enum { OK = 0, BAD_POSITION = 1, BAD_SLOT = 2, BAD_LENGTH = 3, BAD_PAGE = 4, NO_MEMORY = 5, BAD_EXPERT = 6, NO_INSTRUCTIONS = 7, BAD_ID = 8, NO_FUNCTION = 9, TOO_MANY = 10 };

/* body(ctx, begin, end) over [0, n). Chunks of equal size, one a thread; or single items to whoever is free. */
typedef void (*body_fn)(void *ctx, i64 begin, i64 end);
void for_each_chunk(i64 n, int threads, body_fn body, void *ctx);
void for_each_item(i64 n, int threads, body_fn body, void *ctx);

/* program(ctx, first) on all threads at once, `first` true on one of them. The loops above, in it, are shared out among
 * the threads, all of which must come by all of them: a program of many loops then starts its threads once. */
typedef void (*program_fn)(void *ctx, int first);
void run_program(program_fn program, void *ctx, int threads);

INLINE i64 round_up(i64 x, i64 to) { return (x + to - 1) / to * to; }
INLINE i64 min_i64(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 max_i64(i64 a, i64 b) { return a > b ? a : b; }
#endif
