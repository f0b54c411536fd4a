/* Native kernels behind kernels.py, which documents them and checks what callers pass.

   This file finds the machine's instruction sets and hands arrays over. It checks again whatever memory safety rests
   on, from the buffers themselves, so that no call from Python can read or write outside of them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_numbers.h"
#include "_scalar.h"
#if defined(__x86_64__)
#include <cpuid.h>

#include "_avx2.h"
#include "_avx512.h"
#elif defined(__aarch64__)
#include "_neon.h"
#endif
#include "_collect.h"
#include "_place.h"
#include "_quantise.h"

/* Getting the GIL back can take a switch interval (5 ms) while other threads run Python, so calls that are over in
   microseconds keep it. */
#define WORTH_RELEASING (64 * 1024) /* bytes written */
#define LONG_COPY (4 << 20)         /* bytes that are copied in about a millisecond, which is below that interval */

static const struct level *available[4]; /* best first, then NULL */
static const struct level *current;

#if defined(__x86_64__)
/* Which registers the operating system saves (XCR0): AVX needs bits 1 and 2, AVX-512 also 5, 6 and 7. */
static unsigned saved_registers(void) {
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}
#endif

static void detect_levels(void) {
    int count = 0;
#if defined(__x86_64__)
    unsigned basic = 0, extended = 0, unused; /* features in ecx of leaf 1 and ebx of leaf 7 */
    __get_cpuid(1, &unused, &unused, &basic, &unused);
    __get_cpuid_count(7, 0, &unused, &extended, &unused, &unused);
    unsigned saved = basic & bit_OSXSAVE ? saved_registers() : 0;
    bool f16c = basic & bit_AVX && basic & bit_F16C;
    if (f16c && extended & bit_AVX512F && (saved & 0xe6) == 0xe6) available[count++] = &level_avx512;
    if (f16c && extended & bit_AVX2 && (saved & 0x06) == 0x06) available[count++] = &level_avx2;
#elif defined(__aarch64__)
    available[count++] = &level_neon;
#endif
    available[count] = &level_scalar;
    current = available[0];
}

/* levels() -> names, best first */
static PyObject *py_levels(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *names = PyList_New(0);
    for (int i = 0; names && available[i]; i++) {
        PyObject *name = PyUnicode_FromString(available[i]->name);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

/* use(name) */
static PyObject *py_use(PyObject *self, PyObject *name) {
    (void)self;
    for (int i = 0; available[i]; i++)
        if (PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, available[i]->name)) {
            current = available[i];
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "this machine has no %R kernels", name);
}

/* ---- arguments ---- */

#define STRIDED 0
#define CONTIGUOUS 1
#define WRITABLE 2

/* Open an array of `dimensions` axes and `itemsize` bytes an item; None leaves the view empty. */
static bool open_view(PyObject *object, Py_buffer *view, const char *name, int dimensions, ptrdiff_t itemsize,
                      int how) {
    if (object == Py_None) return true;
    int flags = how & CONTIGUOUS ? PyBUF_C_CONTIGUOUS : PyBUF_STRIDES;
    if (PyObject_GetBuffer(object, view, how & WRITABLE ? flags | PyBUF_WRITABLE : flags)) return false;
    bool aligned = !(how & CONTIGUOUS) || (uintptr_t)view->buf % (uintptr_t)itemsize == 0;
    if (view->ndim == dimensions && view->itemsize == itemsize && aligned) return true;
    PyErr_Format(PyExc_ValueError, "%s: needs %d axes, %zd bytes an item, aligned", name, dimensions, itemsize);
    return false;
}

static bool has_shape(const Py_buffer *view, ptrdiff_t a, ptrdiff_t b, ptrdiff_t c) {
    return view->shape[0] == a && view->shape[1] == b && view->shape[2] == c;
}

static PyObject *refuse(Py_buffer *views, int count, const char *why) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, why);
    for (int i = 0; i < count; i++) PyBuffer_Release(&views[i]);
    return NULL;
}

