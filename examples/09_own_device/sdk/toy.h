/*
 * toy.h - the runtime of the toy device, as in a vendor's SDK. A toy device computes immediately, on the CPU.
 *
 * Functions that return int32_t return 0 for success.
 */
#ifndef TOY_H
#define TOY_H

#include <stdint.h>

typedef struct toy_stream {
    int32_t device;
    int64_t launches; /* so far */
} *toy_stream_t;

/* A kernel, which computes the elements begin <= i < end. */
typedef void toy_kernel(int64_t begin, int64_t end, void *arguments);

int32_t toy_launch(toy_stream_t stream, toy_kernel *kernel, int64_t elements, void *arguments);
int32_t toy_stream_create(int32_t device, toy_stream_t *stream);
int32_t toy_set_stream(toy_stream_t stream); /* makes it the current stream of its device */

/* opjit's glue calls these functions. See class Toy in example.py. */
int32_t toy_current_stream(int32_t device, void **stream);
int32_t toy_exchange_device(int32_t device, int32_t *before);
int32_t toy_malloc(uint64_t bytes, void **memory);
int32_t toy_free(void *memory);

#endif
