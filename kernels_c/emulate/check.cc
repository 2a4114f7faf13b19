/*
 * check.cc - every access of a checked kernel: whether it is in bounds, whether someone wrote what it reads, and whether it
 * races with another one. g++ -fsanitize=thread inserts the calls; this file answers them, in place of libtsan.
 *
 * Races are found by happens-before, as in FastTrack (Flanagan and Freund, PLDI 2009): an access keeps an epoch, a thread
 * and its time, in place of a vector of clocks. Grids make most clocks cheap: what came before a block's barrier is known
 * to the whole block, so that one number for each block, its barriers, orders most accesses. Lanes of a warp have a vector
 * of 32 clocks, for __syncwarp. Only fences and atomics need maps, which a fence fills with what its thread knows.
 */
#include "runtime.h"

#include <algorithm>
#include <atomic>
#include <link.h>
#include <map>
#include <mutex>
#include <pthread.h>
#include <unordered_map>

enum { THREADS = EMU_THREADS_OF_BLOCK, RECORDS = 4, PAGE = 4096, WORD = 4 };

/* ---------------------------------------------------------------------------------------------- */
/* What a thread knows of others                                                                  */

/* Accesses that are ordered before: of blocks, all in earlier epochs; of threads, all up to a time. */
typedef std::map<uint32_t, uint32_t> times;
struct happened_before {
    times blocks, threads;
};
/* Threads share a history: one that learns gets a new object. */

/* The same for two kinds of readers: threads of the rank, and of other ranks, which needs system scope at every step. */
struct by_reach {
    history in_rank, across;
};

struct clocks {
    uint32_t id; /* the block's number and the thread's */
    uint32_t time;
    uint32_t lanes[LANES]; /* the time up to which each lane of its warp is ordered before it */
    history known;         /* by acquired fences */
    by_reach fenced;       /* what its last fence made ready to hand over */
    by_reach awaits_fence; /* what it has read of others, which it knows with its next fence */
    history last_acquired; /* the last that it has learned, for loops that wait */
    uint32_t done[4];      /* of its copies and products, by kind: the last group that has ended */
    /* What it knew at its last fence for TMA and wgmma. */
    struct {
        uint32_t time, epoch;
        history known;
    } proxied;
};

static int kind_of(uint32_t id)
{
    return id & ASYNC ? (int)(id >> 29 & 3) : -1;
}

/* The number under which what a thread started accesses memory. */
static uint32_t id_async(async kind, uint32_t id)
{
    enum { WARPGROUP = 128 };
    return kind | ((kind == BY_WGMMA ? id / WARPGROUP * WARPGROUP : id) & ((1u << 29) - 1));
}

static std::unordered_map<uintptr_t, std::map<int, by_reach>> released; /* by ranks, with a flag's value */
static std::map<int, history> known_to_ranks;                           /* from their earlier launches */

static void raise_to(times &all, uint32_t who, uint32_t time)
{
    uint32_t &known = all[who];
    known = std::max(known, time);
}

static bool contains(const times &all, const times &some)
{
    return std::all_of(some.begin(), some.end(), [&](const times::value_type &each) {
        const auto found = all.find(each.first);
        return found != all.end() && found->second >= each.second;
    });
}

static bool contains(const history &all, const history &some)
{
    return all == some || !some ||
           (all && contains(all->blocks, some->blocks) && contains(all->threads, some->threads));
}

static history joined(const history &one, const history &other)
{
    if (contains(one, other))
        return one;
    if (contains(other, one))
        return other;
    auto both = std::make_shared<happened_before>(*one);
    for (const auto &[who, time] : other->blocks)
        raise_to(both->blocks, who, time);
    for (const auto &[who, time] : other->threads)
        raise_to(both->threads, who, time);
    return both;
}

/* A copy of a history, which may get more. */
static std::shared_ptr<happened_before> copy_of(const history &known)
{
    return known ? std::make_shared<happened_before>(*known) : std::make_shared<happened_before>();
}

static void add(happened_before *all, const history &some)
{
    if (!some)
        return;
    for (const auto &[who, time] : some->blocks)
        raise_to(all->blocks, who, time);
    for (const auto &[who, time] : some->threads)
        raise_to(all->threads, who, time);
}

/* The copies and products of a thread that it knows to have ended. */
static void add_done(happened_before *all, const clocks *of)
{
    for (const async kind : {BY_STORE, BY_WGMMA})
        if (of->done[kind_of(kind)])
            raise_to(all->threads, id_async(kind, of->id), of->done[kind_of(kind)]);
}

/* What a thread itself has done. */
static void add_own(happened_before *all, const thread *of)
{
    const clocks *own = of->order;
    raise_to(all->blocks, of->in->number, of->in->epoch);
    raise_to(all->threads, own->id, own->time);
    for (int lane = 0; lane < LANES; lane++)
        if (own->lanes[lane])
            raise_to(all->threads, own->id / LANES * LANES + (uint32_t)lane, own->lanes[lane]);
    add_done(all, own);
}

/* All that the running thread has done, and knows. */
static history snapshot(void)
{
    auto all = copy_of(self->order->known);
    add_own(all.get(), self);
    return all;
}

/* What some threads know together. Most of them share their histories. */
static history known_together(const std::vector<const thread *> &of)
{
    history known;
    bool any_done = false;
    for (const thread *each : of) {
        known = joined(known, each->order->known);
        any_done |= each->order->done[kind_of(BY_STORE)] || each->order->done[kind_of(BY_WGMMA)];
    }
    if (!any_done)
        return known;
    auto all = copy_of(known);
    for (const thread *each : of)
        add_done(all.get(), each->order);
    return all;
}

/* ---------------------------------------------------------------------------------------------- */
/* Records of accesses                                                                            */

/* 20 bytes, because a tensor's records are several times as large as the tensor. No bytes: there is no record. */
struct access {
    uint32_t id, time, epoch, code_low;
    uint16_t code_high;
    uint8_t bytes; /* a mask of the word's four */
    uint8_t flags;

    const void *code() const { return (const void *)((uintptr_t)code_high << 32 | code_low); }
};

