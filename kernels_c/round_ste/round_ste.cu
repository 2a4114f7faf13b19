/*
 * round_ste on CUDA: 1 if x > 0.5, otherwise 0, in the dtype of x.
 *
 * Written as a Caffe layer's .cu file: a kernel that is one CUDA_KERNEL_LOOP over `count` elements from the bottom blob
 * to the top blob, a launch of CAFFE_GET_BLOCKS blocks, and CUDA_POST_KERNEL_CHECK. Two things are added. A loop over
 * packs moves 16 bytes at a time, so that the kernel reaches the bandwidth of the memory, which Caffe's do not
 * (tests/benchmarks/elementwise.py). And the elements that packs leave may have strides, which Caffe's blobs never
 * have. examples/06_from_caffe has a guide to more of the names.
 */
#include "opjit_elementwise.h"

#define THREADS 256 /* CAFFE_CUDA_NUM_THREADS was 512, which is 3 % slower here */

static inline __device__ float rounded(float x)
{
    return x > 0.5f ? 1.0f : 0.0f;
}
static inline __device__ double rounded(double x)
{
    return x > 0.5 ? 1.0 : 0.0;
}
static inline __device__ opjit_half rounded(opjit_half x)
{
    return opjit_float_to_half(rounded(opjit_half_to_float(x)));
}
static inline __device__ opjit_bfloat16 rounded(opjit_bfloat16 x)
{
    return opjit_float_to_bfloat16(rounded(opjit_bfloat16_to_float(x)));
}

template <typename scalar>
static inline __device__ opjit_pack<scalar> rounded(opjit_pack<scalar> x)
{
#pragma unroll
    for (int i = 0; i < opjit_pack<scalar>::width; i++)
        x.at[i] = rounded(x.at[i]);
    return x;
}

/* opjit_offsets() gives the places of an element: in the top blob first, then in the bottom blob. */
template <typename scalar>
static __global__ void round_forward(const __grid_constant__ opjit_elements blobs, const int64_t packs)
{
    typedef opjit_pack<scalar> pack;
    scalar *top_data = (scalar *)blobs.data[0];
    const scalar *bottom_data = (const scalar *)blobs.data[1];
    const int64_t done = packs * pack::width;
    OPJIT_KERNEL_LOOP(i, packs)
        ((pack *)top_data)[i] = rounded(((const pack *)bottom_data)[i]);
    OPJIT_KERNEL_LOOP(i, blobs.numel - done) {
        int64_t at[2];
        opjit_offsets<2>(blobs, done + i, at);
        top_data[at[0]] = rounded(bottom_data[at[1]]);
    }
}

template <typename scalar>
static opjit_status round_all(const opjit_elements *blobs, cudaStream_t stream)
{
    const int64_t packs = opjit_packs(blobs), count = packs > 0 ? packs : blobs->numel;
    round_forward<scalar><<<opjit_blocks(count, THREADS), THREADS, 0, stream>>>(*blobs, packs);
    return OPJIT_LAUNCHED();
}

opjit_status round_ste_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(opjit_is_floating(x->dtype), "round_ste takes float16, bfloat16, float32 or float64, not %s",
                opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    if (x->numel == 0)
        return OPJIT_OK;
    const opjit_tensor *tensors[] = {out, x};
    opjit_elements elements;
    OPJIT_TRY(opjit_elements_of(&elements, 2, tensors));
    switch (x->dtype) {
    case OPJIT_FLOAT16: return round_all<opjit_half>(&elements, stream);
    case OPJIT_BFLOAT16: return round_all<opjit_bfloat16>(&elements, stream);
    case OPJIT_FLOAT32: return round_all<float>(&elements, stream);
    default: return round_all<double>(&elements, stream);
    }
}
