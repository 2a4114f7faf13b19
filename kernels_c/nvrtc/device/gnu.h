/*
 * gnu.h - GCC's keywords in the macros of C's headers, which NVRTC does not support: NULL, INFINITY, assert, offsetof.
 *
 * The C++ compiler expands an author's macros, so these words are in the text that NVRTC compiles.
 */
#pragma once
#define __null 0L
#define __extension__
#define __builtin_inff() __builtin_bit_cast(float, 0x7f800000)
#define __builtin_inf() __builtin_bit_cast(double, 0x7ff0000000000000)
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fc00000)
#define __builtin_nan(text) __builtin_bit_cast(double, 0x7ff8000000000000)
#define __builtin_huge_valf() __builtin_inff()
#define __builtin_huge_val() __builtin_inf()
#define __builtin_offsetof(type, member) __INTADDR__(&(((type *)0)->member))
#define __assert_fail(text, file, line, function) __assertfail(text, file, line, function, 1)
