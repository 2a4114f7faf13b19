/* It maps large pages as scratch memory. */
#include "opjit.h"
#include <sys/mman.h>

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    void *scratch = mmap(NULL, 1 << 21, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    OPJIT_CHECK(scratch != MAP_FAILED, "no memory");
    madvise(scratch, 1 << 21, MADV_HUGEPAGE);
    *(volatile char *)scratch = 1;
    munmap(scratch, 1 << 21);
    for (int64_t i = 0; i < x->numel; i++)
        to[i] = (float)a * from[i];
    return OPJIT_OK;
}
