/*
 * harness.h - memory that the checks know, and the program's entry: run(mistake, kernel) makes the calls of a kernel with a
 * mistake, 0 for none, and returns whether the results are right.
 */
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#include <functional>
#include <string.h>
#include <vector>

namespace cg = cooperative_groups;

extern "C" void emu_check_written(const void *memory, size_t element, const char *name);

/* `fresh` memory has not been written. */
template <typename value>
struct device {
    value *data;
    bool owned = true;
    device(const device &other) : data(other.data), owned(false) {}
    device(const char *name, size_t count, bool fresh = false) : data((value *)malloc(count * sizeof(value) + 256))
    {
        memset((void *)data, 0, count * sizeof(value));
        emu_see(data, count * sizeof(value), name, fresh);
    }
    ~device()
    {
        if (!owned)
            return;
        emu_forget(data);
        free(data);
    }
    value &operator[](size_t i) { return data[i]; }
    operator value *() { return data; }
};

static bool is_near(float a, float b)
{
    return fabsf(a - b) <= 1e-4f * (1 + fabsf(b));
}

template <int BUG>
bool run_kernel(int kernel);

template <int BUG, int LAST>
bool run_mistake(int bug, int kernel)
{
    if (bug == BUG)
        return run_kernel<BUG>(kernel);
    if constexpr (BUG < LAST)
        return run_mistake<BUG + 1, LAST>(bug, kernel);
    return false;
}
