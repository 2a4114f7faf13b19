/*
 * tensor_cores.cc - what a thread starts and later waits for, as kernels_c/opjit_mma.h has it: copies by cp.async and TMA,
 * mbarriers, and products by wgmma.
 *
 * A load by TMA writes its tile at once, but its accesses end with the mbarrier's phase: a thread that has not waited for the
 * phase races with them. cp.async writes when its thread waits. wgmma computes at once, but its sums are NaN until the wait, and
 * it reads its tiles until then, as far as the checks know.
 */
#include "runtime.h"

#include <algorithm>

#include "../opjit_half.h"
#include "async.h"

enum {
    NAMED_BARRIERS = 16,
    WARPGROUP = 128,
    ROW = 16, /* bytes that are copied and swizzled together */
    SWIZZLE_128 = 3
};
static const uint32_t IN_FLIGHT = 0x7fc0feed; /* a NaN: a sum that wgmma has yet to write */

struct mbarrier {
    uint32_t id; /* of its loads, for the checks */
    unsigned count, pending;
    int64_t bytes; /* that are expected and have not come; less than 0 if they came before */
    uint32_t phase;
    history arrived, passed; /* what came before its arrivals, and before the end of its last phase */
    std::vector<thread *> waiting;
    bool is_ready;    /* for copies and the cluster: a fence came after init */
    const void *last; /* the code that last changed its bytes */
};

struct named_barrier {
    int threads;
    std::vector<thread *> waiting;
};

/* 128 threads that multiply together: for each group of products, how many have committed it. */
struct warpgroup {
    std::vector<int> committed;
    std::vector<thread *> waiting;
};

/* The last access to a block's memory by a thread or a load of another block. */
struct visit {
    actor by;
    emu_place at;
};

struct async_block {
    std::map<size_t, mbarrier> mbarriers; /* by their places in shared memory */
    named_barrier named[NAMED_BARRIERS];
    std::vector<warpgroup> warpgroups;
    std::map<uint32_t, visit> visits; /* by their actors */
};

/* 16 bytes on their way to shared memory. */
struct copy {
    char *to;
    unsigned char bytes[ROW];
    int group;
    const void *code;
};

/* Sums that wgmma writes to a thread's registers when their group has ended. */
struct product {
    float *d;
    int count, group;
    std::vector<float> sums;
    emu_place at;
};

struct async_thread {
    std::vector<copy> copies;
    std::vector<product> products;
    std::vector<mbarrier *> fresh;                 /* without a fence */
    int copy_groups, store_groups, product_groups; /* committed */
    int stores_read;                               /* groups of stores that have read their tiles */
    bool has_stores, has_fenced;
    const void *last_store;
};

static uint32_t mbarriers_made;

static async_thread *own(void)
{
    if (!self->async)
        self->async = new async_thread();
    return self->async;
}

static async_block *of_block(block *of)
{
    if (!of->async)
        of->async = new async_block();
    return of->async;
}

static void refuse(const char *kind, emu_caller by, const std::string &text)
{
    const std::string place = finding_place(by.at);
    finding_add(kind + place, place, "%s", text.c_str());
}

[[noreturn]] static void stop(const char *kind, emu_caller by, const std::string &text)
{
    refuse(kind, by, finding_thread(self) + " " + text);
    launch_stop(cudaErrorIllegalAddress);
}

static std::string number(int64_t value)
{
    return std::to_string(value);
}

/* ---------------------------------------------------------------------------------------------- */
/* Shared memory                                                                                  */

uint32_t emu_shared_address(const void *shared, emu_caller by)
{
    const size_t at = (size_t)((const char *)shared - self->in->shared);
    if (at >= SHARED_SLOT)
        stop("address", by, "needs an address in its block's shared memory");
    return (uint32_t)at;
}

