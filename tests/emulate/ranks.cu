/*
 * ranks.cu - an all-reduce over four ranks, each a host thread: run(mistake, kernel) makes three calls. A mistake's number
 * stands at its lines, B1 and so on. Kernel 2 has a rank that does not come.
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

enum { RANKS = 4, BLOCKS = 2, THREADS = 64, N = 512, CALLS = 3 };

struct peers {
    float *buffer[RANKS];
    unsigned *signal[RANKS];
    int rank;
};

__device__ static void send(unsigned *to, unsigned epoch)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(epoch) : "memory");
}

__device__ static unsigned look(const unsigned *at)
{
    unsigned seen;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
    return seen;
}

template <int BUG>
__device__ void barrier(const peers &p, unsigned epoch)
{
    const int t = threadIdx.x;
    if (BUG != 5)
        __syncthreads();
    if (t < RANKS) {
        unsigned *theirs = p.signal[t] + blockIdx.x * RANKS + p.rank;
        unsigned *own = p.signal[p.rank] + blockIdx.x * RANKS + t;
        if (BUG == 1)
            atomicExch_system(theirs, epoch);
        else
            send(theirs, epoch);
        if (BUG == 2)
            while (atomicAdd_system(own, 0u) < epoch) {
            }
        else
            while (look(own) < (BUG == 7 ? epoch - 1 : epoch)) {
            }
    }
    __syncthreads();
}

template <int BUG>
__global__ void all_reduce(peers p, const float *in, float *out, unsigned call)
{
    int first = blockIdx.x * blockDim.x + threadIdx.x;
    const int step = gridDim.x * blockDim.x;
    for (int i = first; i < N; i += step)
        p.buffer[p.rank][i] = in[i]; // B1 B2 B3 B4 B5 B6 B7
    if (BUG != 3)
        barrier<BUG>(p, 2 * call + 1);
    if (BUG == 6)
        first = (first + blockDim.x) % step;
    for (int i = first; i < N; i += step) {
        float sum = 0;
        for (int r = 0; r < RANKS; r++)
            sum += p.buffer[r][i]; // B1 B2 B3 B4 B5 B6 B7
        out[i] = sum;
    }
    if (BUG != 4)
        barrier<BUG>(p, 2 * call + 2);
}

static void make_calls(int rank, const std::function<void(unsigned)> &call)
{
    emu_be_rank(rank);
    for (unsigned number = 0; number < CALLS; number++)
        call(number);
    emu_be_host();
}

template <int BUG>
bool run_kernel(int kernel)
{
    static const char *const buffers[] = {"buffer 0", "buffer 1", "buffer 2", "buffer 3"};
    std::vector<device<float>> buffer, in, out;
    std::vector<device<unsigned>> signals;
    buffer.reserve(RANKS); /* a copy does not own the memory */
    in.reserve(RANKS);
    out.reserve(RANKS);
    signals.reserve(RANKS);
    for (int r = 0; r < RANKS; r++) {
        buffer.emplace_back(buffers[r], (size_t)N);
        in.emplace_back("in", (size_t)N);
        out.emplace_back("out", (size_t)N, true);
        signals.emplace_back("signals", (size_t)BLOCKS * RANKS);
        for (int i = 0; i < N; i++)
            in[r][i] = (float)(r + i);
    }
    peers p;
    for (int r = 0; r < RANKS; r++) {
        p.buffer[r] = buffer[r].data;
        p.signal[r] = signals[r].data;
    }
    emu_begin_ranks(RANKS);
    std::vector<std::thread> ranks;
    for (int r = 0; r < RANKS; r++)
        ranks.emplace_back([&, r] {
            make_calls(r, [&, r](unsigned call) {
                peers own = p;
                own.rank = r;
                if (kernel == 1 || r != 2)
                    all_reduce<BUG><<<BLOCKS, THREADS>>>(own, in[r], out[r], call);
            });
        });
    std::thread conductor(emu_conduct);
    for (std::thread &each : ranks)
        each.join();
    conductor.join();
    emu_end_ranks();
    bool right = true;
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < N; i++)
            right = right && out[r][i] == 4 * i + 6;
    return right;
}

extern "C" __attribute__((visibility("default"))) bool run(int mistake, int kernel)
{
    return run_mistake<0, 7>(mistake, kernel);
}
