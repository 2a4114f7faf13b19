/*
 * opjit_mma.h - tensor cores, asynchronous copies and clusters in a .cu file.
 *
 * A function is one PTX instruction and has its name, so that the PTX manual describes it:
 *
 *     wgmma.mma_async.m64n256k16  opjit_wgmma_m64n256k16     ldmatrix.x4      opjit_ldmatrix_x4
 *     mma.sync.m16n8k16           opjit_mma_m16n8k16         cp.async         opjit_cp_async
 *     mbarrier.try_wait.parity    opjit_mbarrier_wait        cp.async.bulk.tensor.2d  opjit_tma_load_2d
 *
 * GPUs: ldmatrix, mma.sync and cp.async need sm_80, fp8 products sm_89, mbarrier, TMA, stmatrix and clusters sm_90, wgmma
 * and setmaxnreg sm_90a. Code for an earlier arch cannot contain them, so guard a kernel's body:
 *
 *     #if OPJIT_HAS_WGMMA
 *
 * and declare the op with archs=["sm_90a"]: then opjit builds sm_90a where it would build sm_90. See kernels_c/matmul.
 *
 * Contents: swizzles; ldmatrix and mma.sync; cp.async; mbarrier; clusters; TMA; wgmma; tensor maps.
 */
#ifndef OPJIT_MMA_H
#define OPJIT_MMA_H

#include "opjit_cuda.h"

#if defined(OPJIT_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800)
#define OPJIT_HAS_MMA 1
#else
#define OPJIT_HAS_MMA 0
#endif
#if defined(OPJIT_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define OPJIT_HAS_TMA 1
#else
#define OPJIT_HAS_TMA 0
#endif
#if defined(OPJIT_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define OPJIT_HAS_WGMMA 1
#else
#define OPJIT_HAS_WGMMA 0
#endif

/* The description of a tensor for TMA, CUtensorMap of <cuda.h>: a parameter `const __grid_constant__ opjit_tensor_map`. */
typedef struct __align__(64) opjit_tensor_map {
    uint64_t words[16];
} opjit_tensor_map;

/*
 * How TMA and wgmma place 16-byte pieces in shared memory, so that a column of pieces uses all banks. Rows have as
 * many bytes as the name says, and tiles begin at a multiple of 1024 bytes. For 128 bytes, the place of piece p in row r
 * is p ^ (r % 8). The numbers are CUtensorMapSwizzle's.
 */
typedef enum opjit_swizzle { OPJIT_NO_SWIZZLE, OPJIT_SWIZZLE_32, OPJIT_SWIZZLE_64, OPJIT_SWIZZLE_128 } opjit_swizzle;

/*
 * A barrier in shared memory that counts threads and bytes. A phase ends when `count` threads have arrived and all
 * expected bytes are there. Then the next phase begins. A wait gives the parity of a phase: 0 for the first, 1 for the
 * second, 0 for the third.
 */
typedef uint64_t opjit_mbarrier;

/* The order of the 16-bit elements of an operand of wgmma in shared memory, with OPJIT_SWIZZLE_128. */
typedef enum opjit_major {
    OPJIT_K_MAJOR, /* a row (of a) or column (of b) has its 64 elements along k side by side; rows follow each other */
    OPJIT_MN_MAJOR /* 64 neighboring rows or columns are adjacent; then the next k. 64 k later, the next 64 */
} opjit_major;

/* The place of a 16-byte piece in rows of 128 bytes with OPJIT_SWIZZLE_128, in bytes. */
OPJIT_HOST_DEVICE unsigned opjit_swizzled_128(unsigned row, unsigned piece)
{
    return row * 128 + (piece ^ (row % 8)) * 16;
}

#ifdef OPJIT_EMULATED
#include "tensor_cores.h" /* the functions below, on the CPU */
#else

/* The address of shared memory that instructions take. */
OPJIT_UNUSED static __device__ uint32_t opjit_shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* A barrier of some warps of the block, with one of 16 numbers; 0 is __syncthreads(). */
OPJIT_UNUSED static __device__ void opjit_named_barrier(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

#if OPJIT_HAS_MMA

/* ---------------------------------------------------------------------------------------------- */
/* ldmatrix and mma.sync: products by a warp                                                      */

/*
 * Load four 8x8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i, 16 bytes
 * each; lane l gets in r[i] the elements 2 (l % 4) and the next one of row l / 4. With trans: of column l / 4.
 */
OPJIT_UNUSED static __device__ void opjit_ldmatrix_x4(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(opjit_shared_address(row))
                 : "memory");
}