static void require_multiple(const char *what, size_t at, size_t of, emu_caller by)
{
    if (at % of)
        stop("aligned", by,
             "gives " + std::string(what) + " in shared memory at no multiple of " + number((int64_t)of) +
                 " bytes: declare the memory with __align__(1024), and keep its parts at such multiples");
}

void emu_see_row(const char *what, const void *row, bool write, emu_caller by)
{
    const uint32_t at = emu_shared_address(row, by);
    if (at % ROW)
        stop("aligned", by, "gives " + std::string(what) + " a row at no multiple of 16 bytes");
    if (checking)
        check_access(row, ROW, write ? IS_WRITE : 0, by.code);
}

/* The same place in the memory of a block of the cluster. */
static char *place_in(const void *shared, unsigned rank, emu_caller by)
{
    const uint32_t at = emu_shared_address(shared, by);
    const std::vector<block *> &blocks = self->in->together->blocks;
    if (rank >= blocks.size())
        stop("rank", by,
             "uses the memory of block " + number(rank) + " of a cluster of " + number((int64_t)blocks.size()));
    if (!blocks[rank])
        stop("ended", by,
             "uses the memory of block " + number(rank) +
                 " of its cluster, which has ended: let all of its blocks meet at opjit_cluster_sync() first");
    return blocks[rank]->shared + at;
}

static void visit_block(unsigned rank, const actor &as, emu_caller by)
{
    if (checking && rank != self->in->rank)
        of_block(self->in->together->blocks[rank])->visits[as.id] = {as, by.at};
}

void emu_cluster_read(void *to, const void *shared, size_t bytes, unsigned rank, emu_caller by)
{
    const char *from = place_in(shared, rank, by);
    visit_block(rank, checking ? check_own() : actor(), by);
    if (checking)
        check_access(from, bytes, 0, by.code);
    memcpy(to, from, bytes);
}

/* ---------------------------------------------------------------------------------------------- */
/* Barriers with a number                                                                         */

void emu_named_barrier(int number_of, int threads, emu_caller by)
{
    if (number_of < 0 || number_of >= NAMED_BARRIERS || threads <= 0 || threads % LANES)
        stop("named", by,
             "waits at a barrier with a number from 0 to 15 and a multiple of 32 threads, not at number " +
                 number(number_of) + " with " + number(threads));
    if (number_of == 0 && threads == (int)self->in->threads.size()) {
        emu_block_barrier(EMU_NO_VOTE, 0, by.at);
        return;
    }
    named_barrier *at = &of_block(self->in)->named[number_of];
    if (at->waiting.empty())
        at->threads = threads;
    else if (at->threads != threads)
        refuse("named", by,
               finding_thread(self) + " waits at barrier " + number(number_of) + " for " + number(threads) +
                   " threads, and another thread at the same barrier for " + number(at->threads));
    at->waiting.push_back(self);
    if ((int)at->waiting.size() < at->threads) {
        launch_wait("opjit_named_barrier()", by.at);
        return;
    }
    if (checking) {
        finding_reached(by.at);
        check_named_barrier(at->waiting);
    }
    at->waiting.pop_back(); /* this thread */
    launch_wake(at->waiting);
}

/* ---------------------------------------------------------------------------------------------- */
/* cp.async                                                                                       */

void emu_copy_async(void *shared, const void *from, int bytes, emu_caller by)
{
    async_thread *of = own();
    const uint32_t at = emu_shared_address(shared, by);
    copy fresh = {(char *)shared, {0}, of->copy_groups + 1, by.code};
    if (bytes < 0 || bytes > ROW || at % ROW || (uintptr_t)from % ROW)
        stop("copy", by,
             "copies 0 to 16 bytes between multiples of 16, not " + number(bytes) + " bytes from byte " +
                 number((int64_t)((uintptr_t)from % ROW)) + " to byte " + number(at % ROW) + " of 16");
    if (checking && bytes)
        check_access(from, (size_t)bytes, 0, by.code);
    if (checking)
        check_access_async(shared, ROW, IS_WRITE, by.code, check_async(BY_COPY, (uint32_t)fresh.group));
    memcpy(fresh.bytes, from, (size_t)bytes);
    of->copies.push_back(fresh);
}

