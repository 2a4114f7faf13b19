/* cuda_runtime.h - The types of CUDA's runtime that a kernel's file may name in declarations. */
#pragma once
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
