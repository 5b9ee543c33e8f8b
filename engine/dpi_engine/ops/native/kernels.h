/* The functions that programs are made of; each says its shapes where it is. */
#ifndef DPI_KERNELS_H
#define DPI_KERNELS_H
#include "dpi.h"

EXPORT int dpi_embed(const i64 *ids, const void *table, void *out, i64 n, i64 width, i64 rows, int table_bf, int bf,
                     int threads);
EXPORT void dpi_rms_norm(void *x, const void *delta, const void *weight, void *out, i64 n, i64 width, float eps, int bf,
                         int weight_bf, int threads);
EXPORT void dpi_silu_mul(const void *gate_up, void *out, i64 n, i64 width, int bf, int threads);
EXPORT void dpi_linear(const float *x, const b16 *w, const float *bias, float *y, i64 n, i64 in, i64 out, int threads);
EXPORT int dpi_linear_dot(const b16 *x, const b16 *w, const float *bias, b16 *y, i64 n, i64 in, i64 out, int gated,
                          int threads);
EXPORT int dpi_linear_int8(const b16 *x, const uint8_t *w, const float *scale, const float *bias, b16 *y, void *room,
                           i64 n, i64 in, i64 out, int gated, int threads);
EXPORT int dpi_rope_write(const void *qkv, const i64 *positions, const i64 *slots, const float *cos, const float *sin,
                          void *k, void *v, void *q, const float *q_norm, const float *k_norm, i64 n, i64 max_position,
                          i64 slots_total, int heads, int kv_heads, int dim, float eps, int bf, int cache_bf, int threads);
EXPORT int dpi_attention(const void *q, const void *k, const void *v, const int32_t *tables, const int32_t *kv_lens,
                         const int32_t *cu, void *out, i64 n, i64 table_width, i64 blocks, int sequences, int heads,
                         int kv_heads, int dim, int window, float scale, int bf, int cache_bf, int threads);
EXPORT int dpi_route(const void *x, const float *panels, const float *bias, int32_t *ids, float *weights, float *room, i64 n,
                     i64 hidden, i64 experts, int k, int sigmoid, int normalize, int groups, int kept, int best,
                     float scaling, int bf, int threads);
EXPORT int dpi_experts(const void *x, const int32_t *ids, const float *weights, const void *gate_up, const void *down,
                       void *inner, float *sums, void *out, i64 n, i64 experts, i64 hidden, i64 width, int choices, int bf,
                       int weight_bf, int threads);
#endif
