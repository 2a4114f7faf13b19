#include "../half.h"
