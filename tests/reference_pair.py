"""The PyTorch side of a pair: the target rebuilt from its GGUF, the drafter by the `dflash` package."""

import gguf
import torch
from gguf.quants import dequantize
from transformers import Qwen3Config, Qwen3ForCausalLM

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_target(path):
    """Qwen3ForCausalLM in float32 with the dequantised weights of the GGUF at `path`."""
    reader = gguf.GGUFReader(path)
    model = Qwen3ForCausalLM(_target_config(reader)).float().eval()
    weights = {_hf_name(tensor.name): _values(tensor) for tensor in reader.tensors}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights)
    return model


def _target_config(reader):
    def value(key):
        return reader.fields[f"qwen3.{key}"].contents()

    return Qwen3Config(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        max_position_embeddings=value("context_length"),
        tie_word_embeddings=True,
    )


def _hf_name(name):
    if name.startswith("blk."):
        _, layer, kind, suffix = name.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _values(tensor):
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


class Reference:
    """Proposals of the reference drafter along a given sequence of tokens."""

    def __init__(self, target_path, drafter_class, drafter_dir):
        self.target = load_target(target_path)
        self.drafter = drafter_class.from_pretrained(drafter_dir, dtype=torch.float32).eval()
        self.block = self.drafter.block_size

    @torch.inference_mode()
    def features(self, tokens):
        """Tapped hidden states of every position, [1, len(tokens), taps * hidden size]."""
        states = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        # hidden_states[0] is the embedding, so layer i's output is entry i + 1.
        return torch.cat([states[tap + 1] for tap in self.drafter.target_layer_ids], dim=-1)

    @torch.inference_mode()
    def rows(self, features, anchor, position):
        """Final-norm rows of the drafted positions, [1, B - 1, hidden size], for a block that begins at `position`."""
        ids = torch.tensor([[anchor] + [self.drafter.mask_token_id] * (self.block - 1)])
        rows = self.drafter(
            target_hidden=features[:, :position],
            noise_embedding=self.target.get_input_embeddings()(ids),
            position_ids=torch.arange(position + self.block)[None],
        )
        return rows[:, 1:]

    @torch.inference_mode()
    def proposal(self, features, anchor, position):
        """The B - 1 tokens that the reference drafts behind `anchor`."""
        rows = self.rows(features, anchor, position)
        if hasattr(self.drafter, "propose"):
            return self.drafter.propose(rows, torch.tensor([anchor]), self.target.lm_head, 0.0)[0][0].tolist()
        return self.drafter.compute_logits(rows, self.target.lm_head).argmax(-1)[0].tolist()
