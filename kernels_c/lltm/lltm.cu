/*
 * The LLTM cell on CUDA; lltm.h has its formulas.
 *
 * The time of a small cell consists of launches and latency, not arithmetic. Therefore, with up to FUSED_WORK
 * multiplications, an op is one launch, including the products, and follows the strides of its arguments:
 *   forward   A warp adds up the three gates of one state for a few rows of the batch, its lanes side by side along the
 *             depth (the S + F columns of the weights). Then one lane for each row computes the results.
 *   backward  Some blocks make gradients of the weights, for a few states each. The other blocks make gradients of
 *             input and old_h, for a few rows each. Both compute the dz that they need, which is faster than waiting.
 * A larger cell is faster with torch's matrix product (cuBLAS) and one kernel for the gates.
 *
 * Each sum has a fixed order, so the bits are the same in each run, on any stream and in a CUDA graph. Products round
 * float32 to TF32 only if torch is set to do so, and only in large cells.
 *
 * A recorded forward with batch 16, 32 features and 128 states needs 14.4 us on an H200, most of it on the host.
 * `python tests/benchmarks/lltm.py` shows it, and in its "device" rows the GPU's share.
 */
#include "lltm.h"
#include "opjit_reduce.h"

#define FUSED_WORK ((int64_t)1 << 26) /* multiplications at which both ways are equally fast on an H200 */
#define FEW_ROWS 2  /* of the batch for each warp of a forward, in batches of up to SMALL_BATCH rows */
#define MANY_ROWS 8 /* in larger ones */
#define SMALL_BATCH 32
#define WARPS 8 /* in a block */
#define THREADS (32 * WARPS)

/* ---------------------------------------------------------------------------------------------- */
/* Elements                                                                                       */

template <typename real>
struct matrix {
    const real *data; /* NULL: all zeros */
    int64_t row, column;
    __device__ real at(int64_t r, int64_t c) const { return data[r * row + c * column]; }
    __device__ real or_zero(int64_t r, int64_t c) const { return data ? at(r, c) : (real)0; }
};

template <typename real>
static matrix<real> view(const opjit_tensor *t)
{
    matrix<real> m = {nullptr, 0, 0};
    if (t) {
        m.data = (const real *)t->data;
        m.row = t->strides[0];
        m.column = t->strides[t->dim - 1];
    }
    return m;
}

/* NULL for an output without elements, which is not needed. */
template <typename real>
static real *elements(const opjit_tensor *t)
{
    return t->numel > 0 ? (real *)t->data : nullptr;
}

/* Is one launch, products included, faster? It also computes every cell with an empty part. */
static bool is_fused(const lltm_sizes *n)
{
    return n->features == 0 || (double)n->batch * 3 * n->state * (n->state + n->features) <= (double)FUSED_WORK;
}

#ifdef OPJIT_OP_lltm_forward

/* ---------------------------------------------------------------------------------------------- */
/* Forward                                                                                        */

template <typename real>
static __device__ real sigmoid(real x)
{
    return 1 / (1 + exp(-x));
}

template <typename real>
static __device__ real elu(real x)
{
    return x > 0 ? x : expm1(x);
}

template <typename real>
struct forward_call {
    matrix<real> input, weights, bias, old_h, old_cell;
    real *new_h, *new_cell, *gates;
    int64_t batch, features, state;

    /* All results for one row and state, from z without the bias. */
    __device__ void finish(int64_t b, int64_t s, real z0, real z1, real z2) const
    {
        real i = sigmoid(z0 + bias.at(0, s)), o = sigmoid(z1 + bias.at(0, state + s));
        real g = elu(z2 + bias.at(0, 2 * state + s));
        real cell = old_cell.at(b, s) + g * i, t = tanh(cell), *out = gates + b * 4 * state + s;
        out[0] = i;
        out[state] = o;
        out[2 * state] = g;
        out[3 * state] = t;
        new_cell[b * state + s] = cell;
        new_h[b * state + s] = t * o;
    }
};

