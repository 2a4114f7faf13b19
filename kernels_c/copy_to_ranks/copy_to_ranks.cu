/* copy_to_ranks on CUDA: a copy of x. Only the gradient, which is a sum over the ranks, uses the group. */
#include "opjit_collective.h"

opjit_status copy_to_ranks_cuda(const opjit_tensor *x, const char *group, opjit_tensor *out, cudaStream_t stream)
{
    const size_t bytes = (size_t)x->numel * opjit_dtype_size(x->dtype);
    opjit_tensor packed;
    (void)group;
    OPJIT_CHECK(opjit_is_summable(x->dtype), "takes " OPJIT_SUMMABLE ", not %s", opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    OPJIT_TRY(opjit_contiguous(&packed, x));
    if (bytes)
        OPJIT_CUDA_CHECK(cudaMemcpyAsync(out->data, packed.data, bytes, cudaMemcpyDeviceToDevice, stream));
    return OPJIT_OK;
}