static PyObject *finish(Py_buffer *views, int count, bool done) {
    for (int i = 0; i < count; i++) PyBuffer_Release(&views[i]);
    if (done) Py_RETURN_NONE;
    return PyErr_NoMemory();
}

static ptrdiff_t groups_of(ptrdiff_t items, ptrdiff_t group) { return items / group + (items % group != 0); }

/* Fill `s` from opened views of scales and (or NULL) offsets; false when their shape does not fit. */
static bool take_scales(struct scales *s, const Py_buffer *scales, const Py_buffer *offsets, ptrdiff_t heads,
                        ptrdiff_t tokens, ptrdiff_t channels) {
    if (s->group < 1) return false;
    s->rows = s->per_token ? tokens : groups_of(tokens, s->group);
    s->columns = s->per_token ? groups_of(channels, s->group) : channels;
    s->scale = scales->buf, s->offset = offsets ? offsets->buf : NULL;
    return has_shape(scales, heads, s->rows, s->columns) && (!offsets || has_shape(offsets, heads, s->rows, s->columns));
}

/* A private copy, so that no other thread can change a slot after its check. */
static int64_t *copy_slots(const Py_buffer *view, ptrdiff_t tokens, ptrdiff_t held) {
    if (view->shape[0] != tokens) {
        PyErr_Format(PyExc_ValueError, "%zd slots for %zd tokens", view->shape[0], tokens);
        return NULL;
    }
    int64_t *slots = PyMem_Malloc((size_t)tokens * sizeof *slots + 1);
    if (!slots) return (int64_t *)PyErr_NoMemory();
    memcpy(slots, view->buf, (size_t)tokens * sizeof *slots);
    for (ptrdiff_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= held) {
            PyErr_Format(PyExc_IndexError, "slot %lld of token %zd: the target has slots 0 to %zd", (long long)slots[t],
                         t, held - 1);
            PyMem_Free(slots);
            return NULL;
        }
    return slots;
}

/* ---- kernels ---- */

