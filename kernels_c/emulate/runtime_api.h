/*
 * runtime_api.h - the CUDA runtime that host functions call. Memory is the host's, all streams are one, and a launch has
 * ended when it returns. The runtime library exports `emu_*` but not cuda*, because a process may also contain CUDA's library.
 */
#ifndef OPJIT_EMULATE_RUNTIME_API_H
#define OPJIT_EMULATE_RUNTIME_API_H

#include "assertion.h"
#include "intrinsics.h"

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorInvalidDevice = 101,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorAssert = 710,
    cudaErrorMisalignedAddress = 716,
    cudaErrorLaunchFailure = 719,
    cudaErrorCooperativeLaunchTooLarge = 720,
    cudaErrorNotSupported = 801,
} cudaError_t;

cudaError_t emu_last_error(bool clear);
cudaError_t emu_fail(cudaError_t error);
const char *emu_error_name(cudaError_t error);
const char *emu_error_text(cudaError_t error); /* a launch's finding */

/* Memory that kernels may access. `fresh` memory was not written yet. */
extern "C" {
void emu_see(const void *memory, size_t bytes, const char *name, bool fresh);
void emu_see_constant(const void *memory, size_t bytes, const char *name); /* kernels may only read it */
void emu_forget(const void *memory);
void emu_wrote(const void *memory, size_t bytes);
}
bool emu_may_copy(const char *verb, const void *memory, size_t bytes, bool is_device, emu_place at);
void *emu_allocate(size_t bytes);
bool emu_free(void *memory);
void *emu_allocate_tensor(size_t bytes);
void emu_free_tensor(void *memory);
bool emu_is_first_extension(void);
void (*emu_call_of(const void *function))(void **arguments); /* NULL if it is not a kernel */
cudaError_t emu_allow_shared(const void *function, size_t bytes);
int emu_resident_blocks(int threads, size_t shared);
int emu_multiprocessors(void);

EMU_OWN static cudaError_t cudaGetLastError(void)
{
    return emu_last_error(true);
}

EMU_OWN static cudaError_t cudaPeekAtLastError(void)
{
    return emu_last_error(false);
}

EMU_OWN static const char *cudaGetErrorName(cudaError_t error)
{
    return emu_error_name(error);
}

EMU_OWN static const char *cudaGetErrorString(cudaError_t error)
{
    return emu_error_text(error);
}

/* ---------------------------------------------------------------------------------------------- */
/* Devices                                                                                        */

enum {
    EMU_MULTIPROCESSORS = 4,
    EMU_THREADS_OF_MULTIPROCESSOR = 2048,
    EMU_THREADS_OF_BLOCK = 1024,
    EMU_SHARED = 48 << 10,       /* bytes of a block, by default */
    EMU_SHARED_OPTIN = 227 << 10 /* the most, as an H100's */
};

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxBlockDimX = 2,
    cudaDevAttrMaxGridDimX = 5,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrCooperativeLaunch = 95,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerMultiprocessor, sharedMemPerBlockOptin;
    int warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, multiProcessorCount;
    int maxThreadsDim[3], maxGridSize[3];
    int major, minor, clockRate, l2CacheSize, regsPerBlock, cooperativeLaunch;
};

EMU_OWN static cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int)
{
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX: *value = EMU_THREADS_OF_BLOCK; return cudaSuccess;
    case cudaDevAttrMaxGridDimX: *value = INT_MAX; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = EMU_SHARED; return cudaSuccess;
    case cudaDevAttrWarpSize: *value = 32; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = emu_multiprocessors(); return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = EMU_THREADS_OF_MULTIPROCESSOR; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrCooperativeLaunch: *value = 1; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = EMU_SHARED_OPTIN; return cudaSuccess;
    }
    return emu_fail(cudaErrorInvalidValue);
}

