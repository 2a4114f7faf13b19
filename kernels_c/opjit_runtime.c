/*
 * opjit_runtime.c - the functions of opjit.h and opjit_glue.h, and an op's registration with torch.
 *
 * Compiled once for a compiler and linked with every op. The state of a library is all here: torch's numbers for its
 * dtypes, read once before the op is registered; the registration; the kernel that calls go to, which a reload
 * replaces; and the count of interrupts, which the libraries of a process share.
 *
 * Contents: 1 dtypes  2 errors  3 memory  4 reading arguments  5 outputs  6 threads  7 after the kernel
 *           8 interrupts  9 groups of ranks  10 registration. Strided access is in opjit_elementwise.c.
 */
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define OPJIT_PLACE NULL, 0 /* an author gets the place of the call */
#include "opjit_glue.h"

/* ---------------------------------------------------------------------------------------------- */
/* 1. Dtypes                                                                                      */

/* torch's numbers for the CPU and for the dtypes, and back. */
static int32_t torch_cpu;
static int32_t torch_dtypes[OPJIT_DTYPE_COUNT];
static unsigned char dtypes_of_torch[128];

opjit_dtype opjit_dtype_of(torch_ivalue value)
{
    uint32_t number = (uint32_t)value;
    return number < sizeof dtypes_of_torch ? (opjit_dtype)dtypes_of_torch[number] : OPJIT_OTHER_DTYPE;
}

const char *opjit_dtype_name(opjit_dtype dtype)
{
    static const char *const names[] = {"bool",     "uint8",   "int8",    "int16",         "int32",       "int64",
                                        "uint16",   "uint32",  "uint64",  "float8_e4m3fn", "float8_e5m2", "float16",
                                        "bfloat16", "float32", "float64", "complex64",     "complex128"};
    return (unsigned)dtype < OPJIT_DTYPE_COUNT ? names[dtype] : "an unsupported dtype";
}

size_t opjit_dtype_size(opjit_dtype dtype)
{
    static const unsigned char sizes[] = {1, 1, 1, 2, 4, 8, 2, 4, 8, 1, 1, 2, 2, 4, 8, 8, 16};
    return (unsigned)dtype < OPJIT_DTYPE_COUNT ? sizes[dtype] : 0;
}

