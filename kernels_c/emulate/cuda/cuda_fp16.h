/* cuda_fp16.h - CUDA's header of this name is the emulation's. */
#include "../half.h"
