/* driver_types.h - CUDA's header of this name is the emulation's. */
#include "../runtime_api.h"
