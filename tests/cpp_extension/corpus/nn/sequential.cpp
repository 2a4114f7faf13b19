#include <torch/extension.h>

torch::Tensor sequential(torch::Tensor x) {
    torch::manual_seed(5);
    torch::nn::Sequential net(torch::nn::Linear(x.size(1), 6), torch::nn::Tanh(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})), torch::nn::Linear(6, 1));
    net->eval();
    return net->forward(x);
}
int64_t parameters() {
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 8, 3).stride(2).padding(1));
    int64_t n = 0;
    for (auto& p : conv->parameters()) n += p.numel();
    return n;
}
torch::Tensor lstm(torch::Tensor x) {
    torch::manual_seed(6);
    torch::nn::LSTM rnn(torch::nn::LSTMOptions(x.size(2), 3).batch_first(true));
    return std::get<0>(rnn->forward(x));
}
