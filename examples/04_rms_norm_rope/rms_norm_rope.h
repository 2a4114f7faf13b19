/* Check the arguments of both kernels. */
#ifndef RMS_NORM_ROPE_H
#define RMS_NORM_ROPE_H

static inline opjit_status check(const opjit_tensor *x, const opjit_tensor *weight, const opjit_tensor *cosine,
                                 const opjit_tensor *sine)
{
    const opjit_tensor *all[] = {x, weight, cosine, sine};
    for (int i = 0; i < 4; i++)
        OPJIT_CHECK(all[i]->dtype == OPJIT_FLOAT32 && all[i]->contiguous,
                    "rms_norm_rope takes contiguous float32 tensors");
    OPJIT_CHECK(x->dim == 3 && x->sizes[2] % 2 == 0, "x must be (tokens, heads, an even size)");
    OPJIT_CHECK(weight->dim == 1 && weight->sizes[0] == x->sizes[2], "weight must have x's last size");
    for (int i = 2; i < 4; i++)
        OPJIT_CHECK(all[i]->dim == 2 && all[i]->sizes[0] == x->sizes[0] && all[i]->sizes[1] == x->sizes[2] / 2,
                    "cosine and sine must be (tokens, half of x's last size)");
    return OPJIT_OK;
}

#endif
