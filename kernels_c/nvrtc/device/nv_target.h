/* nv_target.h - <nv/target> of CCCL, which cooperative groups include, where CCCL is not installed: code for some
 * archs, in parentheses or without them. */
#pragma once
#if __CUDA_ARCH__ >= 700
#define NV_PROVIDES_SM_70 1
#else
#define NV_PROVIDES_SM_70 0
#endif
#if __CUDA_ARCH__ >= 800
#define NV_PROVIDES_SM_80 1
#else
#define NV_PROVIDES_SM_80 0
#endif
#define OPJIT_BARE(...) OPJIT_BARE_1(OPJIT_SEEN __VA_ARGS__)
#define OPJIT_SEEN(...) OPJIT_SEEN __VA_ARGS__
#define OPJIT_BARE_1(...) OPJIT_BARE_2(__VA_ARGS__)
#define OPJIT_BARE_2(...) OPJIT_NO_##__VA_ARGS__
#define OPJIT_NO_OPJIT_SEEN
#define OPJIT_IF_1(yes, no) OPJIT_BARE(yes)
#define OPJIT_IF_0(yes, no) OPJIT_BARE(no)
#define OPJIT_IF(condition, yes, no) OPJIT_IF_##condition(yes, no)
#define NV_IF_ELSE_TARGET(condition, yes, no) OPJIT_IF(condition, yes, no)
#define NV_IF_TARGET(condition, yes) OPJIT_IF(condition, yes, ())
