#include "amount.h"

extern "C" int plus(int x)
{
    return x + AMOUNT;
}
