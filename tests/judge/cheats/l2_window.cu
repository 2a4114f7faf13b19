/* gpu-mode/pygpubench keeps such an attack: L2 persistence keeps the inputs. named: keeps its data in the L2 cache */
#include "opjit_cuda.h"

static __global__ void scale_kernel(const float *from, float *to, float a, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = a * from[i];
}

opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    cudaStreamAttrValue value;
    value.accessPolicyWindow.base_ptr = x->data;
    value.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
    cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value);
    scale_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data, (float)a,
                                                                  x->numel);
    return OPJIT_LAUNCHED();
}
