/*
 * allreduce on the CPU: the sum of all elements of a tensor, with torch.sum's dtype rules.
 *
 * The elements, in memory order, are cut into chunks whose length depends on their number alone. Threads sum
 * chunks; the chunks' totals are added in order. So the result does not depend on the number of threads.
 *
 * Elements that lie side by side are read where they are, in blocks of STEPS steps of four vectors. Within a
 * block each lane of four vectors has an accumulator of its own: nothing waits, and rounding errors stay small:
 *   float16, bfloat16, float32  float lanes that add at most 32 elements each (float32: 16), then double lanes
 *   float64                     double lanes; blocks are added with Knuth's TwoSum, which loses nothing
 *   8, 16 and 32-bit integers   lanes of twice the width hold two elements each. Adding a lane as it is and its
 *                               upper half apart gives both sums, with three instructions for a vector and
 *                               without unpacking. Signed ones are moved into the unsigned range by flipping
 *                               the sign bit, and back at the end by a subtraction.
 *   64-bit integers             lanes that wrap around, as torch's do
 *
 * Elements that lie apart, or side by side in short rows only, are copied together first, in pieces of 1024, which
 * stay in the first cache. Those that a stride of 0 repeats are added once, and their sum is multiplied.
 *
 * torch.sum converts each element to the result's dtype before adding. Where the converted sum is at least as good it
 * is the sum that is converted. Else the elements of a piece are widened to int64 or double, and rounded as the
 * conversion would.
 *
 * Layout of this file: vectors, totals, kernels, pieces, chunks, entry.
 */
#include "allreduce.h"

/* What has to be fast is written with vectors by hand: gcc's later passes find nothing there, and cost 0.1 s. */
#ifndef __clang__
#pragma GCC push_options
#pragma GCC optimize "Og"
#endif

/* ---------------------------------------------------------------------------------------------- */
/* Vectors                                                                                        */

/*
 * One hardware register each: wider types would be split and spilled. 64 bytes gain nothing with AVX-512: a core
 * cannot load faster than that from its second cache, and from memory Zen 4 is 15 % slower.
 */
#ifdef __AVX__
#define VECTOR 32
#else
#define VECTOR 16
#endif

#define STEP (4 * VECTOR) /* bytes */
#define STEPS 16          /* in a block: the length of the chains of additions in torch.sum's cascade */
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
typedef half_floats half_floats_at __attribute__((aligned(1)));

/* ---------------------------------------------------------------------------------------------- */
/* Totals                                                                                         */

typedef struct total {
    uint64_t integer; /* modulo 2^64 */
    double sum, rest; /* sum + rest is the total; rest is what rounding took from sum */
} total;

/* The same in each lane. */
typedef struct lanes {
    u64s integer;
    doubles sum, rest;
} lanes;

/* TwoSum (Knuth, The Art of Computer Programming 2, section 4.2.2), for numbers and for vectors. */
#define ADD_EXACTLY(type_, to_, value_) \
    do { \
        type_ value = (value_), before = (to_)->sum, after = before + value, added = after - before; \
        (to_)->sum = after; \
        (to_)->rest += (before - (after - added)) + (value - added); \
    } while (0)

static void total_add(total *to, const total *from)
{
    to->integer += from->integer;
    ADD_EXACTLY(double, to, from->sum);
    to->rest += from->rest;
}

/* ---------------------------------------------------------------------------------------------- */
/* Kernels                                                                                        */

/*
 * A kernel adds `steps` steps of elements to the lanes. `flip` has the sign bits of the elements of a word set
 * when they are signed integers of less than 64 bits; else it is 0.
 */
typedef void kernel(const unsigned char *at, size_t steps, uint64_t flip, lanes *to);

/* add_(even, odd, k) adds the k-th and the next vector of the step at `at` to two of the accumulators. */
#define KERNEL(name_, vector_, add_, ...) \
    static void name_(const unsigned char *at, size_t steps, uint64_t flip, lanes *to) \
    { \
        vector_ a = {0}, b = {0}, c = {0}, d = {0}; \
        OPJIT_UNUSED u64s flips = (u64s){0} + flip; \
        for (; steps > 0; steps--, at += STEP) { \
            add_(a, b, 0); \
            add_(c, d, 2); \
        } \
        __VA_ARGS__ \
    }

#define VECTOR_AT(vector_, k_) (*(const vector_##_at *)(const void *)(at + (k_)*VECTOR))

