/* add_custom on the toy device: a + b with broadcasting, both of one floating dtype. */
#include "opjit.h"

/* Where element `index` of the result, in row-major order, comes from in an operand: dimensions of size 1 are stretched. */
static int64_t source(const opjit_tensor *t, const opjit_tensor *out, int64_t index)
{
    int64_t offset = 0;
    for (int64_t d = out->dim - 1, own = t->dim - 1; own >= 0; d--, own--) {
        if (t->sizes[own] != 1)
            offset += index % out->sizes[d] * t->strides[own];
        index /= out->sizes[d];
    }
    return offset;
}

opjit_status add_custom_toy(const opjit_tensor *self, const opjit_tensor *other, opjit_tensor *out)
{
    const opjit_tensor *longer = self->dim >= other->dim ? self : other;
    const opjit_tensor *shorter = longer == self ? other : self;
    int64_t sizes[OPJIT_MAX_DIM];
    OPJIT_CHECK(self->dtype == other->dtype, "add_custom on toy takes two tensors of one dtype, not %s and %s",
                opjit_dtype_name(self->dtype), opjit_dtype_name(other->dtype));
    OPJIT_CHECK(longer->dim <= OPJIT_MAX_DIM, "a tensor has at most %d dimensions", OPJIT_MAX_DIM);
    for (int64_t d = longer->dim - 1, own = shorter->dim - 1; d >= 0; d--, own--) {
        int64_t a = longer->sizes[d], b = own >= 0 ? shorter->sizes[own] : 1;
        OPJIT_CHECK(a == b || a == 1 || b == 1, "add_custom cannot broadcast sizes %lld and %lld of dimension %lld",
                    (long long)a, (long long)b, (long long)d);
        sizes[d] = a == 1 ? b : a;
    }
    OPJIT_TRY(opjit_empty(out, longer->dim, sizes, self->dtype, self));
    OPJIT_DISPATCH_FLOATING(self->dtype, "add_custom on toy", {
        const scalar_t *a = (const scalar_t *)self->data;
        const scalar_t *b = (const scalar_t *)other->data;
        scalar_t *sum = (scalar_t *)out->data;
        for (int64_t i = 0; i < out->numel; i++)
            sum[i] = a[source(self, out, i)] + b[source(other, out, i)];
    })
    return OPJIT_OK;
}
