/*
 * opjit_streams.h - CUDA's streams, devices and guards as in torch's c10/cuda and ATen/cuda, for extensions with CUDA code.
 *
 * The functions are libc10_cuda's and libtorch_cuda's. CUDAStream has the size and the layout of torch's, as they return it; guards never
 * reach them.
 */
#pragma once

#include "opjit_torch.h"

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace c10::cuda
{

C10_CUDA_API DeviceIndex device_count() noexcept;
C10_CUDA_API DeviceIndex device_count_ensure_non_zero();
C10_CUDA_API DeviceIndex current_device();
C10_CUDA_API void device_synchronize();
C10_CUDA_API cudaError_t GetDevice(DeviceIndex *device);
C10_CUDA_API cudaError_t MaybeSetDevice(DeviceIndex device);
C10_CUDA_API DeviceIndex ExchangeDevice(DeviceIndex device);

/* Makes a device current, and later the one before. An index of -1 is the current device. */
struct CUDAGuard {
    explicit CUDAGuard(DeviceIndex index) : original_(0), current_(0)
    {
        original_ = index == -1 ? now() : ExchangeDevice(index);
        current_ = index == -1 ? original_ : index;
    }
    explicit CUDAGuard(Device device) : CUDAGuard(checked(device)) {}
    CUDAGuard(const CUDAGuard &) = delete;
    CUDAGuard &operator=(const CUDAGuard &) = delete;
    ~CUDAGuard()
    {
        try {
            C10_CUDA_CHECK_WARN(MaybeSetDevice(original_));
        } catch (const std::exception &error) {
            TORCH_WARN("uncheckedSetDevice() ignoring error: ", error.what());
        }
    }
    void set_device(Device device) { set_index(checked(device)); }
    void reset_device(Device device) { set_index(checked(device)); }
    void set_index(DeviceIndex index)
    {
        if (index == -1)
            return;
        ExchangeDevice(index);
        current_ = index;
    }
    Device original_device() const { return Device(DeviceType::CUDA, original_); }
    Device current_device() const { return Device(DeviceType::CUDA, current_); }

  private:
    static DeviceIndex checked(Device device)
    {
        TORCH_CHECK(device.is_cuda(), "Expected a CUDA device, but got ", device);
        return device.index();
    }
    static DeviceIndex now()
    {
        DeviceIndex device = 0;
        C10_CUDA_CHECK(GetDevice(&device));
        return device;
    }
    DeviceIndex original_, current_;
};

struct OptionalCUDAGuard {
    explicit OptionalCUDAGuard() = default;
    explicit OptionalCUDAGuard(std::optional<Device> device)
    {
        if (device)
            guard_.emplace(*device);
    }
    explicit OptionalCUDAGuard(std::optional<DeviceIndex> index)
    {
        if (index)
            guard_.emplace(*index);
    }
    OptionalCUDAGuard(const OptionalCUDAGuard &) = delete;
    OptionalCUDAGuard &operator=(const OptionalCUDAGuard &) = delete;
    void set_device(Device device)
    {
        if (guard_)
            guard_->set_device(device);
        else
            guard_.emplace(device);
    }
    void reset_device(Device device) { set_device(device); }
    void set_index(DeviceIndex index) { set_device(Device(DeviceType::CUDA, index)); }
    std::optional<Device> original_device() const
    {
        return guard_ ? std::make_optional(guard_->original_device()) : std::nullopt;
    }
    void reset() { guard_.reset(); }

  private:
    std::optional<CUDAGuard> guard_;
};

class C10_CUDA_API CUDAStream
{
  public:
    enum Unchecked { UNCHECKED };
    explicit CUDAStream(Stream stream) : stream_(stream) { TORCH_CHECK(stream_.device_type() == DeviceType::CUDA); }
    explicit CUDAStream(Unchecked, Stream stream) : stream_(stream) {}
    bool operator==(const CUDAStream &other) const noexcept { return unwrap() == other.unwrap(); }
    bool operator!=(const CUDAStream &other) const noexcept { return unwrap() != other.unwrap(); }
    operator cudaStream_t() const { return stream(); }
    operator Stream() const { return unwrap(); }
    DeviceType device_type() const { return DeviceType::CUDA; }
    DeviceIndex device_index() const { return stream_.device_index(); }
    Device device() const { return Device(DeviceType::CUDA, device_index()); }
    StreamId id() const { return stream_.id(); }
    bool query() const
    {
        CUDAGuard guard(device_index());
        cudaError_t error = cudaStreamQuery(stream());
        if (error == cudaErrorNotReady)
            (void)cudaGetLastError(); /* not an error */
        else
            C10_CUDA_CHECK(error);
        return error == cudaSuccess;
    }
    void synchronize() const
    {
        CUDAGuard guard(device_index());
        C10_CUDA_CHECK(cudaStreamSynchronize(stream()));
    }
    cudaStream_t stream() const;
    Stream unwrap() const { return stream_; }

  private:
    Stream stream_;
};

C10_CUDA_API CUDAStream getStreamFromPool(const bool high_priority = false, DeviceIndex device = -1);
C10_CUDA_API CUDAStream getStreamFromPool(const int priority, DeviceIndex device = -1);
C10_CUDA_API CUDAStream getStreamFromExternal(cudaStream_t stream, DeviceIndex device);
C10_CUDA_API CUDAStream getDefaultCUDAStream(DeviceIndex device = -1);
C10_CUDA_API CUDAStream getCurrentCUDAStream(DeviceIndex device = -1);
C10_CUDA_API void setCurrentCUDAStream(CUDAStream stream);
C10_CUDA_API std::ostream &operator<<(std::ostream &out, const CUDAStream &stream);

} // namespace c10::cuda

namespace at
{

inline std::optional<Device> device_of(const Tensor &tensor)
{
    return tensor.defined() ? std::make_optional(tensor.device()) : std::nullopt;
}
inline std::optional<Device> device_of(const std::optional<Tensor> &tensor)
{
    return tensor ? device_of(*tensor) : std::nullopt;
}

namespace cuda
{

using namespace c10::cuda;

inline int64_t getNumGPUs()
{
    return device_count();
}
inline bool is_available()
{
    return device_count() > 0;
}
TORCH_CUDA_CPP_API cudaDeviceProp *getCurrentDeviceProperties();
TORCH_CUDA_CPP_API cudaDeviceProp *getDeviceProperties(DeviceIndex device);
TORCH_CUDA_CPP_API int warp_size();
TORCH_CUDA_CPP_API bool canDeviceAccessPeer(DeviceIndex device, DeviceIndex peer);

} // namespace cuda
} // namespace at

#define AT_CUDA_CHECK(EXPR) C10_CUDA_CHECK(EXPR)
