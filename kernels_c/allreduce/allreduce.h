/* What the kernels of allreduce for the CPU and for CUDA have in common. */
#ifndef ALLREDUCE_H
#define ALLREDUCE_H

#include "opjit.h"

/* Leave out the dimensions of stride 0, which repeat what is left. Returns how often; the sum is to be multiplied by it. */
static int64_t drop_repeats(opjit_layout *layout)
{
    int64_t repeats = 1, dim = 0;
    for (int64_t d = 0; d < layout->dim; d++) {
        if (layout->strides[d] == 0) {
            repeats *= layout->sizes[d];
        } else {
            layout->sizes[dim] = layout->sizes[d];
            layout->strides[dim++] = layout->strides[d];
        }
    }
    if (dim == 0) {
        layout->sizes[0] = layout->strides[0] = 1;
        dim = 1;
    }
    layout->dim = dim;
    return repeats;
}

#endif
