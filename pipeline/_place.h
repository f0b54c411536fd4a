/* Place: source rows become floats, turn, and land in the target's slots in the target's format. */
#ifndef KVSTORE_PLACE_H
#define KVSTORE_PLACE_H

#include <stdlib.h>

#include "_tiles.h"

struct placing {
    enum format from, to;
    enum pairing pairing;
    ptrdiff_t heads, tokens, channels, pairs;
    const char *src;
    ptrdiff_t src_head, src_token, src_channel; /* strides in bytes */
    char *dst;
    ptrdiff_t dst_head, dst_token, dst_channel;
    const int64_t *slots; /* NULL: token t goes to slot t */
    const float *cos, *sin;
    ptrdiff_t angle_stride;
    struct scales scales;
};

/* memcpy in pieces below the size from which glibc uses `rep movsb`: on Zen 3 that was measured 9 times slower when dst
   lies 16 bytes after src within the page, as an array of malloc does to an arena. Runs too long for the caches go
   whole, since there memcpy bypasses them. */
static void copy_run(char *dst, const char *src, ptrdiff_t bytes) {
    const ptrdiff_t piece = bytes < (16 << 20) ? 2048 : bytes;
    for (ptrdiff_t at = 0; at < bytes; at += piece) memcpy(dst + at, src + at, (size_t)smaller(piece, bytes - at));
}

/* Same format, nothing turns: bytes move, in runs as long as the two layouts allow. */
static void copy(const struct placing *p) {
    const char *run_src = p->src;
    char *run_dst = p->dst;
    ptrdiff_t row = p->channels * BYTES[p->to], tokens = p->tokens, run = 0;
    if (!p->slots && p->src_token == row && p->dst_token == row) row *= tokens, tokens = 1; /* a head is one run */
    for (ptrdiff_t h = 0; h < p->heads; h++)
        for (ptrdiff_t t = 0; t < tokens; t++) {
            const char *src = p->src + h * p->src_head + t * p->src_token;
            char *dst = p->dst + h * p->dst_head + (p->slots ? p->slots[t] : t) * p->dst_token;
            if (src != run_src + run || dst != run_dst + run) {
                copy_run(run_dst, run_src, run);
                run_src = src, run_dst = dst, run = 0;
            }
            run += row;
        }
    copy_run(run_dst, run_src, run);
}

/* False when there is no memory for the tiles; nothing is written then. */
static bool place(const struct level *level, const struct placing *p) {
    const ptrdiff_t from_bytes = BYTES[p->from], to_bytes = BYTES[p->to], channels = p->channels;
    const bool packed = p->from == U4;
    const bool gathered = packed || p->src_channel != from_bytes, scattered = p->dst_channel != to_bytes;
    const bool spread = p->scales.scale && p->scales.per_token;
    if (p->from == p->to && !p->pairs && !gathered && !scattered) {
        copy(p);
        return true;
    }
    const size_t tile = TILE * (size_t)channels;
    const float none = 0;
    char *src_tile = gathered ? malloc(tile * (size_t)from_bytes) : NULL;
    char *dst_tile = scattered ? malloc(tile * (size_t)to_bytes) : NULL;
    float *scale_tile = spread ? malloc(2 * tile * sizeof(float)) : NULL;
    const bool enough = (src_tile || !gathered) && (dst_tile || !scattered) && (scale_tile || !spread);

    for (ptrdiff_t h = 0; enough && h < p->heads; h++)
        for (ptrdiff_t t = 0, count; t < p->tokens; t += count) {
            struct rows rows = {
                .count = smaller(TILE, p->tokens - t), .channels = channels, .pairs = p->pairs,
                .src = p->src + h * p->src_head + t * p->src_token, .src_stride = p->src_token,
                .dst = p->dst + h * p->dst_head + (p->slots ? 0 : t * p->dst_token), .dst_stride = p->dst_token,
                .slots = p->slots ? p->slots + t : NULL,
                .cos = &none, .sin = &none, .scale = &none, .offset = &none,
            };
            if (p->pairs) {
                rows.cos = p->cos + t * p->angle_stride, rows.sin = p->sin + t * p->angle_stride;
                rows.angle_stride = p->angle_stride;
            }
            if (p->scales.scale) point_scales(&p->scales, h, t, scale_tile, &rows);
            count = rows.count;
            if (packed)
                for (ptrdiff_t k = 0; k < count; k++)
                    unpack(rows.src + k * p->src_token, src_tile + k * channels, channels / 2);
            else if (gathered) gather(src_tile, rows.src, p->src_token, p->src_channel, count, channels, from_bytes);
            if (gathered) rows.src = src_tile, rows.src_stride = channels * from_bytes;

            char *dst = rows.dst;
            if (scattered) rows.dst = dst_tile, rows.dst_stride = channels * to_bytes, rows.slots = NULL;
            level->rows[packed ? U8 : p->from][p->to][p->pairing](&rows);
            if (scattered)
                scatter(dst_tile, dst, p->dst_token, p->dst_channel, p->slots ? p->slots + t : NULL, count, channels,
                        to_bytes);
        }
    free(src_tile), free(dst_tile), free(scale_tile);
    return enough;
}

#endif
