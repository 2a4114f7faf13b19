/* What a kernel cannot do without: reading its input once, and so many multiplications and additions. */
#include "opjit.h"

typedef float lanes __attribute__((vector_size(64)));
typedef uint64_t words __attribute__((vector_size(64), aligned(4), may_alias));

#define STEP (4 * (int64_t)sizeof(words))

#ifdef OPJIT_OP_read

typedef struct {
    const char *data;
    uint64_t found;
} reading;

static opjit_status read_range(int64_t begin, int64_t end, void *context)
{
    reading *r = (reading *)context;
    words a = {0}, b = {0}, c = {0}, d = {0};
    for (const char *at = r->data + begin * STEP; at < r->data + end * STEP; at += STEP) {
        a ^= ((const words *)at)[0], b ^= ((const words *)at)[1];
        c ^= ((const words *)at)[2], d ^= ((const words *)at)[3];
    }
    a ^= b ^ c ^ d;
    __atomic_fetch_xor(&r->found, a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7], __ATOMIC_RELAXED);
    return OPJIT_OK;
}

/* Each thread reads one part. What is returned means nothing but that every word was read. */
opjit_status read_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    reading r = {(const char *)x->data, 0};
    const int64_t steps = x->numel * (int64_t)opjit_dtype_size(x->dtype) / STEP, least = (1 << 17) / STEP;
    OPJIT_CHECK(x->contiguous, "read takes a contiguous tensor");
    OPJIT_TRY(opjit_empty(out, 0, NULL, OPJIT_FLOAT32, x));
    OPJIT_TRY(opjit_parallel_for(0, steps, least, read_range, &r));
    memset(out->data, 0, sizeof(float));
    memcpy(out->data, &r.found, 1);
    return OPJIT_OK;
}

#else

/* In registers: 16 sums in flight, with no load and no store between them. */
static lanes multiply(int64_t count, lanes x)
{
    lanes s[16];
    for (int j = 0; j < 16; j++)
        s[j] = x + (float)j; /* or the compiler would find out that two are the same */
    for (int64_t i = 0; i < count; i += 16 * 16) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            s[j] = s[j] * x + x;
    }
    for (int j = 1; j < 16; j++)
        s[0] += s[j];
    return s[0];
}

/* `count` float32 multiplications and as many additions; x has 16 elements or more, and so have the results. */
opjit_status multiply_add_cpu(const opjit_tensor *x, int64_t count, opjit_tensor *one, opjit_tensor *other)
{
    OPJIT_CHECK(x->contiguous && x->dtype == OPJIT_FLOAT32 && x->numel >= 16,
                "multiply_add takes 16 float32 elements or more");
    OPJIT_TRY(opjit_empty_like(one, x, x->dtype));
    OPJIT_TRY(opjit_empty_like(other, x, x->dtype));
    lanes v;
    memcpy(&v, x->data, sizeof v);
    v = multiply(count, v);
    memcpy(one->data, &v, sizeof v);
    return OPJIT_OK;
}

#endif
