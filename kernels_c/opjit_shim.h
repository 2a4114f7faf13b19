/*
 * opjit_shim.h - the part of torch's stable C interface that opjit calls.
 *
 * torch's headers are C++ and need seconds to compile, so the prototypes are repeated here in C.
 * The list is complete: ops and glue call nothing else in libtorch, so one binary serves every torch
 * from 2.10 on. If you write an op you need not read on; opjit.h wraps it all.
 *
 * A function that came after 2.10 is weak, and the comment at its declaration names the version: a binary also loads
 * where it is missing. Functions of CUDA are in libtorch_cuda, all other functions in libtorch_cpu.
 *
 * Sources: torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h and
 * torch/csrc/stable/c/shim_function_versions.txt of pytorch/pytorch.
 */
#ifndef OPJIT_SHIM_H
#define OPJIT_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t torch_error;   /* 0 is success */
typedef uint64_t torch_ivalue; /* one boxed argument or result: a number, or a handle that owns */
typedef struct torch_tensor_opaque *torch_tensor;
typedef struct torch_list_opaque *torch_list;
typedef struct torch_string_opaque *torch_string;
typedef struct torch_library_opaque *torch_library;
typedef struct torch_guard_opaque *torch_guard;
typedef struct torch_generator_opaque *torch_generator;
typedef void torch_boxed_kernel(torch_ivalue *stack, uint64_t num_args, uint64_t num_outputs);

/* The interface version to pass to torch_library_impl: 2.10, the oldest supported. */
#define OPJIT_TORCH_FLOOR UINT64_C(0x020a000000000000)

/* Tensors. Sizes and strides are borrowed from the tensor and counted in elements. */
torch_error torch_get_const_data_ptr(torch_tensor tensor, const void **data);
torch_error torch_get_mutable_data_ptr(torch_tensor tensor, void **data);
torch_error aoti_torch_get_sizes(torch_tensor tensor, int64_t **sizes);
torch_error aoti_torch_get_strides(torch_tensor tensor, int64_t **strides);
torch_error aoti_torch_get_dim(torch_tensor tensor, int64_t *dim);
torch_error aoti_torch_get_dtype(torch_tensor tensor, int32_t *dtype);
torch_error aoti_torch_get_device_type(torch_tensor tensor, int32_t *device_type);
torch_error aoti_torch_get_device_index(torch_tensor tensor, int32_t *device_index);
torch_error aoti_torch_delete_tensor_object(torch_tensor tensor);
torch_error aoti_torch_empty_strided(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                     int32_t device_type, int32_t device_index, torch_tensor *result);
/* A view of another tensor's memory; the offset is counted from that tensor's first element. */
torch_error aoti_torch__reinterpret_tensor(torch_tensor self, int64_t dim, const int64_t *sizes, const int64_t *strides,
                                           int64_t offset, torch_tensor *result);
torch_error aoti_torch_copy_(torch_tensor self, torch_tensor source, int32_t non_blocking);

/* Modes. */
bool aoti_torch_grad_mode_is_enabled(void);
void aoti_torch_grad_mode_set_enabled(bool enabled);

/* torch's numbers for dtypes and devices: no part of the interface, so read at run time. */
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_dtype_bool(void);
int32_t aoti_torch_dtype_uint8(void);
int32_t aoti_torch_dtype_int8(void);
int32_t aoti_torch_dtype_int16(void);
int32_t aoti_torch_dtype_int32(void);
int32_t aoti_torch_dtype_int64(void);
int32_t aoti_torch_dtype_uint16(void);
int32_t aoti_torch_dtype_uint32(void);
int32_t aoti_torch_dtype_uint64(void);
int32_t aoti_torch_dtype_float8_e4m3fn(void);
int32_t aoti_torch_dtype_float8_e5m2(void);
int32_t aoti_torch_dtype_float16(void);
int32_t aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_float64(void);
int32_t aoti_torch_dtype_complex64(void);
int32_t aoti_torch_dtype_complex128(void);

/* Lists, strings and optionals of a boxed call. */
torch_error torch_new_list_reserve_size(size_t size, torch_list *list);
torch_error torch_list_push_back(torch_list list, torch_ivalue item);
torch_error torch_list_size(torch_list list, size_t *size);
torch_error torch_list_get_item(torch_list list, size_t index, torch_ivalue *item);
torch_error torch_delete_list(torch_list list);
torch_error torch_string_c_str(torch_string string, const char **text);
torch_error torch_delete_string(torch_string string);
__attribute__((weak)) torch_error torch_delete_stable_ivalue(torch_ivalue *cell); /* 2.13 */
__attribute__((weak)) torch_error torch_new_stable_ivalue(torch_ivalue **cell);   /* 2.13 */
__attribute__((weak)) void *_Znwm(size_t bytes); /* C++ operator new: makes a cell up to 2.12 */
__attribute__((weak)) void _ZdlPv(void *cell);   /* C++ operator delete: frees a cell up to 2.12 */

