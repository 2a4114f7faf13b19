#include "../runtime_api.h"
