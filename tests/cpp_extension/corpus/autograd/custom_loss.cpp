#include <torch/extension.h>

torch::Tensor focal(torch::Tensor logits, torch::Tensor target, double gamma) {
    auto logp = torch::log_softmax(logits, 1);
    auto pt = logp.gather(1, target.unsqueeze(1)).squeeze(1);
    return (-(1 - pt.exp()).pow(gamma) * pt).mean();
}
torch::Tensor contrastive(torch::Tensor a, torch::Tensor b, double margin) {
    auto d = torch::pairwise_distance(a, b);
    return torch::relu(margin - d).square().mean() + torch::cosine_similarity(a, b, 1).sum();
}
torch::Tensor loop(torch::Tensor x, int n) {
    for (int i = 0; i < n; ++i) x = x * 0.5 + x.roll(1, 0).sin();
    return x;
}
