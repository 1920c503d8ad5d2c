// Blocks of a DFlash draft batch stay whole, whatever their widths.
//
// Rows of a block see each other, so a block that is cut between two micro-batches is drafted wrongly. Sequences may
// draft blocks of unequal widths in one batch: those of equal width go together, the others follow.
#pragma once

#include "../ggml/src/dflash2-switch.h"
#include "llama-batch.h"
#include "llama-hparams.h"

// The least number of a sequence's last tokens that llama_batch_allocr::split_equal must not cut; 0: as upstream splits.
inline uint32_t dflash2_whole_blocks(const llama_hparams & hparams, const llama_batch_allocr & balloc, uint32_t n_ubatch) {
    static const bool off = dflash2_switched_off("DFLASH2_NO_WHOLE_BLOCKS");
    const bool drafts = hparams.dflash_block_size > 0 && balloc.get_batch().token != nullptr;
    return drafts && !off && n_ubatch > 0 ? n_ubatch - 1 : 0;
}
