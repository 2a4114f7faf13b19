/*
 * The LLTM cell for CUDA; what it computes is in lltm.h.
 *
 * An LLTM is small: what it takes is launches and latency, not arithmetic. So up to FUSED_WORK multiplications each op is one
 * launch with its matrix products inside, and strides are followed where the tensors lie:
 *   forward   a warp adds up the three gates of one state for a few rows of the batch, its lanes side by side along the
 *             depth; then a lane for each row does the rest
 *   backward  some blocks make gradients of the weights, a few states each; the others those of input and old_h, a few rows
 *             of the batch each. Both compute the gradients of z that they need, which is cheaper than waiting for them.
 * Beyond, torch's own matrix product (cuBLAS) and one kernel for the gates take less time.
 *
 * Every sum has one order: the same bits each time, on any stream and under CUDA graphs. float32 is never rounded to TF32,
 * unless torch is told so for its matrix products, and then in large ones only.
 */
#include "lltm.h"
#include "opjit_cuda.h"

#define FUSED_WORK ((int64_t)1 << 26) /* multiplications of one product (measured on an H200) */
#define FEW_ROWS 2                    /* of the batch that a warp takes in the forward, */
#define MANY_ROWS 8                   /* and in a batch of more than SMALL_BATCH */
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

/* ---------------------------------------------------------------------------------------------- */
/* torch's matrix product                                                                         */

/* A (rows, columns) view of a tensor's memory, from the offset-th element on. The handle is the caller's to free. */
static opjit_status part_of(torch_tensor t, int64_t rows, int64_t columns, int64_t row, int64_t column, int64_t offset,
                            torch_tensor *part)
{
    const int64_t sizes[2] = {rows, columns}, strides[2] = {row, column};
    OPJIT_TORCH(aoti_torch__reinterpret_tensor(t, 2, sizes, strides, offset, part));
    return OPJIT_OK;
}

/* out = a b, or out += a b. */
static opjit_status multiply(torch_tensor out, torch_tensor a, torch_tensor b, bool add)
{
    if (add)
        OPJIT_TORCH(aoti_torch_cuda_addmm_out(out, out, a, b, 1.0, 1.0));
    else
        OPJIT_TORCH(aoti_torch_cuda_mm_out(out, a, b));
    return OPJIT_OK;
}

static void free_all(torch_tensor *handles, int count)
{
    for (int i = 0; i < count; i++)
        if (handles[i])
            (void)aoti_torch_delete_tensor_object(handles[i]);
}

/* Is one launch, with the products inside, faster? torch's product takes no empty part. */
static bool is_fused(const lltm_sizes *n)
{
    return n->features == 0 || (double)n->batch * 3 * n->state * (n->state + n->features) <= (double)FUSED_WORK;
}

#ifdef OPJIT_OP_lltm_forward

/* ---------------------------------------------------------------------------------------------- */
/* Forward                                                                                        */

static __device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
static __device__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
static __device__ float elu(float x) { return x > 0.0f ? x : expm1f(x); }
static __device__ double elu(double x) { return x > 0.0 ? x : expm1(x); }
static __device__ float tangent(float x) { return tanhf(x); }
static __device__ double tangent(double x) { return tanh(x); }

template <typename real>
struct forward_call {
    matrix<real> input, weights, bias, old_h, old_cell;
    real *new_h, *new_cell, *gates;
    int64_t batch, features, state;

    /* From the sums of products to all results of one state of one row. */
    __device__ void finish(int64_t b, int64_t s, real z0, real z1, real z2) const
    {
        real i = sigmoid(z0 + bias.at(0, s)), o = sigmoid(z1 + bias.at(0, state + s)), g = elu(z2 + bias.at(0, 2 * state + s));
        real cell = old_cell.at(b, s) + g * i, t = tangent(cell), *out = gates + b * 4 * state + s;
        out[0] = i;
        out[state] = o;
        out[2 * state] = g;
        out[3 * state] = t;
        new_cell[b * state + s] = cell;
        new_h[b * state + s] = t * o;
    }
};

