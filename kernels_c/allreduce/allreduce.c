/*
 * allreduce on the CPU: the sum of all elements of a tensor, with torch.sum's dtype rules.
 *
 * The elements, in memory order, are cut into chunks whose length depends on their number alone. Threads sum
 * chunks; the chunks' totals are added in order. So the result does not depend on the number of threads.
 *
 * A chunk is read in blocks of STEPS steps, a step being 8 vectors. Within a block each lane of each vector
 * has an accumulator of its own, which is what makes the sum fast (nothing waits for anything) and exact:
 *   float16, bfloat16, float32  float lanes that add at most 64 elements each, then double
 *   float64                     double lanes; blocks are added with Knuth's TwoSum, which loses nothing
 *   8, 16 and 32-bit integers   lanes of twice the width hold two elements each. Adding a lane as it is and
 *                               its upper half apart gives both sums, with three instructions for 64 bytes
 *                               and without unpacking. Signed ones are shifted into the unsigned range by
 *                               flipping the sign bit, and back at the end by a subtraction.
 *   64-bit integers             lanes that wrap around, as torch's do
 *
 * torch.sum converts each element to the result's dtype before adding. Where that conversion is exact the sum
 * is converted instead. Else, and where elements do not lie side by side, pieces of 1024 elements are gathered
 * and converted into a buffer that stays in the first cache, and summed from there.
 *
 * Layout of this file: vectors, totals, kernels, elements that are not summed in place, chunks, entry.
 */
#include "opjit.h"

/* ---------------------------------------------------------------------------------------------- */
/* Vectors                                                                                        */

/* One hardware register each: wider types would be split and spilled. */
#if defined __AVX512F__
#define VECTOR 64
#elif defined __AVX__
#define VECTOR 32
#else
#define VECTOR 16
#endif

#define STEP (8 * VECTOR) /* bytes */
#define STEPS (VECTOR == 64 ? 32 : 64)
#define VECTOR_OF(type_) type_ __attribute__((vector_size(VECTOR), may_alias))

typedef VECTOR_OF(uint16_t) u16s;
typedef VECTOR_OF(uint32_t) u32s;
typedef VECTOR_OF(uint64_t) u64s;
typedef VECTOR_OF(float) floats;
typedef VECTOR_OF(double) doubles;
typedef float half_floats __attribute__((vector_size(VECTOR / 2), may_alias)); /* half as many */

/* The same in memory, at any address. */
typedef u16s u16s_at __attribute__((aligned(1)));
typedef u32s u32s_at __attribute__((aligned(1)));
typedef u64s u64s_at __attribute__((aligned(1)));
typedef floats floats_at __attribute__((aligned(1)));
typedef doubles doubles_at __attribute__((aligned(1)));

/* ---------------------------------------------------------------------------------------------- */
/* Totals                                                                                         */

typedef struct total {
    uint64_t integer; /* modulo 2^64 */
    double sum, rest; /* sum + rest is the total; rest is what rounding took from sum */
} total;

/* TwoSum (Knuth, The Art of Computer Programming 2, section 4.2.2), for numbers and for vectors. */
#define ADD_EXACTLY(type_, sum_, rest_, value_) \
    do { \
        type_ value = (value_), before = (sum_), after = before + value, added = after - before; \
        (sum_) = after; \
        (rest_) += (before - (after - added)) + (value - added); \
    } while (0)

static void total_add(total *to, const total *from)
{
    to->integer += from->integer;
    ADD_EXACTLY(double, to->sum, to->rest, from->sum);
    to->rest += from->rest;
}

/* With infinities or NaN in the sum the rest means nothing. */
static double total_real(const total *t)
{
    return t->rest - t->rest == 0 ? t->sum + t->rest : t->sum;
}

/* ---------------------------------------------------------------------------------------------- */
/* Kernels                                                                                        */

/*
 * A kernel adds `bytes` bytes of elements to a total. `flip` has the sign bits of all elements of a word set
 * when they are signed integers of less than 64 bits; else it is 0.
 */
typedef void kernel(const unsigned char *from, size_t bytes, uint64_t flip, total *to);

typedef struct reader {
    const unsigned char *from, *block;
    size_t bytes;
    unsigned char last[STEP]; /* what does not fill a step, filled up with zeros */
} reader;

