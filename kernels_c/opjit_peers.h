/*
 * opjit_peers.h - a kernel across the ranks of a group: one GPU for each rank, or CPU ranks of one machine.
 *
 *     #include "opjit_peers.h"
 *
 *     static __global__ void gather_kernel(const opjit_peers p, const float *x, float *out, int n)
 *     {
 *         OPJIT_KERNEL_LOOP(i, n)
 *             ((float *)p.buffer[p.rank])[i] = x[i];
 *         OPJIT_BARRIER(&p);
 *         for (int r = 0; r < p.world; r++)
 *             OPJIT_KERNEL_LOOP(i, n)
 *                 out[r * n + i] = ((const float *)p.buffer[r])[i];
 *         OPJIT_BARRIER(&p);
 *     }
 *
 *     opjit_status gather_cuda(const opjit_tensor *x, const char *group, opjit_tensor *out, cudaStream_t stream)
 *     {
 *         opjit_peers peers;
 *         OPJIT_TRY(opjit_peers_of(&peers, group, x->numel * 4));
 *         OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(peers.world, x->numel), x->dtype, x));
 *         OPJIT_TRY(opjit_peers_launch(&peers, (const void *)gather_kernel, 16, 256, 0, stream));
 *         gather_kernel<<<16, 256, 0, stream>>>(peers, (const float *)x->data, (float *)out->data, (int)x->numel);
 *         return OPJIT_LAUNCHED();
 *     }
 *
 * In Python, all ranks first call opjit.distributed.peers(group, bytes) once. The schema of the op has the argument
 * `str group`, which is the name of the group. opjit_peers_of() finds the group by this name and doesn't allocate, so
 * the op works in a captured CUDA graph.
 *
 * OPJIT_BARRIER synchronizes each block with the blocks of the same index on the other ranks. After it, a block can
 * read everything that these blocks wrote before it. Call it in every thread of the block, and launch the same grid on
 * every rank. The grid has one dimension, and a block may have any shape and number of threads. If other ranks read
 * your buffer, end the kernel with a barrier, so that no rank overwrites its buffer too early.
 *
 * A wait never lasts longer than the time limit of the group. If a rank is missing, or calls a different op, or the
 * same op with different sizes or a different grid, the wait ends, the kernel returns, and all ranks lose the group.
 * Their next calls fail and name the rank, and opjit.distributed.check() raises PeerLost. The results of the call are
 * undefined, but the CUDA context stays usable.
 *
 * In a .c file, the same names use shared memory and C11 atomics. A rank is then a process with one thread in the op,
 * and OPJIT_BARRIER returns the error from your function.
 *
 * Contents: 1 groups  2 launch in CUDA  3 barrier, signals. opjit_signals.h has the parts that you don't call, and
 * opjit_messages.h has words and tiles, for collectives.
 */
#ifndef OPJIT_PEERS_H
#define OPJIT_PEERS_H

#include "opjit.h"

#ifdef __CUDACC__
#include "opjit_cuda.h"
#define OPJIT_PEER_FUNCTION OPJIT_UNUSED static __device__
#else
#define OPJIT_PEER_FUNCTION OPJIT_UNUSED static
#endif

/* ---------------------------------------------------------------------------------------------- */
/* 1. Groups                                                                                      */

enum {
    OPJIT_RANKS = 8,   /* the most ranks of a group */
    OPJIT_SLOTS = 256, /* blocks of a grid that has barriers; slots of signals */
    OPJIT_OPS = 32     /* the most ops whose names a group keeps */
};