/* Add the products of a part of the depth to the sums. Rows of x beyond `last` are read there, and discarded later. */
template <typename real, int rows>
static __device__ void add_up(real (&sum)[3][rows], const matrix<real> &x, const matrix<real> &weights, int64_t state,
                              int64_t s, int64_t first, int64_t begin, int64_t depth, int64_t last)
{
#pragma unroll 4
    for (int64_t k = threadIdx.x; k < depth; k += 32) {
        real w0 = weights.at(s, begin + k), w1 = weights.at(state + s, begin + k),
             w2 = weights.at(2 * state + s, begin + k);
#pragma unroll
        for (int r = 0; r < rows; r++) {
            real value = x.at(first + r < last ? first + r : last, k);
            sum[0][r] += w0 * value;
            sum[1][r] += w1 * value;
            sum[2][r] += w2 * value;
        }
    }
}

/* A block has some warps, in y, for one state. Block x computes state x mod S, for part x div S of the batch. */
template <typename real, int rows>
static __global__ void __launch_bounds__(THREADS) forward_fused(const __grid_constant__ forward_call<real> call)
{
    const unsigned state = (unsigned)call.state, s = blockIdx.x % state;
    const int64_t first = ((int64_t)(blockIdx.x / state) * blockDim.y + threadIdx.y) * rows, last = call.batch - 1;
    real sum[3][rows] = {};
    if (first > last)
        return;
    add_up<real, rows>(sum, call.old_h, call.weights, call.state, s, first, 0, call.state, last);
    add_up<real, rows>(sum, call.input, call.weights, call.state, s, first, call.state, call.features, last);
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
#pragma unroll
        for (int r = 0; r < rows; r++)
#pragma unroll
            for (int gate = 0; gate < 3; gate++)
                sum[gate][r] += __shfl_xor_sync(0xffffffffu, sum[gate][r], step);
    real z0 = 0, z1 = 0, z2 = 0;
#pragma unroll
    for (int r = 0; r < rows; r++)
        if (threadIdx.x == r) {
            z0 = sum[0][r];
            z1 = sum[1][r];
            z2 = sum[2][r];
        }
    if (threadIdx.x < rows && first + threadIdx.x <= last)
        call.finish(first + threadIdx.x, s, z0, z1, z2);
}

/* Only the gates, from products in the memory of i, o and g. */
template <typename real>
static __global__ void __launch_bounds__(THREADS) forward_gates(const __grid_constant__ forward_call<real> call)
{
    OPJIT_KERNEL_LOOP(i, call.batch * call.state) {
        int64_t b = i / call.state, s = i - b * call.state;
        const real *z = call.gates + b * 4 * call.state + s;
        call.finish(b, s, z[0], z[call.state], z[2 * call.state]);
    }
}

template <typename real, int rows>
static opjit_status launch_fused(const forward_call<real> &call, cudaStream_t stream)
{
    const int64_t groups = (call.batch + rows - 1) / rows, warps = groups < WARPS ? groups : WARPS;
    const int64_t blocks = (groups + warps - 1) / warps * call.state;
    OPJIT_CHECK(blocks <= INT32_MAX, "lltm_forward: these tensors are too large for one launch; split the batch");
    forward_fused<real, rows><<<(unsigned)blocks, dim3(32, (unsigned)warps), 0, stream>>>(call);
    return OPJIT_LAUNCHED();
}

template <typename real>
static opjit_status run_forward(const lltm_forward_call *c, cudaStream_t stream)
{
    const forward_call<real> call = {view<real>(c->input),
                                     view<real>(c->weights),
                                     view<real>(c->bias),
                                     view<real>(c->old_h),
                                     view<real>(c->old_cell),
                                     elements<real>(c->new_h),
                                     elements<real>(c->new_cell),
                                     elements<real>(c->gates),
                                     c->n.batch,
                                     c->n.features,
                                     c->n.state};
    if (is_fused(&c->n))
        return call.batch <= SMALL_BATCH ? launch_fused<real, FEW_ROWS>(call, stream)
                                         : launch_fused<real, MANY_ROWS>(call, stream);
    OPJIT_TRY(lltm_forward_products(c));
    forward_gates<real><<<opjit_blocks(call.batch * call.state, THREADS), THREADS, 0, stream>>>(call);
    return OPJIT_LAUNCHED();
}

