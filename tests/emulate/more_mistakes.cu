/*
 * more_mistakes.cu - 15 right kernels (BUG 0), and 30 mistakes of other kinds. A mistake's line is marked with "B<number>".
 */
#include "harness.h"
#include <assert.h>

/* 1: a moving sum with two buffers in shared memory */
template <int BUG>
__global__ void smooth(const float *x, float *y, int steps)
{
    __shared__ float now[128], next[128];
    const int t = threadIdx.x;
    now[t] = x[t];
    __syncthreads();
    for (int step = 0; step < steps; step++) {
        next[t] = now[t] + (BUG == 2 ? now[t + 1] : now[(t + 1) % 128]); // B2
        if (BUG != 1)
            __syncthreads();
        now[t] = next[(t + 127) % 128]; // B1
        __syncthreads();
    }
    y[t] = now[t];
    assert(BUG != 3 || t != 77); // B3
}

/* 2: each thread gets the block's sum */
template <int BUG>
__global__ void share_sum(const int *x, int *y, int n)
{
    __shared__ int sum;
    if (BUG != 4 && threadIdx.x == 0) // B4
        sum = 0;
    if (BUG != 5)
        __syncthreads();
    if (threadIdx.x < n)
        atomicAdd(&sum, x[threadIdx.x]); // B4 B5 B6
    if (BUG != 6)
        __syncthreads();
    y[threadIdx.x] = sum; // B6
}

/* 3: a warp transposes 8 x 4 through shared memory */
template <int BUG>
__global__ void turn(const float *x, float *y)
{
    __shared__ float tile[32];
    const int lane = threadIdx.x;
    tile[lane] = x[lane]; // B7
    if (BUG != 7)
        __syncwarp();
    y[lane] = tile[lane % 8 * 4 + lane / 8]; // B7
}

/* 4: the first lanes give their value to the warp */
template <int BUG>
__global__ void give(const int *x, int *y)
{
    const int lane = threadIdx.x;
    int value = x[lane];
    if (BUG == 8 && lane < 8)
        value = __shfl_sync(0xff, value, 20); // B8
    if (BUG == 9) {
        while (value < 8) {
            value++;
            if (__ballot_sync(0xffffffffu, value < 8) == 0) // B9
                break;
        }
    }
    y[lane] = BUG == 8 ? value : __shfl_sync(0xffffffffu, value, 3); // B9
}

/* 5: a matrix of 5 x 9, by blocks of 4 x 4 */
template <int BUG>
__global__ void scale_matrix(const float *x, float *y, int rows, int columns)
{
    const int row = blockIdx.y * 4 + threadIdx.y, column = blockIdx.x * 4 + threadIdx.x;
    const bool inside = row < rows && (BUG == 11 || column < columns);
    if (BUG == 10 ? column < columns : inside)
        y[BUG == 12 ? column * columns + row : row * columns + column] = 2 * x[row * columns + column]; // B10 B11 B12
}

/* 6: pairs of floats */
template <int BUG>
__global__ void add_pairs(const float *x, float *y, int n)
{
    const int i = threadIdx.x;
    if (i < n / 2) {
        const float2 pair = ((const float2 *)(x + (BUG == 13)))[i]; // B13
        y[i] = pair.x + pair.y;
    }
    if (BUG == 14 && i == 0)
        y[n] = x[-1]; // B14
}

/* 7: neighbors of other blocks */
template <int BUG>
__global__ void shift(float *x, float *y, int n)
{
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i + 1 < n)
        (BUG == 15 ? x : y)[i] = x[i + 1]; // B15
}

/* 8: a lock */
template <int BUG>
__global__ void locked(int *lock, int *count)
{
    if (threadIdx.x == 0) {
        while (atomicCAS(lock, 0, 1) != 0) { // B17
        }
        if (BUG != 16)
            __threadfence();
        *count += 1; // B16
        if (BUG != 16)
            __threadfence();
        if (BUG != 17)
            atomicExch(lock, 0);
    }
}

/* 9: barriers */
template <int BUG>
__global__ void meet(const float *x, float *y)
{
    __shared__ float s[64];
    const int t = threadIdx.x;
    s[t] = x[t];
    if (BUG == 18) {
        if (t < 32)
            __syncthreads(); // B18
        else
            __syncthreads(); // B18
    } else if (BUG == 19) {
        for (int i = 0; i <= t % 2; i++)
            __syncthreads(); // B19
    } else {
        __syncthreads();
    }
    y[t] = s[63 - t];
    if (BUG == 19)
        __syncthreads(); // B19
}

/* 10: a chain of blocks: each adds to the sum of the block before */
template <int BUG>
__global__ void chain(const int *x, int *sums, volatile int *ready)
{
    if (threadIdx.x)
        return;
    int sum = x[blockIdx.x];
    if (blockIdx.x) {
        while (BUG != 20 && !ready[blockIdx.x - 1]) {
        }
        if (BUG != 21)
            __threadfence();
        sum += sums[blockIdx.x - 1]; // B20 B21 B22
    }
    sums[blockIdx.x] = sum; // B20 B21 B22
    if (BUG != 22)
        __threadfence();
    ready[blockIdx.x] = 1;
}

/* 11: two arrays in dynamic shared memory */
template <int BUG>
__global__ void carve(const float *x, float *y)
{
    extern __shared__ float memory[];
    float *a = memory, *b = memory + (BUG == 23 ? 32 : 64);
    const int t = threadIdx.x;
    a[t] = x[t];     // B23
    b[t] = 2 * x[t]; // B23 B24
    __syncthreads();
    y[t] = a[63 - t] + b[63 - t];
}

