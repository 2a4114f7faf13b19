/*
 * add_custom_backward on the CPU: two copies of a gradient, which is read once.
 *
 * A contiguous row is copied in parts that stay in the L1 cache between the two copies.
 */
#include "opjit_convert.h"
#include "opjit_elementwise.h"

#define PART 16384 /* bytes */

/* The two results are dense and in the same order. */
static void copy_row(int64_t n, void *const *data, const int64_t *strides, const void *context)
{
    const opjit_dtype dtype = *(const opjit_dtype *)context;
    const int64_t bytes = (int64_t)opjit_dtype_size(dtype), most = PART / bytes;
    for (int64_t i = 0; i < n; i += most) {
        const int64_t part = n - i < most ? n - i : most;
        char *self = (char *)data[0] + i * bytes, *other = (char *)data[1] + i * bytes;
        opjit_convert(part, (const char *)data[2] + i * strides[2] * bytes, dtype, strides[2], self, dtype);
        memcpy(other, self, (size_t)(part * bytes));
    }
}

opjit_status add_custom_backward_cpu(const opjit_tensor *grad, opjit_tensor *grad_self, opjit_tensor *grad_other)
{
    opjit_elements elements;
    OPJIT_CHECK(grad->dtype != OPJIT_OTHER_DTYPE && !opjit_is_float8(grad->dtype),
                "add_custom_backward takes bool, integers, floating and complex dtypes");
    OPJIT_TRY(opjit_empty_like(grad_self, grad, grad->dtype));
    OPJIT_TRY(opjit_empty_like(grad_other, grad, grad->dtype));
    OPJIT_TRY(opjit_elements_of(&elements, 3, (const opjit_tensor *[]){grad_self, grad_other, grad}));
    return opjit_for_rows(&elements, copy_row, &grad->dtype);
}
