/*
 * opjit_convert.c - opjit_convert() of opjit_convert.h.
 *
 * A row is converted in blocks that stay in the L1 cache, by loops over contiguous elements, which the compiler
 * vectorizes. Between two dtypes are up to three loops: small dtypes are loaded as a wide one, int32, int64, float32 or
 * float64, which is changed into the wide dtype of the other side, from which elements are stored. A strided block is
 * gathered first.
 */
#define OPJIT_PLACE NULL, 0 /* an author gets the place of the call */
#include "opjit_convert.h"

#define EACH(i_) for (int64_t i_ = 0; i_ < n; i_++)

/* ---------------------------------------------------------------------------------------------- */
/* Copies                                                                                         */

typedef struct word128 {
    uint64_t half[2];
} word128;

/* Copy an element n times: copy the filled part again until it fills the row. */
static void repeat(int64_t n, const void *from, size_t bytes, void *to)
{
    const size_t all = (size_t)n * bytes;
    if (n > 0)
        memcpy(to, from, bytes);
    for (size_t done = bytes; done < all; done *= 2)
        memcpy((char *)to + done, to, done < all - done ? done : all - done);
}

static void gather(int64_t n, const void *from, int64_t stride, size_t bytes, void *to)
{
#define GATHER(type_) \
    do { \
        typedef type_ one __attribute__((may_alias)); \
        typedef type_ four __attribute__((vector_size(4 * sizeof(type_)), aligned(sizeof(type_)), may_alias)); \
        const one *f = (const one *)from; \
        one *t = (one *)to; \
        for (; n >= 4; n -= 4, f += 4 * stride, t += 4) \
            *(four *)t = (four){f[0], f[stride], f[2 * stride], f[3 * stride]}; \
        EACH(i) \
            t[i] = f[i * stride]; \
    } while (0)
    if (stride == 1)
        memcpy(to, from, (size_t)n * bytes);
    else if (stride == 0)
        repeat(n, from, bytes, to);
    else if (bytes == 1)
        GATHER(uint8_t);
    else if (bytes == 2)
        GATHER(uint16_t);
    else if (bytes == 4)
        GATHER(uint32_t);
    else if (bytes == 8)
        GATHER(uint64_t);
    else
        EACH(i)
            ((word128 *)to)[i] = ((const word128 *)from)[i * stride];
}

/* ---------------------------------------------------------------------------------------------- */
/* Loops                                                                                          */

typedef void loop(int64_t n, const void *from, void *restrict to);

#define LOOP(name_, from_, to_, value_) \
    static void name_(int64_t n, const void *from, void *restrict to) \
    { \
        const from_ *f = (const from_ *)from; \
        to_ *t = (to_ *)to; \
        EACH(i) \
            t[i] = value_; \
    }

#define CAST(name_, from_, to_) LOOP(name_, from_, to_, (to_)f[i])

CAST(load_uint8, uint8_t, int32_t)
CAST(load_int8, int8_t, int32_t)
CAST(load_uint16, uint16_t, int32_t)
CAST(load_int16, int16_t, int32_t)
CAST(load_uint32, uint32_t, int64_t)
LOOP(load_bfloat16, opjit_bfloat16, float, opjit_bfloat16_to_float(f[i]))
LOOP(load_float8_e4m3fn, opjit_float8_e4m3fn, float, opjit_load(f + i))
LOOP(load_float8_e5m2, opjit_float8_e5m2, float, opjit_load(f + i))

CAST(store_8, int32_t, uint8_t)
CAST(store_16, int32_t, uint16_t)
CAST(store_32, int64_t, uint32_t)
LOOP(store_bfloat16, float, opjit_bfloat16, opjit_float_to_bfloat16(f[i]))
LOOP(store_float8_e4m3fn, float, opjit_float8_e4m3fn, opjit_float_to_float8_e4m3fn(f[i]))
LOOP(store_float8_e5m2, float, opjit_float8_e5m2, opjit_float_to_float8_e5m2(f[i]))

CAST(uint8_to_int16, uint8_t, int16_t)
CAST(int8_to_int16, int8_t, int16_t)
CAST(int32_to_int64, int32_t, int64_t)
CAST(int32_to_float32, int32_t, float)
CAST(int32_to_float64, int32_t, double)
CAST(int64_to_int32, int64_t, int32_t)
CAST(int64_to_float32, int64_t, float)
CAST(int64_to_float64, int64_t, double)
CAST(float32_to_float64, float, double)
CAST(float64_to_float32, double, float)

static void load_float16(int64_t n, const void *from, void *to)
{
    const opjit_half *f = (const opjit_half *)from;
    float *t = (float *)to;
    for (; n >= 8; n -= 8, f += 8, t += 8)
        opjit_load_halves(f, t);
    EACH(i)
        t[i] = opjit_half_to_float(f[i]);
}

static void store_float16(int64_t n, const void *from, void *to)
{
    const float *f = (const float *)from;
    opjit_half *t = (opjit_half *)to;
    for (; n >= 8; n -= 8, f += 8, t += 8)
        opjit_store_halves(t, f);
    EACH(i)
        t[i] = opjit_float_to_half(f[i]);
}

/* ---------------------------------------------------------------------------------------------- */
/* Any dtypes                                                                                     */

#define BLOCK 512 /* elements */

/* How elements of a dtype become elements of its wide dtype and back; no loop if it is wide itself. */
typedef struct way {
    opjit_dtype wide;
    loop *load, *store;
} way;

