// Kill switches: an environment variable set to 1 turns a kernel off.
#pragma once

#include <cstdlib>

static inline bool dflash2_switched_off(const char * name) {
    const char * env = std::getenv(name);
    return env != nullptr && std::atoi(env) == 1;
}