/* Add the products of a part of the depth to the sums; row `last` of x stands in for those behind it. */
template <typename real, int rows>
static __device__ void add_up(real (&sum)[3][rows], const matrix<real> &x, const matrix<real> &weights, int64_t state, int64_t s,
                              int64_t first, int64_t begin, int64_t depth, int64_t last)
{
#pragma unroll 4
    for (int64_t k = threadIdx.x; k < depth; k += 32) {
        real w0 = weights.at(s, begin + k), w1 = weights.at(state + s, begin + k), w2 = weights.at(2 * state + s, begin + k);
#pragma unroll
        for (int r = 0; r < rows; r++) {
            real value = x.at(first + r < last ? first + r : last, k);
            sum[0][r] += w0 * value;
            sum[1][r] += w1 * value;
            sum[2][r] += w2 * value;
        }
    }
}

/* A block is some warps, in y, for one state; with the states counted through, blockIdx.x counts on through the batch. */
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

/* The gates alone, from the sums that lie where i, o and g will. */
template <typename real>
static __global__ void __launch_bounds__(THREADS) forward_gates(const __grid_constant__ forward_call<real> call)
{
    OPJIT_KERNEL_LOOP(i, call.batch * call.state)
    {
        int64_t b = i / call.state, s = i - b * call.state;
        const real *z = call.gates + b * 4 * call.state + s;
        call.finish(b, s, z[0], z[call.state], z[2 * call.state]);
    }
}

/* The sums of products of the forward, to where i, o and g will lie. */
static opjit_status forward_products(const lltm_sizes *n, const opjit_tensor *input, const opjit_tensor *weights,
                                     const opjit_tensor *old_h, const opjit_tensor *gates, torch_tensor *v)
{
    const int64_t state = n->state, row = weights->strides[0], column = weights->strides[1];
    OPJIT_TRY(part_of(gates->handle, n->batch, 3 * state, 4 * state, 1, 0, &v[0]));
    OPJIT_TRY(part_of(weights->handle, state, 3 * state, column, row, 0, &v[1]));
    OPJIT_TRY(part_of(weights->handle, n->features, 3 * state, column, row, state * column, &v[2]));
    OPJIT_TRY(multiply(v[0], old_h->handle, v[1], false));
    return multiply(v[0], input->handle, v[2], true);
}

template <typename real, int rows>
static opjit_status launch_fused(const forward_call<real> &call, cudaStream_t stream)
{
    const int64_t groups = (call.batch + rows - 1) / rows, warps = groups < WARPS ? groups : WARPS;
    const int64_t blocks = (groups + warps - 1) / warps * call.state;
    OPJIT_CHECK(blocks <= INT32_MAX, "lltm_forward takes no tensors as large as these");
    forward_fused<real, rows><<<(unsigned)blocks, dim3(32, (unsigned)warps), 0, stream>>>(call);
    return OPJIT_LAUNCHED();
}

template <typename real>
static opjit_status run_forward(const lltm_sizes *n, const opjit_tensor *input, const opjit_tensor *weights, const opjit_tensor *bias,
                                const opjit_tensor *old_h, const opjit_tensor *old_cell, opjit_tensor *new_h,
                                opjit_tensor *new_cell, opjit_tensor *gates, cudaStream_t stream)
{
    const forward_call<real> call = {view<real>(input), view<real>(weights), view<real>(bias), view<real>(old_h),
                                     view<real>(old_cell), (real *)new_h->data, (real *)new_cell->data, (real *)gates->data,
                                     n->batch, n->features, n->state};
    if (is_fused(n))
        return n->batch <= SMALL_BATCH ? launch_fused<real, FEW_ROWS>(call, stream) : launch_fused<real, MANY_ROWS>(call, stream);
    torch_tensor views[3] = {};
    opjit_status status = forward_products(n, input, weights, old_h, gates, views);
    free_all(views, 3);
    OPJIT_TRY(status);
    forward_gates<real><<<opjit_blocks(n->batch * n->state, THREADS), THREADS, 0, stream>>>(call);
    return OPJIT_LAUNCHED();
}

opjit_status lltm_forward_cuda(const opjit_tensor *input, const opjit_tensor *weights, const opjit_tensor *bias,
                               const opjit_tensor *old_h, const opjit_tensor *old_cell, opjit_tensor *new_h,
                               opjit_tensor *new_cell, opjit_tensor *gates, cudaStream_t stream)
{
    lltm_sizes n;
    OPJIT_TRY(lltm_check_forward(input, weights, bias, old_h, old_cell, &n));
    OPJIT_TRY(lltm_output(new_h, n.batch, n.state, input));
    OPJIT_TRY(lltm_output(new_cell, n.batch, n.state, input));
    OPJIT_TRY(lltm_output(gates, n.batch, 4 * n.state, input));
    if (n.batch * n.state == 0)
        return OPJIT_OK;
    return input->dtype == OPJIT_FLOAT32
               ? run_forward<float>(&n, input, weights, bias, old_h, old_cell, new_h, new_cell, gates, stream)
               : run_forward<double>(&n, input, weights, bias, old_h, old_cell, new_h, new_cell, gates, stream);
}

