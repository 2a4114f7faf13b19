/* assert.h - CUDA's header of this name is the emulation's. */
#include "../assertion.h"
