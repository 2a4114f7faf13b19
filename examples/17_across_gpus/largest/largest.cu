#include "opjit_peers.h"

static __global__ void largest_kernel(const opjit_peers p, const float *x, float *out, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        ((float *)p.buffer[p.rank])[i] = x[i];
    OPJIT_BARRIER(&p);
    OPJIT_KERNEL_LOOP(i, n) {
        out[i] = ((const float *)p.buffer[0])[i];
        for (int r = 1; r < p.world; r++)
            out[i] = fmaxf(out[i], ((const float *)p.buffer[r])[i]);
    }
    OPJIT_BARRIER(&p);
}

opjit_status largest_cuda(const opjit_tensor *x, const char *group, opjit_tensor *out, cudaStream_t stream)
{
    const int blocks = opjit_blocks(x->numel, 256) < 32 ? opjit_blocks(x->numel, 256) : 32;
    opjit_peers peers;
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "largest takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_peers_of(&peers, group, 4 * x->numel));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    OPJIT_TRY(opjit_peers_launch(&peers, (const void *)largest_kernel, blocks, 256, 0, stream));
    largest_kernel<<<blocks, 256, 0, stream>>>(peers, (const float *)x->data, (float *)out->data, x->numel);
    return OPJIT_LAUNCHED();
}
