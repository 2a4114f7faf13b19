#include <torch/extension.h>
#include <memory>

struct Node {
    torch::Tensor value;
    std::unique_ptr<Node> left, right;
};
static std::unique_ptr<Node> build(const torch::Tensor& x) {
    if (x.size(0) == 0) return nullptr;
    auto node = std::make_unique<Node>();
    int64_t mid = x.size(0) / 2;
    node->value = x[mid];
    node->left = build(x.slice(0, 0, mid));
    node->right = build(x.slice(0, mid + 1));
    return node;
}
static torch::Tensor walk(const Node* n, int depth) {
    auto total = n->value * depth;
    if (n->left) total = total + walk(n->left.get(), depth + 1);
    if (n->right) total = total + walk(n->right.get(), depth + 1);
    return total;
}
torch::Tensor tree_sum(torch::Tensor x) {
    TORCH_CHECK(x.size(0) > 0, "an empty tree");
    return walk(build(x).get(), 1);
}
