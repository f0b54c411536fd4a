/* NEON on AArch64, where it is part of the baseline: 4 floats. */
#include <arm_neon.h>

#define LEVEL(name) name##_neon
#define LEVEL_NAME "neon"
#define TARGET
#define VECTOR float32x4_t
#define WIDTH 4

/* memcpy, because a vld1 through a typed pointer promises an alignment that callers need not have. */
INLINE float32x4_t load_neon(int from, const char *row, ptrdiff_t i, const float *scale, const float *offset) {
    uint16x4_t words;
    float32x4_t floats;
    uint64_t codes = 0;
    switch (from) {
    case F16: memcpy(&words, row + 2 * i, 8); return vcvt_f32_f16(vreinterpret_f16_u16(words));
    case BF16: memcpy(&words, row + 2 * i, 8); return vreinterpretq_f32_u32(vshll_n_u16(words, 16));
    case F32: memcpy(&floats, row + 4 * i, 16); return floats;
    case I8:
        memcpy(&codes, row + i, 4);
        floats = vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(codes)))));
        return vmulq_f32(floats, vld1q_f32(scale + i));
    default:
        memcpy(&codes, row + i, 4);
        floats = vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(codes)))));
        return vaddq_f32(vmulq_f32(floats, vld1q_f32(scale + i)), vld1q_f32(offset + i));
    }
}

INLINE void store_neon(int to, char *row, ptrdiff_t i, float32x4_t v) {
    switch (to) {
    case F16: {
        float16x4_t halfs = vcvt_f16_f32(v);
        memcpy(row + 2 * i, &halfs, 8);
        break;
    }
    case BF16: {
        uint32x4_t bits = vreinterpretq_u32_f32(v), high = vshrq_n_u32(bits, 16);
        uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
        uint32x4_t is_number = vceqq_f32(v, v);
        uint16x4_t words = vmovn_u32(vbslq_u32(is_number, vshrq_n_u32(rounded, 16), quiet));
        memcpy(row + 2 * i, &words, 8);
        break;
    }
    default: memcpy(row + 4 * i, &v, 16);
    }
}

INLINE float32x4_t mul_neon(float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }
INLINE float32x4_t add_neon(float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }
INLINE float32x4_t sub_neon(float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); }

INLINE void deinterleave_neon(float32x4_t v0, float32x4_t v1, float32x4_t *even, float32x4_t *odd) {
    *even = vuzp1q_f32(v0, v1);
    *odd = vuzp2q_f32(v0, v1);
}
INLINE void interleave_neon(float32x4_t even, float32x4_t odd, float32x4_t *v0, float32x4_t *v1) {
    *v0 = vzip1q_f32(even, odd);
    *v1 = vzip2q_f32(even, odd);
}

#include "_template.h"