#endif
#ifdef OPJIT_OP_lltm_backward

/* ---------------------------------------------------------------------------------------------- */
/* Backward                                                                                       */

template <typename real>
struct gradient { /* of z and of old_cell, in one place */
    real z0, z1, z2, cell;
};

template <typename real>
struct backward_call {
    matrix<real> grad_h, grad_cell, gates, input, weights, old_h;
    real *grad_input, *grad_weights, *grad_bias, *grad_old_h, *grad_old_cell; /* what is not wanted is NULL, but for the last */
    int64_t batch, features, state;
    int weight_blocks, weight_chunks, input_chunks; /* see backward_fused */

    __device__ gradient<real> differentiate(int64_t b, int64_t s) const
    {
        real i = gates.at(b, s), o = gates.at(b, state + s), g = gates.at(b, 2 * state + s), t = gates.at(b, 3 * state + s);
        real h = grad_h.or_zero(b, s), cell = h * o * (1 - t * t) + grad_cell.or_zero(b, s);
        return {cell * g * i * (1 - i), h * t * o * (1 - o), cell * i * (g > 0 ? (real)1 : g + 1), cell};
    }

    /* Column k of [old_h, x]. */
    __device__ real x(int64_t b, int64_t k) const { return k < state ? old_h.at(b, k) : input.at(b, k - state); }
};

#define STATES 2      /* whose weights a block takes */
#define BATCH 32      /* rows whose gradients it holds at once, */
#define SHORT_SUM 16  /* and that are added up before they are added to the others */
#define INPUT_ROWS 4  /* of the batch, in a block that takes 32 columns of input or old_h */
#define INPUT_STATES (THREADS / INPUT_ROWS) /* whose gradients it holds at once */

static_assert(3 * STATES <= WARPS && BATCH == 32, "a warp adds up one part of the bias, a lane for each row");
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
    for (int step = 16; step > 0; step /= 2)
        bias += __shfl_xor_sync(0xffffffffu, bias, step);
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
    const int64_t b0 = (int64_t)(block / call.input_chunks) * INPUT_ROWS, k = (int64_t)(block % call.input_chunks) * 32 + lane;
    const int64_t b = b0 + threadIdx.x % INPUT_ROWS;
    const int each = INPUT_STATES / WARPS; /* states of a warp at once */
    real sum[INPUT_ROWS] = {};
    for (int64_t s0 = 0; s0 < call.state; s0 += INPUT_STATES) {
        const int64_t mine = s0 + threadIdx.x / INPUT_ROWS;
        gradient<real> of = {};
        real w[3][each]; /* asked for before the gradients are waited for */
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

/* The gradients of z, old_cell and bias alone, for 32 states; the warps share the batch. */
template <typename real>
static __global__ void __launch_bounds__(1024) backward_gates(const __grid_constant__ backward_call<real> call, real *dz)
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
        real total = part[gate][threadIdx.x][threadIdx.y];
        for (int step = 16; step > 0; step /= 2)
            total += __shfl_xor_sync(0xffffffffu, total, step);
        if (call.grad_bias && threadIdx.x == 0 && to < state)
            call.grad_bias[gate * state + to] = total;
    }
}

/* The products of the backward, from the gradients of z in a tensor of their own. */
static opjit_status backward_products(const lltm_backward_call *c, torch_tensor dz, torch_tensor *v)
{
    const int64_t batch = c->n.batch, state = c->n.state, features = c->n.features, depth = state + features;
    const int64_t row = c->weights->strides[0], column = c->weights->strides[1];
    if (c->inputs) {
        OPJIT_TRY(part_of(c->weights->handle, 3 * state, state, row, column, 0, &v[0]));
        OPJIT_TRY(part_of(c->weights->handle, 3 * state, features, row, column, state * column, &v[1]));
        OPJIT_TRY(multiply(c->grad_old_h->handle, dz, v[0], false));
        OPJIT_TRY(multiply(c->grad_input->handle, dz, v[1], false));
    }
    if (c->parameters) {
        OPJIT_TRY(part_of(dz, 3 * state, batch, 1, 3 * state, 0, &v[2]));
        OPJIT_TRY(part_of(c->grad_weights->handle, 3 * state, state, depth, 1, 0, &v[3]));
        OPJIT_TRY(part_of(c->grad_weights->handle, 3 * state, features, depth, 1, state, &v[4]));
        OPJIT_TRY(multiply(v[3], v[2], c->old_h->handle, false));
        OPJIT_TRY(multiply(v[4], v[2], c->input->handle, false));
    }
    return OPJIT_OK;
}

