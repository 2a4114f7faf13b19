#include <stdarg.h>
#include <stdio.h>

#include "opjit.h"

/* JSON into a buffer of the call; what does not fit is cut off, and the test sees broken JSON. */
typedef struct text {
    char *data;
    size_t size, len;
} text;

__attribute__((format(printf, 2, 3))) static void put(text *t, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int len = vsnprintf(t->data + t->len, t->size - t->len, format, arguments);
    va_end(arguments);
    t->len += (size_t)len;
    if (t->len >= t->size)
        t->len = t->size - 1;
}

/* Ends every list and object, so that a comma may follow every item. */
static void end(text *t, char bracket)
{
    if (t->data[t->len - 1] == ',')
        t->len--;
    put(t, "%c,", bracket);
}

static void put_ints(text *t, const int64_t *data, int64_t len)
{
    put(t, "[");
    for (int64_t i = 0; i < len; i++)
        put(t, "%lld,", (long long)data[i]);
    end(t, ']');
}

static void put_tensor(text *t, const opjit_tensor *x)
{
    if (!x) {
        put(t, "null,");
        return;
    }
    put(t, "{\"dtype\":\"%s\",\"numel\":%lld,\"dim\":%lld,\"contiguous\":%s,\"device_index\":%d,\"sizes\":",
        opjit_dtype_name(x->dtype), (long long)x->numel, (long long)x->dim, x->contiguous ? "true" : "false",
        x->device_index);
    put_ints(t, x->sizes, x->dim);
    put(t, "\"strides\":");
    put_ints(t, x->strides, x->dim);
    put(t, "\"values\":[");
    if (x->dtype == OPJIT_FLOAT32)
        for (int64_t i = 0; i < x->numel; i++)
            put(t, "%.9g,", (double)((const float *)x->data)[opjit_offset(x, i)]);
    end(t, ']');
    end(t, '}');
}

static void put_tensors(text *t, const char *name, const opjit_tensors *list)
{
    put(t, "\"%s\":", name);
    if (!list) {
        put(t, "null,");
        return;
    }
    put(t, "[");
    for (int64_t i = 0; i < list->len; i++)
        put_tensor(t, &list->data[i]);
    end(t, ']');
}

/* The bytes in hexadecimal: JSON would need them escaped. */
static void put_string(text *t, const char *name, const char *s)
{
    put(t, "\"%s\":", name);
    if (!s) {
        put(t, "null,");
        return;
    }
    put(t, "\"");
    for (; *s; s++)
        put(t, "%02x", (unsigned)(unsigned char)*s);
    put(t, "\",");
}

#define PUT_NUMBER(name_, pointer_, format_, type_) \
    do { \
        put(&t, "\"%s\":", name_); \
        if ((const void *)(pointer_) != NULL) \
            put(&t, format_ ",", (type_) * (pointer_)); \
        else \
            put(&t, "null,"); \
    } while (0)

#define PUT_LIST(name_, list_, format_, type_) \
    do { \
        put(&t, "\"%s\":", name_); \
        if (list_) { \
            put(&t, "["); \
            for (int64_t i = 0; i < (list_)->len; i++) \
                put(&t, format_ ",", (type_)(list_)->data[i]); \
            end(&t, ']'); \
        } else { \
            put(&t, "null,"); \
        } \
    } while (0)

opjit_status everything_cpu(const opjit_tensor *x, const opjit_tensor *maybe, const opjit_tensors *xs, int64_t n,
                            int64_t sym, double f, bool b, const char *s, opjit_dtype d, const int64_t *on,
                            const int64_t *osym, const double *of, const bool *ob, const char *os,
                            const opjit_dtype *od, const opjit_ints *ns, const opjit_ints *syms, const opjit_floats *fs,
                            const opjit_bools *bs, const opjit_ints *pair, const opjit_tensors *twins,
                            const opjit_tensors *oxs, const opjit_ints *ons, const opjit_floats *ofs,
                            const opjit_bools *obs, const opjit_ints *opair, int64_t last, opjit_tensor *report,
                            int64_t *n2, double *f2, bool *nb, opjit_tensor *copy)
{
    text t = {NULL, 65536, 0};
    void *memory;
    OPJIT_TRY(opjit_scratch(&memory, (int64_t)t.size, x));
    t.data = (char *)memory;
    put(&t, "{\"x\":");
    put_tensor(&t, x);
    put(&t, "\"maybe\":");
    put_tensor(&t, maybe);
    put_tensors(&t, "xs", xs);
    PUT_NUMBER("n", &n, "%lld", long long);
    PUT_NUMBER("sym", &sym, "%lld", long long);
    PUT_NUMBER("f", &f, "%.17e", double);
    PUT_NUMBER("b", &b, "%d", int);
    put_string(&t, "s", s);
    put(&t, "\"d\":\"%s\",", opjit_dtype_name(d));
    PUT_NUMBER("on", on, "%lld", long long);
    PUT_NUMBER("osym", osym, "%lld", long long);
    PUT_NUMBER("of", of, "%.17e", double);
    PUT_NUMBER("ob", ob, "%d", int);
    put_string(&t, "os", os);
    if (od)
        put(&t, "\"od\":\"%s\",", opjit_dtype_name(*od));
    else
        put(&t, "\"od\":null,");
    PUT_LIST("ns", ns, "%lld", long long);
    PUT_LIST("syms", syms, "%lld", long long);
    PUT_LIST("fs", fs, "%.17e", double);
    PUT_LIST("bs", bs, "%d", int);
    PUT_LIST("pair", pair, "%lld", long long);
    put_tensors(&t, "twins", twins);
    put_tensors(&t, "oxs", oxs);
    PUT_LIST("ons", ons, "%lld", long long);
    PUT_LIST("ofs", ofs, "%.17e", double);
    PUT_LIST("obs", obs, "%d", int);
    PUT_LIST("opair", opair, "%lld", long long);
    PUT_NUMBER("last", &last, "%lld", long long);
    end(&t, '}');
    OPJIT_CHECK(n != -1, "asked to fail with %s", s);
    OPJIT_TRY(opjit_empty(report, 1, (int64_t[]){(int64_t)t.len - 1}, OPJIT_UINT8, x));
    memcpy(report->data, t.data, t.len - 1);
    OPJIT_CHECK(n != -2, "asked to fail late with %s", s);
    *n2 = 2 * n;
    *f2 = 2 * f;
    *nb = !b;
    OPJIT_TRY(opjit_empty_like(copy, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++) {
        size_t size = opjit_dtype_size(x->dtype);
        memcpy((char *)copy->data + (size_t)opjit_offset(copy, i) * size,
               (const char *)x->data + (size_t)opjit_offset(x, i) * size, size);
    }
    return OPJIT_OK;
}
