#include "opjit_random.h"

/* Keep and scale element i if its random number is below 1 - p. */
static opjit_status drop(const opjit_tensor *x, double p, uint64_t seed, opjit_tensor *out)
{
    opjit_tensor packed;
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && p >= 0 && p < 1, "dropout takes float32, and p from 0 to less than 1");
    OPJIT_TRY(opjit_contiguous(&packed, x));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    const float *from = (const float *)packed.data, keep = (float)(1 - p);
    float *to = (float *)out->data;
    for (int64_t i = 0; i < x->numel; i++)
        to[i] = opjit_uniform(opjit_philox(seed, (uint64_t)i, 0).word[0]) < keep ? from[i] / keep : 0;
    return OPJIT_OK;
}

opjit_status dropout_cpu(const opjit_tensor *x, double p, const uint64_t *seed, opjit_tensor *out, opjit_tensor *kept)
{
    OPJIT_TRY(opjit_empty(kept, 0, NULL, OPJIT_INT64, x));
    memcpy(kept->data, seed, sizeof *seed);
    return drop(x, p, *seed, out);
}

opjit_status dropout_again_cpu(const opjit_tensor *x, double p, const opjit_tensor *seed, opjit_tensor *out)
{
    return drop(x, p, *(const uint64_t *)seed->data, out);
}
