// The op `allreduce` for tvm-ffi, whose load_inline puts its own headers in front of this text.
//
// A little less than opjit's function: contiguous tensors only, and no dtype= argument.

#include <cstdint>
#include <cstring>

namespace ffi = tvm::ffi;

struct bfloat16 {
  uint16_t bits;
  explicit bfloat16(double value) {
    float narrow = static_cast<float>(value);
    uint32_t word;
    std::memcpy(&word, &narrow, sizeof word);
    bits = static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  operator double() const {
    uint32_t word = static_cast<uint32_t>(bits) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
  }
};

template <typename from_t, typename total_t, typename to_t>
ffi::Tensor sum(ffi::TensorView x, DLDataType dtype) {
  ffi::Tensor out = ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::ShapeView(nullptr, 0), dtype, x.device());
  const from_t* data = static_cast<const from_t*>(x.data_ptr());
  total_t total = 0;
  for (int64_t i = 0, numel = x.numel(); i < numel; i++)
    total += static_cast<total_t>(data[i]);
  *static_cast<to_t*>(out.data_ptr()) = static_cast<to_t>(total);
  return out;
}

ffi::Tensor allreduce(ffi::TensorView x) {
  const DLDataType int64{kDLInt, 64, 1};
  TVM_FFI_ICHECK(x.device().device_type == kDLCPU) << "allreduce takes CPU tensors";
  TVM_FFI_ICHECK(x.IsContiguous()) << "allreduce takes a contiguous tensor";
  switch (x.dtype().code << 8 | x.dtype().bits) {
    case kDLBool << 8 | 8: return sum<bool, int64_t, int64_t>(x, int64);
    case kDLUInt << 8 | 8: return sum<uint8_t, int64_t, int64_t>(x, int64);
    case kDLUInt << 8 | 16: return sum<uint16_t, int64_t, int64_t>(x, int64);
    case kDLUInt << 8 | 32: return sum<uint32_t, int64_t, int64_t>(x, int64);
    case kDLUInt << 8 | 64: return sum<uint64_t, int64_t, int64_t>(x, int64);
    case kDLInt << 8 | 8: return sum<int8_t, int64_t, int64_t>(x, int64);
    case kDLInt << 8 | 16: return sum<int16_t, int64_t, int64_t>(x, int64);
    case kDLInt << 8 | 32: return sum<int32_t, int64_t, int64_t>(x, int64);
    case kDLInt << 8 | 64: return sum<int64_t, int64_t, int64_t>(x, int64);
    case kDLFloat << 8 | 16: return sum<_Float16, double, _Float16>(x, x.dtype());
    case kDLBfloat << 8 | 16: return sum<bfloat16, double, bfloat16>(x, x.dtype());
    case kDLFloat << 8 | 32: return sum<float, double, float>(x, x.dtype());
    case kDLFloat << 8 | 64: return sum<double, double, double>(x, x.dtype());
    default: TVM_FFI_THROW(TypeError) << "allreduce does not take this dtype";
  }
  return ffi::Tensor();
}
