#include <torch/extension.h>
#include <limits>

std::tuple<torch::Tensor, torch::Tensor> kmeans(torch::Tensor points, int64_t k, int64_t iterations) {
    TORCH_CHECK(k > 0 && k <= points.size(0), "k must be between 1 and ", points.size(0), ", got ", k);
    auto centers = points.slice(0, 0, k).clone();
    torch::Tensor labels;
    for (int64_t it = 0; it < iterations; ++it) {
        auto d = torch::cdist(points, centers);
        labels = d.argmin(1);
        for (int64_t c = 0; c < k; ++c) {
            auto members = points.index({labels == c});
            if (members.size(0) > 0) centers[c] = members.mean(0);
        }
    }
    return {labels, centers};
}
