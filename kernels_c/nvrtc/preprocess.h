/*
 * preprocess.h - what nvcc's preprocessor sees before a .cu file, for the C++ compiler in its place.
 *
 * The resulting text is divided into the host's part and the device's part, so nvcc's keywords are not changed.
 */
#include <cuda_runtime.h>

#undef __CUDACC__
#define __CUDACC__ 1
#define __NVCC__ 1

#define __host__ __host__
#define __device__ __device__
#define __global__ __global__
#define __shared__ __shared__
#define __constant__ __constant__
#define __managed__ __managed__
#define __grid_constant__ __grid_constant__
#define __launch_bounds__ __launch_bounds__
#define __cluster_dims__ __cluster_dims__
#define __block_size__ __block_size__
#define __maxnreg__ __maxnreg__
#define __nv_pure__ __nv_pure__
#undef __forceinline__
#undef __noinline__
#undef __align__
#undef __builtin_align__
#define __forceinline__ __forceinline__
#define __noinline__ __noinline__
#define __align__ __align__
#define __builtin_align__ __builtin_align__
