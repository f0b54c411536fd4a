/* The kernels, written once. Each instruction set's header defines, then includes this file:

     LEVEL(name)   the name with the level's suffix
     TARGET        the function attribute that lets the compiler use the instruction set
     VECTOR        WIDTH floats
     load(from, row, i, scale, offset)   channels i ... i + WIDTH - 1 of a row, as floats
     store(to, row, i, vector)
     mul, add, sub
     deinterleave(v0, v1, &even, &odd), interleave(even, odd, &v0, &v1)

   (those functions under LEVEL(...) as well). */

TARGET INLINE void LEVEL(turn)(VECTOR *a, VECTOR *b, VECTOR cosine, VECTOR sine) {
    VECTOR x = LEVEL(sub)(LEVEL(mul)(*a, cosine), LEVEL(mul)(*b, sine));
    *b = LEVEL(add)(LEVEL(mul)(*b, cosine), LEVEL(mul)(*a, sine));
    *a = x;
}

TARGET INLINE void LEVEL(rows)(const struct rows *rows, const int from, const int to, const int pairing) {
    const struct rows r = *rows; /* a copy, which stores to dst cannot change: its fields stay in registers */
    const ptrdiff_t pairs = r.pairs, turned = 2 * pairs, channels = r.channels;
    for (ptrdiff_t t = 0; t < r.count; t++) {
        const char *restrict src = r.src + t * r.src_stride;
        char *restrict dst = r.dst + (r.slots ? r.slots[t] : t) * r.dst_stride;
        const float *restrict cosine = r.cos + t * r.angle_stride;
        const float *restrict sine = r.sin + t * r.angle_stride;
        const float *restrict scale = r.scale + t * r.scale_stride;
        const float *restrict offset = r.offset + t * r.scale_stride;
        ptrdiff_t i = 0;
        for (; i + WIDTH <= pairs; i += WIDTH) {
            VECTOR c = LEVEL(load)(F32, (const char *)cosine, i, NULL, NULL);
            VECTOR s = LEVEL(load)(F32, (const char *)sine, i, NULL, NULL);
            ptrdiff_t first = pairing == HALF ? i : 2 * i;
            ptrdiff_t second = pairing == HALF ? i + pairs : 2 * i + WIDTH;
            VECTOR v0 = LEVEL(load)(from, src, first, scale, offset);
            VECTOR v1 = LEVEL(load)(from, src, second, scale, offset);
            VECTOR a = v0, b = v1;
            if (pairing == INTERLEAVED) LEVEL(deinterleave)(v0, v1, &a, &b);
            LEVEL(turn)(&a, &b, c, s);
            v0 = a, v1 = b;
            if (pairing == INTERLEAVED) LEVEL(interleave)(a, b, &v0, &v1);
            LEVEL(store)(to, dst, first, v0);
            LEVEL(store)(to, dst, second, v1);
        }
        for (; i < pairs; i++) {
            ptrdiff_t first = pairing == HALF ? i : 2 * i, second = pairing == HALF ? i + pairs : 2 * i + 1;
            float a = read_channel(from, src, first, scale, offset);
            float b = read_channel(from, src, second, scale, offset);
            float x = a * cosine[i] - b * sine[i], y = b * cosine[i] + a * sine[i];
            write_channel(to, dst, first, x);
            write_channel(to, dst, second, y);
        }
        if (turned == channels) continue;
        if (from == to) {
            memcpy(dst + turned * BYTES[to], src + turned * BYTES[to], (size_t)((channels - turned) * BYTES[to]));
            continue;
        }
        for (i = turned; i + WIDTH <= channels; i += WIDTH)
            LEVEL(store)(to, dst, i, LEVEL(load)(from, src, i, scale, offset));
        for (; i < channels; i++) write_channel(to, dst, i, read_channel(from, src, i, scale, offset));
    }
}

TARGET static void LEVEL(extremes)(const float *restrict x, ptrdiff_t channels, ptrdiff_t group,
                                   int32_t *restrict low, int32_t *restrict high) {
    if (group == 1) {
        for (ptrdiff_t i = 0; i < channels; i++) {
            int32_t bits;
            memcpy(&bits, x + i, 4);
            bits = ordered(bits);
            low[i] = bits < low[i] ? bits : low[i];
            high[i] = bits > high[i] ? bits : high[i];
        }
        return;
    }
    for (ptrdiff_t g = 0; g * group < channels; g++) {
        ptrdiff_t end = (g + 1) * group < channels ? (g + 1) * group : channels;
        int32_t least = low[g], most = high[g];
        for (ptrdiff_t i = g * group; i < end; i++) {
            int32_t bits;
            memcpy(&bits, x + i, 4);
            bits = ordered(bits);
            least = bits < least ? bits : least;
            most = bits > most ? bits : most;
        }
        low[g] = least, high[g] = most;
    }
}

