/* What the kernels read and write: number formats, their conversions, and one batch of token rows.

   All arithmetic is fp32, one rounding an operation (no fused multiply-add), so that every instruction set
   and the numpy fallback give the same bits. Conversions to 16 bits round to nearest, ties to even; NaN stays
   NaN, its payload is not kept. Built with -ffp-contract=off. */
#ifndef KVSTORE_NUMBERS_H
#define KVSTORE_NUMBERS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Formats of a channel. U4 lies two a byte and is unpacked to U8 on the way. */
enum format { F16, BF16, F32, I8, U4, U8, FORMATS };
#define TARGETS 3 /* F16, BF16 and F32 can be written */
enum pairing { HALF, INTERLEAVED, PAIRINGS };

static const ptrdiff_t BYTES[FORMATS] = {2, 2, 4, 1, 1, 1};

/* `count` tokens of one head: row t is read at src + t * src_stride, turned, and written at
   dst + slot(t) * dst_stride. Channels lie side by side in a row. Strides of src and dst are in bytes, of the
   tables in floats; a table stride of 0 means that all rows share one row of the table. */
struct rows {
    ptrdiff_t count, channels, pairs; /* the first 2 * pairs channels turn */
    const char *src;
    ptrdiff_t src_stride;
    char *dst;
    ptrdiff_t dst_stride;
    const int64_t *slots; /* NULL: slot(t) = t */
    const float *cos, *sin;
    ptrdiff_t angle_stride;
    const float *scale, *offset; /* a value per channel: I8 is code * scale, U8 is code * scale + offset */
    ptrdiff_t scale_stride;
};

/* The kernels of one instruction set. */
struct level {
    const char *name;
    void (*rows[FORMATS][TARGETS][PAIRINGS])(const struct rows *);
    /* low[g] and high[g], in the form of `ordered`, widen to hold x[g * group] ... x[(g + 1) * group - 1]. */
    void (*extremes)(const float *x, ptrdiff_t channels, ptrdiff_t group, int32_t *low, int32_t *high);
    /* code = (x - offset) / scale, limited to [least, most], rounded to nearest even; offset NULL is 0. */
    void (*encode)(const float *x, const float *scale, const float *offset, ptrdiff_t channels, float least,
                   float most, int8_t *codes);
    void (*split[2])(const char *items, char *planes, ptrdiff_t count); /* items of 2 and of 4 bytes */
    void (*join[2])(const char *planes, char *items, ptrdiff_t count);
};

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Signed integers in the order of the floats that have these bits, NaN beyond infinity at both ends; the mapping is
   its own inverse. */
INLINE int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

/* A choice without a branch, so that loops of conversions vectorise. */
INLINE uint32_t choose(int condition, uint32_t yes, uint32_t no) {
    uint32_t mask = -(uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

INLINE float float_of_half(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu, bits = magnitude << 13;
    /* A subnormal is magnitude * 2^-24: put it below the leading one of 2^-14, then take that one away. */
    uint32_t subnormal = bits_of_float(float_of_bits(bits + (113u << 23)) - 0x1p-14f);
    uint32_t finite = choose(magnitude < 0x400u, subnormal, bits + (112u << 23));
    uint32_t value = choose(magnitude < 0x7c00u, finite, bits | 0x7f800000u);
    return float_of_bits(value | (half & 0x8000u) << 16);
}

INLINE uint16_t half_of_float(float value) {
    uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    /* Below 2^-14 halfs are 2^-24 apart, as floats are in [0.5, 1): the addition does the rounding. */
    uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t finite = choose(magnitude < 0x38800000u, subnormal, normal);
    uint32_t limited = choose(magnitude < 0x477ff000u, finite, 0x7c00u); /* 65520 and more round to infinity */
    return (uint16_t)(choose(magnitude > 0x7f800000u, 0x7e00u, limited) | (bits >> 16 & 0x8000u));
}

INLINE float float_of_bfloat(uint16_t bfloat) { return float_of_bits((uint32_t)bfloat << 16); }

INLINE uint16_t bfloat_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
    return (uint16_t)choose((bits & 0x7fffffffu) > 0x7f800000u, quiet, rounded);
}

/* Read channel i of a row. */
INLINE float read_channel(int from, const char *row, ptrdiff_t i, const float *scale, const float *offset) {
    uint16_t word;
    float value;
    switch (from) {
    case F16: memcpy(&word, row + 2 * i, 2); return float_of_half(word);
    case BF16: memcpy(&word, row + 2 * i, 2); return float_of_bfloat(word);
    case F32: memcpy(&value, row + 4 * i, 4); return value;
    case I8: return (float)(int8_t)row[i] * scale[i];
    default: return (float)(uint8_t)row[i] * scale[i] + offset[i];
    }
}

/* Write channel i of a row. */
INLINE void write_channel(int to, char *row, ptrdiff_t i, float value) {
    uint16_t word;
    switch (to) {
    case F16: word = half_of_float(value); memcpy(row + 2 * i, &word, 2); break;
    case BF16: word = bfloat_of_float(value); memcpy(row + 2 * i, &word, 2); break;
    default: memcpy(row + 4 * i, &value, 4);
    }
}

#endif