/* The number of steps in the next block, which r->block then points to; 0 at the end. */
static size_t next_block(reader *r)
{
    size_t steps = r->bytes / STEP;
    if (steps == 0 && r->bytes > 0) {
        memset(r->last, 0, sizeof r->last);
        memcpy(r->last, r->from, r->bytes);
        r->block = r->last;
        r->bytes = 0;
        return 1;
    }
    steps = steps < STEPS ? steps : STEPS;
    r->block = r->from;
    r->from += steps * STEP;
    r->bytes -= steps * STEP;
    return steps;
}

typedef struct lanes {
    u64s integer;
    doubles sum, rest;
} lanes;

/* add_ adds the k-th vector of the step at `at` to the accumulators `a`; fold_ brings those into the lanes. */
#define KERNEL(name_, vector_, add_, fold_) \
    static void name_(const unsigned char *from, size_t bytes, uint64_t flip, total *to) \
    { \
        reader r = {.from = from, .bytes = bytes}; \
        lanes l = {{0}, {0}, {0}}; \
        OPJIT_UNUSED const u64s flips = (u64s){0} + flip; \
        for (size_t steps; (steps = next_block(&r)) > 0;) { \
            vector_ a[8] = {{0}}; \
            for (const unsigned char *at = r.block; steps > 0; steps--, at += STEP) \
                for (int k = 0; k < 8; k++) { \
                    add_; \
                } \
            fold_(&l, a); \
        } \
        for (size_t i = 0; i < VECTOR / sizeof(double); i++) \
            total_add(to, &(total){l.integer[i], l.sum[i], l.rest[i]}); \
    }

#define VECTOR_AT(vector_) (*(const vector_ *)(const void *)(at + k * VECTOR))

static inline void fold_doubles(lanes *l, const doubles *a)
{
    ADD_EXACTLY(doubles, l->sum, l->rest, ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])));
}

static inline void fold_floats(lanes *l, const floats *a)
{
    union {
        floats all;
        half_floats half[2];
    } sum = {((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))};
    ADD_EXACTLY(doubles, l->sum, l->rest,
                __builtin_convertvector(sum.half[0], doubles) + __builtin_convertvector(sum.half[1], doubles));
}

KERNEL(sum_float64, doubles, a[k] += VECTOR_AT(doubles_at), fold_doubles)
KERNEL(sum_float32, floats, a[k] += VECTOR_AT(floats_at), fold_floats)

/* A bfloat16 is the upper half of a float: one word holds two. */
#define ADD_BFLOAT16S \
    u32s pairs = VECTOR_AT(u32s_at); \
    a[k] += (floats)(pairs << 16); \
    a[k] += (floats)(pairs & 0xffff0000u)

KERNEL(sum_bfloat16, floats, ADD_BFLOAT16S, fold_floats)

/* float16: the hardware converts half a vector; without it, exponent and fraction move into their float places. */
#if defined __AVX512F__ || defined __F16C__
typedef short halfs __attribute__((vector_size(VECTOR / 2), may_alias));
typedef halfs halfs_at __attribute__((aligned(1)));
#ifdef __AVX512F__
#define FLOATS_OF(halfs_) ((floats)__builtin_ia32_vcvtph2ps512_mask(halfs_, (floats){0}, (short)-1, 4))
#else
#define FLOATS_OF(halfs_) ((floats)__builtin_ia32_vcvtph2ps256(halfs_))
#endif
#define ADD_FLOAT16S \
    const halfs_at *pair = (const halfs_at *)(const void *)(at + k * VECTOR); \
    a[k] += FLOATS_OF(pair[0]); \
    a[k] += FLOATS_OF(pair[1])
#else
/* Each word holds a float16 in its upper half. */
static inline floats floats_of_upper(u32s words)
{
    u32s rest = (words & 0x7fff0000u) >> 3, special = (u32s)(rest >= 0x7c00u << 13); /* infinity, NaN */
    floats scaled = (floats)rest * 0x1p112f; /* the exponent's bias grows by 112; subnormals become normal */
    return (floats)((u32s)scaled | (words & 0x80000000u) | (special & 0x7f800000u));
}
#define ADD_FLOAT16S \
    u32s pairs = VECTOR_AT(u32s_at); \
    a[k] += floats_of_upper(pairs); \
    a[k] += floats_of_upper(pairs << 16)
#endif

KERNEL(sum_float16, floats, ADD_FLOAT16S, fold_floats)

static inline void fold_u64s(lanes *l, const u64s *a)
{
    l->integer += ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
}

static inline void fold_u32s(lanes *l, const u32s *a)
{
    for (int k = 0; k < 8; k++)
        l->integer += ((u64s)a[k] & UINT32_MAX) + ((u64s)a[k] >> 32);
}

