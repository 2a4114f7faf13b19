/*
 * protocols.cu - each of two ranks writes its data, signals the other rank, waits for its signal, and reads its data:
 * run(way to signal, way to wait). tests/emulate/test_protocols.py lists the ways, right and wrong.
 */
#include "harness.h"

#include <thread>

extern "C" {
void emu_begin_ranks(int count);
void emu_conduct(void);
void emu_be_rank(int rank);
void emu_be_host(void);
void emu_end_ranks(void);
}

enum { RANKS = 2, THREADS = 64 };

struct peers {
    float *data[RANKS];
    unsigned *signal[RANKS];
    int rank;
};

__device__ static void signal_by(int way, unsigned *at)
{
    switch (way) {
    case 0: asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory"); break;
    case 1:
        __threadfence_system();
        atomicExch_system(at, 1u);
        break;
    case 2:
        __threadfence_system();
        *(volatile unsigned *)at = 1;
        break;
    case 3:
        __threadfence_system();
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory");
        break;
    case 4:
        __threadfence_system();
        atomicAdd_system(at, 1u);
        break;
    case 5:
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory");
        break;
    case 6: asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory"); break;
    case 7:
        asm volatile("membar.sys;" ::: "memory");
        atomicCAS_system(at, 0u, 1u);
        break;
    case 20: asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory"); break;
    case 21:
        __threadfence();
        atomicExch_system(at, 1u);
        break;
    case 22:
        __threadfence_system();
        atomicExch(at, 1u);
        break;
    case 23:
        __threadfence();
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory");
        break;
    case 24: atomicExch_system(at, 1u); break;
    case 25: asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory"); break;
    case 26:
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        *(volatile unsigned *)at = 1;
        break;
    case 27:
        __threadfence_block();
        atomicExch_system(at, 1u);
        break;
    case 28:
        __threadfence_system();
        asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory");
        break;
    case 29: asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory"); break;
    case 30:
        atomicExch_system(at, 1u);
        __threadfence_system();
        break;
    case 31:
        __threadfence();
        atomicExch(at, 1u);
        break;
    case 32: asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(1u) : "memory"); break;
    }
}

__device__ static unsigned look_by(int way, unsigned *at)
{
    unsigned seen = 0;
    switch (way) {
    case 0: asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory"); break;
    case 1:
    case 22:
    case 24:
    case 26: asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory"); break;
    case 2:
    case 23: seen = *(volatile unsigned *)at; break;
    case 3: seen = atomicAdd_system(at, 0u); break;
    case 4: asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory"); break;
    case 5: asm volatile("atom.acquire.sys.global.add.u32 %0, [%1], %2;" : "=r"(seen) : "l"(at), "r"(0u)); break;
    case 20: asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory"); break;
    case 21:
    case 25: seen = atomicAdd(at, 0u); break;
    case 27: asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory"); break;
    case 28: asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], %2;" : "=r"(seen) : "l"(at), "r"(0u)); break;
    }
    return seen;
}

__device__ static void fence_after(int way)
{
    switch (way) {
    case 1:
    case 2:
    case 3:
    case 21:
    case 27: __threadfence_system(); break;
    case 4: asm volatile("fence.sc.sys;" ::: "memory"); break;
    case 24: __threadfence(); break;
    case 26: __threadfence_block(); break;
    }
}

__global__ void exchange(peers p, float *out, int signals, int waits)
{
    const int t = threadIdx.x, other = 1 - p.rank;
    p.data[p.rank][t] = (float)(p.rank * THREADS + t);
    __syncthreads();
    if (t == 0) {
        signal_by(signals, p.signal[other]);
        if (waits == 22)
            __threadfence_system(); /* too early */
        while (!look_by(waits, p.signal[p.rank]))
            ;
        fence_after(waits);
    }
    __syncthreads();
    out[t] = p.data[other][t];
}

extern "C" __attribute__((visibility("default"))) bool run(int signals, int waits)
{
    device<float> data[RANKS] = {{"data 0", THREADS}, {"data 1", THREADS}};
    device<float> out[RANKS] = {{"out", THREADS, true}, {"out", THREADS, true}};
    device<unsigned> signal[RANKS] = {{"signal 0", 1}, {"signal 1", 1}};
    const peers all = {{data[0], data[1]}, {signal[0], signal[1]}, 0};
    std::vector<std::thread> ranks;
    emu_begin_ranks(RANKS);
    for (int r = 0; r < RANKS; r++)
        ranks.emplace_back([&, r] {
            peers own = all;
            own.rank = r;
            emu_be_rank(r);
            exchange<<<1, THREADS>>>(own, out[r], signals, waits);
            emu_be_host();
        });
    std::thread conductor(emu_conduct);
    for (std::thread &each : ranks)
        each.join();
    conductor.join();
    emu_end_ranks();
    bool right = true;
    for (int r = 0; r < RANKS; r++)
        for (int t = 0; t < THREADS; t++)
            right = right && out[r][t] == (1 - r) * THREADS + t;
    return right;
}
