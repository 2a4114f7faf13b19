/*
 * gather_multiply: all_gather(x) @ w in one launch. The ranks' x are on their way while the blocks multiply their own.
 *
 * The blocks are those of step 6 of example 19: a thread loads tiles, and two warpgroups multiply. Three warps that have
 * nothing to do there copy this rank's x to the other ranks, PIECE rows at a time, and signal each piece. A block begins
 * with the tiles of its own rank, and waits for a piece before it loads it.
 */
#include "opjit_peers.h"

#include "../../19_matrix_kernel/steps/step6.cu"

#define PIECE 32       /* rows that have a signal of their own */
#define COPYING 96     /* threads of a block that copy: warps 1 to 3 */
#define IN_FLIGHT 4    /* loads of a thread that overlap */
#define COPY_BARRIER 1 /* __syncthreads() has the number 0 */

/* The rows of this rank. */
typedef struct own_rows {
    const uint4 *x;
    int64_t piece; /* the size of a piece, in uint4 */
    int pieces;
} own_rows;

#if OPJIT_HAS_WGMMA

/* Copy a piece to the same place in another rank's memory. */
static __device__ void copy_piece(const uint4 *from, uint4 *to, int64_t count)
{
    for (int64_t first = threadIdx.x - 32; first < count; first += COPYING * IN_FLIGHT) {
        uint4 some[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + i * COPYING < count)
                some[i] = from[first + i * COPYING];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + i * COPYING < count)
                to[first + i * COPYING] = some[i];
    }
}

/* Send this rank's pieces, of which each block has some, first those that the other ranks need first. */
static __device__ void send_pieces(const opjit_peers *p, own_rows own)
{
    for (int piece = blockIdx.x; piece < own.pieces; piece += gridDim.x)
        for (int k = 1; k < p->world; k++) {
            const int to = (p->rank + p->world - k) % p->world;
            uint4 *theirs = (uint4 *)p->buffer[to] + (p->rank * (int64_t)own.pieces + piece) * own.piece;
            copy_piece(own.x + piece * own.piece, theirs, own.piece);
            opjit_named_barrier(COPY_BARRIER, COPYING);
            if (threadIdx.x == 32)
                opjit_signal(p, piece, to);
        }
}

/* Wait for the pieces of a tile's rows, which are of rank `from`. */
static __device__ bool await_rows(const opjit_peers *p, int from, int row)
{
    for (int piece = row / PIECE; piece < (row + ROWS) / PIECE; piece++) {
        const uint32_t count = *opjit_count_at(p, piece, OPJIT_GOT + from) + 1;
        if (!opjit_await(p, OPJIT_SIGNALS, piece, from, opjit_signal_of(count, p->call)))
            return false;
    }
    opjit_fence_proxy_async_global();
    return true;
}

/* The first row of a tile, in the rows of all ranks. A rank begins with its own rows. */
static __device__ int row_of(const opjit_peers *p, int2 place, job j)
{
    const int all = j.down * ROWS;
    return (p->rank * (all / p->world) + place.x) % all;
}

static __device__ void load_gathered(stages *s, const opjit_peers *p, const opjit_tensor_map *own,
                                     const opjit_tensor_map *gathered, const opjit_tensor_map *w, job j)
{
    const int rows = j.down * ROWS / p->world; /* of a rank */
    int stage = 0;
    unsigned parity = 0;
    bool came = true;
    for (int tile = blockIdx.x; tile < j.down * j.across; tile += gridDim.x) {
        const int2 place = place_of(tile, j);
        const int row = row_of(p, place, j), from = row / rows;
        const bool is_own = from == p->rank;
        const opjit_tensor_map *x = is_own ? own : gathered;
        if (!is_own)
            came = came && await_rows(p, from, row % rows); /* if the group is lost, the results are undefined */
        for (int step = 0; step < j.steps; step++) {
            opjit_mbarrier_wait(&s->empty[stage], parity ^ 1);
            opjit_mbarrier_arrive_expect_tx(&s->full[stage], sizeof s->x[0] + sizeof s->w[0]);
            opjit_tma_load_2d(s->x[stage], x, &s->full[stage], step * DEPTH, is_own ? row % rows : row);
            opjit_tma_load_2d(s->w[stage], w, &s->full[stage], step * DEPTH, place.y);
            advance(&stage, &parity);
        }
    }
}

