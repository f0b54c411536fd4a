/* AVX-512 F: 16 floats. */
#include <immintrin.h>

#define LEVEL(name) name##_avx512
#define LEVEL_NAME "avx512"
#define TARGET __attribute__((target("avx512f")))
#define VECTOR __m512
#define WIDTH 16

TARGET INLINE __m512 load_avx512(int from, const char *row, ptrdiff_t i, const float *scale, const float *offset) {
    switch (from) {
    case F16: return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(row + 2 * i)));
    case BF16: {
        __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(row + 2 * i)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    }
    case F32: return _mm512_loadu_ps(row + 4 * i);
    case I8: {
        __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(row + i)));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_loadu_ps(scale + i));
    }
    default: {
        __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(row + i)));
        __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_loadu_ps(scale + i));
        return _mm512_add_ps(scaled, _mm512_loadu_ps(offset + i));
    }
    }
}

TARGET INLINE void store_avx512(int to, char *row, ptrdiff_t i, __m512 v) {
    switch (to) {
    case F16:
        _mm256_storeu_si256((__m256i *)(row + 2 * i), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
        break;
    case BF16: {
        __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
        __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
        __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        __m512i words = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, quiet);
        _mm256_storeu_si256((__m256i *)(row + 2 * i), _mm512_cvtepi32_epi16(words));
        break;
    }
    default: _mm512_storeu_ps(row + 4 * i, v);
    }
}

TARGET INLINE __m512 mul_avx512(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
TARGET INLINE __m512 add_avx512(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
TARGET INLINE __m512 sub_avx512(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }

TARGET INLINE void deinterleave_avx512(__m512 v0, __m512 v1, __m512 *even, __m512 *odd) {
    __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    *even = _mm512_permutex2var_ps(v0, evens, v1);
    *odd = _mm512_permutex2var_ps(v0, odds, v1);
}
TARGET INLINE void interleave_avx512(__m512 even, __m512 odd, __m512 *v0, __m512 *v1) {
    __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    *v0 = _mm512_permutex2var_ps(even, low, odd);
    *v1 = _mm512_permutex2var_ps(even, high, odd);
}

#include "_template.h"