static void read_codes(void)
{
    int32_t (*const getters[OPJIT_DTYPE_COUNT])(void) = {
        aoti_torch_dtype_bool,          aoti_torch_dtype_uint8,       aoti_torch_dtype_int8,
        aoti_torch_dtype_int16,         aoti_torch_dtype_int32,       aoti_torch_dtype_int64,
        aoti_torch_dtype_uint16,        aoti_torch_dtype_uint32,      aoti_torch_dtype_uint64,
        aoti_torch_dtype_float8_e4m3fn, aoti_torch_dtype_float8_e5m2, aoti_torch_dtype_float16,
        aoti_torch_dtype_bfloat16,      aoti_torch_dtype_float32,     aoti_torch_dtype_float64,
        aoti_torch_dtype_complex64,     aoti_torch_dtype_complex128,
    };
    torch_cpu = aoti_torch_device_type_cpu();
    memset(dtypes_of_torch, OPJIT_OTHER_DTYPE, sizeof dtypes_of_torch);
    for (int i = 0; i < OPJIT_DTYPE_COUNT; i++) {
        torch_dtypes[i] = getters[i]();
        if ((uint32_t)torch_dtypes[i] < sizeof dtypes_of_torch)
            dtypes_of_torch[torch_dtypes[i]] = (unsigned char)i;
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* 2. Errors                                                                                      */

typedef struct opjit_error {
    const char *file;
    int line;
    char text[2000];
} opjit_error;

/* Stands in for an error when there is no memory to make one; never freed. */
static opjit_error no_memory = {NULL, 0, "out of memory"};

opjit_status opjit_error_new(const char *file, int line, const char *format, ...)
{
    opjit_error *error = (opjit_error *)malloc(sizeof *error);
    if (!error)
        return &no_memory;
    error->file = file;
    error->line = line;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return error;
}

opjit_status opjit_error_at(opjit_status error, const char *file, int line)
{
    if (!error->file && error != &no_memory) {
        error->file = file;
        error->line = line;
    }
    return error;
}

static void error_free(opjit_status status)
{
    if (status != &no_memory)
        free(status);
}

/* torch keeps the text of its errors from 2.13 on; before, it prints them to stderr. */
opjit_status opjit_torch_error(const char *file, int line, const char *what)
{
    const char *text = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : NULL;
    return opjit_error_new(file, line, "%s", text && *text ? text : what);
}

/* The result of one of a device's functions. */
static opjit_status device_status(const opjit_device *device, int32_t code, const char *what)
{
    if (code == 0)
        return OPJIT_OK;
    if (device->torchs)
        return opjit_torch_error(OPJIT_PLACE, what);
    return opjit_error_new(OPJIT_PLACE, "the function `%s` of device %s failed with code %d", what, device->name,
                           (int)code);
}

#define OPJIT_DEVICE(device_, function_, ...) \
    OPJIT_TRY(device_status(device_, (device_)->function_(__VA_ARGS__), #function_))

/* Python accepts only UTF-8, but a text may be cut off or contain bytes from an author. Other bytes become '?'. */
static void make_utf8(char *text)
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

void opjit_raise(const char *op, opjit_status status)
{
    char text[sizeof status->text + 400];
    const char *file = status->file;
    if (file)
        snprintf(text, sizeof text, "%s: %s [%s:%d]", op, status->text, file, status->line);
    else
        snprintf(text, sizeof text, "%s: %s", op, status->text);
    make_utf8(text);
    uint32_t line = (uint32_t)status->line;
    error_free(status);
    aoti_torch_check(false, op, file ? file : "opjit", line, text);
}

/* ---------------------------------------------------------------------------------------------- */
/* 3. Memory                                                                                      */

opjit_status opjit_host_block(opjit_call *call, size_t bytes, void **memory)
{
    opjit_block *block = (opjit_block *)malloc(sizeof *block + bytes);
    if (!block)
        return &no_memory;
    block->next = call->blocks;
    block->tensor = NULL;
    block->device_memory = NULL;
    call->blocks = block;
    *memory = block + 1;
    return OPJIT_OK;
}

opjit_status opjit_scratch(void **memory, int64_t bytes, const opjit_tensor *like)
{
    const int64_t stride = 1;
    void *header;
    OPJIT_CHECK(bytes >= 0, "scratch of %lld bytes", (long long)bytes);
    OPJIT_TRY(opjit_host_block(like->call, 0, &header));
    if (like->call->device && like->call->device->allocate) {
        OPJIT_DEVICE(like->call->device, allocate, (uint64_t)bytes, memory);
        like->call->blocks->device_memory = *memory;
        return OPJIT_OK;
    }
    OPJIT_TORCH(aoti_torch_empty_strided(1, &bytes, &stride, torch_dtypes[OPJIT_UINT8], like->device_type,
                                         like->device_index, &like->call->blocks->tensor));
    OPJIT_TORCH(torch_get_mutable_data_ptr(like->call->blocks->tensor, memory));
    return OPJIT_OK;
}

opjit_status opjit_contiguous(opjit_tensor *copy, const opjit_tensor *x)
{
    int64_t packed[OPJIT_MAX_DIM], step = 1;
    void *header;
    *copy = *x;
    copy->handle = NULL; /* so that nothing uses it as a result */
    if (x->contiguous)
        return OPJIT_OK;
    for (int64_t d = x->dim - 1; d >= 0; d--) {
        packed[d] = step;
        step *= x->sizes[d];
    }
    OPJIT_CHECK(x->dtype != OPJIT_OTHER_DTYPE, "opjit_contiguous takes the dtypes that opjit.h names");
    OPJIT_TRY(opjit_host_block(x->call, (size_t)x->dim * sizeof *packed, &header));
    opjit_block *block = x->call->blocks;
    OPJIT_TORCH(aoti_torch_empty_strided(x->dim, x->sizes, packed, torch_dtypes[x->dtype], x->device_type,
                                         x->device_index, &block->tensor));
    OPJIT_TORCH(aoti_torch_copy_(block->tensor, x->handle, 0));
    OPJIT_TORCH(torch_get_mutable_data_ptr(block->tensor, &copy->data));
    copy->strides = (const int64_t *)memcpy(header, packed, (size_t)x->dim * sizeof *packed);
    copy->contiguous = true;
    return OPJIT_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* 4. Reading arguments                                                                           */

/* numel and contiguous are computed from sizes and strides like in torch (c10/core/Contiguity.h). */
static void measure(opjit_tensor *view)
{
    uint64_t numel = 1; /* of an empty tensor, more than fits may come before the 0 */
    bool packed = true;
    for (int64_t d = view->dim - 1; d >= 0; d--) {
        packed = packed && (view->sizes[d] == 1 || (uint64_t)view->strides[d] == numel);
        numel *= (uint64_t)view->sizes[d];
    }
    view->numel = (int64_t)numel;
    view->contiguous = packed || numel == 0;
}

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define GUARD 4 /* numbers before and behind; 32 bytes */

/* A copy of a view's sizes or strides between guards, so that the sanitizer sees sizes[dim - 1] of a scalar. */
static opjit_status guarded(opjit_call *call, int64_t len, const int64_t **numbers)
{
    void *memory;
    OPJIT_TRY(opjit_host_block(call, (size_t)(len + 2 * GUARD) * sizeof(int64_t), &memory));
    int64_t *before = (int64_t *)memory;
    int64_t *copy = before + GUARD;
    if (len > 0)
        memcpy(copy, *numbers, (size_t)len * sizeof *copy);
    __asan_poison_memory_region(before, GUARD * sizeof *before);
    __asan_poison_memory_region(copy + len, GUARD * sizeof *copy);
    *numbers = copy;
    return OPJIT_OK;
}
#endif

/*
 * Read a torch tensor's fields. The data pointer is read apart: writing may first need a copy (copy-on-write).
 */
static opjit_status describe(opjit_tensor *view)
{
    torch_tensor tensor = view->handle;
    int64_t *sizes, *strides;
    int32_t dtype;
    OPJIT_CHECK(aoti_torch_get_device_type(tensor, &view->device_type) == 0,
                "an argument is an undefined tensor; declare it Tensor? if it may be None");
    OPJIT_TORCH(aoti_torch_get_dim(tensor, &view->dim));
    OPJIT_TORCH(aoti_torch_get_sizes(tensor, &sizes));
    OPJIT_TORCH(aoti_torch_get_strides(tensor, &strides));
    OPJIT_TORCH(aoti_torch_get_dtype(tensor, &dtype));
    view->device_index = -1; /* even for a tensor on "cpu:0" */
    if (view->device_type != torch_cpu)
        OPJIT_TORCH(aoti_torch_get_device_index(tensor, &view->device_index));
    view->sizes = sizes;
    view->strides = strides;
#ifdef __SANITIZE_ADDRESS__
    OPJIT_TRY(guarded(view->call, view->dim, &view->sizes));
    OPJIT_TRY(guarded(view->call, view->dim, &view->strides));
#endif
    view->dtype = opjit_dtype_of((torch_ivalue)dtype);
    measure(view);
    return OPJIT_OK;
}

static uint64_t interrupts_so_far(void);

/* Every tensor of a call is on one device. */
static opjit_status same_device(opjit_call *call, const opjit_tensor *view, const char *name)
{
    if (call->device_type < 0) {
        call->device_type = view->device_type;
        call->device_index = view->device_index;
        call->interrupts = interrupts_so_far();
    }
    OPJIT_CHECK(
        view->device_type == call->device_type && view->device_index == call->device_index,
        "expected all tensors on one device, but `%s` is on another one than the tensors before it; move it with "
        ".to()",
        name);
    return OPJIT_OK;
}

/* An expanded tensor: the ops of torch do not write it either, and raise an error with this text. */
static opjit_status no_overlap(const opjit_tensor *view)
{
    for (int64_t d = 0; d < view->dim; d++)
        OPJIT_CHECK(view->contiguous || view->sizes[d] < 2 || view->strides[d] != 0,
                    "unsupported operation: more than one element of the written-to tensor refers to a single memory "
                    "location. Please clone() the tensor before performing the operation.");
    return OPJIT_OK;
}

opjit_status opjit_read_tensor(opjit_call *call, torch_ivalue value, bool writes, const char *name, opjit_tensor *view)
{
    view->handle = opjit_handle(value);
    view->call = call;
    OPJIT_TRY(describe(view));
    OPJIT_TRY(same_device(call, view, name));
    if (writes) {
        OPJIT_TRY(no_overlap(view));
        OPJIT_TORCH(torch_get_mutable_data_ptr(view->handle, &view->data));
    } else
        OPJIT_TORCH(torch_get_const_data_ptr(view->handle, (const void **)&view->data));
    return OPJIT_OK;
}

opjit_status opjit_read_string(torch_ivalue value, const char **text)
{
    OPJIT_TORCH(torch_string_c_str((torch_string)(uintptr_t)value, text));
    return OPJIT_OK;
}

/* Copy a list's boxed items into memory of the call. */
static opjit_status read_items(opjit_call *call, torch_ivalue value, torch_ivalue **items, int64_t *len)
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

opjit_status opjit_read_ints(opjit_call *call, torch_ivalue value, opjit_ints *list)
{
    torch_ivalue *items;
    OPJIT_TRY(read_items(call, value, &items, &list->len));
    list->data = (const int64_t *)items; /* the boxed form of an int is the int */
    return OPJIT_OK;
}

/* A list with items that are unboxed one by one. */
#define OPJIT_READ_NUMBERS(name_, list_, type_, unbox_) \
    opjit_status name_(opjit_call *call, torch_ivalue value, list_ *list) \
    { \
        torch_ivalue *items; \
        void *memory; \
        OPJIT_TRY(read_items(call, value, &items, &list->len)); \
        OPJIT_TRY(opjit_host_block(call, (size_t)list->len * sizeof(type_), &memory)); \
        for (int64_t i = 0; i < list->len; i++) \
            ((type_ *)memory)[i] = unbox_(items[i]); \
        list->data = (const type_ *)memory; \
        return OPJIT_OK; \
    }

OPJIT_READ_NUMBERS(opjit_read_floats, opjit_floats, double, opjit_double)
OPJIT_READ_NUMBERS(opjit_read_bools, opjit_bools, bool, opjit_bool)

opjit_status opjit_read_tensors(opjit_call *call, torch_ivalue value, bool writes, const char *name,
                                opjit_tensors *list)
{
    torch_ivalue *items;
    void *memory;
    OPJIT_TRY(read_items(call, value, &items, &list->len));
    OPJIT_TRY(opjit_host_block(call, (size_t)list->len * sizeof(opjit_tensor), &memory));
    for (int64_t i = 0; i < list->len; i++)
        OPJIT_TRY(opjit_read_tensor(call, items[i], writes, name, (opjit_tensor *)memory + i));
    list->data = (const opjit_tensor *)memory;
    return OPJIT_OK;
}

opjit_status opjit_draw_seed(opjit_call *call, torch_ivalue generator, const uint64_t **seed)
{
    const int64_t one = 1;
    torch_ivalue stack[2] = {0, 0};
    void *header;
    OPJIT_CHECK(call->device_type >= 0, "expected at least one tensor argument that is not None");
    OPJIT_TRY(opjit_host_block(call, 0, &header));
    torch_tensor *drawn = &call->blocks->tensor;
    OPJIT_TORCH(aoti_torch_empty_strided(1, &one, &one, torch_dtypes[OPJIT_INT64], call->device_type,
                                         call->device_index, drawn));
    if (generator) { /* torch owns its arguments, so it gets a copy */
        torch_ivalue *cell;
        torch_generator copy;
        OPJIT_TORCH(torch_new_generator_handle((torch_generator)(uintptr_t)opjit_cell(generator), &copy));
        OPJIT_TORCH(torch_new_stable_ivalue(&cell));
        *cell = (torch_ivalue)(uintptr_t)copy;
        stack[1] = (torch_ivalue)(uintptr_t)cell;
    }
    stack[0] = opjit_handle_value(*drawn);
    *drawn = NULL;
    OPJIT_TORCH(torch_call_dispatcher("aten::random_", "", stack, OPJIT_TORCH_FLOOR));
    *drawn = opjit_handle(stack[0]);
    OPJIT_TORCH(torch_get_const_data_ptr(*drawn, (const void **)seed));
    return OPJIT_OK;
}

opjit_status opjit_enter_device(opjit_call *call, const opjit_device *device, void **stream)
{
    int32_t current;
    OPJIT_CHECK(call->device_index >= 0, "expected at least one tensor argument that is not None");
    call->device = device;
    if (device->exchange) {
        OPJIT_DEVICE(device, exchange, call->device_index, &current);
        call->before = current;
    } else {
        OPJIT_TORCH(aoti_torch_get_current_device_index(&current));
        if (current != call->device_index)
            OPJIT_TORCH(aoti_torch_create_device_guard(call->device_index, &call->guard));
    }
    OPJIT_DEVICE(device, current, call->device_index, stream);
    return OPJIT_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* 5. Outputs                                                                                     */

opjit_status opjit_empty_strided(opjit_tensor *out, int64_t dim, const int64_t *sizes, const int64_t *strides,
                                 opjit_dtype dtype, const opjit_tensor *like)
{
    int64_t packed[OPJIT_MAX_DIM], *made_sizes = NULL, *made_strides = NULL;
    uint64_t step = 1; /* torch refuses values that do not fit */
    OPJIT_CHECK(!out->handle, "this output was already made: make each output once");
    OPJIT_CHECK((unsigned)dtype < OPJIT_DTYPE_COUNT, "an output needs a dtype that opjit.h names");
    OPJIT_CHECK(dim >= 0 && dim <= OPJIT_MAX_DIM, "an output has 0 to %d dimensions, not %lld", OPJIT_MAX_DIM,
                (long long)dim);
    for (int64_t d = dim - 1; d >= 0; d--) {
        packed[d] = (int64_t)step;
        step *= sizes[d] > 1 ? (uint64_t)sizes[d] : 1;
    }
    OPJIT_TORCH(aoti_torch_empty_strided(dim, sizes, strides ? strides : packed, torch_dtypes[dtype], like->device_type,
                                         like->device_index, &out->handle));
    if (dim > 0) {
        OPJIT_TORCH(aoti_torch_get_sizes(out->handle, &made_sizes));
        OPJIT_TORCH(aoti_torch_get_strides(out->handle, &made_strides));
    }
    OPJIT_TORCH(torch_get_mutable_data_ptr(out->handle, &out->data));
    out->dim = dim;
    out->sizes = made_sizes;
    out->strides = made_strides;
    out->dtype = dtype;
    out->device_type = like->device_type;
    out->device_index = like->device_index;
    measure(out);
    return OPJIT_OK;
}

/* torch's order of two dimensions in memory: > 0 if b is outside a, < 0 if it is inside, 0 if the strides do not
 * show it. */
static int stride_order(const opjit_tensor *t, int64_t a, int64_t b)
{
    if (t->strides[a] == 0 || t->strides[b] == 0)
        return 0;
    if (t->strides[a] != t->strides[b])
        return t->strides[a] < t->strides[b] ? -1 : 1;
    return t->sizes[a] > t->sizes[b] ? 1 : 0;
}

/* Is the tensor "non-overlapping and dense" in torch's terms? */
static bool is_dense(const opjit_tensor *t)
{
    int64_t step = 1;
    while (step != t->numel) {
        int64_t d = 0;
        while (d < t->dim && (t->strides[d] != step || t->sizes[d] < 2))
            d++;
        if (d == t->dim)
            return t->contiguous; /* even for an empty tensor */
        step *= t->sizes[d];
    }
    return true;
}

opjit_status opjit_empty_like(opjit_tensor *out, const opjit_tensor *like, opjit_dtype dtype)
{
    if (like->contiguous || is_dense(like))
        return opjit_empty_strided(out, like->dim, like->sizes, like->strides, dtype, like);
    int64_t order[OPJIT_MAX_DIM], strides[OPJIT_MAX_DIM]; /* innermost first */
    OPJIT_CHECK(like->dim <= OPJIT_MAX_DIM, "a tensor has at most %d dimensions", OPJIT_MAX_DIM);
    for (int64_t d = 0; d < like->dim; d++)
        order[d] = like->dim - 1 - d;
    for (int64_t i = 1; i < like->dim; i++) {
        for (int64_t j = i, k = i - 1; k >= 0; k--) {
            int comparison = stride_order(like, order[k], order[j]);
            if (comparison > 0) {
                int64_t swapped = order[j];
                order[j] = order[k];
                order[k] = swapped;
                j = k;
            } else if (comparison < 0) {
                break;
            }
        }
    }
    int64_t step = 1;
    for (int64_t i = 0; i < like->dim; i++) {
        strides[order[i]] = step;
        step *= like->sizes[order[i]] > 1 ? like->sizes[order[i]] : 1;
    }
    return opjit_empty_strided(out, like->dim, like->sizes, strides, dtype, like);
}

opjit_status opjit_check_output(const opjit_tensor *out, const char *name)
{
    OPJIT_CHECK(out->handle, "the kernel returned OPJIT_OK but did not make the output `%s`", name);
    return OPJIT_OK;
}

opjit_status opjit_make_outputs(opjit_outputs *list, int64_t len)
{
    void *memory;
    OPJIT_CHECK(!list->data, "this list of outputs already has its length: give it once");
    OPJIT_CHECK(len >= 0 && len <= INT32_MAX, "a list of %lld outputs", (long long)len);
    OPJIT_TRY(opjit_host_block(list->call, (size_t)len * sizeof *list->data, &memory));
    list->data = (opjit_tensor *)memset(memory, 0, (size_t)len * sizeof *list->data);
    list->len = len;
    for (int64_t i = 0; i < len; i++)
        list->data[i].call = list->call;
    return OPJIT_OK;
}

opjit_status opjit_check_outputs(const opjit_outputs *list, const char *name)
{
    OPJIT_CHECK(list->data, "the kernel returned OPJIT_OK but did not call opjit_make_outputs for the output `%s`",
                name);
    for (int64_t i = 0; i < list->len; i++)
        OPJIT_CHECK(list->data[i].handle, "the kernel returned OPJIT_OK but did not make item %lld of the output `%s`",
                    (long long)i, name);
    return OPJIT_OK;
}

opjit_status opjit_box_list(opjit_status status, opjit_outputs *list, torch_ivalue *box)
{
    torch_list boxed = NULL;
    if (!status && torch_new_list_reserve_size((size_t)list->len, &boxed))
        status = opjit_torch_error(OPJIT_PLACE, "torch_new_list_reserve_size failed");
    for (int64_t i = 0; i < list->len; i++) {
        torch_ivalue item = opjit_handle_value(list->data[i].handle);
        if (!status && torch_list_push_back(boxed, item))
            status = opjit_torch_error(OPJIT_PLACE, "torch_list_push_back failed");
        if (status)
            opjit_free_tensor(item);
    }
    *box = (torch_ivalue)(uintptr_t)boxed;
    return status;
}

opjit_status opjit_box_optional(opjit_status status, opjit_tensor *out, torch_ivalue *box)
{
    torch_ivalue *cell = NULL;
    if (status || !out->handle)
        return status;
    if (torch_new_stable_ivalue)
        OPJIT_TORCH(torch_new_stable_ivalue(&cell));
    else if (_Znwm)
        cell = (torch_ivalue *)_Znwm(sizeof *cell);
    OPJIT_CHECK(cell, "this process has no C++ library, which an optional result needs");
    *cell = opjit_handle_value(out->handle);
    out->handle = NULL; /* the cell has it */
    *box = (torch_ivalue)(uintptr_t)cell;
    return OPJIT_OK;
}

opjit_status opjit_check_fresh(opjit_status status, torch_ivalue other, opjit_tensor *out, const char *name)
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

opjit_status opjit_check_fresh_list(opjit_status status, torch_ivalue others, opjit_tensor *out, const char *name)
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

/* ---------------------------------------------------------------------------------------------- */
/* 6. Threads                                                                                     */

typedef struct range_call {
    opjit_range_body *body;
    void *context;
    opjit_status error; /* the first one; set once, by compare-and-swap */
} range_call;

static void range_run(int64_t begin, int64_t end, void *range_)
{
    range_call *range = (range_call *)range_;
    opjit_status none = OPJIT_OK, error = range->body(begin, end, range->context);
    if (error && !__atomic_compare_exchange_n(&range->error, &none, error, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        error_free(error);
}

#ifdef __SANITIZE_THREAD__
/* ThreadSanitizer supports pthreads, but not OpenMP, which torch uses for threads. With pthreads, `opjit test` finds
 * races between parts. */
#define PARTS 4

typedef struct part {
    range_call *range;
    int64_t begin, end;
    pthread_mutex_t *leaving;
} part;

/* No part's thread ends before the last one has started: the sanitizer forgets where ended threads were. */
static void *part_run(void *part_)
{
    part *p = (part *)part_;
    range_run(p->begin, p->end, p->range);
    pthread_mutex_lock(p->leaving);
    pthread_mutex_unlock(p->leaving);
    return NULL;
}

static torch_error parallel_for(int64_t begin, int64_t end, int64_t grain, range_call *range)
{
    const int64_t quarter = (end - begin + PARTS - 1) / PARTS, step = quarter > grain ? quarter : grain;
    pthread_mutex_t leaving = PTHREAD_MUTEX_INITIALIZER;
    pthread_t threads[PARTS];
    bool started[PARTS];
    part parts[PARTS];
    int count = 0;
    pthread_mutex_lock(&leaving);
    for (int64_t at = begin; at < end; at += step, count++) {
        parts[count] = (part){range, at, end - at < step ? end : at + step, &leaving};
        started[count] = pthread_create(threads + count, NULL, part_run, parts + count) == 0;
        if (!started[count])
            range_run(parts[count].begin, parts[count].end, range);
    }
    pthread_mutex_unlock(&leaving);
    while (count-- > 0)
        if (started[count])
            pthread_join(threads[count], NULL);
    pthread_mutex_destroy(&leaving);
    return 0;
}
#else
static torch_error parallel_for(int64_t begin, int64_t end, int64_t grain, range_call *range)
{
    return torch_parallel_for(begin, end, grain, range_run, range);
}
#endif

opjit_status opjit_parallel_for(int64_t begin, int64_t end, int64_t grain, opjit_range_body *body, void *context)
{
    range_call range = {body, context, OPJIT_OK};
    if (begin >= end)
        return OPJIT_OK;
    if (end - begin <= grain)
        return body(begin, end, context);
    OPJIT_TORCH(parallel_for(begin, end, grain, &range));
    return range.error;
}

#ifdef __SANITIZE_THREAD__
static int raced;

static opjit_status race(int64_t begin, int64_t end, void *context)
{
    raced++;
    return OPJIT_OK;
}

/* A data race, for `opjit test` to see whether the sanitizer watches: it ignores the fork of a process with threads. */
OPJIT_EXPORT void opjit_race(void);
void opjit_race(void)
{
    const opjit_status error = opjit_parallel_for(0, PARTS, 1, race, NULL);
    if (error)
        error_free(error);
}
#endif

/* ---------------------------------------------------------------------------------------------- */
/* 7. After the kernel                                                                            */

/* Do two views describe one tensor in the same way? */
static bool same_view(const opjit_tensor *a, const opjit_tensor *b)
{
    return a->data == b->data && a->numel == b->numel && a->dim == b->dim && a->sizes == b->sizes &&
           a->strides == b->strides && a->dtype == b->dtype && a->handle == b->handle;
}

opjit_status opjit_check_written(const opjit_tensor *view, const opjit_tensor *before, const char *name)
{
    OPJIT_CHECK(
        same_view(view, before),
        "the kernel assigned to the fields of `%s`, which are a view of torch's tensor and change nothing there; "
        "write the elements through `%s->data`, or use a copy of the struct",
        name, name);
    return opjit_wrote(before);
}

opjit_status opjit_wrote(const opjit_tensor *view)
{
    bool grad = aoti_torch_grad_mode_is_enabled();
    aoti_torch_grad_mode_set_enabled(false);
    torch_error failed = aoti_torch_copy_(view->handle, view->handle, 0);
    aoti_torch_grad_mode_set_enabled(grad);
    return failed ? opjit_torch_error(OPJIT_PLACE, "could not count up the version of a written tensor") : OPJIT_OK;
}

void opjit_free_tensor(torch_ivalue value)
{
    if (value)
        (void)aoti_torch_delete_tensor_object(opjit_handle(value));
}

/* torch made the cell with C++ new, and frees it for us only from 2.13 on. */
void opjit_free_cell(torch_ivalue optional)
{
    torch_ivalue *cell = (torch_ivalue *)(uintptr_t)optional;
    if (torch_delete_stable_ivalue)
        (void)torch_delete_stable_ivalue(cell);
    else if (_ZdlPv)
        _ZdlPv(cell);
}

void opjit_free_generator(torch_ivalue optional)
{
    if (!optional)
        return;
    (void)torch_delete_generator((torch_generator)(uintptr_t)opjit_cell(optional));
    opjit_free_cell(optional);
}

void opjit_free_string(torch_ivalue value)
{
    (void)torch_delete_string((torch_string)(uintptr_t)value);
}

/* Of numbers. */
void opjit_free_list(torch_ivalue value)
{
    (void)torch_delete_list((torch_list)(uintptr_t)value);
}

/* With its tensors. */
void opjit_free_tensors(torch_ivalue value)
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

static _Thread_local int32_t *held_lock; /* of the group of ranks that the thread's call uses */
enum { FREE, HELD, AWAITED };            /* a group's lock; other threads also wait for one that is AWAITED */

/* Sleep until the word changes from what was seen, or another thread or process wakes it, for 5 ms at most. */
static void rest(const void *word, uint32_t seen)
{
    const struct timespec most = {0, 5000000};
    (void)syscall(SYS_futex, word, FUTEX_WAIT, seen, &most, NULL, 0);
}

static void wake(const void *word, int sleepers)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE, sleepers, NULL, NULL, 0);
}

void opjit_free_call(opjit_call *call)
{
    int32_t entered;
    while (call->blocks) {
        opjit_block *block = call->blocks;
        call->blocks = block->next;
        if (block->tensor)
            (void)aoti_torch_delete_tensor_object(block->tensor);
        if (block->device_memory)
            (void)call->device->free(block->device_memory);
        free(block);
    }
    if (call->guard)
        (void)aoti_torch_delete_device_guard(call->guard);
    if (call->before >= 0)
        (void)call->device->exchange(call->before, &entered);
    if (held_lock) {
        if (__atomic_exchange_n(held_lock, FREE, __ATOMIC_RELEASE) == AWAITED)
            wake(held_lock, 1);
        held_lock = NULL;
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* 8. Interrupts                                                                                  */

/* A handler that counts SIGINTs and calls the one before it, which is Python's. The first op that checks installs
 * it. */
typedef struct opjit_interrupts {
    uint64_t count;
    void (*handler)(int number, siginfo_t *info, void *context);
    struct sigaction before;
    bool installed;
    bool busy;
} opjit_interrupts;

static void count_interrupt(int number, siginfo_t *info, void *context);

static opjit_interrupts own_interrupts = {.handler = count_interrupt};
static opjit_interrupts *interrupts = &own_interrupts; /* or the handlers of the first library in the process */

/* Of Python's C interface; missing in a process without Python. */
__attribute__((weak)) int Py_IsInitialized(void);
__attribute__((weak)) int PyGILState_Ensure(void);
__attribute__((weak)) void PyGILState_Release(int state);
__attribute__((weak)) int PyErr_CheckSignals(void);
__attribute__((weak)) void PyErr_Fetch(void **type, void **value, void **traceback);
__attribute__((weak)) void PyErr_Restore(void *type, void *value, void *traceback);
__attribute__((weak)) int Py_AddPendingCall(int (*function)(void *), void *argument);

OPJIT_EXPORT opjit_interrupts *opjit_share_interrupts(opjit_interrupts *of_first);

/* One handler for all ops of a process: handlers installed over each other would call each other for ever. */
opjit_interrupts *opjit_share_interrupts(opjit_interrupts *of_first)
{
    if (of_first)
        interrupts = of_first;
    return interrupts;
}

static uint64_t interrupts_so_far(void)
{
    return __atomic_load_n(&interrupts->count, __ATOMIC_RELAXED);
}

static void count_interrupt(int number, siginfo_t *info, void *context)
{
    (void)__atomic_add_fetch(&own_interrupts.count, 1, __ATOMIC_RELAXED);
    if (own_interrupts.before.sa_flags & SA_SIGINFO)
        own_interrupts.before.sa_sigaction(number, info, context);
    else
        own_interrupts.before.sa_handler(number);
}

/*
 * Install the handler, again where signal.signal() put Python's back. A third party's handler that replaced it may call
 * it, and stays. Without a handler SIGINT ends the process, or is ignored: nothing to count.
 */
static void install(void)
{
    struct sigaction now, counting;
    if (sigaction(SIGINT, NULL, &now) || now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN ||
        now.sa_sigaction == interrupts->handler)
        return;
    if (interrupts->installed && now.sa_handler != interrupts->before.sa_handler)
        return;
    interrupts->before = counting = now;
    interrupts->installed = true;
    counting.sa_sigaction = interrupts->handler;
    counting.sa_flags |= SA_SIGINFO;
    (void)sigaction(SIGINT, &counting, NULL);
}

static void count_from_now_on(void)
{
    if (__atomic_exchange_n(&interrupts->busy, true, __ATOMIC_ACQUIRE))
        return;
    install();
    __atomic_store_n(&interrupts->busy, false, __ATOMIC_RELEASE);
}

bool opjit_interrupted(const opjit_tensor *x)
{
    count_from_now_on();
    if (interrupts_so_far() == x->call->interrupts)
        return false;
    __atomic_store_n(&x->call->interrupted, true, __ATOMIC_RELAXED);
    return true;
}

/* What Python's handler raised; only the main thread, with Python's lock, gets here. */
static void *raised[3];

static int raise_again(void *unused)
{
    (void)unused;
    PyErr_Restore(raised[0], raised[1], raised[2]);
    return -1;
}

/*
 * Run Python's handlers of signals, which only the main thread may do. An exception would be lost on the way through
 * torch, so Python raises it after the op.
 */
static bool python_will_raise(void)
{
    if (!Py_IsInitialized || !Py_IsInitialized() || syscall(SYS_gettid) != getpid())
        return false;
    int state = PyGILState_Ensure();
    bool will = PyErr_CheckSignals() != 0;
    if (will) {
        PyErr_Fetch(raised, raised + 1, raised + 2);
        will = Py_AddPendingCall(raise_again, NULL) == 0;
    }
    PyGILState_Release(state);
    return will;
}

opjit_status opjit_end_interrupted(opjit_status status)
{
    if (python_will_raise() || status)
        return status;
    OPJIT_FAIL("interrupted by Ctrl-C");
}

/* ---------------------------------------------------------------------------------------------- */
/* 9. Groups of ranks, for opjit_peers.h                                                         */

static struct opjit_group *const *first_group; /* the process's list, which opjit.distributed makes */

struct opjit_group *opjit_first_group(void);
const char *opjit_op_name(void);
opjit_status opjit_hold(int32_t *lock);
uint64_t opjit_clock(void);
void opjit_rest(const uint64_t *at, uint64_t seen);
void opjit_wake(uint64_t *at);
OPJIT_EXPORT void opjit_share_groups(struct opjit_group *const *first);

void opjit_share_groups(struct opjit_group *const *first)
{
    first_group = first;
}

struct opjit_group *opjit_first_group(void)
{
    return first_group ? __atomic_load_n(first_group, __ATOMIC_ACQUIRE) : NULL;
}

const char *opjit_op_name(void)
{
    return opjit_this.op;
}

/*
 * Ranks can only match calls of a group that come one after the other: other threads' calls sleep until this one ends,
 * which takes as long as it waits for a rank, or until Ctrl-C.
 */
opjit_status opjit_hold(int32_t *lock)
{
    if (held_lock == lock)
        return OPJIT_OK;
    OPJIT_CHECK(!held_lock, "a call uses one group of ranks");
    int32_t found = FREE;
    if (!__atomic_compare_exchange_n(lock, &found, HELD, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        count_from_now_on();
        const uint64_t before = interrupts_so_far();
        while (__atomic_exchange_n(lock, AWAITED, __ATOMIC_ACQUIRE) != FREE) {
            OPJIT_CHECK(interrupts_so_far() == before,
                        "interrupted by Ctrl-C while another thread's call in the same group waits for a rank");
            rest(lock, AWAITED);
        }
    }
    held_lock = lock;
    return OPJIT_OK;
}

uint64_t opjit_clock(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void opjit_rest(const uint64_t *at, uint64_t seen)
{
    rest(at, (uint32_t)seen);
}

void opjit_wake(uint64_t *at)
{
    wake(at, INT32_MAX);
}

/* ---------------------------------------------------------------------------------------------- */
/* 10. Registration                                                                              */

static bool prepared;              /* torch's numbers were read */
static torch_library registration; /* torch's handle, while registered */

/* torch keeps `entry` for good; a reload only changes where it jumps, so no thread ever meets a freed kernel. */
static torch_boxed_kernel *target = opjit_kernel;

static void entry(torch_ivalue *stack, uint64_t num_args, uint64_t num_outputs)
{
    __atomic_load_n(&target, __ATOMIC_ACQUIRE)(stack, num_args, num_outputs);
}

/*
 * An op with variants, which are kernels of other libraries of the same source: one for each bucket of sizes. The
 * bucket of a call follows from the dtypes of its tensors, and their sizes to the next power of two.
 */
enum { BUCKETS = 256 };
static struct {
    uint64_t bucket; /* 0 is a free place */
    torch_boxed_kernel *kernel;
} choices[BUCKETS];
static _Thread_local torch_boxed_kernel *forced; /* instead of a choice */
static _Thread_local uint64_t asked;             /* the bucket of the thread's last call */

static uint64_t mixed(uint64_t hash, uint64_t number)
{
    hash = (hash ^ number) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}

static uint64_t bucket_of(const torch_ivalue *stack, uint64_t num_args)
{
    uint64_t hash = 1;
    for (uint64_t i = 0; i < num_args && i < 64; i++) {
        torch_tensor tensor = opjit_handle(stack[i]);
        int64_t dim, *sizes;
        int32_t dtype;
        if (!(opjit_this.tensors >> i & 1) || aoti_torch_get_dim(tensor, &dim) ||
            aoti_torch_get_sizes(tensor, &sizes) || aoti_torch_get_dtype(tensor, &dtype))
            continue;
        hash = mixed(hash, (uint64_t)dim << 32 | (uint32_t)dtype);
        for (int64_t d = 0; d < dim; d++)
            hash = mixed(hash, sizes[d] ? 64 - (uint64_t)__builtin_clzll((unsigned long long)sizes[d]) : 0);
    }
    return hash ? hash : 1;
}

/* The place of a bucket, or the free one where it belongs; BUCKETS if there is neither. */
static uint64_t place_of(uint64_t bucket)
{
    for (uint64_t i = 0; i < BUCKETS; i++) {
        uint64_t place = (bucket + i) % BUCKETS, found = __atomic_load_n(&choices[place].bucket, __ATOMIC_ACQUIRE);
        if (found == bucket || found == 0)
            return place;
    }
    return BUCKETS;
}

/* An error that comes back through Python has the name of its type before it, and Python's lines behind. */
static opjit_status through_python(opjit_status error)
{
    char *end = strstr(error->text, "\n\nAt:\n"), *name = strstr(error->text, opjit_this.op);
    if (end)
        *end = '\0';
    const char *behind = name ? name + strlen(opjit_this.op) : "";
    if (strncmp(behind, ": ", 2) == 0)
        memmove(error->text, behind + 2, strlen(behind + 2) + 1);
    return error;
}

static void by_bucket(torch_ivalue *stack, uint64_t num_args, uint64_t num_outputs)
{
    torch_boxed_kernel *kernel = forced;
    asked = bucket_of(stack, num_args);
    if (!kernel) {
        uint64_t place = place_of(asked);
        if (place < BUCKETS && __atomic_load_n(&choices[place].bucket, __ATOMIC_ACQUIRE))
            kernel = __atomic_load_n(&choices[place].kernel, __ATOMIC_RELAXED);
    }
    if (kernel)
        kernel(stack, num_args, num_outputs);
    else if (torch_call_dispatcher(opjit_this.chooser, "", stack, OPJIT_TORCH_FLOOR))
        opjit_raise(opjit_this.op, through_python(opjit_torch_error(NULL, 0, "torch's own message is on stderr")));
}

OPJIT_EXPORT void opjit_enable_variants(void);
OPJIT_EXPORT uint64_t opjit_force_variant(torch_boxed_kernel *kernel);
OPJIT_EXPORT void opjit_set_variant(uint64_t bucket, torch_boxed_kernel *kernel);

/* From now on, let the Python op choose again for each bucket. One thread at a time calls this and opjit_set_variant. */
void opjit_enable_variants(void)
{
    for (uint64_t place = 0; place < BUCKETS; place++)
        __atomic_store_n(&choices[place].bucket, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&target, by_bucket, __ATOMIC_RELEASE);
}

/* Run one variant in all calls of this thread; NULL ends that. Returns the bucket of its last call. */
uint64_t opjit_force_variant(torch_boxed_kernel *kernel)
{
    forced = kernel;
    return asked;
}

/* Run a variant in all calls of a bucket. If the table is full, each call goes to Python. */
void opjit_set_variant(uint64_t bucket, torch_boxed_kernel *kernel)
{
    uint64_t place = place_of(bucket);
    if (place == BUCKETS)
        return;
    __atomic_store_n(&choices[place].kernel, kernel, __ATOMIC_RELAXED);
    __atomic_store_n(&choices[place].bucket, bucket, __ATOMIC_RELEASE);
}

OPJIT_EXPORT void opjit_redirect(torch_boxed_kernel *kernel);
OPJIT_EXPORT void opjit_prepare(void);
OPJIT_EXPORT int opjit_register(void);
OPJIT_EXPORT int opjit_unregister(void);
OPJIT_EXPORT int opjit_define(void);

/* Jump to the kernel of a newer library from now on. */
void opjit_redirect(torch_boxed_kernel *kernel)
{
    __atomic_store_n(&target, kernel, __ATOMIC_RELEASE);
}

/* Read torch's numbers; needed before opjit_kernel may be called. Once: a reload may come back to a library in use. */
void opjit_prepare(void)
{
    if (!prepared)
        read_codes();
    prepared = true;
}

/* Make this library's kernel torch's kernel for its op. Returns 0, or 1 when torch refused. */
int opjit_register(void)
{
    opjit_prepare();
    if (registration)
        return 0;
    opjit_redirect(opjit_kernel); /* an earlier registration may have been reloaded */
    if (aoti_torch_library_init_impl(opjit_this.ns, opjit_this.dispatch_key, "opjit", 0, &registration))
        return 1;
    if (torch_library_impl(registration, opjit_this.name, entry, OPJIT_TORCH_FLOOR) == 0)
        return 0;
    opjit_unregister();
    return 1;
}

/* Up to 2.11, torch's C interface does not support tags. */
static torch_error define(torch_library library)
{
    int32_t tags[32];
    if (!torch_library_def_with_tags)
        return aoti_torch_library_def(library, opjit_this.schema);
    for (int32_t i = 0; i < opjit_this.num_tags; i++)
        tags[i] = opjit_this.tags[i]();
    return torch_library_def_with_tags(library, opjit_this.schema, tags, opjit_this.num_tags);
}

/*
 * For a process without Python, in which the op is not declared: define its schema and tags in torch, then register the
 * kernel. Returns 0, or 1 if torch rejected the op, for example because it is already defined: then another device's
 * library of the op calls opjit_register().
 */
int opjit_define(void)
{
    static torch_library definition;
    if (definition)
        return opjit_register();
    if (aoti_torch_library_init_fragment(opjit_this.ns, "opjit", 0, &definition))
        return 1;
    if (define(definition) == 0 && opjit_register() == 0)
        return 0;
    aoti_torch_delete_library_object(definition);
    definition = NULL;
    return 1;
}

/* Undo it: calls fall through to opjit's Python kernel again. */
int opjit_unregister(void)
{
    torch_library library = registration;
    registration = NULL;
    return library && aoti_torch_delete_library_object(library) != 0;
}
