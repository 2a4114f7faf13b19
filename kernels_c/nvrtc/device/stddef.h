/* stddef.h - C's ptrdiff_t and offsetof. */
#pragma once
typedef long ptrdiff_t;
#ifndef offsetof
#define offsetof(t, m) __builtin_offsetof(t, m)
#endif