static __device__ void multiply_gathered(stages *s, const opjit_peers *p, opjit_bfloat16 *out, int rows, job j)
{
    const int64_t columns = (int64_t)j.across * COLUMNS;
    int stage = 0;
    unsigned parity = 0;
    float d[128];
    for (int tile = blockIdx.x; tile < j.down * j.across; tile += gridDim.x) {
        const int2 place = place_of(tile, j);
        sum_tile(d, s, rows, j.steps, &stage, &parity);
        store_sums(out + (row_of(p, place, j) + rows) * columns + place.y, d, columns);
    }
}

#endif

static __global__ void __launch_bounds__(THREADS, 1)
    multiply_gathered_rows(const opjit_peers p, const __grid_constant__ opjit_tensor_map own,
                           const __grid_constant__ opjit_tensor_map gathered,
                           const __grid_constant__ opjit_tensor_map w, own_rows mine, opjit_bfloat16 *out, job j)
{
#if OPJIT_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char memory[];
    stages *s = (stages *)memory;
    make_barriers(s);
    if (threadIdx.x < 128) {
        opjit_setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            load_gathered(s, &p, &own, &gathered, &w, j);
        else if (threadIdx.x >= 32)
            send_pieces(&p, mine);
    } else {
        opjit_setmaxnreg_inc<232>();
        multiply_gathered(s, &p, out, threadIdx.x / 128 * 64 - 64, j);
    }
    OPJIT_BARRIER(&p); /* until all ranks have loaded what this rank's next call overwrites */
#endif
}

/* Count the signals of the pieces. In a launch of its own, because each block of the kernel waits for them. */
static __global__ void count_pieces(const opjit_peers p, int pieces)
{
    OPJIT_KERNEL_LOOP(piece, pieces)
        for (int r = 0; r < p.world; r++)
            if (r != p.rank)
                ++*opjit_count_at(&p, (int)piece, OPJIT_GOT + r);
}

opjit_status gather_multiply_cuda(const opjit_tensor *x, const opjit_tensor *w, const char *group, opjit_tensor *out,
                                  cudaStream_t stream)
{
    opjit_peers p;
    opjit_tensor all = *x;
    opjit_tensor_map own_map, gathered_map, w_map;
    int blocks;
    OPJIT_TRY(check_hopper());
    OPJIT_TRY(opjit_peers_of(&p, group, 0));
    OPJIT_CHECK(x->dim == 2, "expected x (M, K) and w (K, N)");
    const int64_t sizes[] = {x->sizes[0] * p.world, x->sizes[1]};
    all.sizes = sizes;
    OPJIT_TRY(start(&all, w, out, ROWS * p.world, COLUMNS, DEPTH));
    const int64_t m = sizes[0], n = w->sizes[1], k = sizes[1];
    const job j = {(int)(m / ROWS), (int)(n / COLUMNS), (int)(k / DEPTH)};
    const own_rows mine = {(const uint4 *)x->data, PIECE * k / 8, (int)(x->sizes[0] / PIECE)};
    OPJIT_CHECK(m * k * 2 <= p.bytes, "the group needs bytes=%lld for the rows of all ranks", (long long)(m * k * 2));
    OPJIT_CHECK(mine.pieces <= OPJIT_SLOTS, "expected at most %d rows of a rank, got %lld", PIECE * OPJIT_SLOTS,
                (long long)x->sizes[0]);
    all.data = p.buffer[p.rank];
    OPJIT_TRY(make_map(&own_map, x, x->sizes[0], k, ROWS));
    OPJIT_TRY(make_map(&gathered_map, &all, m, k, ROWS));
    OPJIT_TRY(make_map(&w_map, w, n, k, COLUMNS));
    OPJIT_TRY(opjit_multiprocessors(&blocks));
    blocks = blocks < j.down * j.across ? blocks : j.down * j.across;
    const void *kernel = (const void *)multiply_gathered_rows;
    OPJIT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(stages)));
    OPJIT_TRY(opjit_peers_launch(&p, kernel, blocks, THREADS, sizeof(stages), stream));
    multiply_gathered_rows<<<(unsigned)blocks, THREADS, sizeof(stages), stream>>>(p, own_map, gathered_map, w_map, mine,
                                                                                  (opjit_bfloat16 *)out->data, j);
    OPJIT_TRY(OPJIT_LAUNCHED());
    count_pieces<<<1, 256, 0, stream>>>(p, mine.pieces);
    return OPJIT_LAUNCHED();
}
