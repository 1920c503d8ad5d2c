#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Target architectures that publish layer inputs in this library and not in an unpatched one: GGUF names, separated by
// commas. With `output`, only those of them that publish the last layer's output too.
LLAMA_API const char * dflash2_tapped_architectures(bool output);

#ifdef __cplusplus
}
#endif
