/* Tiles: up to TILE token rows with channels side by side, made from arrays and scales that are not so. */
#ifndef KVSTORE_TILES_H
#define KVSTORE_TILES_H

#include <stdbool.h>

#include "_numbers.h"

#define TILE 32 /* tokens: where tokens lie side by side instead, this many halfs fill a cache line */

INLINE ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* Tokens are the inner loop: arrays that need tiles mostly have tokens, not channels, side by side. */
INLINE void gather_items(char *tile, const char *src, ptrdiff_t src_token, ptrdiff_t src_channel, ptrdiff_t count,
                         ptrdiff_t channels, const ptrdiff_t size) {
    for (ptrdiff_t c = 0; c < channels; c++)
        for (ptrdiff_t t = 0; t < count; t++)
            memcpy(tile + (t * channels + c) * size, src + t * src_token + c * src_channel, (size_t)size);
}

static void gather(char *tile, const char *src, ptrdiff_t src_token, ptrdiff_t src_channel, ptrdiff_t count,
                   ptrdiff_t channels, ptrdiff_t size) {
    if (size == 2) gather_items(tile, src, src_token, src_channel, count, channels, 2);
    else gather_items(tile, src, src_token, src_channel, count, channels, 4);
}

INLINE void scatter_items(const char *tile, char *dst, ptrdiff_t dst_token, ptrdiff_t dst_channel,
                          const int64_t *slots, ptrdiff_t count, ptrdiff_t channels, const ptrdiff_t size) {
    for (ptrdiff_t c = 0; c < channels; c++)
        for (ptrdiff_t t = 0; t < count; t++)
            memcpy(dst + (slots ? slots[t] : t) * dst_token + c * dst_channel, tile + (t * channels + c) * size,
                   (size_t)size);
}

static void scatter(const char *tile, char *dst, ptrdiff_t dst_token, ptrdiff_t dst_channel, const int64_t *slots,
                    ptrdiff_t count, ptrdiff_t channels, ptrdiff_t size) {
    if (size == 2) scatter_items(tile, dst, dst_token, dst_channel, slots, count, channels, 2);
    else scatter_items(tile, dst, dst_token, dst_channel, slots, count, channels, 4);
}

/* 4-bit codes: byte i holds channel 2i in its low half and channel 2i + 1 in its high half. */
static void unpack(const char *packed, char *codes, ptrdiff_t bytes) {
    for (ptrdiff_t i = 0; i < bytes; i++) {
        uint8_t pair = (uint8_t)packed[i];
        codes[2 * i] = (char)(pair & 15), codes[2 * i + 1] = (char)(pair >> 4);
    }
}

static void pack(const char *codes, char *packed, ptrdiff_t bytes) {
    for (ptrdiff_t i = 0; i < bytes; i++) packed[i] = (char)((codes[2 * i] & 15) | (codes[2 * i + 1] & 15) << 4);
}

/* Scales [heads, rows, columns] and, for 4-bit codes, offsets of the same shape. Per channel: one row for `group`
   tokens, a column a channel. Per token: a row a token, one column for `group` channels. */
struct scales {
    const float *scale, *offset;
    bool per_token;
    ptrdiff_t group, rows, columns;
};

/* A value per channel from one per group. */
static void spread(const float *values, ptrdiff_t group, ptrdiff_t channels, float *restrict out) {
    for (ptrdiff_t start = 0; start < channels; start += group) {
        const ptrdiff_t end = smaller(start + group, channels);
        const float value = *values++;
        for (ptrdiff_t i = start; i < end; i++) out[i] = value;
    }
}

/* Rows of scales for `rows->count` tokens of head h from token t on, in place where they can be used so, else spread
   over `tile` (2 * TILE * channels floats). Lowers rows->count to the tokens that they serve. */
static void point_scales(const struct scales *s, ptrdiff_t h, ptrdiff_t t, float *tile, struct rows *rows) {
    const ptrdiff_t channels = rows->channels;
    const ptrdiff_t first = (h * s->rows + (s->per_token ? t : t / s->group)) * s->columns;
    rows->scale = s->scale + first;
    rows->offset = s->offset ? s->offset + first : rows->scale;
    if (!s->per_token) {
        rows->count = smaller(rows->count, s->group - t % s->group);
        return;
    }
    float *offsets = s->offset ? tile + TILE * channels : tile;
    for (ptrdiff_t k = 0; k < rows->count; k++) {
        spread(rows->scale + k * s->columns, s->group, channels, tile + k * channels);
        if (s->offset) spread(rows->offset + k * s->columns, s->group, channels, offsets + k * channels);
    }
    rows->scale = tile, rows->offset = offsets, rows->scale_stride = channels;
}

#endif
