/*
 * opjit_glue.h - what every generated glue file shares: reading boxed arguments, freeing them, raising, registering.
 *
 * Included once, by the generated file; an op's author never needs it. The generated part names the op, declares
 * its kernel and spells out one call; everything that does not depend on the schema is here.
 *
 * Ownership: the stack owns its arguments. The generated entry frees each of them whatever happened, then the
 * call's scratch; only then does it raise, because the C++ exception skips the rest of it.
 */
#ifndef OPJIT_GLUE_H
#define OPJIT_GLUE_H

#include "opjit.h"

#define OPJIT_EXPORT __attribute__((visibility("default")))

opjit_code_table opjit_codes;

/* ---------------------------------------------------------------------------------------------- */
/* Reading arguments                                                                              */

OPJIT_UNUSED static torch_tensor opjit_handle(torch_ivalue value)
{
    return (torch_tensor)(uintptr_t)value;
}

OPJIT_UNUSED static torch_ivalue opjit_handle_value(torch_tensor handle)
{
    return (torch_ivalue)(uintptr_t)handle;
}

/* The value behind an optional that is not None. */
OPJIT_UNUSED static torch_ivalue opjit_cell(torch_ivalue optional)
{
    return *(const torch_ivalue *)(uintptr_t)optional;
}

OPJIT_UNUSED static double opjit_double(torch_ivalue value)
{
    double number;
    memcpy(&number, &value, sizeof number);
    return number;
}

OPJIT_UNUSED static bool opjit_bool(torch_ivalue value)
{
    return (value & 0xff) != 0;
}

OPJIT_UNUSED static torch_ivalue opjit_double_value(double number)
{
    torch_ivalue value;
    memcpy(&value, &number, sizeof value);
    return value;
}

OPJIT_UNUSED static opjit_dtype opjit_dtype_of(torch_ivalue value)
{
    uint32_t code = (uint32_t)value;
    return code < sizeof opjit_codes.from_torch ? (opjit_dtype)opjit_codes.from_torch[code] : OPJIT_OTHER_DTYPE;
}

/* Make the device of the tensors current; opjit_free_call makes the former one current again. */
OPJIT_UNUSED static opjit_status opjit_enter_device(opjit_call *call)
{
    int32_t current;
    OPJIT_CHECK(call->device_index >= 0, "expected at least one tensor argument that is not None");
    OPJIT_TORCH(aoti_torch_get_current_device_index(&current));
    if (current != call->device_index)
        OPJIT_TORCH(aoti_torch_create_device_guard(call->device_index, &call->guard));
    return OPJIT_OK;
}

/* Every tensor of a call is on one device; `name` is the argument, for the message. */
static opjit_status opjit_same_device(opjit_call *call, const opjit_tensor *view, const char *name)
{
    if (call->device_type < 0) {
        call->device_type = view->device_type;
        call->device_index = view->device_index;
    }
    OPJIT_CHECK(view->device_type == call->device_type && view->device_index == call->device_index,
                "expected all tensors on one device, but `%s` is on another one than the tensors before it; move it with .to()",
                name);
    return OPJIT_OK;
}

OPJIT_UNUSED static opjit_status opjit_read_tensor(opjit_call *call, torch_ivalue value, bool writes, const char *name,
                                                   opjit_tensor *view)
{
    bool defined;
    view->handle = opjit_handle(value);
    view->call = call;
    OPJIT_TORCH(aoti_torch_is_defined(view->handle, &defined));
    OPJIT_CHECK(defined, "`%s` is an undefined tensor; declare it Tensor? if it may be None", name);
    OPJIT_TRY(opjit_describe(view));
    OPJIT_TRY(opjit_same_device(call, view, name));
    if (writes)
        OPJIT_TORCH(torch_get_mutable_data_ptr(view->handle, &view->data));
    else
        OPJIT_TORCH(torch_get_const_data_ptr(view->handle, (const void **)&view->data));
    return OPJIT_OK;
}

OPJIT_UNUSED static opjit_status opjit_read_string(torch_ivalue value, const char **text)
{
    OPJIT_TORCH(torch_string_c_str((torch_string)(uintptr_t)value, text));
    return OPJIT_OK;
}

/* Copy a list's boxed items into memory of the call. */
OPJIT_UNUSED static opjit_status opjit_read_items(opjit_call *call, torch_ivalue value, torch_ivalue **items,
                                                  int64_t *len)
{
    torch_list list = (torch_list)(uintptr_t)value;
    size_t size;
    void *memory;
    OPJIT_TORCH(torch_list_size(list, &size));
    OPJIT_TRY(opjit_host_block(call, size * sizeof **items, &memory));
    *items = (torch_ivalue *)memory;
    for (size_t i = 0; i < size; i++)
        OPJIT_TORCH(torch_list_get_item(list, i, *items + i));
    *len = (int64_t)size;
    return OPJIT_OK;
}