/* place(src, dst, slots, cos, sin, scales, offsets, from, to, pairing, per_token, group); None where absent */
static PyObject *py_place(PyObject *self, PyObject *args) {
    (void)self;
    enum { SRC, DST, SLOTS, COS, SIN, SCALES, OFFSETS, VIEWS };
    PyObject *objects[VIEWS];
    Py_buffer views[VIEWS] = {0};
    int from, to, pairing, per_token;
    struct placing p = {0};
    if (!PyArg_ParseTuple(args, "OOOOOOOiiipn", &objects[SRC], &objects[DST], &objects[SLOTS], &objects[COS],
                          &objects[SIN], &objects[SCALES], &objects[OFFSETS], &from, &to, &pairing, &per_token,
                          &p.scales.group))
        return NULL;
    if (from < 0 || from >= FORMATS || to < 0 || to >= TARGETS || pairing < 0 || pairing >= PAIRINGS)
        return refuse(views, VIEWS, "no such format or pairing");
    p.from = (enum format)from, p.to = (enum format)to, p.pairing = (enum pairing)pairing;
    p.scales.per_token = per_token;
    const bool packed = from == U4, offset = packed || from == U8;
    if (!open_view(objects[SRC], &views[SRC], "src", 3, BYTES[from], STRIDED) ||
        !open_view(objects[DST], &views[DST], "dst", 3, BYTES[to], WRITABLE) ||
        !open_view(objects[SLOTS], &views[SLOTS], "slots", 1, 8, CONTIGUOUS) ||
        !open_view(objects[COS], &views[COS], "cos", 2, 4, CONTIGUOUS) ||
        !open_view(objects[SIN], &views[SIN], "sin", 2, 4, CONTIGUOUS) ||
        !open_view(objects[SCALES], &views[SCALES], "scales", 3, 4, CONTIGUOUS) ||
        !open_view(objects[OFFSETS], &views[OFFSETS], "offsets", 3, 4, CONTIGUOUS))
        return refuse(views, VIEWS, "");

    const Py_buffer *src = &views[SRC], *dst = &views[DST], *cos = &views[COS], *sin = &views[SIN];
    if (!src->obj || !dst->obj) return refuse(views, VIEWS, "src and dst are needed");
    p.heads = dst->shape[0], p.tokens = src->shape[1], p.channels = dst->shape[2];
    if (!has_shape(src, p.heads, p.tokens, packed ? p.channels / 2 : p.channels) || (packed && p.channels % 2))
        return refuse(views, VIEWS, "src and dst differ in heads or channels");
    p.src = src->buf, p.src_head = src->strides[0], p.src_token = src->strides[1], p.src_channel = src->strides[2];
    if (src->shape[2] <= 1) p.src_channel = BYTES[from]; /* the stride of a single item says nothing */
    p.dst = dst->buf, p.dst_head = dst->strides[0], p.dst_token = dst->strides[1], p.dst_channel = dst->strides[2];
    if (cos->obj || sin->obj) {
        if (!cos->obj || !sin->obj || cos->shape[0] != sin->shape[0] || cos->shape[1] != sin->shape[1] ||
            (cos->shape[0] != 1 && cos->shape[0] != p.tokens) || cos->shape[1] > p.channels / 2)
            return refuse(views, VIEWS, "cos and sin do not fit");
        p.cos = cos->buf, p.sin = sin->buf, p.pairs = cos->shape[1];
        p.angle_stride = cos->shape[0] == 1 ? 0 : p.pairs;
    }
    if (from == I8 || offset) {
        bool strided = p.src_channel != 1 && src->shape[2] > 1 && p.heads && p.tokens;
        if (!views[SCALES].obj || offset != (views[OFFSETS].obj != NULL) || strided ||
            !take_scales(&p.scales, &views[SCALES], offset ? &views[OFFSETS] : NULL, p.heads, p.tokens, p.channels))
            return refuse(views, VIEWS, "codes, scales and offsets do not fit");
    }
    int64_t *slots = NULL;
    if (views[SLOTS].obj) {
        slots = copy_slots(&views[SLOTS], p.tokens, dst->shape[1]);
        if (!slots) return refuse(views, VIEWS, "");
        p.slots = slots;
    } else if (p.tokens > dst->shape[1])
        return refuse(views, VIEWS, "more tokens than slots");

    bool done = true;
    const struct level *level = current;
    if (p.heads * p.tokens * p.channels * BYTES[to] >= WORTH_RELEASING) {
        Py_BEGIN_ALLOW_THREADS
        done = place(level, &p);
        Py_END_ALLOW_THREADS
    } else if (p.heads && p.tokens && p.channels)
        done = place(level, &p);
    PyMem_Free(slots);
    return finish(views, VIEWS, done);
}

/* collect(sources, out, tokens, kept, first, slots or None): tokens kept.. of a block of `tokens` tokens, whose arrays lie
   one after the other in `out`, from the rows of `sources` at `first`.., or at `slots` */