static const way ways[] = {
    [OPJIT_BOOL] = {OPJIT_INT32, load_uint8, NULL},
    [OPJIT_UINT8] = {OPJIT_INT32, load_uint8, store_8},
    [OPJIT_INT8] = {OPJIT_INT32, load_int8, store_8},
    [OPJIT_INT16] = {OPJIT_INT32, load_int16, store_16},
    [OPJIT_UINT16] = {OPJIT_INT32, load_uint16, store_16},
    [OPJIT_INT32] = {OPJIT_INT32, NULL, NULL},
    [OPJIT_UINT32] = {OPJIT_INT64, load_uint32, store_32},
    [OPJIT_INT64] = {OPJIT_INT64, NULL, NULL},
    [OPJIT_UINT64] = {OPJIT_INT64, NULL, NULL},
    [OPJIT_FLOAT8_E4M3FN] = {OPJIT_FLOAT32, load_float8_e4m3fn, store_float8_e4m3fn},
    [OPJIT_FLOAT8_E5M2] = {OPJIT_FLOAT32, load_float8_e5m2, store_float8_e5m2},
    [OPJIT_FLOAT16] = {OPJIT_FLOAT32, load_float16, store_float16},
    [OPJIT_BFLOAT16] = {OPJIT_FLOAT32, load_bfloat16, store_bfloat16},
    [OPJIT_FLOAT32] = {OPJIT_FLOAT32, NULL, NULL},
    [OPJIT_FLOAT64] = {OPJIT_FLOAT64, NULL, NULL},
};

/* From one wide dtype to another; NULL if they are equal. */
static loop *change_of(opjit_dtype from, opjit_dtype to)
{
    if (from == to)
        return NULL;
    switch (from) {
    case OPJIT_INT32:
        return to == OPJIT_INT64 ? int32_to_int64 : to == OPJIT_FLOAT32 ? int32_to_float32 : int32_to_float64;
    case OPJIT_INT64:
        return to == OPJIT_INT32 ? int64_to_int32 : to == OPJIT_FLOAT32 ? int64_to_float32 : int64_to_float64;
    case OPJIT_FLOAT32: return float32_to_float64;
    default: return float64_to_float32;
    }
}

/* From a dtype of one byte to int16, without a wide dtype between them; NULL for other dtypes. */
static loop *widening_of(opjit_dtype from, opjit_dtype to)
{
    if (to != OPJIT_INT16)
        return NULL;
    switch (from) {
    case OPJIT_BOOL:
    case OPJIT_UINT8: return uint8_to_int16;
    case OPJIT_INT8: return int8_to_int16;
    default: return NULL;
    }
}

static bool has_loops(opjit_dtype from, opjit_dtype to)
{
    if (opjit_is_integral(to))
        return opjit_is_integral(from) && to != OPJIT_BOOL;
    return from <= OPJIT_FLOAT64 && to <= OPJIT_FLOAT64 && from != OPJIT_UINT64;
}

/* Integers of floating numbers, true of any number, and floating numbers of uint64. */
static void convert_each(int64_t n, const void *from, opjit_dtype from_dtype, void *to, opjit_dtype to_dtype)
{
    if (to_dtype == OPJIT_FLOAT64)
        EACH(i)
            ((double *)to)[i] = opjit_load_double(from, i, from_dtype);
    else if (!opjit_is_integral(to_dtype))
        EACH(i)
            opjit_store_float(to, i, to_dtype, opjit_load_float(from, i, from_dtype));
    else if (opjit_is_integral(from_dtype))
        EACH(i)
            opjit_store_int64(to, i, to_dtype, opjit_load_int64(from, i, from_dtype));
    else
        EACH(i)
            opjit_store_int64(to, i, to_dtype, opjit_integer_of(opjit_load_double(from, i, from_dtype), to_dtype));
}

/* At most BLOCK contiguous elements. */
static void convert_block(int64_t n, const void *from, opjit_dtype from_dtype, void *to, opjit_dtype to_dtype)
{
    loop *const widen = widening_of(from_dtype, to_dtype);
    if (widen) {
        widen(n, from, to);
        return;
    }
    if (!has_loops(from_dtype, to_dtype)) {
        convert_each(n, from, from_dtype, to, to_dtype);
        return;
    }

    const way *first = &ways[from_dtype], *last = &ways[to_dtype];
    loop *const load = first->load, *const change = change_of(first->wide, last->wide), *const store = last->store;
    uint64_t loaded[BLOCK], changed[BLOCK];
    if (load) {
        void *next = change || store ? loaded : to;
        load(n, from, next);
        from = next;
    }
    if (change) {
        void *next = store ? changed : to;
        change(n, from, next);
        from = next;
    }
    if (store)
        store(n, from, to);
}

void opjit_convert(int64_t n, const void *from, opjit_dtype from_dtype, int64_t stride, void *to, opjit_dtype to_dtype)
{
    const size_t bytes = opjit_dtype_size(from_dtype), to_bytes = opjit_dtype_size(to_dtype);
    word128 gathered[BLOCK];
    if (opjit_has_same_bits(from_dtype, to_dtype)) {
        gather(n, from, stride, bytes, to);
        return;
    }
    if (stride == 0 && n > 1) {
        convert_block(1, from, from_dtype, gathered, to_dtype);
        repeat(n, gathered, to_bytes, to);
        return;
    }

    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t part = n - i < BLOCK ? n - i : BLOCK;
        const void *block = (const char *)from + i * stride * (int64_t)bytes;
        if (stride != 1) {
            gather(part, block, stride, bytes, gathered);
            block = gathered;
        }
        convert_block(part, block, from_dtype, (char *)to + i * (int64_t)to_bytes, to_dtype);
    }
}
