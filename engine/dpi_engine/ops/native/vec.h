/* Vectors of VW floats in the instruction set that this file is compiled for. Storage is float32 or bfloat16, arithmetic
 * float32. `n`-suffixed loads and stores touch only the first n elements (0 <= n <= VW).
 *
 * x86 min and max give their second operand when one is not a number, so the data always comes second: NaN goes through.
 */
#ifndef DPI_VEC_H
#define DPI_VEC_H
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "dpi.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VW 16
typedef __m512 vf;
typedef __m512i vi;
INLINE vf v_set(float x) { return _mm512_set1_ps(x); }
INLINE vf v_zero(void) { return _mm512_setzero_ps(); }
INLINE vf v_ldf(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_stf(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE __mmask16 v_first(int n) { return (__mmask16)((1u << n) - 1); }
INLINE vf v_ldfn(const float *p, int n) { return _mm512_maskz_loadu_ps(v_first(n), p); }
INLINE void v_stfn(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, v_first(n), x); }
INLINE vf v_wide(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE vf v_ldb(const b16 *p) { return v_wide(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void v_stb(b16 *p, vf x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }
INLINE vf v_ldbn(const b16 *p, int n) { return v_wide(_mm256_maskz_loadu_epi16(v_first(n), p)); }
INLINE void v_stbn(b16 *p, vf x, int n) { _mm256_mask_storeu_epi16(p, v_first(n), (__m256i)_mm512_cvtneps_pbh(x)); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_round(vf x) { return _mm512_roundscale_ps(x, 0x08); }
INLINE vf v_times_2_to(vf x, vf n) { return _mm512_scalef_ps(x, n); }
INLINE float v_sum(vf x) { return _mm512_reduce_add_ps(x); }
INLINE float v_hmax(vf x) { return _mm512_reduce_max_ps(x); }
/* Bit i is set where x[i] > y, or either is not a number. */
INLINE unsigned v_above(vf x, float y) { return _mm512_cmp_ps_mask(x, v_set(y), _CMP_NLE_UQ); }
INLINE unsigned v_nan(vf x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
INLINE unsigned v_equal(vf x, float y) { return _mm512_cmp_ps_mask(x, v_set(y), _CMP_EQ_OQ); }
INLINE vi v_ldi(const void *p) { return _mm512_loadu_si512(p); }
INLINE vf v_low(vi x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
INLINE vf v_high(vi x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000u))); }

#elif defined(__AVX2__) && defined(__FMA__)
#define VW 8
typedef __m256 vf;
typedef __m256i vi;
INLINE vf v_set(float x) { return _mm256_set1_ps(x); }
INLINE vf v_zero(void) { return _mm256_setzero_ps(); }
INLINE vf v_ldf(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_stf(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vi v_first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
INLINE vf v_ldfn(const float *p, int n) { return _mm256_maskload_ps(p, v_first(n)); }
INLINE void v_stfn(float *p, vf x, int n) { _mm256_maskstore_ps(p, v_first(n), x); }
INLINE vf v_wide(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
INLINE vf v_ldb(const b16 *p) { return v_wide(_mm_loadu_si128((const __m128i *)p)); }
INLINE __m128i v_narrow(vf x) { /* round to nearest even, NaN stays NaN */
    vi u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    vi r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    vi bad = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), bad);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08));
}
INLINE void v_stb(b16 *p, vf x) { _mm_storeu_si128((__m128i *)p, v_narrow(x)); }
INLINE vf v_ldbn(const b16 *p, int n) {
    b16 t[8] = {0};
    memcpy(t, p, (size_t)n * 2);
    return v_ldb(t);
}
INLINE void v_stbn(b16 *p, vf x, int n) {
    b16 t[8];
    v_stb(t, x);
    memcpy(p, t, (size_t)n * 2);
}
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf v_round(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_times_2_to(vf x, vf n) { /* -126 <= n <= 127 */
    vi e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
INLINE float v_sum(vf x) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}
INLINE float v_hmax(vf x) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}
INLINE unsigned v_above(vf x, float y) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, v_set(y), _CMP_NLE_UQ)); }
INLINE unsigned v_nan(vf x) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
INLINE unsigned v_equal(vf x, float y) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, v_set(y), _CMP_EQ_OQ)); }
INLINE vi v_ldi(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vf v_low(vi x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE vf v_high(vi x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u))); }
#else
#error "compile with the flags of one of the instruction sets in build.py"
#endif

/* Loads and stores whose storage type is known when compiled: bf is a constant at each use. */
INLINE vf v_load(const void *p, i64 i, int bf) { return bf ? v_ldb((const b16 *)p + i) : v_ldf((const float *)p + i); }
INLINE void v_store(void *p, i64 i, vf x, int bf) {
    if (bf) v_stb((b16 *)p + i, x);
    else v_stf((float *)p + i, x);
}
INLINE vf v_loadn(const void *p, i64 i, int n, int bf) {
    return bf ? v_ldbn((const b16 *)p + i, n) : v_ldfn((const float *)p + i, n);
}
INLINE void v_storen(void *p, i64 i, vf x, int n, int bf) {
    if (bf) v_stbn((b16 *)p + i, x, n);
    else v_stfn((float *)p + i, x, n);
}

/* e^x to about one unit in the last place; below -87 it stays at e^-87, so mask, do not rely on zero. */
INLINE vf v_exp(vf x) {
    x = v_max(v_set(-87.f), v_min(v_set(88.f), x));
    vf n = v_round(v_mul(x, v_set(1.44269504f)));
    x = v_fnma(n, v_set(0.693359375f), x);
    x = v_fnma(n, v_set(-2.12194440e-4f), x);
    vf y = v_fma(v_set(1.9875691500e-4f), x, v_set(1.3981999507e-3f));
    y = v_fma(y, x, v_set(8.3334519073e-3f));
    y = v_fma(y, x, v_set(4.1665795894e-2f));
    y = v_fma(y, x, v_set(1.6666665459e-1f));
    y = v_fma(y, x, v_set(5.0000001201e-1f));
    y = v_fma(y, v_mul(x, x), v_add(x, v_set(1.f)));
    return v_times_2_to(y, n);
}
INLINE vf v_silu(vf x) { return v_div(x, v_add(v_set(1.f), v_exp(v_sub(v_zero(), x)))); }
INLINE float widen(b16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
#endif
