torch::Tensor leaky_relu(torch::Tensor x, double negative_slope) {
    return torch::where(x > 0, x, x * negative_slope);
}

void leaky_relu_(torch::Tensor x, float slope) {
    TORCH_CHECK(x.scalar_type() == at::kFloat, "expected Float but found ", x.scalar_type());
    float* p = x.data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); i++) p[i] = p[i] >= 0 ? p[i] : p[i] * slope;
}
