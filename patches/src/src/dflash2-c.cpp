#include "dflash2.h"

#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-ext.h"

// The patch that makes the lattice compact brings this header, and with it the layout in use.
#if __has_include("dflash2-lattice.h")
#    include "dflash2-lattice.h"
#else
static int32_t dflash2_lattice_layout_in_use() {
    return 1;
}
#endif

int32_t dflash2_abi_version(void) {
    return DFLASH2_ABI_VERSION;
}

int32_t dflash2_lattice_layout(void) {
    return dflash2_lattice_layout_in_use();
}

int32_t dflash2_model_selector_top_k(const struct llama_model * model) {
    return model != nullptr ? llama_model_dflash_selector_top_k(model) : 0;
}

bool dflash2_set_embeddings_layer_inp(struct llama_context * ctx, uint32_t layer, bool value) {
    if (ctx == nullptr || layer >= ctx->get_cparams().embeddings_layer_inp.size()) {
        return false;
    }
    llama_set_embeddings_layer_inp(ctx, layer, value);
    return true;
}

float * dflash2_get_embeddings_layer_inp(struct llama_context * ctx, uint32_t layer) {
    if (ctx == nullptr) {
        return nullptr;
    }
    const auto & kept = ctx->get_cparams().embeddings_layer_inp;
    return layer < kept.size() && kept[layer] ? llama_get_embeddings_layer_inp(ctx, layer) : nullptr;
}

void dflash2_set_embeddings_nextn(struct llama_context * ctx, bool value, bool masked) {
    if (ctx != nullptr) {
        llama_set_embeddings_nextn(ctx, value, masked);
    }
}

float * dflash2_get_embeddings_nextn(struct llama_context * ctx) {
    return ctx != nullptr ? llama_get_embeddings_nextn(ctx) : nullptr;
}
