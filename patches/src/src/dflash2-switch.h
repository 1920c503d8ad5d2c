// Environment variables that turn a change of llama-dflash2 off at run time.
#pragma once

#include <cstdlib>
#include <cstring>

// Whether `name` is set to anything but the empty text or 0; callers keep the answer, so that it is read once.
inline bool dflash2_switched_off(const char * name) {
    const char * value = std::getenv(name);
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}