template <typename real>
static opjit_status run_large_backward(const lltm_backward_call *c, const backward_call<real> &call, cudaStream_t stream)
{
    const int64_t sizes[2] = {c->n.batch, 3 * c->n.state}, strides[2] = {3 * c->n.state, 1};
    torch_tensor handles[6] = {}; /* the gradients of z, and views */
    int32_t dtype;
    void *dz;
    OPJIT_TORCH(aoti_torch_get_dtype(c->input->handle, &dtype));
    OPJIT_TORCH(aoti_torch_empty_strided(2, sizes, strides, dtype, c->input->device_type, c->input->device_index, &handles[0]));
    opjit_status status = OPJIT_OK;
    if (torch_get_mutable_data_ptr(handles[0], &dz) != 0)
        status = opjit_torch_error(__FILE__, __LINE__, "torch_get_mutable_data_ptr");
    if (!status) {
        backward_gates<real><<<(unsigned)((call.state + 31) / 32), dim3(32, 32), 0, stream>>>(call, (real *)dz);
        status = OPJIT_LAUNCHED();
    }
    if (!status)
        status = backward_products(c, handles[0], handles + 1);
    free_all(handles, 6);
    return status;
}

template <typename real>
static opjit_status run_backward(const lltm_backward_call *c, cudaStream_t stream)
{
    backward_call<real> call = {view<real>(c->grad_h), view<real>(c->grad_cell), view<real>(c->gates), view<real>(c->input),
                                view<real>(c->weights), view<real>(c->old_h),
                                c->inputs ? (real *)c->grad_input->data : nullptr,
                                c->parameters ? (real *)c->grad_weights->data : nullptr,
                                c->parameters ? (real *)c->grad_bias->data : nullptr,
                                c->inputs ? (real *)c->grad_old_h->data : nullptr, (real *)c->grad_old_cell->data,
                                c->n.batch, c->n.features, c->n.state, 0, 1, 0};
    if (!is_fused(&c->n) && c->n.batch > 0)
        return run_large_backward(c, call, stream);
    const int64_t depth = call.state + call.features, groups = (call.batch + INPUT_ROWS - 1) / INPUT_ROWS;
    call.weight_chunks = c->parameters ? (int)((depth + THREADS - 1) / THREADS) : 1;
    call.weight_blocks = (int)((call.state + STATES - 1) / STATES) * call.weight_chunks;
    call.input_chunks = (int)((depth + 31) / 32);
    const int64_t blocks = call.weight_blocks + (c->inputs ? call.input_chunks * groups : 0);
    OPJIT_CHECK(blocks <= INT32_MAX, "lltm_backward takes no tensors as large as these");
    if (blocks == 0)
        return OPJIT_OK;
    backward_fused<real><<<(unsigned)blocks, THREADS, 0, stream>>>(call);
    return OPJIT_LAUNCHED();
}

opjit_status lltm_backward_cuda(const opjit_tensor *grad_h, const opjit_tensor *grad_cell, const opjit_tensor *gates,
                                const opjit_tensor *input, const opjit_tensor *weights, const opjit_tensor *old_h, bool inputs,
                                bool parameters, opjit_tensor *grad_input, opjit_tensor *grad_weights, opjit_tensor *grad_bias,
                                opjit_tensor *grad_old_h, opjit_tensor *grad_old_cell, cudaStream_t stream)
{
    lltm_backward_call call = {grad_h,     grad_cell,    gates,     input,      weights,       old_h, inputs, parameters,
                               grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell, {}};
    OPJIT_TRY(lltm_check_backward(&call));
    OPJIT_TRY(lltm_backward_outputs(&call));
    return input->dtype == OPJIT_FLOAT32 ? run_backward<float>(&call, stream) : run_backward<double>(&call, stream);
}

#endif
