"""The benchmark table: ours alone, or ours and the peer's in one run. `python benchmarks/run.py -h` says how.

figures (arithmetic, goals), table, results, page, plots    what is made of figures
servers, client, workload, texts, machine                   what every job measures with
generator, served, llama, limits, groups, front, step, rank the jobs: each has its rows and measures them
instant_server, stub_engine, llama_server                   scripts that jobs start
command, context                                            which rows, how often, where results go
"""