static inline void fold_floats(lanes *to, floats sum)
{
    union {
        floats all;
        half_floats half[2];
    } in = {sum};
    to->sum += __builtin_convertvector(in.half[0], doubles) + __builtin_convertvector(in.half[1], doubles);
}

#define ADD_FLOAT64(even_, odd_, k_) even_ += VECTOR_AT(doubles, k_), odd_ += VECTOR_AT(doubles, k_ + 1)
#define ADD_FLOAT32(even_, odd_, k_) even_ += VECTOR_AT(floats, k_), odd_ += VECTOR_AT(floats, k_ + 1)
#define ADD_INT64(even_, odd_, k_) even_ += VECTOR_AT(u64s, k_), odd_ += VECTOR_AT(u64s, k_ + 1)

KERNEL(add_float64, doubles, ADD_FLOAT64, ADD_EXACTLY(doubles, to, (a + b) + (c + d));)
KERNEL(add_float32, floats, ADD_FLOAT32, fold_floats(to, (a + b) + (c + d));)
KERNEL(add_64, u64s, ADD_INT64, to->integer += a + b + c + d;)

/* float32 for a float64 result: each element is a double before it is added. */
#define DOUBLES_AT(k_) __builtin_convertvector(*(const half_floats_at *)(const void *)(at + (k_) * (VECTOR / 2)), doubles)
#define ADD_WIDE(even_, odd_, k_) \
    even_ += DOUBLES_AT(2 * k_), odd_ += DOUBLES_AT(2 * k_ + 1), even_ += DOUBLES_AT(2 * k_ + 2), \
        odd_ += DOUBLES_AT(2 * k_ + 3)

KERNEL(add_wide, doubles, ADD_WIDE, ADD_EXACTLY(doubles, to, (a + b) + (c + d));)

/* A bfloat16 is the upper half of a float: one word holds two. */
#define FLOATS_OF_BFLOAT16S(even_, odd_, words_) \
    even_ += (floats)((words_) << 16), odd_ += (floats)((words_)&0xffff0000u)
#define ADD_BFLOAT16(even_, odd_, k_) \
    FLOATS_OF_BFLOAT16S(even_, odd_, VECTOR_AT(u32s, k_)), FLOATS_OF_BFLOAT16S(even_, odd_, VECTOR_AT(u32s, k_ + 1))

KERNEL(add_bfloat16, floats, ADD_BFLOAT16, fold_floats(to, (a + b) + (c + d));)

/* float16: the hardware converts half a vector; without it, exponent and fraction move to their float places. */
#ifdef __F16C__
typedef short halfs __attribute__((vector_size(VECTOR / 2), may_alias));
typedef halfs halfs_at __attribute__((aligned(1)));
#define HALFS_AT(k_) (*(const halfs_at *)(const void *)(at + (k_) * (VECTOR / 2)))
#define FLOATS_AT(k_) (floats)__builtin_ia32_vcvtph2ps256(HALFS_AT(k_))
#define ADD_FLOAT16(even_, odd_, k_) \
    even_ += FLOATS_AT(2 * k_), odd_ += FLOATS_AT(2 * k_ + 1), even_ += FLOATS_AT(2 * k_ + 2), \
        odd_ += FLOATS_AT(2 * k_ + 3)
#else
/* The float16 in the upper half of each word. */
static inline floats floats_of_upper(u32s words)
{
    u32s rest = (words & 0x7fff0000u) >> 3, special = (u32s)(rest >= 0x7c00u << 13); /* infinity, NaN */
    floats scaled = (floats)rest * 0x1p112f; /* the exponent's bias grows by 112; subnormals become normal */
    return (floats)((u32s)scaled | (words & 0x80000000u) | (special & 0x7f800000u));
}
#define FLOATS_OF_FLOAT16S(even_, odd_, words_) even_ += floats_of_upper((words_) << 16), odd_ += floats_of_upper(words_)
#define ADD_FLOAT16(even_, odd_, k_) \
    FLOATS_OF_FLOAT16S(even_, odd_, VECTOR_AT(u32s, k_)), FLOATS_OF_FLOAT16S(even_, odd_, VECTOR_AT(u32s, k_ + 1))
#endif

KERNEL(add_float16, floats, ADD_FLOAT16, fold_floats(to, (a + b) + (c + d));)

/*
 * Two elements of bits_ bits in a lane of twice the width: `even` adds both, `odd` the upper one, so that
 * even - (odd << bits_) is the sum of the lower ones. A lane has room for 257 elements of 8 bits, and gets 64.
 */