void emu_copy_commit(void)
{
    own()->copy_groups++;
}

void emu_copy_wait(int pending)
{
    async_thread *of = own();
    const auto is_late = [&](const copy &each) { return each.group > of->copy_groups - pending; };
    for (const copy &each : of->copies) {
        if (is_late(each))
            continue;
        memcpy(each.to, each.bytes, ROW);
        if (checking)
            check_landed(each.to, ROW, each.code);
    }
    const auto kept = std::stable_partition(of->copies.begin(), of->copies.end(), is_late);
    of->copies.erase(kept, of->copies.end());
}

/* ---------------------------------------------------------------------------------------------- */
/* mbarrier                                                                                       */

/* The mbarrier at a place in the memory of a block. The access is checked, too. */
static mbarrier *mbarrier_at(void *place, emu_caller by)
{
    block *in = cluster_block((uintptr_t)place);
    if (checking)
        check_access(place, sizeof(uint64_t), IS_ATOMIC | IS_WRITE, by.code);
    auto &known = of_block(in)->mbarriers;
    const auto found = known.find((size_t)((char *)place - in->shared));
    if (found == known.end())
        stop("mbarrier", by,
             "uses an mbarrier that nobody has initialized with opjit_mbarrier_init(): " + check_name(place));
    return &found->second;
}

void emu_mbarrier_init(void *barrier, unsigned count, emu_caller by)
{
    const uint32_t at = emu_shared_address(barrier, by);
    if (checking)
        check_access(barrier, sizeof(uint64_t), IS_WRITE, by.code);
    if (count == 0 || count >= 1u << 20)
        stop("count", by, "initializes an mbarrier with a count of 1 to 2^20 - 1, not " + number(count));
    mbarrier *fresh = &of_block(self->in)->mbarriers[at];
    *fresh = {};
    fresh->id = BY_LOAD | (++mbarriers_made & ((1u << 29) - 1));
    fresh->count = fresh->pending = count;
    own()->fresh.push_back(fresh);
}

void emu_mbarriers_are_ready(void)
{
    for (mbarrier *each : own()->fresh)
        each->is_ready = true;
    own()->fresh.clear();
}

/* End the phase if all have arrived and all bytes are there. */
static void end_phase(mbarrier *at)
{
    if (at->pending || at->bytes)
        return;
    at->phase++;
    at->pending = at->count;
    if (checking)
        at->passed = check_and(at->arrived, {at->id, at->phase, 0});
    launch_wake(at->waiting);
}

static void arrive(void *barrier, unsigned bytes, emu_caller by)
{
    mbarrier *at = mbarrier_at(barrier, by);
    if (bytes >= 1u << 20)
        stop("expect", by, "expects " + number(bytes) + " bytes at an mbarrier, which counts at most 2^20 - 1");
    if (!at->pending)
        stop("arrivals", by,
             "arrives at an mbarrier at which all " + number(at->count) +
                 " of its phase have arrived, and which still lacks " + number(at->bytes) +
                 " bytes: " + check_name(barrier));
    if (checking)
        at->arrived = check_released(at->arrived);
    if (bytes)
        at->last = by.code;
    at->pending--;
    at->bytes += bytes;
    end_phase(at);
}

void emu_mbarrier_arrive(void *barrier, unsigned bytes, emu_caller by)
{
    emu_shared_address(barrier, by);
    arrive(barrier, bytes, by);
}

void emu_mbarrier_arrive_at(void *barrier, unsigned rank, emu_caller by)
{
    void *there = place_in(barrier, rank, by);
    visit_block(rank, checking ? check_own() : actor(), by);
    arrive(there, 0, by);
}

