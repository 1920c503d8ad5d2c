#include "dflash2-causality.h"

#include "../ggml/src/dflash2-switch.h"
#include "gguf.h"
#include "llama-impl.h"
#include "llama-model-loader.h"

void dflash2_load_causality(llama_model_loader & ml, llama_hparams & hparams) {
    static const bool off = dflash2_switched_off("DFLASH2_NO_CAUSAL_SWA");
    const int64_t key = gguf_find_key(ml.metadata, "dflash.attention.causal_swa");
    if (off || key < 0 || gguf_get_kv_type(ml.metadata, key) != GGUF_TYPE_BOOL) {
        return;
    }
    hparams.dflash2_causal_swa = gguf_get_val_bool(ml.metadata, key) ? 1 : 0;
    LLAMA_LOG_INFO("%s: sliding layers are %s inside a block\n", __func__, hparams.dflash2_causal_swa ? "causal" : "not causal");
}
