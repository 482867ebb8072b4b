"""GGUF file to Hugging Face folder, for Llama models with a byte-level BPE tokenizer.

It undoes what llama.cpp's converter did: quantisation, and the order of the rows of the query and
key projections. What it does not know (another architecture, RoPE scaling, another tokenizer) it
refuses. The tokenizer is built from the file as well, with the split into single digits that the
model was trained with and that transformers' own reading of a GGUF file leaves out.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
_NORMAL_TOKEN = 1

_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in ``gguf`` to ``folder``, in bfloat16.

    The weights are renamed into place last: a folder that has them is complete.

    Raises:
        NotImplementedError: the file holds something this converter does not know.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, has_lm_head=any(t.name == "output.weight" for t in reader.tensors))
    tokenizer = _tokenizer(fields)
    weights = _weights(reader, config)

    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    tokenizer.save(str(folder / "tokenizer.json"))
    partial = folder / "model.safetensors.partial"
    partial.write_bytes(save(weights, metadata={"format": "pt"}))
    os.replace(partial, folder / "model.safetensors")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any], has_lm_head: bool) -> dict[str, Any]:
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise NotImplementedError(f"architecture '{architecture}'; expected 'llama'")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise NotImplementedError(f"RoPE scaling '{scaling}'; expected none")
    num_heads = fields["llama.attention.head_count"]
    hidden_size = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        # the layout of transformers 4, which version 5 reads; without it 5 takes the tokenizer for
        # one with a known fault and warns
        "transformers_version": "4.57.0",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", num_heads),
        "head_dim": fields.get("llama.attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": fields["llama.context_length"],
        # stored as float32: 9.999999747e-06 is 1e-05
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": not has_lm_head,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    ids = {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The special ids, and the end of a text beside the end of a turn as a reason to stop."""
    ids: dict[str, Any] = _special_ids(fields)
    tokens = fields["tokenizer.ggml.tokens"]
    if "eos_token_id" in ids and "<|endoftext|>" in tokens:
        stops = (ids["eos_token_id"], tokens.index("<|endoftext|>"))
        ids["eos_token_id"] = list(dict.fromkeys(stops))
    return ids


def _weights(reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if layer and layer[2] in _LAYER_TENSORS:
            name = f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.weight"
            if layer[2] in heads:
                values = _half_split(values, heads[layer[2]])
        elif tensor.name in _GLOBAL_TENSORS:
            name = _GLOBAL_TENSORS[tensor.name]
        else:
            raise NotImplementedError(f"tensor '{tensor.name}' of a Llama model")
        # a copy: some of the values are views of the read-only file
        weights[name] = torch.tensor(values).to(torch.bfloat16)
    return weights


def _half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of each head back in the order of Hugging Face's RoPE.

    GGUF keeps the two rows that one angle rotates side by side, ``a0 b0 a1 b1 ...``; Hugging Face
    keeps them half a head apart, ``a0 a1 ... b0 b1 ...``.
    """
    num_rows, num_columns = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.transpose(0, 2, 1, 3).reshape(num_rows, num_columns)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    kind = (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise NotImplementedError(f"tokenizer {kind}; expected ('gpt2', 'smollm')")
    if fields.get("tokenizer.ggml.add_bos_token", False):
        raise NotImplementedError("a tokenizer that puts a token before every text")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if unknown := set(types) - {_NORMAL_TOKEN, _CONTROL_TOKEN}:
        raise NotImplementedError(f"token types {sorted(unknown)}")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    for stored, name in names.items():
        number = fields.get(f"tokenizer.ggml.{stored}_token_id")
        if number is not None:
            config[name] = tokens[number]
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