static PyObject *py_collect(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *objects, *out_object, *slots_object;
    ptrdiff_t tokens, kept, first;
    if (!PyArg_ParseTuple(args, "OOnnnO", &objects, &out_object, &tokens, &kept, &first, &slots_object)) return NULL;
    if (kept < 0 || kept > tokens || first < 0 || first > PTRDIFF_MAX - tokens)
        return PyErr_Format(PyExc_ValueError, "no such tokens");
    PyObject *sources = PySequence_Fast(objects, "sources must be a sequence");
    if (!sources) return NULL;
    const ptrdiff_t count = PySequence_Fast_GET_SIZE(sources), given = tokens - kept;
    Py_buffer *views = PyMem_Calloc((size_t)count + 2, sizeof *views);
    struct collecting *each = PyMem_Calloc((size_t)count + 1, sizeof *each);
    int64_t *slots = NULL;
    bool fits = views && each;
    if (!fits) PyErr_NoMemory();
    Py_buffer *out = views, *places = views + 1;
    fits = fits && !PyObject_GetBuffer(out_object, out, PyBUF_WRITABLE) &&
           open_view(slots_object, places, "slots", 1, 8, CONTIGUOUS);
    if (fits && places->obj) fits = (slots = copy_slots(places, given, PTRDIFF_MAX)) != NULL;
    ptrdiff_t offset = 0, end = slots ? 0 : first + given; /* of the rows that are read */
    for (ptrdiff_t t = 0; slots && t < given; t++) end = slots[t] >= end ? slots[t] + 1 : end;
    for (ptrdiff_t i = 0; fits && i < count; i++) {
        Py_buffer *view = &views[i + 2];
        struct collecting *g = &each[i];
        fits = !PyObject_GetBuffer(PySequence_Fast_GET_ITEM(sources, i), view, PyBUF_STRIDES);
        if (!fits) break;
        if ((fits = view->ndim == 3)) {
            g->heads = view->shape[0], g->tokens = given, g->channels = view->shape[2], g->itemsize = view->itemsize;
            g->src_head = view->strides[0], g->src_token = view->strides[1];
            g->src_channel = g->channels > 1 ? view->strides[2] : g->itemsize;
            g->src = (char *)view->buf + (slots ? 0 : first * g->src_token);
            g->slots = slots;
            const ptrdiff_t row = g->channels * g->itemsize, room = out->len - offset;
            fits = view->shape[1] >= end && (!row || !tokens || g->heads <= room / row / tokens);
            if (!fits) break;
            g->dst = (char *)out->buf + offset + kept * row, g->dst_head = tokens * row;
            offset += g->heads * g->dst_head;
        }
    }
    if (fits) {
        PyThreadState *state = offset >= LONG_COPY ? PyEval_SaveThread() : NULL;
        for (ptrdiff_t i = 0; i < count; i++) collect(&each[i]);
        if (state) PyEval_RestoreThread(state);
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "sources, out, tokens and slots do not fit");
    for (ptrdiff_t i = 0; views && i < count + 2; i++) PyBuffer_Release(&views[i]);
    Py_DECREF(sources);
    PyMem_Free(views), PyMem_Free(each), PyMem_Free(slots);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

/* Both quantising passes: the source, then two outputs or inputs of the scales' shape, then codes or None. */
static PyObject *run_quantise(PyObject *args, bool codes_wanted) {
    enum { SRC, FIRST, SECOND, CODES, VIEWS };
    PyObject *objects[VIEWS];
    Py_buffer views[VIEWS] = {0};
    int from, per_token;
    struct quantising q = {0};
    objects[CODES] = Py_None;
    if (codes_wanted ? !PyArg_ParseTuple(args, "OOOOipn", &objects[SRC], &objects[FIRST], &objects[SECOND],
                                         &objects[CODES], &from, &per_token, &q.scales.group)
                     : !PyArg_ParseTuple(args, "OOOipn", &objects[SRC], &objects[FIRST], &objects[SECOND], &from,
                                         &per_token, &q.scales.group))
        return NULL;
    if (from < 0 || from > F32) return refuse(views, VIEWS, "no such format");
    int how = codes_wanted ? CONTIGUOUS : CONTIGUOUS | WRITABLE;
    if (!open_view(objects[SRC], &views[SRC], "src", 3, BYTES[from], STRIDED) ||
        !open_view(objects[FIRST], &views[FIRST], "scales or low", 3, 4, how) ||
        !open_view(objects[SECOND], &views[SECOND], "offsets or high", 3, 4, how) ||
        !open_view(objects[CODES], &views[CODES], "codes", 3, 1, CONTIGUOUS | WRITABLE))
        return refuse(views, VIEWS, "");
    const Py_buffer *src = &views[SRC], *second = &views[SECOND], *codes = &views[CODES];
    if (!src->obj || !views[FIRST].obj || (!codes_wanted && !second->obj) || (codes_wanted && !codes->obj))
        return refuse(views, VIEWS, "an array is missing");
    q.from = (enum format)from, q.scales.per_token = per_token;
    q.heads = src->shape[0], q.tokens = src->shape[1], q.channels = src->shape[2];
    q.src = src->buf, q.src_head = src->strides[0], q.src_token = src->strides[1], q.src_channel = src->strides[2];
    if (!take_scales(&q.scales, &views[FIRST], second->obj ? second : NULL, q.heads, q.tokens, q.channels))
        return refuse(views, VIEWS, "scales, offsets or extremes do not fit");
    if (codes_wanted) {
        const bool offset = second->obj != NULL;
        q.packed = offset && codes->shape[2] != q.channels, q.codes = codes->buf;
        q.least = offset ? 0 : -127, q.most = q.packed ? 15 : offset ? 255 : 127;
        if ((q.packed && q.channels % 2) ||
            !has_shape(codes, q.heads, q.tokens, q.packed ? q.channels / 2 : q.channels))
            return refuse(views, VIEWS, "codes do not fit");
    } else
        q.low = views[FIRST].buf, q.high = second->buf;

    bool done = true;
    const struct level *level = current;
    if (q.heads * q.tokens * q.channels >= WORTH_RELEASING) {
        Py_BEGIN_ALLOW_THREADS
        done = quantise(level, &q);
        Py_END_ALLOW_THREADS
    } else if (q.heads && q.tokens && q.channels)
        done = quantise(level, &q);
    return finish(views, VIEWS, done);
}

/* extremes(src, low, high, from, per_token, group): low and high float32, written */
static PyObject *py_extremes(PyObject *self, PyObject *args) {
    (void)self;
    return run_quantise(args, false);
}

/* encode(src, scales, offsets or None, codes, from, per_token, group): without offsets signed bytes; with them bytes,
   or 4 bits where codes are half as wide */
static PyObject *py_encode(PyObject *self, PyObject *args) {
    (void)self;
    return run_quantise(args, true);
}

/* Items <-> planes: the same bytes in another order, so both arrays have count * itemsize bytes. */
static PyObject *run_planes(PyObject *args, bool split) {
    PyObject *from, *to;
    Py_buffer views[2] = {0};
    int itemsize;
    if (!PyArg_ParseTuple(args, "OOi", &from, &to, &itemsize)) return NULL;
    if (itemsize != 2 && itemsize != 4) return refuse(views, 2, "itemsize is 2 or 4");
    if (PyObject_GetBuffer(from, &views[0], PyBUF_SIMPLE) || PyObject_GetBuffer(to, &views[1], PyBUF_WRITABLE))
        return refuse(views, 2, "");
    if (views[0].len != views[1].len || views[0].len % itemsize) return refuse(views, 2, "sizes do not fit");
    const struct level *level = current;
    ptrdiff_t count = views[0].len / itemsize;
    void (*run)(const char *, char *, ptrdiff_t) = (split ? level->split : level->join)[itemsize / 4];
    if (views[0].len >= WORTH_RELEASING) {
        Py_BEGIN_ALLOW_THREADS
        run(views[0].buf, views[1].buf, count);
        Py_END_ALLOW_THREADS
    } else if (count)
        run(views[0].buf, views[1].buf, count);
    return finish(views, 2, true);
}

/* split(items, planes, itemsize) */
static PyObject *py_split(PyObject *self, PyObject *args) {
    (void)self;
    return run_planes(args, true);
}

/* join(planes, items, itemsize) */
static PyObject *py_join(PyObject *self, PyObject *args) {
    (void)self;
    return run_planes(args, false);
}

static PyMethodDef methods[] = {
    {"levels", py_levels, METH_NOARGS, NULL},   {"use", py_use, METH_O, NULL},
    {"place", py_place, METH_VARARGS, NULL},    {"extremes", py_extremes, METH_VARARGS, NULL},
    {"encode", py_encode, METH_VARARGS, NULL},  {"split", py_split, METH_VARARGS, NULL},
    {"join", py_join, METH_VARARGS, NULL},      {"collect", py_collect, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernels", "Native kernels; called through kernels.py.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) {
    detect_levels();
    return PyModule_Create(&module);
}
