/*
 * add_custom on CUDA: self + other, with torch.add's broadcasting, dtypes and results.
 *
 * Dense tensors of one dtype and layout are added 16 bytes at a time. For all others one kernel serves every dtype and any
 * strides: it decides for each element how to read, convert and write it, the same way in all threads.
 */
#include "opjit_elementwise.h"

/* ---------------------------------------------------------------------------------------------- */
/* Dense, of one dtype                                                                            */

/* Integers wrap around, signed ones as the unsigned of their size. */
static __device__ uint8_t sum_of(uint8_t a, uint8_t b) { return (uint8_t)(a + b); }
static __device__ uint16_t sum_of(uint16_t a, uint16_t b) { return (uint16_t)(a + b); }
static __device__ uint32_t sum_of(uint32_t a, uint32_t b) { return a + b; }
static __device__ uint64_t sum_of(uint64_t a, uint64_t b) { return a + b; }
static __device__ int64_t sum_of(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
static __device__ bool sum_of(bool a, bool b) { return a || b; }
static __device__ float sum_of(float a, float b) { return a + b; }
static __device__ double sum_of(double a, double b) { return a + b; }
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
    return opjit_map_dense<element>(e, add<element>(), stream);
}

static opjit_status add_dense(const opjit_elements *e, opjit_dtype dtype, cudaStream_t stream)
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
/* Any dtypes and strides                                                                         */

/* An element of any real dtype as one of the wide types: float, double, int64_t. */
template <typename wide>
static __device__ wide load(const void *data, int64_t at, opjit_dtype dtype)
{
    switch (dtype) {
    case OPJIT_BOOL:
    case OPJIT_UINT8: return (wide)((const uint8_t *)data)[at];
    case OPJIT_INT8: return (wide)((const int8_t *)data)[at];
    case OPJIT_INT16: return (wide)((const int16_t *)data)[at];
    case OPJIT_INT32: return (wide)((const int32_t *)data)[at];
    case OPJIT_INT64: return (wide)((const int64_t *)data)[at];
    case OPJIT_UINT16: return (wide)((const uint16_t *)data)[at];
    case OPJIT_UINT32: return (wide)((const uint32_t *)data)[at];
    case OPJIT_UINT64: return (wide)((const uint64_t *)data)[at];
    case OPJIT_FLOAT16: return (wide)opjit_half_to_float(((const opjit_half *)data)[at]);
    case OPJIT_BFLOAT16: return (wide)opjit_bfloat16_to_float(((const opjit_bfloat16 *)data)[at]);
    case OPJIT_FLOAT32: return (wide)((const float *)data)[at];
    default: return (wide)((const double *)data)[at];
    }
}

static __device__ float rounded(float value, opjit_dtype dtype)
{
    return dtype == OPJIT_FLOAT16    ? opjit_half_to_float(opjit_float_to_half(value))
           : dtype == OPJIT_BFLOAT16 ? opjit_bfloat16_to_float(opjit_float_to_bfloat16(value))
                                     : value;
}
static __device__ double rounded(double value, opjit_dtype) { return value; }
static __device__ int64_t rounded(int64_t value, opjit_dtype) { return value; }

template <typename wide>
static __device__ void store(void *data, int64_t at, opjit_dtype dtype, wide value)
{
    switch (dtype) {
    case OPJIT_FLOAT16: ((opjit_half *)data)[at] = opjit_float_to_half((float)value); break;
    case OPJIT_BFLOAT16: ((opjit_bfloat16 *)data)[at] = opjit_float_to_bfloat16((float)value); break;
    case OPJIT_FLOAT32: ((float *)data)[at] = (float)value; break;
    case OPJIT_FLOAT64: ((double *)data)[at] = (double)value; break;
    case OPJIT_BOOL: ((uint8_t *)data)[at] = value != 0; break;
    case OPJIT_UINT8:
    case OPJIT_INT8: ((uint8_t *)data)[at] = (uint8_t)(uint64_t)value; break;
    case OPJIT_UINT16:
    case OPJIT_INT16: ((uint16_t *)data)[at] = (uint16_t)(uint64_t)value; break;
    case OPJIT_UINT32:
    case OPJIT_INT32: ((uint32_t *)data)[at] = (uint32_t)(uint64_t)value; break;
    default: ((uint64_t *)data)[at] = (uint64_t)value; break;
    }
}

template <typename wide>
static __global__ void add_each(const __grid_constant__ opjit_elements e, opjit_dtype self, opjit_dtype other,
                                opjit_dtype result)
{
    OPJIT_KERNEL_LOOP(i, e.numel) {
        int64_t at[3];
        opjit_offsets<3>(e, i, at);
        wide a = rounded(load<wide>(e.data[1], at[1], self), result);
        wide b = rounded(load<wide>(e.data[2], at[2], other), result);
        store(e.data[0], at[0], result, sum_of(a, b));
    }
}

static opjit_status add_any(const opjit_elements *e, opjit_dtype self, opjit_dtype other, opjit_dtype result,
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
        add_each<int64_t><<<blocks, OPJIT_MAP_THREADS, 0, stream>>>(*e, self, other, result);
    return OPJIT_LAUNCHED();
}

/* ---------------------------------------------------------------------------------------------- */
/* Entry                                                                                          */

/* A complex number is taken as two real ones. */
static opjit_dtype real_of(opjit_dtype dtype)
{
    return dtype == OPJIT_COMPLEX64 ? OPJIT_FLOAT32 : dtype == OPJIT_COMPLEX128 ? OPJIT_FLOAT64 : dtype;
}

opjit_status add_custom_cuda(const opjit_tensor *self, const opjit_tensor *other, opjit_tensor *out, cudaStream_t stream)
{
    const opjit_tensor *tensors[] = {out, self, other};
    opjit_elements elements;
    opjit_dtype result;
    OPJIT_TRY(opjit_result_dtype(self, other, &result));
    OPJIT_CHECK(result < OPJIT_COMPLEX64 || self->dtype == other->dtype,
                "add_custom takes two complex tensors of one dtype, not %s and %s; convert one of them with .to()",
                opjit_dtype_name(self->dtype), opjit_dtype_name(other->dtype));
    OPJIT_CHECK(result != OPJIT_OTHER_DTYPE, "add_custom takes bool, integers, floating and complex dtypes, not %s and %s",
                opjit_dtype_name(self->dtype), opjit_dtype_name(other->dtype));
    OPJIT_TRY(opjit_empty_broadcast(out, self, other, result));
    OPJIT_TRY(opjit_elements_of(&elements, 3, tensors));
    if (result >= OPJIT_COMPLEX64)
        opjit_split_complex(&elements);
    if (self->dtype == other->dtype && opjit_is_packed(&elements))
        return add_dense(&elements, result, stream);
    return add_any(&elements, real_of(self->dtype), real_of(other->dtype), real_of(result), stream);
}
