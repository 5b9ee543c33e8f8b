/* One vector of activations at a time: normed, rotated, stored. */
#ifndef DPI_ROWS_H
#define DPI_ROWS_H
#include "vec.h"

/* x[0:dim] -> normed and rotated floats in out. */
INLINE void turn(const void *x, i64 o, float *out, int dim, const float *c, const float *s, const float *norm, float eps,
                 const int bf) {
    const int half = dim / 2, full = half / VW * VW, rest = half - full;
    vf k = v_set(1.f);
    if (norm) {
        vf sum = v_zero();
        for (int i = 0; i < full; i += VW) {
            vf a = v_load(x, o + i, bf), b = v_load(x, o + half + i, bf);
            sum = v_fma(a, a, v_fma(b, b, sum));
        }
        if (rest) {
            vf a = v_loadn(x, o + full, rest, bf), b = v_loadn(x, o + half + full, rest, bf);
            sum = v_fma(a, a, v_fma(b, b, sum));
        }
        k = v_set(1.f / sqrtf(v_sum(sum) / (float)dim + eps));
    }
    for (int i = 0; i < half; i += VW) {
        const int n = half - i < VW ? half - i : VW;
        vf a, b, cc, ss;
        if (n == VW) {
            a = v_load(x, o + i, bf), b = v_load(x, o + half + i, bf), cc = v_ldf(c + i), ss = v_ldf(s + i);
            if (norm) a = v_mul(v_mul(a, k), v_ldf(norm + i)), b = v_mul(v_mul(b, k), v_ldf(norm + half + i));
            v_stf(out + i, v_sub(v_mul(a, cc), v_mul(b, ss)));
            v_stf(out + half + i, v_add(v_mul(b, cc), v_mul(a, ss)));
        } else {
            a = v_loadn(x, o + i, n, bf), b = v_loadn(x, o + half + i, n, bf);
            cc = v_ldfn(c + i, n), ss = v_ldfn(s + i, n);
            if (norm) a = v_mul(v_mul(a, k), v_ldfn(norm + i, n)), b = v_mul(v_mul(b, k), v_ldfn(norm + half + i, n));
            v_stfn(out + i, v_sub(v_mul(a, cc), v_mul(b, ss)), n);
            v_stfn(out + half + i, v_add(v_mul(b, cc), v_mul(a, ss)), n);
        }
    }
}

INLINE void copy(const float *x, void *out, i64 o, int dim, const int bf) {
    const int full = dim / VW * VW;
    for (int i = 0; i < full; i += VW) v_store(out, o + i, v_ldf(x + i), bf);
    if (dim > full) v_storen(out, o + full, v_ldfn(x + full, dim - full), dim - full, bf);
}
#endif
