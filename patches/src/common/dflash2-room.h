// Room for drafts in the batches of target and drafter, whatever --batch-size and --ubatch-size say.

#pragma once

#include "common.h"
#include "llama.h"
#include "speculative.h"

#include <algorithm>
#include <cstdlib>

// Every slot's token and drafts go into one batch of the target: n_batch holds them, up to its default.
inline void dflash2_fit_batch(common_params & params) {
    const int32_t n_draft = common_speculative_n_max(&params.speculative);
    if (n_draft > 0) {
        const int64_t rows = int64_t(n_draft + 1) * std::max(params.n_parallel, 1);
        params.n_batch = std::max<int64_t>(params.n_batch, std::min<int64_t>(rows, common_params().n_batch));
    }
}

// The blocks of all slots go through a block drafter together, as one micro-batch because it is not causal.
inline void dflash2_fit_blocks(llama_context_params & cparams, const common_params & params,
        const llama_model * drafter) {
    char text[16] = {};
    if (llama_model_meta_val_str(drafter, "dflash.block_size", text, sizeof(text)) < 0) {
        return; // no block drafter
    }
    const uint32_t rows = std::max(1, std::atoi(text)) * std::max(params.n_parallel, 1);
    cparams.n_batch  = std::max(cparams.n_batch, rows);
    cparams.n_ubatch = std::max(cparams.n_ubatch, rows);
}