/* Each row has one record for each word. A page gets another row when one of its words needs it. */
struct page {
    access *rows[RECORDS];
};

static std::unordered_map<uintptr_t, page> pages;
static uintptr_t last_number = 1;
static page *last_page;

static page *page_of(uintptr_t address)
{
    if (address / PAGE != last_number) {
        last_number = address / PAGE;
        last_page = &pages[last_number];
    }
    return last_page;
}

static access *new_row(void)
{
    access *row = (access *)calloc(PAGE / WORD, sizeof *row);
    if (!row) {
        fprintf(stderr, "CUDA, emulated: no memory for the records of accesses; OPJIT_EMULATE=fast keeps none\n");
        abort();
    }
    return row;
}

static void forget_records(const void *from, size_t bytes)
{
    const uintptr_t end = (uintptr_t)from + bytes;
    for (uintptr_t at = (uintptr_t)from & ~(uintptr_t)(WORD - 1), next; at < end; at = next) {
        next = std::min(at / PAGE * PAGE + PAGE, (end + WORD - 1) & ~(uintptr_t)(WORD - 1));
        const auto found = pages.find(at / PAGE);
        if (found == pages.end())
            continue;
        for (access *row : found->second.rows)
            if (row)
                memset((void *)(row + at % PAGE / WORD), 0, (next - at) / WORD * sizeof *row);
    }
}

void check_end_grids(void)
{
    for (const auto &[number, of] : pages)
        for (access *row : of.rows)
            free(row);
    pages.clear();
    last_number = 1; /* of no page */
}

/* Whether an access came before all that the running thread does now. */
static bool is_before(const access &earlier)
{
    const clocks *own = self->order;
    if (earlier.id == own->id)
        return true;
    for (const async kind : {BY_STORE, BY_WGMMA})
        if (earlier.id == id_async(kind, own->id) && earlier.time <= own->done[kind_of(kind)])
            return true;
    const uint32_t number = earlier.id / THREADS;
    if (number == self->in->number) {
        if (earlier.epoch < self->in->epoch)
            return true;
        const bool same_warp = earlier.id / LANES == own->id / LANES;
        if (same_warp && own->lanes[earlier.id % LANES] >= earlier.time)
            return true;
    }
    if (!own->known)
        return false;
    const auto whole = own->known->blocks.find(number);
    if (whole != own->known->blocks.end() && whole->second > earlier.epoch)
        return true;
    const auto one = own->known->threads.find(earlier.id);
    return one != own->known->threads.end() && one->second >= earlier.time;
}

static const char *verb_of(int flags)
{
    if (flags & IS_ATOMIC)
        return flags & IS_WRITE ? "updates" : "reads by an atomic";
    return flags & IS_WRITE ? "writes" : "reads";
}

static int rank_of(uint32_t block)
{
    for (const named_launch &of : named)
        if (block - of.first < (unsigned long)of.blocks)
            return of.rank;
    return -1;
}

/* Whether neither of two accesses can see half of the other. */
static bool are_atomic(const access &earlier, int flags)
{
    const int both = earlier.flags & flags, rank = self->in->of->name.rank;
    return both & IS_ATOMIC && (both & IS_SYSTEM || rank < 0 || rank_of(earlier.id / THREADS) == rank);
}

/* A thread of the running thread's cluster, by its number among all launches. */
static const thread *thread_by(uint32_t id)
{
    for (const block *each : self->in->together->blocks)
        if (each && each->number == id / THREADS && id % THREADS < each->threads.size())
            return &each->threads[id % THREADS];
    return nullptr;
}

/* Who accessed memory, in words. */
static std::string name_of(uint32_t id)
{
    switch (kind_of(id)) {
    case 0: return "a copy by opjit_cp_async()";
    case 1: return "a store by TMA";
    case 2: return "wgmma";
    case 3: return "a load by TMA";
    }
    return finding_thread(id / THREADS, (int)(id % THREADS));
}

/* What would order an access after a copy or product, or a copy or product after an access. */
static const char *remedy_async(const access &earlier, const actor &now)
{
    if (kind_of(now.id) == kind_of(BY_LOAD) && kind_of(earlier.id) == kind_of(BY_LOAD))
        return "the tile is loaded again before its first load has been used: the thread that loads must first wait for an "
               "mbarrier at which the readers arrive";
    switch (kind_of(earlier.id)) {
    case 0:
        return "the copy has not ended: opjit_cp_async_wait_group() of the thread that copies is missing before it, or a "
               "barrier after that";
    case 1:
        return "TMA still reads the tile: opjit_tma_wait_group_read() is missing before it, or a barrier after that";
    case 2:
        return "the product may still read the tile, or did not wait for its load: it ends with opjit_wgmma_wait_group(), after which an mbarrier or a "
               "barrier must tell who writes";
    case 3:
        return "the load may not have ended: wait for the phase of its mbarrier, with the right parity, and let the "
               "mbarrier expect the bytes of all loads";
    }
    return kind_of(now.id) == 3
               ? "the load may overwrite what is still in use: its thread must first wait for an mbarrier at "
                 "which the readers arrive, or for another barrier"
               : "nothing orders the two: a barrier is missing between them";
}

/* What would order two accesses. */
static const char *remedy_for(const access &earlier, int flags, bool is_one_line)
{
    if (rank_of(earlier.id / THREADS) != self->in->of->name.rank && earlier.flags & flags & IS_ATOMIC)
        return "an atomic of one GPU is none for another rank: use its _system form, or .sys in PTX";
    if (rank_of(earlier.id / THREADS) != self->in->of->name.rank)
        return "nothing orders the two ranks: store a signal with release and wait for it with acquire, both of system "
               "scope, as OPJIT_BARRIER does";
    if (is_one_line && earlier.flags & flags & IS_WRITE)
        return "several threads write one place: use atomicAdd() or another atomic, or let one thread write";
    if (is_one_line && !((earlier.flags | flags) & IS_ATOMIC))
        return "if threads update one place, use atomicAdd() or another atomic; otherwise a barrier is missing between the "
               "reads and the writes";
    if ((earlier.flags | flags) & IS_ATOMIC && earlier.id / THREADS == self->in->number)
        return "one of them is no atomic, and no barrier is between them";
    if (earlier.id / THREADS != self->in->number && thread_by(earlier.id))
        return "an opjit_cluster_sync() is missing between them";
    if (earlier.id / THREADS != self->in->number)
        return (earlier.flags | flags) & IS_ATOMIC
                   ? "one of them is no atomic, and no fence orders them"
                   : "nothing orders the two blocks: an atomic or a fence with a flag would";
    if (earlier.id / LANES == self->order->id / LANES)
        return "a __syncwarp() or __syncthreads() is missing between them";
    return "a __syncthreads() is missing between them";
}

