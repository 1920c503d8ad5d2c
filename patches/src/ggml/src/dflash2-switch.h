// Kill switches: an environment variable turns a change of llama-dflash2 off at run time.
#pragma once

#include <cstdlib>
#include <cstring>

// Whether `name` is set to anything but the empty text or 0; callers keep the answer, so that it is read once.
static inline bool dflash2_switched_off(const char * name) {
    const char * env = std::getenv(name);
    return env != nullptr && *env != '\0' && std::strcmp(env, "0") != 0;
}