void emu_mbarrier_wait(void *barrier, unsigned parity, emu_caller by)
{
    emu_shared_address(barrier, by);
    mbarrier *at = mbarrier_at(barrier, by);
    if (parity > 1)
        stop("parity", by, "waits for the parity 0 or 1, not " + number(parity));
    while ((at->phase & 1) == parity) {
        at->waiting.push_back(self);
        self->awaits = at;
        launch_wait("opjit_mbarrier_wait()", by.at);
        self->awaits = nullptr;
    }
    if (!checking)
        return;
    finding_reached(by.at);
    if (at->phase)
        check_acquired(at->passed);
}

bool async_lacks_bytes(const thread *of)
{
    return of->awaits && of->awaits->bytes;
}

std::string async_awaited(const thread *of)
{
    const mbarrier *at = of->awaits;
    std::string text = " for the end of phase " + number(at->phase) + ", which lacks " + number(at->pending) + " of " +
                       number(at->count) + " arrivals";
    if (at->bytes > 0)
        text += " and " + number(at->bytes) + " of the bytes that were expected";
    if (at->bytes < 0)
        text += ", and got " + number(-at->bytes) + " bytes that no opjit_mbarrier_arrive_expect_tx() expected";
    return text;
}

/* ---------------------------------------------------------------------------------------------- */
/* TMA                                                                                            */

/* What cuTensorMapEncodeTiled keeps: dimensions innermost first, strides in bytes without the innermost. */
struct tensor_map {
    uint64_t magic;
    char *data;
    uint64_t sizes[5], strides[4];
    uint32_t box[5];
    uint8_t dim, bytes, swizzle; /* bytes: of an element */
};
static_assert(sizeof(tensor_map) <= 128, "it is a CUtensorMap");
static const uint64_t MAGIC = 0x6f706a69746d6170;