OPJIT_UNUSED static __device__ void opjit_ldmatrix_x4_trans(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(opjit_shared_address(row))
                 : "memory");
}

/*
 * d += a b by a warp; a is 16 x k, b is k x 8, d is 16 x 8. Lane l has of d the elements 2 (l % 4) and the next one of
 * row l / 4 in d[0] and d[1], of row l / 4 + 8 in d[2] and d[3]. Four 8x8 matrices of ldmatrix are an a: rows 0 to 7,
 * rows 8 to 15, and the same of the next 16 bytes of a row. Two are a b: rows in shared memory are columns of b.
 */
#define OPJIT_MMA(name_, type_, element_) \
    OPJIT_UNUSED static __device__ void opjit_mma_##name_(float (&d)[4], const uint32_t (&a)[4], \
                                                          const uint32_t (&b)[2], element_) \
    { \
        asm volatile("mma.sync.aligned." #name_ ".row.col.f32." type_ "." type_ ".f32 {%0, %1, %2, %3}, " \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \
    }
OPJIT_MMA(m16n8k16, "bf16", opjit_bfloat16)
OPJIT_MMA(m16n8k16, "f16", opjit_half)
OPJIT_MMA(m16n8k8, "tf32", float)
#if __CUDA_ARCH__ >= 890
OPJIT_MMA(m16n8k32, "e4m3", opjit_float8_e4m3fn)
OPJIT_MMA(m16n8k32, "e5m2", opjit_float8_e5m2)
#endif

OPJIT_UNUSED static __device__ void opjit_mma_m16n8k32(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                       int8_t)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* ---------------------------------------------------------------------------------------------- */
/* cp.async: 16 bytes from device to shared memory, while the thread goes on                      */

/* Copy up to 16 bytes, and fill the rest of the 16 with zeros. Both addresses are multiples of 16. */
OPJIT_UNUSED static __device__ void opjit_cp_async(void *shared, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(opjit_shared_address(shared)), "l"(from), "r"(bytes)
                 : "memory");
}

/* The copies since the last commit are a group. */
OPJIT_UNUSED static __device__ void opjit_cp_async_commit_group(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Wait until at most `pending` of the thread's newest groups are on their way. Other threads need a barrier as well. */
template <int pending>
static __device__ void opjit_cp_async_wait_group(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#endif /* OPJIT_HAS_MMA */

#if OPJIT_HAS_TMA

/* Store four 8x8 matrices, the reverse of ldmatrix. */
OPJIT_UNUSED static __device__ void opjit_stmatrix_x4(void *row, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(opjit_shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* ---------------------------------------------------------------------------------------------- */
/* mbarrier: a barrier in shared memory, which also counts the bytes of copies                    */

OPJIT_UNUSED static __device__ void opjit_mbarrier_init(opjit_mbarrier *barrier, unsigned count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(opjit_shared_address(barrier)), "r"(count) : "memory");
}

/* After init: the barriers are there for copies and for the cluster. Other threads need a barrier as well. */
OPJIT_UNUSED static __device__ void opjit_fence_mbarrier_init(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

OPJIT_UNUSED static __device__ void opjit_mbarrier_arrive(opjit_mbarrier *barrier)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(opjit_shared_address(barrier)) : "memory");
}

/* Arrive, and expect the bytes of the copies that this thread starts. */
OPJIT_UNUSED static __device__ void opjit_mbarrier_arrive_expect_tx(opjit_mbarrier *barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(opjit_shared_address(barrier)), "r"(bytes)
                 : "memory");
}

/*
 * Arrive at the barrier at the same place in the shared memory of a block of the cluster. It says that this thread has
 * read what it waited for, and is no fence of the cluster: .release.cluster would wait for the thread's memory accesses.
 */
OPJIT_UNUSED static __device__ void opjit_mbarrier_arrive_cluster(opjit_mbarrier *barrier, unsigned rank)
{
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(opjit_shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}

/* Wait for the end of the phase with this parity. */
OPJIT_UNUSED static __device__ void opjit_mbarrier_wait(opjit_mbarrier *barrier, unsigned parity)
{
    uint32_t done;
#ifdef OPJIT_MBARRIER_SECONDS /* to find a barrier that nobody reaches: -DOPJIT_MBARRIER_SECONDS=2 */
    const long long start = clock64();
#endif
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}\n"
                     : "=r"(done)
                     : "r"(opjit_shared_address(barrier)), "r"(parity)
                     : "memory");
#ifdef OPJIT_MBARRIER_SECONDS
        if (!done && clock64() - start > (long long)(OPJIT_MBARRIER_SECONDS * 1.5e9)) {
            printf("block %d, thread %d: no end of parity %u of the mbarrier at %u\n", (int)blockIdx.x,
                   (int)threadIdx.x, parity, opjit_shared_address(barrier));
            __trap();
        }
#endif
    } while (!done);
}

