// Tells callers which targets the patch "layer inputs" adds: enabling a tap that a graph does not publish aborts the
// process, so they have to know before.
// deepseek2-ocr and mistral4 are here because their graph is deepseek2's.

#include "../../include/dflash2-taps.h"

const char * dflash2_tapped_architectures(bool output) {
    return output ? "laguna" : "deepseek2,deepseek2-ocr,gemma3,glm5-next,laguna,mistral4";
}
