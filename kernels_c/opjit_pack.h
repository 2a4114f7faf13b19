/*
 * opjit_pack.h - load and store 16 bytes at once in a .cu file, where the address allows it.
 *
 *     #include "opjit_pack.h"
 *
 *     static __global__ void negate(const float *x, float *y, int64_t n, int64_t packs)
 *     {
 *         typedef opjit_pack<float> pack;
 *         OPJIT_KERNEL_LOOP(i, packs) {
 *             pack four = ((const pack *)x)[i];
 *             for (int j = 0; j < pack::width; j++)
 *                 four.at[j] = -four.at[j];
 *             ((pack *)y)[i] = four;
 *         }
 *         OPJIT_KERNEL_LOOP(i, n - packs * pack::width)
 *             y[packs * pack::width + i] = -x[packs * pack::width + i];
 *     }
 *     ...
 *         int64_t packs = opjit_is_aligned(from, 16) && opjit_is_aligned(to, 16) ? n / opjit_pack<float>::width : 0;
 *
 * A contiguous tensor may start at any element, as x[1:] does: a cast to float4 * without the check reads wrong data or
 * ends in a misaligned address. For a function of one element, opjit_map() of opjit_elementwise.h does all of this.
 */
#ifndef OPJIT_PACK_H
#define OPJIT_PACK_H

#include "opjit_cuda.h"

#define OPJIT_PACK_BYTES 16 /* the most that a thread loads or stores at once */

/* Neighbouring elements that are loaded and stored at once. */
template <typename element>
struct __align__(OPJIT_PACK_BYTES) opjit_pack {
    enum { width = OPJIT_PACK_BYTES / sizeof(element) };
    element at[width];
};

/* Is an address a multiple of so many bytes? */
OPJIT_HOST_DEVICE bool opjit_is_aligned(const void *data, size_t bytes)
{
    return (uintptr_t)data % bytes == 0;
}

#endif
