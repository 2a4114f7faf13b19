/*
 * tensor_cores.h - the device functions of opjit_mma.h on the CPU, by the same names. opjit_mma.h includes it, and says what
 * the functions do. tensor_cores.cc has what a thread starts and later waits for: copies, barriers and products of warpgroups.
 *
 * Functions are not inlined: the address that they return to is the author's line.
 */
#ifndef OPJIT_EMULATE_TENSOR_CORES_H
#define OPJIT_EMULATE_TENSOR_CORES_H

#include "async.h"
#include "language.h"

#define EMU_CALL (emu_caller{__builtin_return_address(0), at})

EMU_ATOMIC static uint32_t opjit_shared_address(const void *shared, emu_place at = EMU_HERE)
{
    return emu_shared_address(shared, EMU_CALL);
}

EMU_ATOMIC static void opjit_named_barrier(int number, int threads, emu_place at = EMU_HERE)
{
    emu_named_barrier(number, threads, EMU_CALL);
}

/* ---------------------------------------------------------------------------------------------- */
/* ldmatrix and mma.sync                                                                          */

/* The 16 bytes of a lane's row, of all lanes. Each lane reads its own, so none reads after another one went on. */
EMU_OWN static void emu_exchange_rows(const void *row, emu_lane_values *rows, emu_caller by)
{
    unsigned char own[16];
    emu_see_row("ldmatrix", row, false, by);
    memcpy(own, row, sizeof own);
    emu_exchange("ldmatrix", 0xffffffffu, own, sizeof own, rows, by.at);
}

EMU_ATOMIC static void opjit_ldmatrix_x4(uint32_t (&r)[4], const void *row, emu_place at = EMU_HERE)
{
    emu_lane_values rows;
    emu_exchange_rows(row, &rows, EMU_CALL);
    for (int i = 0; i < 4; i++)
        memcpy(&r[i], rows.value[8 * i + emu_lane / 4] + emu_lane % 4 * 4, 4);
}

EMU_ATOMIC static void opjit_ldmatrix_x4_trans(uint32_t (&r)[4], const void *row, emu_place at = EMU_HERE)
{
    emu_lane_values rows;
    emu_exchange_rows(row, &rows, EMU_CALL);
    for (int i = 0; i < 4; i++) {
        const int first = 8 * i + emu_lane % 4 * 2, column = emu_lane / 4 * 2;
        memcpy((char *)&r[i], rows.value[first] + column, 2);
        memcpy((char *)&r[i] + 2, rows.value[first + 1] + column, 2);
    }
}

EMU_ATOMIC static void opjit_stmatrix_x4(void *row, const uint32_t (&r)[4], emu_place at = EMU_HERE)
{
    emu_lane_values of;
    emu_exchange("stmatrix", 0xffffffffu, r, sizeof r, &of, at);
    unsigned char own[16];
    for (int lane = 0; lane < 4; lane++) /* of the row's four */
        memcpy(own + lane * 4, of.value[emu_lane % 8 * 4 + lane] + emu_lane / 8 * 4, 4);
    emu_see_row("stmatrix", row, true, EMU_CALL);
    memcpy(row, own, sizeof own);
}

EMU_OWN static float emu_element(opjit_bfloat16, uint32_t word, int i)
{
    return opjit_bfloat16_to_float(opjit_bfloat16{(uint16_t)(word >> 16 * i)});
}

EMU_OWN static float emu_element(opjit_half, uint32_t word, int i)
{
    return opjit_half_to_float(opjit_half{(uint16_t)(word >> 16 * i)});
}

EMU_OWN static float emu_element(opjit_float8_e4m3fn, uint32_t word, int i)
{
    return opjit_float8_e4m3fn_to_float(opjit_float8_e4m3fn{(uint8_t)(word >> 8 * i)});
}

EMU_OWN static float emu_element(opjit_float8_e5m2, uint32_t word, int i)
{
    return opjit_float8_e5m2_to_float(opjit_float8_e5m2{(uint8_t)(word >> 8 * i)});
}

EMU_OWN static int32_t emu_element(int8_t, uint32_t word, int i)
{
    return (int8_t)(word >> 8 * i);
}

/* tf32 has 10 bits of a float's fraction. */
EMU_OWN static float emu_element(float, uint32_t word, int)
{
    const uint32_t kept = word & ~0x1fffu;
    float value;
    memcpy(&value, &kept, sizeof value);
    return value;
}

/* What a lane brings to a product of its warp. */
struct emu_fragments {
    uint32_t a[4], b[2];
};

/*
 * d += a b by a warp. Lane l has rows l / 4 and l / 4 + 8 of a, and column l / 4 of b: of each half of k the elements from
 * l % 4 times the number in a word on.
 */