/* Bytes of an element by its CUtensorMapDataType. */
static const uint8_t BYTES_OF_TYPE[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

int emu_encode_tiled(void *map, int type, uint32_t dim, void *data, const uint64_t *sizes, const uint64_t *strides,
                     const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int, int fill)
{
    enum { INVALID_VALUE = 1 };
    tensor_map made = {MAGIC, (char *)data, {0}, {0}, {0}, (uint8_t)dim, 0, (uint8_t)swizzle};
    if (type < 0 || type >= (int)sizeof BYTES_OF_TYPE || dim < 1 || dim > 5 || (uintptr_t)data % ROW || interleave ||
        swizzle < 0 || swizzle > 3 || fill)
        return INVALID_VALUE;
    made.bytes = BYTES_OF_TYPE[type];
    for (uint32_t i = 0; i < dim; i++) {
        if (!sizes[i] || sizes[i] > UINT32_MAX || !box[i] || box[i] > 256 || steps[i] != 1)
            return INVALID_VALUE;
        if (i > 0 && (strides[i - 1] % ROW || strides[i - 1] >= 1ull << 40))
            return INVALID_VALUE;
        made.sizes[i] = sizes[i];
        made.box[i] = box[i];
        if (i > 0)
            made.strides[i - 1] = strides[i - 1];
    }
    if (box[0] * made.bytes % ROW || (swizzle && box[0] * made.bytes > 16u << swizzle))
        return INVALID_VALUE;
    memset(map, 0, 128);
    memcpy(map, &made, sizeof made);
    return 0;
}

static tensor_map map_at(const void *map, int dim, emu_caller by)
{
    tensor_map found;
    memcpy(&found, map, sizeof found);
    if (found.magic != MAGIC)
        stop("map", by, "uses a tensor map that opjit_tensor_map_encode() has not made");
    if (found.dim != dim)
        stop("map", by,
             "uses a tensor map of " + number(found.dim) + " dimensions with " + number(dim) + " coordinates");
    return found;
}

/* The place of 16 bytes: the bits of the address above 128 are added to the number of the piece. */
static size_t swizzled(size_t at, int swizzle)
{
    const size_t pieces = ((size_t)1 << swizzle) - 1;
    return at ^ ((at >> 7 & pieces) << 4);
}

/* A row of a tile: its place in shared memory, and the bytes of it that are in the tensor. */
struct row_of_tile {
    size_t at;
    char *inside;        /* the first byte in the tensor */
    int64_t first, last; /* bytes of the row that are there */
};

static int64_t rows_of(const tensor_map &map)
{
    int64_t rows = 1;
    for (int i = 1; i < map.dim; i++)
        rows *= map.box[i];
    return rows;
}

static row_of_tile row_at(const tensor_map &map, size_t tile, const int *first, int64_t row)
{
    const int64_t size = map.bytes, wide = map.box[0];
    row_of_tile found = {tile + (size_t)(row * wide * size), map.data, 0, 0};
    for (int i = 1; i < map.dim; i++) {
        const int64_t index = first[i] + row % map.box[i];
        row /= map.box[i];
        if (index < 0 || index >= (int64_t)map.sizes[i])
            return found;
        found.inside += index * (int64_t)map.strides[i - 1];
    }
    const int64_t begin = std::max<int64_t>(0, -(int64_t)first[0]);
    const int64_t end = std::min<int64_t>(wide, (int64_t)map.sizes[0] - first[0]);
    if (begin >= end)
        return found;
    found.inside += (first[0] + begin) * size;
    found.first = begin * size;
    found.last = end * size;
    return found;
}

static unsigned bytes_of(const tensor_map &map)
{
    return (unsigned)rows_of(map) * map.box[0] * map.bytes;
}

static int flags_of(const tensor_map &map)
{
    return IS_PROXY | map.swizzle << SWIZZLE;
}

/* Write a tile to the shared memory of a block. */
static void load_into(block *in, size_t tile, const tensor_map &map, const int *first, emu_caller by, actor as)
{
    const int64_t wide = (int64_t)map.box[0] * map.bytes;
    for (int64_t r = 0; r < rows_of(map); r++) {
        const row_of_tile row = row_at(map, tile, first, r);
        std::vector<char> bytes((size_t)wide);
        if (row.last)
            memcpy(&bytes[(size_t)row.first], row.inside, (size_t)(row.last - row.first));
        for (int64_t piece = 0; piece < wide; piece += ROW) {
            char *to = in->shared + swizzled(row.at + (size_t)piece, map.swizzle);
            if (checking)
                check_access_async(to, ROW, IS_WRITE | flags_of(map), by.code, as);
            memcpy(to, &bytes[(size_t)piece], ROW);
        }
    }
}

static void see_rows(const tensor_map &map, const int *first, int flags, emu_caller by)
{
    for (int64_t r = 0; checking && r < rows_of(map); r++) {
        const row_of_tile row = row_at(map, 0, first, r);
        if (row.last)
            check_access(row.inside, (size_t)(row.last - row.first), flags, by.code);
    }
}

static void check_tile(const tensor_map &map, size_t at, emu_caller by)
{
    require_multiple("TMA a tile", at, map.swizzle ? (size_t)128 << map.swizzle : 128, by);
    if (at + bytes_of(map) > SHARED_SLOT)
        stop("tile", by, "gives TMA a tile that ends outside of shared memory");
}

void emu_tile_load(void *shared, const void *map, void *barrier, int dim, const int *first, int mask, emu_caller by)
{
    const tensor_map of = map_at(map, dim, by);
    const uint32_t at = emu_shared_address(shared, by);
    emu_shared_address(barrier, by);
    check_tile(of, at, by);
    const std::vector<block *> &blocks = self->in->together->blocks;
    const unsigned to = mask < 0 ? 1u << self->in->rank : (unsigned)mask;
    if (!to || to >> blocks.size())
        stop("mask", by,
             "loads a tile for the blocks of mask " + number(to) + ", but the cluster has " +
                 number((int64_t)blocks.size()));
    see_rows(of, first, 0, by);
    for (unsigned rank = 0; rank < blocks.size(); rank++) {
        if (!(to >> rank & 1))
            continue;
        mbarrier *counts = mbarrier_at(place_in(barrier, rank, by), by);
        if (!counts->is_ready)
            refuse("ready", by,
                   finding_thread(self) + " loads by TMA with an mbarrier that its thread has initialized "
                                          "without opjit_fence_mbarrier_init() after it");
        const actor as = {counts->id, counts->phase + 1, 0};
        visit_block(rank, as, by);
        load_into(blocks[rank], at, of, first, by, as);
        counts->last = by.code;
        counts->bytes -= bytes_of(of);
        end_phase(counts);
    }
}

void emu_tile_store(const void *map, const void *shared, int dim, const int *first, emu_caller by)
{
    async_thread *thread = own();
    const tensor_map of = map_at(map, dim, by);
    const uint32_t at = emu_shared_address(shared, by);
    check_tile(of, at, by);
    const actor as = checking ? check_async(BY_STORE, (uint32_t)thread->store_groups + 1) : actor();
    const int64_t wide = (int64_t)of.box[0] * of.bytes;
    see_rows(of, first, IS_WRITE, by);
    for (int64_t r = 0; r < rows_of(of); r++) {
        const row_of_tile row = row_at(of, at, first, r);
        std::vector<char> bytes((size_t)wide);
        for (int64_t piece = 0; piece < wide; piece += ROW) {
            const char *from = self->in->shared + swizzled(row.at + (size_t)piece, of.swizzle);
            if (checking)
                check_access_async(from, ROW, flags_of(of), by.code, as);
            memcpy(&bytes[(size_t)piece], from, ROW);
        }
        if (row.last)
            memcpy(row.inside, &bytes[(size_t)row.first], (size_t)(row.last - row.first));
    }
    thread->has_stores = true;
    thread->last_store = by.code;
}

void emu_tile_commit(void)
{
    own()->store_groups++;
    own()->has_stores = false;
}

void emu_tile_wait(int pending)
{
    async_thread *of = own();
    of->stores_read = std::max(of->stores_read, of->store_groups - pending);
    if (checking)
        check_done(BY_STORE, (uint32_t)of->stores_read);
}

/* What threads wrote before is there for TMA and wgmma, after a barrier. */
void emu_proxy_fence(void)
{
    emu_mbarriers_are_ready();
    if (checking)
        check_proxy_fence();
}

/* ---------------------------------------------------------------------------------------------- */
/* wgmma                                                                                          */

static warpgroup *own_warpgroup(void)
{
    const size_t index = (size_t)self->number / WARPGROUP;
    std::vector<warpgroup> &all = of_block(self->in)->warpgroups;
    if (all.size() <= index)
        all.resize(index + 1);
    return &all[index];
}

static void require_warpgroup(emu_caller by)
{
    const size_t end = ((size_t)self->number / WARPGROUP + 1) * WARPGROUP;
    if (self->in->threads.size() < end)
        stop("warpgroup", by, "calls wgmma, which takes 4 warps from a multiple of 128 threads on");
}

void emu_tile_of_wgmma(const void *shared, emu_caller by)
{
    require_multiple("wgmma a tile", emu_shared_address(shared, by), 1024, by);
}

void emu_wgmma_fence(void)
{
    own()->has_fenced = true;
}

/* The place of an operand's element: of a row of a, or a column of b, and along k. */
static size_t place_of(const emu_operand &operand, int index, int k)
{
    const uint64_t descriptor = operand.descriptor;
    const size_t first = (descriptor & 0x3fff) << 4, next_64 = (descriptor >> 16 & 0x3fff) << 4;
    const size_t eight = (descriptor >> 32 & 0x3fff) << 4;
    const size_t i = (size_t)index, j = (size_t)k;
    const size_t at = operand.is_mn_major ? i / 64 * next_64 + j / 8 * eight + j % 8 * 128 + i % 64 * 2
                                          : i / 8 * eight + i % 8 * 128 + j * 2;
    return swizzled(first + at, SWIZZLE_128) % SHARED_SLOT;
}

/* 16 elements along k. */
static void read_operand(const emu_operand &operand, int index, emu_number numbers, float *to)
{
    for (int k = 0; k < 16; k++) {
        uint16_t bits;
        memcpy(&bits, self->in->shared + place_of(operand, index, k), sizeof bits);
        to[k] = numbers == EMU_FLOAT16 ? opjit_half_to_float(opjit_half{bits})
                                       : opjit_bfloat16_to_float(opjit_bfloat16{bits});
    }
}

/* The checks see the reads of a warp once: its 16 rows of a, and a fourth of b's columns. */
static void see_operand(const emu_operand &operand, int first, int count, emu_caller by, actor as)
{
    const int flags = IS_PROXY | SWIZZLE_128 << SWIZZLE;
    const int lines = operand.is_mn_major ? 16 : count, pieces = operand.is_mn_major ? count / 8 : 2;
    for (int line = 0; line < lines; line++)
        for (int piece = 0; piece < pieces; piece++) {
            const size_t at = operand.is_mn_major ? place_of(operand, first + piece * 8, line)
                                                  : place_of(operand, first + line, piece * 8);
            check_access_async(self->in->shared + at, ROW, flags, by.code, as);
        }
}

static bool is_intact(const product &of)
{
    for (int i = 0; i < of.count; i++)
        if (memcmp(of.d + i, &IN_FLIGHT, sizeof IN_FLIGHT) != 0)
            return false;
    return true;
}

static void report_touched(const product &of)
{
    const std::string place = finding_place(of.at);
    finding_add_elsewhere("touched" + place, place,
                          "%s changes the sums of wgmma, or leaves their function, before opjit_wgmma_wait_group()",
                          finding_thread(self).c_str());
}

/* The product that has yet to write to registers, or a new one. From now on they are undefined. */
static product *product_for(float *d, int count, bool add, emu_place at)
{
    std::vector<product> &all = own()->products;
    const auto same = [&](const product &each) { return each.d == d; };
    auto found = std::find_if(all.begin(), all.end(), same);
    if (found != all.end() && !is_intact(*found)) {
        report_touched(*found);
        all.erase(found);
        found = all.end();
    }
    if (found == all.end()) {
        all.push_back({d, count, 0, {d, d + count}, at});
        found = all.end() - 1;
        for (int i = 0; i < count; i++)
            memcpy(d + i, &IN_FLIGHT, sizeof IN_FLIGHT);
    }
    if (!add)
        std::fill(found->sums.begin(), found->sums.end(), 0.0f);
    return &*found;
}

/* Each thread computes its own sums: of two rows, and two columns of eight. */
void emu_wgmma(float *d, int columns, emu_operand a, emu_operand b, bool add, emu_number numbers, emu_caller by)
{
    require_warpgroup(by);
    if (!own()->has_fenced)
        refuse("fence", by, finding_thread(self) + " calls wgmma without opjit_wgmma_fence() before it");
    const int warp = self->number % WARPGROUP / LANES, lane = self->lane;
    product *of = product_for(d, columns / 2, add, by.at);
    float rows[2][16];
    for (int i = 0; i < 2; i++)
        read_operand(a, 16 * warp + lane / 4 + 8 * i, numbers, rows[i]);
    for (int j = 0; j < columns / 8; j++)
        for (int i = 0; i < 2; i++) {
            float column[16];
            read_operand(b, 8 * j + lane % 4 * 2 + i, numbers, column);
            for (int below = 0; below < 2; below++) {
                float sum = of->sums[(size_t)(4 * j + 2 * below + i)];
                for (int k = 0; k < 16; k++)
                    sum += rows[below][k] * column[k];
                of->sums[(size_t)(4 * j + 2 * below + i)] = sum;
            }
        }
    of->group = own()->product_groups + 1;
    if (checking && lane == 0) {
        const actor as = check_async(BY_WGMMA, (uint32_t)of->group);
        const int part = columns >= 32 ? columns / 4 : 8;
        see_operand(a, 16 * warp, 16, by, as);
        if (warp * part < columns)
            see_operand(b, warp * part, part, by, as);
    }
}

void emu_wgmma_commit(void)
{
    const size_t group = (size_t)++own()->product_groups;
    warpgroup *of = own_warpgroup();
    if (of->committed.size() <= group)
        of->committed.resize(group + 1);
    if (++of->committed[group] == WARPGROUP)
        launch_wake(of->waiting);
}

/* A group has ended when all 4 warps have started it, and it is not one of the newest. */
void emu_wgmma_wait(int pending, emu_caller by)
{
    async_thread *thread = own();
    const int ended = thread->product_groups - pending;
    if (ended <= 0)
        return;
    require_warpgroup(by);
    while (own_warpgroup()->committed[(size_t)ended] < WARPGROUP) {
        own_warpgroup()->waiting.push_back(self);
        launch_wait("opjit_wgmma_wait_group()", by.at);
    }
    std::vector<product> &all = thread->products;
    const auto is_late = [&](const product &each) { return each.group > ended; };
    for (const product &each : all)
        if (!is_late(each) && is_intact(each))
            std::copy(each.sums.begin(), each.sums.end(), each.d);
        else if (!is_late(each))
            report_touched(each);
    const auto kept = std::stable_partition(all.begin(), all.end(), is_late);
    all.erase(kept, all.end());
    if (checking)
        check_done(BY_WGMMA, (uint32_t)ended);
}

bool async_in_flight(const thread *of, uintptr_t address, size_t size)
{
    for (const product &each : of->async->products)
        if (address < (uintptr_t)(each.d + each.count) && address + size > (uintptr_t)each.d)
            return true;
    return false;
}

/* ---------------------------------------------------------------------------------------------- */
/* Ends                                                                                           */

static void report_unread(const async_thread *of)
{
    const std::string place = finding_place(of->last_store);
    finding_add_elsewhere("unread" + place, place,
                          "%s ends before its stores by TMA have read shared memory: opjit_tma_commit_group() and "
                          "opjit_tma_wait_group_read<0>() are missing",
                          finding_thread(self).c_str());
}

void async_end_thread(thread *done)
{
    const async_thread *of = done->async;
    if (checking && (of->has_stores || of->stores_read < of->store_groups) && of->last_store)
        report_unread(of);
    delete of;
    done->async = nullptr;
}

static void report_visits(const block *done)
{
    for (const auto &[id, each] : done->async->visits) {
        const std::string place = finding_place(each.at);
        if (!check_knows(done, each.by))
            finding_add_elsewhere(
                "visit" + place, place,
                "another block of the cluster uses shared memory here of block %u, which may have ended: "
                "let all of its blocks meet at opjit_cluster_sync() first",
                done->rank);
    }
}

void async_end_block(block *done)
{
    async_block *of = done->async;
    if (checking && of)
        report_visits(done);
    for (const auto &[at, each] : of ? of->mbarriers : std::map<size_t, mbarrier>()) {
        if (!checking || !each.bytes)
            continue;
        const std::string place = finding_place(each.last);
        const int64_t bytes = each.bytes;
        finding_add_elsewhere("bytes" + place, place,
                              bytes > 0 ? "an mbarrier still expects %ld bytes when its block ends"
                                        : "an mbarrier got %ld bytes that no "
                                          "opjit_mbarrier_arrive_expect_tx() expected",
                              (long)(bytes > 0 ? bytes : -bytes));
    }
    delete of;
    done->async = nullptr;
}

void async_forget(block *of)
{
    delete of->async;
    of->async = nullptr;
    for (thread &each : of->threads) {
        delete each.async;
        each.async = nullptr;
    }
}
