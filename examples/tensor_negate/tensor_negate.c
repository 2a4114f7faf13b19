/* The kernel function. STACK_SIZE, the largest number of bytes of stack for its block, comes from extra_cflags in op.py. */
#include "opjit.h"
#include "opjit_printf.h"

#ifndef STACK_SIZE
#define STACK_SIZE 6000 /* as in the guide */
#endif
enum { BLOCK = STACK_SIZE / sizeof(float) };

opjit_status tensor_negate_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "tensor_negate takes float32, not %s; call .float() on it",
                opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    const float *from = x->data;
    float *to = out->data;
    float block[BLOCK]; /* on the stack: strided elements are gathered here, and leave in order */
    for (int64_t begin = 0; begin < x->numel; begin += BLOCK) {
        int64_t len = x->numel - begin < BLOCK ? x->numel - begin : BLOCK;
        OPJIT_FOR_RANGE(i, begin, begin + len, at, x)
            block[i - begin] = from[at];
#ifdef TRACE
        opjit_printf("elements %lld to %lld, first %g\n", (long long)begin, (long long)(begin + len - 1), block[0]);
#endif
        for (int64_t i = 0; i < len; i++)
            to[begin + i] = -block[i];
    }
    return OPJIT_OK;
}
