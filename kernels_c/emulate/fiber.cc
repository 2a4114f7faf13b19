/*
 * fiber.cc - the stacks of a grid's threads. A thread starts on the stack where the one before it has ended, so that a
 * kernel without barriers is a loop and needs one.
 */
#include "runtime.h"

#include <sys/mman.h>

enum { STACK = 256 << 10, GUARD = 4096, OF_AREA = 512, AREAS = 32 };

static arena stacks = {STACK, "threads that wait", {}, {}, 0};
static std::vector<fiber *> unused_fibers;

char *arena::take(void)
{
    if (!unused.empty()) {
        char *piece = unused.back();
        unused.pop_back();
        return piece;
    }
    if (made == areas.size() * OF_AREA) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *area = mmap(nullptr, bytes * OF_AREA, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (area == MAP_FAILED || areas.size() == AREAS) {
            fprintf(stderr, "CUDA, emulated: no memory for more than %zu %s at once\n", made, what);
            abort();
        }
        areas.push_back((char *)area);
    }
    return areas.back() + made++ % OF_AREA * bytes;
}

bool arena::owns(uintptr_t address) const
{
    for (const char *area : areas)
        if (address - (uintptr_t)area < bytes * OF_AREA)
            return true;
    return false;
}

/*
 * emu_switch(void **save, void *load): keep what the ABI has a called function keep on the stack, exchange stacks, and
 * return to where that stack's owner called. https://gitlab.com/x86-psABIs/x86-64-ABI section 3.2.1;
 * https://github.com/ARM-software/abi-aa AAPCS64 section 6.1.
 */
#if defined(__x86_64__)
enum { SAVED = 6 };
asm(".text\n"
    ".globl emu_switch\n"
    ".type emu_switch,@function\n"
    ".hidden emu_switch\n"
    "emu_switch:\n"
    "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
    "    mov %rsp, (%rdi)\n"
    "    mov %rsi, %rsp\n"
    "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n"
    "    ret\n"
    ".size emu_switch, .-emu_switch\n");

/* The stack of a fiber that has not begun: zeros for the registers, and the address that `ret` goes to. */
static void prepare_stack(fiber *fresh, void (*entry)(void))
{
    void **top = (void **)(fresh->stack + STACK) - 2;
    *top = (void *)entry;
    top -= SAVED;
    memset(top, 0, SAVED * sizeof *top);
    fresh->top = top;
}
#elif defined(__aarch64__)
enum { SAVED = 20 };
asm(".text\n"
    ".globl emu_switch\n"
    ".type emu_switch,%function\n"
    ".hidden emu_switch\n"
    "emu_switch:\n"
    "    sub sp, sp, #160\n"
    "    stp x19, x20, [sp]\n    stp x21, x22, [sp, #16]\n    stp x23, x24, [sp, #32]\n"
    "    stp x25, x26, [sp, #48]\n    stp x27, x28, [sp, #64]\n    stp x29, x30, [sp, #80]\n"
    "    stp d8, d9, [sp, #96]\n    stp d10, d11, [sp, #112]\n"
    "    stp d12, d13, [sp, #128]\n    stp d14, d15, [sp, #144]\n"
    "    mov x2, sp\n"
    "    str x2, [x0]\n"
    "    mov sp, x1\n"
    "    ldp x19, x20, [sp]\n    ldp x21, x22, [sp, #16]\n    ldp x23, x24, [sp, #32]\n"
    "    ldp x25, x26, [sp, #48]\n    ldp x27, x28, [sp, #64]\n    ldp x29, x30, [sp, #80]\n"
    "    ldp d8, d9, [sp, #96]\n    ldp d10, d11, [sp, #112]\n"
    "    ldp d12, d13, [sp, #128]\n    ldp d14, d15, [sp, #144]\n"
    "    add sp, sp, #160\n"
    "    ret\n"
    ".size emu_switch, .-emu_switch\n");

static void prepare_stack(fiber *fresh, void (*entry)(void))
{
    void **top = (void **)(fresh->stack + STACK) - SAVED;
    memset(top, 0, SAVED * sizeof *top);
    top[11] = (void *)entry; /* x30, to which `ret` goes */
    fresh->top = top;
}
#else
#error "CUDA's emulation knows x86-64 and aarch64: write emu_switch for this processor"
#endif

static fiber *make_fiber(void)
{
    fiber *fresh = new fiber{stacks.take(), nullptr};
    mprotect(fresh->stack, GUARD, PROT_NONE);
    return fresh;
}

/* The bytes below its own frame, which the next function that the caller calls gets. It calls none itself. */
__attribute__((noinline)) void fiber_spoil(const fiber *own)
{
    enum { SPOILED = 4096 / sizeof(uint64_t) };
    volatile uint64_t *const end = (uint64_t *)__builtin_frame_address(0);
    if ((char *)(end - SPOILED) < own->stack + GUARD)
        return;
    for (volatile uint64_t *at = end - SPOILED; at < end; at++)
        *at = UINT64_MAX;
}

/* Return a fiber that calls `entry`, which never returns, when it is first switched to. */
fiber *fiber_new(void (*entry)(void))
{
    fiber *fresh;
    if (unused_fibers.empty()) {
        fresh = make_fiber();
    } else {
        fresh = unused_fibers.back();
        unused_fibers.pop_back();
    }
    prepare_stack(fresh, entry);
    return fresh;
}

void fiber_free(fiber *unused)
{
    unused_fibers.push_back(unused);
}

bool fiber_owns(uintptr_t address)
{
    return stacks.owns(address);
}