#define ADD_PAIRS(even_, odd_, bits_, first_, second_) \
    even_ += (first_) + (second_), odd_ += ((first_) >> bits_) + ((second_) >> bits_)
#define PAIRS_AT(vector_, k_) (VECTOR_AT(vector_, k_) ^ (vector_)flips)
#define ADD_8(even_, odd_, k_) ADD_PAIRS(even_, odd_, 8, PAIRS_AT(u16s, k_), PAIRS_AT(u16s, k_ + 1))
#define ADD_16(even_, odd_, k_) ADD_PAIRS(even_, odd_, 16, PAIRS_AT(u32s, k_), PAIRS_AT(u32s, k_ + 1))
#define ADD_32(even_, odd_, k_) ADD_PAIRS(even_, odd_, 32, PAIRS_AT(u64s, k_), PAIRS_AT(u64s, k_ + 1))

/* The sums of neighbouring lanes, in lanes of twice the width. */
#define WIDEN_16(v_) (((u32s)(v_)&UINT16_MAX) + ((u32s)(v_) >> 16))
#define WIDEN_32(v_) (((u64s)(v_)&UINT32_MAX) + ((u64s)(v_) >> 32))

KERNEL(add_8, u16s, ADD_8, b += d; a += c - (b << 8); u32s sum = WIDEN_16(a) + WIDEN_16(b);
       to->integer += WIDEN_32(sum);)
KERNEL(add_16, u32s, ADD_16, b += d; a += c - (b << 16); to->integer += WIDEN_32(a) + WIDEN_32(b);)
KERNEL(add_32, u64s, ADD_32, b += d; to->integer += a + c - (b << 32) + b;)

/* By dtype; WIDE is float32 where the result is float64. */
#define WIDE (OPJIT_FLOAT64 + 1)
static const struct {
    kernel *add;
    uint64_t flip;
    int size, digits; /* bytes; bits of the whole numbers that the dtype holds exactly */
} kinds[] = {
    [OPJIT_BOOL] = {add_8, 0, 1, 1},
    [OPJIT_UINT8] = {add_8, 0, 1, 8},
    [OPJIT_INT8] = {add_8, UINT64_C(0x8080808080808080), 1, 8},
    [OPJIT_INT16] = {add_16, UINT64_C(0x8000800080008000), 2, 16},
    [OPJIT_INT32] = {add_32, UINT64_C(0x8000000080000000), 4, 32},
    [OPJIT_INT64] = {add_64, 0, 8, 64},
    [OPJIT_UINT16] = {add_16, 0, 2, 16},
    [OPJIT_UINT32] = {add_32, 0, 4, 32},
    [OPJIT_UINT64] = {add_64, 0, 8, 64},
    [OPJIT_FLOAT16] = {add_float16, 0, 2, 11},
    [OPJIT_BFLOAT16] = {add_bfloat16, 0, 2, 8},
    [OPJIT_FLOAT32] = {add_float32, 0, 4, 24},
    [OPJIT_FLOAT64] = {add_float64, 0, 8, 53},
    [WIDE] = {add_wide, 0, 4, 24},
};

/* Add `n` elements that lie side by side. */
static void add_elements(const unsigned char *from, opjit_dtype dtype, int64_t n, total *to)
{
    kernel *add = kinds[dtype].add;
    uint64_t flip = kinds[dtype].flip, last[STEP / 8];
    size_t bytes = (size_t)(n * kinds[dtype].size), steps = bytes / STEP, left = bytes % STEP;
    lanes l = {{0}, {0}, {0}};
    while (steps > 0) {
        size_t block = steps < STEPS ? steps : STEPS;
        add(from, block, flip, &l);
        from += block * STEP;
        steps -= block;
    }
    if (left > 0) { /* filled up with what adds nothing */
        for (size_t i = left / 8; i < STEP / 8; i++)
            last[i] = flip;
        memcpy(last, from, left);
        add((const unsigned char *)last, 1, flip, &l);
    }
    for (size_t i = 0; i < VECTOR / 8; i++)
        total_add(to, &(total){l.integer[i], l.sum[i], l.rest[i]});
    to->integer -= (flip >> (64 - 8 * kinds[dtype].size)) * (uint64_t)n;
}

/* ---------------------------------------------------------------------------------------------- */
/* Pieces: elements that lie apart, or have to be converted                                       */