/* 12: a bitonic sort */
template <int BUG>
__global__ void sort(int *x)
{
    __shared__ int s[128];
    const int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    for (int k = 2; k <= 128; k *= 2)
        for (int j = k / 2; j > 0; j /= 2) {
            const int other = t ^ j;
            if (other > t && (t & k ? s[t] < s[other] : s[t] > s[other])) { // B25
                const int swapped = s[t];
                s[t] = s[other];    // B25
                s[other] = swapped; // B25
            }
            if (BUG != 25)
                __syncthreads();
        }
    x[t] = s[t];
}

/* 13: counters of 16 bits, two in a word */
template <int BUG>
__global__ void count_pairs(const unsigned char *x, unsigned *counts)
{
    const unsigned place = x[threadIdx.x] % 8;
    if (BUG == 26)
        ((unsigned short *)counts)[place]++; // B26
    else
        atomicAdd(&counts[place / 2], place % 2 ? 1u << 16 : 1u);
}

/* 14: phases of a cooperative grid */
template <int BUG>
__global__ void normalize(const float *x, float *total, float *y)
{
    const int i = blockIdx.x * 32 + threadIdx.x;
    atomicAdd(total, x[i]); // B27
    if (BUG == 28 ? blockIdx.x > 0 : BUG != 27)
        cg::this_grid().sync(); // B28
    y[i] = x[i] / *total;       // B27 B28
}

/* 15: a tile of 8 threads */
template <int BUG>
__global__ void tiles(const int *x, int *y)
{
    __shared__ int s[64];
    cg::thread_block_tile<8> tile = cg::tiled_partition<8>(cg::this_thread_block());
    const int t = threadIdx.x;
    s[t] = x[t]; // B29 B30
    if (BUG != 29)
        tile.sync();
    int sum = 0;
    for (int i = 0; i < 8; i++)
        sum += s[t / 8 * 8 + i]; // B29
    y[t] = sum;
}

template <int BUG>
bool run_kernel(int kernel)
{
    device<float> x("x", 300), y("y", 300);
    device<int> ix("ix", 128), iy("iy", 128);
    bool right = true;
    for (int i = 0; i < 300; i++)
        x[i] = (float)(i * 7 % 13);
    for (int i = 0; i < 128; i++)
        ix[i] = i * 37 % 128;
    if (kernel == 1)
        smooth<BUG><<<1, 128>>>(x, y, 3);
    if (kernel == 2) {
        share_sum<BUG><<<1, 128>>>(ix, iy, 100);
        for (int i = 0, sum = 0; i < 100; i++, right &= i < 100 || iy[5] == sum)
            sum += ix[i];
    }
    if (kernel == 3)
        turn<BUG><<<1, 32>>>(x, y);
    if (kernel == 4)
        give<BUG><<<1, 32>>>(ix, iy);
    if (kernel == 5) {
        device<float> a("a", 45), b("b", 45, true);
        scale_matrix<BUG><<<dim3(3, 2), dim3(4, 4)>>>(a, b, 5, 9);
        emu_check_written(b, 4, "b");
    }
    if (kernel == 6) {
        device<float> a("a", 40), b("b", 20);
        add_pairs<BUG><<<1, 32>>>(a, b, 40);
    }
    if (kernel == 7)
        shift<BUG><<<2, 64>>>(x, y, 128);
    if (kernel == 8) {
        device<int> lock("lock", 1), count("count", 1);
        locked<BUG><<<4, 32>>>(lock, count);
        right = count[0] == 4;
    }
    if (kernel == 9)
        meet<BUG><<<1, 64>>>(x, y);
    if (kernel == 10) {
        device<int> sums("sums", 4), ready("ready", 4);
        chain<BUG><<<4, 32>>>(ix, sums, (volatile int *)(int *)ready);
        right = sums[3] == ix[0] + ix[1] + ix[2] + ix[3];
    }
    if (kernel == 11)
        carve<BUG><<<1, 64, BUG == 24 ? 96 * sizeof(float) : 128 * sizeof(float)>>>(x, y);
    if (kernel == 12) {
        sort<BUG><<<1, 128>>>(ix);
        for (int i = 0; i < 128; i++)
            right &= ix[i] == i;
    }
    if (kernel == 13) {
        device<unsigned char> bytes("bytes", 64);
        device<unsigned> counts("counts", 4);
        count_pairs<BUG><<<1, 64>>>(bytes, counts);
        right = counts[0] == 64;
    }
    if (kernel == 14) {
        device<float> total("total", 1);
        float *px = x, *pt = total, *py = y;
        void *arguments[] = {&px, &pt, &py};
        cudaLaunchCooperativeKernel(normalize<BUG>, 4, 32, arguments);
    }
    if (kernel == 15) {
        if (BUG == 30) {
            int *freed;
            cudaMalloc(&freed, 64 * sizeof(int));
            cudaFree(freed);
            tiles<BUG><<<1, 64>>>(freed, iy); // B30
        } else {
            tiles<BUG><<<1, 64>>>(ix, iy);
        }
    }
    return right && cudaGetLastError() == cudaSuccess;
}

extern "C" __attribute__((visibility("default"))) bool run(int bug, int kernel)
{
    cudaGetLastError();
    return run_mistake<0, 30>(bug, kernel);
}
