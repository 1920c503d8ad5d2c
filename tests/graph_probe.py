"""What a draft context computes under one llama.cpp library: `python graph_probe.py JOB.json RESULT.npz`.

llama_cpp loads one library per process, the one that LLAMA_CPP_LIB_PATH names, and switches are read once: so every
library and every switch gets a process. A job is {kind, target, drafter, options, ...}; see `cycles` and `sequences`.
`rpc` [host:port, ...] are servers whose devices RPC0, RPC1... it may use.
"""

import ctypes
import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np

from dflash2 import DFlashLlama
from dflash2.gguf_info import read_gguf_info
from dflash2.native import Model, Placement, add_rpc_server
from dflash2.native.loader import function, llama, silence
from dflash2.native.log import captured_log
from dflash2.runtime.pair import read_pair


def cycles(job):
    """Greedy tokens behind `prompts`, `n_tokens` each: per cycle the proposal, the lattice and graphs built so far."""
    llm = DFlashLlama(job["target"], job["drafter"], depth=None, auto_disable=False, **job["options"])
    drafter, top_k = llm._session.drafter, llm._session.spec.top_k
    found = {
        "tokens": [],
        "prompts": [],
        "anchors": [],
        "positions": [],
        "proposals": [],
        "lattices": [],
        "rebuilds": [],
    }

    def record(number, cycle):
        found["prompts"].append(number)
        found["anchors"].append(cycle.anchor)
        found["positions"].append(cycle.position)
        found["proposals"].append(list(cycle.proposal))
        built = drafter.graphs_built
        found["rebuilds"].append(-1 if built is None else built)
        if top_k:
            found["lattices"].append(drafter.lattice()[1:, : top_k + top_k * top_k].copy())

    for number, prompt in enumerate(job["prompts"]):
        llm.on_cycle = partial(record, number)
        llm.reset()
        stream = llm.generate(llm.tokenize(prompt.encode()) if isinstance(prompt, str) else prompt, temp=0.0)
        found["tokens"].append([next(stream) for _ in range(job["n_tokens"])])
        stream.close()
    llm.close()
    return found


def nodes(job):
    """Operations of one draft pass in the order of its graph, from what ggml's scheduler logs of every new graph."""
    os.environ["GGML_SCHED_DEBUG"] = "2"
    llm = DFlashLlama(job["target"], job["drafter"], depth=None, auto_disable=False, **job["options"])
    stream = llm.generate(llm.tokenize(job["prompts"][0].encode()), temp=0.0)
    lines: list[str] = []
    with captured_log(lambda _level, text: lines.append(text)):
        for _ in range(job["n_tokens"]):
            next(stream)
    stream.close()
    llm.close()
    graphs = "".join(lines).split("## SPLIT #0")
    drafts = [graph for graph in graphs if "TOP_K" in graph]
    return {"nodes": re.findall(r"node #\s*\d+ \(\s*(\w+)\)", drafts[0])}


def sequences(job):
    """Lattices, or logits, of one draft batch: `blocks` [[sequence, position, width], ...] behind random features.

    `unified`: the sequences share one KV cache; `n_gpu_layers`: 0 if it is not given. The result has one array per
    block, its rows 1...
    """
    module, _ = llama()
    silence()
    placement = Placement(n_gpu_layers=job.get("n_gpu_layers", 0))
    target_model, drafter_model = (Model(job[name], placement) for name in ("target", "drafter"))
    spec = read_pair(Path(job["target"]), Path(job["drafter"]))
    contexts = []
    for model in (target_model, drafter_model):
        params = module.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 512, 64, 64
        params.n_seq_max, params.kv_unified = 4, job["unified"]
        params.n_threads = params.n_threads_batch = 1
        params.n_outputs_max = 64
        if contexts:
            params.ctx_other = contexts[0]
        contexts.append(module.llama_init_from_model(model._pointer, params))
    pointer = contexts[1]
    module.llama_set_causal_attn(pointer, spec.causal)
    if spec.top_k:
        function("llama_set_embeddings_nextn")(pointer, True, False)
    for sequence, position, _ in job["blocks"]:
        features = np.random.default_rng(sequence).standard_normal((position, spec.feature_width), np.float32)
        for start in range(0, position, 16):
            rows = features[start : start + 16]
            decode(module, pointer, rows, np.arange(start, start + len(rows)), [sequence] * len(rows))
    tokens, positions, ids = [], [], []
    for sequence, position, width in job["blocks"]:
        tokens += [5 + sequence] + [spec.mask_token] * (width - 1)
        positions += range(position, position + width)
        ids += [sequence] * width
    decode(module, pointer, np.array(tokens, np.int32), np.array(positions), ids, outputs=not spec.top_k)
    n_embd = module.llama_model_n_embd(drafter_model._pointer)
    if spec.top_k:
        address, width = function("llama_get_embeddings_nextn")(pointer), n_embd
        used = spec.top_k + spec.top_k**2
    else:
        address = ctypes.addressof(module.llama_get_logits(pointer).contents)
        width = used = len(read_gguf_info(job["target"]).metadata["tokenizer.ggml.tokens"])
    flat = (ctypes.c_float * (len(tokens) * width)).from_address(address)
    rows = np.ctypeslib.as_array(flat).reshape(len(tokens), width)[:, :used].copy()
    ends = np.cumsum([width for _, _, width in job["blocks"]])
    for context in reversed(contexts):
        module.llama_free(context)
    return {f"block{i}": part[1:] for i, part in enumerate(np.split(rows, ends[:-1]))}


def decode(module, pointer, rows, positions, sequences, *, outputs=False):
    """Evaluate tokens [n] or features [n, width] of these `sequences`."""
    n = len(rows)
    batch = module.llama_batch()
    kept = [np.ascontiguousarray(rows)]
    if rows.ndim == 1:
        batch.token = kept[0].ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        kept.append(positions.astype(np.int32))
    else:
        batch.embd = kept[0].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        kept.append(np.concatenate([positions] * 3 + [np.zeros(n, int)]).astype(np.int32))
    batch.pos = kept[1].ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    own = np.array(sequences, np.int32)
    pointers = np.array([own.ctypes.data + 4 * i for i in range(n)] + [0], np.uintp)
    ones, flags = np.ones(n, np.int32), np.full(n, outputs, np.int8)
    batch.n_seq_id = ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    batch.seq_id = pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
    batch.logits = flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
    batch.n_tokens = n
    status = module.llama_decode(pointer, batch)
    assert status == 0, status


if __name__ == "__main__":
    described = json.loads(Path(sys.argv[1]).read_text())
    for endpoint in described.get("rpc", ()):
        add_rpc_server(endpoint)
    result = {"cycles": cycles, "nodes": nodes, "sequences": sequences}[described["kind"]](described)
    np.savez(sys.argv[2], **{name: np.array(values) for name, values in result.items()})
