/*
 * opjit_calls.h - a checked call of an op: registers the memory of its tensors, for bounds, and returns findings as an error.
 * The linker replaces functions that make tensors by __wrap_* (ld --wrap).
 */
#ifndef OPJIT_EMULATE_OPJIT_CALLS_H
#define OPJIT_EMULATE_OPJIT_CALLS_H

#include <vector>

#include "opjit.h"
#include "runtime_api.h"

extern "C" {
void emu_begin_call(void);
void emu_end_call(void);
const char *emu_first_finding(void); /* NULL without one */
void emu_check_written(const void *memory, size_t element, const char *name);
}

/* The call in progress. The runtime allows a single call at a time, or one for each rank. */
static thread_local struct {
    std::vector<const void *> memory; /* that kernels may touch */
    std::vector<std::pair<const opjit_tensor *, const char *>> outputs;
} emu_call;

static size_t emu_bytes(const opjit_tensor *of)
{
    int64_t last = 0;
    if (of->numel == 0)
        return 0;
    for (int64_t d = 0; d < of->dim; d++)
        last += (of->sizes[d] - 1) * of->strides[d];
    return (size_t)(last + 1) * opjit_dtype_size(of->dtype);
}

static void emu_see_memory(const void *memory, size_t bytes, const char *name, bool fresh)
{
    emu_see(memory, bytes, name, fresh);
    emu_call.memory.push_back(memory);
}

/* An argument: memory that was written before the call. */
static void emu_take(opjit_tensor *changed, const char *name)
{
    if (changed)
        emu_see_memory(changed->data, emu_bytes(changed), name, false);
}

static void emu_take(const opjit_tensor *argument, const char *name)
{
    if (!argument)
        return;
    emu_see_constant(argument->data, emu_bytes(argument), name);
    emu_call.memory.push_back(argument->data);
}

/* Its type does not say whether the op may change the tensors. */
static void emu_take(const opjit_tensors *list, const char *name)
{
    for (int64_t i = 0; list && i < list->len; i++)
        emu_take(const_cast<opjit_tensor *>(list->data + i), name);
}

static void emu_take(const uint64_t *seed, const char *name)
{
    if (seed)
        emu_see_memory(seed, sizeof *seed, name, false);
}

/* A result, which the kernel's function has yet to make. */
static void emu_expect(const opjit_tensor *result, const char *name)
{
    emu_call.outputs.push_back({result, name});
}

static void emu_begin(void)
{
    emu_begin_call();
    emu_call.memory.clear();
    emu_call.outputs.clear();
}

/* Return the call's status, which is an error if there are findings. */
static opjit_status emu_end(opjit_status status)
{
    for (const auto &[result, name] : emu_call.outputs)
        if (status == OPJIT_OK && result->data &&
            emu_bytes(result) == (size_t)result->numel * opjit_dtype_size(result->dtype))
            emu_check_written(result->data, opjit_dtype_size(result->dtype), name);
    for (const void *each : emu_call.memory)
        emu_forget(each);
    const char *found = emu_first_finding();
    if (found && status == OPJIT_OK)
        status = opjit_error_new(NULL, 0, "emulated: %s", found);
    emu_end_call();
    return status;
}

/* Any other value of a call, such as a number, is no memory. */
template <typename type>
static void emu_meet(bool is_argument, type value, const char *name)
{
    if constexpr (std::is_convertible_v<type, const opjit_tensor *>)
        is_argument ? emu_take(value, name) : emu_expect(value, name);
    else if constexpr (std::is_convertible_v<type, const opjit_tensors *> ||
                       std::is_convertible_v<type, const uint64_t *>)
        emu_take(value, name);
}

/* Call an author's function. The first of its arguments are the call's, and the others its results. */
template <typename function, typename... types>
static opjit_status emu_run(function *called, int arguments, std::initializer_list<const char *> names, types... values)
{
    const char *const *name = names.begin();
    emu_begin();
    (emu_meet(arguments-- > 0, values, *name++), ...);
    return emu_end(called(values..., nullptr));
}

static opjit_status emu_made(opjit_status status, const opjit_tensor *result)
{
    const char *name = "a tensor that the call made";
    for (const auto &[expected, of] : emu_call.outputs)
        name = expected == result ? of : name;
    const bool known =
        !emu_call.memory.empty() && emu_call.memory.back() == result->data; /* one of them calls another */
    if (status == OPJIT_OK && result->numel && !known)
        emu_see_memory(result->data, emu_bytes(result), name, true);
    return status;
}

#ifdef OPJIT_EMULATE_CHECKED
#define EMU_WRAPPED(name_, parameters_, arguments_) \
    opjit_status __real_##name_ parameters_; \
    opjit_status __wrap_##name_ parameters_ \
    { \
        return emu_made(__real_##name_ arguments_, out); \
    }

extern "C" {
EMU_WRAPPED(opjit_empty_strided,
            (opjit_tensor * out, int64_t dim, const int64_t *sizes, const int64_t *strides, opjit_dtype dtype,
             const opjit_tensor *like),
            (out, dim, sizes, strides, dtype, like))
EMU_WRAPPED(opjit_empty_like, (opjit_tensor * out, const opjit_tensor *like, opjit_dtype dtype), (out, like, dtype))
EMU_WRAPPED(opjit_empty_broadcast,
            (opjit_tensor * out, const opjit_tensor *a, const opjit_tensor *b, opjit_dtype dtype), (out, a, b, dtype))

opjit_status __real_opjit_contiguous(opjit_tensor *copy, const opjit_tensor *x);
opjit_status __wrap_opjit_contiguous(opjit_tensor *copy, const opjit_tensor *x)
{
    const opjit_status status = __real_opjit_contiguous(copy, x);
    if (status == OPJIT_OK && copy->data != x->data)
        emu_take(copy, "a contiguous copy");
    return status;
}

opjit_status __real_opjit_scratch(void **memory, int64_t bytes, const opjit_tensor *like);
opjit_status __wrap_opjit_scratch(void **memory, int64_t bytes, const opjit_tensor *like)
{
    const opjit_status status = __real_opjit_scratch(memory, bytes, like);
    if (status == OPJIT_OK && bytes > 0)
        emu_see_memory(*memory, (size_t)bytes, "scratch memory", true);
    return status;
}
}
#endif

#endif