static inline void fold_u16s(lanes *l, const u16s *a)
{
    u32s sums[8];
    for (int k = 0; k < 8; k++)
        sums[k] = ((u32s)a[k] & UINT16_MAX) + ((u32s)a[k] >> 16);
    fold_u32s(l, sums);
}

KERNEL(sum_64, u64s, a[k] += VECTOR_AT(u64s_at), fold_u64s)

/*
 * Two elements of bits_ bits in a lane of twice the width: the even accumulators add both, the odd ones the upper
 * one, so that even - (odd << bits_) is the sum of the lower ones. A lane takes 257 elements of 8 bits without
 * an overflow, and gets 128.
 */
#define KERNEL_PAIRS(bits_, vector_) \
    static inline void fold_pairs_##bits_(lanes *l, vector_ *a) \
    { \
        for (int k = 0; k < 8; k += 2) \
            a[k] -= a[k + 1] << bits_; \
        fold_##vector_(l, a); \
    } \
    KERNEL(sum_pairs_##bits_, vector_, \
           const vector_ pairs = VECTOR_AT(vector_##_at) ^ (vector_)flips; \
           a[k & 6] += pairs; \
           a[k | 1] += pairs >> bits_, fold_pairs_##bits_) \
    static void sum_##bits_(const unsigned char *from, size_t bytes, uint64_t flip, total *to) \
    { \
        to->integer -= (flip >> (64 - bits_)) * ((bytes + STEP - 1) / STEP * (STEP * 8 / bits_)); \
        sum_pairs_##bits_(from, bytes, flip, to); \
    }

KERNEL_PAIRS(8, u16s)
KERNEL_PAIRS(16, u32s)
KERNEL_PAIRS(32, u64s)

/* By dtype. */
static const struct {
    kernel *sum;
    uint64_t flip;
    int digits; /* of the dtype's whole numbers, in bits */
} kinds[] = {
    [OPJIT_BOOL] = {sum_8, 0, 1},
    [OPJIT_UINT8] = {sum_8, 0, 8},
    [OPJIT_INT8] = {sum_8, UINT64_C(0x8080808080808080), 8},
    [OPJIT_INT16] = {sum_16, UINT64_C(0x8000800080008000), 16},
    [OPJIT_INT32] = {sum_32, UINT64_C(0x8000000080000000), 32},
    [OPJIT_INT64] = {sum_64, 0, 64},
    [OPJIT_UINT16] = {sum_16, 0, 16},
    [OPJIT_UINT32] = {sum_32, 0, 32},
    [OPJIT_UINT64] = {sum_64, 0, 64},
    [OPJIT_FLOAT16] = {sum_float16, 0, 11},
    [OPJIT_BFLOAT16] = {sum_bfloat16, 0, 8},
    [OPJIT_FLOAT32] = {sum_float32, 0, 24},
    [OPJIT_FLOAT64] = {sum_float64, 0, 53},
};

/* ---------------------------------------------------------------------------------------------- */
/* Elements that are not summed in place                                                          */

#define PIECE 1024 /* elements */

typedef union piece {
    uint64_t integers[PIECE];
    float floats[PIECE];
    double doubles[PIECE];
    unsigned char bytes[PIECE * 8];
} piece;

/* Copy `n` elements that lie `stride` elements apart. */
static void copy_run(unsigned char *to, const unsigned char *from, int64_t n, int64_t stride, size_t size)
{
#define COPY_RUN(size_, type_) \
    case size_: \
        for (int64_t i = 0; i < n; i++) \
            ((type_ *)(void *)to)[i] = ((const type_ *)(const void *)from)[i * stride]; \
        break;
    switch (stride == 1 ? 0 : size) {
        COPY_RUN(1, uint8_t)
        COPY_RUN(2, uint16_t)
        COPY_RUN(4, uint32_t)
        COPY_RUN(8, uint64_t)
    default: memcpy(to, from, (size_t)n * size);
    }
}

/* `n` elements from number `index` on, side by side: where they lie, or copied to `buffer`. */
static const unsigned char *gather(const opjit_layout *layout, const unsigned char *data, size_t size, int64_t index,
                                   int64_t n, piece *buffer)
{
    int64_t at[OPJIT_MAX_DIM], inner = layout->dim - 1, stride = layout->strides[inner], done = 0;
    const unsigned char *from = data;
    for (int64_t d = inner; d >= 0; d--) {
        at[d] = index % layout->sizes[d];
        index /= layout->sizes[d];
        from += at[d] * layout->strides[d] * (int64_t)size;
    }
    if (stride == 1 && layout->sizes[inner] - at[inner] >= n)
        return from;
    for (;;) {
        int64_t run = layout->sizes[inner] - at[inner];
        run = run < n - done ? run : n - done;
        copy_run(buffer->bytes + (size_t)done * size, from, run, stride, size);
        done += run;
        if (done == n)
            return buffer->bytes;
        from -= at[inner] * stride * (int64_t)size; /* to the start of the next row */
        at[inner] = 0;
        for (int64_t d = inner - 1; d >= 0; d--) {
            from += layout->strides[d] * (int64_t)size;
            if (++at[d] < layout->sizes[d])
                break;
            from -= at[d] * layout->strides[d] * (int64_t)size;
            at[d] = 0;
        }
    }
}

/* A real number as an integer `result`: cut off; what does not fit gives the number that x86 gives, as in torch. */
static inline uint64_t integer_of(double value, opjit_dtype result)
{
    double limit = result == OPJIT_INT32 ? 0x1p31 : result == OPJIT_UINT64 ? 0x1p64 : 0x1p63;
    if (!(value > -0x1p63 && value < limit))
        return result == OPJIT_INT32 ? UINT64_C(1) << 31 : UINT64_C(1) << 63;
    return value < 0x1p63 ? (uint64_t)(int64_t)value : (uint64_t)value;
}

/* Round to the half precision `result`. */
static inline float rounded(float value, opjit_dtype result)
{
    return result == OPJIT_FLOAT16    ? opjit_half_to_float(opjit_float_to_half(value))
           : result == OPJIT_BFLOAT16 ? opjit_bfloat16_to_float(opjit_float_to_bfloat16(value))
                                      : value;
}

/*
 * Convert `n` elements at `from` to `result`, as the dtype that they are summed in: int64 for every integer
 * and bool, float64, and float32 for the other floating dtypes.
 */
static opjit_status convert(const void *from, opjit_dtype dtype, opjit_dtype result, int64_t n, piece *to)
{
#define CONVERT(load_, integer_) \
    const scalar_t *elements = (const scalar_t *)from; \
    if (result == OPJIT_BOOL) \
        for (int64_t i = 0; i < n; i++) \
            to->integers[i] = load_ != 0; \
    else if (result == OPJIT_FLOAT64) \
        for (int64_t i = 0; i < n; i++) \
            to->doubles[i] = (double)load_; \
    else if (result == OPJIT_FLOAT32) \
        for (int64_t i = 0; i < n; i++) \
            to->floats[i] = (float)load_; \
    else if (opjit_is_floating(result)) \
        for (int64_t i = 0; i < n; i++) \
            to->floats[i] = rounded((float)load_, result); \
    else \
        for (int64_t i = 0; i < n; i++) \
            to->integers[i] = integer_;
#define CONVERT_REAL(load_) CONVERT(load_, integer_of((double)load_, result))
    switch (dtype) {
        OPJIT_CASES_INTEGRAL(CONVERT(elements[i], (uint64_t)elements[i]))
        OPJIT_CASES_FLOATING(CONVERT_REAL(elements[i]))
        OPJIT_CASE(OPJIT_FLOAT16, opjit_half, CONVERT_REAL(opjit_half_to_float(elements[i])))
        OPJIT_CASE(OPJIT_BFLOAT16, opjit_bfloat16, CONVERT_REAL(opjit_bfloat16_to_float(elements[i])))
    default: OPJIT_FAIL("allreduce cannot convert %s", opjit_dtype_name(dtype));
    }
    return OPJIT_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* Chunks                                                                                         */

#define CHUNKS 512                /* at most */
#define CHUNK_BYTES (128 * 1024)  /* at least, of the input */
#define GRAIN 2                   /* chunks that are worth a thread */

typedef struct plan {
    const opjit_tensor *x;
    opjit_layout layout;
    opjit_dtype result, summed; /* `summed` is x's own dtype where no conversion is needed */
    size_t size;                /* of x's elements */
    int64_t chunk;              /* elements */
    total totals[CHUNKS];
} plan;

static opjit_status sum_chunk(const plan *p, int64_t begin, int64_t end, total *to)
{
    const unsigned char *data = (const unsigned char *)p->x->data;
    kernel *sum = kinds[p->summed].sum;
    uint64_t flip = kinds[p->summed].flip;
    bool converts = p->summed != p->x->dtype;
    if (!converts && p->layout.dim == 1 && p->layout.strides[0] == 1) {
        sum(data + (size_t)begin * p->size, (size_t)(end - begin) * p->size, flip, to);
        return OPJIT_OK;
    }
    size_t size = opjit_dtype_size(p->summed);
    piece gathered, converted;
    for (int64_t n; begin < end; begin += n) {
        n = end - begin < PIECE ? end - begin : PIECE;
        const unsigned char *from = gather(&p->layout, data, p->size, begin, n, &gathered);
        if (converts) {
            OPJIT_TRY(convert(from, p->x->dtype, p->result, n, &converted));
            from = converted.bytes;
        }
        sum(from, (size_t)n * size, flip, to);
    }
    return OPJIT_OK;
}

static opjit_status sum_chunks(int64_t begin, int64_t end, void *context)
{
    plan *p = (plan *)context;
    for (int64_t i = begin; i < end; i++) {
        int64_t first = i * p->chunk, last = first + p->chunk;
        total t = {0, 0, 0}; /* here, not in the array, whose cache lines threads share */
        OPJIT_TRY(sum_chunk(p, first, last < p->x->numel ? last : p->x->numel, &t));
        p->totals[i] = t;
    }
    return OPJIT_OK;
}

static opjit_status sum_all(plan *p, total *to)
{
    int64_t numel = p->x->numel, least = CHUNK_BYTES / (int64_t)p->size;
    p->chunk = (numel / CHUNKS + least) / least * least;
    if (numel <= p->chunk)
        return sum_chunk(p, 0, numel, to);
    int64_t chunks = (numel + p->chunk - 1) / p->chunk;
    OPJIT_TRY(opjit_parallel_for(0, chunks, GRAIN, sum_chunks, p));
    for (int64_t i = 0; i < chunks; i++)
        total_add(to, &p->totals[i]);
    return OPJIT_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* Entry                                                                                          */

/* Is the sum of the elements, converted, as good as the sum of the converted elements? */
static bool converts_late(opjit_dtype from, opjit_dtype to)
{
    if (to == OPJIT_BOOL || opjit_is_floating(from))
        return from == to || ((from == OPJIT_FLOAT16 || from == OPJIT_BFLOAT16) && to == OPJIT_FLOAT32);
    return opjit_is_integral(to) || kinds[from].digits <= kinds[to].digits;
}

static void store(const total *t, opjit_dtype summed, opjit_tensor *out)
{
    bool integral = opjit_is_integral(summed);
    double real = integral ? (double)(int64_t)t->integer : total_real(t);
    float single = (float)real;
    switch (out->dtype) {
    case OPJIT_BOOL: *(bool *)out->data = t->integer != 0; break;
    case OPJIT_FLOAT64: *(double *)out->data = real; break;
    case OPJIT_FLOAT32: *(float *)out->data = single; break;
    case OPJIT_FLOAT16: *(opjit_half *)out->data = opjit_float_to_half(single); break;
    case OPJIT_BFLOAT16: *(opjit_bfloat16 *)out->data = opjit_float_to_bfloat16(single); break;
    case OPJIT_UINT8:
    case OPJIT_INT8: *(uint8_t *)out->data = (uint8_t)t->integer; break;
    case OPJIT_UINT16:
    case OPJIT_INT16: *(uint16_t *)out->data = (uint16_t)t->integer; break;
    case OPJIT_UINT32:
    case OPJIT_INT32: *(uint32_t *)out->data = (uint32_t)t->integer; break;
    default: *(uint64_t *)out->data = t->integer;
    }
}

opjit_status allreduce_cpu(const opjit_tensor *x, const opjit_dtype *dtype, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype <= OPJIT_FLOAT64, "allreduce takes bool, integers and real floating dtypes, not %s",
                opjit_dtype_name(x->dtype));
    opjit_dtype result = dtype ? *dtype : opjit_is_integral(x->dtype) ? OPJIT_INT64 : x->dtype;
    OPJIT_CHECK(result <= OPJIT_FLOAT64, "allreduce gives bool, integers and real floating dtypes, not %s",
                opjit_dtype_name(result));
    OPJIT_TRY(opjit_empty(out, 0, NULL, result, x));
    plan p;
    p.x = x;
    p.layout = opjit_coalesce(x);
    p.result = result;
    p.size = opjit_dtype_size(x->dtype);
    p.summed = converts_late(x->dtype, result) ? x->dtype
               : result == OPJIT_FLOAT64       ? OPJIT_FLOAT64
               : opjit_is_floating(result)     ? OPJIT_FLOAT32
                                               : OPJIT_INT64;
    total sum = {0, 0, 0};
    if (x->numel > 0)
        OPJIT_TRY(sum_all(&p, &sum));
    store(&sum, p.summed, out);
    return OPJIT_OK;
}