/* A group, for kernels. Pass it by value. */
typedef struct opjit_peers {
    int32_t rank, world;
    void *buffer[OPJIT_RANKS];     /* each rank's memory, at least the bytes that you asked for */
    void *inbox[OPJIT_RANKS];      /* each rank's memory for words and tiles, in CUDA */
    uint64_t *signal[OPJIT_RANKS]; /* each rank's signals: counts, and the called op */
    uint32_t *count;               /* this rank's memory: the numbers of signals and waits of each slot */
    uint32_t *lost;                /* pinned host memory: [0] 1 + a missing rank, [1 + rank] the reason */
    uint64_t timeout;              /* the limit of a wait, in nanoseconds */
    uint32_t call;                 /* a hash of op and bytes, by which ranks notice different calls */
    uint32_t op;                   /* the number of the op in the group */
    int32_t blocks, threads;       /* of the launch that opjit_peers_launch() has checked */
    int64_t bytes;                 /* the size of a buffer */
    struct opjit_group *group;     /* in host memory */
} opjit_peers;

#include "opjit_signals.h"

/*
 * Require the same number on all ranks of a call, for example a size. If it differs, the call ends with an error on all
 * ranks.
 */
OPJIT_UNUSED static void opjit_agree(opjit_peers *p, int64_t number)
{
    p->call = opjit_mix(p->call, (uint64_t)number);
}

/*
 * Find a group by its name, with buffers of at least `bytes`. It neither allocates nor synchronizes. All ranks of a
 * call must pass the same number of bytes. Otherwise the call ends with an error on all ranks.
 */
OPJIT_UNUSED OPJIT_MUST_USE static opjit_status opjit_peers_of(opjit_peers *peers, const char *name, int64_t bytes)
{
#ifdef __CUDACC__
    int32_t device = 0;
    const char *of_device = "on this CUDA device";
    OPJIT_CUDA_CHECK(cudaGetDevice(&device));
#else
    const int32_t device = -1;
    const char *of_device = "of CPU ranks";
#endif
    opjit_group *group = opjit_first_group();
    while (group && (group->device != device || strcmp(group->name, name) != 0))
        group = group->next;
    OPJIT_CHECK(
        group != NULL,
        "there is no group %s %s; call opjit.distributed.peers() for it on all ranks first, outside a CUDA graph", name,
        of_device);
    OPJIT_CHECK(group->size == sizeof *group, "another version of opjit made the group %s", name);
    OPJIT_CHECK(
        bytes <= group->bytes,
        "the call needs %lld bytes of each rank, and group %s has %lld; call opjit.distributed.peers(bytes=%lld)",
        (long long)bytes, name, (long long)group->bytes, (long long)bytes);
    OPJIT_TRY(opjit_hold(&group->lock));
    if (__atomic_load_n(&group->lost[0], __ATOMIC_ACQUIRE))
        return opjit_lost_error(group);
    *peers = opjit_peers_in(group);
    peers->op = opjit_op_number(group);
    peers->call = opjit_call_of(bytes, peers->world);
    return OPJIT_OK;
}

/* The data of a tensor on each rank. Pass it to kernels by value. */
typedef struct opjit_ranks_data {
    void *of[OPJIT_RANKS];
} opjit_ranks_data;

/*
 * Find the other ranks' data of a contiguous tensor of Peers.empty(), or of a part of one. Return false for any other
 * tensor. The ranks of a call must pass the same part. Otherwise the call ends with an error on all ranks.
 */
OPJIT_UNUSED static bool opjit_tensors_of(opjit_peers *p, const opjit_tensor *x, opjit_ranks_data *data)
{
    const uint64_t place = (uint64_t)(uintptr_t)x->data, bytes = (uint64_t)x->numel * opjit_dtype_size(x->dtype);
    int64_t number = 0;
    for (const opjit_group_tensor *each = p->group->tensors; each; each = each->next, number++) {
        const uint64_t start = (uint64_t)(uintptr_t)each->memory[p->rank];
        if (!x->contiguous || place < start || place + bytes > start + (uint64_t)each->bytes)
            continue;
        for (int r = 0; r < p->world; r++)
            data->of[r] = each->memory[r] + (place - start);
        opjit_agree(p, number << 48 | (int64_t)(place - start));
        return true;
    }
    return false;
}

/* ---------------------------------------------------------------------------------------------- */
/* 2. Launch in CUDA                                                                              */

