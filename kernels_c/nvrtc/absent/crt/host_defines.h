/*
 * crt/host_defines.h - for a CUDA that pip installed. Its headers include a header of nvcc with this name, but do not
 * contain it. Only the host's part of a split .cu file reads it.
 */
#ifndef __HOST_DEFINES_H__
#define __HOST_DEFINES_H__

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __no_return__ __attribute__((noreturn))
#undef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#define __inline_hint__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __location__(space)
#define __specialization_static
#define __CUDA_ARCH_HAS_FEATURE__(feature) 0
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__

#define __host__
#define __device__
#define __global__

#endif
