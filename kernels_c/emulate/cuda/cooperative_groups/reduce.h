/* cooperative_groups/reduce.h - CUDA's header of this name is the emulation's. */
#include "../../cooperative_groups.h"
