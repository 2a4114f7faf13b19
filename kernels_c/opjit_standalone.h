/*
 * opjit_standalone.h - a shared library that holds the binaries of ops and makes the ops known to torch when it is opened.
 *
 * torch.ops.load_library("build/libmy_ops.so") and dlopen() open the library in a process with or without opjit. Its
 * constructor defines each op's schema, and registers one function for each kind of device. The first call on a device
 * chooses the binary for its architecture, maps it from memory and calls its kernel.
 *
 * If a process has the op from elsewhere, for example because opjit declares it, the library leaves the op alone. If
 * opjit declares the op later, it calls opjit_release() and replaces the op.
 *
 * The generated file (templates/standalone.c.in) fills in opjit_ops and includes this header.
 */
#ifndef OPJIT_STANDALONE_H
#define OPJIT_STANDALONE_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "opjit_shim.h"

enum { OPJIT_MAX_DEVICES = 64 };

/* A complete library of the cache, stored as bytes in this library. */
typedef struct {
    const char *start, *end;
    const char *arch;    /* "x86-64-v3", "sm_80+sm_90" */
    const char *runtime; /* the CUDA runtime that it needs, "libcudart.so.13", or "" */
    const char *needs;   /* for a CPU: the features that /proc/cpuinfo must list */
    torch_boxed_kernel *kernel;
} opjit_binary;

/* The binaries of an op for one kind of device, best first. */
typedef struct {
    const char *dispatch_key;
    torch_boxed_kernel *entry; /* calls opjit_call_kernel with this kernel */
    opjit_binary *binaries;
    int count;
    torch_boxed_kernel *chosen[OPJIT_MAX_DEVICES]; /* by the device's index */
    torch_library registration;
} opjit_kernel_set;

typedef struct opjit_op {
    const char *ns, *name, *qualified;
    const char *schema; /* without the namespace */
    int32_t (*const *tags)(void);
    int32_t num_tags;
    uint64_t tensors; /* bit i is set if argument i is a Tensor, neither optional nor in a list */
    opjit_kernel_set *kernels;
    int count;
    torch_library definition; /* NULL if another library defined the op */
    struct opjit_op *next;
} opjit_op;

/*
 * The ops that libraries of this kind registered in the process, newest first. All of them share this variable, because
 * the dynamic loader binds a unique symbol once for the process. The number changes with the layout of opjit_op.
 */
extern opjit_op *opjit_standalone_ops_1;
__asm__(".pushsection .bss.opjit_standalone_ops_1,\"aw\",%nobits\n"
        ".balign 8\n"
        ".globl opjit_standalone_ops_1\n"
        ".type opjit_standalone_ops_1, %gnu_unique_object\n"
        ".size opjit_standalone_ops_1, 8\n"
        "opjit_standalone_ops_1: .zero 8\n"
        ".popsection\n");

/* ---------------------------------------------------------------------------------------------- */
/* Choosing a binary                                                                              */

/* Return whether this CPU has all features of a list; the list and the line of /proc/cpuinfo separate them by blanks. */
static bool opjit_cpu_has(const char *needs)
{
    char line[8192] = " ", copy[2048], *state;
    FILE *file = *needs ? fopen("/proc/cpuinfo", "re") : NULL;
    bool found = false;
    while (file && !found && fgets(line + 1, sizeof line - 2, file))
        found = strncmp(line + 1, "flags", 5) == 0 || strncmp(line + 1, "Features", 8) == 0;
    if (file)
        fclose(file);
    line[strcspn(line, "\n")] = ' ';
    snprintf(copy, sizeof copy, "%s", needs);
    for (char *word = strtok_r(copy, " ", &state); word; word = strtok_r(NULL, " ", &state)) {
        char padded[64];
        snprintf(padded, sizeof padded, " %s ", word);
        if (!found || !strstr(line, padded))
            return false;
    }
    return true;
}