template <typename element, typename sum>
EMU_OWN void emu_mma(sum (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], emu_place at)
{
    constexpr int in_word = 4 / (int)sizeof(element);
    emu_fragments own;
    emu_lane_values lanes;
    memcpy(own.a, a, sizeof own.a);
    memcpy(own.b, b, sizeof own.b);
    emu_exchange("mma.sync", 0xffffffffu, &own, sizeof own, &lanes, at);
    for (int i = 0; i < 4; i++) {
        const int row = emu_lane / 4, column = emu_lane % 4 * 2 + i % 2;
        for (int word = 0; word < 8; word++) { /* along k */
            const emu_fragments of_a = emu_value_of<emu_fragments>(lanes, row * 4 + word % 4);
            const emu_fragments of_b = emu_value_of<emu_fragments>(lanes, column * 4 + word % 4);
            for (int k = 0; k < in_word; k++)
                d[i] += emu_element(element(), of_a.a[word / 4 * 2 + i / 2], k) *
                        emu_element(element(), of_b.b[word / 4], k);
        }
    }
}

#define EMU_MMA(name_, sum_, element_) \
    EMU_ATOMIC static void opjit_mma_##name_(sum_(&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], element_, \
                                             emu_place at = EMU_HERE) \
    { \
        emu_mma<element_>(d, a, b, at); \
    }
EMU_MMA(m16n8k16, float, opjit_bfloat16)
EMU_MMA(m16n8k16, float, opjit_half)
EMU_MMA(m16n8k8, float, float)
EMU_MMA(m16n8k32, float, opjit_float8_e4m3fn)
EMU_MMA(m16n8k32, float, opjit_float8_e5m2)
EMU_MMA(m16n8k32, int32_t, int8_t)

/* ---------------------------------------------------------------------------------------------- */
/* cp.async                                                                                       */

EMU_ATOMIC static void opjit_cp_async(void *shared, const void *from, int bytes, emu_place at = EMU_HERE)
{
    emu_copy_async(shared, from, bytes, EMU_CALL);
}

EMU_ATOMIC static void opjit_cp_async_commit_group(void)
{
    emu_copy_commit();
}

template <int pending>
EMU_ATOMIC void opjit_cp_async_wait_group(void)
{
    emu_copy_wait(pending);
}

/* ---------------------------------------------------------------------------------------------- */
/* mbarrier and clusters                                                                          */

EMU_ATOMIC static void opjit_mbarrier_init(opjit_mbarrier *barrier, unsigned count, emu_place at = EMU_HERE)
{
    emu_mbarrier_init(barrier, count, EMU_CALL);
}

EMU_ATOMIC static void opjit_fence_mbarrier_init(void)
{
    emu_mbarriers_are_ready();
}

EMU_ATOMIC static void opjit_mbarrier_arrive(opjit_mbarrier *barrier, emu_place at = EMU_HERE)
{
    emu_mbarrier_arrive(barrier, 0, EMU_CALL);
}

EMU_ATOMIC static void opjit_mbarrier_arrive_expect_tx(opjit_mbarrier *barrier, unsigned bytes, emu_place at = EMU_HERE)
{
    emu_mbarrier_arrive(barrier, bytes, EMU_CALL);
}

EMU_ATOMIC static void opjit_mbarrier_arrive_cluster(opjit_mbarrier *barrier, unsigned rank, emu_place at = EMU_HERE)
{
    emu_mbarrier_arrive_at(barrier, rank, EMU_CALL);
}

EMU_ATOMIC static void opjit_mbarrier_wait(opjit_mbarrier *barrier, unsigned parity, emu_place at = EMU_HERE)
{
    emu_mbarrier_wait(barrier, parity, EMU_CALL);
}

EMU_ATOMIC static unsigned opjit_cluster_rank(void)
{
    return emu_cluster_rank();
}

EMU_ATOMIC static void opjit_cluster_sync(emu_place at = EMU_HERE)
{
    emu_cluster_barrier(at);
}

EMU_ATOMIC static float4 opjit_cluster_load(const float4 *shared, unsigned rank, emu_place at = EMU_HERE)
{
    float4 value;
    emu_cluster_read(&value, shared, sizeof value, rank, EMU_CALL);
    return value;
}

/* ---------------------------------------------------------------------------------------------- */
/* TMA                                                                                            */

EMU_ATOMIC static void opjit_fence_proxy_async(void)
{
    emu_proxy_fence();
}

EMU_ATOMIC static void opjit_fence_proxy_async_global(void)
{
    /* the checks take a load by TMA for one by its thread */
}

