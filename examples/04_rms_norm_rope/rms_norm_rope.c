/*
 * rms_norm_rope on the CPU: two passes over the row of a head. The row stays in the L1 cache, so memory is read and
 * written once. torch's ops make a tensor for each step.
 */
#include <math.h>

#include "opjit.h"
#include "rms_norm_rope.h"

struct work {
    const float *x, *weight, *cosine, *sine;
    float *out, eps;
    int64_t heads, size;
};

/* 1 / sqrt(mean of squares), with eight partial sums, because the compiler must not reorder additions. */
static float inverse_rms(const float *row, int64_t size, float eps)
{
    float sums[8] = {0}, total = 0;
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        for (int k = 0; k < 8; k++)
            sums[k] += row[i + k] * row[i + k];
    for (; i < size; i++)
        total += row[i] * row[i];
    for (int k = 0; k < 8; k++)
        total += sums[k];
    return 1 / sqrtf(total / (float)size + eps);
}

static opjit_status rows(int64_t begin, int64_t end, void *context)
{
    const struct work *w = (const struct work *)context;
    int64_t half = w->size / 2;
    for (int64_t row = begin; row < end; row++) {
        const float *x = w->x + row * w->size, *c = w->cosine + row / w->heads * half,
                    *s = w->sine + row / w->heads * half;
        float *out = w->out + row * w->size, scale = inverse_rms(x, w->size, w->eps);
        for (int64_t i = 0; i < half; i++) {
            float a = x[i] * scale * w->weight[i], b = x[half + i] * scale * w->weight[half + i];
            out[i] = a * c[i] - b * s[i];
            out[half + i] = b * c[i] + a * s[i];
        }
    }
    return OPJIT_OK;
}

opjit_status rms_norm_rope_cpu(const opjit_tensor *x, const opjit_tensor *weight, const opjit_tensor *cosine,
                               const opjit_tensor *sine, double eps, opjit_tensor *out)
{
    OPJIT_TRY(check(x, weight, cosine, sine));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    struct work work = {(const float *)x->data,
                        (const float *)weight->data,
                        (const float *)cosine->data,
                        (const float *)sine->data,
                        (float *)out->data,
                        (float)eps,
                        x->sizes[1],
                        x->sizes[2]};
    return opjit_parallel_for(0, x->sizes[0] * x->sizes[1], 64, rows, &work);
}
