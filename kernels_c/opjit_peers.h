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
 * Contents: 1 groups  2 waits  3 host side of CUDA  4 barrier, signals  5 words and tiles, for collectives
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

#ifdef __cplusplus
extern "C" {
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
    void *inbox[OPJIT_RANKS];      /* each rank's memory for words and tiles (5), in CUDA */
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

/* Reasons for a lost rank. The upper bits have the number of the op, shifted by 8. peer_groups.py has their texts. */
enum { OPJIT_LATE = 1, OPJIT_DIED = 2, OPJIT_DIFFERS = 3, OPJIT_UNCHECKED = 4, OPJIT_REASONS };

/* The name of an op that a rank has called. All ranks share this memory. */
typedef struct opjit_named {
    uint32_t hash;
    char name[92];
} opjit_named;

/* A group in host memory. opjit/distributed/peer_groups.py makes it, with the words above `lock` in this order. */
typedef struct opjit_group {
    uint64_t size; /* the size of this struct */
    struct opjit_group *next;
    const char *name;
    int64_t device; /* the CUDA device's index; -1 for CPU ranks */
    int64_t rank, world, bytes;
    uint64_t timeout;
    int64_t inbox, buffer; /* their places in the memory of a rank, which begins with the signals */
    uint32_t *count, *lost;
    opjit_named *ops;           /* OPJIT_OPS entries */
    const char *const *reasons; /* OPJIT_REASONS texts */
    char *memory[OPJIT_RANKS];  /* of each rank */
    int32_t lock;               /* 0, 1 if a call holds it, or 2 if others also wait for it */
    void *stream, *event;       /* of the last call */
    uint64_t capture;           /* the graph that the last call was captured into, or 0 */
    uint64_t calls;
} opjit_group;

/* Functions of opjit_runtime.c. */
opjit_group *opjit_first_group(void);   /* the newest group of the process */
const char *opjit_op_name(void);        /* the op of this library */
opjit_status opjit_hold(int32_t *lock); /* hold a lock until the call ends */

/* For waits of CPU ranks. */
uint64_t opjit_clock(void);                         /* nanoseconds */
void opjit_rest(const uint64_t *at, uint64_t seen); /* sleep until the word changes, at most 5 ms */
void opjit_wake(uint64_t *at);                      /* wake the ranks that sleep on the word */

#ifdef __cplusplus
}
#endif

OPJIT_UNUSED static uint32_t opjit_mix(uint32_t hash, uint64_t number)
{
    hash = (hash ^ (uint32_t)number) * 0x9e3779b1u;
    hash = (hash ^ (uint32_t)(number >> 32)) * 0x85ebca6bu;
    return hash ^ hash >> 15;
}

/* A hash of op, bytes and world, which must be equal on all ranks. */
OPJIT_UNUSED static uint32_t opjit_call_of(int64_t bytes, int32_t world)
{
    uint32_t hash = opjit_mix((uint32_t)world, (uint64_t)bytes);
    for (const char *letter = opjit_op_name(); *letter; letter++)
        hash = opjit_mix(hash, (uint64_t)(unsigned char)*letter);
    return hash;
}

