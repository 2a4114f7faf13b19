#include <torch/extension.h>
#include <map>
#include <string>

static const std::map<std::string, double> kConstants = {{"pi", 3.14159}, {"e", 2.71828}};
static const torch::Tensor kTable = torch::arange(4, torch::kFloat32) * 0.5;
struct AtStart {
    AtStart() : value(torch::ones({2}).sum().item<double>()) {}
    double value;
} at_start;

double constant(const std::string& name) {
    auto it = kConstants.find(name);
    if (it == kConstants.end()) throw std::out_of_range("no constant named " + name);
    return it->second;
}
double constant_at(const std::string& name) { return kConstants.at(name); }
torch::Tensor table() { return kTable; }
double started() { return at_start.value; }
