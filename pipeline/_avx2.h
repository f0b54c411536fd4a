/* AVX2 and F16C: 8 floats. */
#include <immintrin.h>

#define LEVEL(name) name##_avx2
#define LEVEL_NAME "avx2"
#define TARGET __attribute__((target("avx2,f16c")))
#define VECTOR __m256
#define WIDTH 8

TARGET INLINE __m256 load_avx2(int from, const char *row, ptrdiff_t i, const float *scale, const float *offset) {
    switch (from) {
    case F16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + 2 * i)));
    case BF16: {
        __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(row + 2 * i)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    }
    case F32: return _mm256_loadu_ps((const float *)(row + 4 * i));
    case I8: {
        __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(row + i)));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(codes), _mm256_loadu_ps(scale + i));
    }
    default: {
        __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(row + i)));
        __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(codes), _mm256_loadu_ps(scale + i));
        return _mm256_add_ps(scaled, _mm256_loadu_ps(offset + i));
    }
    }
}

TARGET INLINE void store_avx2(int to, char *row, ptrdiff_t i, __m256 v) {
    switch (to) {
    case F16:
        _mm_storeu_si128((__m128i *)(row + 2 * i), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
        break;
    case BF16: {
        __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
        __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, is_nan);
        words = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
        _mm_storeu_si128((__m128i *)(row + 2 * i), _mm256_castsi256_si128(words));
        break;
    }
    default: _mm256_storeu_ps((float *)(row + 4 * i), v);
    }
}

TARGET INLINE __m256 mul_avx2(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
TARGET INLINE __m256 add_avx2(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
TARGET INLINE __m256 sub_avx2(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }

/* Shuffles stay inside 128-bit halves: the permutes put the halves in order. */
TARGET INLINE __m256 in_order_avx2(__m256 v) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
}
TARGET INLINE void deinterleave_avx2(__m256 v0, __m256 v1, __m256 *even, __m256 *odd) {
    *even = in_order_avx2(_mm256_shuffle_ps(v0, v1, 0x88));
    *odd = in_order_avx2(_mm256_shuffle_ps(v0, v1, 0xdd));
}
TARGET INLINE void interleave_avx2(__m256 even, __m256 odd, __m256 *v0, __m256 *v1) {
    __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    *v0 = _mm256_permute2f128_ps(low, high, 0x20);
    *v1 = _mm256_permute2f128_ps(low, high, 0x31);
}

#include "_template.h"