/* ---------------------------------------------------------------------------------------------- */
/* Clusters: blocks that run together and read each other's shared memory                         */

OPJIT_UNUSED static __device__ unsigned opjit_cluster_rank(void)
{
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* A barrier of all threads of the cluster. Memory written before it is there after it. */
OPJIT_UNUSED static __device__ void opjit_cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Read four floats of the shared memory of a block of the cluster: `shared` is their place in this block. */
OPJIT_UNUSED static __device__ float4 opjit_cluster_load(const float4 *shared, unsigned rank)
{
    float4 value;
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}\n"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(opjit_shared_address(shared)), "r"(rank)
                 : "memory");
    return value;
}

/* ---------------------------------------------------------------------------------------------- */
/* TMA: tiles between device and shared memory, by one thread                                     */

/* What threads wrote to shared memory before it can be read by TMA and wgmma after it. Then a barrier of the threads. */
OPJIT_UNUSED static __device__ void opjit_fence_proxy_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The same for device memory, after a wait for the threads that wrote it, for example on another rank. */
OPJIT_UNUSED static __device__ void opjit_fence_proxy_async_global(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* Read a tensor map before its first use, which would wait for it. */
OPJIT_UNUSED static __device__ void opjit_prefetch_tensor_map(const opjit_tensor_map *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/*
 * Load a tile that begins at an element of the tensor, innermost index first. Elements outside of the tensor are zeros.
 * The bytes of the whole tile arrive at `barrier`. With a mask, the tile and its bytes arrive at the same places in all
 * blocks of the cluster that have a bit in it.
 */
#define OPJIT_TMA_LOAD(dim_, parameters_, coordinates_, mask_, ...) \
    OPJIT_UNUSED static __device__ void opjit_tma_load_##dim_(void *shared, const opjit_tensor_map *map, \
                                                              opjit_mbarrier *barrier, parameters_) \
    { \
        asm volatile("cp.async.bulk.tensor." #dim_ ".shared::cluster.global.mbarrier::complete_tx::bytes" \
                     " [%0], [%1, " coordinates_ "], [%2];" ::"r"(opjit_shared_address(shared)), \
                     "l"(map), "r"(opjit_shared_address(barrier)), __VA_ARGS__ \
                     : "memory"); \
    } \
    OPJIT_UNUSED static __device__ void opjit_tma_load_##dim_##_multicast(void *shared, const opjit_tensor_map *map, \
                                                                          opjit_mbarrier *barrier, parameters_, \
                                                                          uint16_t mask) \
    { \
        asm volatile("cp.async.bulk.tensor." #dim_ ".shared::cluster.global.mbarrier::complete_tx::bytes" \
                     ".multicast::cluster [%0], [%1, " coordinates_ "], [%2], " mask_ \
                     ";" ::"r"(opjit_shared_address(shared)), \
                     "l"(map), "r"(opjit_shared_address(barrier)), __VA_ARGS__, "h"(mask) \
                     : "memory"); \
    }
#define OPJIT_INTS(...) __VA_ARGS__
OPJIT_TMA_LOAD(1d, int x, "{%3}", "%4", "r"(x))
OPJIT_TMA_LOAD(2d, OPJIT_INTS(int x, int y), "{%3, %4}", "%5", "r"(x), "r"(y))
OPJIT_TMA_LOAD(3d, OPJIT_INTS(int x, int y, int z), "{%3, %4, %5}", "%6", "r"(x), "r"(y), "r"(z))
OPJIT_TMA_LOAD(4d, OPJIT_INTS(int x, int y, int z, int u), "{%3, %4, %5, %6}", "%7", "r"(x), "r"(y), "r"(z), "r"(u))
OPJIT_TMA_LOAD(5d, OPJIT_INTS(int x, int y, int z, int u, int v), "{%3, %4, %5, %6, %7}", "%8", "r"(x), "r"(y), "r"(z),
               "r"(u), "r"(v))