struct region {
    uintptr_t end;
    std::string name;
    bool constant;             /* an argument that the op's schema lets nobody change */
    std::vector<char> written; /* by byte; empty for memory that is known to be written */
};

static std::string name_memory(uintptr_t address, long *offset);

static void report_race(const access &earlier, int flags, const void *code, uintptr_t address, const actor &as)
{
    const std::string before = finding_place(earlier.code()), now = finding_place(code);
    const std::string key = "race" + std::min(before, now) + std::max(before, now);
    if (finding_is_known(key))
        return;
    long offset = 0;
    const std::string name = name_memory(address, &offset);
    const bool is_async = (earlier.id | as.id) & ASYNC;
    finding_add_elsewhere(key, before, "race on %s, byte %ld: %s %s, %s %s in %s; %s", name.c_str(), offset,
                          name_of(earlier.id).c_str(), verb_of(earlier.flags), name_of(as.id).c_str(), verb_of(flags),
                          finding_line(now, before).c_str(),
                          is_async ? remedy_async(earlier, as) : remedy_for(earlier, flags, before == now));
}

/* Whether TMA and wgmma see a write: a fence came after it, of the thread that wrote or of one that knew of it. */
static bool is_proxied(const access &written)
{
    const thread *writer = thread_by(written.id);
    const auto &own = self->order->proxied;
    if (!writer || writer->order->proxied.time >= written.time)
        return true;
    if (written.id / THREADS == self->in->number && written.epoch < own.epoch)
        return true;
    if (!own.known)
        return false;
    const auto one = own.known->threads.find(written.id);
    return one != own.known->threads.end() && one->second >= written.time;
}

/* What is wrong with a read by TMA or wgmma of what was written before, though barriers order the two. */
static void check_proxy(const access &written, int flags, const void *code, const actor &as)
{
    const std::string before = finding_place(written.code()), now = finding_place(code);
    static const char *const names[] = {"no swizzle", "OPJIT_SWIZZLE_32", "OPJIT_SWIZZLE_64", "OPJIT_SWIZZLE_128"};
    const bool by_load = kind_of(written.id) == kind_of(BY_LOAD);
    if (by_load && written.flags >> SWIZZLE != flags >> SWIZZLE)
        finding_add("swizzle" + before + now, now,
                    "wrong swizzle: %s reads a tile with %s, which TMA has loaded with %s in %s",
                    name_of(as.id).c_str(), names[flags >> SWIZZLE], names[written.flags >> SWIZZLE],
                    finding_line(before, now).c_str());
    if (!(written.id & ASYNC) && !is_proxied(written))
        finding_add_elsewhere("proxy" + before + now, before,
                              "%s writes shared memory that %s reads in %s, without opjit_fence_proxy_async() between "
                              "them, after the write and before the barrier",
                              name_of(written.id).c_str(), name_of(as.id).c_str(), finding_line(now, before).c_str());
}

/* The record of a word that gives way to another: a read, if there is one. */
static access *record_to_replace(const page *of, size_t word)
{
    access *place = nullptr;
    for (access *row : of->rows)
        if (!place || (!(row[word].flags & IS_WRITE) && launch_random(2)))
            place = row + word;
    return place;
}

/* Look for races with the records of a word, and leave one in the place of a record that says less, or of any. */
static void record(uintptr_t address, uint8_t bytes, int flags, const void *code, const actor &as)
{
    page *of = page_of(address);
    const size_t word = address % PAGE / WORD;
    access *place = nullptr;
    bool replaces = false;
    for (access *&row : of->rows) {
        if (!row) {
            row = place ? nullptr : new_row();
            place = place ? place : row + word;
            break;
        }
        access &each = row[word];
        if (!each.bytes) {
            place = place ? place : row + word;
            continue;
        }
        if (!(each.bytes & bytes))
            continue;
        const bool before = is_before(each);
        if (!before && (each.flags | flags) & IS_WRITE && !are_atomic(each, flags))
            report_race(each, flags, code, address, as);
        if (before && each.flags & IS_WRITE && (flags & (IS_PROXY | IS_WRITE)) == IS_PROXY)
            check_proxy(each, flags, code, as);
        const bool as_strict = each.flags & IS_ATOMIC || !(flags & IS_ATOMIC); /* an atomic races with less */
        const bool own_and_less = each.id == as.id && !(each.flags & ~flags & (IS_WRITE | IS_ATOMIC | IS_SYSTEM));
        const bool overwritten = before && flags & IS_WRITE && (bytes & each.bytes) == each.bytes;
        if (!replaces && as_strict && (own_and_less || overwritten)) {
            place = row + word;
            replaces = true;
        } else if (overwritten && !(flags & IS_ATOMIC)) {
            each.bytes = 0;
        }
    }
    if (!place)
        place = record_to_replace(of, word);
    const uintptr_t at = (uintptr_t)code;
    *place = {as.id, as.time, as.epoch, (uint32_t)at, (uint16_t)(at >> 32), bytes, (uint8_t)flags};
}

/* ---------------------------------------------------------------------------------------------- */
/* Memory that kernels may touch                                                                  */

/* Tensors may overlap, as views of one memory do, or be equal: each has its entry, by its first address. */
static std::multimap<uintptr_t, region> regions;
std::recursive_mutex registering;

typedef std::multimap<uintptr_t, region>::iterator region_place;

