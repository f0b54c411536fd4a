/* Collect: tokens of one array, wherever they lie, become rows one behind the other. */
#ifndef KVSTORE_COLLECT_H
#define KVSTORE_COLLECT_H

#include "_place.h"
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

struct collecting {
    const char *src;
    ptrdiff_t src_head, src_token, src_channel; /* strides in bytes */
    char *dst;
    ptrdiff_t dst_head;
    ptrdiff_t heads, tokens, channels, itemsize;
    const int64_t *slots; /* NULL: token t is row t */
};

/* Past the caches: neither side was or will be there, so it saves reading the lines that are about to be written. */
static void stream_run(char *dst, const char *src, ptrdiff_t bytes) {
#if defined(__x86_64__)
    const ptrdiff_t ragged = smaller(bytes, -(intptr_t)dst & 63);
    memcpy(dst, src, (size_t)ragged);
    dst += ragged, src += ragged, bytes -= ragged;
    for (; bytes >= 64; dst += 64, src += 64, bytes -= 64) {
        _mm_prefetch(src + 1024, _MM_HINT_NTA);
        __m128i line[4];
        memcpy(line, src, sizeof line);
        for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i *)dst + i, line[i]);
    }
#endif
    copy_run(dst, src, bytes);
}

static void collect(const struct collecting *c) {
    const ptrdiff_t row = c->channels * c->itemsize;
    const bool whole_rows = c->src_channel == c->itemsize;
    for (ptrdiff_t h = 0; h < c->heads; h++) {
        const char *src = c->src + h * c->src_head;
        char *dst = c->dst + h * c->dst_head;
        if (!c->slots && whole_rows && c->src_token == row) {
            stream_run(dst, src, c->tokens * row);
            continue;
        }
        for (ptrdiff_t t = 0; t < c->tokens; t++, dst += row) {
            const char *from = src + (c->slots ? c->slots[t] : t) * c->src_token;
            if (whole_rows)
                memcpy(dst, from, (size_t)row);
            else
                for (ptrdiff_t i = 0; i < c->channels; i++)
                    memcpy(dst + i * c->itemsize, from + i * c->src_channel, (size_t)c->itemsize);
        }
    }
#if defined(__x86_64__)
    _mm_sfence(); /* who is told that the rows are there finds them there */
#endif
}

#endif
