/*
 * assertion.h - a kernel's assertion is a finding. Like the standard header, it may be included again after a change of NDEBUG.
 */
#include "language.h"

#undef assert
#ifdef NDEBUG
#define assert(condition_) ((void)0)
#else
#define assert(condition_) ((condition_) ? (void)0 : emu_assertion(#condition_, EMU_HERE))
#endif