/* The memory that has an address and, if there is one, also the bytes after it. */
static region_place region_of(uintptr_t address, size_t size)
{
    region_place found = regions.end();
    for (region_place at = regions.upper_bound(address); at != regions.begin();) {
        --at;
        if (address + size <= at->second.end)
            return at;
        if (address < at->second.end)
            found = at;
    }
    return found;
}

static void see(const void *memory, size_t bytes, const char *name, bool constant, bool fresh)
{
    if (!checking || !memory || !bytes)
        return;
    const std::lock_guard<std::recursive_mutex> alone(registering);
    forget_records(memory, bytes); /* of a tensor that was there before */
    region seen = {(uintptr_t)memory + bytes, name, constant, {}};
    seen.written.assign(fresh ? bytes : 0, 0);
    if (fresh)
        memset((void *)memory, 0xff, bytes);
    regions.insert({(uintptr_t)memory, seen});
}

/* Whether an address is in inputs only. A view of the same memory may be an argument that the op changes. */
static bool is_constant(uintptr_t address)
{
    for (region_place at = regions.upper_bound(address); at != regions.begin();)
        if (address < (--at)->second.end && !at->second.constant)
            return false;
    return true;
}

extern "C" void emu_see(const void *memory, size_t bytes, const char *name, bool fresh)
{
    see(memory, bytes, name, false, fresh);
}

extern "C" void emu_see_constant(const void *memory, size_t bytes, const char *name)
{
    see(memory, bytes, name, true, false);
}

extern "C" void emu_forget(const void *memory)
{
    const std::lock_guard<std::recursive_mutex> alone(registering);
    regions.erase((uintptr_t)memory);
}

extern "C" void emu_wrote(const void *memory, size_t bytes)
{
    const std::lock_guard<std::recursive_mutex> alone(registering);
    const uintptr_t address = (uintptr_t)memory;
    const region_place seen = region_of(address, bytes);
    if (seen != regions.end() && !seen->second.written.empty())
        memset(&seen->second.written[address - seen->first], 1, std::min<size_t>(bytes, seen->second.end - address));
}

/* Report elements of an output that no thread has written. */
extern "C" void emu_check_written(const void *memory, size_t element, const char *name)
{
    const std::lock_guard<std::recursive_mutex> alone(registering);
    const auto found = regions.find((uintptr_t)memory);
    if (found == regions.end() || element == 0)
        return;
    const std::vector<char> &written = found->second.written;
    size_t missing = 0, first = 0;
    for (size_t at = 0; at < written.size(); at += element)
        if (!written[at] && missing++ == 0)
            first = at / element;
    if (missing)
        finding_add(std::string("unwritten") + name, name, "%zu of %zu elements were never written; the first is %zu",
                    missing, written.size() / element, first);
}

/* Memory between two guards, by its address: of cudaMalloc, and of tensors in a process with extensions. */
static std::map<uintptr_t, size_t> guarded;
enum { GUARD = 256 }; /* bytes before and after, which no access may touch */

static void *allocate_guarded(size_t bytes)
{
    char *memory = (char *)aligned_alloc(GUARD, (bytes + 3 * GUARD - 1) / GUARD * GUARD);
    if (!memory)
        return nullptr;
    guarded[(uintptr_t)memory + GUARD] = bytes;
    return memory + GUARD;
}

static bool free_guarded(void *memory)
{
    if (!guarded.erase((uintptr_t)memory))
        return false;
    free((char *)memory - GUARD);
    return true;
}

void *emu_allocate(size_t bytes)
{
    const std::lock_guard<std::recursive_mutex> alone(registering);
    void *memory = allocate_guarded(bytes);
    if (memory)
        emu_see(memory, bytes, "memory of cudaMalloc", true);
    return memory;
}

bool emu_free(void *memory)
{
    const std::lock_guard<std::recursive_mutex> alone(registering);
    emu_forget(memory);
    return !memory || free_guarded(memory);
}

void *emu_allocate_tensor(size_t bytes)
{
    const std::lock_guard<std::recursive_mutex> alone(registering);
    void *memory = bytes ? allocate_guarded(bytes) : nullptr;
    if (memory)
        forget_records(memory, bytes); /* of a tensor that was there before */
    return memory;
}

void emu_free_tensor(void *memory)
{
    const std::lock_guard<std::recursive_mutex> alone(registering);
    free_guarded(memory);
}

bool emu_is_first_extension(void)
{
    static std::atomic<bool> is_known;
    return !is_known.exchange(true);
}

/* Whether an address is in a library's own data: a __device__ or __constant__ variable. */
static bool is_static(uintptr_t address)
{
    struct search {
        uintptr_t address;
        bool found;
    } wanted = {address, false};
    dl_iterate_phdr(
        [](dl_phdr_info *library, size_t, void *data) {
            search *wanted = (search *)data;
            for (int i = 0; i < library->dlpi_phnum; i++) {
                const auto &part = library->dlpi_phdr[i];
                const uintptr_t first = library->dlpi_addr + part.p_vaddr;
                wanted->found |= part.p_type == PT_LOAD && wanted->address - first < part.p_memsz;
            }
            return (int)wanted->found;
        },
        &wanted);
    return wanted.found;
}

/* The block of shared memory: another one of the cluster, or the running thread's. */
static block *owner_of(uintptr_t address)
{
    block *found = address - (uintptr_t)self->in->shared < SHARED_SLOT ? nullptr : cluster_block(address);
    return found ? found : self->in;
}

static size_t dynamic_of(const block *of)
{
    return of->dynamic ? of->dynamic : (size_t)SHARED_FIRST;
}

/* The variable in shared memory that has an offset, or the last before it. */
static const placed *variable_before(const block *in, size_t offset)
{
    const placed *found = nullptr;
    for (const placed &each : in->variables)
        if (each.offset <= offset && (!found || each.offset > found->offset))
            found = &each;
    return found;
}

/* The name of memory in a report, and an address's offset in it. */
static std::string name_memory(uintptr_t address, long *offset)
{
    if (shared_owns(address)) {
        const block *in = owner_of(address);
        const size_t at = address - (uintptr_t)in->shared, first = dynamic_of(in);
        const placed *variable = variable_before(in, at);
        if (at - first < in->of->how.shared || !variable) {
            *offset = (long)(at - first);
            return "dynamic shared memory";
        }
        *offset = (long)(at - variable->offset);
        return std::string("shared memory `") + variable->variable->name + "`";
    }
    const region_place known = region_of(address, 1);
    *offset = known == regions.end() ? 0 : (long)(address - known->first);
    return known == regions.end() ? "global memory" : "`" + known->second.name + "`";
}

