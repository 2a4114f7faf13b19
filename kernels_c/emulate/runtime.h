/*
 * runtime.h - declarations that the parts of the runtime library share.
 *
 *     fiber.cc      stacks and the switch between them
 *     launch.cc     a grid: its blocks, barriers and warps, and the order in which threads run
 *     check.cc      memory: races, bounds, reads of unwritten memory
 *     tensor_cores.cc   what runs while its thread goes on: copies, mbarriers and wgmma
 *     finding.cc    findings as text with lines of the author's source
 *
 * One thread of the machine runs one grid at a time, under `launching`. Each launch has ended when it returns. Ranks are
 * host threads that launch on separate devices; then one thread more runs the grids of all ranks side by side.
 */
#ifndef OPJIT_EMULATE_RUNTIME_H
#define OPJIT_EMULATE_RUNTIME_H

#define EMU_CONST
#include "runtime_api.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

enum { LANES = 32 };

/* ---------------------------------------------------------------------------------------------- */
/* fiber.cc                                                                                       */

/* Pieces of memory that are never freed. It grows by areas, because a process may have a limit of its addresses. */
struct arena {
    size_t bytes; /* of a piece */
    const char *what;
    std::vector<char *> areas, unused;
    size_t made;

    char *take(void);
    bool owns(uintptr_t address) const;
};

struct fiber {
    char *stack; /* the lowest byte */
    void *top;   /* the stack pointer while it does not run */
};

fiber *fiber_new(void (*entry)(void));
void fiber_spoil(const fiber *own); /* variables that the running fiber's next function does not set are NaN, or -1 */
void fiber_free(fiber *unused);
extern "C" void emu_switch(void **save, void *load);
bool fiber_owns(uintptr_t address); /* whether it is on some fiber's stack */

/* ---------------------------------------------------------------------------------------------- */
/* launch.cc                                                                                      */

struct block;
struct clocks;
struct mbarrier;
struct async_thread;
struct async_block;

enum thread_state { FRESH, RUNNING, WAITING, READY, ENDED };

struct thread {
    uint3 index;
    int number, lane; /* in the block, in the warp */
    block *in;
    fiber *on;
    thread_state state;
    const char *doing; /* the function in which it waits, such as "__syncthreads()" */
    emu_place at;
    const void *caller; /* the code of its last access or branch */
    int budget;         /* branches until other threads may run */
    clocks *order;      /* for the checks */
    async_thread *async;
    const mbarrier *awaits; /* while it waits at one */
};

/* Lanes that wait for each other at a shuffle, a vote or __syncwarp. */
struct warp_sync {
    unsigned mask, came;
    int left; /* lanes that have not yet read the values */
    const char *what;
    thread *lanes[LANES];
    emu_lane_values values;
};

struct warp {
    unsigned alive;
    std::vector<warp_sync *> open;
};

/* The threads of a launch in findings, which may name them after it has ended. */
struct named_launch {
    uint32_t first; /* the number of its first block among all launches since the ranks began */
    long blocks;
    dim3 grid, block;
    int rank; /* -1 without ranks */
};

/* A running launch. Each rank may have one. */
struct launch {
    emu_kernel kernel;
    emu_configuration how;
    void **arguments;
    named_launch name;
    int threads;      /* of a block */
    long next, ended; /* the numbers of blocks that have begun, and that have ended */
    long resident;    /* threads of the blocks between */
    std::vector<thread *> at_grid_barrier;
    std::shared_ptr<struct cluster> newest;
};

/* Blocks that begin together. A launch without clusters has one for each block. */
struct cluster {
    std::vector<block *> blocks; /* by their ranks; NULL after a block's end */
    std::vector<thread *> waiting;
};

struct placed {
    const emu_variable *variable;
    size_t offset;
};

struct block {
    launch *of;
    uint3 index;
    uint32_t number; /* among all launches since the ranks began */
    uint32_t epoch;  /* barriers that it has passed, and 1 */
    int alive, begun;
    int arrived, votes, result; /* at the barrier */
    emu_vote vote;
    emu_place barrier;
    thread *first_at_barrier;
    int absent; /* threads that had returned before its last barrier */
    std::vector<thread> threads;
    std::vector<warp> warps;
    std::vector<thread *> waiting;
    std::vector<int> order; /* in which its threads begin */
    std::shared_ptr<cluster> together;
    unsigned rank; /* in the cluster */
    async_block *async;
    char *shared;   /* its slot */
    size_t dynamic; /* where dynamic shared memory begins in it */
    size_t used;    /* bytes of it */
    std::vector<placed> variables;
    std::vector<char> written; /* for the checks: bytes of shared memory */
};

/* In bytes. Dynamic shared memory that asks for no alignment begins at SHARED_FIRST, and other one at SHARED_ALIGNED. */
enum { SHARED_SLOT = 256 << 10, SHARED_FIRST = 64, SHARED_ALIGNED = 1024 };

