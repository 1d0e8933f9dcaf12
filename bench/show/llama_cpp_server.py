"""llama.cpp's own server with one slot for each concurrent request, from the package xllamacpp.

    PYTHON llama_cpp_server.py MODEL.gguf PORT SLOTS CONTEXT_TOKENS THREADS

Needs an interpreter with xllamacpp only. The settings are those that a user who serves agents would choose:
continuous batching, one KV buffer of CONTEXT_TOKENS shared by all slots, and the cache of prompts.
"""

import sys
import time

import xllamacpp


def main(model: str, port: int, slots: int, context_tokens: int, threads: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_parallel = slots
    params.n_ctx = context_tokens
    params.kv_unified = True
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = 0
    params.use_jinja = True
    params.cache_ram_mib = 8192
    params.timeout_read = params.timeout_write = 3600
    server = xllamacpp.Server(params)
    print("ready", server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
