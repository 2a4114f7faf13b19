/* libraries.h - Handles of CUDA's libraries. Only the host calls their functions. */
#pragma once
typedef struct cublasContext *cublasHandle_t;
typedef struct cublasLtContext *cublasLtHandle_t;
typedef struct cudnnContext *cudnnHandle_t;
typedef struct ncclComm *ncclComm_t;
typedef int cufftHandle;
typedef struct curandGenerator_st *curandGenerator_t;
typedef struct cusolverDnContext *cusolverDnHandle_t;
typedef struct cusparseContext *cusparseHandle_t;