EMU_ATOMIC static void opjit_prefetch_tensor_map(const opjit_tensor_map *) {}

#define EMU_INTS(...) __VA_ARGS__
#define EMU_TILE_LOAD(dim_, parameters_, ...) \
    EMU_ATOMIC static void opjit_tma_load_##dim_##d(void *shared, const opjit_tensor_map *map, \
                                                    opjit_mbarrier *barrier, parameters_, emu_place at = EMU_HERE) \
    { \
        const int first[] = {__VA_ARGS__}; \
        emu_tile_load(shared, map, barrier, dim_, first, -1, EMU_CALL); \
    } \
    EMU_ATOMIC static void opjit_tma_load_##dim_##d_multicast(void *shared, const opjit_tensor_map *map, \
                                                              opjit_mbarrier *barrier, parameters_, uint16_t mask, \
                                                              emu_place at = EMU_HERE) \
    { \
        const int first[] = {__VA_ARGS__}; \
        emu_tile_load(shared, map, barrier, dim_, first, mask, EMU_CALL); \
    }
EMU_TILE_LOAD(1, int x, x)
EMU_TILE_LOAD(2, EMU_INTS(int x, int y), x, y)
EMU_TILE_LOAD(3, EMU_INTS(int x, int y, int z), x, y, z)
EMU_TILE_LOAD(4, EMU_INTS(int x, int y, int z, int u), x, y, z, u)
EMU_TILE_LOAD(5, EMU_INTS(int x, int y, int z, int u, int v), x, y, z, u, v)

EMU_ATOMIC static void opjit_tma_store_2d(const opjit_tensor_map *map, const void *shared, int x, int y,
                                          emu_place at = EMU_HERE)
{
    const int first[] = {x, y};
    emu_tile_store(map, shared, 2, first, EMU_CALL);
}

EMU_ATOMIC static void opjit_tma_commit_group(void)
{
    emu_tile_commit();
}

template <int pending>
EMU_ATOMIC void opjit_tma_wait_group_read(void)
{
    emu_tile_wait(pending);
}

/* ---------------------------------------------------------------------------------------------- */
/* wgmma                                                                                          */

template <int registers>
EMU_ATOMIC void opjit_setmaxnreg_inc(void)
{
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "a multiple of 8 from 24 to 256");
}

template <int registers>
EMU_ATOMIC void opjit_setmaxnreg_dec(void)
{
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "a multiple of 8 from 24 to 256");
}

EMU_ATOMIC static uint64_t opjit_wgmma_descriptor(const void *shared, opjit_major major, emu_place at = EMU_HERE)
{
    const uint64_t address = (uint64_t)(emu_shared_address(shared, EMU_CALL) & 0x3ffff) >> 4, eight_rows = 1024 >> 4;
    const uint64_t next_64 = major == OPJIT_MN_MAJOR ? 64 * 128 >> 4 : 1, swizzle_128 = 1;
    emu_tile_of_wgmma(shared, EMU_CALL);
    return address | next_64 << 16 | eight_rows << 32 | swizzle_128 << 62;
}

EMU_OWN static uint64_t opjit_wgmma_next(uint64_t descriptor, opjit_major major)
{
    return descriptor + (major == OPJIT_MN_MAJOR ? 16 * 128 >> 4 : 16 * 2 >> 4);
}

EMU_ATOMIC static void opjit_wgmma_fence(void)
{
    emu_wgmma_fence();
}

EMU_ATOMIC static void opjit_wgmma_commit_group(void)
{
    emu_wgmma_commit();
}

template <int pending>
EMU_ATOMIC void opjit_wgmma_wait_group(emu_place at = EMU_HERE)
{
    emu_wgmma_wait(pending, EMU_CALL);
}

#define EMU_WGMMA(n_, count_) \
    template <typename element, opjit_major a_major = OPJIT_K_MAJOR, opjit_major b_major = OPJIT_K_MAJOR> \
    EMU_ATOMIC void opjit_wgmma_m64n##n_##k16(float (&d)[count_], uint64_t a, uint64_t b, bool add, \
                                              emu_place at = EMU_HERE) \
    { \
        const emu_number numbers = std::is_same<element, opjit_half>::value ? EMU_FLOAT16 : EMU_BFLOAT16; \
        emu_wgmma(d, n_, {a, a_major == OPJIT_MN_MAJOR}, {b, b_major == OPJIT_MN_MAJOR}, add, numbers, EMU_CALL); \
    }
EMU_WGMMA(8, 4)
EMU_WGMMA(16, 8)
EMU_WGMMA(32, 16)
EMU_WGMMA(64, 32)
EMU_WGMMA(128, 64)
EMU_WGMMA(256, 128)

#endif
