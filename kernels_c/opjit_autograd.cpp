/*
 * opjit_autograd.cpp - let calls of ops pass autograd without Python.
 *
 * A call that needs no derivative goes on, and a call that needs a gradient is recorded if another op computes the
 * gradient. It is compiled once per torch, with torch's headers; see opjit/declare/cpp_autograd.py. If an op has this
 * kernel, for example at AutogradCPU, the Python kernel of opjit is below it at AutogradOther, torch's key for devices
 * without a separate key, so no tensor reaches it.
 *
 * It is linked without a C++ library: the one that torch has loaded is used.
 */
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <cstdio>

#define OPJIT_EXPORT extern "C" __attribute__((visibility("default")))

using c10::IValue;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;

/* How another op computes an op's gradients; see opjit/declare/gradient_op.py for places and targets. */
struct Rule {
    c10::FunctionSchema op, gradient;
    std::vector<int64_t> places, targets;

    size_t arguments() const { return op.arguments().size(); }
    size_t results() const { return op.returns().size(); }
    size_t first_gradient() const { return arguments() + results(); }
};

/* An argument of the gradient that a call keeps. */
struct Saved {
    bool is_tensor = false;
    SavedVariable tensor;
    IValue value;
};

/* A recorded call. */
struct RecordedCall : Node {
    std::shared_ptr<const Rule> rule;
    std::vector<Saved> saved;

    RecordedCall(std::shared_ptr<const Rule> of, torch::autograd::edge_list edges)
        : Node(std::move(edges)), rule(std::move(of)), saved(rule->places.size())
    {
    }

    /* Keep the values at the places from `first` on that the gradient needs. */
    void save(at::ArrayRef<IValue> values, size_t first)
    {
        for (size_t i = 0; i < saved.size(); i++) {
            const size_t place = static_cast<size_t>(rule->places[i]);
            if (place < first || place >= first + values.size())
                continue;
            const IValue &value = values[place - first];
            saved[i].is_tensor = value.isTensor();
            if (value.isTensor())
                saved[i].tensor =
                    SavedVariable(value.toTensor(), first > 0 && value.toTensor().grad_fn().get() == this);
            else
                saved[i].value = value;
        }
    }

    /* Argument `i` of the gradient. */
    IValue argument(size_t i, const variable_list &grads)
    {
        const size_t place = static_cast<size_t>(rule->places[i]), first = rule->first_gradient();
        if (place < first)
            return saved[i].is_tensor ? IValue(saved[i].tensor.unpack(getptr())) : saved[i].value;
        if (place == first + rule->results()) {
            c10::List<bool> mask;
            for (const int64_t target : rule->targets)
                mask.push_back(task_should_compute_output(static_cast<size_t>(target)));
            return mask;
        }
        const at::Tensor &grad = grads[place - first];
        if (grad.defined())
            return grad;
        if (rule->gradient.arguments()[i].type()->kind() == c10::TypeKind::OptionalType)
            return IValue();
        return input_metadata(place - first).zeros_like();
    }

    /* A reload can change the schema after the call was recorded. */
    void check(const c10::FunctionSchema &now) const
    {
        const auto same = [](const c10::Argument &one, const c10::Argument &other) {
            return one.name() == other.name() && *one.type() == *other.type();
        };
        const auto &had = rule->gradient.arguments(), &has = now.arguments();
        TORCH_CHECK(std::equal(had.begin(), had.end(), has.begin(), has.end(), same) &&
                        now.returns().size() == rule->targets.size(),
                    now.name(), " has another schema than when its call was recorded; call ", rule->op.name(),
                    " again");
    }

    variable_list apply(variable_list &&grads) override
    {
        const c10::OperatorHandle gradient =
            c10::Dispatcher::singleton().findSchemaOrThrow(rule->gradient.name().c_str(), "");
        check(gradient.schema());
        Stack stack;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (size_t i = 0; i < saved.size(); i++)
                stack.push_back(argument(i, grads));
        }
        gradient.callBoxed(stack);
        variable_list found(rule->arguments());
        for (size_t i = 0; i < rule->targets.size(); i++) {
            const size_t target = static_cast<size_t>(rule->targets[i]);
            if (stack[i].isTensor() && task_should_compute_output(target))
                found[target] = stack[i].toTensor();
        }
        return found;
    }

    void release_variables() override
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (Saved &each : saved)
            each.tensor.reset_data();
    }

    std::string name() const override { return rule->gradient.name(); }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override
    {
        args.collect(rule->gradient.name());
        for (const Saved &each : saved) {
            args.collect(each.tensor, true);
            args.collect(each.value, true); /* a number is a constant of the graph */
        }
    }

    variable_list apply_with_saved(const variable_list &grads,
                                   torch::dynamo::autograd::SwapSavedVariables &swap) override
    {
        for (Saved &each : saved)
            swap.before(each.tensor);
        variable_list found = apply(variable_list(grads));
        for (Saved &each : saved)
            swap.after(each.tensor);
        return found;
    }
};