#define PIECE 1024

typedef union word {
    uint64_t integer;
    double real;
} word;

/* Copy `n` elements that lie `stride` elements apart. */
static void gather(const void *from, int size, int64_t stride, int64_t n, void *to)
{
#define GATHER(type_) \
    { \
        typedef type_ element __attribute__((may_alias)); \
        const element *f = (const element *)from; \
        element *t = (element *)to; \
        for (; n >= 4; n -= 4, f += 4 * stride, t += 4) \
            t[0] = f[0], t[1] = f[stride], t[2] = f[2 * stride], t[3] = f[3 * stride]; \
        for (; n > 0; n--, f += stride) \
            *t++ = *f; \
    }
    if (stride == 1)
        memcpy(to, from, (size_t)(n * size));
    else if (size == 1)
        GATHER(uint8_t)
    else if (size == 2)
        GATHER(uint16_t)
    else if (size == 4)
        GATHER(uint32_t)
    else
        GATHER(uint64_t)
}

#define EACH(i) for (int64_t i = 0; i < n; i++)

/* From a dtype's elements, side by side, to their values in the same memory: as int64, modulo 2^64, or as double. */
static void widen(word *words, opjit_dtype from, int64_t n)
{
#define WIDEN(type_) \
    for (int64_t i = n; i-- > 0;) { /* from the last on: a value takes the place of elements behind its own */ \
        type_ bits; \
        memcpy(&bits, (const char *)words + i * (int64_t)sizeof bits, sizeof bits); \
        words[i].integer = bits; \
    }
    uint64_t sign = kinds[from].flip >> (64 - 8 * kinds[from].size);
    if (kinds[from].size == 1)
        WIDEN(uint8_t)
    else if (kinds[from].size == 2)
        WIDEN(uint16_t)
    else if (kinds[from].size == 4)
        WIDEN(uint32_t)
    if (from == OPJIT_FLOAT16)
        EACH(i) words[i].real = (double)opjit_half_to_float((opjit_half){(uint16_t)words[i].integer});
    else if (from == OPJIT_BFLOAT16)
        EACH(i) words[i].real = (double)opjit_float_of_bits((uint32_t)words[i].integer << 16);
    else if (from == OPJIT_FLOAT32)
        EACH(i) words[i].real = (double)opjit_float_of_bits((uint32_t)words[i].integer);
    else if (sign)
        EACH(i) words[i].integer = (words[i].integer ^ sign) - sign;
}

/* A real number as an integer: cut off; where it does not fit, the number that x86 gives and torch has. */
static uint64_t integer_of(double value, opjit_dtype to)
{
    double limit = to >= OPJIT_INT8 && to <= OPJIT_INT32 ? 0x1p31 : 0x1p63;
    if (to == OPJIT_UINT64 && value >= 0x1p63 && value < 0x1p64)
        return (uint64_t)(int64_t)(value - 0x1p63) ^ UINT64_C(1) << 63;
    return value >= -limit && value < limit ? (uint64_t)(int64_t)value : (uint64_t)(int64_t)-limit;
}

/* A float as a number that `to` holds. */
static double rounded(float value, opjit_dtype to)
{
    if (to == OPJIT_FLOAT16)
        value = opjit_half_to_float(opjit_float_to_half(value));
    else if (to == OPJIT_BFLOAT16)
        value = opjit_bfloat16_to_float(opjit_float_to_bfloat16(value));
    return (double)value;
}

/* An integer as a floating number. One that only uint64 holds is halved, and its last bit kept for rounding. */
static double real_of(uint64_t value, bool is_unsigned, opjit_dtype to)
{
    double scale = is_unsigned && value >> 63 ? 2 : 1;
    int64_t number = (int64_t)(scale > 1 ? value >> 1 | (value & 1) : value);
    return scale * (to == OPJIT_FLOAT64 ? (double)number : (double)(float)number);
}

/* Convert widened elements of a dtype to another, still as int64 or double. */
static void convert(word *words, opjit_dtype from, opjit_dtype to, int64_t n)
{
    bool real = opjit_is_floating(from);
    if (to == OPJIT_BOOL)
        EACH(i) words[i].integer = real ? words[i].real != 0 : words[i].integer != 0;
    else if (opjit_is_integral(to))
        EACH(i) words[i].integer = integer_of(words[i].real, to);
    else if (!real)
        EACH(i) words[i].real = real_of(words[i].integer, from == OPJIT_UINT64, to);
    if (to >= OPJIT_FLOAT16 && to <= OPJIT_FLOAT32)
        EACH(i) words[i].real = rounded((float)words[i].real, to);
}

