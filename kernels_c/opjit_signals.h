/*
 * opjit_signals.h - the parts of opjit_peers.h that an author doesn't call: a group in host memory, and signals between
 * ranks with waits that end. opjit_peers.h includes it.
 */
#ifndef OPJIT_SIGNALS_H
#define OPJIT_SIGNALS_H

/* Reasons for a lost rank. The upper bits have the number of the op, shifted by 8. peer_groups.py has their texts. */
enum { OPJIT_LATE = 1, OPJIT_DIED = 2, OPJIT_DIFFERS = 3, OPJIT_UNCHECKED = 4, OPJIT_REASONS };

/* The name of an op that a rank has called. All ranks share this memory. */
typedef struct opjit_named {
    uint32_t hash;
    char name[92];
} opjit_named;

/* A tensor of Peers.empty(): the memory of each rank. */
typedef struct opjit_group_tensor {
    struct opjit_group_tensor *next;
    int64_t bytes;
    char *memory[OPJIT_RANKS]; /* as many as the group has ranks */
} opjit_group_tensor;

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
    opjit_group_tensor *tensors;
    char *memory[OPJIT_RANKS]; /* of each rank */
    int32_t lock;              /* 0, 1 if a call holds it, or 2 if others also wait for it */
    void *stream, *event;      /* of the last call */
    uint64_t capture;          /* the graph that the last call was captured into, or 0 */
    uint64_t calls;
} opjit_group;

#ifdef __cplusplus
extern "C" {
#endif

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

/* ---------------------------------------------------------------------------------------------- */
/* Waits                                                                                          */

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

#endif
