/*
 * opjit_printf.h - printf for debugging a kernel.
 *
 *     #include "opjit_printf.h"
 *     ...
 *     opjit_printf("x[0] = %g\n", x0);
 *
 * The text goes to Python's sys.stdout and is flushed, so that it appears in order between the lines that Python
 * prints: in a terminal, a pipe, a test's captured output or a notebook cell. Plain printf fills the buffer of C,
 * which a pipe or a notebook shows late or never. In other threads, for example in opjit_parallel_for, and without
 * Python, the text goes to the file descriptor of the standard output. In CUDA device code, use plain printf. Its text
 * appears after the next synchronization.
 */
#ifndef OPJIT_PRINTF_H
#define OPJIT_PRINTF_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Python's limited API, which is the same in every version, resolved like in an extension module. The symbols are weak,
 * so that the library also loads in a process without Python.
 */
typedef struct opjit_python opjit_python;
__attribute__((weak)) extern int Py_IsInitialized(void);
__attribute__((weak)) extern int PyGILState_Ensure(void);
__attribute__((weak)) extern void PyGILState_Release(int state);
__attribute__((weak)) extern opjit_python *PySys_GetObject(const char *name); /* borrowed */
__attribute__((weak)) extern opjit_python *PyUnicode_DecodeUTF8(const char *text, long bytes, const char *errors);
__attribute__((weak)) extern opjit_python *PyObject_CallMethod(opjit_python *object, const char *name,
                                                               const char *format, ...);
__attribute__((weak)) extern void Py_DecRef(opjit_python *object);
__attribute__((weak)) extern void PyErr_Clear(void);

/* sys.stdout.write(text); sys.stdout.flush(). Exceptions are dropped: the op did not cause them. */
static inline void opjit_python_print(const char *bytes)
{
    int state = PyGILState_Ensure();
    opjit_python *out = PySys_GetObject("stdout");
    opjit_python *text = PyUnicode_DecodeUTF8(bytes, (long)strlen(bytes), "replace");
    opjit_python *written = out && text ? PyObject_CallMethod(out, "write", "O", text) : NULL;
    opjit_python *flushed = written ? PyObject_CallMethod(out, "flush", NULL) : NULL;
    if (!flushed)
        PyErr_Clear();
    Py_DecRef(text);
    Py_DecRef(written);
    Py_DecRef(flushed);
    PyGILState_Release(state);
}

/*
 * Only the main thread acquires the GIL: a caller may hold it while it waits for the threads of an opjit_parallel_for,
 * so another thread would wait forever.
 */
__attribute__((format(printf, 1, 2), cold, unused)) static void opjit_printf(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *text = length < 0 ? NULL : (char *)malloc((size_t)length + 1);
    if (!text)
        return;
    va_start(arguments, format);
    vsnprintf(text, (size_t)length + 1, format, arguments);
    va_end(arguments);
    fflush(stdout); /* what plain printf has buffered */
    if (Py_IsInitialized && Py_IsInitialized() && syscall(SYS_gettid) == getpid()) {
        opjit_python_print(text);
    } else {
        fputs(text, stdout);
        fflush(stdout);
    }
    free(text);
}

#ifdef __cplusplus
}
#endif

#endif
