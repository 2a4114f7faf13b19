/*
 * opjit_glue.h - functions for the generated wrapper: read boxed arguments, free them, raise. See opjit_runtime.c.
 *
 * The generated file names the op, declares its kernel and spells out one call; everything that does not depend on
 * the schema is declared here. The author of an op never needs it.
 *
 * Ownership: the stack owns its arguments. The generated kernel frees each of them whatever happened, then the call's
 * memory; only then does it raise, because the exception skips the rest of it.
 */
#ifndef OPJIT_GLUE_H
#define OPJIT_GLUE_H

#include "opjit.h"

#define OPJIT_EXPORT __attribute__((visibility("default")))

/* A block that the wrapper frees when the call ends: its members, and the host memory after this header. */
typedef struct opjit_block {
    struct opjit_block *next;
    torch_tensor tensor;
    void *device_memory;
    void *padding; /* keeps the memory behind it 16-byte aligned */
} opjit_block;

/*
 * The functions of a device with streams, from opjit.backends.Stream. They belong to torch or to the device's library.
 * Each returns 0 for success. NULL means torch's default for every device.
 */
typedef struct opjit_device {
    const char *name;
    int32_t (*current)(int32_t device_index, void **stream);
    int32_t (*exchange)(int32_t device_index, int32_t *before); /* else torch's device guard */
    int32_t (*allocate)(uint64_t bytes, void **memory);         /* else a tensor; for the current stream */
    int32_t (*free)(void *memory);
    bool torchs; /* torch keeps the text of an error */
} opjit_device;

/* One call of an op. */
typedef struct opjit_call {
    opjit_block *blocks;
    const opjit_device *device; /* NULL for a device without streams */
    torch_guard guard;          /* of the previous device, if it is different */
    int32_t before;             /* its index if the device exchanges it, otherwise -1 */
    int32_t device_type;        /* of every tensor argument; -1 until the first was seen */
    int32_t device_index;
    uint64_t interrupts; /* that had arrived when the call began */
    bool interrupted;    /* the kernel checked, and saw an interrupt that arrived since */
} opjit_call;

/* The op that a library holds, for its registration. */
typedef struct opjit_description {
    const char *ns;
    const char *name;
    const char *dispatch_key;
    const char *schema; /* without the namespace */
    int32_t (*const *tags)(void);
    int32_t num_tags;
    const char *op;      /* ns::name */
    const char *chooser; /* the op in Python that chooses among variants, and calls this one again */
    uint64_t tensors;    /* bit i is set where argument i is a Tensor, neither optional nor in a list */
} opjit_description;

extern const opjit_description opjit_this;
OPJIT_EXPORT torch_boxed_kernel opjit_kernel;

/* ---------------------------------------------------------------------------------------------- */
/* Reading arguments. `name` is the argument's, for messages; memory for lists is the call's.      */

OPJIT_INLINE torch_tensor opjit_handle(torch_ivalue value)
{
    return (torch_tensor)(uintptr_t)value;
}

OPJIT_INLINE torch_ivalue opjit_handle_value(torch_tensor handle)
{
    return (torch_ivalue)(uintptr_t)handle;
}

/* The value behind an optional that is not None. */
OPJIT_INLINE torch_ivalue opjit_cell(torch_ivalue optional)
{
    return *(const torch_ivalue *)(uintptr_t)optional;
}

OPJIT_INLINE double opjit_double(torch_ivalue value)
{
    double number;
    memcpy(&number, &value, sizeof number);
    return number;
}

OPJIT_INLINE bool opjit_bool(torch_ivalue value)
{
    return (value & 0xff) != 0;
}

OPJIT_INLINE torch_ivalue opjit_double_value(double number)
{
    torch_ivalue value;
    memcpy(&value, &number, sizeof value);
    return value;
}

opjit_dtype opjit_dtype_of(torch_ivalue value);
OPJIT_MUST_USE opjit_status opjit_read_tensor(opjit_call *call, torch_ivalue value, bool writes, const char *name,
                                              opjit_tensor *view);

