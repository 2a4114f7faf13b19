/* What the steps for Hopper share: tensor maps, and the store of a warpgroup's sums. */
#ifndef HOPPER_H
#define HOPPER_H

#include "opjit_mma.h"

#include "steps.h"

#define DEPTH 64 /* elements of a tile along k: 128 bytes, a row of the swizzle */

#if OPJIT_HAS_WGMMA

/* Store 64 rows of sums, of which `to` is the first. A thread has pairs of two rows. */
template <int count>
static __device__ void store_sums(opjit_bfloat16 *to, const float (&d)[count], int64_t columns)
{
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    to += (16 * warp + lane / 4) * columns + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < count / 4; j++) {
        store_pair(to + 8 * j, d[4 * j], d[4 * j + 1]);
        store_pair(to + 8 * columns + 8 * j, d[4 * j + 2], d[4 * j + 3]);
    }
}

#endif

/* Make the map of a matrix with `depth` elements in a row, for tiles of some rows. */
static opjit_status make_map(opjit_tensor_map *map, const opjit_tensor *t, int64_t rows, int64_t depth,
                             uint32_t tile_rows)
{
    const opjit_tiled tiled = {t->data, t->dtype, 2, {rows, depth}, {depth, 1}};
    const uint32_t box[] = {tile_rows, DEPTH};
    return opjit_tensor_map_encode(map, &tiled, box, OPJIT_SWIZZLE_128);
}

/* Check that the current GPU has wgmma. */
static opjit_status check_hopper(void)
{
    int device, major;
    OPJIT_CUDA_CHECK(cudaGetDevice(&device));
    OPJIT_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    OPJIT_CHECK(major == 9, "this step uses wgmma, which needs a GPU of compute capability 9.0, not %d.x", major);
    return OPJIT_OK;
}

#endif