opjit_status lltm_forward_cuda(const opjit_tensor *input, const opjit_tensor *weights, const opjit_tensor *bias,
                               const opjit_tensor *old_h, const opjit_tensor *old_cell, opjit_tensor *new_h,
                               opjit_tensor *new_cell, opjit_tensor *gates, cudaStream_t stream)
{
    lltm_forward_call call = {input, weights, bias, old_h, old_cell, new_h, new_cell, gates, {}};
    OPJIT_TRY(lltm_start_forward(&call));
    if (new_h->numel == 0)
        return OPJIT_OK;
    return input->dtype == OPJIT_FLOAT32 ? run_forward<float>(&call, stream) : run_forward<double>(&call, stream);
}

#endif
#ifdef OPJIT_OP_lltm_backward

/* ---------------------------------------------------------------------------------------------- */
/* Backward                                                                                       */

template <typename real>
struct gradient { /* one row's, for one state */
    real z0, z1, z2, cell;
};

template <typename real>
struct backward_call {
    matrix<real> grad_h, grad_cell, gates, input, weights, old_h;
    real *grad_input, *grad_weights, *grad_bias, *grad_old_h, *grad_old_cell; /* NULL: not wanted */
    int64_t batch, features, state;
    int weight_blocks, weight_chunks, input_chunks; /* backward_fused's: blocks for the weights; chunks of columns */

    __device__ gradient<real> differentiate(int64_t b, int64_t s) const
    {
        real i = gates.at(b, s), o = gates.at(b, state + s), g = gates.at(b, 2 * state + s),
             t = gates.at(b, 3 * state + s);
        real h = grad_h.or_zero(b, s), cell = h * o * (1 - t * t) + grad_cell.or_zero(b, s);
        return {cell * g * i * (1 - i), h * t * o * (1 - o), cell * i * (g > 0 ? (real)1 : g + 1), cell};
    }

    /* Column k of [old_h, x]. */
    __device__ real x(int64_t b, int64_t k) const { return k < state ? old_h.at(b, k) : input.at(b, k - state); }
};

/* Sums have two levels, SHORT_SUM rows or INPUT_STATES states and their sums, so that rounding errors grow slowly. */
#define STATES 2     /* for which one block makes gradients of the weights */
#define BATCH 32     /* rows of dz that a block keeps at a time */
#define SHORT_SUM 16 /* rows that are added up before they are added to the total */
#define INPUT_ROWS 4 /* of the batch, in a block for 32 columns of the gradients of input or old_h */
#define INPUT_STATES (THREADS / INPUT_ROWS) /* for which a block keeps dz at the same time */

static_assert(3 * STATES <= WARPS && BATCH == 32, "a warp adds up one column of dz, a lane for each row");
static_assert(INPUT_ROWS <= WARPS, "a warp writes each row");

/* Weights, bias and old_cell of STATES states, for THREADS columns of the weights. */
template <typename real>
static __device__ void backward_weights(const backward_call<real> &call, int block)
{
    __shared__ real dz[BATCH][3 * STATES];
    const int64_t s0 = (int64_t)(block / call.weight_chunks) * STATES, depth = call.state + call.features;
    const int64_t k = (int64_t)(block % call.weight_chunks) * THREADS + threadIdx.x;
    const bool first = block % call.weight_chunks == 0;
    const int row = threadIdx.x / STATES, at = threadIdx.x % STATES, warp = threadIdx.x / 32;
    const bool adds = call.grad_weights && k < depth;
    real sum[3 * STATES] = {}, bias = 0;
    for (int64_t b0 = 0; b0 < call.batch; b0 += BATCH) {
        if (row < BATCH) {
            gradient<real> of = {};
            if (b0 + row < call.batch && s0 + at < call.state) {
                of = call.differentiate(b0 + row, s0 + at);
                if (first)
                    call.grad_old_cell[(b0 + row) * call.state + s0 + at] = of.cell;
            }
            dz[row][at] = of.z0;
            dz[row][STATES + at] = of.z1;
            dz[row][2 * STATES + at] = of.z2;
        }
        __syncthreads();
        if (first && warp < 3 * STATES)
            bias += dz[threadIdx.x % 32][warp];
        const int rows = (int)(call.batch - b0 < BATCH ? call.batch - b0 : BATCH);
        for (int b1 = 0; b1 < rows && adds; b1 += SHORT_SUM) {
            const int end = rows < b1 + SHORT_SUM ? rows : b1 + SHORT_SUM;
            real few[3 * STATES] = {};
#pragma unroll 8
            for (int b = b1; b < end; b++) {
                real x = call.x(b0 + b, k);
#pragma unroll
                for (int n = 0; n < 3 * STATES; n++)
                    few[n] += dz[b][n] * x;
            }
#pragma unroll
            for (int n = 0; n < 3 * STATES; n++)
                sum[n] += few[n];
        }
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 3 * STATES; n++)
        if (adds && s0 + n % STATES < call.state)
            call.grad_weights[(n / STATES * call.state + s0 + n % STATES) * depth + k] = sum[n];
    if (!first || warp >= 3 * STATES)
        return;
    bias = opjit_warp_reduce(bias, opjit_add());
    if (call.grad_bias && threadIdx.x % 32 == 0 && s0 + warp % STATES < call.state)
        call.grad_bias[warp / STATES * call.state + s0 + warp % STATES] = bias;
}

