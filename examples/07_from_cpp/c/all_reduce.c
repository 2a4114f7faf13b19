#include "opjit.h"

opjit_status all_reduce_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_INT32, "all_reduce takes int32, not %s", opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_empty(out, 1, (int64_t[]){1}, x->dtype, x));
    const int32_t *from = x->data;
    uint32_t sum = 0;
    OPJIT_FOR_EACH(i, at, x)
        sum += (uint32_t)from[at];
    *(int32_t *)out->data = (int32_t)sum;
    return OPJIT_OK;
}