/* Lists' items are in memory of the call; a string is torch's. */
OPJIT_MUST_USE opjit_status opjit_read_string(torch_ivalue value, const char **text);
OPJIT_MUST_USE opjit_status opjit_read_ints(opjit_call *call, torch_ivalue value, opjit_ints *list);
OPJIT_MUST_USE opjit_status opjit_read_floats(opjit_call *call, torch_ivalue value, opjit_floats *list);
OPJIT_MUST_USE opjit_status opjit_read_bools(opjit_call *call, torch_ivalue value, opjit_bools *list);
OPJIT_MUST_USE opjit_status opjit_read_tensors(opjit_call *call, torch_ivalue value, bool writes, const char *name,
                                               opjit_tensors *list);

/*
 * Draw a seed from the generator (None: the device's default) into device memory. torch draws it with random_(), so
 * seeds, states and captured graphs work as for torch's ops.
 */
OPJIT_MUST_USE opjit_status opjit_draw_seed(opjit_call *call, torch_ivalue generator, const uint64_t **seed);

/* Host memory until the call ends, 16-byte aligned. */
OPJIT_MUST_USE opjit_status opjit_host_block(opjit_call *call, size_t bytes, void **memory);

/* Make the device of the tensors current, and get its stream; opjit_free_call makes the former one current again. */
OPJIT_MUST_USE opjit_status opjit_enter_device(opjit_call *call, const opjit_device *device, void **stream);

/* ---------------------------------------------------------------------------------------------- */
/* After the kernel                                                                               */

/*
 * After a call that Ctrl-C interrupted: let Python raise the exception of its handler when the op has returned. If the
 * handler raises nothing, or in another thread than the main thread, return an error instead of OPJIT_OK, because the
 * results are incomplete.
 */
__attribute__((cold)) opjit_status opjit_end_interrupted(opjit_status status);

/* Tell autograd that a tensor was written: copying it to itself moves nothing and counts its version up. */
OPJIT_MUST_USE opjit_status opjit_wrote(const opjit_tensor *view);

/* The same for an argument whose view the kernel could change. That is an error, because torch would not see it. */
OPJIT_MUST_USE opjit_status opjit_check_written(const opjit_tensor *view, const opjit_tensor *before, const char *name);

/* An output must be a tensor that the kernel made. */
OPJIT_MUST_USE opjit_status opjit_check_output(const opjit_tensor *out, const char *name);

/*
 * A copied struct carries another tensor's handle: the op would return a view without torch's knowledge. Removes the
 * handle from `out`, because its owner frees it, and returns `status`, or an error if that is OPJIT_OK.
 */
OPJIT_MUST_USE opjit_status opjit_check_fresh(opjit_status status, torch_ivalue other, opjit_tensor *out,
                                              const char *name);
OPJIT_MUST_USE opjit_status opjit_check_fresh_list(opjit_status status, torch_ivalue others, opjit_tensor *out,
                                                   const char *name);

OPJIT_MUST_USE opjit_status opjit_check_outputs(const opjit_outputs *list, const char *name);

/*
 * Box a result as torch wants it, which then owns its tensors; an optional that was not made is None. If the call
 * failed, or this does: box nothing, and free a list's tensors, which would be lost with the call's memory.
 */
OPJIT_MUST_USE opjit_status opjit_box_list(opjit_status status, opjit_outputs *list, torch_ivalue *box);
OPJIT_MUST_USE opjit_status opjit_box_optional(opjit_status status, opjit_tensor *out, torch_ivalue *box);

void opjit_free_tensor(torch_ivalue value);
void opjit_free_tensors(torch_ivalue value); /* a list, with its tensors */
void opjit_free_list(torch_ivalue value);    /* of numbers */
void opjit_free_string(torch_ivalue value);
void opjit_free_generator(torch_ivalue optional);
void opjit_free_cell(torch_ivalue optional); /* of an optional, without its content */
void opjit_free_call(opjit_call *call);

/* Free the error and throw it as torch's exception, which Python sees as a RuntimeError. Needs -fexceptions. */
__attribute__((cold)) void opjit_raise(const char *op, opjit_status status);

#endif