EMU_OWN static cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int)
{
    cudaDeviceProp known = {};
    strcpy(known.name, "emulated on the CPU");
    known.totalGlobalMem = (size_t)8 << 30;
    known.sharedMemPerBlock = EMU_SHARED;
    known.sharedMemPerMultiprocessor = known.sharedMemPerBlockOptin = EMU_SHARED_OPTIN;
    known.warpSize = 32;
    known.maxThreadsPerBlock = known.maxThreadsDim[0] = known.maxThreadsDim[1] = EMU_THREADS_OF_BLOCK;
    known.maxThreadsDim[2] = 64;
    known.maxGridSize[0] = INT_MAX;
    known.maxGridSize[1] = known.maxGridSize[2] = 65535;
    known.maxThreadsPerMultiProcessor = EMU_THREADS_OF_MULTIPROCESSOR;
    known.multiProcessorCount = emu_multiprocessors();
    known.major = 9;
    known.clockRate = 1000000;
    known.l2CacheSize = 1 << 20;
    known.regsPerBlock = 65536;
    known.cooperativeLaunch = 1;
    *properties = known;
    return cudaSuccess;
}

EMU_OWN static cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

EMU_OWN static cudaError_t cudaSetDevice(int device)
{
    return device == 0 ? cudaSuccess : emu_fail(cudaErrorInvalidDevice);
}

EMU_OWN static cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

EMU_OWN static cudaError_t cudaDeviceSynchronize(void)
{
    return emu_last_error(false);
}

EMU_OWN static cudaError_t cudaDeviceReset(void)
{
    return cudaSuccess;
}

/* ---------------------------------------------------------------------------------------------- */
/* Functions of the driver                                                                        */

/* cuTensorMapEncodeTiled. Returns a CUresult. */
int emu_encode_tiled(void *map, int type, uint32_t dim, void *data, const uint64_t *sizes, const uint64_t *strides,
                     const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int l2, int fill);

enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };

EMU_OWN static cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                                            unsigned long long,
                                                            cudaDriverEntryPointQueryResult *found = nullptr)
{
    const bool known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *function = known ? (void *)&emu_encode_tiled : nullptr;
    if (found)
        *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

EMU_OWN static cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                                   cudaDriverEntryPointQueryResult *found = nullptr)
{
    return cudaGetDriverEntryPointByVersion(name, function, 12000, flags, found);
}

/* ---------------------------------------------------------------------------------------------- */
/* Memory                                                                                         */

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

template <typename pointer>
EMU_OWN cudaError_t cudaMalloc(pointer **memory, size_t bytes)
{
    *memory = (pointer *)emu_allocate(bytes);
    return *memory ? cudaSuccess : emu_fail(cudaErrorMemoryAllocation);
}

template <typename pointer>
EMU_OWN cudaError_t cudaMallocAsync(pointer **memory, size_t bytes, cudaStream_t)
{
    return cudaMalloc(memory, bytes);
}

template <typename pointer>
EMU_OWN cudaError_t cudaMallocManaged(pointer **memory, size_t bytes, unsigned = 1)
{
    return cudaMalloc(memory, bytes);
}

template <typename pointer>
EMU_OWN cudaError_t cudaMallocHost(pointer **memory, size_t bytes)
{
    return cudaMalloc(memory, bytes);
}

EMU_OWN static cudaError_t cudaFree(void *memory)
{
    return emu_free(memory) ? cudaSuccess : emu_fail(cudaErrorInvalidValue);
}

EMU_OWN static cudaError_t cudaFreeAsync(void *memory, cudaStream_t)
{
    return cudaFree(memory);
}

EMU_OWN static cudaError_t cudaFreeHost(void *memory)
{
    return cudaFree(memory);
}

EMU_OWN static cudaError_t cudaMemset(void *memory, int value, size_t bytes, emu_place at = EMU_HERE)
{
    if (!emu_may_copy("writes", memory, bytes, true, at))
        return emu_fail(cudaErrorInvalidValue);
    memset(memory, value, bytes);
    emu_wrote(memory, bytes);
    return cudaSuccess;
}