/* ---------------------------------------------------------------------------------------------- */
/* Bounds, and what nobody wrote                                                                  */

static const char *verb(int flags)
{
    return flags & IS_WRITE ? "writes" : "reads";
}

[[noreturn]] static void report_bounds(const std::string &place, const std::string &text)
{
    finding_add("bounds" + place, place, "%s", text.c_str());
    launch_stop(cudaErrorIllegalAddress);
}

static std::string says(const char *verb, size_t size)
{
    return finding_thread(self) + " " + verb + " " + std::to_string(size) + " bytes ";
}

static bool is_written(const char *from, size_t size)
{
    return std::all_of(from, from + size, [](char byte) { return byte != 0; });
}

/* Whether an access depends on what was written before. */
static bool needs_old(int flags)
{
    return !(flags & IS_WRITE) || flags & NEEDS_OLD;
}

static void check_shared(uintptr_t address, size_t size, int flags, const void *code)
{
    block *in = owner_of(address);
    const size_t at = address - (uintptr_t)in->shared, dynamic = in->of->how.shared, first = dynamic_of(in);
    const placed *variable = variable_before(in, at);
    const bool in_dynamic = at - first < dynamic && at + size <= first + dynamic;
    if (!in_dynamic && (!variable || at + size > variable->offset + variable->variable->size)) {
        const std::string place = finding_place(code), what = says(verb(flags), size);
        if (!variable || at < first + dynamic)
            report_bounds(place, what + "out of bounds: byte " + std::to_string((long)(at - first)) + " of " +
                                     std::to_string(dynamic) + " bytes of dynamic shared memory");
        const emu_variable *near = variable->variable;
        report_bounds(place, what + "out of bounds: byte " + std::to_string(at - variable->offset) +
                                 " of shared memory `" + near->name + "`, which has " + std::to_string(near->size) +
                                 " bytes");
    }
    const bool unset = needs_old(flags) && !is_written(&in->written[at], size);
    if (flags & IS_WRITE)
        memset(&in->written[at], 1, size);
    if (!unset)
        return;
    long offset = 0;
    const std::string place = finding_place(code), name = name_memory(address, &offset);
    finding_add("unset" + place, place, "%s reads %s at byte %ld, which no thread has written",
                finding_thread(self).c_str(), name.c_str(), offset);
}

static std::string near_regions(uintptr_t address)
{
    enum { NEAR = 1 << 20 };
    const auto after = regions.upper_bound(address);
    if (after != regions.begin()) {
        const auto &before = *std::prev(after);
        if (address - before.second.end < NEAR)
            return "in no tensor, at byte " + std::to_string(address - before.first) + " of the nearest, `" +
                   before.second.name + "`, which has " + std::to_string(before.second.end - before.first);
    }
    if (after != regions.end() && after->first - address < NEAR)
        return "in no tensor, " + std::to_string(after->first - address) + " bytes before the nearest, `" +
               after->second.name + "`";
    return "in no tensor, and none is near; a GPU cannot access the host's memory";
}

/* Where bytes are in a guard, or nothing. Any other memory may be a tensor that was there before the first extension. */
static std::string in_guard(uintptr_t address, size_t size)
{
    const auto after = guarded.upper_bound(address);
    const bool is_before = after != guarded.end() && address + size > after->first - GUARD;
    if (!is_before && after == guarded.begin())
        return "";
    const auto &[start, bytes] = is_before ? *after : *std::prev(after);
    if (!is_before && (address + size <= start + bytes || address >= start + bytes + GUARD))
        return "";
    return "at byte " + std::to_string((long)(address - start)) + " of memory that has " + std::to_string(bytes) +
           " bytes";
}

/* Where bytes are if they are in no memory of the GPU, or only the first; nothing if that is right or unknown. */
static std::string where_outside(const region_place &found, uintptr_t address, size_t size, bool knows_all)
{
    if (found != regions.end()) {
        const size_t inside = found->second.end - address;
        return inside >= size ? ""
                              : "only the first " + std::to_string(inside) + " are in `" + found->second.name + "`";
    }
    if (launch_owns_stack(address))
        return "in a variable of the host, which a GPU cannot access";
    if (!knows_all)
        return in_guard(address, size);
    return regions.empty() || is_static(address) ? "" : near_regions(address);
}

static void check_global(uintptr_t address, size_t size, int flags, const void *code)
{
    const region_place found = region_of(address, size);
    const std::string where = where_outside(found, address, size, knows_memory);
    if (!where.empty())
        report_bounds(finding_place(code), says(verb(flags), size) + "out of bounds: " + where);
    if (found == regions.end())
        return;
    region *known = &found->second;
    const size_t offset = address - found->first;
    if (flags & IS_WRITE && is_constant(address)) {
        const std::string place = finding_place(code);
        finding_add("constant" + place, place,
                    "%s writes `%s`, an input that the op's schema does not let it change: write a result, or declare "
                    "the argument as Tensor(a!)",
                    finding_thread(self).c_str(), known->name.c_str());
    }
    if (known->written.empty())
        return;
    char *written = &known->written[offset];
    if (needs_old(flags) && !is_written(written, size)) {
        const std::string place = finding_place(code);
        finding_add("unset" + place, place, "%s reads `%s` at byte %zu, which nothing has written",
                    finding_thread(self).c_str(), known->name.c_str(), offset);
    }
    if (flags & IS_WRITE)
        memset(written, 1, size);
}