/* The number of the op in its group, for errors. It is an index into a table that all ranks share. */
OPJIT_UNUSED static uint32_t opjit_op_number(const opjit_group *group)
{
    const uint32_t hash = opjit_call_of(0, 0) | 1;
    for (uint32_t i = 0; i < OPJIT_OPS; i++) {
        opjit_named *op = &group->ops[i];
        uint32_t found = 0;
        if (__atomic_compare_exchange_n(&op->hash, &found, hash, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            strncpy(op->name, opjit_op_name(), sizeof op->name - 1);
        if (found == 0 || found == hash)
            return i;
    }
    return OPJIT_OPS;
}

/*
 * Require the same number on all ranks of a call, for example a size. If it differs, the call ends with an error on all
 * ranks.
 */
OPJIT_UNUSED static void opjit_agree(opjit_peers *p, int64_t number)
{
    p->call = opjit_mix(p->call, (uint64_t)number);
}

__attribute__((returns_nonnull)) OPJIT_UNUSED static opjit_status opjit_lost_error(const opjit_group *group)
{
    const uint32_t rank = group->lost[0] - 1, reason = group->lost[1 + rank % OPJIT_RANKS], op = reason >> 8;
    const bool waited = reason && (reason & 255) != OPJIT_DIED && op < OPJIT_OPS;
    OPJIT_FAIL("PeerLost: rank %u of group %s %s%s%s; opjit.distributed.check(group) raises this as PeerLost, and the "
               "ranks that are left can make a smaller group",
               rank, group->name, group->reasons[(reason & 255) % OPJIT_REASONS], waited ? " in " : "",
               waited ? group->ops[op].name : "");
}

/* The view of a group for kernels, without the fields of a call. */
OPJIT_UNUSED static opjit_peers opjit_peers_in(opjit_group *group)
{
    opjit_peers peers = {0};
    peers.rank = (int32_t)group->rank;
    peers.world = (int32_t)group->world;
    for (int64_t r = 0; r < group->world; r++) {
        peers.signal[r] = (uint64_t *)group->memory[r];
        peers.inbox[r] = group->memory[r] + group->inbox;
        peers.buffer[r] = group->memory[r] + group->buffer;
    }
    peers.count = group->count;
    peers.lost = group->lost;
    peers.timeout = group->timeout;
    peers.bytes = group->bytes;
    peers.group = group;
    return peers;
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

/* ---------------------------------------------------------------------------------------------- */
/* 2. Waits                                                                                       */

/* A signal is a count and the called op. Counts wrap around, so a count is reached if it is less than 2^31 behind. */
OPJIT_HOST_DEVICE bool opjit_reached(uint64_t signal, uint32_t count)
{
    return (uint32_t)signal - count < 1u << 31;
}

OPJIT_HOST_DEVICE uint64_t opjit_signal_of(uint32_t count, uint32_t call)
{
    return (uint64_t)call << 32 | count;
}

/*
 * Kinds of signals. Each kind has a word for every slot and every sending rank. Behind them is a word for ranks that
 * sleep.
 */
enum { OPJIT_BARRIERS, OPJIT_SIGNALS, OPJIT_WORDS, OPJIT_RING_A, OPJIT_RING_B, OPJIT_SIGNAL_KINDS };

OPJIT_HOST_DEVICE uint64_t *opjit_signal_at(const opjit_peers *p, int to, int kind, int slot, int from)
{
    return p->signal[to] + (kind * OPJIT_SLOTS + slot) * OPJIT_RANKS + from;
}

/* The counts of a slot: one for each kind, then the signals sent to each rank and received from each rank. */
enum { OPJIT_SENT = OPJIT_SIGNAL_KINDS, OPJIT_GOT = OPJIT_SENT + OPJIT_RANKS, OPJIT_COUNTS = OPJIT_GOT + OPJIT_RANKS };

OPJIT_HOST_DEVICE uint32_t *opjit_count_at(const opjit_peers *p, int slot, int which)
{
    return p->count + slot * OPJIT_COUNTS + which;
}

#ifdef __CUDACC__
OPJIT_PEER_FUNCTION void opjit_release(uint64_t *at, uint64_t value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
OPJIT_PEER_FUNCTION void opjit_relaxed(uint64_t *at, uint64_t value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
OPJIT_PEER_FUNCTION uint64_t opjit_acquire(const uint64_t *at)
{
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
OPJIT_PEER_FUNCTION uint64_t opjit_look(const uint64_t *at)
{
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
OPJIT_PEER_FUNCTION uint32_t opjit_load_lost(const uint32_t *at)
{
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
OPJIT_PEER_FUNCTION void opjit_store_lost(uint32_t *at, uint32_t value)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
OPJIT_PEER_FUNCTION uint64_t opjit_now(void)
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
#else
OPJIT_PEER_FUNCTION uint64_t opjit_acquire(const uint64_t *at)
{
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
OPJIT_PEER_FUNCTION uint32_t opjit_load_lost(const uint32_t *at)
{
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}
OPJIT_PEER_FUNCTION void opjit_store_lost(uint32_t *at, uint32_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
}
#define opjit_look opjit_acquire
#define opjit_now opjit_clock
#endif

/* The group is lost for all ranks: store the reason first, then the error. A later reason may overwrite an earlier
 * one. */
OPJIT_PEER_FUNCTION void opjit_lose(const opjit_peers *p, int rank, uint32_t why)
{
    opjit_store_lost(p->lost + 1 + rank, why | p->op << 8);
    if (!opjit_load_lost(p->lost))
        opjit_store_lost(p->lost, 1 + (uint32_t)rank);
}

/*
 * Return whether a wait may continue after an unsuccessful look. Only one look in OPJIT_LOOKS checks the clock and the
 * memory of the host, which is every few milliseconds on a GPU. Both are slow. If all waiting warps read them, the call
 * is ten times slower.
 */
#if defined __CUDACC__ && !defined OPJIT_EMULATED
enum { OPJIT_LOOKS = 4096 };
#else
enum { OPJIT_LOOKS = 64 };
#endif

OPJIT_PEER_FUNCTION bool opjit_patient(const opjit_peers *p, int from, uint32_t looks, uint64_t *since)
{
    if (looks % OPJIT_LOOKS)
        return true;
    const uint64_t now = opjit_now();
    if (opjit_load_lost(p->lost))
        return false;
    if (*since == 0)
        *since = now;
    if (now - *since < p->timeout)
        return true;
    opjit_lose(p, from, OPJIT_LATE);
    return false;
}

#ifndef __CUDACC__
/* A waiting rank looks for some microseconds and then sleeps, because a full machine may not have a free CPU. It
 * marks this in a separate word, which ranks read when they signal. */
OPJIT_PEER_FUNCTION void opjit_sleep(const opjit_peers *p, const uint64_t *at, uint64_t seen)
{
    uint64_t *sleeps = opjit_signal_at(p, p->rank, OPJIT_SIGNAL_KINDS, 0, 0);
    __atomic_store_n(sleeps, 1, __ATOMIC_SEQ_CST);
    if (opjit_acquire(at) == seen)
        opjit_rest(at, seen);
    __atomic_store_n(sleeps, 0, __ATOMIC_SEQ_CST);
}
#endif

/* Wait until a signal to this rank has reached the count. Return false if the group is lost. */
OPJIT_PEER_FUNCTION bool opjit_await(const opjit_peers *p, int kind, int slot, int from, uint64_t wanted)
{
    const uint64_t *at = opjit_signal_at(p, p->rank, kind, slot, from);
    uint64_t seen, since = 0;
    for (uint32_t looks = 1;; looks++) {
        seen = kind == OPJIT_WORDS ? opjit_look(at) : opjit_acquire(at); /* words contain their data */
        if (opjit_reached(seen, (uint32_t)wanted))
            break;
        if (!opjit_patient(p, from, looks, &since))
            return false;
#ifndef __CUDACC__
        if (looks % 512 == 0)
            opjit_sleep(p, at, seen);
#endif
    }
    if ((uint32_t)seen != (uint32_t)wanted || seen == wanted)
        return true; /* the rank is ahead, so it has compared the calls */
    opjit_lose(p, from, OPJIT_DIFFERS);
    return false;
}

/*
 * Signal a rank. A rank that waits for the signal can read everything that this thread and, after __syncthreads(), its
 * block wrote before.
 */
OPJIT_PEER_FUNCTION void opjit_send(const opjit_peers *p, int kind, int slot, int to, uint64_t signal)
{
    uint64_t *at = opjit_signal_at(p, to, kind, slot, p->rank);
#ifdef __CUDACC__
    opjit_release(at, signal);
#else
    __atomic_store_n(at, signal, __ATOMIC_SEQ_CST);
    if (opjit_acquire(opjit_signal_at(p, to, OPJIT_SIGNAL_KINDS, 0, 0)))
        opjit_wake(at);
#endif
}

/* ---------------------------------------------------------------------------------------------- */
/* 3. Host side of CUDA                                                                           */

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
/* 4. Barrier, signals                                                                            */

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

/* ---------------------------------------------------------------------------------------------- */
/* 5. Words and tiles, for collectives                                                            */

#ifdef __CUDACC__
/*
 * All collectives of a group share its inboxes, in which each block has slots for the data from each rank. The slots
 * are used in turn. A rank writes to a slot again only when later messages of the reader show that it was read, so a
 * call doesn't end with a barrier. The inbox of each rank contains
 *
 *     words   [2 turns][from rank][block][OPJIT_WORDS_OF_BLOCK]    16 bytes each: 12 of data, and the count
 *     tiles   [2 rings][from rank][block][4 turns]                 OPJIT_TILE_BYTES bytes each
 */
enum { OPJIT_BLOCKS = 256, OPJIT_WORDS_OF_BLOCK = 1024, OPJIT_TILE_BYTES = 8192, OPJIT_TURNS = 4 };

/*
 * Words are the fastest way to send few bytes. The 16 bytes of a word are stored and loaded in one step, and contain
 * the count that proves its arrival. Therefore a word needs neither a fence nor a signal.
 *
 *     const uint32_t count = opjit_begin_words(&p);
 *     opjit_push(&p, to, count, i, data);                // to each rank: at most OPJIT_WORDS_OF_BLOCK words of a block
 *     came &= opjit_pull(&p, from, count, i, data);      // from each rank
 *     opjit_end_words(&p, count, came);
 */
typedef struct opjit_word {
    uint32_t data[3];
} opjit_word;

OPJIT_PEER_FUNCTION uint32_t *opjit_word_at(const opjit_peers *p, int at, int from, uint32_t count, int i)
{
    const int64_t block = ((int64_t)(count & 1) * p->world + from) * OPJIT_BLOCKS + blockIdx.x;
    return (uint32_t *)p->inbox[at] + (block * OPJIT_WORDS_OF_BLOCK + i) * 4;
}

OPJIT_PEER_FUNCTION void opjit_push(const opjit_peers *p, int to, uint32_t count, int i, opjit_word word)
{
    asm volatile("{\n\t.reg .b128 word;\n\t.reg .b64 low, high;\n\t"
                 "mov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\tmov.b128 word, {low, high};\n\t"
                 "st.relaxed.sys.global.b128 [%0], word;\n\t}" ::"l"(opjit_word_at(p, to, p->rank, count, i)),
                 "r"(word.data[0]), "r"(word.data[1]), "r"(word.data[2]), "r"(count)
                 : "memory");
}

/* Look once, and return whether the word has arrived. */
OPJIT_PEER_FUNCTION bool opjit_peek(const opjit_peers *p, int from, uint32_t count, int i, opjit_word *word)
{
    uint32_t seen;
    asm volatile("{\n\t.reg .b128 word;\n\t.reg .b64 low, high;\n\t"
                 "ld.relaxed.sys.global.b128 word, [%4];\n\tmov.b128 {low, high}, word;\n\t"
                 "mov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
                 : "=r"(word->data[0]), "=r"(word->data[1]), "=r"(word->data[2]), "=r"(seen)
                 : "l"(opjit_word_at(p, p->rank, from, count, i))
                 : "memory");
    return seen == count;
}

OPJIT_PEER_FUNCTION bool opjit_pull(const opjit_peers *p, int from, uint32_t count, int i, opjit_word *word)
{
    uint64_t since = 0;
    for (uint32_t looks = 1; !opjit_peek(p, from, count, i, word); looks++)
        if (!opjit_patient(p, from, looks, &since))
            return false;
    return true;
}

/*
 * Counts repeat after 2^32 calls, so a word that was not written since then, or never, would seem to have arrived.
 * Therefore, in the two calls before a multiple of 2^24, all words of the other turn get this count before the words of
 * this call allow a rank to send the next ones.
 */
OPJIT_PEER_FUNCTION void opjit_forget_words(const opjit_peers *p, uint32_t count)
{
    for (int from = 0; from < p->world; from++)
        for (int i = opjit_thread(); i < OPJIT_WORDS_OF_BLOCK; i += opjit_threads())
            opjit_word_at(p, p->rank, from, count + 1, i)[3] = count;
    __threadfence_system();
    __syncthreads();
}

/* Call it in all threads of a block. Ranks exchange the called op while the words are on their way. */
OPJIT_PEER_FUNCTION uint32_t opjit_begin_words(const opjit_peers *p)
{
    const uint32_t count = *opjit_count_at(p, blockIdx.x, OPJIT_WORDS) + 1;
    if (((count + 2) & 0xffffff) < 2)
        opjit_forget_words(p, count);
    OPJIT_RANKS_OF_THREAD(r, p)
        opjit_relaxed(opjit_signal_at(p, r, OPJIT_WORDS, blockIdx.x, p->rank), opjit_signal_of(count, p->call));
    return count;
}

OPJIT_PEER_FUNCTION bool opjit_end_words(const opjit_peers *p, uint32_t count, bool came)
{
    came = came && opjit_is_checked(p);
    OPJIT_RANKS_OF_THREAD(r, p)
        came = came && opjit_await(p, OPJIT_WORDS, blockIdx.x, r, opjit_signal_of(count, p->call));
    came = __syncthreads_and(came);
    if (opjit_thread() == 0)
        *opjit_count_at(p, blockIdx.x, OPJIT_WORDS) = count;
    __syncthreads(); /* so that all threads can begin again */
    return came;
}

/*
 * Tiles are for more bytes. A block writes a tile to each rank, signals, and waits for the tiles of the other ranks.
 * Several tiles can be on their way at the same time: you can send the n-th tile when you have read the (n - 2)-th. For
 * example, this is true in a loop that sends step n and then reads step n - 1.
 *
 *     uint32_t count = opjit_begin_tiles(&p, ring);
 *     ... write to opjit_tile(&p, ring, to, p.rank, count) ...
 *     opjit_send_tiles(&p, ring, count);                       // to all ranks
 *     if (!opjit_await_tiles(&p, ring, count))                 // from all ranks
 *         return;
 *     ... read opjit_tile(&p, ring, p.rank, from, count) ...
 *     opjit_end_tiles(&p, ring, count);
 */
OPJIT_PEER_FUNCTION void *opjit_tile(const opjit_peers *p, int ring, int at, int from, uint32_t count)
{
    const int64_t words = (int64_t)2 * p->world * OPJIT_BLOCKS * OPJIT_WORDS_OF_BLOCK * 16;
    const int64_t block = ((int64_t)(ring - OPJIT_RING_A) * p->world + from) * OPJIT_BLOCKS + blockIdx.x;
    return (char *)p->inbox[at] + words + (block * OPJIT_TURNS + count % OPJIT_TURNS) * OPJIT_TILE_BYTES;
}

OPJIT_PEER_FUNCTION uint32_t opjit_begin_tiles(const opjit_peers *p, int ring)
{
    return *opjit_count_at(p, blockIdx.x, ring) + 1;
}

OPJIT_PEER_FUNCTION void opjit_send_tiles(const opjit_peers *p, int ring, uint32_t count)
{
    __syncthreads();
    OPJIT_RANKS_OF_THREAD(r, p)
        opjit_send(p, ring, blockIdx.x, r, opjit_signal_of(count, p->call));
}

OPJIT_PEER_FUNCTION bool opjit_await_tiles(const opjit_peers *p, int ring, uint32_t count)
{
    bool came = opjit_is_checked(p);
    OPJIT_RANKS_OF_THREAD(r, p)
        came = came && opjit_await(p, ring, blockIdx.x, r, opjit_signal_of(count, p->call));
    return __syncthreads_and(came);
}

/* `next` is the count after the last tile. */
OPJIT_PEER_FUNCTION void opjit_end_tiles(const opjit_peers *p, int ring, uint32_t next)
{
    if (opjit_thread() == 0)
        *opjit_count_at(p, blockIdx.x, ring) = next - 1;
    __syncthreads();
}
#endif

#endif
