/* add_custom_backward on the CPU: two copies of a gradient, which is read once. */
#include "opjit_elementwise.h"

/* Written without loops that vectors would help: there is nothing for the compiler's later passes, which take longest. */
#ifndef __clang__
#pragma GCC optimize "Og"
#endif

#define COPY_TWICE(type_) \
    do { \
        const type_ *from = (const type_ *)data[2]; \
        type_ *to_self = (type_ *)data[0], *to_other = (type_ *)data[1]; \
        for (int64_t i = 0; i < n; i++) \
            to_self[i] = to_other[i] = from[i * strides[2]]; \
    } while (0)

/* The two results are dense and in the same order. Rows that lie side by side are copied while they are in the cache. */
static void copy_row(int64_t n, void *const *data, const int64_t *strides, const void *context)
{
    const int64_t bytes = *(const int64_t *)context, most = 16384 / bytes;
    if (strides[2] == 1)
        for (int64_t i = 0; i < n; i += most) {
            size_t part = (size_t)((n - i < most ? n - i : most) * bytes);
            memcpy((char *)data[0] + i * bytes, (const char *)data[2] + i * bytes, part);
            memcpy((char *)data[1] + i * bytes, (const char *)data[2] + i * bytes, part);
        }
    else if (bytes == 1)
        COPY_TWICE(uint8_t);
    else if (bytes == 2)
        COPY_TWICE(uint16_t);
    else if (bytes == 4)
        COPY_TWICE(uint32_t);
    else
        COPY_TWICE(uint64_t);
}

opjit_status add_custom_backward_cpu(const opjit_tensor *grad, opjit_tensor *grad_self, opjit_tensor *grad_other)
{
    opjit_elements elements;
    OPJIT_CHECK(grad->dtype != OPJIT_OTHER_DTYPE, "add_custom_backward takes bool, integers, floating and complex dtypes");
    OPJIT_TRY(opjit_empty_like(grad_self, grad, grad->dtype));
    OPJIT_TRY(opjit_empty_like(grad_other, grad, grad->dtype));
    OPJIT_TRY(opjit_elements_of(&elements, 3, (const opjit_tensor *[]){grad_self, grad_other, grad}));
    if (elements.bytes[0] == 16)
        opjit_split_complex(&elements);
    return opjit_for_rows(&elements, copy_row, elements.bytes);
}
