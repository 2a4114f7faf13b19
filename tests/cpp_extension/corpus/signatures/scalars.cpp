#include <torch/extension.h>

int64_t add_i64(int64_t a, int64_t b) { return a + b; }
int add_int(int a, int b) { return a + b; }
double add_double(double a, double b) { return a + b; }
float add_float(float a, float b) { return a + b; }
bool negate(bool b) { return !b; }
uint8_t byte(uint8_t b) { return b; }
size_t size(size_t n) { return n; }
std::string greet(const std::string& name) { return "hello " + name; }
std::string greet_c(const char* name) { return std::string("hi ") + name; }
char letter(char c) { return c; }
