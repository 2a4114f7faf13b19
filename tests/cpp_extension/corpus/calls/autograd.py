"""Gradients that pass through, start or are written in a program."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program("autograd/composed", ["m.composed(x, w)", "grads(m.composed, x, w)", "grads(m.normalized, x)", "grads(m.in_place, x)", "grads(m.through_data, x)", "grads(m.many, x)", "grads(m.same, x)", "m.many(xt)",
                                  "grads(m.composed, xt, x.detach())"],
            ["m.composed(x, x)", "m.through_data(double)", "m.in_place(empty)", "m.same([x])"], ["composed", "normalized", "in_place", "through_data", "many", "same"]),
    Program("autograd/modes", ["m.no_grad(x.requires_grad_())", "grads(m.mode, x, True)", "grads(m.mode, x, False)", "m.enabled()", "torch.no_grad()(m.enabled)()", "m.inference(x).is_inference()", "m.below(x.requires_grad_())",
                               "after(m.set_grad, x)", "torch.inference_mode()(m.mode)(x, True)"],
            ["m.set_grad(i)", "m.mode(x)", "m.mode(x, 'a')"], ["no_grad", "mode", "enabled", "inference", "below", "set_grad"]),
    Program("autograd/backward", ["m.gradient(x)", "m.gradient(xt)", "m.grads(x, w)", "m.second(v)", "m.accumulate(x.requires_grad_())", "m.has_grad(x)", "after(m.accumulate, v.requires_grad_())", "m.gradient(empty)"],
            ["m.gradient(i)", "m.accumulate(x)", "m.grads(x, x)", "m.unused(x).shape if False else m.second(i)", "torch.no_grad()(m.gradient)(x)", "m.gradient()"],
            ["gradient", "grads", "second", "accumulate", "has_grad", "unused"]),
    Program("autograd/function", ["m.muladd(x, y, 2)", "grads(m.muladd, x, y, 0.5)", "grads(m.muladd, x, v5.expand(4, 5), 0.5)", "torch.no_grad()(m.muladd)(x, y, 1)", "m.muladd(i, i, 1)"],
            ["m.muladd(x, y)", "m.muladd(x, v, 1)", "m.muladd(x, y, x)"], ["muladd"]),
    Program("autograd/function_bound", ["m.clip(x, 0.5)", "grads(m.clip, x, 0.5)", "after(m.double_, x)", "grads(m.double_copy, x)", "grads(m.clip, xt, 1)"],
            ["m.double_(x.requires_grad_())", "m.clip(x)", "m.clip(x, None)", "grads(m.double_, x)"]),
    Program("autograd/lltm", ["m.forward(x, torch.full((9, 8), 0.1), torch.zeros(1, 9), x[:, :3], y[:, :3])", "grads(m.forward, x, torch.full((9, 8), 0.1), torch.zeros(1, 9), x[:, :3], y[:, :3])",
                              "m.backward(y[:, :3], x[:, :3], *m.forward(x, torch.full((9, 8), 0.1), torch.zeros(1, 9), x[:, :3], y[:, :3])[1:], torch.full((9, 8), 0.1))",
                              "m.forward(empty, torch.full((9, 8), 0.1), torch.zeros(1, 9), empty[:, :3], empty[:, :3])"],
            ["m.forward(x, w, v, x, y)", "m.forward(x, w, v, x)", "m.backward(x)"]),
    Program("autograd/hooks", ["grads(m.doubled_gradient, x)", "m.doubled_gradient(x)", "m.retained(v)", "m.version(x)", "m.node(x)", "m.node(x.requires_grad_())", "m.variable_data(x.requires_grad_())"],
            ["m.retained(i)", "m.version(x.requires_grad_())", "m.node(None)"], ["doubled_gradient", "retained", "version", "node", "variable_data"]),
    Program("autograd/pair", ["m.linear_forward(x, w35)", "m.linear_backward(x[:, :3], x, w35)", "grads(m.linear_forward, x, w35)", "m.linear_backward(empty[:, :3], empty, w35)", "grads(m.linear_backward, x[:, :3], x, w35)"],
            ["m.linear_backward(x, x, w35)", "m.linear_forward(x, w)", "m.linear_backward(v, x, w35)"], ["linear_forward", "linear_backward"]),
    Program("autograd/custom_loss", ["m.focal(x, target, 2)", "m.contrastive(x, y, 4)", "m.loop(x, 3)", "grads(m.focal, x, target, 2)", "grads(m.contrastive, x, y, 4)", "grads(m.loop, x, 3)", "m.loop(x, 0)"],
            ["m.focal(x, v, 2)", "m.contrastive(x, v, 1)", "m.loop(x, 1.5)", "m.loop(scalar, 1)"], ["focal", "contrastive", "loop"]),
]
