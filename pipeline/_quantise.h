/* Quantise in two passes, between which kernels.py chooses the scales: the extremes of each group, then codes. */
#ifndef KVSTORE_QUANTISE_H
#define KVSTORE_QUANTISE_H

#include <stdlib.h>

#include "_tiles.h"

struct quantising {
    enum format from;
    ptrdiff_t heads, tokens, channels;
    const char *src;
    ptrdiff_t src_head, src_token, src_channel; /* strides in bytes */
    struct scales scales;                       /* extremes: only its shape is used */
    int32_t *low, *high;                        /* extremes: where they go, [heads, rows, columns] */
    char *codes;                                /* codes: where they go, [heads, tokens, channels] or half as many */
    float least, most;                          /* codes: their limits */
    bool packed;
};

/* Tokens t ... of head h as floats, channels side by side; rows->count of them. */
static void read_floats(const struct level *level, const struct quantising *q, ptrdiff_t h, ptrdiff_t t,
                        char *src_tile, float *floats, struct rows *rows) {
    static const float none = 0;
    const ptrdiff_t bytes = BYTES[q->from];
    *rows = (struct rows){
        .count = smaller(TILE, q->tokens - t), .channels = q->channels,
        .src = q->src + h * q->src_head + t * q->src_token, .src_stride = q->src_token,
        .dst = (char *)floats, .dst_stride = q->channels * (ptrdiff_t)sizeof(float),
        .cos = &none, .sin = &none, .scale = &none, .offset = &none,
    };
    if (q->src_channel != bytes) {
        gather(src_tile, rows->src, q->src_token, q->src_channel, rows->count, q->channels, bytes);
        rows->src = src_tile, rows->src_stride = q->channels * bytes;
    }
    level->rows[q->from][F32][HALF](rows);
}

static void find_extremes(const struct level *level, const struct quantising *q, char *src_tile, float *floats) {
    const struct scales *s = &q->scales;
    const ptrdiff_t groups = q->heads * s->rows * s->columns;
    for (ptrdiff_t i = 0; i < groups; i++) q->low[i] = INT32_MAX, q->high[i] = INT32_MIN;
    for (ptrdiff_t h = 0; h < q->heads; h++)
        for (ptrdiff_t t = 0; t < q->tokens; t += TILE) {
            struct rows rows;
            read_floats(level, q, h, t, src_tile, floats, &rows);
            for (ptrdiff_t k = 0; k < rows.count; k++) {
                ptrdiff_t at = (h * s->rows + (s->per_token ? t + k : (t + k) / s->group)) * s->columns;
                level->extremes(floats + k * q->channels, q->channels, s->per_token ? s->group : 1, q->low + at,
                                q->high + at);
            }
        }
    for (ptrdiff_t i = 0; i < groups; i++) q->low[i] = ordered(q->low[i]), q->high[i] = ordered(q->high[i]);
}

static void write_codes(const struct level *level, const struct quantising *q, char *src_tile, float *floats,
                        float *scale_tile, char *code_row) {
    const ptrdiff_t channels = q->channels, row_bytes = q->packed ? channels / 2 : channels;
    for (ptrdiff_t h = 0; h < q->heads; h++)
        for (ptrdiff_t t = 0, count; t < q->tokens; t += count) {
            struct rows rows;
            read_floats(level, q, h, t, src_tile, floats, &rows);
            point_scales(&q->scales, h, t, scale_tile, &rows);
            count = rows.count;
            for (ptrdiff_t k = 0; k < count; k++) {
                char *codes = q->codes + (h * q->tokens + t + k) * row_bytes;
                ptrdiff_t at = k * rows.scale_stride;
                level->encode(floats + k * channels, rows.scale + at, q->scales.offset ? rows.offset + at : NULL,
                              channels, q->least, q->most, (int8_t *)(q->packed ? code_row : codes));
                if (q->packed) pack(code_row, codes, row_bytes);
            }
        }
}

/* Extremes when q->low is set, else codes. False when there is no memory for the tiles; nothing is written then. */
static bool quantise(const struct level *level, const struct quantising *q) {
    const size_t tile = TILE * (size_t)q->channels;
    char *src_tile = malloc(tile * (size_t)BYTES[q->from] + 1);
    float *floats = malloc(tile * sizeof(float) + 1);
    float *scale_tile = malloc(2 * tile * sizeof(float) + 1);
    char *code_row = malloc((size_t)q->channels + 1);
    const bool enough = src_tile && floats && scale_tile && code_row;
    if (enough && q->low) find_extremes(level, q, src_tile, floats);
    else if (enough) write_codes(level, q, src_tile, floats, scale_tile, code_row);
    free(src_tile), free(floats), free(scale_tile), free(code_row);
    return enough;
}

#endif