/* Whether bytes that the host copies or sets are in memory of the GPU, in which `is_device` says that they must begin. */
bool emu_may_copy(const char *verb, const void *memory, size_t bytes, bool is_device, emu_place at)
{
    const std::lock_guard<std::recursive_mutex> alone(registering);
    const uintptr_t address = (uintptr_t)memory;
    const region_place found = region_of(address, bytes);
    if (!checking || !bytes)
        return true;
    const std::string where = where_outside(found, address, bytes, is_device && in_call);
    if (where.empty() || (!is_device && found == regions.end()))
        return true;
    const std::string place = finding_place(at);
    finding_add("copy" + place, place, "the host %s %zu bytes out of bounds: %s", verb, bytes, where.c_str());
    return false;
}

static void report_in_flight(int flags, const void *code)
{
    const std::string place = finding_place(code);
    finding_add("flight" + place, place,
                "%s %s the sums of wgmma before their product has ended: opjit_wgmma_wait_group() is missing before it",
                finding_thread(self).c_str(), verb(flags));
}

static void see(uintptr_t address, size_t size, int flags, const void *code, const actor &as)
{
    self->caller = code;
    if (shared_owns(address))
        check_shared(address, size, flags, code);
    else
        check_global(address, size, flags, code);
    if (size > 1 && size <= 16 && (size & (size - 1)) == 0 && address % size) {
        const std::string place = finding_place(code);
        finding_add("aligned" + place, place, "misaligned: %s %s %zu bytes at an address that is no multiple of %zu",
                    finding_thread(self).c_str(), verb(flags), size, size);
    }
    for (uintptr_t word = address & ~(uintptr_t)(WORD - 1); word < address + size; word += WORD) {
        unsigned bytes = 15;
        if (word < address)
            bytes &= 15u << (address - word);
        if (word + WORD > address + size)
            bytes &= 15u >> (word + WORD - address - size);
        record(word, (uint8_t)bytes, flags, code, as);
    }
    if ((flags & (IS_WRITE | IS_ATOMIC)) == IS_WRITE)
        launch_progress();
}

static void see_access(uintptr_t address, size_t size, int flags, const void *code)
{
    if (!self || !checking)
        return;
    if (!fiber_owns(address)) /* else the thread's own variables */
        see(address, size, flags, code, check_own());
    else if (self->async && async_in_flight(self, address, size))
        report_in_flight(flags, code);
    self->caller = code;
}

/* ---------------------------------------------------------------------------------------------- */
/* Accesses of copies and products, which run while their thread goes on                          */

actor check_own(void)
{
    return {self->order->id, self->order->time, self->in->epoch};
}

bool check_knows(const block *of, const actor &visit)
{
    std::vector<const thread *> threads;
    for (const thread &each : of->threads)
        threads.push_back(&each);
    const history known = known_together(threads);
    if (!known)
        return false;
    const auto whole = known->blocks.find(visit.id / THREADS);
    const auto one = known->threads.find(visit.id);
    return (whole != known->blocks.end() && whole->second > visit.epoch) ||
           (one != known->threads.end() && one->second >= visit.time);
}

actor check_async(async kind, uint32_t time)
{
    return {id_async(kind, self->order->id), time, 0};
}

void check_access(const void *at, size_t size, int flags, const void *code)
{
    see_access((uintptr_t)at, size, flags, code);
}

void check_access_async(const void *at, size_t size, int flags, const void *code, actor as)
{
    see((uintptr_t)at, size, flags, code, as);
}

void check_landed(const void *at, size_t size, const void *code)
{
    const uint32_t id = id_async(BY_COPY, self->order->id);
    for (uintptr_t word = (uintptr_t)at; word < (uintptr_t)at + size; word += WORD)
        for (access *row : page_of(word)->rows)
            if (row && row[word % PAGE / WORD].id == id)
                row[word % PAGE / WORD].bytes = 0;
    check_access(at, size, IS_WRITE, code);
}

void check_done(async kind, uint32_t time)
{
    self->order->done[kind_of(kind)] = time;
}

void check_proxy_fence(void)
{
    clocks *own = self->order;
    own->proxied = {own->time++, self->in->epoch, own->known};
}

history check_released(const history &before)
{
    auto all = copy_of(before);
    add(all.get(), self->order->known);
    add_own(all.get(), self);
    self->order->time++;
    return all;
}

history check_and(const history &before, actor also)
{
    auto all = copy_of(before);
    raise_to(all->threads, also.id, also.time);
    return all;
}

/* Threads that wait together share what they know, so the last answer is often the next. */
void check_acquired(const history &handed)
{
    static history last_known, last_handed, last_both;
    history &known = self->order->known;
    if (!last_both || known != last_known || handed != last_handed) {
        last_known = known;
        last_handed = handed;
        last_both = joined(known, handed);
    }
    known = last_both;
}

/* Threads of a block that wait at a barrier with a number. */
void check_named_barrier(const std::vector<thread *> &at)
{
    const history known = known_together({at.begin(), at.end()});
    auto all = copy_of(known);
    for (thread *each : at) {
        add_own(all.get(), each);
        each->order->time++;
    }
    for (thread *each : at)
        each->order->known = all;
}

std::string check_name(const void *shared)
{
    long offset = 0;
    const std::string name = name_memory((uintptr_t)shared, &offset);
    return name + ", byte " + std::to_string(offset);
}

/* ---------------------------------------------------------------------------------------------- */
/* What orders accesses                                                                           */

void check_begin_grids(void)
{
    released.clear();
    known_to_ranks.clear();
}

void check_begin_block(block *fresh)
{
    const size_t count = fresh->threads.size();
    const int rank = fresh->of->name.rank;
    clocks *orders = new clocks[count]();
    for (size_t i = 0; i < count; i++) {
        orders[i].id = fresh->number * THREADS + (uint32_t)i;
        orders[i].time = 1;
        if (rank >= 0)
            orders[i].known = known_to_ranks[rank];
        fresh->threads[i].order = &orders[i];
    }
    fresh->written.assign(SHARED_SLOT, 0);
    memset(fresh->shared, 0xff, SHARED_SLOT);
    fresh->order.resize(count);
    for (size_t i = 0; i < count; i++)
        fresh->order[i] = (int)i;
    for (size_t i = count; i > 1; i--)
        std::swap(fresh->order[i - 1], fresh->order[launch_random((unsigned)i)]);
}

