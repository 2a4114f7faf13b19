/*
 * Draw one index of each row from softmax(logits / temperature) over the k largest logits of the row. All logits that
 * equal the k-th one stay in. Without a sort, four passes find the k-th largest logit, and a fifth one draws.
 */
#include "sample_top_k.h"

typedef struct rows {
    const float *logits;
    int64_t n, k;
    float temperature;
    uint64_t seed;
    int64_t *out;
} rows;

/* The k-th largest rank, eight bits at a time. Each pass counts the next eight bits of the ranks that match so far. */
static uint32_t kth_largest(const float *row, int64_t n, int64_t k)
{
    uint32_t found = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t count[256] = {0};
        uint32_t digit = 255;
        for (int64_t i = 0; i < n; i++) {
            const uint32_t rest = (rank_of(row[i]) ^ found) >> shift;
            if (rest < 256)
                count[rest]++;
        }
        for (; count[digit] < k; digit--)
            k -= count[digit];
        found |= digit << shift;
    }
    return found;
}

static opjit_status sample(int64_t begin, int64_t end, void *context)
{
    const rows *r = (const rows *)context;
    for (int64_t row = begin; row < end; row++) {
        const float *logits = r->logits + row * r->n;
        const uint32_t least = kth_largest(logits, r->n, r->k);
        uint64_t largest = 0;
        for (int64_t i = 0; i < r->n; i++) {
            if (rank_of(logits[i]) < least)
                continue;
            const uint64_t next = contender(logits[i], r->temperature, r->seed, row * r->n, (uint32_t)i);
            largest = next > largest ? next : largest;
        }
        r->out[row] = winner(largest);
    }
    return OPJIT_OK;
}

opjit_status sample_top_k_cpu(const opjit_tensor *logits, int64_t k, double temperature, const uint64_t *seed,
                              opjit_tensor *out)
{
    opjit_tensor packed;
    OPJIT_TRY(check_sample_top_k(logits, k, temperature));
    OPJIT_TRY(opjit_contiguous(&packed, logits));
    OPJIT_TRY(opjit_empty(out, logits->dim - 1, logits->sizes, OPJIT_INT64, logits));
    const int64_t n = logits->sizes[logits->dim - 1];
    rows all = {(const float *)packed.data, n, k, (float)temperature, *seed, (int64_t *)out->data};
    return opjit_parallel_for(0, out->numel, 1 + 4096 / n, sample, &all);
}
