#include <torch/extension.h>
#include <torch/custom_class.h>

struct Stack : torch::CustomClassHolder {
    std::vector<int64_t> items;
    explicit Stack(std::vector<int64_t> start) : items(std::move(start)) {}
    void push(int64_t v) { items.push_back(v); }
    int64_t pop() {
        TORCH_CHECK(!items.empty(), "the stack is empty");
        auto v = items.back();
        items.pop_back();
        return v;
    }
};
int64_t depth(const c10::intrusive_ptr<Stack>& s) { return s->items.size(); }

TORCH_LIBRARY(corpus_custom_class, m) {
    m.class_<Stack>("Stack").def(torch::init<std::vector<int64_t>>()).def("push", &Stack::push).def("pop", &Stack::pop);
    m.def("depth", depth);
}
