/*
 * launch.cc - a grid: which of its threads runs next, where they wait for each other, and when they cannot go on.
 *
 * Without checks the threads of a block run in order, one block after the other. With checks blocks run side by side, and
 * a seeded generator decides who is next, so that a schedule can be repeated.
 */
#include "runtime.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <pthread.h>
#include <stdexcept>
#include <unordered_map>

#define EMU_TLS __thread __attribute__((tls_model("initial-exec")))
EMU_TLS uint3 threadIdx, blockIdx, blockDim, gridDim;
EMU_TLS int emu_lane;
EMU_TLS thread *self;

enum {
    BUDGET = 256, /* branches of a thread before others may go on, without checks */
    CHECKED_BUDGET = 2000,
    SIDE_BY_SIDE = 2048,                                        /* threads of checked blocks that run at once */
    SPINS = 1000,                                               /* pauses without progress before more blocks begin */
    ROOM = EMU_MULTIPROCESSORS * EMU_THREADS_OF_MULTIPROCESSOR, /* threads that a GPU like ours has at once */
    TURNS = 64                                                  /* pauses between two looks for a standstill */
};
static const double STILL = 0.2; /* CPU seconds of standstill, after which the clock of kernels goes on in leaps */

bool checking;
bool in_call;
bool knows_memory = true;
std::vector<named_launch> named;

static std::recursive_mutex launching;
static unsigned seed = 1;
static double patience = 5; /* CPU seconds */

/* The grids that run: the scheduler's state, for the length of a launch. */
static struct {
    std::vector<block *> resident, unused;
    std::deque<thread *> ready;
    void *top; /* of the scheduler's own stack */
    fiber *ended;
    unsigned random;
    bool stopped, has_ended; /* all launches, one of them */
    cudaError_t error;
    long pauses;     /* since the last progress */
    double standing; /* CPU time at which threads began to make no progress; 0 while they do */
    std::vector<launch *> running;
    unsigned long long leapt;    /* nanoseconds that the clock of kernels is ahead */
    const std::string *deadlock; /* while a thread reports it */
} grid;

/* Ranks: host threads that launch on separate devices. Their launches run in the thread of emu_conduct(). */
enum host_state { BUSY, LAUNCHES, GONE };
struct host {
    host_state state;
    launch *asked;
    cudaError_t error;
};
static std::mutex with_hosts;
static std::condition_variable hosts_changed;
static std::vector<host> hosts; /* empty without ranks */
static thread_local int rank_of_host = -1;