/* A rank's next launch comes after all that this block has done and learned. */
static void hand_to_next_launch(const block *done)
{
    history &all = known_to_ranks[done->of->name.rank];
    for (const thread &each : done->threads)
        all = joined(all, each.order->known);
    auto whole = all ? std::make_shared<happened_before>(*all) : std::make_shared<happened_before>();
    whole->blocks[done->number] = UINT32_MAX;
    all = whole;
}

void check_end_block(block *done)
{
    if (done->threads.empty() || !done->threads[0].order)
        return;
    if (done->of->name.rank >= 0)
        hand_to_next_launch(done);
    forget_records(done->shared, done->used);
    delete[] done->threads[0].order;
    for (thread &each : done->threads)
        each.order = nullptr;
}

/* A barrier orders the block's accesses by its epoch; what a thread has learned or fenced, all of them have. */
void check_block_barrier(block *at)
{
    std::vector<const thread *> threads;
    by_reach fenced;
    for (const thread &each : at->threads) {
        threads.push_back(&each);
        fenced.in_rank = joined(fenced.in_rank, each.order->fenced.in_rank);
        fenced.across = joined(fenced.across, each.order->fenced.across);
    }
    const history known = known_together(threads);
    for (thread &each : at->threads) {
        each.order->known = known;
        each.order->fenced = fenced;
    }
}

void check_warp_barrier(warp_sync *of)
{
    uint32_t all[LANES] = {0};
    std::vector<const thread *> threads;
    for (int lane = 0; lane < LANES; lane++)
        if (of->came >> lane & 1)
            threads.push_back(of->lanes[lane]);
    const history known = known_together(threads);
    for (int lane = 0; lane < LANES; lane++) {
        if (!(of->came >> lane & 1))
            continue;
        const clocks *own = of->lanes[lane]->order;
        for (int other = 0; other < LANES; other++)
            all[other] = std::max(all[other], own->lanes[other]);
        all[lane] = std::max(all[lane], own->time);
    }
    for (int lane = 0; lane < LANES; lane++)
        if (of->came >> lane & 1) {
            memcpy(of->lanes[lane]->order->lanes, all, sizeof all);
            of->lanes[lane]->order->known = known;
            of->lanes[lane]->order->time++;
        }
}

/* A barrier of some blocks: a grid's or a cluster's. */
void check_barrier_of(const std::vector<block *> &blocks)
{
    std::vector<const thread *> threads;
    for (const block *each : blocks)
        for (const thread &one : each->threads)
            threads.push_back(&one);
    auto all = copy_of(known_together(threads));
    for (block *each : blocks)
        raise_to(all->blocks, each->number, ++each->epoch);
    for (const thread *one : threads)
        one->order->known = all;
}

/* A fence makes all before it ready for the next store of a flag, and what loads of flags have read known. */
void emu_fence(emu_scope scope)
{
    if (!self || !checking || scope == EMU_BLOCK)
        return;
    clocks *own = self->order;
    own->known = joined(own->known, own->awaits_fence.in_rank);
    if (scope == EMU_SYSTEM)
        own->known = joined(own->known, own->awaits_fence.across);
    own->fenced.in_rank = snapshot();
    if (scope == EMU_SYSTEM)
        own->fenced.across = own->fenced.in_rank;
    own->time++;
}

static void learn(bool at_once, history &with_next_fence, const history &handed)
{
    clocks *own = self->order;
    if (own->last_acquired == handed)
        return;
    history &to = at_once ? own->known : with_next_fence;
    to = joined(to, handed);
    if (at_once)
        own->last_acquired = handed;
}

/*
 * A load of a flag: what its writers had fenced is known at once with an acquire, or with the next fence. Within a rank,
 * a thread that has fenced before also knows it at once, because many right programs leave out the second fence.
 */
static void learn_from(uintptr_t address, emu_order order)
{
    const auto found = released.find(address);
    if (found == released.end())
        return;
    clocks *own = self->order;
    for (const auto &[rank, handed] : found->second)
        if (rank == self->in->of->name.rank)
            learn(order.acquires || own->fenced.in_rank, own->awaits_fence.in_rank, handed.in_rank);
        else if (order.scope == EMU_SYSTEM)
            learn(order.acquires, own->awaits_fence.across, handed.across);
}

/* A store of a flag hands over what its thread had fenced. An update keeps what others had handed over there. */
static void hand_over(uintptr_t address, bool update, emu_order order)
{
    clocks *own = self->order;
    if (!update)
        released.erase(address);
    if (!order.releases && !own->fenced.in_rank)
        return;
    const history all = order.releases ? snapshot() : nullptr;
    by_reach &handed = released[address][self->in->of->name.rank];
    handed.in_rank = joined(handed.in_rank, joined(own->fenced.in_rank, all));
    if (order.scope == EMU_SYSTEM)
        handed.across = joined(handed.across, joined(own->fenced.across, all));
    if (order.releases)
        own->time++;
}

void emu_atomic(const void *place, int size, emu_access access, emu_order order, const void *caller)
{
    if (!self)
        return;
    self->budget -= 50;
    if (self->budget < 0 || order.acquires) {
        self->caller = caller;
        emu_pause(); /* before the access: what it sees is what the checks know */
    }
    if (access == EMU_STORES)
        launch_progress();
    if (!checking)
        return;
    const uintptr_t address = (uintptr_t)place;
    int flags = IS_ATOMIC | (order.scope == EMU_SYSTEM ? IS_SYSTEM : 0);
    flags |= access & EMU_STORES ? IS_WRITE : 0;
    flags |= access == EMU_UPDATES ? NEEDS_OLD : 0;
    finding_reached(caller);
    see_access(address, (size_t)size, flags, caller);
    if (access & EMU_LOADS)
        learn_from(address, order);
    if (access & EMU_STORES)
        hand_over(address, access & EMU_LOADS, order);
}

void emu_progress(void)
{
    launch_progress();
}

