/*
 * torch_cuda.h - the names of torch's C++ API for CUDA that extensions use: streams, guards, checks and properties. Tensors
 * are the CPU's, there is one device, and every stream is the default one. The source includes torch's headers first.
 */
#ifndef OPJIT_EMULATE_TORCH_CUDA_H
#define OPJIT_EMULATE_TORCH_CUDA_H

#include "runtime_api.h"

#ifdef OPJIT_EMULATE_CHECKED
/* Gives tensors of the CPU guards, from the first extension in a process on, so that the checks see accesses out of bounds. */
struct emu_tensor_allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        void *memory = emu_allocate_tensor(bytes);
        TORCH_CHECK(memory || !bytes, "out of memory: ", bytes, " bytes");
        return {memory, memory, &emu_free_tensor, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &emu_free_tensor; }
    void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

static emu_tensor_allocator emu_tensors;
static const bool emu_tensors_have_guards =
    emu_is_first_extension() && (c10::SetAllocator(c10::DeviceType::CPU, &emu_tensors, 1), true);
#endif

namespace c10
{
namespace cuda
{
struct CUDAStream {
    cudaStream_t stream() const { return nullptr; }
    operator cudaStream_t() const { return nullptr; }
    void synchronize() const {}
};

inline CUDAStream getCurrentCUDAStream(int = -1)
{
    return {};
}

inline CUDAStream getDefaultCUDAStream(int = -1)
{
    return {};
}

inline CUDAStream getStreamFromPool(bool = false, int = -1)
{
    return {};
}

/* A guard of a device or a stream, which can only be the one that there is. */
struct CUDAGuard {
    template <typename... arguments>
    explicit CUDAGuard(arguments &&...)
    {
    }
};
struct OptionalCUDAGuard : CUDAGuard {
    using CUDAGuard::CUDAGuard;
};
struct CUDAStreamGuard : CUDAGuard {
    using CUDAGuard::CUDAGuard;
};
inline int current_device()
{
    return 0;
}
inline int device_count()
{
    return 1;
}
} // namespace cuda
} // namespace c10

namespace at
{
/* Torch has it for nvcc only. */
template <typename element>
struct RestrictPtrTraits {
    typedef element *__restrict__ PtrType;
};

namespace cuda
{
using namespace c10::cuda;

inline cudaDeviceProp *getCurrentDeviceProperties()
{
    static cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, 0);
    return &properties;
}

inline cudaDeviceProp *getDeviceProperties(int)
{
    return getCurrentDeviceProperties();
}

inline int warp_size()
{
    return warpSize;
}
} // namespace cuda
} // namespace at

#define C10_CUDA_CHECK(call_) \
    do { \
        const cudaError_t error_ = call_; \
        TORCH_CHECK(error_ == cudaSuccess, "CUDA error: ", cudaGetErrorString(error_)); \
    } while (0)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
#define AT_CUDA_CHECK C10_CUDA_CHECK
#define CUDA_KERNEL_LOOP(i, n) \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (int64_t)blockDim.x * gridDim.x)

#endif
