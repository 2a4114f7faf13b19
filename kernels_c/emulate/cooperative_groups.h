/*
 * cooperative_groups.h - the most used groups: the block, the grid, tiles of a warp and its active lanes.
 */
#ifndef OPJIT_EMULATE_COOPERATIVE_GROUPS_H
#define OPJIT_EMULATE_COOPERATIVE_GROUPS_H

#include "intrinsics.h"

namespace cooperative_groups
{

struct thread_block {
    void sync(emu_place at = EMU_HERE) const { emu_block_barrier(EMU_NO_VOTE, 0, at); }
    unsigned thread_rank() const { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    unsigned size() const { return blockDim.x * blockDim.y * blockDim.z; }
    unsigned num_threads() const { return size(); }
    dim3 group_index() const { return blockIdx; }
    dim3 thread_index() const { return threadIdx; }
    dim3 group_dim() const { return blockDim; }
    dim3 dim_threads() const { return blockDim; }
};

struct grid_group {
    void sync(emu_place at = EMU_HERE) const { emu_grid_barrier(at); }
    bool is_valid() const { return true; }
    unsigned long long num_blocks() const { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z; }
    unsigned long long block_rank() const
    {
        return blockIdx.x + (unsigned long long)gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    }
    unsigned long long size() const { return num_blocks() * thread_block().size(); }
    unsigned long long num_threads() const { return size(); }
    unsigned long long thread_rank() const
    {
        return block_rank() * thread_block().size() + thread_block().thread_rank();
    }
    dim3 group_dim() const { return gridDim; }
};

/* Lanes of a warp, by their mask. */
struct coalesced_group {
    unsigned mask;
    void sync(emu_place at = EMU_HERE) const { emu_warp_barrier(mask, at); }
    unsigned size() const { return (unsigned)__popc(mask); }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const { return (unsigned)__popc(mask & ((1u << emu_lane) - 1)); }
};

template <unsigned lanes, typename parent = void>
struct thread_block_tile {
    static_assert(lanes <= 32, "a tile of more than a warp is not emulated");
    unsigned first() const { return (unsigned)emu_lane / lanes * lanes; }
    unsigned mask() const { return lanes == 32 ? 0xffffffffu : ((1u << lanes % 32) - 1) << first(); }
    void sync(emu_place at = EMU_HERE) const { emu_warp_barrier(mask(), at); }
    static constexpr unsigned size() { return lanes; }
    static constexpr unsigned num_threads() { return lanes; }
    unsigned thread_rank() const { return (unsigned)emu_lane % lanes; }
    unsigned meta_group_rank() const { return thread_block().thread_rank() / lanes; }
    unsigned meta_group_size() const { return (thread_block().size() + lanes - 1) / lanes; }

    template <typename value>
    value shfl(value own, int source, emu_place at = EMU_HERE) const
    {
        return __shfl_sync(mask(), own, source, lanes, at);
    }
    template <typename value>
    value shfl_xor(value own, int with, emu_place at = EMU_HERE) const
    {
        return __shfl_xor_sync(mask(), own, with, lanes, at);
    }
    template <typename value>
    value shfl_down(value own, unsigned by, emu_place at = EMU_HERE) const
    {
        return __shfl_down_sync(mask(), own, by, lanes, at);
    }
    template <typename value>
    value shfl_up(value own, unsigned by, emu_place at = EMU_HERE) const
    {
        return __shfl_up_sync(mask(), own, by, lanes, at);
    }
    unsigned ballot(int own, emu_place at = EMU_HERE) const { return __ballot_sync(mask(), own, at) >> first(); }
    int any(int own, emu_place at = EMU_HERE) const { return __any_sync(mask(), own, at); }
    int all(int own, emu_place at = EMU_HERE) const { return __all_sync(mask(), own, at); }
};

EMU_OWN static thread_block this_thread_block()
{
    return {};
}

EMU_OWN static grid_group this_grid()
{
    return {};
}

EMU_OWN static coalesced_group coalesced_threads()
{
    return {__activemask()};
}

template <unsigned lanes, typename group>
EMU_OWN thread_block_tile<lanes> tiled_partition(const group &)
{
    return {};
}

template <typename group>
EMU_OWN void sync(const group &of, emu_place at = EMU_HERE)
{
    of.sync(at);
}

#define EMU_OPERATION(name_, expression_) \
    template <typename value> \
    struct name_ { \
        value operator()(value a, value b) const { return expression_; } \
    };
EMU_OPERATION(plus, a + b)
EMU_OPERATION(less, a < b ? a : b)
EMU_OPERATION(greater, a > b ? a : b)
EMU_OPERATION(bit_and, a &b)
EMU_OPERATION(bit_or, a | b)
EMU_OPERATION(bit_xor, a ^ b)

template <unsigned lanes, typename parent, typename value, typename function>
EMU_OWN value reduce(const thread_block_tile<lanes, parent> &tile, value own, function combine, emu_place at = EMU_HERE)
{
    return emu_warp_reduce("cooperative_groups::reduce", tile.mask(), own, combine, at);
}

} // namespace cooperative_groups

#endif