/* ---------------------------------------------------------------------------------------------- */
/* Chunks                                                                                         */

#define CHUNKS 512               /* at most */
#define CHUNK_BYTES (128 * 1024) /* at least, of the input */
#define GRAIN 3                  /* chunks that are worth a thread */
#define FEW 16                   /* elements */

typedef struct plan {
    const void *data;
    opjit_layout layout;
    opjit_dtype kind, result; /* of elements, by `kinds`; of the sum */
    bool converts, in_place;  /* element by element; rows are read where they lie */
    int64_t numel, chunk;     /* elements: without repeats; of a chunk */
    total totals[CHUNKS];
} plan;

static void add_piece(const plan *p, word *words, int64_t n, total *to)
{
    opjit_dtype as = p->kind;
    if (p->converts) {
        widen(words, p->kind, n);
        convert(words, p->kind, p->result, n);
        as = opjit_is_floating(p->result) ? OPJIT_FLOAT64 : OPJIT_INT64;
    }
    add_elements((const unsigned char *)words, as, n, to);
}

/* Where a walk over the elements, row by row, has come to. */
typedef struct walk {
    const unsigned char *from;
    int64_t at[OPJIT_MAX_DIM];
} walk;

static void walk_start(walk *w, const opjit_layout *layout, const void *data, int64_t index, int64_t size)
{
    w->from = (const unsigned char *)data;
    for (int64_t d = layout->dim - 1; d >= 0; d--) {
        w->at[d] = index % layout->sizes[d];
        index /= layout->sizes[d];
        w->from += w->at[d] * layout->strides[d] * size;
    }
}

/* Move on by `n` elements, at most to the end of the row. */
static void walk_on(walk *w, const opjit_layout *layout, int64_t n, int64_t size)
{
    for (int64_t d = layout->dim - 1; d >= 0; d--, n = 1) {
        w->at[d] += n;
        w->from += n * layout->strides[d] * size;
        if (w->at[d] < layout->sizes[d] || d == 0)
            break;
        w->from -= w->at[d] * layout->strides[d] * size;
        w->at[d] = 0;
    }
}

static void add_chunk(const plan *p, int64_t begin, int64_t end, total *to)
{
    const opjit_layout *layout = &p->layout;
    int64_t inner = layout->dim - 1, size = kinds[p->kind].size, filled = 0;
    walk w;
    word words[PIECE];
    walk_start(&w, layout, p->data, begin, size);
    while (begin < end) {
        int64_t n = layout->sizes[inner] - w.at[inner];
        n = n < end - begin ? n : end - begin;
        if (p->in_place) {
            add_elements(w.from, p->kind, n, to);
        } else {
            n = n < PIECE - filled ? n : PIECE - filled;
            gather(w.from, (int)size, layout->strides[inner], n, (char *)words + filled * size);
            filled += n;
        }
        begin += n;
        if (filled == PIECE || (begin == end && filled > 0)) {
            add_piece(p, words, filled, to);
            filled = 0;
        }
        walk_on(&w, layout, n, size);
    }
}

static opjit_status add_chunks(int64_t begin, int64_t end, void *context)
{
    plan *p = (plan *)context;
    for (int64_t i = begin; i < end; i++) {
        int64_t first = i * p->chunk, last = first + p->chunk;
        total t = {0, 0, 0}; /* here, not in the array, whose cache lines threads share */
        add_chunk(p, first, last < p->numel ? last : p->numel, &t);
        p->totals[i] = t;
    }
    return OPJIT_OK;
}

static opjit_status add_all(plan *p, total *to)
{
    int64_t least = CHUNK_BYTES / kinds[p->kind].size;
    p->chunk = (p->numel / CHUNKS + least) / least * least;
    int64_t chunks = (p->numel + p->chunk - 1) / p->chunk;
    OPJIT_TRY(opjit_parallel_for(0, chunks, GRAIN, add_chunks, p));
    for (int64_t i = 0; i < chunks; i++)
        total_add(to, &p->totals[i]);
    return OPJIT_OK;
}