extern __thread thread *self __attribute__((tls_model("initial-exec")));
extern bool checking;     /* the grid that runs is compiled with checks */
extern bool knows_memory; /* whether all memory that kernels may access is known; in an extension it is not */
extern std::recursive_mutex registering; /* memory */
extern bool in_call;                     /* an op is called: findings become its error, and launches succeed */
extern std::vector<named_launch> named;

unsigned launch_random(unsigned below);
void launch_progress(void);
void launch_wait(const char *what, emu_place at); /* until another thread wakes this one */
void launch_wake(std::vector<thread *> &waiting);
block *cluster_block(uintptr_t address); /* of the running thread's cluster, by its shared memory; or NULL */
[[noreturn]] void launch_stop(cudaError_t error);
bool shared_owns(uintptr_t address);
bool launch_owns_stack(uintptr_t address); /* whether it is in a variable of a host function that launched */

/* ---------------------------------------------------------------------------------------------- */
/* check.cc                                                                                       */

/* What came before: of blocks, and of threads. */
typedef std::shared_ptr<const struct happened_before> history;

/*
 * Copies and products run while their thread goes on, and only a thread that waits learns that they have ended. Their accesses
 * have numbers of their own: a kind, and a thread, a warpgroup or an mbarrier.
 */
enum async : uint32_t {
    ASYNC = 1u << 31,
    BY_COPY = ASYNC,             /* cp.async of a thread */
    BY_STORE = ASYNC | 1u << 29, /* TMA's reads of shared memory for a thread */
    BY_WGMMA = ASYNC | 2u << 29, /* of a warpgroup */
    BY_LOAD = ASYNC | 3u << 29   /* TMA's writes that an mbarrier counts */
};

/* Who accesses memory, and when: with the number of a group of copies or products, or of a phase of an mbarrier. */
struct actor {
    uint32_t id, time, epoch;
};

/* Flags of accesses. NEEDS_OLD: an update that reads what was there. IS_SYSTEM: an atomic that is one for all ranks.
 * IS_PROXY: by TMA or wgmma, with the swizzle in the two bits from SWIZZLE on. */
enum { IS_WRITE = 1, IS_ATOMIC = 2, NEEDS_OLD = 4, IS_SYSTEM = 8, IS_PROXY = 16, SWIZZLE = 5 };

actor check_own(void); /* the running thread now */
bool check_knows(const block *of,
                 const actor &visit);         /* whether some thread of a block knows that an access has ended */
actor check_async(async kind, uint32_t time); /* for the running thread */
void check_access(const void *at, size_t size, int flags, const void *code); /* by the running thread */
void check_access_async(const void *at, size_t size, int flags, const void *code, actor as);
void check_landed(const void *at, size_t size, const void *code); /* a copy by cp.async is the thread's own write now */
void check_done(async kind, uint32_t time);
void check_proxy_fence(void);
history check_released(const history &before); /* and what the running thread has done */
history check_and(const history &before, actor also);
void check_acquired(const history &handed);
void check_named_barrier(const std::vector<thread *> &at);
std::string check_name(const void *shared); /* of a place in shared memory */
void check_begin_grids(void);
void check_end_grids(void);
void check_begin_block(block *fresh);
void check_end_block(block *done);
void check_block_barrier(block *at);
void check_warp_barrier(warp_sync *of);
void check_barrier_of(const std::vector<block *> &blocks);

/* ---------------------------------------------------------------------------------------------- */
/* tensor_cores.cc                                                                                */

void async_end_thread(thread *done);
void async_end_block(block *done);
void async_forget(block *of);                                           /* in any state */
bool async_in_flight(const thread *of, uintptr_t address, size_t size); /* whether wgmma has yet to write there */
std::string async_awaited(const thread *of);                            /* what an mbarrier lacks */
bool async_lacks_bytes(const thread *of);                               /* whether it is bytes */

/* ---------------------------------------------------------------------------------------------- */
/* finding.cc                                                                                     */

/* Keep a finding at a place of the running thread, once for each key. The place and the text make one line. In a header
 * of opjit, the place is the author's line that called the helper, and the text gets the helper's rule. */
void finding_add(const std::string &key, const std::string &place, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The same at a place of another thread. */
void finding_add_elsewhere(const std::string &key, const std::string &place, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool finding_is_known(const std::string &key);
std::string finding_place(emu_place at);
std::string finding_place(const void *code);                                 /* of an address that a call returns to */
std::string finding_line(const std::string &place, const std::string &from); /* "line 16", or "other.h:16" */
extern "C" const char *emu_first_finding(void);                              /* NULL without one */
extern "C" void emu_forget_findings(void);
void finding_reached(emu_place at);     /* by a thread: a barrier */
void finding_reached(const void *code); /* an atomic */
std::string finding_thread(const thread *who);
std::string finding_thread(uint32_t block, int thread);

#endif
