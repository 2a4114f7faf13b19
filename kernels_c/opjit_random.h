/*
 * opjit_random.h - random numbers without a state: Philox4x32-10 (Salmon et al., 2011), in C and in CUDA kernels.
 *
 *     #include "opjit_random.h"
 *
 *     OPJIT_KERNEL_LOOP(i, n)
 *         mask[i] = opjit_uniform(opjit_philox(seed, i, 0).word[0]) < keep;
 *
 * The numbers depend only on the seed, the sequence of a thread or an element, and the index in the sequence. They
 * don't depend on the number of blocks or the device. They have the bits of curandStatePhilox4_32_10_t after
 * curand_init(seed, sequence, 4 * block).
 *
 * If the numbers should follow torch.manual_seed, declare `Generator? generator=None`. The kernel then gets a pointer
 * to a 63-bit seed, which torch draws for this call from the generator or, for None, from the default generator of the
 * tensors' device:
 *
 *     opjit_status noise_cpu(const opjit_tensor *x, const uint64_t *seed, opjit_tensor *out)
 *
 * On CUDA it points to GPU memory. Pass the pointer to your kernels, and read *seed there, so that a CUDA graph draws
 * new numbers at each replay.
 */
#ifndef OPJIT_RANDOM_H
#define OPJIT_RANDOM_H

#ifndef __CUDACC_RTC__ /* NVRTC has these functions built in */
#include <math.h>
#endif

#include "opjit.h"

/* Four numbers of 32 random bits. */
typedef struct opjit_random {
    uint32_t word[4];
} opjit_random;

/* The four numbers of a sequence's block: 2^64 sequences for each seed, 2^64 blocks in each. */
OPJIT_HOST_DEVICE opjit_random opjit_philox(uint64_t seed, uint64_t sequence, uint64_t block)
{
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    opjit_random x = {{(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)sequence, (uint32_t)(sequence >> 32)}};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53u * x.word[0], b = (uint64_t)0xCD9E8D57u * x.word[2];
        const opjit_random y = {{(uint32_t)(b >> 32) ^ x.word[1] ^ key[0], (uint32_t)b,
                                 (uint32_t)(a >> 32) ^ x.word[3] ^ key[1], (uint32_t)a}};
        x = y;
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return x;
}

/* A float in [0, 1): 2^24 evenly spaced values. */
OPJIT_HOST_DEVICE float opjit_uniform(uint32_t bits)
{
    return (float)(bits >> 8) * 0x1p-24f;
}

/* Two independent numbers of the normal distribution, by Box and Muller. */
OPJIT_HOST_DEVICE void opjit_normal(uint32_t a, uint32_t b, float normal[2])
{
    const float radius = sqrtf(-2 * logf(1 - opjit_uniform(a))), angle = 6.2831853f * opjit_uniform(b);
    normal[0] = radius * cosf(angle);
    normal[1] = radius * sinf(angle);
}

#endif