/* Store the elements of a tile that are inside the tensor. */
OPJIT_UNUSED static __device__ void opjit_tma_store_2d(const opjit_tensor_map *map, const void *shared, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(opjit_shared_address(shared)), "r"(x), "r"(y)
                 : "memory");
}

/* The thread's stores since the last commit are a group. */
OPJIT_UNUSED static __device__ void opjit_tma_commit_group(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Wait until at most `pending` of the thread's newest groups still read shared memory, which can then be reused. */
template <int pending>
static __device__ void opjit_tma_wait_group_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

#endif /* OPJIT_HAS_TMA */

#if OPJIT_HAS_WGMMA

/* ---------------------------------------------------------------------------------------------- */
/* wgmma: products by a warpgroup, 4 warps, from shared memory                                    */

/* Take or give back registers, for all threads of a warpgroup: a multiple of 8 from 24 to 256. */
template <int registers>
static __device__ void opjit_setmaxnreg_inc(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
static __device__ void opjit_setmaxnreg_dec(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

/* The first 16 k of an operand in shared memory. */
OPJIT_UNUSED static __device__ uint64_t opjit_wgmma_descriptor(const void *shared, opjit_major major)
{
    const uint64_t address = (opjit_shared_address(shared) & 0x3ffff) >> 4, eight_rows = 1024 >> 4;
    const uint64_t next_64 = major == OPJIT_MN_MAJOR ? 64 * 128 >> 4 : 1, swizzle_128 = 1;
    return address | next_64 << 16 | eight_rows << 32 | swizzle_128 << 62;
}

/* The next 16 k in the same tile of 64 k. */
OPJIT_UNUSED static __device__ uint64_t opjit_wgmma_next(uint64_t descriptor, opjit_major major)
{
    return descriptor + (major == OPJIT_MN_MAJOR ? 16 * 128 >> 4 : 16 * 2 >> 4);
}

/* Before the first product that uses registers which the threads have written. */
OPJIT_UNUSED static __device__ void opjit_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* The products since the last commit are a group. */
OPJIT_UNUSED static __device__ void opjit_wgmma_commit_group(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Wait until at most `pending` of the newest groups run. Read d, or overwrite the tiles, only after its group's end. */
template <int pending>
static __device__ void opjit_wgmma_wait_group(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/*
 * d = a b, or d += a b with `add`: a is 64 x 16, b is 16 x n, of opjit_bfloat16 or opjit_half, given by descriptors.
 * Warp w of the warpgroup has rows 16 w to 16 w + 15. Lane l has in d[4 j] and d[4 j + 1] the columns 8 j + 2 (l % 4)
 * and the next one of row 16 w + l / 4, and in d[4 j + 2] and d[4 j + 3] the same columns of the row 8 below.
 */
#define OPJIT_N4_ "%0,%1,%2,%3"
#define OPJIT_N8_ OPJIT_N4_ ",%4,%5,%6,%7"
#define OPJIT_N16_ OPJIT_N8_ ",%8,%9,%10,%11,%12,%13,%14,%15"
#define OPJIT_N32_ OPJIT_N16_ ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define OPJIT_N64_ \
    OPJIT_N32_ \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define OPJIT_N128_ \
    OPJIT_N64_ \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define OPJIT_F4_(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OPJIT_F8_(d, i) OPJIT_F4_(d, i), OPJIT_F4_(d, i + 4)
#define OPJIT_F16_(d, i) OPJIT_F8_(d, i), OPJIT_F8_(d, i + 8)
#define OPJIT_F32_(d, i) OPJIT_F16_(d, i), OPJIT_F16_(d, i + 16)
#define OPJIT_F64_(d, i) OPJIT_F32_(d, i), OPJIT_F32_(d, i + 32)
#define OPJIT_F128_(d, i) OPJIT_F64_(d, i), OPJIT_F64_(d, i + 64)

/* `a_` to `tb_` are the numbers of the operands behind the n / 2 registers of d. */
#define OPJIT_WGMMA_ASM_(n_, count_, type_, a_, b_, add_, ta_, tb_) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #add_ ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #n_ "k16.f32." type_ "." type_ " {" OPJIT_N##count_##_ \
                 "}, %" #a_ ", %" #b_ ", p, 1, 1, %" #ta_ ", %" #tb_ ";\n}\n" \
                 : OPJIT_F##count_##_(d, 0) \
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)a_major), "n"((int)b_major))
#define OPJIT_WGMMA_(n_, count_, a_, b_, add_, ta_, tb_) \
    template <typename element, opjit_major a_major = OPJIT_K_MAJOR, opjit_major b_major = OPJIT_K_MAJOR> \
    static __device__ void opjit_wgmma_m64n##n_##k16(float (&d)[count_], uint64_t a, uint64_t b, bool add) \
    { \
        if constexpr (opjit_is_half<element>::value) \
            OPJIT_WGMMA_ASM_(n_, count_, "f16", a_, b_, add_, ta_, tb_); \
        else \
            OPJIT_WGMMA_ASM_(n_, count_, "bf16", a_, b_, add_, ta_, tb_); \
    }
template <typename element>
struct opjit_is_half {
    static constexpr bool value = false;
};
template <>
struct opjit_is_half<opjit_half> {
    static constexpr bool value = true;
};
OPJIT_WGMMA_(8, 4, 4, 5, 6, 7, 8)
OPJIT_WGMMA_(16, 8, 8, 9, 10, 11, 12)
OPJIT_WGMMA_(32, 16, 16, 17, 18, 19, 20)
OPJIT_WGMMA_(64, 32, 32, 33, 34, 35, 36)
OPJIT_WGMMA_(128, 64, 64, 65, 66, 67, 68)
OPJIT_WGMMA_(256, 128, 128, 129, 130, 131, 132)

#endif /* OPJIT_HAS_WGMMA */
#endif /* OPJIT_EMULATED */

/* ---------------------------------------------------------------------------------------------- */
/* Tensor maps, made on the host                                                                  */

/* A tensor in device memory, or a part or view of one: outermost dimension first, strides in elements. */
typedef struct opjit_tiled {
    const void *data;
    opjit_dtype dtype;
    int64_t dim; /* 1 to 5 */
    int64_t sizes[5], strides[5];
} opjit_tiled;

/* CUtensorMapDataType, or -1. */
static int opjit_tensor_map_type(opjit_dtype dtype)
{
    switch (dtype) {
    case OPJIT_UINT8:
    case OPJIT_INT8:
    case OPJIT_BOOL:
    case OPJIT_FLOAT8_E4M3FN:
    case OPJIT_FLOAT8_E5M2: return 0;
    case OPJIT_INT32: return 3;
    case OPJIT_INT64: return 5;
    case OPJIT_FLOAT16: return 6;
    case OPJIT_FLOAT32: return 7;
    case OPJIT_FLOAT64: return 8;
    case OPJIT_BFLOAT16: return 9;
    default: return -1;
    }
}

/* Check the rules of cuTensorMapEncodeTiled, which itself only says that a value is invalid. */
static opjit_status opjit_check_tiled(const opjit_tiled *t, const uint32_t *box, opjit_swizzle swizzle)
{
    const int64_t size = (int64_t)opjit_dtype_size(t->dtype), row = (int64_t)box[t->dim - 1] * size,
                  most = 16ll << (int)swizzle;
    OPJIT_CHECK((uintptr_t)t->data % 16 == 0, "a tensor map needs data at a multiple of 16 bytes, not at %p", t->data);
    OPJIT_CHECK(t->strides[t->dim - 1] == 1, "a tensor map needs the stride 1 in its innermost dimension, not %lld",
                (long long)t->strides[t->dim - 1]);
    for (int64_t d = 0; d < t->dim; d++) {
        OPJIT_CHECK(d == t->dim - 1 || (t->strides[d] * size % 16 == 0 && t->strides[d] > 0),
                    "a tensor map needs strides of a multiple of 16 bytes; that of dimension %d has %lld bytes", (int)d,
                    (long long)(t->strides[d] * size));
        OPJIT_CHECK(t->sizes[d] > 0 && t->sizes[d] <= UINT32_MAX,
                    "a tensor map needs sizes from 1 to 2^32 - 1; dimension %d has %lld", (int)d,
                    (long long)t->sizes[d]);
        OPJIT_CHECK(box[d] > 0 && box[d] <= 256, "a tile has 1 to 256 elements in a dimension; dimension %d has %u",
                    (int)d, box[d]);
    }
    OPJIT_CHECK(row % 16 == 0, "a row of a tile is a multiple of 16 bytes, not %lld bytes", (long long)row);
    OPJIT_CHECK(swizzle == OPJIT_NO_SWIZZLE || row <= most,
                "a row of a tile has at most %lld bytes, for its swizzle, not %lld", (long long)most, (long long)row);
    return OPJIT_OK;
}

/*
 * Make the map of a tensor for tiles of `box` elements, outermost dimension first. Returns an error that says which rule
 * of alignment, stride, size or box the tensor breaks. Costs about 1 us.
 */
OPJIT_MUST_USE OPJIT_UNUSED static opjit_status opjit_tensor_map_encode(opjit_tensor_map *map, const opjit_tiled *t,
                                                                        const uint32_t *box, opjit_swizzle swizzle)
{
    typedef int (*encode)(void *map, int type, uint32_t dim, void *data, const uint64_t *sizes, const uint64_t *strides,
                          const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int l2, int fill);
    static void *function;
    const int type = opjit_tensor_map_type(t->dtype);
    OPJIT_CHECK(type >= 0, "TMA does not copy %s", opjit_dtype_name(t->dtype));
    OPJIT_CHECK(t->dim >= 1 && t->dim <= 5, "a tensor map has 1 to 5 dimensions, not %d", (int)t->dim);
    OPJIT_TRY(opjit_check_tiled(t, box, swizzle));

    if (!function) {
        cudaDriverEntryPointQueryResult found;
        OPJIT_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                                          &found));
        OPJIT_CHECK(function, "this CUDA driver has no tensor maps; it is older than CUDA 12");
    }

    uint64_t sizes[5], strides[5];
    uint32_t tile[5], steps[5];
    for (int64_t d = 0; d < t->dim; d++) { /* innermost first; the innermost stride is left out */
        const int64_t from = t->dim - 1 - d;
        sizes[d] = (uint64_t)t->sizes[from];
        tile[d] = box[from];
        steps[d] = 1;
        if (d > 0)
            strides[d - 1] = (uint64_t)(t->strides[from] * (int64_t)opjit_dtype_size(t->dtype));
    }
    const int promote_256 = 3, no_context = 201;
    for (int tries = 0; tries < 2; tries++) {
        const int error = ((encode)function)(map, type, (uint32_t)t->dim, (void *)t->data, sizes, strides, tile, steps,
                                             0, (int)swizzle, promote_256, 0);
        if (error == 0)
            return OPJIT_OK;
        OPJIT_CHECK(error == no_context && tries == 0, "cuTensorMapEncodeTiled failed with CUDA driver error %d",
                    error);
        int device; /* this thread has not used CUDA yet */
        OPJIT_CUDA_CHECK(cudaGetDevice(&device));
        OPJIT_CUDA_CHECK(cudaSetDevice(device));
    }
    return OPJIT_OK;
}

/* The configuration of a launch in clusters of neighboring blocks. `attribute` stays valid until the launch. */
static cudaLaunchConfig_t opjit_cluster_config(cudaLaunchAttribute *attribute, dim3 grid, dim3 block, unsigned cluster,
                                               size_t shared, cudaStream_t stream)
{
    cudaLaunchConfig_t config = {};
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = cluster;
    attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attribute;
    config.numAttrs = 1;
    return config;
}

/* Launch a kernel in clusters of blocks, which the grid's x is a multiple of. */
template <typename... parameters>
static opjit_status opjit_launch_cluster(void (*kernel)(parameters...), dim3 grid, dim3 block, unsigned cluster,
                                         size_t shared, cudaStream_t stream, const parameters &...arguments)
{
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = opjit_cluster_config(&attribute, grid, block, cluster, shared, stream);
    OPJIT_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
    return OPJIT_OK;
}

/* How many clusters of blocks run at once on the device? Fewer than its multiprocessors have places for blocks. */
template <typename kernel_type>
static opjit_status opjit_resident_clusters(kernel_type *kernel, int threads, unsigned cluster, size_t shared,
                                            int *count)
{
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config =
        opjit_cluster_config(&attribute, dim3(cluster), dim3((unsigned)threads), cluster, shared, (cudaStream_t)0);
    OPJIT_CUDA_CHECK(cudaOccupancyMaxActiveClusters(count, (const void *)kernel, &config));
    return OPJIT_OK;
}

#endif