/* Return the compute capability of a GPU, such as 90, or -1 if the CUDA runtime is not in this process. */
static int opjit_capability(const char *runtime, int32_t device_index)
{
    enum { MAJOR = 75, MINOR = 76 };
    int major, minor, (*attribute)(int *, int, int) = NULL;
    void *library = dlopen(runtime, RTLD_NOW | RTLD_NOLOAD);
    if (library)
        *(void **)&attribute = dlsym(library, "cudaDeviceGetAttribute");
    if (!attribute || attribute(&major, MAJOR, device_index) || attribute(&minor, MINOR, device_index))
        return -1;
    return major * 10 + minor;
}

/* Return whether a binary with code for "sm_80+sm_90a" serves a GPU: equal, or an earlier minor version of it. */
static bool opjit_gpu_served(const char *archs, int capability)
{
    for (const char *part = archs; part; part = strchr(part + 1, '+')) {
        char *suffix;
        int number = (int)strtol(part + strcspn(part, "0123456789"), &suffix, 10);
        if (number == capability || (*suffix != 'a' && number / 10 == capability / 10 && number < capability))
            return true;
    }
    return false;
}

static bool opjit_serves(const opjit_binary *binary, int32_t device_index)
{
    return *binary->runtime ? opjit_gpu_served(binary->arch, opjit_capability(binary->runtime, device_index))
                            : opjit_cpu_has(binary->needs);
}

/* Map a binary from memory under a new path, because the dynamic loader returns the opened library for a known path. */
static torch_boxed_kernel *opjit_open(opjit_binary *binary, const char *qualified)
{
    char path[256] = "/proc/self/fd/";
    size_t length = strlen(path), size = (size_t)(binary->end - binary->start);
    uintptr_t unique = (uintptr_t)binary;
    void (*prepare)(void) = NULL;
    torch_boxed_kernel *kernel = NULL;
    int file = memfd_create(qualified, MFD_CLOEXEC);
    if (file < 0 || write(file, binary->start, size) != (ssize_t)size) {
        if (file >= 0)
            close(file);
        return NULL;
    }
    for (; unique; unique >>= 1) {
        length += (size_t)sprintf(path + length, "%s", unique & 1 ? "./" : "/");
    }
    sprintf(path + length, "%d", file);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    close(file);
    if (library) {
        *(void **)&prepare = dlsym(library, "opjit_prepare");
        *(void **)&kernel = dlsym(library, "opjit_kernel");
    }
    if (!prepare || !kernel)
        return NULL;
    prepare();
    return kernel;
}

/* ---------------------------------------------------------------------------------------------- */
/* Calls                                                                                          */

/* The index of a call's device: the device of its first tensor or, without a tensor, the current one. 0 for a CPU. */
static int32_t opjit_device_of(const opjit_op *op, const torch_ivalue *stack, uint64_t num_args)
{
    int32_t index = 0;
    for (uint64_t i = 0; i < num_args && i < 64; i++) {
        if (op->tensors >> i & 1) {
            aoti_torch_get_device_index((torch_tensor)(uintptr_t)stack[i], &index);
            return index < 0 ? 0 : index;
        }
    }
    return aoti_torch_get_current_device_index(&index) || index < 0 ? 0 : index;
}

/* Throw torch's exception for a call that no binary serves. The tensors are freed first: the exception skips torch's code. */
static void opjit_refuse_call(const opjit_op *op, const opjit_kernel_set *set, const char *problem, torch_ivalue *stack,
                              uint64_t num_args)
{
    char message[1024], archs[512] = "";
    size_t length = 0;
    for (int i = 0; i < set->count && length < sizeof archs; i++) {
        const opjit_binary *binary = &set->binaries[i];
        length += (size_t)snprintf(archs + length, sizeof archs - length, "%s%s%s%s", i ? ", " : "", binary->arch,
                                   *binary->runtime ? " with " : "", binary->runtime);
    }
    for (uint64_t i = 0; i < num_args && i < 64; i++)
        if (op->tensors >> i & 1)
            aoti_torch_delete_tensor_object((torch_tensor)(uintptr_t)stack[i]);
    snprintf(
        message, sizeof message,
        "%s: %s; this library was built for %s: build it again with `opjit get %s --build-directory DIR --name NAME "
        "--arch ARCH`",
        op->qualified, problem, archs, op->qualified);
    aoti_torch_check(false, op->qualified, "opjit", 0, message);
}

