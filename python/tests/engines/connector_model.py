"""A Llama of random weights that a real engine loads: two layers, 3 MB, no tokenizer, the same bytes each time.

usage: connector_model.py DIR
"""

from __future__ import annotations

import json
import pathlib
import sys


def write(directory: pathlib.Path, window: int = 0, kv_heads: int = 2) -> None:
    """Writes config.json and model.safetensors. With a window the first layer attends only so far back."""
    import torch
    from safetensors.torch import save_file

    hidden, heads, head, inner, vocab, layers = 256, 4, 64, 512, 1024, 2
    random = torch.Generator().manual_seed(20261130)
    kind = torch.bfloat16

    def weights(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * scale).to(kind)

    # Embeddings and output are wide apart, so that greedy tokens depend on every block of the prompt.
    tensors = {
        "model.embed_tokens.weight": weights(vocab, hidden, scale=1.0),
        "model.norm.weight": torch.ones(hidden, dtype=kind),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (heads * head, hidden),
            "self_attn.k_proj": (kv_heads * head, hidden),
            "self_attn.v_proj": (kv_heads * head, hidden),
            "self_attn.o_proj": (hidden, heads * head),
        }.items():
            tensors[f"{at}{name}.weight"] = weights(*shape, scale=0.2)
        for name, shape in {
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            tensors[f"{at}{name}.weight"] = weights(*shape, scale=0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(hidden, dtype=kind)
    tensors["lm_head.weight"] = weights(vocab, hidden, scale=0.2)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if window:
        config |= {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
