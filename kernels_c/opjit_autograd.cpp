/*
 * opjit_autograd.cpp - what autograd does with an op's call that needs no derivative: nothing, without Python.
 *
 * Compiled once per torch, with torch's own headers; see opjit/declare/cpp_autograd.py. Where an op has this kernel, at AutogradCPU say,
 * opjit's kernel in Python lies below it at AutogradOther: at torch's key for devices without one of their own, so no tensor leads there.
 */
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>

#include <cstdio>

#define OPJIT_EXPORT extern "C" __attribute__((visibility("default")))

/* Whether an argument has a derivative: it requires a gradient, in grad mode, or has a tangent of forward mode. */
static bool differs(const c10::IValue &value, bool grad_mode)
{
    if (value.isTensor()) {
        const at::Tensor &tensor = value.toTensor();
        return tensor.defined() && ((grad_mode && tensor.requires_grad()) || tensor._fw_grad(0).defined());
    }
    if (!value.isList())
        return false;
    for (const c10::IValue &each : value.toListRef())
        if (differs(each, grad_mode))
            return true;
    return false;
}

/* Go on as torch.library.register_autograd's kernel does without a gradient, or go to opjit's kernel in Python. */
static void call(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
{
    const bool grad_mode = c10::GradMode::is_enabled();
    keys = keys & c10::after_autograd_keyset;
    for (const c10::IValue &each : torch::jit::last(*stack, op.schema().arguments().size()))
        if (differs(each, grad_mode)) {
            op.redispatchBoxed(keys.add(c10::DispatchKey::AutogradOther), stack);
            return;
        }
    at::AutoDispatchBelowAutograd below;
    op.redispatchBoxed(keys, stack);
}

/* Make `call` an op's kernel at a key of autograd. Returns what opjit_autograd_unbind takes, or null when torch refused. */
OPJIT_EXPORT void *opjit_autograd_bind(const char *name, const char *key)
{
    try {
        return new c10::RegistrationHandleRAII(c10::Dispatcher::singleton()
                                                   .registerImpl({name, ""}, c10::parseDispatchKey(key),
                                                                 c10::KernelFunction::makeFromBoxedFunction<&call>(),
                                                                 std::nullopt, nullptr, "opjit"));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "opjit: %s\n", error.what());
        return nullptr;
    }
}

/* Take it back: calls go to the kernel in Python again. */
OPJIT_EXPORT void opjit_autograd_unbind(void *bound)
{
    delete static_cast<c10::RegistrationHandleRAII *>(bound);
}
