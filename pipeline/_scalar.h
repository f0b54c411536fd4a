/* Plain C: one float at a time, and whatever the compiler makes of it for the machine's baseline. */
#define LEVEL(name) name##_scalar
#define LEVEL_NAME "scalar"
#define TARGET
#define VECTOR float
#define WIDTH 1

INLINE float load_scalar(int from, const char *row, ptrdiff_t i, const float *scale, const float *offset) {
    return read_channel(from, row, i, scale, offset);
}
INLINE void store_scalar(int to, char *row, ptrdiff_t i, float value) { write_channel(to, row, i, value); }
INLINE float mul_scalar(float a, float b) { return a * b; }
INLINE float add_scalar(float a, float b) { return a + b; }
INLINE float sub_scalar(float a, float b) { return a - b; }
INLINE void deinterleave_scalar(float v0, float v1, float *even, float *odd) { *even = v0, *odd = v1; }
INLINE void interleave_scalar(float even, float odd, float *v0, float *v1) { *v0 = even, *v1 = odd; }

#include "_template.h"