/* 32 columns of the gradients of old_h and input, for INPUT_ROWS rows of the batch; the warps share the states. */
template <typename real>
static __device__ void backward_inputs(const backward_call<real> &call, int block)
{
    __shared__ __align__(16) real dz[3][INPUT_STATES][INPUT_ROWS];
    __shared__ real part[WARPS][INPUT_ROWS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, depth = (int)(call.state + call.features);
    const int64_t b0 = (int64_t)(block / call.input_chunks) * INPUT_ROWS,
                  k = (int64_t)(block % call.input_chunks) * 32 + lane;
    const int64_t b = b0 + threadIdx.x % INPUT_ROWS;
    const int each = INPUT_STATES / WARPS; /* states of a warp at once */
    real sum[INPUT_ROWS] = {};
    for (int64_t s0 = 0; s0 < call.state; s0 += INPUT_STATES) {
        const int64_t mine = s0 + threadIdx.x / INPUT_ROWS;
        gradient<real> of = {};
        real w[3][each]; /* loaded before the wait for dz */
#pragma unroll
        for (int gate = 0; gate < 3; gate++)
#pragma unroll
            for (int i = 0; i < each; i++) {
                const int64_t s = s0 + i * WARPS + warp;
                w[gate][i] = s < call.state && k < depth ? call.weights.at(gate * call.state + s, k) : (real)0;
            }
        if (b < call.batch && mine < call.state)
            of = call.differentiate(b, mine);
        dz[0][threadIdx.x / INPUT_ROWS][threadIdx.x % INPUT_ROWS] = of.z0;
        dz[1][threadIdx.x / INPUT_ROWS][threadIdx.x % INPUT_ROWS] = of.z1;
        dz[2][threadIdx.x / INPUT_ROWS][threadIdx.x % INPUT_ROWS] = of.z2;
        __syncthreads();
        real few[INPUT_ROWS] = {};
#pragma unroll
        for (int gate = 0; gate < 3; gate++)
#pragma unroll
            for (int i = 0; i < each; i++)
#pragma unroll
                for (int r = 0; r < INPUT_ROWS; r++)
                    few[r] += w[gate][i] * dz[gate][i * WARPS + warp][r];
#pragma unroll
        for (int r = 0; r < INPUT_ROWS; r++)
            sum[r] += few[r];
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < INPUT_ROWS; r++)
        part[warp][r][lane] = sum[r];
    __syncthreads();
    const int64_t row = b0 + warp; /* a warp for each row */
    if (warp >= INPUT_ROWS || row >= call.batch || k >= depth)
        return;
    real total = 0;
    for (int from = 0; from < WARPS; from++)
        total += part[from][warp][lane];
    if (k < call.state)
        call.grad_old_h[row * call.state + k] = total;
    else
        call.grad_input[row * call.features + k - call.state] = total;
}

template <typename real>
static __global__ void __launch_bounds__(THREADS) backward_fused(const __grid_constant__ backward_call<real> call)
{
    if ((int)blockIdx.x < call.weight_blocks)
        backward_weights<real>(call, (int)blockIdx.x);
    else
        backward_inputs<real>(call, (int)blockIdx.x - call.weight_blocks);
}

/* dz and the gradients of old_cell and bias alone, for 32 states; the warps share the batch. */
template <typename real>
static __global__ void __launch_bounds__(1024)
    backward_gates(const __grid_constant__ backward_call<real> call, real *dz)
{
    __shared__ real part[3][32][33];
    const int64_t s = (int64_t)blockIdx.x * 32 + threadIdx.x, state = call.state;
    real sum[3] = {};
    for (int64_t b = threadIdx.y; b < call.batch && s < state; b += 32) {
        gradient<real> of = call.differentiate(b, s);
        real *to = dz + b * 3 * state + s;
        to[0] = of.z0;
        to[state] = of.z1;
        to[2 * state] = of.z2;
        call.grad_old_cell[b * state + s] = of.cell;
        sum[0] += of.z0;
        sum[1] += of.z1;
        sum[2] += of.z2;
    }
    for (int gate = 0; gate < 3; gate++)
        part[gate][threadIdx.y][threadIdx.x] = sum[gate];
    __syncthreads();
    const int64_t to = (int64_t)blockIdx.x * 32 + threadIdx.y; /* now a warp for each state */
    for (int gate = 0; gate < 3; gate++) {
        const real total = opjit_warp_reduce(part[gate][threadIdx.x][threadIdx.y], opjit_add());
        if (call.grad_bias && threadIdx.x == 0 && to < state)
            call.grad_bias[gate * state + to] = total;
    }
}

/* The caller frees dz. */
template <typename real>
static opjit_status run_large_backward(const lltm_backward_call *c, const backward_call<real> &call,
                                       cudaStream_t stream)
{
    OPJIT_TRY(lltm_output(c->dz, call.batch, 3 * call.state, c->gates));
    backward_gates<real><<<(unsigned)((call.state + 31) / 32), dim3(32, 32), 0, stream>>>(call, (real *)c->dz->data);
    OPJIT_TRY(OPJIT_LAUNCHED());
    return lltm_backward_products(c, c->dz);
}

template <typename real>
static opjit_status run_backward(const lltm_backward_call *c, cudaStream_t stream)
{
    backward_call<real> call = {view<real>(c->grad_h),
                                view<real>(c->grad_cell),
                                view<real>(c->gates),
                                view<real>(c->input),
                                view<real>(c->weights),
                                view<real>(c->old_h),
                                elements<real>(c->grad_input),
                                elements<real>(c->grad_weights),
                                elements<real>(c->grad_bias),
                                elements<real>(c->grad_old_h),
                                elements<real>(c->grad_old_cell),
                                c->n.batch,
                                c->n.features,
                                c->n.state,
                                0,
                                1,
                                0};
    if (!is_fused(&c->n)) {
        opjit_status status = run_large_backward(c, call, stream);
        if (c->dz->handle)
            (void)aoti_torch_delete_tensor_object(c->dz->handle);
        return status;
    }
    const int64_t depth = call.state + call.features, groups = (call.batch + INPUT_ROWS - 1) / INPUT_ROWS;
    call.weight_chunks = c->parameters ? (int)((depth + THREADS - 1) / THREADS) : 1;
    call.weight_blocks = (int)((call.state + STATES - 1) / STATES) * call.weight_chunks;
    call.input_chunks = (int)((depth + 31) / 32);
    const int64_t blocks = call.weight_blocks + (c->inputs ? call.input_chunks * groups : 0);
    OPJIT_CHECK(blocks <= INT32_MAX, "lltm_backward: these tensors are too large for one launch; split the batch");
    if (blocks == 0)
        return OPJIT_OK;
    backward_fused<real><<<(unsigned)blocks, THREADS, 0, stream>>>(call);
    return OPJIT_LAUNCHED();
}

opjit_status lltm_backward_cuda(const opjit_tensor *grad_h, const opjit_tensor *grad_cell, const opjit_tensor *gates,
                                const opjit_tensor *input, const opjit_tensor *weights, const opjit_tensor *old_h,
                                const opjit_bools *output_mask, opjit_tensor *grad_input, opjit_tensor *grad_weights,
                                opjit_tensor *grad_bias, opjit_tensor *grad_old_h, opjit_tensor *grad_old_cell,
                                cudaStream_t stream)
{
    opjit_tensor dz = {};
    lltm_backward_call call = {grad_h,      grad_cell,  gates,        input,     weights,    old_h,
                               output_mask, grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell,
                               &dz,         {},         false,        false};
    OPJIT_TRY(lltm_start_backward(&call));
    return input->dtype == OPJIT_FLOAT32 ? run_backward<float>(&call, stream) : run_backward<double>(&call, stream);
}

#endif
