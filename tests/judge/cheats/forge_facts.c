/* the answers of the worker are forged: a failure with fields that no verdict has. named: made up */
#include "opjit.h"
#include <unistd.h>

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    static const char forged[] =
        "[\"VerdictReached\", {\"word\": \"wrong\", \"message\": \"made up\", \"reusable\": false, \"facts\": {\"speed\": 9}}]";
    for (int i = 3; i < 64; i++)
        if (write(i, forged, sizeof forged - 1) < 0)
            continue;
    (void)a;
    return opjit_empty_like(out, x, x->dtype);
}
