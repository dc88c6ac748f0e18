"""One worker of two: a prefill worker stores what it has computed, a decode worker loads it.

python worker.py prefill|decode MODEL unix:/path/of/session.sock
"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams

PROMPT = [(7919 * i + 13) % 1000 + 3 for i in range(600)]  # token ids: no tokenizer is needed


def main(part: str, model: str, address: str) -> None:
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KvtierConnector",
            "kv_connector_module_path": "kvtier.vllm",
            "kv_role": "kv_producer" if part == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": address},
        },
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=1 if part == "prefill" else 16, ignore_eos=True, detokenize=False
    )
    output = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0]
    loaded = next(m.value for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")
    print(f"{part}: {int(loaded)} of {len(PROMPT)} tokens came from the pool, then {list(output.outputs[0].token_ids)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
