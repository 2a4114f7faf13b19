#include "../assertion.h"