OPJIT_UNUSED static opjit_status opjit_read_ints(opjit_call *call, torch_ivalue value, opjit_ints *list)
{
    torch_ivalue *items;
    OPJIT_TRY(opjit_read_items(call, value, &items, &list->len));
    list->data = (const int64_t *)items; /* the boxed form of an int is the int */
    return OPJIT_OK;
}

OPJIT_UNUSED static opjit_status opjit_read_floats(opjit_call *call, torch_ivalue value, opjit_floats *list)
{
    torch_ivalue *items;
    void *memory;
    OPJIT_TRY(opjit_read_items(call, value, &items, &list->len));
    OPJIT_TRY(opjit_host_block(call, (size_t)list->len * sizeof(double), &memory));
    for (int64_t i = 0; i < list->len; i++)
        ((double *)memory)[i] = opjit_double(items[i]);
    list->data = (const double *)memory;
    return OPJIT_OK;
}

OPJIT_UNUSED static opjit_status opjit_read_bools(opjit_call *call, torch_ivalue value, opjit_bools *list)
{
    torch_ivalue *items;
    void *memory;
    OPJIT_TRY(opjit_read_items(call, value, &items, &list->len));
    OPJIT_TRY(opjit_host_block(call, (size_t)list->len * sizeof(bool), &memory));
    for (int64_t i = 0; i < list->len; i++)
        ((bool *)memory)[i] = opjit_bool(items[i]);
    list->data = (const bool *)memory;
    return OPJIT_OK;
}

