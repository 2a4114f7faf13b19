#include <torch/extension.h>
#include <thread>
#include <atomic>
#include <chrono>

torch::Tensor add_in_threads(torch::Tensor x, int n) {
    auto out = torch::zeros_like(x);
    std::vector<std::thread> workers;
    for (int w = 0; w < n; ++w)
        workers.emplace_back([&, w] {
            for (int64_t i = w; i < x.size(0); i += n) out[i].copy_(x[i] + w);
        });
    for (auto& t : workers) t.join();
    return out;
}
int64_t chunks(int64_t n) {
    std::atomic<int64_t> total{0};
    at::parallel_for(0, n, 4, [&](int64_t a, int64_t b) { total += b - a; });
    return total;
}
double reduced(torch::Tensor x) {
    auto c = x.contiguous();
    return at::parallel_reduce(0, c.numel(), 5, 0.0, [&](int64_t a, int64_t b, double v) {
        for (int64_t i = a; i < b; ++i) v += c.data_ptr<float>()[i];
        return v;
    }, std::plus<double>());
}
bool positive_time() { return std::chrono::steady_clock::now().time_since_epoch().count() > 0; }
