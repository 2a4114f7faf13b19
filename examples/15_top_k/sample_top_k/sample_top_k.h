/* sample_top_k.h - shared by the C and CUDA kernels: an order of floats, and the noise that selects one of them. */
#ifndef SAMPLE_TOP_K_H
#define SAMPLE_TOP_K_H

#include "opjit_random.h"

/* Integers in the order of the floats: -0 equals 0, and NaN is the largest, as for torch.topk. */
OPJIT_HOST_DEVICE uint32_t rank_of(float value)
{
    uint32_t bits;
    value += 0.0f; /* -0 is 0 now */
    memcpy(&bits, &value, sizeof bits);
    if (value != value)
        return UINT32_MAX;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/*
 * The logit of element i plus Gumbel noise, as an integer. If you choose the element with the largest number, you choose
 * each element with its softmax probability. The lower half is derived from i, so that the first of two equal elements
 * wins.
 */
OPJIT_HOST_DEVICE uint64_t contender(float logit, float temperature, uint64_t seed, int64_t row_start, uint32_t i)
{
    const float noise = -logf(-logf(opjit_uniform(opjit_philox(seed, (uint64_t)(row_start + i), 0).word[0])));
    return (uint64_t)rank_of(logit / temperature + noise) << 32 | (UINT32_MAX - i);
}

OPJIT_HOST_DEVICE int64_t winner(uint64_t largest)
{
    return UINT32_MAX - (uint32_t)largest;
}

OPJIT_MUST_USE OPJIT_UNUSED static opjit_status check_sample_top_k(const opjit_tensor *logits, int64_t k,
                                                                   double temperature)
{
    OPJIT_CHECK(logits->dtype == OPJIT_FLOAT32 && logits->dim > 0,
                "sample_top_k takes float32 of one dimension or more");
    const int64_t n = logits->sizes[logits->dim - 1];
    OPJIT_CHECK(1 <= k && k <= n && n < UINT32_MAX, "k is from 1 to the %lld logits of a row, not %lld", (long long)n,
                (long long)k);
    OPJIT_CHECK((float)temperature > 0, "temperature is above 0, not %g", temperature);
    return OPJIT_OK;
}

#endif