OPJIT_UNUSED static opjit_status opjit_read_tensors(opjit_call *call, torch_ivalue value, bool writes,
                                                    const char *name, opjit_tensors *list)
{
    torch_ivalue *items;
    void *memory;
    OPJIT_TRY(opjit_read_items(call, value, &items, &list->len));
    OPJIT_TRY(opjit_host_block(call, (size_t)list->len * sizeof(opjit_tensor), &memory));
    for (int64_t i = 0; i < list->len; i++)
        OPJIT_TRY(opjit_read_tensor(call, items[i], writes, name, (opjit_tensor *)memory + i));
    list->data = (const opjit_tensor *)memory;
    return OPJIT_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* After the kernel                                                                               */

/* Tell autograd that a tensor was written: copying it to itself moves nothing and counts its version up. */
OPJIT_UNUSED static opjit_status opjit_wrote(const opjit_tensor *view)
{
    bool grad = aoti_torch_grad_mode_is_enabled();
    aoti_torch_grad_mode_set_enabled(false);
    torch_error failed = aoti_torch_copy_(view->handle, view->handle, 0);
    aoti_torch_grad_mode_set_enabled(grad);
    return failed ? opjit_torch_error(__FILE__, __LINE__, "could not count up the version of a written tensor")
                  : OPJIT_OK;
}

/* An output must be a tensor that the kernel made. */
OPJIT_UNUSED static opjit_status opjit_check_output(const opjit_tensor *out, const char *name)
{
    OPJIT_CHECK(out->handle, "the kernel returned OPJIT_OK but did not make the output `%s`", name);
    return OPJIT_OK;
}

/* A copied struct carries another tensor's handle: the op would return a view that torch does not know of. */
OPJIT_UNUSED static opjit_status opjit_check_fresh(opjit_status status, torch_ivalue other, opjit_tensor *out,
                                                   const char *name)
{
    if (!out->handle || out->handle != opjit_handle(other))
        return status;
    out->handle = NULL; /* its owner frees it */
    if (status)
        return status;
    OPJIT_FAIL("the output `%s` is an input or another output: an op returns new tensors; copy it, or declare the "
               "input Tensor(a!) and return ()",
               name);
}

OPJIT_UNUSED static opjit_status opjit_check_fresh_list(opjit_status status, torch_ivalue others, opjit_tensor *out,
                                                        const char *name)
{
    torch_list list = (torch_list)(uintptr_t)others;
    size_t size = 0;
    torch_ivalue item;
    (void)torch_list_size(list, &size);
    for (size_t i = 0; i < size; i++)
        if (torch_list_get_item(list, i, &item) == 0)
            status = opjit_check_fresh(status, item, out, name);
    return status;
}

OPJIT_UNUSED static void opjit_free_tensor(torch_ivalue value)
{
    if (value)
        (void)aoti_torch_delete_tensor_object(opjit_handle(value));
}

OPJIT_UNUSED static void opjit_free_string(torch_ivalue value)
{
    (void)torch_delete_string((torch_string)(uintptr_t)value);
}

OPJIT_UNUSED static void opjit_free_list(torch_ivalue value)
{
    (void)torch_delete_list((torch_list)(uintptr_t)value);
}

OPJIT_UNUSED static void opjit_free_tensors(torch_ivalue value)
{
    torch_list list = (torch_list)(uintptr_t)value;
    size_t size = 0;
    torch_ivalue item;
    (void)torch_list_size(list, &size);
    for (size_t i = 0; i < size; i++)
        if (torch_list_get_item(list, i, &item) == 0)
            opjit_free_tensor(item);
    (void)torch_delete_list(list);
}

/* The cell of an optional: torch made it with C++ new, and frees it for us only from 2.13 on. */
OPJIT_UNUSED static void opjit_free_cell(torch_ivalue optional)
{
    torch_ivalue *cell = (torch_ivalue *)(uintptr_t)optional;
    if (torch_delete_stable_ivalue)
        (void)torch_delete_stable_ivalue(cell);
    else if (_ZdlPv)
        _ZdlPv(cell);
}

OPJIT_UNUSED static void opjit_free_call(opjit_call *call)
{
    if (call->guard)
        (void)aoti_torch_delete_device_guard(call->guard);
    while (call->blocks) {
        opjit_block *block = call->blocks;
        call->blocks = block->next;
        if (block->tensor)
            (void)aoti_torch_delete_tensor_object(block->tensor);
        if (block->device_memory)
            (void)call->device_free(block->device_memory);
        free(block);
    }
}

/* Python takes nothing but UTF-8, and a text may be cut off, or be an author's bytes: other bytes become '?'. */
__attribute__((cold, noinline)) static void opjit_make_utf8(char *text)
{
    for (unsigned char *at = (unsigned char *)text; *at;) {
        unsigned char first = *at, second = at[1];
        int more = first < 0x80 ? 0 : first < 0xc2 ? -1 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : first < 0xf5 ? 3 : -1;
        int seen = 0;
        while (seen < more && (at[seen + 1] & 0xc0) == 0x80)
            seen++;
        bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
        bool beyond = (first == 0xed && second >= 0xa0) || (first == 0xf4 && second >= 0x90);
        if (seen != more || overlong || beyond)
            *at++ = '?';
        else
            at += more + 1;
    }
}

/* Throw the error as torch's own exception type, which Python sees as a RuntimeError. Needs -fexceptions. */
__attribute__((cold, noinline)) static void opjit_raise(const char *op, opjit_status status)
{
    char text[sizeof status->text + 400];
    snprintf(text, sizeof text, "%s: %s [%s:%d]", op, status->text, status->file, status->line);
    opjit_make_utf8(text);
    const char *file = status->file;
    uint32_t line = (uint32_t)status->line;
    opjit_error_free(status);
    aoti_torch_check(false, op, file, line, text);
}

/* ---------------------------------------------------------------------------------------------- */
/* Registration                                                                                   */

static torch_library opjit_library; /* torch's registration; owned by opjit_register and opjit_unregister */

static void opjit_read_codes(void)
{
    int32_t (*const getters[OPJIT_DTYPE_COUNT])(void) = {
        aoti_torch_dtype_bool,    aoti_torch_dtype_uint8,     aoti_torch_dtype_int8,    aoti_torch_dtype_int16,
        aoti_torch_dtype_int32,   aoti_torch_dtype_int64,     aoti_torch_dtype_uint16,  aoti_torch_dtype_uint32,
        aoti_torch_dtype_uint64,  aoti_torch_dtype_float16,   aoti_torch_dtype_bfloat16, aoti_torch_dtype_float32,
        aoti_torch_dtype_float64, aoti_torch_dtype_complex64, aoti_torch_dtype_complex128,
    };
    memset(opjit_codes.from_torch, OPJIT_OTHER_DTYPE, sizeof opjit_codes.from_torch);
    for (int i = 0; i < OPJIT_DTYPE_COUNT; i++) {
        opjit_codes.dtype[i] = getters[i]();
        if ((uint32_t)opjit_codes.dtype[i] < sizeof opjit_codes.from_torch)
            opjit_codes.from_torch[opjit_codes.dtype[i]] = (unsigned char)i;
    }
}

#endif
