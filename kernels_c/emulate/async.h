/*
 * async.h - what runs while the thread that started it goes on, for tensor_cores.h: copies, mbarriers and products.
 */
#ifndef OPJIT_EMULATE_ASYNC_H
#define OPJIT_EMULATE_ASYNC_H

#include "language.h"

/* A call of the author's: the code that it returns to, and its place. */
struct emu_caller {
    const void *code;
    emu_place at;
};

enum emu_number { EMU_BFLOAT16, EMU_FLOAT16 };

/* An operand of wgmma in shared memory. */
struct emu_operand {
    uint64_t descriptor;
    bool is_mn_major;
};

void emu_see_row(const char *what, const void *row, bool write, emu_caller by); /* 16 bytes of shared memory */
uint32_t emu_shared_address(const void *shared, emu_caller by);
void emu_named_barrier(int number, int threads, emu_caller by);
void emu_copy_async(void *shared, const void *from, int bytes, emu_caller by);
void emu_copy_commit(void);
void emu_copy_wait(int pending);
void emu_mbarrier_init(void *barrier, unsigned count, emu_caller by);
void emu_mbarrier_arrive(void *barrier, unsigned bytes, emu_caller by);
void emu_mbarrier_arrive_at(void *barrier, unsigned rank, emu_caller by);
void emu_mbarrier_wait(void *barrier, unsigned parity, emu_caller by);
void emu_mbarriers_are_ready(void);
unsigned emu_cluster_rank(void);
void emu_cluster_barrier(emu_place at);
void emu_cluster_read(void *to, const void *shared, size_t bytes, unsigned rank, emu_caller by);
void emu_proxy_fence(void);
void emu_tile_load(void *shared, const void *map, void *barrier, int dim, const int *first, int mask, emu_caller by);
void emu_tile_store(const void *map, const void *shared, int dim, const int *first, emu_caller by);
void emu_tile_commit(void);
void emu_tile_wait(int pending);
void emu_tile_of_wgmma(const void *shared, emu_caller by);
void emu_wgmma_fence(void);
void emu_wgmma(float *d, int columns, emu_operand a, emu_operand b, bool add, emu_number numbers, emu_caller by);
void emu_wgmma_commit(void);
void emu_wgmma_wait(int pending, emu_caller by);

#endif
