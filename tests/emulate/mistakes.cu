/*
 * mistakes.cu - 13 right kernels (BUG 0), and 33 classic mistakes, one at a time. A mistake's line is marked with "B<number>".
 */
#include "harness.h"

// 1: tree reduction in shared memory
template <int BUG>
__global__ void tree(const float *x, float *out, int n)
{
    __shared__ float s[BUG == 5 ? 128 : 256];
    int t = threadIdx.x, i = blockIdx.x * 256 + t;
    if (BUG == 4) {
        if (i < n)
            s[t] = x[i];
    } else
        s[t] = i < n ? x[i] : 0; // B5
    if (BUG != 2)
        __syncthreads();
    for (int k = 128; k > 0; k /= 2) {
        if (t < k) {
            s[t] += s[t + k]; // B1 B2 B4
            if (BUG == 3)
                __syncthreads(); // B3
        }
        if (BUG != 1 && BUG != 3)
            __syncthreads();
    }
    if (t == 0) {
        if (BUG == 6)
            out[0] += s[0]; // B6
        else
            atomicAdd(out, s[0]);
    }
}
// 2: a row's softmax: two reductions over warps with the same shared memory
template <int BUG>
__device__ float block_max_or_sum(float v, bool is_max, float *s)
{
    unsigned mask = BUG == 9 ? 0xffffu : 0xffffffffu;
    for (int k = 16; k > 0; k /= 2) {
        float o = v;
        if (BUG != 8 || threadIdx.x % 32 < 16)
            o = __shfl_xor_sync(mask, v, k); // B8 B9
        v = is_max ? fmaxf(v, o) : v + o;
    }
    if (BUG != 7)
        __syncthreads();
    if (threadIdx.x % 32 == 0)
        s[threadIdx.x / 32] = v; // B7 B10
    __syncthreads();
    float r = s[0];
    for (int w = 1; w < 8; w++)
        r = is_max ? fmaxf(r, s[w]) : r + s[w]; // B7 B10
    return r;
}
template <int BUG>
__global__ void softmax(const float *x, float *y, int columns)
{
    extern __shared__ float of_warp[];
    const float *row = x + blockIdx.x * columns;
    float m = -1e30f, sum = 0;
    for (int i = threadIdx.x; i < columns; i += 256)
        m = fmaxf(m, row[i]);
    m = block_max_or_sum<BUG>(m, true, of_warp);
    for (int i = threadIdx.x; i < columns; i += 256)
        sum += expf(row[i] - m);
    sum = block_max_or_sum<BUG>(sum, false, of_warp);
    for (int i = threadIdx.x; i < columns; i += 256)
        y[blockIdx.x * columns + i] = expf(row[i] - m) / sum;
}
// 3: transpose by tiles
template <int BUG>
__global__ void transpose(const float *x, float *y, int rows, int columns)
{
    __shared__ float tile[16][17];
    int c = blockIdx.x * 16 + threadIdx.x, r = blockIdx.y * 16 + threadIdx.y;
    if (BUG == 12 || (c < columns && r < rows))
        tile[threadIdx.y][threadIdx.x] = x[r * columns + c]; // B12
    if (BUG != 11)
        __syncthreads();
    c = blockIdx.x * 16 + threadIdx.y;
    r = blockIdx.y * 16 + threadIdx.x;
    if (BUG == 13)
        r = r % 16;
    if (c < columns && r < rows)
        y[c * rows + r] = tile[threadIdx.x][threadIdx.y]; // B11 B13
}
// 4: matrix product by tiles
template <int BUG>
__global__ void matmul(const float *a, const float *b, float *c, int n)
{
    __shared__ float ta[16][16], tb[16][16];
    int row = blockIdx.y * 16 + threadIdx.y, col = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k += 16) {
        ta[threadIdx.y][threadIdx.x] = row < n && k + threadIdx.x < n ? a[row * n + k + threadIdx.x] : 0;   // B14
        tb[threadIdx.y][threadIdx.x] = col < n && k + threadIdx.y < n ? b[(k + threadIdx.y) * n + col] : 0; // B14
        __syncthreads();
        for (int i = 0; i < (BUG == 15 ? 17 : 16); i++)
            sum += ta[threadIdx.y][i] * tb[i][threadIdx.x]; // B15
        if (BUG != 14)
            __syncthreads();
    }
    if (row < n && col < n)
        c[row * n + col] = sum;
}
// 5: histogram
template <int BUG>
__global__ void histogram(const unsigned char *x, unsigned *out, int n)
{
    __shared__ unsigned bins[256];
    if (BUG != 17)
        bins[threadIdx.x] = 0; // B18
    if (BUG != 18)
        __syncthreads();
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) {
        if (BUG == 16)
            bins[x[i]]++; // B16
        else
            atomicAdd(&bins[x[i]], 1u); // B17 B18
    }
    __syncthreads();
    atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
}
// 6: inclusive scan
template <int BUG>
__global__ void scan(const int *x, int *y, int n)
{
    __shared__ int s[256];
    int t = threadIdx.x;
    s[t] = t < n ? x[t] : 0;
    __syncthreads();
    for (int k = 1; k < 256; k *= 2) {
        int v = t >= k ? s[t - k] : 0; // B19
        if (BUG != 19)
            __syncthreads();
        s[t] += v; // B19
        __syncthreads();
        if (BUG == 35 && t < k)
            break;
        if (BUG == 35)
            __syncthreads(); // B35
    }
    if (t < n)
        y[t] = s[t];
}
// 7: the last block adds the blocks' sums
template <int BUG>
__global__ void last_block(const float *x, float *of_block, unsigned *count, float *out, int n)
{
    __shared__ float s[8];
    __shared__ bool last;
    float v = 0;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256)
        v += x[i];
    for (int k = 16; k > 0; k /= 2)
        v += __shfl_down_sync(0xffffffffu, v, k);
    if (threadIdx.x % 32 == 0)
        s[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; w++)
            v += s[w];
        of_block[blockIdx.x] = v; // B20
        if (BUG != 20)
            __threadfence();
        if (BUG == 21)
            last = ++*count == gridDim.x; // B21
        else
            last = atomicAdd(count, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        v = 0;
        for (unsigned b = 0; b < gridDim.x; b++)
            v += of_block[b]; // B20
        *out = v;
    }
}
// 8: copy by 16 bytes
template <int BUG>
__global__ void copy4(const float *x, float *y, int n)
{
    int i = blockIdx.x * 256 + threadIdx.x;
    int packs = BUG == 23 ? (n + 3) / 4 : n / 4;
    if (i < packs)
        ((float4 *)y)[i] = ((const float4 *)x)[i]; // B22 B23
    if (i < n - packs * 4)
        y[packs * 4 + i] = x[packs * 4 + i];
}
// 9: stencil with a halo
template <int BUG>
__global__ void stencil(const float *x, float *y, int n)
{
    __shared__ float s[258];
    int t = threadIdx.x, i = blockIdx.x * 256 + t;
    s[t + 1] = i < n ? x[i] : 0;
    if (t == 0)
        s[0] = i > 0 ? x[i - 1] : 0;
    if (BUG != 24 && t == 255)
        s[257] = i + 1 < n ? x[i + 1] : 0;
    __syncthreads();
    if (i < n)
        y[i] = s[t] + s[t + 1] + s[t + 2]; // B24
}
// 10: a grid-stride loop
template <int BUG>
__global__ void __launch_bounds__(BUG == 27 ? 128 : 256) axpy(float a, const float *x, float *y, int n) // B27
{                                                                                                       // B27
    int step = BUG == 26 ? blockDim.x : blockDim.x * gridDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; BUG == 25 ? i <= n : i < n; i += step)
        y[i] += a * x[i]; // B25 B26
}
// 11: a warp's sum in shared memory, without shuffles
template <int BUG>
__global__ void warp_sum(const float *x, float *y)
{
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * 64 + t];
    __syncthreads();
    if (t < 32) {
        float v = s[t] + s[t + 32];
        if (BUG != 28)
            __syncwarp();
        s[t] = v; // B28
        if (BUG != 28)
            __syncwarp();
        for (int k = 16; k > 0; k /= 2) {
            if (t < k)
                v += s[t + k]; // B28
            if (BUG != 28)
                __syncwarp();
            if (t < k)
                s[t] = v; // B28
            if (BUG != 28)
                __syncwarp();
        }
        if (t == 0)
            y[blockIdx.x] = s[0];
    }
}
// 12: two phases of a cooperative grid, and a block that waits for another one
template <int BUG>
__global__ void phases(const float *x, float *part, float *y, int n)
{
    int i = blockIdx.x * 64 + threadIdx.x;
    part[i] = 2 * x[i]; // B29
    if (BUG != 29)
        cg::this_grid().sync();
    y[i] = part[n - 1 - i]; // B29
}
template <int BUG>
__global__ void hand_over(float *data, volatile int *flag, float *out)
{
    if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x; // B30
        if (BUG != 30)
            __threadfence();
        __syncthreads();
        if (threadIdx.x == 0 && BUG != 31)
            *flag = 1;
    } else {
        if (threadIdx.x == 0)
            while (*flag == 0) { // B31
            }
        if (BUG != 30)
            __threadfence();
        __syncthreads();
        out[threadIdx.x] = data[threadIdx.x] + 1; // B30
    }
}
template <int BUG>
bool run_kernel(int k)
{
    const int n = 1000;
    bool ok = true;
    device<float> x("x", 4 * n), y("y", 4 * n);
    for (int i = 0; i < 4 * n; i++)
        x[i] = (i * 7 % 13) - 5;
    if (k == 1) {
        tree<BUG><<<4, BUG == 33 ? 2048 : 256>>>(x, y, n);
        float w = 0;
        for (int i = 0; i < n; i++)
            w += x[i];
        ok = is_near(y[0], w);
    }
    if (k == 2) {
        softmax<BUG><<<5, 256, BUG == 10 ? 8 : 8 * sizeof(float)>>>(x, y, 700);
        for (int r = 0; r < 5; r++) {
            float s = 0;
            for (int i = 0; i < 700; i++)
                s += y[r * 700 + i];
            ok &= is_near(s, 1);
        }
    }
    if (k == 3) {
        device<float> a("a", 50 * 70), b("b", 70 * 50, true);
        for (int i = 0; i < 3500; i++)
            a[i] = i;
        transpose<BUG><<<dim3(5, 4), dim3(16, 16)>>>(a, b, 50, 70);
        emu_check_written(b, 4, "b");
        for (int i = 0; i < 3500; i++)
            ok &= b[i % 70 * 50 + i / 70] == i;
    }
    if (k == 4) {
        int m = 40;
        device<float> a("a", m * m), b("b", m * m), c("c", m * m, true);
        for (int i = 0; i < m * m; i++)
            a[i] = i % 7, b[i] = i % 5;
        matmul<BUG><<<dim3(3, 3), dim3(16, 16)>>>(a, b, c, m);
        for (int i = 0; i < m * m; i++) {
            float w = 0;
            for (int j = 0; j < m; j++)
                w += a[i / m * m + j] * b[j * m + i % m];
            ok &= c[i] == w;
        }
    }
    if (k == 5) {
        device<unsigned char> a("a", n);
        device<unsigned> o("out", 256);
        for (int i = 0; i < n; i++)
            a[i] = i * i;
        histogram<BUG><<<3, 256>>>(a, o, n);
        std::vector<unsigned> w(256);
        for (int i = 0; i < n; i++)
            w[a[i]]++;
        for (int i = 0; i < 256; i++)
            ok &= w[i] == o[i];
    }
    if (k == 6) {
        device<int> a("a", 200), o("out", 200, true);
        for (int i = 0; i < 200; i++)
            a[i] = i % 9;
        scan<BUG><<<1, 256>>>(a, o, 200);
        int w = 0;
        for (int i = 0; i < 200; i++) {
            w += a[i];
            ok &= o[i] == w;
        }
    }
    if (k == 7) {
        device<float> p("of_block", 8, true), o("out", 1, true);
        device<unsigned> c("count", 1);
        last_block<BUG><<<8, 256>>>(x, p, c, o, n);
        float w = 0;
        for (int i = 0; i < n; i++)
            w += x[i];
        ok = is_near(o[0], w);
    }
    if (k == 8) {
        int m = 999;
        device<float> a("a", 1003), b("b", 1003);
        for (int i = 0; i < 1003; i++)
            a[i] = i;
        float *from = a, *to = b;
        if (BUG == 22)
            from += 1, to += 1;
        if (BUG == 23) {
            emu_forget(from);
            emu_see(from, m * 4, "a", false);
            emu_forget(to);
            emu_see(to, m * 4, "b", false);
        }
        copy4<BUG><<<1, 256>>>(from, to, m);
        for (int i = 0; i < m; i++)
            ok &= to[i] == from[i];
    }
    if (k == 9) {
        device<float> o("out", n, true);
        stencil<BUG><<<4, 256>>>(x, o, n);
        for (int i = 1; i < n - 1; i++)
            ok &= o[i] == x[i - 1] + x[i] + x[i + 1];
    }
    if (k == 10) {
        device<float> a("a", n), o("out", n);
        for (int i = 0; i < n; i++)
            a[i] = i, o[i] = 1;
        axpy<BUG><<<BUG == 34 ? 2 : 3, 256>>>(2, a, o, n);
        for (int i = 0; i < n; i++)
            ok &= o[i] == 2 * i + 1;
    }
    if (k == 11) {
        device<float> o("out", 5, true);
        warp_sum<BUG><<<5, 64>>>(x, o);
        for (int b = 0; b < 5; b++) {
            float w = 0;
            for (int i = 0; i < 64; i++)
                w += x[b * 64 + i];
            ok &= is_near(o[b], w);
        }
    }
    if (k == 12) {
        int m = 256;
        device<float> a("a", m), p("part", m, true), o("out", m, true);
        for (int i = 0; i < m; i++)
            a[i] = i;
        int mm = m;
        float *pa = a, *pp = p, *po = o;
        void *args[] = {&pa, &pp, &po, &mm};
        cudaLaunchCooperativeKernel(phases<BUG>, 4, 64, args);
        for (int i = 0; i < m; i++)
            ok &= o[i] == 2 * (m - 1 - i);
    }
    if (k == 13) {
        device<float> d("data", 64, true), o("out", 64, true);
        device<int> f("flag", 1);
        hand_over<BUG><<<2, 64>>>(d, (volatile int *)(int *)f, o);
        for (int i = 0; i < 64; i++)
            ok &= o[i] == i + 1;
    }
    return ok && cudaGetLastError() == cudaSuccess;
}

extern "C" __attribute__((visibility("default"))) bool run(int bug, int kernel)
{
    cudaGetLastError();
    return run_mistake<0, 35>(bug, kernel);
}
