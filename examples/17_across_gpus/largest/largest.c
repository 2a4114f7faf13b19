#include "opjit_peers.h"

opjit_status largest_cpu(const opjit_tensor *x, const char *group, opjit_tensor *out)
{
    opjit_peers p;
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "largest takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_peers_of(&p, group, 4 * x->numel));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    float *to = (float *)out->data;
    memcpy(p.buffer[p.rank], x->data, (size_t)(4 * x->numel));
    OPJIT_BARRIER(&p);
    memcpy(to, p.buffer[0], (size_t)(4 * x->numel));
    for (int r = 1; r < p.world; r++)
        for (int64_t i = 0; i < x->numel; i++) {
            const float other = ((const float *)p.buffer[r])[i];
            to[i] = other > to[i] ? other : to[i];
        }
    OPJIT_BARRIER(&p);
    return OPJIT_OK;
}
