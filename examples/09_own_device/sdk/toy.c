/* The runtime of the toy device: two devices, with a current stream for each device and thread. */
#include "toy.h"

#include <stdlib.h>

#define DEVICES 2
#define BAD_DEVICE 1
#define NO_MEMORY 2

static struct toy_stream first[DEVICES] = {{.device = 0}, {.device = 1}};
static _Thread_local toy_stream_t current[DEVICES];
static _Thread_local int32_t current_device;

int32_t toy_launch(toy_stream_t stream, toy_kernel *kernel, int64_t elements, void *arguments)
{
    if (stream->device != current_device)
        return BAD_DEVICE;
    kernel(0, elements, arguments);
    __atomic_fetch_add(&stream->launches, 1, __ATOMIC_RELAXED);
    return 0;
}

int32_t toy_stream_create(int32_t device, toy_stream_t *stream)
{
    if (device < 0 || device >= DEVICES)
        return BAD_DEVICE;
    *stream = calloc(1, sizeof **stream);
    if (!*stream)
        return NO_MEMORY;
    (*stream)->device = device;
    return 0;
}

int32_t toy_set_stream(toy_stream_t stream)
{
    current[stream->device] = stream;
    return 0;
}

int32_t toy_current_stream(int32_t device, void **stream)
{
    if (device < 0 || device >= DEVICES)
        return BAD_DEVICE;
    *stream = current[device] ? current[device] : &first[device];
    return 0;
}

int32_t toy_exchange_device(int32_t device, int32_t *before)
{
    if (device < 0 || device >= DEVICES)
        return BAD_DEVICE;
    *before = current_device;
    current_device = device;
    return 0;
}

int32_t toy_malloc(uint64_t bytes, void **memory)
{
    *memory = malloc(bytes ? bytes : 1);
    return *memory ? 0 : NO_MEMORY;
}

int32_t toy_free(void *memory)
{
    free(memory);
    return 0;
}