static opjit_status add_planned(const opjit_tensor *x, opjit_dtype kind, opjit_dtype result, bool converts, total *to)
{
    plan p;
    p.data = x->data;
    p.layout = opjit_coalesce(x);
    p.kind = kind;
    p.result = result;
    p.converts = converts;
    int64_t repeats = drop_repeats(&p.layout), inner = p.layout.dim - 1;
    p.numel = x->numel / repeats;
    p.in_place = !converts && p.layout.strides[inner] == 1 && (inner == 0 || p.layout.sizes[inner] >= PIECE / 2);
    OPJIT_TRY(add_all(&p, to));
    to->integer *= (uint64_t)repeats;
    to->sum *= (double)repeats;
    to->rest *= (double)repeats;
    return OPJIT_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* Entry                                                                                          */

/* Add `n` elements, where they are few and setting vectors up would take longer than adding. */
static void add_few(const void *from, opjit_dtype dtype, int64_t n, total *to)
{
    double sum = 0; /* a variable is in a register, what a pointer leads to is not */
    uint64_t integer = 0;
    if (dtype == OPJIT_FLOAT32)
        for (int64_t i = 0; i < n; i++)
            sum += (double)((const float *)from)[i];
    else if (dtype == OPJIT_INT64)
        for (int64_t i = 0; i < n; i++)
            integer += ((const uint64_t *)from)[i];
    else
        add_elements((const unsigned char *)from, dtype, n, to);
    to->sum += sum;
    to->integer += integer;
}

/* Is the converted sum at least as good as the sum of the converted elements? */
static bool converts_late(opjit_dtype kind, opjit_dtype to, int64_t n)
{
    if (kind == to || kind == WIDE)
        return true;
    if (opjit_is_floating(kind) || to == OPJIT_BOOL)
        return to == OPJIT_FLOAT32 && kind <= OPJIT_BFLOAT16 && kind >= OPJIT_FLOAT16;
    bool exact = kinds[kind].size <= 4 && n <= INT32_MAX; /* the sum of integers does not wrap around */
    return opjit_is_integral(to) || kinds[kind].digits <= kinds[to].digits || (exact && to >= OPJIT_FLOAT32);
}

static void store(const total *t, bool real, opjit_tensor *out)
{
    /* With infinities or NaN in the sum, the rest means nothing. */
    double sum = !real ? (double)(int64_t)t->integer : t->rest - t->rest == 0 ? t->sum + t->rest : t->sum;
    uint64_t bits = t->integer;
    switch (out->dtype) {
    case OPJIT_BOOL: bits = bits != 0; break;
    case OPJIT_FLOAT16: bits = opjit_float_to_half((float)sum).bits; break;
    case OPJIT_BFLOAT16: bits = opjit_float_to_bfloat16((float)sum).bits; break;
    case OPJIT_FLOAT32: bits = opjit_bits_of_float((float)sum); break;
    case OPJIT_FLOAT64: memcpy(&bits, &sum, sizeof bits); break;
    default: break;
    }
    memcpy(out->data, &bits, (size_t)kinds[out->dtype].size); /* the low bytes come first */
}

opjit_status allreduce_cpu(const opjit_tensor *x, const opjit_dtype *dtype, opjit_tensor *out)
{
    opjit_dtype result = dtype ? *dtype : opjit_is_integral(x->dtype) ? OPJIT_INT64 : x->dtype;
    OPJIT_CHECK(x->dtype <= OPJIT_FLOAT64 && result <= OPJIT_FLOAT64,
                "allreduce takes and gives bool, integers and real floating dtypes, not %s to %s",
                opjit_dtype_name(x->dtype), opjit_dtype_name(result));
    OPJIT_TRY(opjit_empty(out, 0, NULL, result, x));
    opjit_dtype kind = x->dtype == OPJIT_FLOAT32 && result == OPJIT_FLOAT64 ? WIDE : x->dtype;
    bool converts = !converts_late(kind, result, x->numel);
    total sum = {0, 0, 0};
    if (x->contiguous && !converts && x->numel <= FEW)
        add_few(x->data, kind, x->numel, &sum);
    else if (x->contiguous && !converts && x->numel * kinds[kind].size <= CHUNK_BYTES)
        add_elements((const unsigned char *)x->data, kind, x->numel, &sum); /* one chunk: no plan is needed */
    else if (x->numel > 0)
        OPJIT_TRY(add_planned(x, kind, result, converts, &sum));
    store(&sum, opjit_is_floating(converts ? result : x->dtype), out);
    return OPJIT_OK;
}

#ifndef __clang__
#pragma GCC pop_options
#endif