EMU_OWN static cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t = nullptr,
                                           emu_place at = EMU_HERE)
{
    return cudaMemset(memory, value, bytes, at);
}

EMU_OWN static cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                      emu_place at = EMU_HERE)
{
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (!emu_may_copy("writes", to, bytes, to_device, at) || !emu_may_copy("reads", from, bytes, from_device, at))
        return emu_fail(cudaErrorInvalidValue);
    memmove(to, from, bytes);
    emu_wrote(to, bytes);
    return cudaSuccess;
}

EMU_OWN static cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                           cudaStream_t = nullptr, emu_place at = EMU_HERE)
{
    return cudaMemcpy(to, from, bytes, kind, at);
}

template <typename variable>
EMU_OWN cudaError_t cudaMemcpyToSymbol(variable &to, const void *from, size_t bytes, size_t offset = 0,
                                       cudaMemcpyKind = cudaMemcpyHostToDevice)
{
    memcpy((char *)&to + offset, from, bytes);
    return cudaSuccess;
}

template <typename variable>
EMU_OWN cudaError_t cudaMemcpyToSymbolAsync(variable &to, const void *from, size_t bytes, size_t offset = 0,
                                            cudaMemcpyKind = cudaMemcpyHostToDevice, cudaStream_t = nullptr)
{
    return cudaMemcpyToSymbol(to, from, bytes, offset);
}

template <typename variable>
EMU_OWN cudaError_t cudaMemcpyFromSymbol(void *to, const variable &from, size_t bytes, size_t offset = 0,
                                         cudaMemcpyKind = cudaMemcpyDeviceToHost)
{
    memcpy(to, (const char *)&from + offset, bytes);
    return cudaSuccess;
}

template <typename variable>
EMU_OWN cudaError_t cudaGetSymbolAddress(void **address, const variable &of)
{
    *address = (void *)&of;
    return cudaSuccess;
}

/* ---------------------------------------------------------------------------------------------- */
/* Streams and events: all work has been done when it is asked for                                */

typedef struct CUevent_st *cudaEvent_t;
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2 };

EMU_OWN static cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    *stream = nullptr;
    return cudaSuccess;
}

EMU_OWN static cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    return cudaStreamCreate(stream);
}

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };

EMU_OWN static cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *)
{
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EMU_OWN static cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = nullptr;
    return cudaSuccess;
}

EMU_OWN static cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    return cudaEventCreate(event);
}

EMU_OWN static cudaError_t cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t)
{
    return emu_fail(cudaErrorNotSupported); /* an emulated kernel is not timed */
}

#define EMU_DONE(name_, ...) \
    EMU_OWN static cudaError_t name_(__VA_ARGS__) \
    { \
        return cudaSuccess; \
    }
EMU_DONE(cudaStreamDestroy, cudaStream_t)
EMU_DONE(cudaStreamSynchronize, cudaStream_t)
EMU_DONE(cudaStreamQuery, cudaStream_t)
EMU_DONE(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned = 0)
EMU_DONE(cudaEventRecord, cudaEvent_t, cudaStream_t = nullptr)
EMU_DONE(cudaEventSynchronize, cudaEvent_t)
EMU_DONE(cudaEventQuery, cudaEvent_t)
EMU_DONE(cudaEventDestroy, cudaEvent_t)

/* ---------------------------------------------------------------------------------------------- */
/* Kernels as values                                                                              */

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaFuncCache {
    cudaFuncCachePreferNone,
    cudaFuncCachePreferShared,
    cudaFuncCachePreferL1,
    cudaFuncCachePreferEqual
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, maxDynamicSharedSizeBytes;
};

template <typename function>
EMU_OWN cudaError_t cudaFuncSetAttribute(function *kernel, cudaFuncAttribute attribute, int value)
{
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize)
        return emu_allow_shared((const void *)kernel, (size_t)value);
    return cudaSuccess;
}

