/*
 * add_custom on CUDA: self + other, with torch.add's broadcasting, dtypes and results.
 *
 * Operands of one dtype go through opjit_map(), which moves 16 bytes at a time where it can and then reaches the
 * bandwidth of the memory (tests/benchmarks/elementwise.py). For operands of two dtypes one kernel looks at the dtypes
 * for each element, in the same way in all threads.
 */
#include "opjit_convert.h"
#include "opjit_elementwise.h"

/* ---------------------------------------------------------------------------------------------- */
/* One dtype                                                                                      */

/* Integers wrap around, signed ones as the unsigned of their size. */
template <typename element>
static __device__ element sum_of(element a, element b)
{
    return (element)(a + b);
}
static __device__ bool sum_of(bool a, bool b)
{
    return a || b;
}
static __device__ opjit_half sum_of(opjit_half a, opjit_half b)
{
    return opjit_float_to_half(opjit_half_to_float(a) + opjit_half_to_float(b));
}
static __device__ opjit_bfloat16 sum_of(opjit_bfloat16 a, opjit_bfloat16 b)
{
    return opjit_float_to_bfloat16(opjit_bfloat16_to_float(a) + opjit_bfloat16_to_float(b));
}

template <typename element>
struct add {
    enum { inputs = 2, outputs = 1 };
    __device__ void operator()(const element *x, element *y) const { y[0] = sum_of(x[0], x[1]); }
};

template <typename element>
static opjit_status add_all(const opjit_elements *e, cudaStream_t stream)
{
    return opjit_map<element>(e, add<element>(), stream);
}

static opjit_status add_same(const opjit_elements *e, opjit_dtype dtype, cudaStream_t stream)
{
    switch (dtype) {
    case OPJIT_BOOL: return add_all<bool>(e, stream);
    case OPJIT_UINT8:
    case OPJIT_INT8: return add_all<uint8_t>(e, stream);
    case OPJIT_UINT16:
    case OPJIT_INT16: return add_all<uint16_t>(e, stream);
    case OPJIT_UINT32:
    case OPJIT_INT32: return add_all<uint32_t>(e, stream);
    case OPJIT_UINT64:
    case OPJIT_INT64: return add_all<uint64_t>(e, stream);
    case OPJIT_FLOAT16: return add_all<opjit_half>(e, stream);
    case OPJIT_BFLOAT16: return add_all<opjit_bfloat16>(e, stream);
    case OPJIT_FLOAT32:
    case OPJIT_COMPLEX64: return add_all<float>(e, stream);
    default: return add_all<double>(e, stream);
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* Two dtypes                                                                                     */

/* An operand's element, converted to the result's dtype, and the result's element. */
static __device__ void load(double *value, const void *data, int64_t i, opjit_dtype dtype, opjit_dtype)
{
    *value = opjit_load_double(data, i, dtype);
}
static __device__ void load(float *value, const void *data, int64_t i, opjit_dtype dtype, opjit_dtype result)
{
    const float loaded = opjit_load_float(data, i, dtype);
    *value = result == OPJIT_FLOAT16    ? opjit_half_to_float(opjit_float_to_half(loaded))
             : result == OPJIT_BFLOAT16 ? opjit_bfloat16_to_float(opjit_float_to_bfloat16(loaded))
                                        : loaded;
}
static __device__ void load(uint64_t *value, const void *data, int64_t i, opjit_dtype dtype, opjit_dtype)
{
    *value = (uint64_t)opjit_load_int64(data, i, dtype);
}

static __device__ void store(void *data, int64_t i, opjit_dtype, double sum)
{
    ((double *)data)[i] = sum;
}
static __device__ void store(void *data, int64_t i, opjit_dtype dtype, float sum)
{
    opjit_store_float(data, i, dtype, sum);
}
static __device__ void store(void *data, int64_t i, opjit_dtype dtype, uint64_t sum)
{
    opjit_store_int64(data, i, dtype, (int64_t)sum);
}

/* Added in the wide type of the result's kind. Two dtypes never give a bool. */
template <typename wide>
static __global__ void add_each(const __grid_constant__ opjit_elements e, opjit_dtype self, opjit_dtype other,
                                opjit_dtype result)
{
    OPJIT_KERNEL_LOOP(i, e.numel) {
        int64_t at[3];
        wide a, b;
        opjit_offsets<3>(e, i, at);
        load(&a, e.data[1], at[1], self, result);
        load(&b, e.data[2], at[2], other, result);
        store(e.data[0], at[0], result, a + b);
    }
}

static opjit_status add_two(const opjit_elements *e, opjit_dtype self, opjit_dtype other, opjit_dtype result,
                            cudaStream_t stream)
{
    const int blocks = opjit_blocks(e->numel, OPJIT_MAP_THREADS);
    if (e->numel == 0)
        return OPJIT_OK;
    if (result == OPJIT_FLOAT64)
        add_each<double><<<blocks, OPJIT_MAP_THREADS, 0, stream>>>(*e, self, other, result);
    else if (opjit_is_floating(result))
        add_each<float><<<blocks, OPJIT_MAP_THREADS, 0, stream>>>(*e, self, other, result);
    else
        add_each<uint64_t><<<blocks, OPJIT_MAP_THREADS, 0, stream>>>(*e, self, other, result);
    return OPJIT_LAUNCHED();
}

/* ---------------------------------------------------------------------------------------------- */
/* Entry                                                                                          */

opjit_status add_custom_cuda(const opjit_tensor *self, const opjit_tensor *other, opjit_tensor *out,
                             cudaStream_t stream)
{
    const opjit_tensor *tensors[] = {out, self, other};
    opjit_elements elements;
    opjit_dtype result;
    OPJIT_TRY(opjit_result_dtype(self, other, &result));
    OPJIT_CHECK(result < OPJIT_COMPLEX64 || self->dtype == other->dtype,
                "add_custom takes two complex tensors of one dtype, not %s and %s; convert one of them with .to()",
                opjit_dtype_name(self->dtype), opjit_dtype_name(other->dtype));
    OPJIT_CHECK(result != OPJIT_OTHER_DTYPE && !opjit_is_float8(result),
                "add_custom takes bool, integers, floating and complex dtypes, not %s and %s",
                opjit_dtype_name(self->dtype), opjit_dtype_name(other->dtype));
    OPJIT_TRY(opjit_empty_broadcast(out, self, other, result));
    OPJIT_TRY(opjit_elements_of(&elements, 3, tensors));
    if (result >= OPJIT_COMPLEX64)
        opjit_split_complex(&elements);
    if (self->dtype == other->dtype)
        return add_same(&elements, result, stream);
    return add_two(&elements, self->dtype, other->dtype, result, stream);
}
