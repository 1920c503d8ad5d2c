// Causality inside a DFlash block, per kind of layer.
//
// A drafter may be causal in its sliding-attention layers and not in its full ones. Each kind has a cache, and so a mask,
// of its own: `dflash.attention.causal` is the rule of every layer, `dflash.attention.causal_swa`, where a file has it,
// that of the sliding ones.
#pragma once

#include "llama-hparams.h"

struct llama_model_loader;

// Reads `dflash.attention.causal_swa`, unless DFLASH2_NO_CAUSAL_SWA=1.
void dflash2_load_causality(llama_model_loader & ml, llama_hparams & hparams);

// Whether the mask of a cache with this kind of window is causal; `causal_attn` is the context's rule.
inline bool dflash2_causal(const llama_hparams & hparams, llama_swa_type cache, bool causal_attn) {
    const bool own_rule = cache != LLAMA_SWA_TYPE_NONE && hparams.dflash2_causal_swa >= 0;
    return own_rule ? hparams.dflash2_causal_swa == 1 : causal_attn;
}