template <typename function>
EMU_OWN cudaError_t cudaFuncSetCacheConfig(function *, cudaFuncCache)
{
    return cudaSuccess;
}

template <typename function>
EMU_OWN cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, function *)
{
    *attributes = {0, 0, EMU_THREADS_OF_BLOCK, 32, EMU_SHARED};
    return cudaSuccess;
}

template <typename function>
EMU_OWN cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, function *, int threads, size_t shared)
{
    *blocks = emu_resident_blocks(threads, shared);
    return cudaSuccess;
}

template <typename function>
EMU_OWN cudaError_t cudaOccupancyMaxPotentialBlockSize(int *grid, int *block, function *, size_t = 0, int limit = 0)
{
    *block = limit ? limit : EMU_THREADS_OF_BLOCK;
    *grid = emu_multiprocessors() * EMU_THREADS_OF_MULTIPROCESSOR / *block;
    return cudaSuccess;
}

EMU_OWN static cudaError_t emu_launch_by_address(const void *function, dim3 grid, dim3 block, void **arguments,
                                                 size_t shared, bool cooperative, emu_place at)
{
    void (*call)(void **) = emu_call_of(function);
    if (!call)
        return emu_fail(cudaErrorInvalidDeviceFunction);
    emu_configure({grid, block, shared, cooperative, at, dim3()});
    call(arguments);
    return emu_last_error(false);
}

template <typename function>
EMU_OWN cudaError_t cudaLaunchKernel(function *kernel, dim3 grid, dim3 block, void **arguments, size_t shared = 0,
                                     cudaStream_t = nullptr, emu_place at = EMU_HERE)
{
    return emu_launch_by_address((const void *)kernel, grid, block, arguments, shared, false, at);
}

enum cudaLaunchAttributeID {
    cudaLaunchAttributeCooperative = 2,
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};

struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    union {
        int cooperative, programmaticStreamSerializationAllowed;
        struct {
            unsigned x, y, z;
        } clusterDim;
    } val;
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

EMU_OWN static emu_configuration emu_configuration_of(const cudaLaunchConfig_t *how, emu_place at)
{
    emu_configuration found = {how->gridDim, how->blockDim, how->dynamicSmemBytes, false, at, dim3()};
    for (unsigned i = 0; i < how->numAttrs; i++) {
        const cudaLaunchAttribute &each = how->attrs[i];
        if (each.id == cudaLaunchAttributeCooperative)
            found.cooperative = each.val.cooperative != 0;
        else if (each.id == cudaLaunchAttributeClusterDimension)
            found.cluster = dim3(each.val.clusterDim.x, each.val.clusterDim.y, each.val.clusterDim.z);
    }
    return found;
}

template <typename function>
EMU_OWN cudaError_t cudaOccupancyMaxActiveClusters(int *count, function *, const cudaLaunchConfig_t *how)
{
    const dim3 size = how->blockDim, cluster = emu_configuration_of(how, EMU_HERE).cluster;
    const int blocks = emu_resident_blocks((int)(size.x * size.y * size.z), how->dynamicSmemBytes);
    *count = emu_multiprocessors() * blocks / (int)(cluster.x * cluster.y * cluster.z);
    return cudaSuccess;
}

template <typename... types, typename... values>
EMU_OWN cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *how, void (*kernel)(types...), values &&...arguments)
{
    emu_configure(emu_configuration_of(how, EMU_HERE));
    kernel(arguments...);
    emu_launched();
    return emu_last_error(false);
}

template <typename function>
EMU_OWN cudaError_t cudaLaunchCooperativeKernel(function *kernel, dim3 grid, dim3 block, void **arguments,
                                                size_t shared = 0, cudaStream_t = nullptr, emu_place at = EMU_HERE)
{
    return emu_launch_by_address((const void *)kernel, grid, block, arguments, shared, true, at);
}

#endif