/* Let torch's pointer, which older versions count outside of the node, own it. */
template <typename T>
static auto own(T *node)
{
    if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>)
        return c10::intrusive_ptr<T>::unsafe_steal_from_new(node);
    else
        return std::shared_ptr<T>(node, [](auto *each) { deleteNode(each); });
}

enum class Derivative { none, gradient, tangent };

/* The derivative that an argument has: it requires a gradient, in grad mode, or has a tangent of forward mode. */
static Derivative derivative_of(const IValue &value, bool grad_mode)
{
    Derivative found = Derivative::none;
    if (value.isTensor()) {
        const at::Tensor &tensor = value.toTensor();
        if (tensor.defined() && grad_mode && tensor.requires_grad())
            found = Derivative::gradient;
        if (tensor.defined() && tensor._fw_grad(0).defined())
            found = Derivative::tangent;
    } else if (value.isList())
        for (const IValue &each : value.toListRef())
            found = std::max(found, derivative_of(each, grad_mode));
    return found;
}

/* Autograd's kernel of an op. */
class Kernel : public c10::OperatorKernel
{
    std::shared_ptr<const Rule> rule; /* null: a call that needs a gradient is recorded in Python */

  public:
    explicit Kernel(std::shared_ptr<const Rule> of) : rule(std::move(of)) {}

    /* Do as the kernel of torch.library.register_autograd does, or go to opjit's kernel in Python. */
    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack)
    {
        const bool grad_mode = c10::GradMode::is_enabled();
        const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
        Derivative found = Derivative::none;
        for (const IValue &each : arguments)
            found = std::max(found, derivative_of(each, grad_mode));
        keys = keys & c10::after_autograd_keyset;
        if (found == Derivative::none)
            below(op, keys, stack);
        else if (found == Derivative::gradient && rule)
            record(op, keys, stack);
        else
            op.redispatchBoxed(keys.add(c10::DispatchKey::AutogradOther), stack);
    }

  private:
    static void below(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack)
    {
        const at::AutoDispatchBelowAutograd guard;
        op.redispatchBoxed(keys, stack);
    }

    void record(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) const
    {
        torch::autograd::edge_list edges;
        edges.reserve(rule->arguments());
        const auto arguments = torch::jit::last(*stack, rule->arguments());
        for (const IValue &each : arguments) {
            const bool is_tensor = each.isTensor() && each.toTensor().defined();
            edges.push_back(is_tensor ? torch::autograd::impl::gradient_edge(each.toTensor())
                                      : torch::autograd::Edge());
        }
        const auto call = own(new RecordedCall(rule, std::move(edges)));
        call->save(arguments, 0);
        below(op, keys, stack);
        const auto results = torch::jit::last(*stack, rule->results());
        for (size_t i = 0; i < results.size(); i++) {
            const auto place = static_cast<int64_t>(rule->first_gradient() + i);
            const bool has_gradient = std::find(rule->places.begin(), rule->places.end(), place) != rule->places.end();
            if (has_gradient && results[i].isTensor() && results[i].toTensor().defined() &&
                torch::autograd::isDifferentiableType(results[i].toTensor().scalar_type()))
                torch::autograd::set_history(results[i].toTensor(), call);
            else
                call->add_input_metadata(Node::undefined_input());
        }
        call->save(results, rule->arguments());
    }
};

/* A registration of a kernel. It is never freed, because another thread can still be in the kernel after the end. */
struct Bound {
    c10::KernelFunction kernel;
    c10::RegistrationHandleRAII handle;
};

static std::shared_ptr<const Rule> rule_of(c10::FunctionSchema op, const char *gradient, const int64_t *places,
                                           const int64_t *targets)
{
    c10::FunctionSchema by = torch::jit::parseSchema(gradient);
    const size_t arguments = by.arguments().size(), results = by.returns().size();
    return std::make_shared<Rule>(Rule{
        std::move(op), std::move(by), {places, places + arguments}, {targets, targets + results}});
}

/*
 * Make `Kernel` an op's kernel at a key of autograd. `gradient` is the schema of the op that computes the gradient, or
 * null. Returns the argument of opjit_autograd_unbind, or null if torch refuses.
 */
OPJIT_EXPORT void *opjit_autograd_bind(const char *schema, const char *key, const char *gradient, const int64_t *places,
                                       const int64_t *targets)
{
    try {
        c10::FunctionSchema op = torch::jit::parseSchema(schema);
        const c10::OperatorName name = op.operator_name();
        auto rule = gradient ? rule_of(std::move(op), gradient, places, targets) : nullptr;
        auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::move(rule)));
        return new Bound{kernel, c10::Dispatcher::singleton().registerImpl(name, c10::parseDispatchKey(key), kernel,
                                                                           std::nullopt, nullptr, "opjit")};
    } catch (const std::exception &error) {
        std::fprintf(stderr, "opjit: %s\n", error.what());
        return nullptr;
    }
}

/* Undo it: calls go to the Python kernel again. */
OPJIT_EXPORT void opjit_autograd_unbind(void *bound)
{
    const c10::RegistrationHandleRAII ends = std::move(static_cast<Bound *>(bound)->handle);
}
