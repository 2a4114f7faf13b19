/*
 * opjit_autograd.cpp - let calls of ops that need no derivative pass autograd without Python.
 *
 * It is compiled once per torch, with torch's headers; see opjit/declare/cpp_autograd.py. If an op has this kernel,
 * for example at AutogradCPU, the Python kernel of opjit is below it at AutogradOther, torch's key for devices without
 * a separate key, so no tensor reaches it.
 *
 * It is linked without a C++ library: the one that torch has loaded is used.
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

/* Make `call` an op's kernel at a key of autograd. Returns the argument of opjit_autograd_unbind, or null if torch refuses. */
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

/* Undo it: calls go to the Python kernel again. */
OPJIT_EXPORT void opjit_autograd_unbind(void *bound)
{
    delete static_cast<c10::RegistrationHandleRAII *>(bound);
}