/* A generator's handle. Up to 2.12, torch passes an op no generator but None. */
__attribute__((weak)) torch_error torch_new_generator_handle(torch_generator self, torch_generator *copy); /* 2.13 */
__attribute__((weak)) torch_error torch_delete_generator(torch_generator generator);                       /* 2.13 */

/* Call an op of torch. It consumes the values of the stack, even if it fails, and puts its results there. */
torch_error torch_call_dispatcher(const char *name, const char *overload, torch_ivalue *stack,
                                  uint64_t interface_version);

/* torch's thread pool. */
torch_error torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                               void (*body)(int64_t begin, int64_t end, void *context), void *context);

/* Devices. Functions with "cuda" in their names are in libtorch_cuda: only CUDA binaries refer to them. */
torch_error aoti_torch_get_current_device_index(int32_t *device_index);
torch_error aoti_torch_create_device_guard(int32_t device_index, torch_guard *guard);
torch_error aoti_torch_delete_device_guard(torch_guard guard);
torch_error aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);
torch_error aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void **memory); /* for the current stream */
torch_error aoti_torch_cuda_caching_allocator_raw_delete(void *memory);

/* Matrix products without the dispatcher: out = a b, and out = beta added + alpha a b. */
torch_error aoti_torch_cpu_mm_out(torch_tensor out, torch_tensor a, torch_tensor b);
torch_error aoti_torch_cpu_addmm_out(torch_tensor out, torch_tensor added, torch_tensor a, torch_tensor b, double beta,
                                     double alpha);
torch_error aoti_torch_cuda_mm_out(torch_tensor out, torch_tensor a, torch_tensor b);
torch_error aoti_torch_cuda_addmm_out(torch_tensor out, torch_tensor added, torch_tensor a, torch_tensor b, double beta,
                                      double alpha);

/* Errors. aoti_torch_check throws a C++ exception when `condition` is false. */
void aoti_torch_check(bool condition, const char *function, const char *file, uint32_t line, const char *message);
__attribute__((weak)) const char *torch_exception_get_what_without_backtrace(void); /* 2.13 */

/* Registration. */
torch_error aoti_torch_library_init_impl(const char *ns, const char *dispatch_key, const char *file, uint32_t line,
                                         torch_library *library);
torch_error aoti_torch_library_init_fragment(const char *ns, const char *file, uint32_t line, torch_library *library);
torch_error aoti_torch_library_def(torch_library library, const char *schema);
/* 2.12, like the numbers of the tags */
__attribute__((weak)) torch_error torch_library_def_with_tags(torch_library library, const char *schema,
                                                              const int32_t *tags, int32_t num_tags);
__attribute__((weak)) int32_t torch_tag_core(void);
__attribute__((weak)) int32_t torch_tag_cudagraph_unsafe(void);
__attribute__((weak)) int32_t torch_tag_data_dependent_output(void);
__attribute__((weak)) int32_t torch_tag_dynamic_output_shape(void);
__attribute__((weak)) int32_t torch_tag_flexible_layout(void);
__attribute__((weak)) int32_t torch_tag_generated(void);
__attribute__((weak)) int32_t torch_tag_inplace_view(void);
__attribute__((weak)) int32_t torch_tag_maybe_aliasing_or_mutating(void);
__attribute__((weak)) int32_t torch_tag_needs_contiguous_strides(void);
__attribute__((weak)) int32_t torch_tag_needs_exact_strides(void);
__attribute__((weak)) int32_t torch_tag_needs_fixed_stride_order(void);
__attribute__((weak)) int32_t torch_tag_nondeterministic_bitwise(void);
__attribute__((weak)) int32_t torch_tag_nondeterministic_seeded(void);
__attribute__((weak)) int32_t torch_tag_out_variant(void);
__attribute__((weak)) int32_t torch_tag_pointwise(void);
__attribute__((weak)) int32_t torch_tag_pt2_compliant_tag(void);
__attribute__((weak)) int32_t torch_tag_reduction(void);
__attribute__((weak)) int32_t torch_tag_view_copy(void);
torch_error torch_library_impl(torch_library library, const char *name, torch_boxed_kernel *kernel,
                               uint64_t interface_version);
torch_error aoti_torch_delete_library_object(torch_library library);

#ifdef __cplusplus
}
#endif
#endif
