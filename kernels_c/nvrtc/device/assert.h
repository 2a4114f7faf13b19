/* assert.h - C's assert. Without a guard, like the header of C: NDEBUG may change between two inclusions. */
#undef assert
#ifdef NDEBUG
#define assert(x) ((void)0)
#else
#define assert(x) ((x) ? (void)0 : __assertfail(#x, __FILE__, __LINE__, __func__, 1))
#endif