#ifdef __CUDACC__
/* The number of blocks of a kernel that fit on the device at the same time. It is queried once for a kernel,
 * device and thread, because a query costs a microsecond. */
OPJIT_UNUSED OPJIT_MUST_USE static opjit_status opjit_most_blocks(const void *kernel, int threads, size_t shared,
                                                                  int *most)
{
    static __thread struct {
        const void *kernel;
        size_t shared;
        int device, threads, most;
    } known[8];
    int device, per_processor, processors;
    OPJIT_CUDA_CHECK(cudaGetDevice(&device));
    const size_t place = ((uintptr_t)kernel >> 4) % 8;
    if (known[place].kernel != kernel || known[place].threads != threads || known[place].shared != shared ||
        known[place].device != device) {
        OPJIT_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, shared));
        OPJIT_TRY(opjit_multiprocessors(&processors));
        known[place].kernel = kernel;
        known[place].shared = shared;
        known[place].device = device;
        known[place].threads = threads;
        known[place].most = per_processor * processors;
    }
    *most = known[place].most;
    return OPJIT_OK;
}

/* Run the calls of a group in order. A call on a different stream than the last call waits for it with an event. */
OPJIT_UNUSED OPJIT_MUST_USE static opjit_status opjit_after_last(opjit_group *group, cudaStream_t stream)
{
    cudaStreamCaptureStatus status;
    unsigned long long capture = 0;
    OPJIT_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
    if (status != cudaStreamCaptureStatusActive)
        capture = 0;
    if (group->calls++ && group->stream != stream && group->capture == capture) {
        if (!group->event)
            OPJIT_CUDA_CHECK(cudaEventCreateWithFlags((cudaEvent_t *)&group->event, cudaEventDisableTiming));
        OPJIT_CUDA_CHECK(cudaEventRecord((cudaEvent_t)group->event, (cudaStream_t)group->stream));
        OPJIT_CUDA_CHECK(cudaStreamWaitEvent(stream, (cudaEvent_t)group->event, 0));
    }
    group->stream = stream;
    group->capture = capture;
    return OPJIT_OK;
}

/*
 * Call this before each launch of a kernel that waits, with the number of blocks and the number of threads of a block.
 * It rejects a grid if its blocks can't all run on the device at the same time, because running blocks would wait for
 * blocks that can't start. It also orders the call after the last call of the group. A kernel that is launched without
 * it, or with other numbers, ends with an error at its first wait.
 */
OPJIT_UNUSED OPJIT_MUST_USE static opjit_status opjit_peers_launch(opjit_peers *p, const void *kernel, int blocks,
                                                                   int threads, size_t shared, cudaStream_t stream)
{
    int most;
    OPJIT_CHECK(blocks > 0 && threads > 0, "%d blocks of %d threads wait for other ranks; launch at least one of one",
                blocks, threads);
    OPJIT_TRY(opjit_most_blocks(kernel, threads, shared, &most));
    OPJIT_CHECK(blocks <= most, "%d blocks wait for each other, but only %d fit on the device at once; launch fewer",
                blocks, most);
    OPJIT_CHECK(blocks <= OPJIT_SLOTS, "%d blocks wait for other ranks; launch at most %d", blocks, OPJIT_SLOTS);
    OPJIT_TRY(opjit_after_last(p->group, stream));
    p->blocks = blocks;
    p->threads = threads;
    opjit_agree(p, (int64_t)blocks << 32 | threads);
    return OPJIT_OK;
}
#endif

/* ---------------------------------------------------------------------------------------------- */
/* 3. Barrier, signals                                                                            */

