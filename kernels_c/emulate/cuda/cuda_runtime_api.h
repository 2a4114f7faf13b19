/* cuda_runtime_api.h - CUDA's header of this name is the emulation's. */
#include "../runtime_api.h"