static double cpu_seconds(void)
{
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

unsigned launch_random(unsigned below)
{
    grid.random = grid.random * 1664525u + 1013904223u; /* Numerical Recipes' generator */
    return (grid.random >> 8) % below;
}

void launch_progress(void)
{
    grid.pauses = 0;
    grid.standing = 0;
}

/* ---------------------------------------------------------------------------------------------- */
/* Threads                                                                                        */

static void become(thread *next)
{
    const block *in = next->in;
    next->state = RUNNING;
    self = next;
    threadIdx = next->index;
    blockIdx = in->index;
    blockDim = in->of->how.block;
    gridDim = in->of->how.grid;
    emu_lane = next->lane;
}

/* Report a deadlock as the thread whose place the finding gets. */
static void report_deadlock_here(void)
{
    const bool in_loop = !self->doing && self->caller;
    const std::string place = in_loop ? finding_place(self->caller) : finding_place(self->at);
    finding_add("deadlock" + *grid.deadlock, place, "%s", grid.deadlock->c_str());
}

/* Let the scheduler run others, until someone wakes this thread, or asks it to report a deadlock. */
static void suspend(void)
{
    fiber *own = self->on;
    for (emu_switch(&own->top, grid.top); grid.deadlock; emu_switch(&own->top, grid.top))
        report_deadlock_here();
}

static void wake(thread *sleeper)
{
    sleeper->state = READY;
    grid.ready.push_back(sleeper);
}

void launch_wake(std::vector<thread *> &waiting)
{
    for (thread *each : waiting)
        wake(each);
    waiting.clear();
    launch_progress();
}

static void wait_at(const char *what, emu_place at)
{
    self->doing = what;
    self->at = at;
    if (checking)
        finding_reached(at);
}

void launch_wait(const char *what, emu_place at)
{
    wait_at(what, at);
    self->state = WAITING;
    suspend();
}

static uintptr_t end_of_stack(void)
{
    pthread_attr_t attributes;
    void *lowest = nullptr;
    size_t bytes = 0;
    if (pthread_getattr_np(pthread_self(), &attributes))
        return 0;
    pthread_attr_getstack(&attributes, &lowest, &bytes);
    pthread_attr_destroy(&attributes);
    return (uintptr_t)lowest + bytes;
}

bool launch_owns_stack(uintptr_t address)
{
    static thread_local const uintptr_t end = end_of_stack();
    return self && address >= (uintptr_t)grid.top && address < end;
}

/* End all threads of the launch. */
void launch_stop(cudaError_t error)
{
    grid.error = error;
    grid.stopped = true;
    for (;;)
        suspend();
}

bool emu_is_thread(void)
{
    return self != nullptr;
}

void emu_pause(void)
{
    if (!self)
        return;
    self->doing = nullptr;
    self->budget = checking ? CHECKED_BUDGET : BUDGET;
    grid.pauses++;
    wake(self);
    suspend();
}

extern "C" void __sanitizer_cov_trace_pc(void)
{
    thread *own = self;
    if (!own || --own->budget > 0)
        return;
    own->caller = __builtin_return_address(0);
    emu_pause();
}

/* ---------------------------------------------------------------------------------------------- */
/* Barriers                                                                                       */

/* At a barrier that the running thread has passed, though others never come. */
static void report_absent(const block *of, emu_place at)
{
    const std::string place = finding_place(at);
    finding_add(
        "absent" + place, place,
        "divergent barrier: %d of %zu threads of block %u do not come to this __syncthreads(), because they have "
        "returned; compute-sanitizer reports that, too: let all threads reach it",
        of->absent, of->threads.size(), of->index.x);
}

static void release_barrier(block *of)
{
    if (checking)
        check_block_barrier(of);
    of->epoch++;
    of->absent = (int)of->threads.size() - of->alive;
    of->result = of->votes;
    of->arrived = 0;
    launch_wake(of->waiting);
}

static bool is_same(emu_place a, emu_place b)
{
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

static void report_divergence(const block *of, emu_place at)
{
    const std::string place = finding_place(at), first = finding_place(of->barrier);
    finding_add("divergent" + std::min(place, first) + std::max(place, first), place,
                "divergent barrier: %s waits at this __syncthreads(), %s at that of %s", finding_thread(self).c_str(),
                finding_thread(of->first_at_barrier).c_str(), finding_line(first, place).c_str());
}

int emu_block_barrier(emu_vote vote, int value, emu_place at)
{
    block *of = self->in;
    wait_at("__syncthreads()", at);
    if (of->arrived == 0) {
        of->vote = vote;
        of->votes = vote == EMU_AND;
        of->barrier = at;
        of->first_at_barrier = self;
    } else if (!is_same(of->barrier, at)) {
        report_divergence(of, at);
    }
    if (vote == EMU_COUNT)
        of->votes += value;
    else if (vote == EMU_AND)
        of->votes &= value;
    else
        of->votes |= value;
    of->arrived++;
    if (of->arrived == of->alive) {
        release_barrier(of);
    } else {
        self->state = WAITING;
        of->waiting.push_back(self);
        suspend();
    }
    if (checking && of->absent)
        report_absent(of, at);
    return of->result;
}

static size_t threads_alive(const std::vector<block *> &blocks)
{
    size_t alive = 0;
    for (const block *each : blocks)
        alive += (size_t)each->alive;
    return alive;
}

void emu_grid_barrier(emu_place at)
{
    wait_at("grid.sync()", at);
    if (!self->in->of->how.cooperative) {
        const std::string place = finding_place(at);
        finding_add(
            "cooperative" + place, place,
            "grid.sync() in a launch that is not cooperative: launch the kernel with cudaLaunchCooperativeKernel");
        launch_stop(cudaErrorLaunchFailure);
    }
    launch *of = self->in->of;
    std::vector<block *> blocks;
    for (block *each : grid.resident)
        if (each->of == of)
            blocks.push_back(each);
    if (of->at_grid_barrier.size() + 1 < threads_alive(blocks)) {
        self->state = WAITING;
        of->at_grid_barrier.push_back(self);
        suspend();
        return;
    }
    if (checking)
        check_barrier_of(blocks);
    launch_wake(of->at_grid_barrier);
}

/* ---------------------------------------------------------------------------------------------- */
/* Clusters                                                                                       */

unsigned emu_cluster_rank(void)
{
    return self->in->rank;
}

block *cluster_block(uintptr_t address)
{
    for (block *each : self->in->together->blocks)
        if (each && address - (uintptr_t)each->shared < SHARED_SLOT)
            return each;
    return nullptr;
}

/* Let the threads of a cluster go on if all that have not ended wait. It is not inlined into end_thread(), because the next
 * thread of a fiber begins with what fiber_spoil() wrote as long as little of the stack is used between them. */
__attribute__((noinline)) static void release_cluster(cluster *of)
{
    std::vector<block *> blocks;
    for (block *each : of->blocks)
        if (each && each->alive)
            blocks.push_back(each);
    if (of->waiting.size() < threads_alive(blocks))
        return;
    if (checking)
        check_barrier_of(blocks);
    launch_wake(of->waiting);
}

void emu_cluster_barrier(emu_place at)
{
    cluster *of = self->in->together.get();
    wait_at("opjit_cluster_sync()", at);
    self->state = WAITING;
    of->waiting.push_back(self);
    release_cluster(of); /* wakes this thread, too, if it is the last */
    suspend();
}

/* ---------------------------------------------------------------------------------------------- */
/* Warps                                                                                          */

static warp *warp_of(const thread *of)
{
    return &of->in->warps[(size_t)of->number / LANES];
}

/* Let the lanes of a warp_sync go on if all have come that are alive. */
static bool complete(warp *of, warp_sync *at)
{
    if (at->mask & of->alive & ~at->came)
        return false;
    at->left = __builtin_popcount(at->came);
    at->values.came = at->came;
    of->open.erase(std::find(of->open.begin(), of->open.end(), at));
    for (int lane = 0; lane < LANES; lane++)
        if (at->came >> lane & 1 && at->lanes[lane]->state == WAITING)
            wake(at->lanes[lane]);
    launch_progress();
    return true;
}

/* The open warp_sync that a lane joins, or a new one. */
static warp_sync *warp_sync_for(warp *of, const char *what, unsigned mask, emu_place at)
{
    for (warp_sync *open : of->open)
        if (open->mask == mask && !(open->came >> self->lane & 1)) {
            const std::string place = finding_place(at);
            if (strcmp(open->what, what) != 0)
                finding_add("mixed" + place, place, "%s calls %s while other lanes of its warp call %s",
                            finding_thread(self).c_str(), what, open->what);
            return open;
        }
    warp_sync *fresh = new warp_sync();
    fresh->mask = mask;
    fresh->what = what;
    of->open.push_back(fresh);
    return fresh;
}

static void join_warp_sync(const char *what, unsigned mask, const void *value, size_t size, emu_lane_values *values,
                           emu_place at)
{
    wait_at(what, at);
    if (!(mask >> self->lane & 1)) {
        const std::string place = finding_place(at);
        finding_add("mask" + place, place, "%s calls %s with mask 0x%08x, which leaves out lane %d, its own",
                    finding_thread(self).c_str(), what, mask, self->lane);
        mask |= 1u << self->lane;
    }
    warp *of = warp_of(self);
    warp_sync *joined = warp_sync_for(of, what, mask, at);
    if (size)
        memcpy(joined->values.value[self->lane], value, size);
    joined->lanes[self->lane] = self;
    joined->came |= 1u << self->lane;
    if (!complete(of, joined)) {
        self->state = WAITING;
        suspend();
    }
    if (values)
        *values = joined->values;
    else if (checking && joined->left == __builtin_popcount(joined->came))
        check_warp_barrier(joined); /* the first to go on, for all: __syncwarp orders memory */
    if (--joined->left == 0)
        delete joined;
}

void emu_exchange(const char *what, unsigned mask, const void *value, size_t size, emu_lane_values *values,
                  emu_place at)
{
    join_warp_sync(what, mask, value, size, values, at);
}

void emu_warp_barrier(unsigned mask, emu_place at)
{
    join_warp_sync("__syncwarp", mask, nullptr, 0, nullptr, at);
}

void emu_bad_lane(const char *what, int lane, emu_place at)
{
    const std::string place = finding_place(at);
    finding_add("lane" + place, place, "%s of %s reads lane %d, which does not take part", what,
                finding_thread(self).c_str(), lane);
}

/* ---------------------------------------------------------------------------------------------- */
/* Shared memory                                                                                  */

static arena slots = {SHARED_SLOT, "blocks", {}, {}, 0};

/* The most shared memory of a kernel's block, by the function that calls the kernel. */
static std::unordered_map<const void *, size_t> shared_limits;

static size_t shared_limit_of(const emu_kernel &kernel)
{
    const std::lock_guard<std::recursive_mutex> alone(registering);
    const auto found = shared_limits.find((const void *)kernel.call);
    return found == shared_limits.end() ? (size_t)EMU_SHARED : found->second;
}

bool shared_owns(uintptr_t address)
{
    return slots.owns(address);
}

/* With checks, variables are apart from each other, and no more aligned than their types ask. */
static size_t offset_for(const block *of, const emu_variable *variable)
{
    const size_t align = std::max<size_t>(variable->align, 1), gap = checking ? LANES : 0;
    size_t offset = (of->used + 15) / 16 * 16 + gap;
    offset = (offset + align - 1) / align * align;
    return checking && align < 16 ? offset + align : offset;
}

void *emu_shared(const emu_variable *variable)
{
    block *in = self->in;
    for (const placed &known : in->variables)
        if (known.variable == variable)
            return in->shared + known.offset;
    const size_t offset = offset_for(in, variable), dynamic = in->of->how.shared;
    size_t all = variable->size + dynamic;
    for (const placed &known : in->variables)
        all += known.variable->size;
    const size_t limit = shared_limit_of(in->of->kernel);
    if (all > limit || offset + variable->size > SHARED_SLOT) {
        finding_add(std::string("size") + variable->name, finding_place(variable->at),
                    "a block needs %zu bytes of shared memory with `%s`; it has %zu", all, variable->name, limit);
        launch_stop(cudaErrorInvalidValue);
    }
    in->used = offset + variable->size;
    in->variables.push_back({variable, offset});
    return in->shared + offset;
}

/* The first that asks in a block decides its alignment. */
void *emu_dynamic_shared(const char *, size_t align)
{
    block *in = self->in;
    if (!in->dynamic)
        in->dynamic = align > SHARED_FIRST ? SHARED_ALIGNED : SHARED_FIRST;
    return in->shared + in->dynamic;
}

bool emu_is_shared(const void *place)
{
    return shared_owns((uintptr_t)place);
}

cudaError_t emu_allow_shared(const void *function, size_t bytes)
{
    if (bytes > EMU_SHARED_OPTIN)
        return emu_fail(cudaErrorInvalidValue);
    const std::lock_guard<std::recursive_mutex> alone(registering);
    shared_limits[(const void *)emu_call_of(function)] = std::max<size_t>(bytes, EMU_SHARED);
    return cudaSuccess;
}

int emu_multiprocessors(void)
{
    return hosts.empty() ? EMU_MULTIPROCESSORS : 1;
}

int emu_resident_blocks(int threads, size_t shared)
{
    const size_t by_memory = shared ? EMU_SHARED_OPTIN / shared : EMU_THREADS_OF_MULTIPROCESSOR;
    return (int)std::min<size_t>(by_memory, (size_t)(EMU_THREADS_OF_MULTIPROCESSOR / std::max(threads, 1)));
}

/* ---------------------------------------------------------------------------------------------- */
/* Blocks                                                                                         */

static void number_threads(block *fresh)
{
    const dim3 size = fresh->of->how.block;
    int number = 0;
    for (unsigned z = 0; z < size.z; z++)
        for (unsigned y = 0; y < size.y; y++)
            for (unsigned x = 0; x < size.x; x++) {
                thread *each = &fresh->threads[(size_t)number];
                each->index = {x, y, z};
                each->number = number;
                each->lane = number++ % LANES;
                each->in = fresh;
            }
}

static block *make_block(launch *of)
{
    block *fresh = new block();
    fresh->of = of;
    fresh->threads.resize((size_t)of->threads);
    fresh->warps.resize((size_t)(of->threads + LANES - 1) / LANES);
    fresh->shared = slots.take();
    number_threads(fresh);
    return fresh;
}

static unsigned blocks_of(dim3 cluster)
{
    return cluster.x * cluster.y * cluster.z;
}

/* The index of the block that begins after `before` other blocks, and its cluster. */
static void place_block(block *fresh, long before)
{
    launch *of = fresh->of;
    const dim3 size = of->how.grid, part = of->how.cluster;
    const unsigned count = blocks_of(part), across = size.x / part.x, down = size.y / part.y;
    const long cluster_number = before / count;
    const unsigned rank = (unsigned)(before % count);
    fresh->index = {(unsigned)(cluster_number % across) * part.x + rank % part.x,
                    (unsigned)(cluster_number / across % down) * part.y + rank / part.x % part.y,
                    (unsigned)(cluster_number / across / down) * part.z + rank / part.x / part.y};
    fresh->number = of->name.first + fresh->index.x + size.x * (fresh->index.y + size.y * fresh->index.z);
    fresh->rank = rank;
    if (rank == 0)
        of->newest = std::make_shared<cluster>();
    of->newest->blocks.push_back(fresh);
    fresh->together = of->newest;
}

/* Begin the next block of a launch, in the place of one that has ended if there is one. */
static void begin_block(launch *of)
{
    block *fresh;
    if (grid.unused.empty()) {
        fresh = make_block(of);
    } else {
        fresh = grid.unused.back();
        grid.unused.pop_back();
    }
    place_block(fresh, of->next++);
    fresh->epoch = 1;
    fresh->alive = of->threads;
    fresh->begun = fresh->arrived = 0;
    fresh->absent = 0;
    fresh->dynamic = 0;
    fresh->used = SHARED_ALIGNED + of->how.shared;
    fresh->variables.clear();
    for (size_t i = 0; i < fresh->warps.size(); i++) {
        const size_t left = fresh->threads.size() - i * LANES;
        fresh->warps[i].alive = left >= LANES ? ~0u : (1u << left) - 1;
    }
    for (thread &each : fresh->threads) {
        each.state = FRESH;
        each.on = nullptr;
        each.doing = nullptr;
        each.awaits = nullptr;
        each.budget = checking ? CHECKED_BUDGET : BUDGET;
    }
    if (checking)
        check_begin_block(fresh);
    of->resident += of->threads;
    grid.resident.push_back(fresh);
}

static void leave_cluster(block *done)
{
    async_end_block(done);
    done->together->blocks[done->rank] = nullptr;
    done->together.reset();
}

static void end_block(size_t place)
{
    block *done = grid.resident[place];
    launch *of = done->of;
    grid.resident.erase(grid.resident.begin() + (long)place);
    of->resident -= of->threads;
    grid.has_ended |= ++of->ended == of->name.blocks;
    leave_cluster(done);
    if (checking)
        check_end_block(done);
    if (of->name.rank < 0) {
        grid.unused.push_back(done);
        return;
    }
    slots.unused.push_back(done->shared);
    delete done;
}

static void free_blocks(std::vector<block *> &blocks)
{
    for (block *each : blocks) {
        for (thread &of : each->threads)
            if (of.on && of.state != ENDED)
                fiber_free(of.on);
        async_forget(each);
        if (checking)
            check_end_block(each);
        slots.unused.push_back(each->shared);
        delete each;
    }
    blocks.clear();
}

/* ---------------------------------------------------------------------------------------------- */
/* Who runs next                                                                                  */

static void end_thread(thread *done)
{
    block *of = done->in;
    warp *lanes = warp_of(done);
    if (done->async)
        async_end_thread(done);
    done->state = ENDED;
    of->alive--;
    lanes->alive &= ~(1u << done->lane);
    launch_progress();
    for (size_t i = 0; i < lanes->open.size();)
        if (!complete(lanes, lanes->open[i]))
            i++;
    if (of->arrived && of->arrived == of->alive)
        release_barrier(of);
    if (!of->together->waiting.empty())
        release_cluster(of->together.get());
}

static thread *fresh_thread(block *of)
{
    const int next = of->begun++;
    return &of->threads[(size_t)(of->order.empty() ? next : of->order[(size_t)next])];
}

/* A fiber: one thread, then others of its block that have not begun, as long as none waits that could go on. */
static void run_threads(void)
{
    for (bool is_first = true;; is_first = false) {
        thread *own = self;
        block *of = own->in;
        if (checking || is_first)
            fiber_spoil(own->on);
        of->of->kernel.call(of->of->arguments);
        end_thread(own);
        if (of->begun == (int)of->threads.size() || grid.stopped || !grid.ready.empty()) {
            grid.ended = own->on;
            emu_switch(&own->on->top, grid.top);
        }
        thread *next = fresh_thread(of);
        next->on = own->on;
        become(next);
    }
}

/* A block with threads that have not begun: with checks any, else the first. */
static block *block_to_begin(void)
{
    block *found = nullptr;
    unsigned seen = 0;
    for (block *each : grid.resident) {
        if (each->begun == (int)each->threads.size())
            continue;
        if (!checking)
            return each;
        if (launch_random(++seen) == 0)
            found = each;
    }
    return found;
}

static thread *next_thread(void)
{
    block *fresh = block_to_begin();
    const bool others_begin = hosts.empty() ? grid.pauses > SPINS && grid.pauses % TURNS == 0 : grid.pauses % 2 == 0;
    const bool resumes = !fresh || (checking ? launch_random(4) == 0 : grid.pauses > 0 && !others_begin);
    if (!grid.ready.empty() && resumes) {
        if (checking)
            std::swap(grid.ready[0], grid.ready[launch_random((unsigned)grid.ready.size())]);
        thread *next = grid.ready.front();
        grid.ready.pop_front();
        return next;
    }
    if (!fresh)
        return nullptr;
    thread *next = fresh_thread(fresh);
    next->on = fiber_new(run_threads);
    return next;
}

/* The threads of a launch that run at once: more if these only wait, and with ranks as many as may wait for each other. */
static long room_for(const launch *of)
{
    if (of->how.cooperative)
        return LONG_MAX;
    if (of->name.rank >= 0)
        return EMU_THREADS_OF_MULTIPROCESSOR;
    if (grid.pauses > SPINS)
        return ROOM;
    return checking ? SIDE_BY_SIDE : 1;
}

static void admit_blocks(void)
{
    for (launch *of : grid.running) {
        const long room = room_for(of), count = blocks_of(of->how.cluster);
        while (of->next < of->name.blocks && (!of->resident || of->resident + count * of->threads <= room))
            for (long i = 0; i < count; i++)
                begin_block(of);
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* Deadlocks                                                                                      */

static std::string whereabouts(const thread *of)
{
    if (of->doing)
        return std::string(of->doing) + " in " + finding_place(of->at) + (of->awaits ? async_awaited(of) : "");
    return of->caller ? "the loop in " + finding_place(of->caller) : "a loop";
}

static void report_deadlock(const char *title)
{
    std::map<std::string, std::pair<int, thread *>> places;
    for (block *each : grid.resident)
        for (thread &of : each->threads)
            if (of.state == WAITING || of.state == READY) {
                auto &place = places[whereabouts(&of)];
                place.first++;
                place.second = place.second ? place.second : &of;
            }
    std::string text = std::string(title) + "; threads that wait: ";
    for (size_t rank = 0; rank < hosts.size(); rank++)
        if (hosts[rank].state == GONE)
            text += "none of rank " + std::to_string(rank) + ", which runs no kernel, ";
    thread *first = nullptr;
    for (const auto &[place, who] : places) {
        text += std::to_string(who.first) + " at " + place + " (" + finding_thread(who.second) + "), ";
        if (!first || who.second->state == READY || (async_lacks_bytes(who.second) && !async_lacks_bytes(first)))
            first = who.second;
    }
    text.resize(text.size() - 2);
    if (first) {
        become(first);
        grid.deadlock = &text;
        emu_switch(&grid.top, first->on->top);
        grid.deadlock = nullptr;
    }
    grid.error = cudaErrorLaunchFailure;
    grid.stopped = true;
}

static bool is_anyone_waiting(void)
{
    for (const block *each : grid.resident)
        if (each->alive > 0)
            return true;
    return false;
}

/* Whether threads have only waited in loops for a while. Then time limits of their waits pass quickly. */
static void look_for_standstill(void)
{
    if (grid.pauses <= SPINS || grid.pauses % TURNS)
        return;
    const double now = cpu_seconds();
    if (grid.standing == 0)
        grid.standing = now;
    if (now - grid.standing > STILL)
        grid.leapt += 1000000000;
    if (now - grid.standing > patience)
        report_deadlock("deadlock: threads wait in a loop, and none gets on");
}

/* Run threads until a launch has ended, or all are stopped. */
static void run_grids(void)
{
    thread *const host = self;
    grid.has_ended = false;
    while (!grid.stopped && !grid.has_ended) {
        admit_blocks();
        thread *next = next_thread();
        if (!next) {
            if (is_anyone_waiting())
                report_deadlock("deadlock");
            break;
        }
        become(next);
        grid.ended = nullptr;
        emu_switch(&grid.top, next->on->top);
        if (grid.ended)
            fiber_free(grid.ended);
        for (size_t i = grid.resident.size(); i-- > 0;)
            if (grid.resident[i]->alive == 0)
                end_block(i);
        look_for_standstill();
    }
    self = host;
}

/* ---------------------------------------------------------------------------------------------- */
/* Launches                                                                                       */

static thread_local emu_configuration configured;
static thread_local bool is_configured;

void emu_configure(const emu_configuration &configuration)
{
    configured = configuration;
    is_configured = true;
}

void emu_launched(void)
{
    if (!is_configured)
        return;
    is_configured = false;
    const std::string place = finding_place(configured.at);
    finding_add("macro" + place, place, "the kernel did not run: a macro begins it, which is not emulated");
    emu_fail(cudaErrorInvalidDeviceFunction);
}

static std::mutex with_kernels;

static std::unordered_map<const void *, void (*)(void **)> &kernels(void)
{
    static std::unordered_map<const void *, void (*)(void **)> known;
    return known;
}

void emu_know_kernel(const void *function, void (*call)(void **arguments))
{
    const std::lock_guard<std::mutex> alone(with_kernels);
    kernels()[function] = call;
}

void (*emu_call_of(const void *function))(void **arguments)
{
    const std::lock_guard<std::mutex> alone(with_kernels);
    const auto found = kernels().find(function);
    return found == kernels().end() ? nullptr : found->second;
}

/* The rules of a launch's configuration. Returns an error's code. */
static cudaError_t refuse_configuration(const emu_kernel &kernel, const emu_configuration &how,
                                        unsigned long long threads)
{
    const std::string place = finding_place(how.at);
    const dim3 grid_size = how.grid, size = how.block;
    const unsigned room = (unsigned)(emu_multiprocessors() * EMU_THREADS_OF_MULTIPROCESSOR);
    if (!grid_size.x || !grid_size.y || !grid_size.z || !threads || threads > EMU_THREADS_OF_BLOCK || size.z > 64 ||
        grid_size.x > INT_MAX || grid_size.y > 65535 || grid_size.z > 65535) {
        finding_add("configuration" + place, place,
                    "invalid configuration of %s: %u x %u x %u blocks of %u x %u x %u threads; a block has 1 to 1024 "
                    "threads, a grid 1 to 2147483647 x 65535 x 65535 blocks",
                    kernel.name, grid_size.x, grid_size.y, grid_size.z, size.x, size.y, size.z);
        return cudaErrorInvalidConfiguration;
    }
    if (kernel.max_threads && threads > (unsigned)kernel.max_threads) {
        finding_add("bounds" + place, place,
                    "%s is launched with %llu threads in a block, more than its __launch_bounds__(%d)", kernel.name,
                    threads, kernel.max_threads);
        return cudaErrorLaunchOutOfResources;
    }
    const size_t limit = shared_limit_of(kernel);
    if (how.shared > limit) {
        finding_add(
            "dynamic" + place, place,
            "%s gets %zu bytes of dynamic shared memory, more than %zu; allow it more with cudaFuncSetAttribute",
            kernel.name, how.shared, limit);
        return cudaErrorInvalidValue;
    }
    const dim3 part = how.cluster;
    if (!blocks_of(part) || blocks_of(part) > 8 || grid_size.x % part.x || grid_size.y % part.y ||
        grid_size.z % part.z) {
        finding_add(
            "cluster" + place, place,
            "invalid configuration of %s: %u x %u x %u blocks in clusters of %u x %u x %u; a cluster has 1 to 8 "
            "blocks, and the grid is a multiple of it",
            kernel.name, grid_size.x, grid_size.y, grid_size.z, part.x, part.y, part.z);
        return cudaErrorInvalidConfiguration;
    }
    if (how.cooperative && (unsigned long long)grid_size.x * grid_size.y * grid_size.z * threads > room) {
        finding_add("together" + place, place,
                    "a cooperative launch of %s has more than %d threads, which is the room here", kernel.name,
                    (int)room);
        return cudaErrorCooperativeLaunchTooLarge;
    }
    return cudaSuccess;
}

/* Forget what ran before. */
static void begin_grids(void)
{
    named.clear();
    grid.random = seed * 7919;
    grid.stopped = false;
    grid.error = cudaSuccess;
    launch_progress();
    if (checking)
        check_begin_grids();
}

static void end_grids(void)
{
    grid.ready.clear();
    free_blocks(grid.resident);
    free_blocks(grid.unused);
    grid.running.clear();
    check_end_grids();
}

static void add_launch(launch *fresh)
{
    fresh->name.first = named.empty() ? 0 : named.back().first + (uint32_t)named.back().blocks;
    named.push_back(fresh->name);
    grid.running.push_back(fresh);
}

static cudaError_t run_alone(launch *only)
{
    begin_grids();
    add_launch(only);
    run_grids();
    end_grids();
    return grid.error;
}

static cudaError_t run_as_rank(launch *of)
{
    std::unique_lock<std::mutex> alone(with_hosts);
    host &own = hosts[(size_t)of->name.rank];
    own.asked = of;
    own.state = LAUNCHES;
    hosts_changed.notify_all();
    hosts_changed.wait(alone, [&] { return own.state == BUSY; });
    return own.error;
}

void emu_launch(const emu_kernel &kernel, void **arguments)
{
    if (!is_configured) {
        fprintf(stderr, "CUDA, emulated: the host calls the kernel %s without <<<...>>>\n", kernel.name);
        abort();
    }
    is_configured = false;
    const emu_configuration how = configured;
    const unsigned long long threads = 1ull * how.block.x * how.block.y * how.block.z;
    const int rank = rank_of_host;
    std::unique_lock<std::recursive_mutex> alone(launching, std::defer_lock);
    if (rank < 0)
        alone.lock();
    const cudaError_t refused = refuse_configuration(kernel, how, threads);
    if (refused) {
        emu_fail(refused);
        return;
    }
    const long blocks = (long)how.grid.x * how.grid.y * how.grid.z;
    launch own = {kernel, how, arguments, {0, blocks, how.grid, how.block, rank}, (int)threads, 0, 0, 0, {}, nullptr};
    const cudaError_t error = rank < 0 ? run_alone(&own) : run_as_rank(&own);
    if (error)
        emu_fail(error);
}

void emu_launch_of_extension(const emu_kernel &kernel, void **arguments)
{
    const std::lock_guard<std::recursive_mutex> alone(launching), no_tensor_is_made(registering);
    knows_memory = false;
    emu_launch(kernel, arguments);
    knows_memory = true;
    const char *found = emu_first_finding();
    if (!found)
        return;
    const std::string text = std::string("emulated: ") + found;
    emu_forget_findings();
    throw std::runtime_error(text);
}

/* ---------------------------------------------------------------------------------------------- */
/* Ranks                                                                                          */

/* Answer the hosts of launches that have ended, or of all if none can go on. */
static void answer_hosts(void)
{
    for (host &each : hosts) {
        if (each.state != LAUNCHES || (!grid.stopped && each.asked->ended < each.asked->name.blocks))
            continue;
        const auto place = std::find(grid.running.begin(), grid.running.end(), each.asked);
        if (place != grid.running.end())
            grid.running.erase(place);
        each.asked = nullptr;
        each.error = grid.error;
        each.state = BUSY;
    }
    hosts_changed.notify_all();
}

extern "C" {
/* Let host threads be ranks, which begin with emu_be_rank() and end with emu_be_host(). */
void emu_begin_ranks(int count)
{
    const std::lock_guard<std::mutex> alone(with_hosts);
    hosts.assign((size_t)count, {BUSY, nullptr, cudaSuccess});
    in_call = true;
    emu_forget_findings();
}

/*
 * Run the launches of all ranks in this thread until all ranks have ended. The order in which threads run depends on the
 * seed only, because they run while each rank waits for a launch or has ended.
 */
void emu_conduct(void)
{
    std::unique_lock<std::mutex> alone(with_hosts);
    begin_grids();
    for (;;) {
        hosts_changed.wait(alone, [] {
            return std::none_of(hosts.begin(), hosts.end(), [](const host &each) { return each.state == BUSY; });
        });
        for (const host &each : hosts)
            if (each.asked && std::find(grid.running.begin(), grid.running.end(), each.asked) == grid.running.end())
                add_launch(each.asked);
        if (grid.running.empty())
            break;
        run_grids();
        if (grid.stopped)
            end_grids();
        answer_hosts();
    }
    end_grids();
}

void emu_be_rank(int rank)
{
    rank_of_host = rank;
}

void emu_be_host(void)
{
    const std::lock_guard<std::mutex> alone(with_hosts);
    hosts[(size_t)rank_of_host].state = GONE;
    rank_of_host = -1;
    hosts_changed.notify_all();
}

void emu_end_ranks(void)
{
    const std::lock_guard<std::mutex> alone(with_hosts);
    hosts.clear();
    in_call = false;
}
}

/* ---------------------------------------------------------------------------------------------- */
/* For opjit                                                                                      */

extern "C" {
void emu_begin_call(void)
{
    if (rank_of_host >= 0)
        return;
    launching.lock();
    in_call = true;
    emu_forget_findings();
}

void emu_end_call(void)
{
    if (rank_of_host >= 0)
        return;
    in_call = false;
    launching.unlock();
}

void emu_set_checking(int on)
{
    const std::lock_guard<std::recursive_mutex> alone(launching);
    checking = on != 0;
}

void emu_set_seed(unsigned number)
{
    seed = number;
}

void emu_set_patience(double seconds)
{
    patience = seconds;
}
}

/* ---------------------------------------------------------------------------------------------- */
/* The end of a kernel, and its clocks                                                            */

void emu_assertion(const char *text, emu_place at)
{
    const std::string place = finding_place(at);
    if (!self) {
        fprintf(stderr, "%s: assertion `%s` failed\n", place.c_str(), text);
        abort();
    }
    finding_add("assert" + place, place, "assertion `%s` failed in %s", text, finding_thread(self).c_str());
    launch_stop(cudaErrorAssert);
}

void emu_trap(emu_place at)
{
    const std::string place = finding_place(at);
    finding_add("trap" + place, place, "__trap() in %s", finding_thread(self).c_str());
    launch_stop(cudaErrorLaunchFailure);
}

long long emu_ticks(void)
{
    static long long ticks;
    return ticks += 100;
}

unsigned long long emu_nanoseconds(void)
{
    emu_pause();
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000000000u + (unsigned long long)now.tv_nsec + grid.leapt;
}