/* Run an op on the binary for the device of the call. The choice is made once for each device. */
static void opjit_call_kernel(const opjit_op *op, opjit_kernel_set *set, torch_ivalue *stack, uint64_t num_args,
                              uint64_t num_outputs)
{
    int32_t device = opjit_device_of(op, stack, num_args);
    torch_boxed_kernel **chosen = &set->chosen[device % OPJIT_MAX_DEVICES];
    torch_boxed_kernel *kernel = __atomic_load_n(chosen, __ATOMIC_ACQUIRE);
    if (!kernel) {
        opjit_binary *binary = set->binaries, *end = binary + set->count;
        while (binary < end && !opjit_serves(binary, device))
            binary++;
        if (binary == end)
            opjit_refuse_call(op, set, "expected a device of an architecture that this library has", stack, num_args);
        kernel = opjit_open(binary, op->qualified);
        if (!kernel) {
            const char *said = dlerror();
            opjit_refuse_call(op, set, said ? said : "cannot map its binary from memory", stack, num_args);
        }
        __atomic_store_n(chosen, kernel, __ATOMIC_RELEASE);
    }
    kernel(stack, num_args, num_outputs);
}

/* ---------------------------------------------------------------------------------------------- */
/* Registration                                                                                   */

static opjit_op *opjit_registered(const char *qualified, const char *dispatch_key)
{
    for (opjit_op *op = opjit_standalone_ops_1; op; op = op->next)
        for (int i = 0; strcmp(op->qualified, qualified) == 0 && i < op->count; i++)
            if (!dispatch_key ||
                (op->kernels[i].registration && strcmp(op->kernels[i].dispatch_key, dispatch_key) == 0))
                return op;
    return NULL;
}

/* Up to 2.11, torch's C interface does not support tags. */
static torch_error opjit_define_schema(opjit_op *op)
{
    int32_t tags[32];
    if (!torch_library_def_with_tags)
        return aoti_torch_library_def(op->definition, op->schema);
    for (int32_t i = 0; i < op->num_tags; i++)
        tags[i] = op->tags[i]();
    return torch_library_def_with_tags(op->definition, op->schema, tags, op->num_tags);
}

static void opjit_delete(torch_library *library)
{
    if (*library)
        aoti_torch_delete_library_object(*library);
    *library = NULL;
}

/* Make an op known to torch, unless the process has it from elsewhere. `file` is this library's path. */
static void opjit_register_op(opjit_op *op, const char *file)
{
    const opjit_op *other = opjit_registered(op->qualified, NULL);
    if (other && strcmp(other->schema, op->schema) != 0) /* for example a library of an older version of the op */
        return;
    if (!other && (aoti_torch_library_init_fragment(op->ns, file, 0, &op->definition) || opjit_define_schema(op))) {
        opjit_delete(&op->definition);
        return;
    }
    for (int i = 0; i < op->count; i++) {
        opjit_kernel_set *set = &op->kernels[i];
        if (opjit_registered(op->qualified, set->dispatch_key))
            continue;
        if (aoti_torch_library_init_impl(op->ns, set->dispatch_key, file, 0, &set->registration) ||
            torch_library_impl(set->registration, op->name, set->entry, OPJIT_TORCH_FLOOR))
            opjit_delete(&set->registration);
    }
    op->next = opjit_standalone_ops_1;
    opjit_standalone_ops_1 = op;
}

/* Unregister an op from torch, with the kernels of all libraries of this kind. Called by opjit before it declares
 * the op. */
__attribute__((visibility("default"))) void opjit_release(const char *qualified);

void opjit_release(const char *qualified)
{
    for (opjit_op **place = &opjit_standalone_ops_1; *place;) {
        opjit_op *op = *place;
        if (strcmp(op->qualified, qualified) != 0) {
            place = &op->next;
            continue;
        }
        for (int i = 0; i < op->count; i++)
            opjit_delete(&op->kernels[i].registration);
        opjit_delete(&op->definition);
        *place = op->next;
    }
}

#endif
