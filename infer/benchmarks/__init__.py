"""Benchmarks: problems with their answers and tests, and prompts to decode for speed.

    problems = read_problems(name, config)                      infer.benchmarks.reading
    prompts = load_prompts(name, config, text, seed=seed)       infer.benchmarks.prompts
    rules(kind)                                                 infer.benchmarks.reading

Settings are in infer.benchmarks.config, Problem in infer.benchmarks.rows, TokenPrompt in .prompts.
"""