/* A volatile access of global memory is a flag's; in shared memory it orders nothing, and only binds the compiler. */
static void see_volatile(uintptr_t address, size_t size, bool write, const void *code)
{
    if (!self)
        return;
    if (!checking || shared_owns(address) || fiber_owns(address)) {
        see_access(address, size, write ? IS_WRITE : 0, code);
        return;
    }
    self->budget -= write ? 0 : 200;
    if (self->budget < 0) {
        self->caller = code;
        emu_pause();
    }
    see_access(address, size, IS_ATOMIC | IS_SYSTEM | (write ? IS_WRITE : 0), code);
    if (write) {
        launch_progress();
        hand_over(address, false, {EMU_SYSTEM, false, false});
    } else {
        learn_from(address, {EMU_SYSTEM, false, false});
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* What g++ calls                                                                                 */

#define CODE __builtin_return_address(0)
#define ACCESSES(size_) \
    void __tsan_read##size_(void *place) \
    { \
        see_access((uintptr_t)place, size_, 0, CODE); \
    } \
    void __tsan_write##size_(void *place) \
    { \
        see_access((uintptr_t)place, size_, IS_WRITE, CODE); \
    } \
    void __tsan_unaligned_read##size_(void *place) \
    { \
        see_access((uintptr_t)place, size_, 0, CODE); \
    } \
    void __tsan_unaligned_write##size_(void *place) \
    { \
        see_access((uintptr_t)place, size_, IS_WRITE, CODE); \
    } \
    void __tsan_volatile_read##size_(void *place) \
    { \
        see_volatile((uintptr_t)place, size_, false, CODE); \
    } \
    void __tsan_volatile_write##size_(void *place) \
    { \
        see_volatile((uintptr_t)place, size_, true, CODE); \
    } \
    void __tsan_unaligned_volatile_read##size_(void *place) \
    { \
        see_volatile((uintptr_t)place, size_, false, CODE); \
    } \
    void __tsan_unaligned_volatile_write##size_(void *place) \
    { \
        see_volatile((uintptr_t)place, size_, true, CODE); \
    }

/* The compiler's own atomics: the host's, in code that is compiled with checks. */
#define HOST_ATOMICS(bits_, type_) \
    type_ __tsan_atomic##bits_##_load(const volatile type_ *p, int) \
    { \
        return __atomic_load_n(p, 5); \
    } \
    void __tsan_atomic##bits_##_store(volatile type_ *p, type_ v, int) \
    { \
        __atomic_store_n(p, v, 5); \
    } \
    type_ __tsan_atomic##bits_##_exchange(volatile type_ *p, type_ v, int) \
    { \
        return __atomic_exchange_n(p, v, 5); \
    } \
    type_ __tsan_atomic##bits_##_fetch_add(volatile type_ *p, type_ v, int) \
    { \
        return __atomic_fetch_add(p, v, 5); \
    } \
    type_ __tsan_atomic##bits_##_fetch_sub(volatile type_ *p, type_ v, int) \
    { \
        return __atomic_fetch_sub(p, v, 5); \
    } \
    type_ __tsan_atomic##bits_##_fetch_and(volatile type_ *p, type_ v, int) \
    { \
        return __atomic_fetch_and(p, v, 5); \
    } \
    type_ __tsan_atomic##bits_##_fetch_or(volatile type_ *p, type_ v, int) \
    { \
        return __atomic_fetch_or(p, v, 5); \
    } \
    type_ __tsan_atomic##bits_##_fetch_xor(volatile type_ *p, type_ v, int) \
    { \
        return __atomic_fetch_xor(p, v, 5); \
    } \
    int __tsan_atomic##bits_##_compare_exchange_strong(volatile type_ *p, type_ *c, type_ v, int, int) \
    { \
        return __atomic_compare_exchange_n(p, c, v, false, 5, 5); \
    } \
    int __tsan_atomic##bits_##_compare_exchange_weak(volatile type_ *p, type_ *c, type_ v, int, int) \
    { \
        return __atomic_compare_exchange_n(p, c, v, false, 5, 5); \
    }

/* The beginning of the descriptions that UndefinedBehaviorSanitizer's calls get. */
struct source_location {
    const char *file;
    uint32_t line, column;
};

struct type_mismatch {
    source_location at;
    const void *type;
    unsigned char log_alignment;
};

extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void *place, unsigned long size)
{
    if (size)
        see_access((uintptr_t)place, size, 0, CODE);
}

void __tsan_write_range(void *place, unsigned long size)
{
    if (size)
        see_access((uintptr_t)place, size, IS_WRITE, CODE);
}

HOST_ATOMICS(8, unsigned char)
HOST_ATOMICS(16, unsigned short)
HOST_ATOMICS(32, unsigned)
HOST_ATOMICS(64, unsigned long)

void __tsan_atomic_thread_fence(int)
{
    __atomic_thread_fence(5);
}

void __tsan_atomic_signal_fence(int) {}
void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

void __ubsan_handle_type_mismatch_v1(void *data, uintptr_t address)
{
    const type_mismatch *mismatch = (const type_mismatch *)data;
    const uintptr_t alignment = (uintptr_t)1 << mismatch->log_alignment;
    if (!self || address % alignment == 0)
        return;
    const std::string place = finding_place(emu_place{mismatch->at.file, (int)mismatch->at.line});
    finding_add("aligned" + place, place,
                "misaligned: %s uses an address that is no multiple of %zu as one of a type that is",
                finding_thread(self).c_str(), (size_t)alignment);
    launch_stop(cudaErrorMisalignedAddress);
}

/* On a GPU the quotient is any number; here the processor would end the process. */
void __ubsan_handle_divrem_overflow(void *data, uintptr_t, uintptr_t)
{
    const source_location *at = (const source_location *)data;
    if (!self)
        return;
    const std::string place = finding_place(emu_place{at->file, (int)at->line});
    finding_add("division" + place, place, "%s divides an integer by 0", finding_thread(self).c_str());
    launch_stop(cudaErrorLaunchFailure);
}

void __ubsan_handle_out_of_bounds(void *data, uintptr_t index)
{
    const source_location *at = (const source_location *)data;
    if (!self)
        return;
    const std::string place = finding_place(emu_place{at->file, (int)at->line});
    finding_add("index" + place, place, "%s uses index %ld, which is outside of the array",
                finding_thread(self).c_str(), (long)index);
}
}