#ifdef __CUDACC__
/* The number of this thread in its block of any shape, and the number of threads of the block. */
OPJIT_PEER_FUNCTION int opjit_thread(void)
{
    return (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}

OPJIT_PEER_FUNCTION int opjit_threads(void)
{
    return (int)(blockDim.x * blockDim.y * blockDim.z);
}

/* The ranks that this thread signals and waits for. The threads of a block share all ranks, however few they are. */
#define OPJIT_RANKS_OF_THREAD(r_, p_) for (int r_ = opjit_thread(); r_ < (p_)->world; r_ += opjit_threads())

/* Return whether opjit_peers_launch() has checked the launch. */
OPJIT_PEER_FUNCTION bool opjit_is_checked(const opjit_peers *p)
{
    if (p->blocks == (int)gridDim.x && gridDim.y == 1 && gridDim.z == 1 && p->threads == opjit_threads())
        return true;
    opjit_lose(p, p->rank, OPJIT_UNCHECKED);
    return false;
}

/* Call it in all threads of a block. It returns false if the group is lost. */
OPJIT_PEER_FUNCTION bool opjit_barrier(const opjit_peers *p)
{
    const int slot = blockIdx.x;
    uint32_t *own = opjit_count_at(p, slot, OPJIT_BARRIERS);
    bool came = true;
    if (!opjit_is_checked(p))
        return false;
    const uint32_t count = *own + 1;
    __syncthreads();
    OPJIT_RANKS_OF_THREAD(r, p)
        opjit_send(p, OPJIT_BARRIERS, slot, r, opjit_signal_of(count, p->call));
    OPJIT_RANKS_OF_THREAD(r, p)
        came = came && opjit_await(p, OPJIT_BARRIERS, slot, r, opjit_signal_of(count, p->call));
    if (opjit_thread() == 0)
        *own = count;
    return __syncthreads_and(came);
}

#define OPJIT_BARRIER(p_) \
    do { \
        if (!opjit_barrier(p_)) \
            return; \
    } while (0)

/* For one thread. It returns false if the group is lost. */
#define OPJIT_WAITED bool
#define OPJIT_WAITED_FOR(p_, came_) (came_)
#else
OPJIT_UNUSED OPJIT_MUST_USE static opjit_status opjit_barrier(const opjit_peers *p)
{
    uint32_t *own = opjit_count_at(p, 0, OPJIT_BARRIERS);
    const uint64_t signal = opjit_signal_of(++*own, p->call);
    for (int r = 0; r < p->world; r++)
        opjit_send(p, OPJIT_BARRIERS, 0, r, signal);
    for (int r = 0; r < p->world; r++)
        if (!opjit_await(p, OPJIT_BARRIERS, 0, r, signal))
            return opjit_lost_error(p->group);
    return OPJIT_OK;
}

#define OPJIT_BARRIER(p_) OPJIT_TRY(opjit_barrier(p_))
#define OPJIT_WAITED OPJIT_MUST_USE opjit_status
#define OPJIT_WAITED_FOR(p_, came_) ((came_) ? OPJIT_OK : opjit_lost_error((p_)->group))
#endif

/*
 * Point-to-point signals, for one thread of each slot. opjit_wait(&p, slot, a) on rank b returns after
 * opjit_signal(&p, slot, b) on rank a, and rank b can then read everything that rank a wrote before. Signals of a slot
 * are counted, so the n-th wait is for the n-th signal. If the group is lost, opjit_wait returns false in CUDA and an
 * error in C.
 */
OPJIT_PEER_FUNCTION void opjit_signal(const opjit_peers *p, int slot, int to)
{
    const uint32_t count = ++*opjit_count_at(p, slot, OPJIT_SENT + to);
    opjit_send(p, OPJIT_SIGNALS, slot, to, opjit_signal_of(count, p->call));
}

OPJIT_PEER_FUNCTION OPJIT_WAITED opjit_wait(const opjit_peers *p, int slot, int from)
{
    const uint32_t count = ++*opjit_count_at(p, slot, OPJIT_GOT + from);
    const bool came = opjit_await(p, OPJIT_SIGNALS, slot, from, opjit_signal_of(count, p->call));
    return OPJIT_WAITED_FOR(p, came);
}

#endif
