"""llama.cpp's own server from the wheel xllamacpp. python llama_server.py MODEL.gguf PORT THREADS"""

import sys
import threading

import xllamacpp

model, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path = model
params.hostnames, params.port = ["127.0.0.1"], port
params.n_ctx, params.n_parallel, params.n_predict = 2048, 1, -1
params.n_batch, params.n_ubatch = 2048, 512
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.warmup = True
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
threading.Event().wait()
