/*
 * all_reduce_rms_norm on the CPU: the sum of x over the ranks, plus the residual, normed; a row at a time through the
 * ranks' buffers.
 */
#include <math.h>

#include "opjit_collective.h"

/* Add the ranks and the residual, and norm. */
#define NORM(type_) \
    do { \
        const type_ *weights = (const type_ *)scales.data; \
        type_ *kept = (type_ *)residual->data + row * columns, *normed = (type_ *)out->data + row * columns; \
        float squares = 0; \
        for (int64_t i = 0; i < columns; i++) { \
            float sum = opjit_load((const type_ *)((const char *)p.buffer[0] + turn) + i); \
            for (int r = 1; r < p.world; r++) \
                sum += opjit_load((const type_ *)((const char *)p.buffer[r] + turn) + i); \
            opjit_store(kept + i, sum + opjit_load(kept + i)); \
            squares += opjit_load(kept + i) * opjit_load(kept + i); \
        } \
        const float scale = 1 / sqrtf(squares / (float)columns + (float)eps); \
        for (int64_t i = 0; i < columns; i++) \
            opjit_store(normed + i, opjit_load(kept + i) * scale * opjit_load(weights + i)); \
    } while (0)

opjit_status all_reduce_rms_norm_cpu(const opjit_tensor *x, opjit_tensor *residual, const opjit_tensor *weight,
                                     const char *group, double eps, opjit_tensor *out)
{
    opjit_peers p;
    opjit_tensor packed, scales;
    OPJIT_CHECK(
        x->dim > 0 && opjit_same_sizes(x, residual) && weight->numel == x->sizes[x->dim - 1] &&
            residual->dtype == x->dtype && weight->dtype == x->dtype && residual->contiguous,
        "takes x and a contiguous residual of the same sizes, and a weight for the last dimension, of one dtype");
    OPJIT_CHECK(opjit_is_floating(x->dtype) && x->dtype != OPJIT_FLOAT64, "takes float16, bfloat16 or float32, not %s",
                opjit_dtype_name(x->dtype));
    const int64_t columns = x->sizes[x->dim - 1], bytes = columns * (int64_t)opjit_dtype_size(x->dtype);
    OPJIT_TRY(opjit_peers_of(&p, group, 3 * (bytes + 64)));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    OPJIT_TRY(opjit_contiguous(&packed, x));
    OPJIT_TRY(opjit_contiguous(&scales, weight));
    opjit_agree(&p, x->numel << 8 | x->dtype);
    for (int64_t row = 0; row * columns < x->numel; row++) {
        const int64_t turn = opjit_turn(&p);
        memcpy((char *)p.buffer[p.rank] + turn, (const char *)packed.data + row * bytes, (size_t)bytes);
        OPJIT_BARRIER(&p);
        switch (x->dtype) {
        case OPJIT_FLOAT16: NORM(opjit_half); break;
        case OPJIT_BFLOAT16: NORM(opjit_bfloat16); break;
        default: NORM(float); break;
        }
    }
    return OPJIT_OK;
}