TARGET static void LEVEL(encode)(const float *restrict x, const float *restrict scale,
                                 const float *restrict offset, ptrdiff_t channels, float least, float most,
                                 int8_t *restrict codes) {
    for (ptrdiff_t i = 0; i < channels; i++) {
        float code = (offset ? x[i] - offset[i] : x[i]) / scale[i];
        code = code < least ? least : code;
        code = code > most ? most : code;
        /* Floats next to 1.5 * 2^23 are 1 apart, so the addition rounds and leaves the integer in the bits. */
        codes[i] = (int8_t)(bits_of_float(code + 0x1.8p23f) - 0x4b400000u);
    }
}

TARGET static void LEVEL(split2)(const char *restrict items, char *restrict planes, ptrdiff_t count) {
    char *restrict p0 = planes, *restrict p1 = planes + count;
    for (ptrdiff_t i = 0; i < count; i++) p0[i] = items[2 * i], p1[i] = items[2 * i + 1];
}

TARGET static void LEVEL(join2)(const char *restrict planes, char *restrict items, ptrdiff_t count) {
    const char *restrict p0 = planes, *restrict p1 = planes + count;
    for (ptrdiff_t i = 0; i < count; i++) items[2 * i] = p0[i], items[2 * i + 1] = p1[i];
}

TARGET static void LEVEL(split4)(const char *restrict items, char *restrict planes, ptrdiff_t count) {
    char *restrict p0 = planes, *restrict p1 = p0 + count, *restrict p2 = p1 + count, *restrict p3 = p2 + count;
    for (ptrdiff_t i = 0; i < count; i++) {
        p0[i] = items[4 * i], p1[i] = items[4 * i + 1];
        p2[i] = items[4 * i + 2], p3[i] = items[4 * i + 3];
    }
}

TARGET static void LEVEL(join4)(const char *restrict planes, char *restrict items, ptrdiff_t count) {
    const char *restrict p0 = planes, *restrict p1 = p0 + count, *restrict p2 = p1 + count,
                        *restrict p3 = p2 + count;
    for (ptrdiff_t i = 0; i < count; i++) {
        items[4 * i] = p0[i], items[4 * i + 1] = p1[i];
        items[4 * i + 2] = p2[i], items[4 * i + 3] = p3[i];
    }
}

#define ROWS(from, to, pairing)                                                                               \
    TARGET static void LEVEL(rows_##from##_##to##_##pairing)(const struct rows *r) {                          \
        LEVEL(rows)(r, from, to, pairing);                                                                    \
    }
#define ROWS_TO(from, to) ROWS(from, to, HALF) ROWS(from, to, INTERLEAVED)
#define ROWS_FROM(from) ROWS_TO(from, F16) ROWS_TO(from, BF16) ROWS_TO(from, F32)
ROWS_FROM(F16)
ROWS_FROM(BF16)
ROWS_FROM(F32)
ROWS_FROM(I8)
ROWS_FROM(U8)
#undef ROWS_FROM
#undef ROWS_TO
#undef ROWS

#define ENTRY_TO(from, to) {LEVEL(rows_##from##_##to##_HALF), LEVEL(rows_##from##_##to##_INTERLEAVED)}
#define ENTRY_FROM(from) {ENTRY_TO(from, F16), ENTRY_TO(from, BF16), ENTRY_TO(from, F32)}
static const struct level LEVEL(level) = {
    LEVEL_NAME,
    {ENTRY_FROM(F16), ENTRY_FROM(BF16), ENTRY_FROM(F32), ENTRY_FROM(I8), [U8] = ENTRY_FROM(U8)},
    LEVEL(extremes),
    LEVEL(encode),
    {LEVEL(split2), LEVEL(split4)},
    {LEVEL(join2), LEVEL(join4)},
};
#undef ENTRY_FROM
#undef ENTRY_TO

#undef LEVEL
#undef LEVEL_NAME
#undef TARGET
#undef VECTOR
#undef WIDTH
