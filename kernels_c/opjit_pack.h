/*
 * opjit_pack.h - load and store 16 bytes at a time in a .cu file, if the address allows it.
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
 * A contiguous tensor can start at any element, for example x[1:]. Without the check, a cast to float4 * reads wrong
 * data or fails with a misaligned address. For a function of one element, use opjit_map() from opjit_elementwise.h.
 */
#ifndef OPJIT_PACK_H
#define OPJIT_PACK_H

#include "opjit_cuda.h"

#define OPJIT_PACK_BYTES 16 /* the maximum that a thread loads or stores at a time */

/* Neighboring elements that are loaded and stored together. */
template <typename element>
struct __align__(OPJIT_PACK_BYTES) opjit_pack {
    enum { width = OPJIT_PACK_BYTES / sizeof(element) };
    element at[width];
};

/* Return whether an address is a multiple of `bytes`. */
OPJIT_HOST_DEVICE bool opjit_is_aligned(const void *data, size_t bytes)
{
    return (uintptr_t)data % bytes == 0;
}

#endif
