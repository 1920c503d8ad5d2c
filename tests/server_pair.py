"""The same pair opened by llama-server and by DFlashLlama, so that their tokens and counts can be compared."""

from gguf.constants import GGMLQuantizationType

from dflash2 import DFlashLlama, native

BLOCK = 8
# Everything that decides the numbers, the same on both sides; Llama's defaults differ from llama-server's.
CONTEXT, BATCH, THREADS = 512, 512, 1
# With F16 caches, attention over 64 rows or over 512 cells uses other kernels: what goes together then shows.
EXACT_CACHES = {"type_k": GGMLQuantizationType.Q8_0, "type_v": GGMLQuantizationType.Q8_0}
EXACT_CACHE_OPTIONS = ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0")
EXACT_DRAFT_CACHE_OPTIONS = ("--spec-draft-type-k", "q8_0", "--spec-draft-type-v", "q8_0")


def server_arguments(target, drafter=None):
    """Options of llama-server; without a drafter it generates alone."""
    drafting = ["--spec-type", "draft-dflash", "--spec-draft-model", str(drafter), "--spec-draft-n-max", str(BLOCK - 1)]
    return [
        *("--model", str(target), "--ctx-size", str(CONTEXT), "--parallel", "1", "--no-kv-unified", "--fit", "off"),
        *("--batch-size", str(BATCH), "--ubatch-size", str(BATCH), "--flash-attn", "on"),
        *("--threads", str(THREADS), "--threads-batch", str(THREADS), "--cache-ram", "0"),
        *(drafting if drafter else ()),
        "--repack" if native.repacking_is_safe() else "--no-repack",
    ]


def open_llama(target, drafter, **options):
    """A DFlashLlama that computes as that server does."""
    return DFlashLlama(
        target,
        drafter,
        n_ctx=CONTEXT,
        n_batch=BATCH,
        n_ubatch=BATCH,
        flash_attn=True,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        **{"depth": None, "auto_disable": False, "verbose": False, **options},
    )


def generate(llm, prompt, n_tokens, **sampling):
    """Token ids, and the cycles that made them as (tokens generated before the cycle, accepted drafts)."""
    cycles = []
    llm.reset()
    llm.on_cycle = lambda cycle: cycles.append((cycle.position - len(prompt) + 1, cycle.accepted))
    stream = llm.generate(prompt, **{"temp": 0.0, **sampling})
    tokens = [next(stream) for _ in range(n_tokens)]
    stream.close()
    return tokens, cycles


def as_the_server_cuts(cycles, n_tokens, depth=BLOCK - 1):
    """(drafted, accepted) as llama-server counts them: it never drafts more than the tokens still wanted but one."""
    cut = [(min(depth, n_tokens - before - 1), accepted) for before, accepted in cycles]
    return [(drafted, min(drafted, accepted)) for drafted, accepted in cut if drafted > 0]
